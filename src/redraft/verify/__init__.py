"""Does what is committed come out again?"""

"""What will a release make of these files?"""

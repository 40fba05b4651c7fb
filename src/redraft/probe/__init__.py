"""Is the drafter served as it was trained?"""

"""Which start wins on equal budgets?"""

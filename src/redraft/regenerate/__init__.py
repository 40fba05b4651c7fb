"""Answers by the target itself: the corpora on which drafters are trained and measured."""

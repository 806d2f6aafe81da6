"""Accuracy with its intervals, pass@k, majority votes, and paired comparisons of two models.

It samples through any `Sampler` and scores with any reward function. It never loads or trains a model.
"""

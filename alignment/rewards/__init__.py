"""Reward functions, their parts, and the grading of final answers. It never samples or trains, and never evaluates the text
of a model as code."""

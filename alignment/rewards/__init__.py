"""Reward functions, their parts, and the grading of final answers. It never samples, trains, or
runs a model's text as code."""

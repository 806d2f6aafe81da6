"""Rewards: rules, controls and parts, functions of the user's own, and `grading/`, which compares final answers.

Functions of problems, responses and ground truths. Nothing here samples, trains, or loads a heavy library on import.
"""

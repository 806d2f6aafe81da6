"""Ablations: the design of a sweep, its warnings, its schedule on an executor, and the statistics and report of its runs.

It starts commands as processes and reads the folders that they write. It never trains, samples or scores.
"""

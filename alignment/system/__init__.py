"""Errors, signals, child processes, atomic files, locks, terminal output. It knows no model, task
or algorithm, nor torch."""

"""Sweeps over algorithmic choices: their design and its linter, executors, statistics and reports.
It never trains or samples itself: it starts the commands as child processes and reads what they
wrote."""

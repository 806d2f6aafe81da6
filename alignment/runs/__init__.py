"""The folder of a run: checkpoints, resuming, metrics, trackers and the learning curve. It never
computes what it records."""

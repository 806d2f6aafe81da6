"""One step of training: the update, old and reference log-probs, the mismatch check, the health of a run. It never samples,
and never writes to the run folder."""

"""The update of a step, old and reference log-probs, the mismatch check, SFT. It never samples or
writes to the run folder."""

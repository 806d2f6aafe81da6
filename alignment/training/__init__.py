"""The update of one step, its old and reference log-probs, the mismatch check; SFT; gradients compared. It never samples or
writes to the run folder."""

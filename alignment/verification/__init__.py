"""Checks of losses, grader, policy and sampler against the papers, known answers and plain models. It never loads a run."""

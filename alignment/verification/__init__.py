"""Checks of losses, grader, policy and sampler against the papers, known answers, plain models and
predictions."""

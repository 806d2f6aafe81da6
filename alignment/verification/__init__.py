"""Checks of losses, rules, data, samples, policy and sampler against the papers, judged answers,
splits, plain models and predictions."""

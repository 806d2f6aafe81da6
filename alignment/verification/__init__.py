"""Checks of a policy and its sampler against transformers' own models, one response at a time. It never loads a run."""

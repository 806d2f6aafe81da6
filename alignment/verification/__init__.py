"""Checks of a policy and its sampler against plain computation: transformers' own models, one response at a time. It never
loads a run."""

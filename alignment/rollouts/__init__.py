"""The way from prompts to scored rollouts: the choice of prompts, refills, groups, synchronous and asynchronous sources. It
never computes a loss and never changes a weight."""

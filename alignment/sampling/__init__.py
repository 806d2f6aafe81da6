"""Samplers, their engines, restarts of lost engines, and the transfer of new weights. It scores
nothing and trains nothing."""

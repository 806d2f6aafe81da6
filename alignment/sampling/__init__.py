"""The samplers and their engines, restarts of lost engines, and the transfer of new weights to them. It never scores a
completion and never changes a weight."""

"""The trained weights and what touches them: loading, placement, packing, optimisers, memory. It
never samples or scores."""

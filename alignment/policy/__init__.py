"""The trained weights and all that touches them: loading, placement, packing, log-probs, optimisers, memory. It never
samples or scores, and never chooses a loss."""

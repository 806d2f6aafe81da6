"""A Hugging Face model as this package computes it: loading, saving, packing, attention, log-probs
and the check of each against transformers' own. It trains nothing and knows no arguments."""

"""Log-probabilities and entropy of a policy. The code is in `alignment.model.log_probs`; this
module only names it."""

from alignment.model.log_probs import compute_entropy, get_response_log_probs

__all__ = ["compute_entropy", "get_response_log_probs"]

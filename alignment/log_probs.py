"""Log-probabilities of sampled tokens, and entropy, without logits of every position in memory at once."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

LOGITS_IN_MEMORY = 2**26  # logits computed at a time (fp32: 256 MiB)


def compute_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of softmax(logits) over the last axis: logsumexp(z) - sum(softmax(z) * z). [..., V] -> [...]."""
    logits = logits.float()
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


def cumulative(values: torch.Tensor) -> torch.Tensor:
    """Running sums over the last axis; with --deterministic by the CPU, since torch has no such kernel for GPUs."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(dim=-1).to(values.device)
    return values.cumsum(dim=-1)


def sampling_logits(
    logits: torch.Tensor, temperature: float, top_p: float, top_k: int = 0, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [N, V] of the distribution that is sampled from: z / temperature, -inf outside the `top_k` most likely tokens (0:
    all) and outside the nucleus.

    The nucleus is the smallest set of most likely tokens whose probability, among the `top_k`, reaches `top_p` (Holtzman et
    al. 2020, arXiv:1904.09751). `keep` [N] names a token a row that stays in whatever its rank: rounding, and other weights,
    can push a sampled token over the edge, and its log-probability must stay finite.
    """
    scaled = logits.float() / temperature
    top_k = min(top_k, scaled.shape[-1])
    if top_p >= 1 and not top_k:
        return scaled
    ordered, places = scaled.sort(dim=-1, descending=True)
    if top_k:
        ordered = torch.cat([ordered[:, :top_k], torch.full_like(ordered[:, top_k:], -torch.inf)], dim=-1)
    probabilities = ordered.softmax(dim=-1)
    # The first is always in: with a top_p below its probability alone.
    outside = ((cumulative(probabilities) - probabilities) >= top_p) | ordered.isneginf()
    outside = torch.zeros_like(outside).scatter(-1, places, outside)
    if keep is not None:
        outside = outside.scatter(-1, keep[:, None], False)
    return scaled.masked_fill(outside, -torch.inf)


def get_response_log_probs(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    return_token_entropy: bool = False,
    response_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> dict[str, torch.Tensor]:
    """log pi(label | prefix) in nats, fp32, for the positions in `response_mask` (everywhere when None), 0 elsewhere.

    `input_ids`, `labels`, `response_mask`: [batch, sequence], right-padded. Give the mask on the CPU: reading positions
    off a mask on a GPU would make the host wait for it. Returns {"log_probs": [batch, sequence]} on the output head's
    device, with "token_entropy" [batch, sequence] (detached) when asked. The distribution is the tempered, truncated one
    (`sampling_logits`). Logits exist for response positions only, and for a bounded number of them at a time; where
    there are more, backward computes them again.
    """
    mask = torch.ones_like(labels, dtype=torch.bool) if response_mask is None else response_mask
    places = mask.flatten().nonzero().squeeze(1)
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
    places = places.to(hidden.device, non_blocking=True)
    hidden, targets = hidden.index_select(0, places), labels.to(hidden.device).flatten().index_select(0, places)
    head = model.get_output_embeddings()

    def score(hidden_N, targets_N):
        logits = head(hidden_N)
        targets_N = targets_N.to(logits.device)
        kept = sampling_logits(logits, temperature, top_p, top_k, keep=targets_N)
        log_probs = kept.gather(-1, targets_N[:, None]).squeeze(-1) - kept.logsumexp(dim=-1)
        with torch.no_grad():
            entropy = compute_entropy(logits / temperature) if return_token_entropy else torch.zeros_like(log_probs)
        return log_probs, entropy

    rows = max(1, LOGITS_IN_MEMORY // head.weight.shape[0])
    pieces = list(zip(hidden.split(rows), targets.split(rows), strict=True))
    again = len(pieces) > 1 and torch.is_grad_enabled()
    scored = [checkpoint(score, h, t, use_reentrant=False) if again else score(h, t) for h, t in pieces]

    def everywhere(index: int) -> torch.Tensor:
        values = torch.cat([piece[index] for piece in scored])
        flat = torch.zeros(labels.numel(), dtype=values.dtype, device=values.device)
        return flat.index_copy(0, places.to(values.device), values).view(labels.shape)

    result = {"log_probs": everywhere(0)}
    return result | {"token_entropy": everywhere(1)} if return_token_entropy else result

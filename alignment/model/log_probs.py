"""Log-probabilities of sampled tokens, and entropy, without logits of every position in memory at
once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from alignment.core.records import Distribution
from alignment.core.tokens import split_rows
from alignment.model.attention import soft_capped
from alignment.model.huggingface import PreTrainedModel, input_embeddings
from alignment.model.kernels import (
    RowGradients,
    Tempering,
    fused,
    has_fused_kernels,
    label_scores,
    logit_gradient,
)
from alignment.model.packing import attention_by_layout, pack, send, takes_plain_path
from alignment.model.products import (
    added_product,
    dtype_of_products,
    fp32_product,
    gradient_to_add_to,
)

LOGITS_IN_MEMORY = 2**26  # logits computed at a time (fp32: 256 MiB)
# The same for fused kernels (fp32: 512 MiB): a piece's product for a large head's gradient takes as
# long as the sum of gradients that it is added to.
FUSED_LOGITS_IN_MEMORY = 2**27
NUCLEUS_TOKENS = 512  # of each row that are sorted first to find its nucleus
# logits gone over at a time, where passes over memory take the time
LOGITS_IN_CACHE = {"cpu": 2**20}

EntropyKind = Literal["none", "detached", "differentiable"]
"""Whether entropies are computed, and whether they have a gradient."""


@contextmanager
def few_logits_at_a_time(number: int) -> Iterator[None]:
    """Within the block this process computes `number` logits at a time at most, and goes over half
    of them at a time: as many pieces of few rows as a larger batch or vocabulary takes."""
    global LOGITS_IN_MEMORY, FUSED_LOGITS_IN_MEMORY
    before = (LOGITS_IN_MEMORY, FUSED_LOGITS_IN_MEMORY, LOGITS_IN_CACHE["cpu"])
    LOGITS_IN_MEMORY = number
    FUSED_LOGITS_IN_MEMORY = number
    LOGITS_IN_CACHE["cpu"] = number // 2
    try:
        yield
    finally:
        LOGITS_IN_MEMORY, FUSED_LOGITS_IN_MEMORY, LOGITS_IN_CACHE["cpu"] = before


def compute_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of softmax(logits) over the last axis: logsumexp(z) - sum(softmax(z) * z).
    [..., V] -> [...]."""
    logits = logits.float()
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


def cumulative(values: torch.Tensor) -> torch.Tensor:
    """Running sums over the last axis; with --deterministic by the CPU, since torch has no such
    kernel for GPUs."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(dim=-1).to(values.device)
    return values.cumsum(dim=-1)


def sampling_logits(
    logits: torch.Tensor,
    temperature: float,
    top_p: float,
    top_k: int = 0,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [N, V] that are sampled from: z / temperature, -inf outside the `top_k` most likely
    tokens (0: all) and the nucleus, the smallest set of most likely tokens whose probability, among
    the `top_k`, reaches `top_p` (Holtzman et al. 2020, arXiv:1904.09751). `keep` [N]: a token of
    each row that stays in, although rounding or other weights may put it out."""
    scaled = logits.float() / temperature
    top_k = min(top_k, scaled.shape[-1])
    if top_p >= 1 and not top_k:
        return scaled
    edge_N1, kept_N1 = truncation_edge(scaled, top_p, top_k)
    outside = scaled < edge_N1
    at_edge = scaled == edge_N1
    if (at_edge.sum(dim=-1, keepdim=True) > kept_N1).any():
        # of tokens that are equally likely the first ones are kept
        outside |= at_edge & (at_edge.cumsum(dim=-1, dtype=torch.int32) > kept_N1)
    if keep is not None:
        outside.scatter_(-1, keep[:, None], False)
    return scaled.masked_fill(outside, -torch.inf)


def truncation_edge(
    logits: torch.Tensor, top_p: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logit of the least likely token that stays in each row of [N, V], and how many tokens
    with that logit stay: [N, 1]. Sorts a few tokens, and more where these do not reach `top_p`:
    most nuclei are small; sorting all takes ten times longer."""
    number = top_k or NUCLEUS_TOKENS
    while True:
        ordered = logits.topk(min(number, logits.shape[-1]), dim=-1).values
        highest_N1 = ordered[:, :1]
        weights = (ordered - highest_N1).exp()
        # The nucleus is that of the distribution within the `top_k`, or of all tokens.
        normalised_over = weights if top_k else (logits - highest_N1).exp()
        probabilities = weights / normalised_over.sum(dim=-1, keepdim=True)
        kept = (cumulative(probabilities) - probabilities) < top_p
        if top_k or number >= logits.shape[-1] or not kept[:, -1].any():
            break
        number *= 8
    # The first is always in: with a top_p below its probability, and where logits are not finite.
    edge_N1 = ordered.gather(-1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    return edge_N1, (kept & (ordered == edge_N1)).sum(dim=-1, keepdim=True)


def get_response_log_probs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    return_token_entropy: bool = False,
    response_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> dict[str, torch.Tensor]:
    """log pi(label | prefix) in nats, fp32, for the positions in `response_mask` (everywhere when
    None), 0 elsewhere.

    `input_ids`, `labels`, `response_mask`: [batch, sequence], right-padded, on the CPU: on a GPU
    the host would wait to read where rows end and which share a prompt. Returns {"log_probs":
    [batch, sequence]} on the output head's device; if `return_token_entropy` also, detached and of
    that shape, "token_entropy" of the tempered distribution and "sampling_entropy" of the tempered,
    truncated one (`sampling_logits`), which log-probs are taken under.

    Computes no padding, a shared prompt once (`packing.Packing`), and logits for the mask's
    positions, some at a time; on the plain path, padding and all logits. Raises ValueError for a
    model that does not hand on what its attention is told."""
    labels = labels.cpu()
    if response_mask is None:
        response_mask = torch.ones_like(labels, dtype=torch.bool)
    mask = response_mask.cpu()
    distribution = Distribution(temperature, top_p, top_k)
    hidden_NH = hidden_states(model, input_ids.cpu(), mask)
    entropy = "detached" if return_token_entropy else "none"
    return head_log_probs(model, hidden_NH, labels, mask, distribution, entropy)


def hidden_states(
    model: PreTrainedModel, input_ids: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """The first half of `get_response_log_probs`: what the output head is given for the mask's N
    positions, [N, hidden], in the order of the flattened mask. On the plain path these are the
    logits themselves, [N, V]."""
    if takes_plain_path(model):
        return padded_logits(model, input_ids, response_mask)
    packing = pack(split_rows(input_ids, response_mask), has_fused_kernels(model))
    device = input_embeddings(model).device
    ids = send(packing.input_ids_1N, device)
    positions = send(packing.position_ids_1N, device)
    decoder = model.get_decoder()
    with attention_by_layout(model, packing):
        hidden = decoder(
            input_ids=ids, position_ids=positions, use_cache=False, layout=packing
        ).last_hidden_state
    spots_N = packing.spots_BT[response_mask[:, : packing.spots_BT.shape[1]]]
    return hidden[0].index_select(0, send(spots_N, hidden.device))


def padded_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The model's own logits [N, V] at the N positions of a right-padded mask [batch, sequence],
    flattened."""
    device = input_embeddings(model).device
    last_B1 = mask.int().cumsum(dim=1).argmax(dim=1, keepdim=True)
    attention_mask = (torch.arange(mask.shape[1]) <= last_B1).long()
    logits = model(
        input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=False
    ).logits
    return logits[mask.to(logits.device)]


def head_log_probs(
    model: PreTrainedModel,
    hidden_NH: torch.Tensor,
    labels: torch.Tensor,
    response_mask: torch.Tensor,
    distribution: Distribution = Distribution(),
    entropy: EntropyKind = "none",
) -> dict[str, torch.Tensor]:
    """The second half of `get_response_log_probs`, from the hidden states at the mask's positions.
    With `entropy` "differentiable", "token_entropy" has its gradient, too."""
    head: Any = model.get_output_embeddings()
    device = head.weight.device
    hidden_NH = send(hidden_NH, device)
    targets_N = send(labels[response_mask], device)
    if takes_plain_path(model):
        log_probs_N, entropies_2N = logits_log_probs(hidden_NH, targets_N, distribution, entropy)
    else:
        scale, soft_cap = logit_scale_and_cap(model.config)
        # Logits s * z at temperature T are z at temperature T / s.
        scaled = replace(distribution, temperature=distribution.temperature / scale)
        weight_VH = head.weight
        # A bias is the weight of one more input, which is always 1.
        if getattr(head, "bias", None) is not None:
            hidden_NH = torch.nn.functional.pad(hidden_NH, (0, 1), value=1.0)
            weight_VH = torch.cat([weight_VH, head.bias[:, None]], dim=1)
        if has_fused_kernels(model) and not truncates(distribution):
            log_probs_N, entropies_N = FusedLabelLogProbs.apply(
                hidden_NH, weight_VH, targets_N, Tempering(scaled.temperature, soft_cap)
            )
            if entropy == "detached":
                entropies_N = entropies_N.detach()
            entropies_2N = entropies_N.expand(2, -1)
        else:
            log_probs_N, entropies_2N = LabelLogProbs.apply(
                hidden_NH, weight_VH, targets_N, scaled, entropy, soft_cap
            )
    values = {"log_probs": log_probs_N}
    if entropy != "none":
        values["token_entropy"] = entropies_2N[0]
        values["sampling_entropy"] = entropies_2N[1].detach()
    places = send(response_mask.flatten().nonzero().squeeze(1), device)
    zeros = torch.zeros(labels.numel(), device=device)
    values_BT = {}
    for name, values_N in values.items():
        values_BT[name] = zeros.index_copy(0, places, values_N).view(labels.shape)
    return values_BT


def logit_scale_and_cap(config) -> tuple[float, float | None]:
    """Scale s (Cohere, Granite) and soft cap c (Gemma) of logits s * z, or s * c * tanh(z / c), of
    a head's output z."""
    divisor = getattr(config, "logits_scaling", None) or 1
    scale = getattr(config, "logit_scale", None) or 1 / divisor
    return scale, getattr(config, "final_logit_softcapping", None)


def head_logits(model: PreTrainedModel, hidden_NH: torch.Tensor) -> torch.Tensor:
    """The logits [N, V] after hidden states that `head_log_probs` has, in fp32, for sampling."""
    scale, soft_cap = logit_scale_and_cap(model.config)
    head: Any = model.get_output_embeddings()
    logits = fp32_product(hidden_NH, head.weight.T)
    if getattr(head, "bias", None) is not None:
        logits = logits + head.bias
    logits = soft_capped(logits, soft_cap)
    return logits if scale == 1 else logits * scale


def logits_log_probs(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    distribution: Distribution,
    entropy: EntropyKind,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs [N] and the entropies [2, N] that `LabelLogProbs` returns, from logits, by
    autograd; without entropies [0, N] of them."""
    kept_NV = sampling_logits(logits_NV, **vars(distribution), keep=labels_N)
    log_probs_N = kept_NV.log_softmax(dim=-1).gather(-1, labels_N[:, None]).squeeze(1)
    if entropy == "none":
        return log_probs_N, log_probs_N.detach().new_empty(0, len(log_probs_N))
    if entropy == "detached":
        logits_NV = logits_NV.detach()
    tempered_NV = logits_NV.float() / distribution.temperature
    # -p log p, and 0 where p is 0
    truncated_N = torch.special.entr(kept_NV.detach().softmax(dim=-1)).sum(dim=-1)
    return log_probs_N, torch.stack([compute_entropy(tempered_NV), truncated_N])


class LabelLogProbs(torch.autograd.Function):
    """log softmax(h W^T)[label] of the tempered, truncated distribution, and entropies, without all
    logits in memory.

    (hidden [N, H], weight [V, H], labels [N], `Distribution`, `EntropyKind`, soft cap c or None) ->
    log-probs [N] and entropies [2, N] of the tempered and of the truncated distribution (zeros for
    "none"; the first has a gradient where it is "differentiable"), fp32. With p = softmax of a row,
    d(log p_y)/dz = (1[y] - p) / temperature, and dH/dz = -p (log p + H) / temperature, times
    1 - tanh(z / c)^2 with a cap. Rows go in pieces of `LOGITS_IN_MEMORY` logits; backward computes
    p again, except for a single piece without a cap."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, labels_N, distribution, entropy, soft_cap=None):
        device_type = hidden_NH.device.type
        ctx.dtype = dtype_of_products(weight_VH)
        ctx.distribution = distribution
        ctx.soft_cap = soft_cap
        ctx.probabilities = None
        ctx.entropy_has_gradient = entropy == "differentiable"
        # The gradient of the entropy takes as much memory again as the logits.
        ctx.logits_of_row = weight_VH.shape[0] * (2 if ctx.entropy_has_gradient else 1)
        pieces = row_pieces(len(hidden_NH), ctx.logits_of_row)
        keeps = len(pieces) == 1 and soft_cap is None and any(ctx.needs_input_grad[:2])
        with torch.autocast(device_type, enabled=False):
            weight = weight_VH.to(ctx.dtype)
            hidden = hidden_NH.to(ctx.dtype)
            log_probs_N = torch.zeros(len(hidden), device=hidden.device)
            entropies_2N = torch.zeros(2, len(hidden), device=hidden.device)
            for piece in pieces:
                logits = soft_capped(fp32_product(hidden[piece], weight.T), soft_cap)
                entropies = None if entropy == "none" else entropies_2N[:, piece]
                score_in_place(logits, labels_N[piece], distribution, log_probs_N[piece], entropies)
                if keeps:
                    ctx.probabilities = logits
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, entropies_2N[0])
        if not ctx.entropy_has_gradient:
            ctx.mark_non_differentiable(entropies_2N)
        return log_probs_N, entropies_2N

    @staticmethod
    def backward(ctx, gradient_N, entropy_gradient_2N):
        hidden_NH, weight_VH, labels_N, entropies_N = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        to_hidden = None
        to_weight = None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight = weight_VH.to(ctx.dtype)
            hidden = hidden_NH.to(ctx.dtype)
            if for_hidden:
                to_hidden = torch.empty_like(hidden)
            for piece in row_pieces(len(hidden), ctx.logits_of_row):
                slope = None
                by_entropy = None
                if ctx.probabilities is not None:
                    probabilities = ctx.probabilities
                else:
                    probabilities = soft_capped(fp32_product(hidden[piece], weight.T), ctx.soft_cap)
                    if ctx.soft_cap is not None:
                        slope = 1 - (probabilities / ctx.soft_cap).square()
                    score_in_place(probabilities, labels_N[piece], ctx.distribution)
                if ctx.entropy_has_gradient:
                    by_entropy = probabilities
                    if truncates(ctx.distribution):
                        # The entropy is of the distribution before truncation.
                        logits = soft_capped(fp32_product(hidden[piece], weight.T), ctx.soft_cap)
                        by_entropy = (logits / ctx.distribution.temperature).softmax(dim=-1)
                    by_entropy = entropy_slope(by_entropy, entropies_N[piece])
                    gradient_n = entropy_gradient_2N[0, piece] / ctx.distribution.temperature
                    by_entropy.mul_(gradient_n[:, None])
                ctx.probabilities = None  # they are written over here
                # (1[y] - p) * gradient / temperature, times 1 - tanh(z / c)^2 with a soft cap c.
                scale_n1 = (gradient_N[piece] / ctx.distribution.temperature)[:, None]
                by_logits = probabilities.mul_(-scale_n1)
                by_logits = by_logits.scatter_add_(1, labels_N[piece][:, None], scale_n1)
                if by_entropy is not None:
                    by_logits = by_logits.add_(by_entropy)
                if slope is not None:
                    by_logits = by_logits.mul_(slope)
                by_logits = by_logits.to(ctx.dtype)
                if to_hidden is not None:
                    to_hidden[piece] = by_logits @ weight
                if for_weight:
                    to_weight = added_product(
                        to_weight, by_logits.T, hidden[piece], weight_VH.dtype
                    )
        if to_hidden is not None:
            to_hidden = to_hidden.to(hidden_NH.dtype)
        return to_hidden, to_weight, None, None, None, None


class FusedLabelLogProbs(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], labels [N], `Tempering`) -> log-probs [N] and entropies [N] of
    the tempered distribution, as `LabelLogProbs` returns where nothing is truncated, by kernels
    that read logits where they are and write the gradient in the type of products. Both have a
    gradient. Backward computes logits again, except for a single piece."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, labels_N, tempering):
        ctx.dtype = dtype_of_products(weight_VH)
        ctx.hidden_dtype = hidden_NH.dtype
        ctx.tempering = tempering
        ctx.logits = None
        ctx.set_materialize_grads(False)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight = weight_VH.to(ctx.dtype)
            hidden = hidden_NH.to(ctx.dtype)
            scores_3N = torch.zeros(3, len(hidden), device=hidden.device)
            pieces = row_pieces(len(hidden), len(weight), FUSED_LOGITS_IN_MEMORY)
            for piece in pieces:
                logits = fp32_product(hidden[piece], weight.T)
                scores_3N[:, piece] = fused(label_scores)(logits, labels_N[piece], tempering)
                if len(pieces) == 1 and any(ctx.needs_input_grad[:2]):
                    ctx.logits = logits
                del logits  # before the next piece's are made
        ctx.save_for_backward(hidden, weight_VH, weight, labels_N, scores_3N)
        return scores_3N[0].clone(), scores_3N[1].clone()

    @staticmethod
    def backward(ctx, gradient_N, entropy_gradient_N):
        hidden, weight_VH, weight, labels_N, scores_3N = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        to_hidden = torch.empty_like(hidden) if for_hidden else None
        # Several passes' gradients of a large head are one matrix.
        total = gradient_to_add_to(weight_VH)
        to_weight = total
        dtype = weight_VH.dtype
        if gradient_N is None:
            gradient_N = torch.zeros_like(scores_3N[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for piece in row_pieces(len(hidden), len(weight), FUSED_LOGITS_IN_MEMORY):
                logits = ctx.logits
                if logits is None:
                    logits = fp32_product(hidden[piece], weight.T)
                gradients = RowGradients(gradient_N[piece])
                if entropy_gradient_N is not None:
                    gradients = RowGradients(gradient_N[piece], entropy_gradient_N[piece])
                by_logits = fused(logit_gradient)(
                    logits,
                    labels_N[piece],
                    scores_3N[:, piece],
                    gradients,
                    ctx.tempering,
                    ctx.dtype,
                )
                if to_hidden is not None:
                    to_hidden[piece] = by_logits @ weight
                if for_weight:
                    to_weight = added_product(to_weight, by_logits.T, hidden[piece], dtype)
                del logits, by_logits  # before the next piece's are made
        ctx.logits = None
        if to_hidden is not None:
            to_hidden = to_hidden.to(ctx.hidden_dtype)
        return to_hidden, None if to_weight is total else to_weight, None, None


def entropy_slope(probabilities_NV: torch.Tensor, entropies_N: torch.Tensor) -> torch.Tensor:
    """dH/dz = -p (log p + H) [N, V] of the entropy H of p = softmax(z), 0 where p is 0."""
    return torch.special.entr(probabilities_NV).addcmul_(
        probabilities_NV, entropies_N[:, None], value=-1
    )


def truncates(distribution: Distribution) -> bool:
    """Whether a distribution leaves tokens out."""
    return distribution.top_p < 1 or distribution.top_k > 0


def row_pieces(rows: int, vocabulary: int, most: int | None = None) -> list[slice]:
    """Rows cut evenly into as few pieces as keep to `most` logits (None: `LOGITS_IN_MEMORY`); one
    empty piece of none."""
    most = most or LOGITS_IN_MEMORY
    if rows == 0:
        return [slice(0, 0)]
    number = max(1, -(-rows * vocabulary // most))
    size = -(-rows // number)
    pieces = []
    for start in range(0, rows, size):
        end = min(start + size, rows)
        pieces.append(slice(start, end))
    return pieces


def score_in_place(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    distribution: Distribution,
    log_probs_N: torch.Tensor | None = None,
    entropies_2N: torch.Tensor | None = None,
) -> None:
    """Turn fp32 logits into the probabilities of the tempered, truncated distribution. Write the
    labels' log-probs to `log_probs_N`, and the entropies of the tempered and of the truncated
    distribution to the rows of `entropies_2N`."""
    leaves_out = truncates(distribution)
    in_cache = LOGITS_IN_CACHE.get(logits_NV.device.type, LOGITS_IN_MEMORY)
    size = max(1, in_cache // logits_NV.shape[1])
    for start in range(0, len(logits_NV), size):
        rows = slice(start, start + size)
        z = logits_NV[rows]
        if entropies_2N is not None and leaves_out:
            entropies_2N[0, rows] = compute_entropy(z / distribution.temperature)
        kept = sampling_logits(z, **vars(distribution), keep=labels_N[rows])
        log_p = kept.sub_(kept.logsumexp(dim=-1, keepdim=True))
        if log_probs_N is not None:
            log_probs_N[rows] = log_p.gather(-1, labels_N[rows][:, None]).squeeze(-1)
        if entropies_2N is None:
            torch.exp(log_p, out=z)
        elif leaves_out:
            torch.exp(log_p, out=z)
            # -p log p, and 0 where p is 0
            entropies_2N[1, rows] = torch.special.entr(z).sum(dim=-1)
        else:
            p = log_p.exp()
            entropies_2N[:, rows] = -(p * log_p).sum(dim=-1)
            z.copy_(p)

"""The optimiser updates made on one rollout, and the old policy that clipped losses compare with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from alignment.args import RLArgs
from alignment.core.rollout import Rollout
from alignment.core.tokens import cut_by_tokens, packed_tokens, split_rows, take_rows
from alignment.core.train_step import loss_denominator
from alignment.policy.layer_split import IN_FLIGHT, MicroBatch, pipelined
from alignment.policy.loading import devices_of, set_learning_rate
from alignment.policy.parallel_micro_batches import cut_for_parallel, run_parallel
from alignment.training.references import rows_with_gradient

Seen = Sequence[tuple[Sequence[int], torch.Tensor]]
"""Rows, and their log-probs, of one micro-batch after another."""


def update(
    policy,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    args: RLArgs,
    step: int,
    dtype: torch.dtype,
    before_weights_change: Callable[[Seen], None] = lambda seen: None,
) -> tuple[dict[str, float | None], torch.Tensor, list[Sequence[int]]]:
    """All optimiser updates of one rollout. Returns their report, the log-probs [B, T] that the first pass saw (of the rows
    that carry a gradient), and the rows of each mini-batch whose loss or gradient was not finite, for which no update was made.

    Rows without a gradient are counted in every denominator, but not computed. `before_weights_change` is called before each
    optimiser step with the rows and log-probs that its mini-batch has computed.

    Nothing in here waits for a device but the check of each gradient, so that on a split policy one micro-batch's late
    layers run beside the next ones' early layers.
    """
    policy.train()
    lengths, totals, norms = rollout.lengths, [], []
    seen: list[tuple[Sequence[int], torch.Tensor]] = []
    bad: list[Sequence[int]] = []
    size = args.train_mini_batch_size or len(lengths)
    telling = set(rows_with_gradient(rollout, args))
    for epoch in range(args.epochs_per_rollout):
        order = shuffled_groups(rollout.trained_rows, args.group_size, f"update {args.seeds['data']} {step} {epoch}")
        for mini_batch in (order[start : start + size] for start in range(0, len(order), size)):
            denominator = loss_denominator(args.loss_normalization, [lengths[row] for row in mini_batch], args.max_new_tokens)
            found = []
            for rows, log_probs, sums in backward(
                policy, rollout, [row for row in mini_batch if row in telling], denominator, args, dtype
            ):
                found.append(sums)
                seen.append((rows, log_probs))
            if not found:  # a gradient of zeros, for which Adam's moments move all the same
                for parameter in policy.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            set_learning_rate(optimizer, learning_rate(args, (step - 1) * args.updates_per_rollout + len(norms) + len(bad) + 1))
            if is_finite(norm, found):
                before_weights_change(seen[len(seen) - len(found) :])
                optimizer.step()
                totals += found
                norms.append(norm)
            else:
                bad.append(mini_batch)
            optimizer.zero_grad(set_to_none=True)
    first_pass_BT = torch.zeros(rollout.batch.labels.shape)
    for rows, log_probs in reversed(seen):
        first_pass_BT[rows, : log_probs.shape[1]] = log_probs.cpu()
    report = update_report(totals, norms, optimizer.param_groups[0]["lr"])
    report |= {"rows_with_gradient": len(telling), "bad_updates": len(bad)}
    padded = rollout.batch.labels.numel() * args.epochs_per_rollout
    return {**report, "update_token_share": report["update_tokens"] / padded}, first_pass_BT, bad


def shuffled_groups(rows: Sequence[int], group_size: int, seed: str) -> list[int]:
    """The rows in a random order of their groups: a mini-batch that holds a group whole computes its prompt once."""
    groups = [list(own) for _, own in itertools.groupby(rows, lambda row: row // group_size)]
    return [row for group in random.Random(seed).sample(groups, len(groups)) for row in group]


def is_finite(norm: torch.Tensor, sums: Sequence[dict[str, torch.Tensor]]) -> bool:
    """Whether a mini-batch's gradient norm and the losses of its micro-batches are numbers."""
    losses = sum((part["loss"].to(norm.device) for part in sums), start=torch.zeros_like(norm))
    return bool((torch.isfinite(norm) & torch.isfinite(losses)).item())


def backward(
    policy, rollout: Rollout, mini_batch: Sequence[int], denominator: float, args: RLArgs, dtype: torch.dtype
) -> Iterator[tuple[Sequence[int], torch.Tensor, dict[str, torch.Tensor]]]:
    """Add some rows' gradient to the policy; yields each micro-batch's rows, log-probs and sums.

    Several micro-batches are in flight, each with its part of the tokens: on a split policy so that all devices are at work
    (`pipelined`), on a CPU so that all cores are (`run_parallel`).
    """
    if not mini_batch:
        return
    chosen = take_rows(rollout.batch, mini_batch)
    split = split_rows(chosen.input_ids, chosen.response_mask)

    def begun(piece: Sequence[int]) -> MicroBatch:
        return MicroBatch(policy, [mini_batch[i] for i in piece], rollout, denominator, args, dtype)

    def whole(piece: Sequence[int]) -> MicroBatch:
        micro_batch = begun(piece)
        micro_batch.head()
        micro_batch.backward()
        return micro_batch

    devices = devices_of(policy)
    if len(devices) > 1:
        longest = max(len(prompt) + len(response) for prompt, response in split)
        in_flight = max(1, min(IN_FLIGHT * len(devices), args.micro_batch_tokens // longest))
        pieces = cut_by_tokens(split, max(1, args.micro_batch_tokens // in_flight))
        done = pipelined(begun, pieces, in_flight, policy, dtype)
    else:
        pieces, lanes = cut_for_parallel(policy, split, args.micro_batch_tokens)
        done = run_parallel(whole, pieces, lanes, policy.parameters())
    for micro_batch, piece in zip(done, pieces, strict=True):
        tokens = packed_tokens([split[i] for i in piece])
        yield micro_batch.rows, micro_batch.log_probs, {"tokens": tokens, **micro_batch.sums}


def learning_rate(args: RLArgs, update_number: int) -> float:
    """Linear rise over --warmup_steps updates (from 1), constant after."""
    return args.learning_rate * min(1.0, update_number / max(1, args.warmup_steps))


_MEANS = {"kl": "kl_sum", "correction_mean": "weight_sum"}  # over response tokens, where the loss has them


def update_report(
    totals: Sequence[dict[str, torch.Tensor]], norms: Sequence[torch.Tensor], rate: float
) -> dict[str, float | None]:
    """Losses averaged over updates; entropy, ratio and clip fraction over the response tokens that carry a gradient; the tokens
    that were computed, shared prompts once. None where no update was made, or no token carries a gradient."""
    report = {"loss": None, "entropy": None, "grad_norm": None, "learning_rate": rate, "updates": len(norms)}
    report["update_tokens"] = sum(sums["tokens"] for sums in totals)
    if not norms:
        return report
    report["loss"] = sum(sums["loss"].item() for sums in totals) / len(norms)
    report["grad_norm"] = sum(norm.item() for norm in norms) / len(norms)
    if not totals:
        return report
    tokens = sum(sums["response_tokens"].item() for sums in totals)

    def mean(key: str) -> float:
        return sum(sums[key].item() for sums in totals) / tokens

    report["entropy"] = mean("entropy_sum")
    if "ratio_sum" in totals[0]:
        report["clip_fraction"] = mean("clipped_tokens")
        report["ratio_mean"] = mean("ratio_sum")
        report["ratio_max"] = max(sums["ratio_max"].item() for sums in totals)
    return report | {name: mean(key) for name, key in _MEANS.items() if key in totals[0]}

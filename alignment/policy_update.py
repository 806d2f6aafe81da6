"""The optimiser updates made on one rollout, and the old policy that clipped losses compare with."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch

from alignment.args import RLArgs
from alignment.errors import UserError
from alignment.grpo import USES_OLD_POLICY, grpo_microbatch_train_step, loss_denominator
from alignment.lanes import cut_into_lanes, side_by_side
from alignment.log_probs import head_log_probs, hidden_states
from alignment.models import autocast, batch_log_probs, devices_of, load_config, load_model, set_learning_rate
from alignment.packing import send
from alignment.placement import Roles, issue_order
from alignment.records import Batch
from alignment.remote_reference import OwnReferenceServer, RemoteReference, reference_token, weights_digest
from alignment.rollouts import Rollout, distribution
from alignment.tokens import cut_by_tokens, packed_tokens, split_rows, take_rows
from alignment.tracking import printable

IN_FLIGHT = 2  # micro-batches for each device of a split policy (benchmarks/README.md)

Seen = Sequence[tuple[Sequence[int], torch.Tensor]]
"""Rows, and their log-probs, of one micro-batch after another."""


def needs_old_policy(args: RLArgs) -> bool:
    """Whether old log-probs are used and can differ from the policy's own: by the loss's ratio or the sampler's correction,
    where a rollout has several updates."""
    used = args.loss_type in USES_OLD_POLICY or args.sampler_correction != "none"
    return used and args.updates_per_rollout > 1 and not args.trusts_sampler


def rows_with_gradient(rollout: Rollout, args: RLArgs) -> list[int]:
    """The trained rows whose loss depends on the policy: all with a KL penalty, else those whose weight is not zero."""
    weights_B1 = rollout.raw_rewards_B1 if args.loss_type == "no_baseline" else rollout.advantages_B1
    return [row for row in rollout.trained_rows if args.beta or weights_B1[row].item() != 0]


class OldPolicy:
    """The policy as it was when the rollout was sampled, on the reference device.

    Where that device is the policy's own, the policy itself serves: it is asked before its first update.
    """

    def __init__(self, policy, base: str, roles: Roles, dtype: torch.dtype):
        self.policy = policy
        self.dtype = dtype
        shared = roles.policy == (roles.reference,)
        self.model = policy if shared else load_model(base, (roles.reference,), torch.float32)

    @torch.no_grad()
    def annotate(self, rollout: Rollout, args: RLArgs) -> Rollout:
        """The rollout with `old_log_probs_BT`, from weights taken over from the policy just now."""
        if self.model is not self.policy:
            for (_, own), (_, new) in zip(self.model.named_parameters(), self.policy.named_parameters(), strict=True):
                own.copy_(new, non_blocking=True)
        rows = rows_with_gradient(rollout, args)
        return dataclasses.replace(rollout, old_log_probs_BT=rollout_log_probs(self.model, rollout, args, self.dtype, rows))


class Reference:
    """The model that training started from, frozen, on the reference device: the KL penalty keeps the policy near it."""

    restarts = 0

    def __init__(self, start: str, roles: Roles, dtype: torch.dtype):
        self.dtype = dtype
        self.model = load_model(start, (roles.reference,), dtype)

    def annotate(self, rollout: Rollout, args: RLArgs, key: str) -> Rollout:
        """The rollout with `reference_log_probs_BT`."""
        return dataclasses.replace(rollout, reference_log_probs_BT=rollout_log_probs(self.model, rollout, args, self.dtype))


def open_reference(
    args: RLArgs, start: str, roles: Roles, dtype: torch.dtype, closing: ExitStack
) -> Reference | RemoteReference | OwnReferenceServer | None:
    """The reference model of a run that began with the model `start`: none without --beta, here, in a process of its own that
    works while the trainer does, or at --reference_url."""
    if not args.beta:
        return None
    if args.rollouts == "sync" and not args.reference_url:
        return Reference(start, roles, dtype)
    vocabulary = load_config(start).vocab_size
    if args.reference_url:
        remote = RemoteReference(args.reference_url, reference_token(), vocabulary, args.sampler_timeout)
        if weights_digest(load_model(start, ("cpu",), dtype), dtype) != remote.info["weights"]:
            raise UserError(
                f"--reference_url {remote.url}: its model {printable(remote.info['model'])} has other weights, or another dtype"
                f" than {dtype}, than {start}, from which training starts: serve that one"
            )
        return remote
    own = OwnReferenceServer(start, roles.reference, str(dtype).removeprefix("torch."), vocabulary, args)
    closing.callback(own.close)
    return own


def rollout_log_probs(
    model, rollout: Rollout, args: RLArgs, dtype: torch.dtype, rows: Sequence[int] | None = None
) -> torch.Tensor:
    """A model's log-probs [B, T] of a rollout's responses, of all rows or of some, on the CPU."""
    return batch_log_probs(model, rollout.batch, distribution(args), args.micro_batch_tokens, dtype, rows)


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
    (`pipelined`), on a CPU so that all cores are (`side_by_side`).
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
        pieces, lanes = cut_into_lanes(policy, split, args.micro_batch_tokens)
        done = side_by_side(whole, pieces, lanes, policy.parameters())
    for micro_batch, piece in zip(done, pieces, strict=True):
        tokens = packed_tokens([split[i] for i in piece])
        yield micro_batch.rows, micro_batch.log_probs, {"tokens": tokens, **micro_batch.sums}


def pipelined(
    begun: Callable[[Sequence[int]], MicroBatch], pieces: Sequence[Sequence[int]], in_flight: int, policy, dtype: torch.dtype
) -> Iterator[MicroBatch]:
    """The micro-batches of some pieces, once they are through a split policy and back, in `issue_order`."""
    devices = devices_of(policy)
    heads_first = policy.get_output_embeddings().weight.device != devices[-1]
    under_way: dict[int, MicroBatch] = {}
    for what, issued in itertools.groupby(issue_order(len(pieces), in_flight, heads_first), key=lambda pair: pair[0]):
        numbers = [number for _, number in issued]
        if what == "forward":
            with autocast(devices[0], dtype):  # one for all of them, so that they share one copy of the weights in `dtype`
                under_way |= {number: begun(pieces[number]) for number in numbers}
        elif what == "head":
            for number in numbers:
                under_way[number].head()
        else:
            for number in numbers:
                done = under_way.pop(number)
                done.backward()
                yield done


class MicroBatch:
    """Some rows on their way through the policy: forward at once, then `head`, then `backward`."""

    def __init__(self, policy, rows: Sequence[int], rollout: Rollout, denominator: float, args: RLArgs, dtype: torch.dtype):
        self.policy, self.rows, self.rollout, self.denominator, self.args = policy, rows, rollout, denominator, args
        self.part = take_rows(rollout.batch, rows)
        self.autocast = functools.partial(autocast, devices_of(policy)[0], dtype)
        with self.autocast():
            self.hidden_NH = hidden_states(policy, self.part.input_ids, self.part.response_mask)

    def head(self) -> None:
        """Log-probs and loss, and the loss's gradient down to what the head was given."""
        self.given_NH = self.hidden_NH.detach().requires_grad_()
        how = distribution(self.args)
        with self.autocast():
            found = head_log_probs(self.policy, self.given_NH, self.part.labels, self.part.response_mask, True, **how)
        loss, sums = train_step(found["log_probs"], self.part, self.rows, self.rollout, self.denominator, self.args)
        self.log_probs = found["log_probs"].detach()
        self.sums = {"loss": loss, "entropy_sum": found["token_entropy"].sum(), **sums}

    def backward(self) -> None:
        """The gradient from there on."""
        self.hidden_NH.backward(self.given_NH.grad)
        del self.hidden_NH, self.given_NH


def train_step(
    log_probs: torch.Tensor, part: Batch, rows: Sequence[int], rollout: Rollout, denominator: float, args: RLArgs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`grpo_microbatch_train_step` of some rows of a rollout, by the arguments."""
    there = functools.partial(_take, rows, part.labels.shape[1], log_probs.device)
    return grpo_microbatch_train_step(
        log_probs,
        send(part.response_mask, log_probs.device),
        gradient_accumulation_steps=1,
        loss_type=args.loss_type,
        raw_rewards=there(rollout.raw_rewards_B1),
        advantages=there(rollout.advantages_B1),
        # Where old log-probs are used and there are none, there is one update a rollout, so the old policy is this one.
        old_log_probs=log_probs.detach() if rollout.old_log_probs_BT is None else there(rollout.old_log_probs_BT),
        cliprange=args.cliprange,
        loss_normalization=args.loss_normalization,
        denominator=denominator,
        cliprange_high=args.cliprange_high,
        dual_clip=args.dual_clip,
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        reference_log_probs=there(rollout.reference_log_probs_BT),
        sampler_correction=args.sampler_correction,
        correction_cap=args.correction_cap,
        sampler_log_probs=there(rollout.sampler_log_probs_BT),
    )


def _take(rows: Sequence[int], width: int, device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Some rows of a tensor [B, 1] or [B, T], cut to `width`, on their way to `device`."""
    return None if tensor is None else send(tensor[rows, :width], device)


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

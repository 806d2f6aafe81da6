"""TODO."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from alignment.args import RLArgs
from alignment.core.losses import USES_OLD_POLICY
from alignment.core.records import Distribution
from alignment.core.rollout import Rollout
from alignment.policy.loading import batch_log_probs, load_config, load_model
from alignment.policy.placement import Roles
from alignment.policy.reference_client import ReferenceProcess, RemoteReference, weights_digest
from alignment.policy.reference_protocol import ServedModel, reference_token
from alignment.rollouts.collect import distribution
from alignment.system.errors import UserError
from alignment.system.terminal import printable


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


class ServedReference:
    """A reference model behind HTTP, here or elsewhere."""

    def __init__(self, client: RemoteReference | ReferenceProcess):
        self.client = client

    @property
    def restarts(self) -> int:
        """How often it was replaced."""
        return self.client.restarts

    def annotate(self, rollout: Rollout, args: RLArgs, key: str) -> Rollout:
        """The rollout with `reference_log_probs_BT`."""
        settings = Distribution(**distribution(args)), args.micro_batch_tokens
        return dataclasses.replace(rollout, reference_log_probs_BT=self.client.log_probs(key, rollout.batch, *settings))


def open_reference(
    args: RLArgs, start: str, roles: Roles, dtype: torch.dtype, closing: ExitStack
) -> Reference | ServedReference | None:
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
        return ServedReference(remote)
    served = ServedModel(
        path=start,
        device=roles.reference,
        dtype=str(dtype).removeprefix("torch."),
        max_pending=args.staleness + 4,  # room for all rollouts that can be ahead
        deterministic=args.deterministic,
    )
    own = ReferenceProcess(served, vocabulary, args.sampler_timeout)
    closing.callback(own.close)
    return ServedReference(own)


def rollout_log_probs(
    model, rollout: Rollout, args: RLArgs, dtype: torch.dtype, rows: Sequence[int] | None = None
) -> torch.Tensor:
    """A model's log-probs [B, T] of a rollout's responses, of all rows or of some, on the CPU."""
    return batch_log_probs(model, rollout.batch, distribution(args), args.micro_batch_tokens, dtype, rows)

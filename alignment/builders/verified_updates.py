"""The policy, the sampler and the updates that `verify` checks, by a run's own arguments but for
what makes all of these take effect."""

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alignment.args import RLArgs, VerifyArgs
from alignment.builders.policies import make_policy
from alignment.builders.run_plan import RunPlan, plan_engine, plan_run
from alignment.builders.samplers import make_sampler
from alignment.builders.training import find_teacher, open_old_policy
from alignment.builders.verified_data import warm_start_of
from alignment.config.settings import flag_values, replaced, settings_of
from alignment.model.frozen import FrozenModel
from alignment.model.loading import load_config, load_tokenizer, make_deterministic
from alignment.model.log_probs import few_logits_at_a_time
from alignment.model.shape import ModelShape
from alignment.policy.policy import Policy
from alignment.rollouts.config import UpdateConfig
from alignment.rollouts.source import RolloutSource, open_source
from alignment.sampling.sampler import Sampler, engine_name
from alignment.system.clock import Clock
from alignment.system.device_memory import free_bytes, release_memory
from alignment.training.update import LogProbSource, References
from alignment.verification.check import Check
from alignment.verification.checks import NATS, Verified, most_other_groups, promises_bits
from alignment.verification.groups import MadeUpGroups
from alignment.verification.sampling import SampledAnswers
from alignment.verification.two_rollouts import (
    PROMPTS,
    Chosen,
    TwoRollouts,
    UpdateSetting,
    update_limits,
)
from alignment.verification.whole_update import PlainModel, Weights, cut_family, load_adapters

# the plain computation is slow, hence few responses of a prompt, and few tokens of each
MOST_SAMPLES = 4
MOST_TOKENS = 64
MICRO_BATCH = 128  # tokens, so that an update has several micro-batches, some of several rows
ROWS_OF_PIECE = 16  # of logits, so that a micro-batch has several pieces, as large ones have
LEAST_DECAY = 0.5  # of weights, so that it is a part of a step that shows
# Of the host's memory for a parameter: weights before and after, gradient, two moments and what
# they become, in float64.
BYTES_IN_FLOAT64 = 56
FREE_SHARE = 0.7


def with_short_samples(args: VerifyArgs) -> VerifyArgs:
    """A run's arguments with few and short samples, a weight decay that shows, and a penalty for
    every length where the run has one for some. Groups are as large as --advantage needs, and
    mini-batches are as many as the run's."""
    max_new_tokens = min(args.max_new_tokens, MOST_TOKENS)
    fewest = args.estimator.fewest_responses(settings_of(args, "advantage"))
    group_size = min(args.group_size, max(MOST_SAMPLES, fewest))
    mini_batch = math.ceil(args.train_mini_batch_size * group_size / args.group_size)
    return dataclasses.replace(
        args,
        group_size=group_size,
        train_mini_batch_size=mini_batch,
        max_new_tokens=max_new_tokens,
        overlong_buffer=max_new_tokens if args.overlong_buffer else 0,
        skip_unfinished=False,
        micro_batch_tokens=MICRO_BATCH,
        weight_decay=max(args.weight_decay, LEAST_DECAY),
    )


def training_checks(args: VerifyArgs, plan: RunPlan) -> Iterator[Check]:
    """Yields the checks of policy and sampler, on the plan's devices, with the responses to its
    first prompts."""

    if args.deterministic:
        make_deterministic()
    args = with_short_samples(args)
    base = plan.base
    tokenizer = load_tokenizer(base)
    source = open_source(args.rollout_config, tokenizer)
    devices = plan.roles.sample
    is_too_large = not fits_in_float64(base)
    if is_too_large:
        yield from checks_of_cut_family(args, base)
    yield from MadeUpGroups(source.config).checks()
    policy = make_policy(args, plan.policy, base)
    exact = promises_bits((*policy.devices, *devices), args.deterministic)
    plain = PlainModel(base, torch.float32 if is_too_large else torch.float64)
    nats = NATS[policy.dtype]
    engine = engine_name(args.sampler)
    engines = [engine]
    if args.sampler == "auto" and engine != "transformers":
        engines.append("transformers")
    for name in engines:
        args_of_engine = replaced(args, sampler=name)
        engine_plan = plan_engine(args_of_engine, plan.roles, base, devices)
        with (
            closing(make_sampler(engine_plan, tokenizer, policy)) as sampler,
            few_logits_at_a_time(ROWS_OF_PIECE * policy.config.vocab_size),
        ):
            updates = None
            if not is_too_large:
                updates = plan_updates(args, plan, VerifiedParts(policy, sampler, plain, source))
            config = args.update_config
            verified = Verified(
                policy,
                sampler,
                plain,
                source,
                tokenizer,
                config,
                exact,
                most_other_groups(name, policy.dtype, args.batch_invariant and name == engine),
                updates,
            )
            if name == engine:
                # Single log-probs may be ten times as far off as they are on average.
                yield from SampledAnswers(
                    sampler,
                    source,
                    plain.model,
                    tokenizer,
                    slack=10 * nats,
                    flags=flag_values(args),
                ).checks()
                yield from verified.checks()
            else:
                yield Check(f"after updates, {name}: nats from policy", nats, verified.synced)
            if args.lora_rank:
                yield from checks_of_adapters(args, verified, tokenizer, name)


def checks_of_adapters(
    args: VerifyArgs, verified: Verified, tokenizer, engine: str
) -> Iterator[Check]:
    """The checks of which layers have adapters, and that new ones arrive at the engine."""
    policy = verified.policy
    yield Check(
        "adapters: layers that have none, or must have none",
        0.0,
        partial(other_adapters, args, policy, verified.plain, tokenizer),
    )
    policy.use_adapters("random")
    what = f"random adapters, {engine}: nats from policy"
    yield Check(what, NATS[policy.dtype], verified.synced)
    policy.use_adapters("trained")


def other_adapters(args: VerifyArgs, policy: Policy, plain: PlainModel, tokenizer) -> list[str]:
    """The layers of a policy that have no adapter and must have one, or the other way round."""
    adapted = {name.partition(".lora_")[0] for name in saved_adapters(policy, tokenizer)}
    return sorted(plain.linear_layers(args.lora_targets) ^ adapted)


def saved_adapters(policy: Policy, tokenizer) -> Weights:
    """A policy's adapters, by name, as it saves them."""
    with tempfile.TemporaryDirectory(prefix="verify_") as name:
        policy.save(Path(name), tokenizer)
        return load_adapters(Path(name) / "adapter")


def first_weights(args: VerifyArgs, plan: RunPlan) -> Weights:
    """What is trained, by name, as it is before the first step: the weights, or new adapters."""
    if not args.lora_rank:
        return PlainModel(plan.base, torch.float32).base
    return saved_adapters(make_policy(args, plan.policy, plan.base), load_tokenizer(plan.base))


def checks_of_cut_family(args: VerifyArgs, whole: str) -> Iterator[Check]:
    """The checks of updates by a policy and a sampler of the first two layers of a model."""
    with tempfile.TemporaryDirectory(prefix="verify_") as folder:
        cut_family(whole, Path(folder))
        load_tokenizer(whole).save_pretrained(folder)
        yield from checks_of_small_model(args, plan_run(args, folder))


def checks_of_small_model(args: VerifyArgs, plan: RunPlan) -> Iterator[Check]:
    """The checks of updates, by a policy and a sampler of the plan's base, of two layers."""
    tokenizer = load_tokenizer(plan.base)
    source = open_source(args.rollout_config, tokenizer)
    engine_plan = plan_engine(args, plan.roles, plan.base, plan.roles.sample)
    policy = make_policy(args, plan.policy, plan.base)
    with closing(make_sampler(engine_plan, tokenizer, policy)) as sampler:
        parts = VerifiedParts(policy, sampler, PlainModel(plan.base), source)
        for check in plan_updates(args, plan, parts).checks():
            yield dataclasses.replace(check, note=f"{check.note} (2 layers: too large in float64)")
    del policy, parts
    release_memory()


def fits_in_float64(base: str) -> bool:
    """Whether the host has memory for the updates of a model in float64, by the papers."""
    parameters = sum(ModelShape.from_config(load_config(base)).parameters.values())
    return parameters * BYTES_IN_FLOAT64 < FREE_SHARE * free_bytes("cpu")


@dataclass(frozen=True)
class VerifiedParts:
    """What the checks of updates run, and transformers' own model of the weights it starts from."""

    policy: Policy
    sampler: Sampler
    plain: PlainModel
    source: RolloutSource


def plan_updates(args: VerifyArgs, plan: RunPlan, parts: VerifiedParts) -> TwoRollouts:
    """The updates that are compared with the papers', by a run's own arguments but for what
    `update_setting` sets."""
    teacher = None
    not_checked = ""
    if args.teacher:
        folder = find_teacher(args, plan.base)
        if fits_in_float64(folder):
            teacher = PlainModel(folder)
        else:
            not_checked = "the host has no memory for --teacher in float64"
    return TwoRollouts(
        parts.policy,
        parts.sampler,
        parts.plain,
        parts.source,
        load_tokenizer(plan.base),
        make_setting=partial(update_setting, args),
        open_references=partial(open_references, args, plan, parts.policy),
        limits=update_limits(parts.policy.dtype, args.optimizer),
        has_one_update=args.updates_per_rollout == 1,
        teacher=teacher,
        not_checked=not_checked,
        warm_start=warm_start_of(args, plan.base),
    )


def update_setting(args: RLArgs, chosen: Chosen) -> UpdateSetting:
    """The setting of the updates that are checked. What the sampler's log-probs are is another
    check's concern, so they stop no update."""
    changes: dict[str, Any] = {
        "prompts_per_rollout": PROMPTS,
        "train_mini_batch_size": 2 * args.group_size if chosen.several else 0,
        "epochs_per_rollout": 2 if chosen.several else 1,
        "learning_rate": chosen.learning_rate,
        "max_refills": 0,
    }
    if args.max_grad_norm:
        changes["max_grad_norm"] = min(args.max_grad_norm, chosen.largest_norm)
    if args.token_selection == "clip_cov":
        changes["selected_share"] = 1.0  # All that are eligible, instead of some by chance.
    own = dataclasses.replace(args, **changes)
    # Resets of the reference are a run's.
    config = dataclasses.replace(
        own.update_config, max_sampler_mismatch=math.inf, reference_reset_interval=0
    )
    flags = flag_values(own) | {"loss": own.loss_type}
    return UpdateSetting(flags, config, own.rollout_config, chosen.largest_norm)


def open_references(
    args: RLArgs, plan: RunPlan, policy: Policy, config: UpdateConfig
) -> References:
    """The sources of old, reference and teacher log-probs, as a run has them that samples between
    its updates."""

    dtype = getattr(torch, plan.policy.dtype)
    device = plan.roles.reference
    old_policy = None
    if config.old_log_probs == "policy":
        old_policy = open_old_policy(plan, policy)
    reference = None
    if args.beta and args.lora_rank:

        def base_log_probs(batch, distribution, micro_batch_tokens):
            return policy.base_log_probs(batch, distribution)

        reference = LogProbSource(base_log_probs)
    elif args.beta:
        reference = LogProbSource(FrozenModel(plan.base, device, dtype).log_probs)
    teacher = None
    if args.teacher:
        folder = find_teacher(args, plan.base)
        model = FrozenModel(folder, plan.roles.teacher, dtype)
        teacher = LogProbSource(model.log_probs)
    return References(config, old_policy, reference, Clock(), teacher)

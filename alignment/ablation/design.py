"""The design of a sweep: its arms, its runs, and warnings about what they cannot show. Pure:
arguments in, arguments out."""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from alignment.args import BOOKKEEPING, CONTROLS, NOT_SWEPT, RLArgs, from_preset
from alignment.config.flag import flags_of_class, hints_of_flags
from alignment.core.losses import LOSSES, OPTIONAL_ARGUMENTS
from alignment.data.tasks import DataConfig
from alignment.system.errors import UserError
from alignment.system.files import read_toml

ALPHA = 0.05  # chance that any verdict of a sweep is false


@dataclass(frozen=True)
class Design:
    """The plan of a sweep: its folder, its arms by name, its seeds, and its warnings."""

    folder: Path
    arms: Mapping[str, RLArgs]
    seeds: tuple[int, ...]
    hold: str
    tie: float
    # Chance that any verdict is false; with --until_decided, the share of that chance for each
    # interim analysis.
    alpha: float
    warnings: tuple[str, ...]  # Of questions that it cannot answer, or answers twice.
    match: str = "steps"  # What arms are compared at equal amounts of: an entry of `AMOUNTS`.

    @property
    def varied(self) -> dict[str, dict[str, object]]:
        return varied_values({name: vars(args) for name, args in self.arms.items()})

    def facts(self) -> dict[str, object]:
        """The part of sweep.json that must stay the same when a sweep is continued: all but the
        seeds."""
        arms = {name: vars(args) for name, args in self.arms.items()}
        settings = {"hold": self.hold, "match": self.match, "tie": self.tie, "alpha": self.alpha}
        return json.loads(json.dumps({**settings, "arms": arms}))


def varied_values(arms: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """For each arm, its values of the arguments in which arms differ."""
    names = [
        name
        for name in next(iter(arms.values()))
        if len({json.dumps(arm.get(name)) for arm in arms.values()}) > 1
    ]
    return {arm: {name: values.get(name) for name in names} for arm, values in arms.items()}


def grid(preset: str, values: Mapping[str, tuple], hold: str) -> dict[str, RLArgs]:
    """The arms of a grid by name: every combination of the values of the arguments that have
    several. With `hold` = "rollouts" an arm's prompts a step are divided by its group size, so that
    all arms train on equally many responses; with "prompts" they train on the same prompts, and a
    larger group costs more. Raises `UserError` where an arm cannot work."""
    varied = {
        name: list(dict.fromkeys(several)) for name, several in values.items() if len(several) > 1
    }
    base = from_preset(
        RLArgs, preset, **{name: single[0] for name, single in values.items() if len(single) == 1}
    )
    arms: dict[str, RLArgs] = {}
    for combination in itertools.product(*varied.values()):
        chosen = dict(zip(varied, combination, strict=True))
        arm = dataclasses.replace(base, **chosen)
        if hold == "rollouts" and "group_size" in chosen and "prompts_per_rollout" not in chosen:
            if base.rollout_size % arm.group_size:
                reason = (
                    f"{base.rollout_size} responses a step are no whole number of such groups;"
                    " choose sizes that divide it"
                )
                raise UserError(
                    f"--group_size {arm.group_size} --hold rollouts: {reason}, or --hold prompts"
                )
            arm = dataclasses.replace(arm, prompts_per_rollout=base.rollout_size // arm.group_size)
        name = "_".join(_label(key, value) for key, value in chosen.items()) or _label(
            "loss_type", base.loss_type
        )
        if name in arms:
            raise UserError(
                f"two arms would be called {name}: give them names of their own in a --sweep_file"
            )
        arms[name] = arm
    return arms


def named_arms(file: str, preset: str, values: Mapping[str, tuple]) -> dict[str, RLArgs]:
    """The arms of a TOML file: the values at its top, then the single `values` of the command line,
    then the arm's own. A table [about] is left out. Raises `UserError`, naming the file, where the
    file is malformed or an arm cannot work."""
    if several := [name for name, given in values.items() if len(given) > 1]:
        raise UserError(
            f"--{several[0]}: with --sweep_file the arms are those of the file; give one value, or"
            " no file"
        )
    content = read_toml(Path(file), "--sweep_file")
    arms, _ = content.pop("arms", None), content.pop("about", None)
    if (
        not isinstance(arms, dict)
        or not arms
        or not all(isinstance(arm, dict) for arm in arms.values())
    ):
        raise UserError(f"--sweep_file {file}: needs a table [arms.NAME] for each arm")
    shared = {**content, **{name: given[0] for name, given in values.items()}}
    for name in arms:
        if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
            raise UserError(
                f"--sweep_file {file}: arm {name!r}: use letters, digits, _, -, + and points"
            )
    return {
        name: _arm(preset, {**shared, **own}, f"{file}: arm {name}: ") for name, own in arms.items()
    }


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _arm(preset: str, values: Mapping[str, object], place: str) -> RLArgs:
    """The preset's arguments, overridden by `values`. Raises `UserError`, beginning with `place`,
    for unknown or bad ones."""
    hints = hints_of_flags(RLArgs)
    for name, value in values.items():
        if name not in hints or name in NOT_SWEPT | {"seed"}:
            raise UserError(f"{place}{name} is no argument of an arm")
        choices = _choices_of(name, hints[name], value)
        if choices and value not in choices:
            listed = ", ".join(map(str, choices))
            raise UserError(f"{place}{name} = {value!r}: choose one of {listed}")
        kind = _kind_of(hints[name])
        if kind in _KINDS and not _is_of_kind(value, kind):
            raise UserError(f"{place}{name} = {value!r}: must be {_KINDS[kind]}")
    return from_preset(RLArgs, preset, **values)


def _choices_of(name: str, hint: Any, value: object) -> tuple:
    """The values that an argument may have, where they are listed."""
    if name == "loss_type":
        # With a colon it is the path of the user's own.
        return () if ":" in str(value) else tuple(LOSSES)
    if get_origin(hint) is Literal:
        return get_args(hint)
    return flags_of_class(RLArgs)[name].choices


def _kind_of(hint: Any) -> Any:
    """The type that a value must have: of `int | None`, int."""
    return next((kind for kind in get_args(hint) if kind in _KINDS), hint)


def _is_of_kind(value: object, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _label(key: str, value) -> str:
    """A value's part of an arm's name, fit for a folder: `grpo_clip`, `group_size4`,
    `no_normalize_by_std`."""
    if isinstance(value, bool):
        return key if value else f"no_{key}"
    text = str(value).replace("/", "-").replace(":", ".")
    return text if isinstance(value, str) and value else f"{key}{text}"


def name_of(arm: RLArgs, base: RLArgs) -> str:
    """A name, fit for a folder, by the arguments in which an arm differs from `base`; "" where it
    does in none."""
    return "_".join(_label(name, getattr(arm, name)) for name in differing((arm, base)))


def with_controls(arms: Mapping[str, RLArgs]) -> dict[str, RLArgs]:
    """The arms, and copies of the first one: trained on each negative control, and at a learning
    rate of 0, so not at all."""
    first = next(iter(arms.values()))
    controls = {name: dataclasses.replace(first, reward=name) for name in CONTROLS}
    controls["no_training"] = dataclasses.replace(first, learning_rate=0.0)
    return {**arms, **{f"control_{name}": arm for name, arm in controls.items()}}


def refuse_incomparable_arms(arms: Mapping[str, RLArgs]) -> None:
    """Raise `UserError` where arms would answer different questions, or share a warm start that
    fits one of them only."""
    for field in ("max_problems", "dataset_path", *vars(DataConfig())):
        if len(values := sorted({str(getattr(args, field)) for args in arms.values()})) > 1:
            raise UserError(
                f"--{field} {' '.join(values)}: the arms would answer different questions; give one"
                " value"
            )
    shared: dict[str, tuple[str, RLArgs]] = {}
    for name, args in arms.items():
        other, first = shared.setdefault(args.sft_base, (name, args))
        if args.sft_base and (args.task, args.model) != (first.task, first.model):
            reason = f"{other} and {name} differ in task or model and cannot share a warm start"
            raise UserError(
                f"--sft_base {args.sft_base}: {reason}; give each its own sft_base in a"
                " --sweep_file"
            )


def lint(arms: Mapping[str, RLArgs], seeds: Sequence[int]) -> list[str]:
    """Warnings of arms that are mathematically the same, of confounded differences, and of a single
    seed."""
    reason = (
        "one seed cannot tell an arm from luck; there will be no verdict: give at least two,"
        " --seed 0 1"
    )
    return [*_equivalent(arms), *_confounded(arms), *([reason] if len(seeds) < 2 else [])]


FEWEST_INTERVALS = 3  # between evaluations, so that one of them has a neighbour on both sides
ENOUGH_INTERVALS = 8
"""A curve 1 - exp(-4 x), which has made nine tenths of its way by x = 0.6, lies above a straight
line by less than (4 / 8)^2 / 8 of that way between 9 evaluations."""


def refuse_rare_evaluations(arms: Mapping[str, RLArgs], match: str) -> None:
    """Raise `UserError` where arms are compared between evaluations that are too few to say how
    their curves bend there."""
    for name, args in arms.items():
        intervals = -(-args.num_steps // args.eval_interval)
        if is_between_evaluations(arms, match) and intervals < FEWEST_INTERVALS:
            need = (
                f"--match {match} compares between evaluations, for which each arm needs"
                f" {FEWEST_INTERVALS + 1} or more"
            )
            most = max(1, args.num_steps // ENOUGH_INTERVALS)
            where = (
                f"--eval_interval {args.eval_interval}: {name} is evaluated {intervals + 1} times"
                f" in {args.num_steps} steps"
            )
            raise UserError(f"{where}, but {need}; give --eval_interval {most}")


def rare_evaluations(arms: Mapping[str, RLArgs], match: str) -> list[str]:
    """A warning of arms that are compared between evaluations so far apart that a curve's bend may
    leave verdicts undecided."""
    if not is_between_evaluations(arms, match):
        return []
    rare = {
        name: args
        for name, args in arms.items()
        if -(-args.num_steps // args.eval_interval) < ENOUGH_INTERVALS
    }
    if not rare:
        return []
    most = max(1, min(args.num_steps for args in rare.values()) // ENOUGH_INTERVALS)
    reason = (
        f"--match {match} compares between evaluations, and a verdict that the bend of a learning"
        " curve could undo stays"
    )
    return [f"{', '.join(rare)}: {reason} undecided: --eval_interval {most} or less keeps it small"]


def is_between_evaluations(arms: Mapping[str, RLArgs], match: str) -> bool:
    """Whether arms may be compared between two evaluations: all but where the last ones come at
    equal amounts in every arm."""
    if match == "steps":
        return False
    samples = {args.rollout_size * args.num_steps for args in arms.values()}
    return match != "samples" or len(samples) > 1 or any(args.max_refills for args in arms.values())


def canonical(args: RLArgs) -> dict[str, object]:
    """The arguments that decide what is computed, less those that have no effect beside the others.
    With one update a rollout, sampled by the current weights, the ratio to the old policy is 1,
    where every loss with a ratio, clipped or not, of tokens or responses, has the gradient of -A
    log pi (arXiv:2402.03300, section 4.1.3; PPO, arXiv:1707.06347, section 3)."""
    facts = {
        f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in BOOKKEEPING
    }
    if facts["train_mini_batch_size"] >= args.rollout_size:
        facts["train_mini_batch_size"] = 0
    facts["max_staleness"] = args.staleness
    facts["rollouts"] = "async" if args.staleness else "sync"
    # A loss with one ratio a response averages its tokens before they could be weighted one by one.
    token_weights = args.loss.ratio_per_response and args.sampler_correction.startswith("token")
    loss, ratio_is_one = args.loss, args.updates_per_rollout == 1 and not args.trusts_sampler
    if loss.at_ratio_one and ratio_is_one and not token_weights:
        facts["loss_type"], loss = loss.at_ratio_one, LOSSES[loss.at_ratio_one]
    if facts["cliprange_high"] is None:
        facts["cliprange_high"] = facts["cliprange"]
    without_effect = {
        tuple(OPTIONAL_ARGUMENTS - loss.arguments): True,
        ("std_of", "advantage_eps"): not facts["normalize_by_std"],
        ("kl_estimator",): not facts["beta"],
        ("old_log_probs",): not loss.uses_ratio or args.staleness > 0,
        ("correction_cap",): facts["sampler_correction"] == "none",
        ("lora_alpha", "lora_targets"): facts["lora_rank"] == 0,
        ("model",): bool(facts["sft_base"]),  # only the warm start derives from it
    }
    left_out = {name for names, idle in without_effect.items() if idle for name in names}
    return {name: value for name, value in facts.items() if name not in left_out}


def _equivalent(arms: Mapping[str, RLArgs]) -> list[str]:
    groups: dict[tuple, list[str]] = {}
    for name, args in arms.items():
        groups.setdefault(
            tuple(sorted((key, str(value)) for key, value in canonical(args).items())), []
        ).append(name)

    def reason(names):
        return f"mathematically the same ({_why_equivalent([arms[name] for name in names])})"

    return [f"{', '.join(names)}: {reason(names)}" for names in groups.values() if len(names) > 1]


def _why_equivalent(arms: Sequence[RLArgs]) -> str:
    if len(losses := {args.loss_type for args in arms}) > 1:
        names = sorted(losses - {"reinforce_with_baseline"})
        have = f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'}"
        return (
            f"with one update a rollout the ratio is 1, so {have} the gradient of"
            " reinforce_with_baseline"
        )
    idle = " and ".join(f"--{name}" for name in differing(arms))
    return f"{idle} plays no part here" if idle else "equal arguments"


def differing(arms: Sequence[RLArgs]) -> list[str]:
    """The arguments in which arms differ, less those that never decide a result."""
    names = (f.name for f in dataclasses.fields(RLArgs) if f.name not in BOOKKEEPING)
    return [name for name in names if len({getattr(args, name) for args in arms}) > 1]


DERIVED = {  # Quantity -> its value, and the arguments that are changed to change it.
    "prompts a step": (lambda args: args.prompts_per_rollout, {"prompts_per_rollout"}),
    "responses a step": (lambda args: args.rollout_size, set()),
    "responses in all": (lambda args: args.rollout_size * args.num_steps, {"num_steps"}),
    "optimiser updates": (
        lambda args: args.updates_per_rollout * args.num_steps,
        {"epochs_per_rollout", "num_steps"},
    ),
    "draws of a group, at most": (lambda args: 1 + args.max_refills, set()),
    "responses an update": (
        lambda args: min(args.train_mini_batch_size or args.rollout_size, args.rollout_size),
        {"train_mini_batch_size"},
    ),
}
_EVALUATED = frozenset(
    {
        "reward",
        "sampling_temperature",
        "sampling_top_p",
        "sampling_top_k",
        "max_new_tokens",
        "prompt",
    }
)


def _confounded(arms: Mapping[str, RLArgs]) -> list[str]:
    """A warning for each argument whose change, alone between two arms, also changes another
    quantity."""
    confounded: dict[tuple, list[str]] = {}
    for (a, x), (b, y) in itertools.combinations(arms.items(), 2):
        names = differing((x, y))
        if "group_size" in names:
            names = [name for name in names if name != "prompts_per_rollout"]
        if len(names) != 1:
            continue
        (name,) = names
        effects = [
            label
            for label, (value, factors) in DERIVED.items()
            if value(x) != value(y) and name not in factors
        ]
        if name in _EVALUATED and (name != "reward" or x.evaluation_rule != y.evaluation_rule):
            effects.append("how the evaluation samples or scores")
        if effects:
            confounded.setdefault((name, tuple(effects)), []).extend((a, b))

    def reason(name, effects):
        return f"--{name} also changes {', '.join(effects)}"

    return [
        f"{', '.join(dict.fromkeys(names))}: {reason(*key)}" for key, names in confounded.items()
    ]

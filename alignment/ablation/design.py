"""The design of a sweep: which arms, which runs, and what they can and cannot tell. Pure: arguments in, arguments out."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from alignment.args import CONTROLS, NOT_SWEPT, RLArgs, SweepOptions, from_preset, swept_values
from alignment.system.errors import UserError

# What says where, how fast or how often, and never what is computed.
WITHOUT_RATIO = ("no_baseline", "reinforce_with_baseline")  # losses that no old policy plays a part in
BOOKKEEPING = NOT_SWEPT | {
    "seed", "reference_url", "sampler_url", "micro_batch_tokens", "eval_interval", "save_interval", "keep_checkpoints",
    "max_sampler_mismatch",
}  # fmt: skip


@dataclass(frozen=True)
class LintWarning:
    """Something that the design cannot tell, or tells twice."""

    kind: Literal["same", "confounded", "seeds"]
    arms: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(self.arms)}: {self.reason}" if self.arms else self.reason


def grid(args: SweepOptions) -> dict[str, RLArgs]:
    """The arms of a grid by name: every combination of the values of the arguments that have several.

    With `--hold rollouts` an arm's prompts a step are divided by its group size, so that all arms train on equally many
    responses; with `--hold prompts` they see the same prompts, and a larger group costs more. Raises `UserError` where an
    arm cannot work.
    """
    values = swept_values(args)
    varied = {name: list(dict.fromkeys(given)) for name, given in values.items() if len(given) > 1}
    base = _base(args.preset, {name: given[0] for name, given in values.items() if len(given) == 1})
    arms: dict[str, RLArgs] = {}
    for combination in itertools.product(*varied.values()):
        chosen = dict(zip(varied, combination, strict=True))
        arm = dataclasses.replace(base, **chosen)
        if args.hold == "rollouts" and "group_size" in chosen and "prompts_per_rollout" not in chosen:
            arm = dataclasses.replace(arm, prompts_per_rollout=_prompts(base.rollout_size, arm.group_size))
        name = "_".join(_label(key, value) for key, value in zip(varied, combination, strict=True)) or base.loss_type
        if name in arms:
            raise UserError(f"two arms would be called {name}: give them names of their own in a --sweep_file")
        arms[name] = arm
    return arms


def named_arms(args: SweepOptions) -> dict[str, RLArgs]:
    """The arms of --sweep_file: what stands at its top, overridden by single values on the command line, by each arm.

    Raises `UserError`, naming the file, for what it cannot mean.
    """
    values = swept_values(args)
    several = [name for name, given in values.items() if len(given) > 1]
    if several:
        raise UserError(f"--{several[0]}: with --sweep_file the arms are those of the file; give one value, or no file")
    try:
        told = tomllib.loads(Path(args.sweep_file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--sweep_file {args.sweep_file}: there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--sweep_file {args.sweep_file}: {error}") from None
    arms = told.pop("arms", None)
    if not isinstance(arms, dict) or not arms or not all(isinstance(arm, dict) for arm in arms.values()):
        raise UserError(f"--sweep_file {args.sweep_file}: needs a table [arms.NAME] for each arm")
    shared = {**told, **{name: given[0] for name, given in values.items()}}
    for name in arms:
        if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
            raise UserError(f"--sweep_file {args.sweep_file}: arm {name!r}: use letters, digits, _, -, + and points")
    return {name: _base(args.preset, {**shared, **own}, f"{args.sweep_file}: arm {name}: ") for name, own in arms.items()}


def _base(preset: str, values: Mapping[str, object], where: str = "") -> RLArgs:
    """The preset's arguments with others in place of some. Raises `UserError` for names and values that there are not."""
    hints = get_type_hints(RLArgs)
    for name, value in values.items():
        if name not in hints or name in NOT_SWEPT | {"seed"}:
            raise UserError(f"{where}{name} is no argument of an arm")
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        wanted = next((kind for kind in get_args(hints[name]) if kind in _KINDS), hints[name])
        if choices and value not in choices:
            raise UserError(f"{where}{name} = {value!r}: choose one of {', '.join(map(str, choices))}")
        if wanted in (int, bool, str) and type(value) is not wanted or wanted is float and type(value) not in (int, float):
            raise UserError(f"{where}{name} = {value!r}: must be {_KINDS[wanted]}")
    return from_preset(RLArgs, preset, **values)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _prompts(responses: int, group_size: int) -> int:
    if responses % group_size:
        raise UserError(
            f"--group_size {group_size} --hold rollouts: {responses} responses a step are no whole number of such groups;"
            " choose sizes that divide it, or --hold prompts"
        )
    return responses // group_size


def _label(key: str, value) -> str:
    """`grpo_clip`, `group_size4`, `no_normalize_by_std`: what tells an arm from others, and may name a folder."""
    if isinstance(value, bool):
        return key if value else f"no_{key}"
    text = str(value).replace("/", "-")
    return text if isinstance(value, str) and value else f"{key}{text}"


def with_controls(arms: Mapping[str, RLArgs]) -> dict[str, RLArgs]:
    """The arms, and the first of them again with each reward that has nothing to teach about answers."""
    first = next(iter(arms.values()))
    return {**arms, **{f"control_{name}": dataclasses.replace(first, reward=name) for name in CONTROLS}}


def refuse_what_cannot_be_compared(arms: Mapping[str, RLArgs]) -> None:
    """Raise `UserError` where arms would answer different questions, or start from a warm start made for other arms."""
    for field in ("max_problems", "dataset_path"):
        values = sorted({str(getattr(args, field)) for args in arms.values()})
        if len(values) > 1:
            raise UserError(f"--{field} {' '.join(values)}: the arms would answer different questions; give one value")
    shared: dict[str, tuple[str, RLArgs]] = {}
    for name, args in arms.items():
        other, first = shared.setdefault(args.sft_base, (name, args))
        if args.sft_base and (args.task, args.model) != (first.task, first.model):
            raise UserError(
                f"--sft_base {args.sft_base}: {other} and {name} differ in task or model and cannot share a warm start; give"
                " each its own sft_base in a --sweep_file"
            )


# --- what the design cannot tell --------------------------------------------------------------------------------


def lint(arms: Mapping[str, RLArgs], seeds: Sequence[int]) -> list[LintWarning]:
    """Arms that are mathematically the same, differences that come with others, and single seeds."""
    return [*_same(arms), *_confounded(arms), *_few_seeds(seeds)]


def canonical(args: RLArgs) -> dict[str, object]:
    """The arguments that decide what is computed, with those left out that play no part beside the others.

    With one update a rollout, sampled by the present weights, the ratio to the old policy is 1, where every loss with a ratio,
    clipped or not, of tokens or of responses, has the gradient of -A log pi (arXiv:2402.03300, section 4.1.3; PPO,
    arXiv:1707.06347, section 3).
    """
    facts = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in BOOKKEEPING}
    if facts["train_mini_batch_size"] >= args.rollout_size:
        facts["train_mini_batch_size"] = 0
    apart = facts["loss_type"] == "gspo" and facts["sampler_correction"].startswith("token")  # weighs what gspo has averaged
    facts["max_staleness"] = args.staleness
    facts["rollouts"] = "async" if args.staleness else "sync"
    if facts["loss_type"] not in WITHOUT_RATIO and args.updates_per_rollout == 1 and not args.trusts_sampler and not apart:
        facts["loss_type"] = "reinforce_with_baseline"
    if facts["cliprange_high"] is None:
        facts["cliprange_high"] = facts["cliprange"]
    idle = {
        ("cliprange", "cliprange_high"): facts["loss_type"] not in ("grpo_clip", "gspo", "cispo"),
        ("dual_clip",): facts["loss_type"] not in ("grpo_clip", "gspo"),
        ("baseline",): facts["loss_type"] == "no_baseline",
        ("normalize_by_std", "std_of", "advantage_eps"): facts["loss_type"] == "no_baseline",
        ("std_of", "advantage_eps"): not facts["normalize_by_std"],
        ("kl_estimator",): not facts["beta"],
        ("old_log_probs",): facts["loss_type"] in WITHOUT_RATIO or args.staleness > 0,
        ("correction_cap",): facts["sampler_correction"] == "none",
        ("model",): bool(facts["sft_base"]),  # only the warm start is made of it
    }
    left_out = {name for names, plays_no_part in idle.items() if plays_no_part for name in names}
    return {name: value for name, value in facts.items() if name not in left_out}


def _same(arms: Mapping[str, RLArgs]) -> list[LintWarning]:
    groups: dict[tuple, list[str]] = {}
    for name, args in arms.items():
        groups.setdefault(tuple(sorted((key, str(value)) for key, value in canonical(args).items())), []).append(name)
    return [
        LintWarning("same", tuple(names), f"mathematically the same ({_why_same([arms[name] for name in names])})")
        for names in groups.values()
        if len(names) > 1
    ]


def _why_same(same: Sequence[RLArgs]) -> str:
    losses = {args.loss_type for args in same}
    if len(losses) > 1:
        names = " and ".join(sorted(losses - {"reinforce_with_baseline"}))
        have = "has" if " and " not in names else "have"
        return f"with one update a rollout the ratio is 1, so {names} {have} the gradient of reinforce_with_baseline"
    differing = _differing(same)
    return f"{' and '.join(f'--{name}' for name in differing)} plays no part here" if differing else "equal arguments"


def _differing(arms: Sequence[RLArgs]) -> list[str]:
    """The arguments, bookkeeping aside, that are not the same in all arms."""
    names = (f.name for f in dataclasses.fields(RLArgs) if f.name not in BOOKKEEPING)
    return [name for name in names if len({getattr(args, name) for args in arms}) > 1]


DERIVED = {
    "prompts a step": lambda args: args.prompts_per_rollout,
    "responses a step": lambda args: args.rollout_size,
    "responses in all": lambda args: args.rollout_size * args.num_steps,
    "optimiser updates": lambda args: args.updates_per_rollout * args.num_steps,
    "draws of a group, at most": lambda args: 1 + args.max_refills,
    "responses an update": lambda args: min(args.train_mini_batch_size or args.rollout_size, args.rollout_size),
}
_FACTORS = {"prompts a step": ("prompts_per_rollout",), "optimiser updates": ("epochs_per_rollout", "num_steps"),
            "responses in all": ("num_steps",), "responses an update": ("train_mini_batch_size",)}  # fmt: skip
_EVALUATED = frozenset({"reward", "sampling_temperature", "sampling_top_p", "sampling_top_k", "max_new_tokens", "prompt"})


def _confounded(arms: Mapping[str, RLArgs]) -> list[LintWarning]:
    """Where arms that differ in one argument, as they were asked to, differ in what follows from it too."""
    found: dict[tuple, list[str]] = {}
    for (a, x), (b, y) in itertools.combinations(arms.items(), 2):
        differing = _differing((x, y))
        if "group_size" in differing:
            differing = [name for name in differing if name != "prompts_per_rollout"]
        if len(differing) != 1:
            continue
        name = differing[0]
        follows = [what for what, of in DERIVED.items() if of(x) != of(y) and name not in _FACTORS.get(what, ())]
        follows += ["how the evaluation samples or scores"] if name in _EVALUATED and _scored_apart(name, x, y) else []
        if follows:
            found.setdefault((name, tuple(follows)), []).extend((a, b))
    return [
        LintWarning("confounded", tuple(dict.fromkeys(names)), f"--{name} also changes {', '.join(follows)}")
        for (name, follows), names in found.items()
    ]


def _scored_apart(name: str, x: RLArgs, y: RLArgs) -> bool:
    """Whether evaluations of the two arms, which differ in argument `name`, measure different things."""
    return name != "reward" or x.evaluation_rule != y.evaluation_rule


def _few_seeds(seeds: Sequence[int]) -> list[LintWarning]:
    if len(seeds) > 1:
        return []
    return [
        LintWarning(
            "seeds", (), "one seed cannot tell an arm from luck; there will be no verdict: give at least two, --seed 0 1"
        )
    ]

"""The design of a sweep: its arms, and warnings about comparisons that they cannot decide. An arm
is the arguments of a training run, which the sweep repeats with several seeds. Nothing runs
here."""

import dataclasses
import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from alignment.args import BOOKKEEPING, CHANGEABLE_ON_RESUME, CONTROLS, NOT_SWEPT, RLArgs
from alignment.config.flag import (
    defaults_of_flags,
    flags_of_class,
    hints_of_flags,
    idle_flags,
    refused,
)
from alignment.config.presets import values_of_preset
from alignment.config.settings import (
    CHOICES,
    OwnFlag,
    arguments_of,
    changed_values,
    flag_values,
    given_values,
    is_own,
    own_flags,
    replaced,
    root_flag,
    settings_for,
    unknown_setting,
)
from alignment.core.advantages import ADVANTAGE_ARGUMENTS, ADVANTAGES
from alignment.core.losses import LOSSES, OPTIONAL_ARGUMENTS
from alignment.core.selection import SELECTION_ARGUMENTS
from alignment.data.tasks import DataConfig
from alignment.system.errors import UserError
from alignment.system.files import read_toml

ALPHA = 0.05  # largest chance that any verdict of a sweep is false
# standard deviation of an arm's accuracy between seeds that is assumed before it is measured
SEED_STD = 0.02
MAJORITY_VOTE = "majority_vote"  # the reward without the truth
CONTROL = "control_"  # what the names of control arms begin with
REPORTED = "reported"  # the entry of sweep.json with what `reported_seeds` gives


@dataclass(frozen=True)
class Design:
    """The plan of a sweep: its folder, its arms by name, its seeds, and its warnings."""

    folder: Path
    arms: Mapping[str, RLArgs]
    seeds: tuple[int, ...]
    hold: str  # what arms of different group sizes have in common: "rollouts" or "prompts"
    tie: float  # difference of accuracies below which two arms are taken to tie
    # Largest chance that any verdict is false. With --until_decided, verdicts are made after each
    # further seed, and this is the share of one time.
    alpha: float
    warnings: tuple[str, ...]
    # Arms are compared after equal "steps", "samples", "tokens" or "seconds".
    match: str = "steps"
    # Arguments of which each arm chose its own value: part of what an arm is, not of what varies.
    tuned: tuple[str, ...] = ()
    measure: str = "accuracy"  # What verdicts are on, as `read_measure` takes it.
    question: tuple[str, ...] = ()  # What --until_decided decides; empty: all comparisons.

    @property
    def varied(self) -> dict[str, dict[str, object]]:
        recorded = {name: args.recorded_values for name, args in self.arms.items()}
        return varied_values(recorded, self.tuned)

    def facts(self) -> dict[str, object]:
        """What sweep.json keeps of the design: everything but the seeds. As JSON gives it back, so
        that it can be compared to the file. `fixed_facts` has what a continued sweep must keep."""
        arms = {name: args.recorded_values for name, args in self.arms.items()}
        settings: dict[str, object] = {
            "hold": self.hold,
            "match": self.match,
            "tie": self.tie,
            "alpha": self.alpha,
        }
        if self.tuned:
            settings["tuned"] = self.tuned
        if self.measure != "accuracy":
            settings["measure"] = self.measure
        if self.alpha < ALPHA:
            settings["question"] = sorted(self.question)
        return json.loads(json.dumps({**settings, "arms": arms}))


def fixed_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The part of sweep.json that must stay the same when a sweep is continued.

    The arms may change those arguments that a resumed run may change, but not their number of
    steps, nor when they are evaluated where the measure is of all evaluations. Arguments that are
    newer than the file get their defaults."""
    free = (CHANGEABLE_ON_RESUME | {"preview"}) - {"num_steps"}
    if is_of_all_evaluations(facts.get("measure", "accuracy")):
        free -= {"eval_interval"}
    every_default = defaults_of_flags(RLArgs)
    fixed = {name: value for name, value in every_default.items() if name not in free}
    defaults = json.loads(json.dumps(fixed))  # As read from a file: lists for tuples.
    arms: dict[str, dict[str, Any]] = {}
    for arm, args in facts.get("arms", {}).items():
        own = {name: value for name, value in args.items() if is_own(name)}
        arms[arm] = own | {name: args.get(name, default) for name, default in defaults.items()}
    return {
        "match": facts.get("match", "steps"),
        "hold": facts.get("hold"),
        "tie": facts.get("tie"),
        "alpha": facts.get("alpha"),
        "tuned": facts.get("tuned", []),
        "measure": facts.get("measure", "accuracy"),
        "arms": arms,
    }


def reported_seeds(facts: Mapping[str, Any], file: Path) -> list[int]:
    """The numbers of seeds after which a sweep's verdicts have been reported, by the content of its
    sweep.json, `file`; none in that of an older version. Raises `UserError` where it is damaged."""
    numbers = facts.get(REPORTED, [])
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise UserError(f"{file} is damaged: {REPORTED} must be numbers of seeds")
    return numbers


def varied_values(
    arms: Mapping[str, Mapping[str, object]], tuned: Collection[str] = ()
) -> dict[str, dict[str, object]]:
    """The arguments in which arms differ, without those that each arm has tuned: by arm, {name:
    value}."""
    every_name: dict[str, None] = {}
    for values in arms.values():
        every_name |= dict.fromkeys(values)
    names = []
    for name in every_name:
        if name in tuned:
            continue
        values_of_arms = {json.dumps(arm.get(name)) for arm in arms.values()}
        if len(values_of_arms) > 1:
            names.append(name)
    varied: dict[str, dict[str, object]] = {}
    for arm, values in arms.items():
        varied[arm] = {name: values.get(name) for name in names}
    return varied


def implied_settings(varied: Mapping[str, Mapping[str, object]]) -> set[str]:
    """The varied settings of a component that its own name decides: each value of `advantage` comes
    with one value of `advantage.threshold`, which some have and others lack."""
    implied = set()
    for name in next(iter(varied.values()), {}):
        if is_own(name) and is_decided_by(root_flag(name), name, varied):
            implied.add(name)
    return implied


def is_decided_by(first: str, second: str, varied: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether two arguments vary, and each value of the first comes with one value of the second:
    to choose the first is to choose both."""
    if not all({first, second} <= set(values) for values in varied.values()):
        return False
    pairs = {(str(values[first]), str(values[second])) for values in varied.values()}
    values_of_first = {value for value, _ in pairs}
    return len(pairs) == len(values_of_first) > 1


def grid(preset: str, values: Mapping[str, tuple], hold: str) -> dict[str, RLArgs]:
    """The arms of a grid by name. `values` has one or several values for each argument; every
    combination of the several ones is an arm. A setting that only some loss has, say, is one of the
    arms with that loss alone.

    Where arms differ in the group size, `hold` = "rollouts" gives an arm with larger groups fewer
    prompts a step, so that all arms train on equally many responses. With "prompts" they train on
    the same prompts, and a larger group costs more. Raises `UserError` if an arm cannot work."""
    varied: dict[str, list[Any]] = {}
    single: dict[str, Any] = {}
    for name, given in values.items():
        # A setting waits until an arm's loss, advantage, reward and sampler are known.
        if len(given) > 1 or (given and is_own(name)):
            varied[name] = list(dict.fromkeys(given))
        elif given:
            single[name] = given[0]
    shared = values_of_preset(RLArgs, preset, single)
    responses = shared["prompts_per_rollout"] * shared["group_size"]
    holds_rollouts = (
        hold == "rollouts" and "group_size" in varied and "prompts_per_rollout" not in varied
    )
    arms: dict[str, RLArgs] = {}
    for combination in itertools.product(*varied.values()):
        chosen = dict(zip(varied, combination, strict=True))
        plain, settings = _split(single | chosen)
        arm = _arm(values_of_preset(RLArgs, preset, plain), settings)
        if holds_rollouts:
            arm = _hold_rollouts(arm, responses)
        facts = flag_values(arm)
        labels = []
        for key, values_of_key in varied.items():
            # A setting that this arm does not have is not in its facts.
            if key in facts and len(values_of_key) > 1:
                labels.append(label_of(key, facts[key]))
        name = "_".join(labels) or label_of("loss_type", shared["loss_type"])
        # Values of a setting that an arm has not make it no other arm.
        if arms.get(name, arm) != arm:
            raise UserError(
                f"two arms would be called {name}: give them names of their own in a --sweep_file"
            )
        arms[name] = arm
    refuse_unknown_settings(values, arms.values())
    refuse_idle_arguments(values, values, arms.values())
    return arms


def with_settings(arm: RLArgs, values: Mapping[str, Any]) -> RLArgs:
    """The arm with other values, but for settings that its loss, advantage, reward and sampler do
    not have."""
    plain, settings = _split(values)
    return _arm(changed_values(RLArgs, given_values(arm), plain), settings)


def _split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of flags that every arm has, and those of settings that only some loss, say,
    has."""
    plain = {name: value for name, value in values.items() if not is_own(name)}
    settings = {name: value for name, value in values.items() if is_own(name)}
    return plain, settings


def _arm(values: Mapping[str, Any], settings: Mapping[str, Any]) -> RLArgs:
    """The arguments of these values of all flags, with those of the `settings` that their loss,
    advantage, reward and sampler have."""
    known = settings_for(RLArgs, values)
    chosen = {name: value for name, value in settings.items() if name in known}
    return arguments_of(RLArgs, {**values, **chosen})


def refuse_unknown_settings(names: Iterable[str], arms: Collection[RLArgs]) -> None:
    """Raise `UserError` for a setting, among the names of arguments, that no arm has."""
    flags: dict[str, OwnFlag] = {}
    for arm in arms:
        flags |= own_flags(arm)
    for name in filter(is_own, names):
        if name not in flags:
            values = dict.fromkeys(str(getattr(arm, root_flag(name))) for arm in arms)
            raise unknown_setting(name, " ".join(values), flags)


def refuse_idle_arguments(
    values: Mapping[str, tuple], given: Collection[str], arms: Collection[RLArgs], place: str = ""
) -> None:
    """Raise `UserError` for an argument that plays no part in any arm, where `values` has others
    than its default for it, unless the one that it needs is `given`, too; its message begins with
    `place`."""
    defaults = defaults_of_flags(RLArgs)
    for name, values_of_name in values.items():
        needed = {idle_flags(RLArgs, vars(arm)).get(name, "") for arm in arms}
        if "" in needed or needed & set(given):
            continue  # An arm uses it, or who gives both knows that none does.
        if set(values_of_name) != {defaults[name]}:
            [other] = needed
            refusal = refused(name, values_of_name, f"left out, or go with --{other}")
            raise UserError(f"{place}{refusal}")


def _hold_rollouts(arm: RLArgs, responses: int) -> RLArgs:
    """The arm with its prompts a step changed so that a step has so many `responses`. Raises
    `UserError` if the group size does not divide them."""
    if responses % arm.group_size:
        reason = (
            f"{responses} responses a step are no whole number of such groups; choose sizes that"
            " divide it, or --hold prompts"
        )
        raise UserError(f"--group_size {arm.group_size} --hold rollouts: {reason}")
    return dataclasses.replace(arm, prompts_per_rollout=responses // arm.group_size)


def named_arms(file: str, preset: str, values: Mapping[str, tuple]) -> dict[str, RLArgs]:
    """The arms of a TOML file. An arm's values are those at the top of the file, overridden by
    `values` from the command line, overridden by those of the arm's own table. A table [about] is
    ignored. Raises `UserError`, naming the file, if it is malformed or an arm cannot work."""
    varied = [name for name, given in values.items() if len(given) > 1]
    if varied:
        raise UserError(
            f"--{varied[0]}: with --sweep_file the arms are those of the file; give one value, or"
            " no file"
        )
    content = read_toml(Path(file), "--sweep_file")
    content.pop("about", None)
    arms = content.pop("arms", None)
    has_arms = isinstance(arms, dict) and bool(arms)
    if not has_arms or not all(isinstance(arm, dict) for arm in arms.values()):
        raise UserError(f"--sweep_file {file}: needs a table [arms.NAME] for each arm")
    shared, shared_settings = _split(content | {name: given[0] for name, given in values.items()})
    for name in arms:
        if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
            raise UserError(
                f"--sweep_file {file}: arm {name!r}: use letters, digits, _, -, + and points"
            )
    made: dict[str, RLArgs] = {}
    for name, own in arms.items():
        of_arm = {**shared, **own}
        _check_values(of_arm, f"{file}: arm {name}: ")
        settings = {key: value for key, value in shared_settings.items() if key not in own}
        made[name] = _arm(values_of_preset(RLArgs, preset, of_arm), settings)
        own_values = {key: (value,) for key, value in own.items()}
        refuse_idle_arguments(own_values, of_arm, [made[name]], f"{file}: arm {name}: ")
    refuse_unknown_settings(shared_settings, made.values())
    shared_values = {key: (value,) for key, value in shared.items()}
    refuse_idle_arguments(shared_values, shared, made.values())
    return made


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _check_values(values: Mapping[str, object], place: str) -> None:
    """Raise `UserError` for what is no argument of an arm, and for values of another type; its
    message begins with `place`, where the values stand."""
    hints = hints_of_flags(RLArgs)
    for name, value in values.items():
        if is_own(name):
            continue
        if isinstance(value, dict) and name in CHOICES:
            key = f"{name}.{next(iter(value), 'NAME')}"
            raise UserError(f'{place}{key}: write it in quotes, "{key}"')
        if name not in hints or name in NOT_SWEPT | {"seed"}:
            raise UserError(f"{place}{name} is no argument of an arm")
        objection = _type_objection(name, value, hints[name])
        if objection:
            raise UserError(f"{place}{name} = {value!r}: {objection}")


def given_value(name: str, text: str, place: str) -> Any:
    """The value of an arm's argument that stands as text on a command line. Raises `UserError` for
    an unknown argument or a bad value; its message begins with `place`."""
    if is_own(name):
        return text
    hints = hints_of_flags(RLArgs)
    if name not in hints or name in NOT_SWEPT | {"seed"}:
        raise UserError(f"{place}{name}: is no argument of an arm")
    value: Any = text
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
    objection = _type_objection(name, value, hints[name])
    if objection and not _type_objection(name, text, hints[name]):
        return text
    if objection:
        raise UserError(f"{place}{name}={text}: {objection}")
    if float in (hints[name], *get_args(hints[name])) and type(value) is int:
        return float(value)
    return value


def _type_objection(name: str, value: object, hint: Any) -> str:
    """What is wrong with a value from a file: it is none of the argument's choices, or of another
    type. "" if nothing is wrong."""
    choices: tuple[Any, ...] = flags_of_class(RLArgs)[name].choices
    if get_origin(hint) is Literal:
        choices = get_args(hint)
    # A name with a colon is the import path of one of the user's own.
    tables = {"loss_type": LOSSES, "advantage": ADVANTAGES}
    if name in tables and ":" not in str(value):
        choices = tuple(tables[name])
    if choices and value not in choices:
        return f"choose one of {', '.join(map(str, choices))}"

    # For a type such as int | None, the value must be an int, since TOML has no None.
    members = [member for member in get_args(hint) if member in _KINDS]
    kind = members[0] if members else hint
    allowed: tuple[Any, ...] = ()
    if kind is float:
        allowed = (int, float)
    elif kind in _KINDS:
        allowed = (kind,)
    # By `type`, since isinstance(True, int) holds.
    if allowed and type(value) not in allowed:
        return f"must be {_KINDS[kind]}"
    return ""


def label_of(key: str, value: object) -> str:
    """The part of an arm's name for one argument, fit for the name of a folder: `grpo_clip`,
    `group_size4`, `pass_rate_band0.2-0.8`, `no_normalize_by_std`."""
    if isinstance(value, bool):
        return key if value else f"no_{key}"
    text = str(value).replace("/", "-").replace(":", ".")
    says_what_it_is = re.fullmatch(r"[\d.-]*", text) is None  # A band of numbers does not.
    if isinstance(value, str) and says_what_it_is:
        return text
    return f"{key}{text}"


def name_of(arm: RLArgs, base: RLArgs) -> str:
    """The name of an arm from the arguments in which it differs from `base`, fit for the name of a
    folder; "" if it differs in none."""
    values = flag_values(arm)
    names = [name for name in differing((arm, base)) if name in values]
    return "_".join(label_of(name, values[name]) for name in names)


def with_controls(arms: Mapping[str, RLArgs]) -> dict[str, RLArgs]:
    """The arms, and as control arms copies of the first one: one for each reward that is a negative
    control, one for the majority vote, which knows no truth, and one with a learning rate of 0,
    which does not train. Raises `UserError` where an arm has the name of one of them."""
    first = next(iter(arms.values()))
    controls = {name: replaced(first, reward=name) for name in (*CONTROLS, MAJORITY_VOTE)}
    controls["no_training"] = dataclasses.replace(first, learning_rate=0.0)
    added = {f"{CONTROL}{name}": arm for name, arm in controls.items()}
    for name in added:
        if name in arms:
            raise UserError(
                f"--controls adds an arm {name}, and the sweep has one of that name: rename it"
            )
    return {**arms, **added}


def run_folders(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """The folders of a sweep's runs, sorted, each with its run's arm and seed."""
    for path in sorted(folder.glob("*_seed*")):
        arm, _, seed = path.name.rpartition("_seed")
        if seed.isdigit():
            yield path, arm, int(seed)


def is_control(arm: str) -> bool:
    """Whether an arm of this name is a control, beside the arms that are compared."""
    return arm.startswith(CONTROL)


def _values_in_words(arms: Mapping[str, RLArgs], field: str) -> list[str]:
    """The different values that the arms have of a field, in order, as a command line has them."""
    values = set()
    for args in arms.values():
        values.add(str(getattr(args, field)))
    return sorted(values)


# Arguments that decide which questions an evaluation asks, beside the task.
_QUESTIONS = ("max_problems", "max_prompt_tokens", "dataset_path", *vars(DataConfig()))
# Arguments that decide the text in which training and evaluations ask a question.
_PROMPTS = ("prompt", "system_prompt", "few_shot")
# Measures of all evaluations of a run together: with more of them a best is higher, and an accuracy
# is reached earlier.
_OF_ALL_EVALUATIONS = ("area", "best", "tokens_to")
# Arguments of evaluations alone.
_ANSWERS = (
    "eval_temperature",
    "eval_top_p",
    "eval_top_k",
    "eval_samples",
    "eval_rule",
    "eval_max_new_tokens",
)


def refuse_incomparable_arms(arms: Mapping[str, RLArgs]) -> None:
    """Raise `UserError` if arms would be evaluated on different problems, or have one warm start
    for different tasks or models."""
    for field in _QUESTIONS:
        values = _values_in_words(arms, field)
        if len(values) > 1:
            raise UserError(
                f"--{field} {' '.join(values)}: the arms would answer different questions; give one"
                " value"
            )
    for field in _ANSWERS:
        values = _values_in_words(arms, field)
        if len(values) > 1:
            raise UserError(
                f"--{field} {' '.join(values)}: the arms would be evaluated in different ways; give"
                " one value"
            )
    # By warm start, the first arm that has it.
    first_arms: dict[str, tuple[str, RLArgs]] = {}
    for name, args in arms.items():
        other, first = first_arms.setdefault(args.sft_base, (name, args))
        if args.sft_base and (args.task, args.model) != (first.task, first.model):
            reason = f"{other} and {name} differ in task or model and cannot share a warm start"
            raise UserError(
                f"--sft_base {args.sft_base}: {reason}; give each its own sft_base in a"
                " --sweep_file"
            )


def is_of_all_evaluations(measure: str) -> bool:
    """Whether a measure depends on how often a run is evaluated."""
    return measure.partition("@")[0] in _OF_ALL_EVALUATIONS


def refuse_unequal_evaluations(arms: Mapping[str, RLArgs], measure: str) -> None:
    """Raise `UserError` if arms would be evaluated at different steps, and that would change the
    measure of verdicts."""
    intervals = _values_in_words(arms, "eval_interval")
    if len(intervals) > 1 and is_of_all_evaluations(measure):
        raise UserError(
            f"--eval_interval {' '.join(intervals)}: --measure {measure} is of all evaluations of a"
            " run, and arms with more of them would look better or worse by that; give one value"
        )


def refuse_shared_warm_starts(arms: Mapping[str, RLArgs]) -> None:
    """Raise `UserError` if SFT would make one warm start of arms that ask it for different ones.
    One that is there already is the user's choice for all of them."""
    # By warm start, the first arm that has it.
    first_arms: dict[str, tuple[str, RLArgs]] = {}
    for name, args in arms.items():
        is_made = args.sft_base and args.auto_sft and not Path(args.sft_base).exists()
        if not is_made:
            continue
        other, first = first_arms.setdefault(args.sft_base, (name, args))
        taught = _taught(first)
        fields = [field for field, value in _taught(args).items() if value != taught[field]]
        if fields:
            raise UserError(
                f"--sft_base {args.sft_base}: {other} and {name} differ in --{fields[0]}, and SFT"
                " would make their warm start with the value of one; give each its own sft_base in"
                " a --sweep_file, or make the warm start first, with `uv run -m alignment.sft`"
            )


def _taught(args: RLArgs) -> dict[str, object]:
    """What decides, beside the task and the model, what SFT makes of an arm's warm start: by the
    argument that says it."""
    values = {name: getattr(args, name) for name in (*_PROMPTS, "dtype", "sft_share")}
    # Where none is named it is the task's own, or that of --reward boxed.
    return {**values, "prompt": args.task_in_format.prompt}


def lint(arms: Mapping[str, RLArgs], seeds: Sequence[int]) -> list[str]:
    """Warnings about arms that compute the same, about arms that differ in more than one quantity,
    and about a single seed, where no other may follow."""
    warnings = [*_equivalent(arms), *_confounded(arms)]
    if len(seeds) < 2:
        warnings.append(
            "one seed cannot tell an arm from luck; there will be no verdict: give at least two,"
            " --seed 0 1"
        )
    return warnings


# Arms that are matched by samples, tokens or seconds are compared at an amount at which they may
# not have been evaluated: there an arm's score is interpolated linearly between evaluations. The
# error is bounded by how its learning curve bends, which the neighbouring intervals show. So one
# interval must have a neighbour on both sides.
FEWEST_INTERVALS = 3
# Linear interpolation at a distance h is off by at most h^2 max|f''| / 8. For a curve f(x) = 1 -
# exp(-4 x), which has risen by nine tenths at x = 0.6 of a run, |f''| <= 16, so that 8 intervals
# (h = 1/8) are off by at most (4 / 8)^2 / 8 = 3 % of the rise.
ENOUGH_INTERVALS = 8


def _count_intervals(args: RLArgs) -> int:
    """The number of intervals between a run's evaluations; the last may be shorter."""
    return math.ceil(args.num_steps / args.eval_interval)


def refuse_rare_evaluations(arms: Mapping[str, RLArgs], match: str) -> None:
    """Raise `UserError` if scores are interpolated between evaluations that are too few to show how
    an arm's learning curve bends."""
    if not may_interpolate(arms, match):
        return
    for name, args in arms.items():
        intervals = _count_intervals(args)
        if intervals < FEWEST_INTERVALS:
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
    """A warning if scores are interpolated between evaluations so far apart that the error may
    leave verdicts undecided."""
    if not may_interpolate(arms, match):
        return []
    rare = {}
    for name, args in arms.items():
        if _count_intervals(args) < ENOUGH_INTERVALS:
            rare[name] = args
    if not rare:
        return []
    most = max(1, min(args.num_steps for args in rare.values()) // ENOUGH_INTERVALS)
    reason = (
        f"--match {match} compares between evaluations, and a verdict that the bend of a learning"
        " curve could undo stays"
    )
    return [f"{', '.join(rare)}: {reason} undecided: --eval_interval {most} or less keeps it small"]


def may_interpolate(arms: Mapping[str, RLArgs], match: str) -> bool:
    """Whether an arm's score may have to be interpolated between two evaluations. It is not if all
    arms reach their last evaluation after the same amount of what `match` names."""
    if match == "steps":
        return False
    if match != "samples":
        return True
    samples = {args.rollout_size * args.num_steps for args in arms.values()}
    return len(samples) > 1 or any(args.max_refills for args in arms.values())


def canonical(args: RLArgs) -> dict[str, object]:
    """The arguments on which the result depends, in one form: arms that compute the same have equal
    ones. Arguments that have no effect given the others are left out.

    With one update a rollout, sampled by the current weights, the ratio to the old policy is 1.
    There every loss with a ratio, of a token or of a response, clipped or not, has the gradient of
    -A log pi (arXiv:2402.03300, section 4.1.3; PPO, arXiv:1707.06347, section 3)."""
    facts = {name: value for name, value in args.recorded_values.items() if _decides(name)}
    if facts["train_mini_batch_size"] >= args.rollout_size:
        facts["train_mini_batch_size"] = 0
    if facts["reference_reset_interval"] >= args.num_steps:
        facts["reference_reset_interval"] = 0
        facts["reference_reset_optimizer"] = False
    facts["max_staleness"] = args.staleness
    facts["rollouts"] = "async" if args.staleness else "sync"
    loss = args.loss
    idle_prefixes: list[str] = []  # Of settings that play no part.
    ratio_is_one = args.updates_per_rollout == 1 and not args.trusts_sampler
    # With one ratio a response (GSPO) the loss of each token has the gradient of the response's
    # mean. Weights of single tokens then act otherwise than in the other losses.
    weighs_tokens = args.sampler_correction.startswith("token") or args.selection is not None
    differs = loss.ratio_per_response and weighs_tokens
    if loss.at_ratio_one and ratio_is_one and not differs:
        facts["loss_type"] = loss.at_ratio_one
        loss = LOSSES[loss.at_ratio_one]
        idle_prefixes.append("loss.")
    if facts["cliprange_high"] is None:
        facts["cliprange_high"] = facts["cliprange"]
    idle = OPTIONAL_ARGUMENTS - loss.arguments
    idle |= ADVANTAGE_ARGUMENTS - {"advantage"} - args.estimator.arguments
    if "advantage" in idle:
        idle_prefixes.append("advantage.")
    if not facts["normalize_by_std"]:
        idle |= {"std_of", "advantage_eps"}
    if not loss.uses_ratio or args.staleness > 0:
        idle |= {"old_log_probs"}
    idle |= SELECTION_ARGUMENTS
    if args.selection is not None:
        idle -= args.selection.arguments
    idle |= idle_flags(RLArgs, vars(args)).keys()
    if facts["sft_base"]:
        idle |= {"model"}  # the weights are those of the warm start
    acting = {}
    for name, value in facts.items():
        is_idle = name in idle or name.startswith(tuple(idle_prefixes))
        if not is_idle:
            acting[name] = value
    return acting


def _equivalent(arms: Mapping[str, RLArgs]) -> list[str]:
    """A warning for each group of arms that compute the same."""
    # By canonical arguments, the names of the arms that have them.
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, args in arms.items():
        texts = [(argument, str(value)) for argument, value in canonical(args).items()]
        groups.setdefault(tuple(sorted(texts)), []).append(name)
    warnings = []
    for names in groups.values():
        if len(names) > 1:
            reason = _why_equivalent([arms[name] for name in names])
            warnings.append(f"{', '.join(names)}: mathematically the same ({reason})")
    return warnings


def _why_equivalent(arms: Sequence[RLArgs]) -> str:
    """The reason why arms with equal `canonical` arguments compute the same."""
    losses = {args.loss_type for args in arms}
    if len(losses) > 1:
        names = sorted(losses - {"reinforce_with_baseline"})
        verb = "has" if len(names) == 1 else "have"
        return (
            f"with one update a rollout the ratio is 1, so {' and '.join(names)} {verb} the"
            " gradient of reinforce_with_baseline"
        )
    flags = " and ".join(f"--{name}" for name in differing(arms))
    return f"{flags} plays no part here" if flags else "equal arguments"


def differing(arms: Sequence[RLArgs]) -> list[str]:
    """The arguments in which arms differ, without those on which no result depends."""
    facts = [flag_values(args) for args in arms]
    every_name: dict[str, None] = {}
    for values in facts:
        every_name |= dict.fromkeys(values)
    names = []
    for name in filter(_decides, every_name):
        if len({values.get(name) for values in facts}) > 1:
            names.append(name)
    return names


def _decides(name: str) -> bool:
    """Whether a run's result may depend on the argument."""
    return is_own(name) or name not in BOOKKEEPING


class Derived(NamedTuple):
    """A quantity that follows from several arguments. Some of them, its `factors`, are there to set
    it; the others change it as a side effect."""

    quantity: str
    value: Callable[[RLArgs], int]
    factors: frozenset[str] = frozenset()


def _prompts(args: RLArgs) -> int:
    return args.prompts_per_rollout


def _responses(args: RLArgs) -> int:
    return args.rollout_size


def _all_responses(args: RLArgs) -> int:
    return args.rollout_size * args.num_steps


def _updates(args: RLArgs) -> int:
    return args.updates_per_rollout * args.num_steps


def _draws(args: RLArgs) -> int:
    return 1 + args.max_refills


def _responses_an_update(args: RLArgs) -> int:
    return min(args.train_mini_batch_size or args.rollout_size, args.rollout_size)


DERIVED = (
    Derived("prompts a step", _prompts, frozenset({"prompts_per_rollout"})),
    Derived("responses a step", _responses),
    Derived("responses in all", _all_responses, frozenset({"num_steps"})),
    Derived("optimiser updates", _updates, frozenset({"epochs_per_rollout", "num_steps"})),
    Derived("draws of a group, at most", _draws),
    Derived("responses an update", _responses_an_update, frozenset({"train_mini_batch_size"})),
)
# Arguments that change the evaluation along with the training.
_EVALUATED = frozenset(
    {
        "reward",
        "sampling_temperature",
        "sampling_top_p",
        "sampling_top_k",
        "max_new_tokens",
        *_PROMPTS,
    }
)


def _confounded(arms: Mapping[str, RLArgs]) -> list[str]:
    """A warning for each argument that is the only difference between two arms and changes another
    quantity as a side effect."""
    # By the argument and the quantities, the arms.
    confounded: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (name_a, a), (name_b, b) in itertools.combinations(arms.items(), 2):
        names = differing((a, b))
        # --hold rollouts changes the prompts a step together with the group size.
        if "group_size" in names:
            names = [name for name in names if name != "prompts_per_rollout"]
        # The settings of a loss, say, come with it.
        names = [name for name in names if not is_own(name) or root_flag(name) not in names]
        if len(names) != 1:
            continue
        [name] = names
        effects = _side_effects(name, a, b)
        if effects:
            confounded.setdefault((name, effects), []).extend((name_a, name_b))
    warnings = []
    for (name, effects), names in confounded.items():
        arms_once = ", ".join(dict.fromkeys(names))
        warnings.append(f"{arms_once}: --{name} also changes {', '.join(effects)}")
    return warnings


def _evaluation_of(args: RLArgs) -> tuple:
    """What decides how an arm's evaluation samples and scores."""
    return (
        args.evaluation_rule,
        args.evaluation_temperature,
        args.evaluation_top_p,
        args.evaluation_top_k,
        args.eval_max_new_tokens or args.max_new_tokens,
        *(getattr(args, name) for name in _PROMPTS),
    )


def are_evaluated_alike(a: RLArgs, b: RLArgs) -> bool:
    """Whether evaluations of two arms ask the same questions, and sample and score alike."""
    for field in ("task", *_QUESTIONS, *_ANSWERS):
        if getattr(a, field) != getattr(b, field):
            return False
    return _evaluation_of(a) == _evaluation_of(b)


def _side_effects(name: str, a: RLArgs, b: RLArgs) -> tuple[str, ...]:
    """The quantities that the argument `name`, the only one in which two arms differ, changes as a
    side effect."""
    effects = []
    for derived in DERIVED:
        if derived.value(a) != derived.value(b) and name not in derived.factors:
            effects.append(derived.quantity)
    if name in _EVALUATED and _evaluation_of(a) != _evaluation_of(b):
        effects.append("how the evaluation samples or scores")
    return tuple(effects)

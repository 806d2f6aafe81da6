"""Settings that only one loss, advantage, reward or sampler has: the fields of a frozen dataclass
that its entry names. Each is a flag, such as --loss.alpha of the loss that --loss_type names.

`Args.own_settings` holds the values that were given. Everything else asks the functions here, which
know a setting by its flag's name, "loss.alpha", beside those of the other flags.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from alignment.config.flag import (
    NOUNS,
    OWN_SETTINGS,
    Flag,
    check_choices,
    check_flag,
    defaults_of_flags,
    flags_of_class,
    hints_of_flags,
    refused,
)
from alignment.core.advantages import ADVANTAGE_ARGUMENTS, ADVANTAGES, Advantage
from alignment.core.losses import LOSSES, OPTIONAL_ARGUMENTS, Loss
from alignment.rewards.rules import settings_of_reward
from alignment.sampling.sampler import named_engine
from alignment.system.errors import UserError
from alignment.system.nearest import did_you_mean
from alignment.system.registry import find

ArgumentsType = TypeVar("ArgumentsType")


def find_loss(name: str) -> Loss:
    """The loss that --loss_type names. Raises `UserError` for an unknown one."""
    # Nothing is known of a user's own function: it may use the ratio, and every argument.
    users_own = partial(Loss, weight=None, uses_ratio=True, arguments=OPTIONAL_ARGUMENTS)
    return find("--loss_type", name, LOSSES, wrap=users_own)


def find_advantage(name: str) -> Advantage:
    """The estimator that --advantage names. Raises `UserError` for an unknown one."""
    # Nothing is known of a user's own function: groups of equal rewards may teach something.
    users_own = partial(
        Advantage, arguments=ADVANTAGE_ARGUMENTS, silent_groups=True, smallest_group=1
    )
    return find("--advantage", name, ADVANTAGES, wrap=users_own)


def _classes_of_loss(name: str) -> list[type | None]:
    return [find_loss(name).settings]


def _classes_of_advantage(name: str) -> list[type | None]:
    return [find_advantage(name).settings]


def _classes_of_sampler(name: str) -> list[type | None]:
    return [named_engine(name).settings]


@dataclass(frozen=True)
class Choice:
    """A flag whose values name entries that may have settings of their own."""

    flag: str
    classes: Callable[[str], list[type | None]]
    """(value of the flag) -> the classes of settings that it has."""


# What a setting's name begins with -> the flag that chooses who has it.
CHOICES: Mapping[str, Choice] = {
    "loss": Choice("loss_type", _classes_of_loss),
    "advantage": Choice("advantage", _classes_of_advantage),
    "reward": Choice("reward", settings_of_reward),
    "sampler": Choice("sampler", _classes_of_sampler),
}


@dataclass(frozen=True)
class OwnFlag:
    """A setting as a flag: its type, what is declared of it, and its default."""

    hint: Any
    facts: Flag
    default: Any


def is_own(name: str) -> bool:
    """Whether a flag's name is that of a setting, such as "loss.alpha"."""
    prefix, point, _ = name.partition(".")
    return bool(point) and prefix in CHOICES


def chooser(name: str) -> str:
    """The flag that chooses who has the setting of this name: "loss_type" of "loss.alpha"."""
    return CHOICES[name.partition(".")[0]].flag


def root_flag(name: str) -> str:
    """The flag that `chooser` says of a setting; any other flag itself."""
    return chooser(name) if is_own(name) else name


def own_flags(args: Any) -> dict[str, OwnFlag]:
    """The settings that these arguments' loss, advantage, reward and sampler have, by name. Raises
    `UserError` where one cannot be imported, or declares what no flag can be."""
    return settings_for(type(args), vars(args))


def settings_for(cls: type, values: Mapping[str, Any]) -> dict[str, OwnFlag]:
    """The settings that the loss, advantage, reward and sampler among the values of flags of `cls`
    have, by name. Raises `UserError` as `own_flags`."""
    flags: dict[str, OwnFlag] = {}
    for prefix, choice in choices_of(cls):
        flags |= flags_of_value(prefix, values[choice.flag])
    return flags


def choices_of(cls: type) -> Iterator[tuple[str, Choice]]:
    """The choices that a class of arguments has flags for."""
    declared = flags_of_class(cls)
    for prefix, choice in CHOICES.items():
        if choice.flag in declared:
            yield prefix, choice


def flags_of_value(prefix: str, value: str) -> dict[str, OwnFlag]:
    """The settings of what one flag names, by name. Raises `UserError` as `own_flags`."""
    choice = CHOICES[prefix]
    flags: dict[str, OwnFlag] = {}
    for cls in choice.classes(value):
        if cls is None:
            continue
        own = flags_of_settings(f"--{choice.flag} {value}", prefix, cls)
        twice = sorted(own.keys() & flags.keys())
        if twice:
            raise UserError(
                f"--{choice.flag} {value}: two of its parts have a setting --{twice[0]}; rename it"
                " in one of them"
            )
        flags |= own
    return flags


def flags_of_settings(owner: str, prefix: str, cls: type) -> dict[str, OwnFlag]:
    """The fields of a dataclass of settings as flags. Raises `UserError`, beginning with `owner`,
    where it is no frozen dataclass of numbers, texts and choices with defaults."""
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue] # typeshed lacks it
        raise UserError(f"{owner}: its settings are {cls!r}, and must be a frozen dataclass")
    try:
        hints = hints_of_flags(cls)
    except Exception as error:  # a user's annotation may name anything
        raise UserError(
            f"{owner}: the types of its settings cannot be read ({type(error).__name__}: {error})"
        ) from None
    defaults = defaults_of_flags(cls)
    flags: dict[str, OwnFlag] = {}
    for name, facts in flags_of_class(cls).items():
        if not _is_supported(hints[name]):
            raise UserError(
                f"{owner}: its setting {name} is of type {hints[name]}; a setting is an int, float,"
                " bool, str or Literal of texts, or one of these or None"
            )
        if defaults[name] is dataclasses.MISSING:
            raise UserError(f"{owner}: its setting {name} needs a default")
        flags[f"{prefix}.{name}"] = OwnFlag(hints[name], facts, defaults[name])
    return flags


def kind_of(hint: Any) -> tuple[Any, bool]:
    """The type of a setting without None, and whether it may be None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    members = [member for member in get_args(hint) if member is not type(None)]
    if len(members) == 1:
        return members[0], True
    return hint, False


def _is_supported(hint: Any) -> bool:
    kind, _ = kind_of(hint)
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return kind in (bool, int, float, str)


def read_value(name: str, own: OwnFlag, given: object) -> Any:
    """The value of a setting, which a command line gives as text. Raises `UserError` for one of
    another type, or out of its bounds."""
    kind, is_optional = kind_of(own.hint)
    if is_optional and given in (None, "None"):
        return None
    if get_origin(kind) is Literal:
        check_choices(name, [given], get_args(kind))
        return given
    if given is True and kind is not bool:
        raise refused(name, "(no value)", NOUNS[kind])
    value = _converted(kind, given)
    if value is None:
        raise refused(name, given, NOUNS[kind])
    check_flag(name, own.facts, value)
    return value


def _converted(kind: type, given: object) -> Any:
    """A value of this type; None where what is given is none."""
    if isinstance(given, str) and kind is not str:
        if kind is bool:
            return {"true": True, "false": False}.get(given.lower())
        try:
            number = kind(given)
        except ValueError:
            return None
        return number if math.isfinite(number) else None
    if kind is float and type(given) is int:
        return float(given)
    return given if type(given) is kind else None


def own_values(args: Any) -> dict[str, Any]:
    """The values of all settings that `own_flags` names, those given and the others' defaults.
    Raises `UserError` for a setting that there is not, and as `read_value`."""
    flags = own_flags(args)
    values = {name: own.default for name, own in flags.items()}
    for name, given in vars(args).get(OWN_SETTINGS, ()):
        if name not in flags:
            raise unknown_setting(name, getattr(args, chooser(name), ""), flags)
        values[name] = read_value(name, flags[name], given)
    return values


def unknown_setting(name: str, value: object, flags: Mapping[str, OwnFlag]) -> UserError:
    """The error for a setting that what is chosen does not have; it lists those that it has."""
    prefix, _, _ = name.partition(".")
    own = [f"--{known}" for known in flags if known.startswith(f"{prefix}.")]
    has = "has no settings of its own"
    if own:
        has = f"has {' '.join(own)}{did_you_mean(f'--{name}', own)}"
    return UserError(f"--{name}: there is no such flag; --{chooser(name)} {value} {has}")


def check_own_settings(args: Any) -> None:
    """Raise `UserError` as `own_values`, if any setting is given."""
    if vars(args)[OWN_SETTINGS]:
        own_values(args)


def settings_of(args: Any, prefix: str) -> Any:
    """The settings of what one of the `CHOICES` but "reward" names, as an instance of their class;
    None where it has none."""
    choice = CHOICES[prefix]
    [cls] = choice.classes(getattr(args, choice.flag))
    if cls is None:
        return None
    return cls(**fields_of(args, prefix))


def fields_of(args: Any, prefix: str) -> dict[str, Any]:
    """The values of the settings that begin with `prefix`, without it. One that is None and follows
    another flag has that flag's."""
    flags = own_flags(args)
    values = {}
    for name, value in own_values(args).items():
        choice, _, field = name.partition(".")
        if choice != prefix:
            continue
        followed = flags[name].facts.follows
        if value is None and followed:
            value = getattr(args, followed)
        values[field] = value
    return values


def flag_values(args: Any) -> dict[str, Any]:
    """The values of all flags by name, the settings' own ones among them."""
    return {name: getattr(args, name) for name in flags_of_class(args)} | own_values(args)


def given_values(args: Any) -> dict[str, Any]:
    """As `flag_values`, without the settings that were not given."""
    values = {name: getattr(args, name) for name in flags_of_class(args)}
    return values | dict(vars(args).get(OWN_SETTINGS, ()))


def changed_values(
    cls: type, values: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of flags of `cls`, overridden by `changes`. The settings of a loss, say, are left out
    where `changes` choose another one."""
    defaults = defaults_of_flags(cls)
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if is_own(name):
            flag = chooser(name)
            before = values.get(flag, defaults.get(flag))
            if changes.get(flag, before) != before:
                continue
        kept[name] = value
    return kept | dict(changes)


def arguments_of(cls: type[ArgumentsType], values: Mapping[str, Any]) -> ArgumentsType:
    """The arguments that these values of flags make, settings' own ones among them."""
    plain = {name: value for name, value in values.items() if not is_own(name)}
    own = {name: value for name, value in values.items() if is_own(name)}
    if not own:
        return cls(**plain)
    args = cls(**plain, **{OWN_SETTINGS: tuple(own.items())})
    # Values that were given as text become numbers.
    read = own_values(args)
    pairs = tuple((name, read[name]) for name in sorted(own))
    return cls(**plain, **{OWN_SETTINGS: pairs})


def unchecked_arguments(cls: type[ArgumentsType], values: Mapping[str, Any]) -> ArgumentsType:
    """As `arguments_of`, for the values of all flags, but without a check: for those of a preset,
    which other flags may have to make valid."""
    args = object.__new__(cls)
    for name in flags_of_class(cls):
        object.__setattr__(args, name, values[name])
    own = tuple((name, value) for name, value in values.items() if is_own(name))
    object.__setattr__(args, OWN_SETTINGS, own)
    return args


def replaced(args: ArgumentsType, **changes: Any) -> ArgumentsType:
    """`dataclasses.replace` for values of flags, settings' own ones among them."""
    cls = type(args)
    return arguments_of(cls, changed_values(cls, given_values(args), changes))

"""Named choices: one table of entries for each flag, to which a user adds an entry of their own as
`package.module:name`."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TypeVar, cast

from alignment.system.errors import PACKAGE, USERS_PACKAGES, UserError
from alignment.system.files import read_toml
from alignment.system.nearest import did_you_mean

Entry = TypeVar("Entry")
OTHER_VALUES = Path(__file__).parents[1] / "other_values.toml"


def find(
    flag: str,
    name: str,
    table: Mapping[str, Entry],
    wrap: Callable[[Callable], Entry] | None = None,
) -> Entry:
    """The entry `name` of `table`, or an entry of the user's own, which `name` imports as
    `package.module:name`.

    The imported object must be of the class of the table's entries; where these are functions, any
    callable will do. `wrap` makes an entry of a callable. An object that is of the entries' class
    already is not wrapped, unless the entries are functions: then the user's function is wrapped.

    Raises `UserError`, whose message begins with `flag`, for an unknown name, for a module that
    cannot be imported, and for any other object."""
    if name in table:
        return table[name]
    kind = type(next(iter(table.values())))
    holds_functions = kind is FunctionType
    takes_callables = wrap is not None or holds_functions
    module, _, _ = name.rpartition(":")
    if not module:
        form = "one of your own as package.module:name"
        if takes_callables:
            form = "a function as package.module:function"
        noun = flag.strip("-").removesuffix("s").replace("_", " ")
        hint = name_here(flag, name) or did_you_mean(name, table)
        raise UserError(
            f"{flag} {name}: there is no such {noun}{hint}; choose one of {', '.join(table)}, or"
            f" name {form}"
        )
    entry = import_object(flag, name)
    must_be_wrapped = wrap is not None and holds_functions
    if isinstance(entry, kind) and not must_be_wrapped:
        return cast(Entry, entry)
    if not takes_callables or not callable(entry):
        wanted = "a function" if takes_callables else kind.__name__
        raise UserError(
            f"{flag} {name}: cannot be imported (TypeError: it is of type {type(entry).__name__},"
            f" not {wanted})"
        )
    if wrap is None:
        return cast(Entry, entry)
    try:
        return wrap(entry)
    except (TypeError, ValueError) as error:  # such as a callable without a signature
        raise UserError(
            f"{flag} {name}: cannot be imported ({type(error).__name__}: {error})"
        ) from None


def name_here(flag: str, value: str) -> str:
    """ " (NAME of other libraries: REMEDY)" for a value that a flag has in another library or in
    papers; empty for any other."""
    remedies = read_toml(OTHER_VALUES, flag).get(flag.strip("-"), {})
    remedy = remedies.get(value) or remedies.get(value.lower())
    return f" ({value} of other libraries: {remedy})" if remedy else ""


def check_call(flag: str, name: str, function: Callable, *arguments: str) -> None:
    """Raise `UserError`, with the function's file and line, where a function of the user's own
    cannot be called with these arguments, by position. Nothing is called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = ", ".join(arguments)
        place = place_of(function)
        raise UserError(f"{flag} {name}: it is called with ({called}): {error} ({place})") from None


def place_of(function: Callable) -> str:
    """The file of a function, and the line where it begins; of another callable, the file of its
    class."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    module = sys.modules.get(type(inner).__module__)
    return getattr(module, "__file__", None) or type(inner).__module__


def import_object(flag: str, path: str) -> object:
    """The object that `path`, written as `package.module:name`, imports. Raises `UserError` that
    begins with `flag`."""
    module, _, attribute = path.rpartition(":")
    # `errors` names the line where code of these packages fails.
    if not module.startswith(f"{PACKAGE.name}."):
        USERS_PACKAGES.add(module.partition(".")[0])
    names: list[str] = []
    try:
        imported = importlib.import_module(module)
        names = _names_defined_in(module, vars(imported))
        return getattr(imported, attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        listed = ""
        if module.endswith(".py"):
            listed = f"; name the module without .py: {module.removesuffix('.py')}:{attribute}"
        if names:
            listed = f"{did_you_mean(attribute, names)}; {module} has {', '.join(names)}"
        raise UserError(
            f"{flag} {path}: cannot be imported ({type(error).__name__}: {error}){listed}"
        ) from None


LISTED_NAMES = 12


def _names_defined_in(module: str, variables: Mapping[str, object]) -> list[str]:
    """The first public names of a module that it has not imported from elsewhere, modules left
    out."""
    names = []
    for name, value in variables.items():
        is_own = getattr(value, "__module__", module) == module
        if is_own and not name.startswith("_") and not isinstance(value, ModuleType):
            names.append(name)
    return names[:LISTED_NAMES]

"""What args.json says of arguments whose default is "auto"."""

from collections.abc import Mapping
from typing import Any

AUTO = "auto"
"""The key of args.json with the names of the flags that were "auto"; "args" has what each came
to."""


def was_auto(record: Mapping[str, Any], name: str) -> bool:
    """Whether the flag of this name was "auto" in the run of an args.json.

    Files without the key are older. There the default of --reward was r1_zero, in whose place a
    prompt that asks for a box was graded by `boxed`, also where r1_zero had been named."""
    if AUTO in record:
        return name in record[AUTO]
    return name == "reward" and record["args"].get(name) == "r1_zero"

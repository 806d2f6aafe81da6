"""Regions of the line in words: `between 2 and 5 inclusive`, `x is at least 3`."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

from alignment.rewards.grading import answers
from alignment.rewards.grading.answers import Answer, Labelled, Region

# The words for each relation to a number, in `x is at least 3`.
_COMPARATIVES = {
    "at least": "≥",
    "no less than": "≥",
    "not less than": "≥",
    "greater than or equal to": "≥",
    "more than or equal to": "≥",
    "at most": "≤",
    "no more than": "≤",
    "no greater than": "≤",
    "not more than": "≤",
    "not greater than": "≤",
    "less than or equal to": "≤",
    "strictly greater than": ">",
    "greater than": ">",
    "larger than": ">",
    "more than": ">",
    "strictly less than": "<",
    "less than": "<",
    "smaller than": "<",
    "not equal to": "≠",
    "大于或等于": "≥",
    "大于等于": "≥",
    "不小于": "≥",
    "小于或等于": "≤",
    "小于等于": "≤",
    "不大于": "≤",
    "大于": ">",
    "小于": "<",
    "不等于": "≠",
}
# "x is", "all real numbers", "the values of x that are". Group: the variable.
_SUBJECT = re.compile(
    r"""
    (?: (?:all|any|every|the) [ ] )?
    (?:
        (?: real[ ])? (?: numbers? | values? | reals ) (?: [ ](?:of[ ])?([a-z]) )?
        | ([a-z])
    )
    (?: [ ](?:that|which) )? (?: [ ](?:is|are|lies|lie|must[ ]be|can[ ]be) )? (?: [ ]|(?=[大小不]) )
    """,
    re.VERBOSE,
)
_COMPARED = re.compile(f"({'|'.join(sorted(_COMPARATIVES, key=len, reverse=True))}) ?(.+)")
_OR_BEYOND = re.compile(r"(.+) or (more|greater|above|less|fewer|below)")
# All real numbers except 2 and 3. Group: what is left out.
_ALL_EXCEPT = re.compile(
    "(?:all|any|every) (?:real )?(?:numbers?|values|reals) (?:of [a-z] )?"
    "(?:except for|except|but|other than|excluding|apart from) (.+)"
)
# Groups: "strictly", the ends, whether these belong to the region.
_BETWEEN = re.compile(
    "(strictly )?(?:between|from) (.+?) (?:and|to) (.+?),? ?"
    r"\(?(inclusive|exclusive|inclusively|exclusively)?\)?"
)


def read_bounds(text: str, end_of_interval: Callable[[str], Decimal | None]) -> Answer | None:
    """The region that words state; None for other texts.

    Words that do not say whether the ends belong to it, as in `between 2 and 5`, state none.
    """
    if re.match("[A-Z][a-z]", text):
        text = text[0].lower() + text[1:]
    subject = _SUBJECT.match(text)
    rest = text[subject.end() :] if subject else text
    region = _region(rest, end_of_interval)
    if excluded := _ALL_EXCEPT.fullmatch(text):
        region = _without(excluded[1], end_of_interval)
    elif "且" in rest:
        region = _all_of([_region(part, end_of_interval) for part in rest.split("且")])
    if region is None or subject is None:
        return region
    name = subject[1] or subject[2]
    return Labelled(name, region) if name else region


def _without(points: str, end_of_interval: Callable[[str], Decimal | None]) -> Region | None:
    """All real numbers but those of a list, such as `2 and 3`."""
    ends = [end_of_interval(point) for point in re.split(r",? and |, ", points)]
    return _all_of([_half_line("≠", end) for end in ends])


def _all_of(regions: Sequence[Region | None]) -> Region | None:
    """What all of the regions have in common; None where one of them is unread."""
    read = [region for region in regions if region is not None]
    return answers.combine(all, read) if len(read) == len(regions) else None


def _half_line(sign: str, end: Decimal | None) -> Region | None:
    return None if end is None else answers.half_line(sign, end)


def _region(text: str, end_of_interval: Callable[[str], Decimal | None]) -> Region | None:
    if compared := _COMPARED.fullmatch(text):
        return _half_line(_COMPARATIVES[compared[1]], end_of_interval(compared[2]))
    if beyond := _OR_BEYOND.fullmatch(text):
        sign = "≥" if beyond[2] in ("more", "greater", "above") else "≤"
        return _half_line(sign, end_of_interval(beyond[1]))
    between = _BETWEEN.fullmatch(text)
    if between is None or bool(between[1]) == bool(between[4]):
        return None
    low = end_of_interval(between[2])
    high = end_of_interval(between[3])
    if low is None or high is None:
        return None
    is_closed = bool(between[4]) and between[4].startswith("inclusive")
    return answers.interval(low, is_closed, high, is_closed)

"""The parser of quantities: numbers in all spellings, money, percentages, units, bases, times of day."""

import re
from fractions import Fraction

from alignment.rewards.grading.answers import About, Answer, Clock, Listing, Quantity
from alignment.rewards.grading.expressions import NUMBER, TRIGONOMETRIC, NoAnswer, Node, Refused, fraction, parse_expression
from alignment.rewards.grading.text import TABLES, split
from alignment.rewards.grading.words import SCALES, SYMBOLS, qualified, quantity_in_words, read_unit, without_trailing_words

_TIME = re.compile(r"(?i)([0-9]{1,2})(?::([0-9]{2}))?(?::([0-9]{2}))? ?(a\.?m\.?|p\.?m\.?|o'clock|noon|midnight)?(?: (am|pm))?")


def read_clock(text: str, levels: int) -> Answer | None:
    match = _TIME.fullmatch(f"12 {text}" if text.casefold() in ("noon", "midnight") else text)
    if match is None or not (match[2] or match[4] or match[5]):
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    half = (match[5] or match[4] or "").lower().replace(".", "").replace("o'clock", "")
    half = {"noon": "pm", "midnight": "am"}.get(half, half)
    if hour > 24 or minute > 59 or second > 59 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour = hour % 12 + 12 * (half == "pm")
    elif hour > 12 or hour == 0:
        half = "24"
    return Clock((hour * 60 + minute) * 60 + second, half)


def read_number_in_words(text: str, levels: int) -> Answer | None:
    """`twenty-five`, `twelve dollars`, `5 and 1/2`."""
    if mixed := re.fullmatch(r"([0-9]{1,9}) and ([0-9]{1,9}) ?/ ?([1-9][0-9]{0,8})", text):
        whole, top, bottom = map(int, mixed.groups())
        return Quantity(whole + Fraction(top, bottom)) if 0 < top < bottom else None
    return quantity_in_words(text)


def read_ratio(text: str, levels: int) -> Answer | None:
    words = re.fullmatch(r"([0-9.]+) to ([0-9.]+)", text)
    parts = words.groups() if words else split(text, ":")
    if not 2 <= len(parts) <= 4:
        return None
    read = tuple(map(read_quantity, parts))
    if not all(isinstance(part, Quantity) for part in read):
        raise NoAnswer("a ratio of parts that are no quantities")
    return Listing(":", read)


def read_two_units(text: str, levels: int) -> Answer | None:
    """`5 feet 3 inches`, `2 hours and 30 minutes`, `5 dollars and 30 cents`, `5'3"`."""
    match = re.fullmatch(r"""([0-9.]+) ?([A-Za-z]+),? (?:and )?([0-9.]+) ?([A-Za-z]+)|([0-9]+) ?' ?([0-9.]+) ?(?:"|'')""", text)
    if match is None:
        return None
    first, second = (f"{match[1]} {match[2]}", f"{match[3]} {match[4]}") if match[1] else (f"{match[5]} ft", f"{match[6]} in")
    parts = tuple(map(read_quantity, (first, second)))
    units = all(isinstance(part, Quantity) and part.unit for part in parts)
    return Listing("+", parts) if units and parts[0].unit != parts[1].unit else None


_MONEY = re.compile(r"([-+]?) ?(?:US|USD|CA|AU|C|A)?([$£€¥₹]) ?(?=[-0-9.\\])([^$£€¥₹]*)|([^$£€¥₹]*[0-9]) ?([$£€¥₹])")
_AMOUNT_PER = re.compile(r"([-+]? ?[0-9.,]*(?: ?(?:hundred|thousand|million|billion|trillion)\b)?)(.*)")
_MONEY_CODE = re.compile(r"(USD|EUR|GBP|INR|Rs\.?) ?([0-9].*)")
_PERCENT = re.compile(r"([-+]?[^%+*-]*[0-9)}]) ?(?:%|percent(?:age points?)?|per cent|pct)( [a-z ]{1,30})?")
_OF_WHAT = re.compile(r" (?:chance|probability|interest|of (?:the|all|his|her|their|its|these)(?: [a-z]+){1,3})")
_AMOUNT = re.compile(r"(.*?(?:[0-9)}\]]|\\pi|[0-9 ]pi))( ?)((?:\\degree|\\Omega|\\mu |[A-Za-zµΩ°¢£$Å\u4e00-\u9fff]).*)")
_SCALED = re.compile(rf"(.*(?:{NUMBER})) ?({'|'.join(SCALES)})s?(?: ([A-Za-z].*))?")
_SCALAR = re.compile(
    rf"([-+]?) ?({NUMBER})(?: ?(?:[eE]|\* ?10 ?\^) ?([-+]?[0-9]{{1,3}}|\{{ ?-?[0-9]{{1,3}} ?\}})| ?(?:st|nd|rd|th))?"
)
_ENDLESS = re.compile(r"([-+]?)([0-9]*)\.([0-9]{1,60}) ?\.\.\.")
_BASE = re.compile(
    r"\(? ?([0-9A-Fa-fG-Z][0-9A-Fa-fG-Z ]{0,60}?) ?\)? ?"
    r"(?:_ ?\{? ?\(?(?:base ?)?([0-9]{1,2}|[a-z]+)\)? ?\}?| \(?base[ -]([0-9]{1,2}|[a-z]+)\)?)"
    r"(?: \(?base (?:\2)\)?)?|0([xXbo])([0-9A-Fa-f]{1,60})"
)
_MINUTES = re.compile(r"""([0-9]+) ?\\degree ?([0-9]+(?:\.[0-9]+)?) ?'(?: ?([0-9]+(?:\.[0-9]+)?) ?(?:"|''))?""")
_MODULO = re.compile(r"(.*[0-9]) ?\\?\(?(?:\\pmod|\\bmod|\\mod|mod) ?\{? ?([0-9]+) ?\}?\)?")


def read_quantity(text: str) -> Answer:
    """The quantity of a text: its currency, percent sign or unit, and the rest as a number or an expression."""
    text, unit = without_trailing_words(text), ""
    if match := _BASE.fullmatch(text):
        base = match[2] or match[3] or f"0{match[4].lower()}"
        return Quantity(_in_base(match[1] or match[5], base))
    if match := _MINUTES.fullmatch(text):
        degrees, minutes, seconds = (fraction("", part or "0") for part in match.groups())
        return Quantity(degrees + minutes / 60 + seconds / 3600, "degree")
    if match := _ENDLESS.fullmatch(text):
        return _endless(match[1], match[2], match[3])
    if match := _MODULO.fullmatch(text):
        return Quantity(parse_expression(match[1]), f"mod {int(match[2])}")
    if match := _MONEY_CODE.fullmatch(text):
        text = f"{match[2]} {match[1].rstrip('.')}"
    if match := _MONEY.fullmatch(text):  # $18 per day is 18 dollars per day
        sign, text, currency = match[1] or "", match[3] or match[4], match[2] or match[5]
        unit, (amount, per) = TABLES["currencies"][currency], _AMOUNT_PER.fullmatch(text).groups()
        if re.match(r" *(?:[\\^*(+-]|/ ?[^a-z])", per):
            amount, per = text, ""
        text = sign + amount
        if per.strip():
            per_unit = read_unit(f"{unit} {per.strip()}") or read_unit(per)
            if not per_unit:
                raise Refused("not an amount of money")
            unit = per_unit if per_unit.startswith(unit) or per_unit != "cent" else ""
    if match := _PERCENT.fullmatch(text):
        if match[2] and (qualified(match[2]) or not _OF_WHAT.fullmatch(match[2])):
            raise Refused("words that may change a percentage")
        return Quantity(_number(match[1]).value, "%")
    if match := _SCALED.fullmatch(text):
        unit = unit or (read_unit(match[3]) if match[3] else "")
        if match[3] and not unit:
            raise Refused("not a unit")
        number = _number(match[1]).value
        if not isinstance(number, Fraction):
            raise Refused("an expression before a word")
        return Quantity(number * SCALES[match[2]], unit)
    if not unit and (match := _AMOUNT.fullmatch(text)) and (suffix := _unit_after(*match.groups())):
        text, unit = match[1], suffix
    return _number(text)._replace(unit=unit)


def _unit_after(amount: str, gap: str, words: str) -> str:
    """The unit after an amount, or "". One letter needs a space before it, as 5m is algebra, and so does a noun; after a
    variable there is no unit: 2x + 3 h."""
    if words.startswith("\\degree") and any(f"\\{name}" in amount for name in TRIGONOMETRIC):
        return ""  # the degrees of \sin 30°
    if re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]*\{)", re.sub(r"\\[A-Za-z]+|\bpi\b|sqrt", "", amount)) or (
        not gap and words in SYMBOLS and words.isascii()
    ):
        return ""
    unit = read_unit(words)
    glued = not gap and words[0].isascii() and not words.startswith("\\")
    return "" if glued and (" " in unit or len(words) == 1 or re.fullmatch("[a-z]{3,}s", unit)) else unit


def _number(text: str) -> Quantity:
    scalar = _SCALAR.fullmatch(text)
    if scalar is None:
        return Quantity(parse_expression(text))
    sign, number, exponent = scalar.groups("")
    exponent = exponent.strip("{} ")
    decimals = max(0, len(number.partition(".")[2]) - int(exponent or 0))
    digits = len(number.replace(",", "").replace(".", "").lstrip("0"))
    return Quantity(fraction(sign, number, exponent), "", decimals, digits if decimals else 0)


def _endless(sign: str, whole: str, digits: str) -> Answer:
    """`0.1666...`: three equal digits or two equal blocks at the end repeat for ever; other digits are an approximation."""
    for period in range(1, len(digits) // 2 + 1):
        block = digits[-period:]
        if digits.endswith(block * (3 if period == 1 else 2)):
            return Quantity(fraction(sign, f"{whole}.{digits[:-period]}", period=block))
    return About(_number(f"{sign}{whole}.{digits}"))


def _in_base(digits: str, base: str) -> Node:
    digits = digits.replace(" ", "")
    radix = int(base) if base.isdigit() else TABLES["base_words"].get(base, 0)
    variable = (digits.isalpha() and (len(digits) == 1 or radix < 11)) or (digits != digits.upper() and radix != 16)
    if not 2 <= radix <= 36 or variable:
        return parse_expression(f"{digits}_{{{base}}}")
    try:
        return Fraction(int(digits, radix))
    except ValueError:
        raise Refused(f"{digits} has a digit that base {radix} has not") from None

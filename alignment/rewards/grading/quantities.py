"""Quantities and words: numbers in all spellings, units of measure ("cm^2", "dollar/h"), money,
times, options, sentences."""

import re
from collections import Counter
from fractions import Fraction

from alignment.rewards.grading.answers import About, Answer, Clock, Listing, Quantity
from alignment.rewards.grading.expressions import (
    NAMES,
    TRIGONOMETRIC,
    NoAnswer,
    Node,
    Refused,
    fraction,
    parse_expression,
)
from alignment.rewards.grading.text import PATTERNS, TABLES, split

_UNIT_NAMES = {
    name + plural: unit
    for unit, names in TABLES["units"].items()
    for name in (unit, *names.split())
    for plural in ("", "s")[: 1 + (len(name) > 2 and name.isascii())]  # "ms" is no plural of m
}
_POWER_WORDS = {
    "square": 2,
    "sq": 2,
    "sq.": 2,
    "cubic": 3,
    "cu": 3,
    "cu.": 3,
    "squared": 2,
    "cubed": 3,
}
SYMBOLS = {name for name in _UNIT_NAMES if len(name) == 1}  # algebra uses these too: 5m
_NOT_UNITS, _QUALIFYING = (
    frozenset(TABLES[name].split()) for name in ("no_units", "qualifying_words")
)
_BELOW_HUNDRED = dict(
    zip(TABLES["cardinals"].split(), (*range(20), *range(20, 100, 10)), strict=True)
)
SCALES = TABLES["scales"]


def without_trailing_words(text: str) -> str:
    """The text without a trailing "in total", "of the apples" or the like; keeps them if they hold
    a number or `_NOT_UNITS`."""
    match = PATTERNS.trailing_words.search(text)
    words = match[0].split() if match else []
    removable = _NOT_UNITS.isdisjoint(words) and not any(
        number_in_words(word) is not None for word in words
    )
    return text[: match.start()] if match and removable else text


def read_unit(text: str) -> str:
    """The canonical name of a unit, such as "cm^2" or "dollar/h"; "" for other words. A unit is a
    product of `_UNIT_NAMES` with powers, or a ratio of two, or up to three words that end in a
    plural noun."""
    text = re.sub(r"\\degree ?([CF])\b", r"°\1", text)
    text = text.replace(r"\degree", "degree").replace(r"\Omega", "Ω").replace(r"\mu ", "µ")
    text = TABLES["unit_abbreviations"].get(text.lower(), text)
    text = re.sub(
        r"(?i)\bdeg(?:ree)?s? (celsius|fahrenheit|[CF])\b", lambda m: f"°{m[1][0].upper()}", text
    ).strip()
    numerator, per, denominator = re.sub(
        r" ?(?:/|\bper\b|\b(?:an?|every)\b(?= [a-z]+$)) ?", "/", text, count=1
    ).partition("/")
    powers, below = _product(numerator), _product(denominator)
    if not powers or (per and not below):
        return ""
    powers.subtract(below)
    names = {
        name: f"{name}^{abs(power)}".removesuffix("^1") for name, power in sorted(powers.items())
    }
    top, bottom = (
        "*".join(name for key, name in names.items() if powers[key] * sign > 0) for sign in (1, -1)
    )
    return f"{top}/{bottom}" if bottom else top


def _product(text: str) -> Counter[str]:
    """{factor: power} of a unit; {noun: 1} of a plural noun with its adjectives; {} of anything
    else."""
    head, of, _ = text.strip().partition(" of ")  # 5 cups of flour are 5 cups
    text = head if of and re.fullmatch("[a-z ]+", text) else text.strip()
    factors = list(PATTERNS.factor.finditer(text))
    powers: Counter[str] = Counter()
    last, pending_power = "", 1
    for factor in factors:
        word, power = factor.groups()
        lowered, bare = word.lower(), word.rstrip(".")
        if lowered in ("squared", "cubed") and last:
            powers[last] *= _POWER_WORDS[lowered]
        elif lowered in _POWER_WORDS and not last:
            pending_power = _POWER_WORDS[lowered]
        elif last := _UNIT_NAMES.get(bare) or _UNIT_NAMES.get(
            lowered.rstrip(".") if len(bare) > 2 - bare.isupper() else ""
        ):
            powers[last] += int(power or pending_power)
            pending_power = 1
        else:
            return Counter(filter(None, [_plural_noun(text)]))
    return powers if "".join(factor[0] for factor in factors) == text else Counter()


def _plural_noun(text: str) -> str:
    words = text.lower().split()
    if not re.fullmatch(
        "[a-z]{3,}(?: [a-z]{3,}){0,2}", " ".join(words)
    ) or not _NOT_UNITS.isdisjoint(words):
        return ""
    number = any(
        number_in_words(word) is not None or PATTERNS.number_noun.fullmatch(word) for word in words
    )
    if number or (len(words) == 1 and words[0].endswith(("ed", "ly"))):
        return ""
    known = words[-1] in _UNIT_NAMES and len(words[-1]) > 2
    return (
        " ".join(words)
        if known or PATTERNS.plural.fullmatch(words[-1]) and not words[-1].endswith(("eds", "lys"))
        else ""
    )


def same_unit(a: str, b: str) -> bool:
    """Whether two units are the same; "marbles" match "red marbles", which do not match "blue
    marbles"."""
    if a == b or a.endswith(f" {b}") or b.endswith(f" {a}"):
        return True
    return (a + b).isalpha() and min(len(a), len(b)) > 2 and b in (f"{a}s", a[:-1])


def number_in_words(text: str) -> Fraction | None:
    """The value of "twenty-five", "two thirds" or "three and a half"; None for other words."""
    if len(text) > 80 or not re.fullmatch("[A-Za-z]+(?:[ -][A-Za-z]+)*", text):
        return None
    words = text.lower().replace("-", " ").split()
    if words[0] in ("negative", "minus"):
        value = number_in_words(" ".join(words[1:]))
        return None if value is None else -value
    if "and" in words:
        at = words.index("and")
        whole, part = _cardinal(words[:at]), _fraction(words[at + 1 :])
        if whole is not None and part is not None:
            return whole + part
    part = _fraction(words)
    return part if part is not None else _cardinal([word for word in words if word != "and"])


def quantity_in_words(text: str, levels: int = 0) -> Quantity | None:
    """The quantity of "twelve dollars", "twenty-five" or "5 and 1/2"; None for other texts."""
    if mixed := re.fullmatch(r"([0-9]{1,9}) and ([0-9]{1,9}) ?/ ?([1-9][0-9]{0,8})", text):
        whole, top, bottom = map(int, mixed.groups())
        return Quantity(whole + Fraction(top, bottom)) if 0 < top < bottom else None
    words = text.split(" ")
    for end in range(len(words), max(0, len(words) - 4), -1):
        value = number_in_words(" ".join(words[:end]))
        unit = "" if value is None else read_unit(" ".join(words[end:]))
        if unit or (value is not None and end == len(words)):
            return Quantity(value, unit)
    return None


def _fraction(words: list[str]) -> Fraction | None:
    """The value of "a half" or "two thirds"."""
    bottom = TABLES["denominators"].get(words[-1].removesuffix("s")) if words else None
    if bottom is None or (len(words) == 1 and bottom != 2):
        return None
    top = Fraction(1) if words[:-1] in ([], ["a"], ["one"]) else _cardinal(words[:-1])
    return None if top is None else top / bottom


def _cardinal(words: list[str]) -> Fraction | None:
    """The value of a whole number in words."""
    total = current = 0
    for word in words:
        if word in _BELOW_HUNDRED:
            current += _BELOW_HUNDRED[word]
        elif word in ("hundred", "dozen") and total + current:
            current *= SCALES[word]
        elif word in SCALES and current:
            total, current = total + current * SCALES[word], 0
        else:
            return None
    return Fraction(total + current) if words else None


def plain_words(text: str) -> str:
    """A text of nothing but words, in one spelling; "" for any other text."""
    if (
        not PATTERNS.words.fullmatch(text)
        or len(text) < 2
        or not NAMES.isdisjoint(re.findall("[A-Za-z]+", text))
    ):
        return ""
    if (
        PATTERNS.no_word.fullmatch(text)
        or not re.search(r"[^\W\d_]{2}", text)
        or quantity_in_words(text) is not None
    ):
        return ""
    return " ".join(
        PATTERNS.article.sub("", text.casefold().replace("-", " ").replace("'", "")).split()
    )


def same_options(answer: str, truth: str) -> bool:
    """Whether both name the same option, the answer also with its text, "(B) 12", or the same set
    of options."""
    options = option_letters(truth)
    if not options or options == option_letters(answer):
        return bool(options)
    named = PATTERNS.option_text.fullmatch(answer)
    several = named is None or PATTERNS.other_option.search(named[3]) or qualified(named[3])
    return not several and options == {(named[1] or named[2]).lower()}


def option_letters(text: str) -> frozenset[str]:
    """The letter of "(A)", "A." or "option A", or those of `A, C`, `AC` or `A and C`, in lower
    case; empty if none."""
    if one := PATTERNS.option.fullmatch(text):
        return frozenset(one[1].lower())
    letters = re.findall("[A-J]", text)
    several = PATTERNS.options.fullmatch(text) and len(set(letters)) == len(letters)
    return frozenset(map(str.lower, letters)) if several else frozenset()


def qualified(text: str) -> bool:
    """Whether a text denies, hedges, offers a choice or describes a calculation."""
    return any(
        word in _QUALIFYING or word.endswith("n't") for word in re.findall("[a-z']+", text.lower())
    )


def answer_in_sentence(text: str) -> str:
    """The answer in a plain sentence, 15 in "So there are 15 ways"; "" if the sentence denies,
    hedges or offers a choice."""
    if (match := PATTERNS.sentence.fullmatch(text)) is None or qualified(text):
        return ""
    answer, _, rest = re.fullmatch(
        r"(.*?)( (?:every|each|at|in|for|on|with|by|after|to) ([A-Za-z' ]+))?", match[1]
    ).groups()
    return "" if any(number_in_words(word) is not None for word in (rest or "").split()) else answer


def words_in_sentence(words: str) -> str:
    """The predicate of a plain sentence, "odd" in "the function is odd"; "" if the sentence denies
    or hedges."""
    match = PATTERNS.words_in_sentence.fullmatch(words)
    return "" if match is None or qualified(words) else match[1]


def two_forms(text: str) -> tuple[str, str] | None:
    """The two forms of an answer with a second form in brackets, `1/4 (or 0.25)`; None for anything
    else."""
    match = PATTERNS.same_again.fullmatch(text)
    return (
        None
        if match is None or any(map(PATTERNS.same_again.fullmatch, match.groups()))
        else (match[1], match[2])
    )


def without_clause(text: str) -> str:
    """The text without a closing "k ∈ ℤ", which a free parameter implies; the parameter is renamed
    to n."""
    match = re.search(r"(?:, ?| )(?:where |for |with )", text) or re.search(
        r", ?(?=[a-z] ?∈)| (?=for integers?\b)", text
    )
    clause = match and PATTERNS.clause.fullmatch(text[match.start() :])
    if not clause:
        return text
    whole, text, name = text, text[: match.start()], clause[1] or clause[2]
    alone = re.compile(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])")
    letters = re.sub(r"\\[A-Za-z]+", "", text)
    if name not in letters:
        return whole
    return (
        alone.sub("n", text)
        if len(alone.findall(letters)) == letters.count(name) and "n" not in letters
        else text
    )


def read_clock(text: str, levels: int) -> Answer | None:
    match = PATTERNS.time.fullmatch(
        f"12 {text}" if text.casefold() in ("noon", "midnight") else text
    )
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
    match = re.fullmatch(
        r"([0-9.]+) ?([A-Za-z]+),? (?:and )?([0-9.]+) ?([A-Za-z]+)"
        r"""|([0-9]+) ?' ?([0-9.]+) ?(?:"|'')""",
        text,
    )
    if match is None:
        return None
    first, second = (
        (f"{match[1]} {match[2]}", f"{match[3]} {match[4]}")
        if match[1]
        else (f"{match[5]} ft", f"{match[6]} in")
    )
    parts = tuple(map(read_quantity, (first, second)))
    units = all(isinstance(part, Quantity) and part.unit for part in parts)
    return Listing("+", parts) if units and parts[0].unit != parts[1].unit else None


def read_quantity(text: str, levels: int = 0) -> Answer:
    """The quantity of a text: its currency, percent sign or unit, and the rest as a number or an
    expression."""
    text, unit = without_trailing_words(text), ""
    if match := PATTERNS.base.fullmatch(text):
        return Quantity(
            _in_base(match[1] or match[5], match[2] or match[3] or f"0{match[4].lower()}")
        )
    if match := PATTERNS.minutes.fullmatch(text):
        degrees, minutes, seconds = (fraction("", part or "0") for part in match.groups())
        return Quantity(degrees + minutes / 60 + seconds / 3600, "degree")
    if match := PATTERNS.endless.fullmatch(text):
        return _endless(match[1], match[2], match[3])
    if match := PATTERNS.modulo.fullmatch(text):
        return Quantity(parse_expression(match[1]), f"mod {int(match[2])}")
    if match := PATTERNS.money_code.fullmatch(text):
        text = f"{match[2]} {match[1].rstrip('.')}"
    if match := PATTERNS.money.fullmatch(text):  # $18 per day is 18 dollars per day
        sign, text, currency = match[1] or "", match[3] or match[4], match[2] or match[5]
        unit, (amount, per) = (
            TABLES["currencies"][currency],
            PATTERNS.amount_per.fullmatch(text).groups(),
        )
        if re.match(r" *(?:[\\^*(+-]|/ ?[^a-z])", per):
            amount, per = text, ""
        text = sign + amount
        if per.strip():
            per_unit = read_unit(f"{unit} {per.strip()}") or read_unit(per)
            if not per_unit:
                raise Refused("not an amount of money")
            unit = per_unit if per_unit.startswith(unit) or per_unit != "cent" else ""
    if match := PATTERNS.percent.fullmatch(text):
        if match[2] and (qualified(match[2]) or not PATTERNS.of_what.fullmatch(match[2])):
            raise Refused("words that may change a percentage")
        return Quantity(_number(match[1]).value, "%")
    if match := PATTERNS.scaled.fullmatch(text):
        unit = unit or (read_unit(match[3]) if match[3] else "")
        if match[3] and not unit:
            raise Refused("not a unit")
        number = _number(match[1]).value
        if not isinstance(number, Fraction):
            raise Refused("an expression before a word")
        return Quantity(number * SCALES[match[2]], unit)
    if (
        not unit
        and (match := PATTERNS.amount.fullmatch(text))
        and (suffix := _unit_after(*match.groups()))
    ):
        text, unit = match[1], suffix
    return _number(text)._replace(unit=unit)


def _unit_after(amount: str, gap: str, words: str) -> str:
    """The unit after an amount, or "". A letter and a noun need a space before them (5m is
    algebra); 2x + 3 h has no unit."""
    if words.startswith("\\degree") and any(f"\\{name}" in amount for name in TRIGONOMETRIC):
        return ""  # the degrees of \sin 30°
    letters = re.sub(r"\\[A-Za-z]+|\bpi\b|sqrt", "", amount)
    if re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]*\{)", letters) or (
        not gap and words in SYMBOLS and words.isascii()
    ):
        return ""
    unit = read_unit(words)
    glued = not gap and words[0].isascii() and not words.startswith("\\")
    return (
        ""
        if glued and (" " in unit or len(words) == 1 or re.fullmatch("[a-z]{3,}s", unit))
        else unit
    )


def _number(text: str) -> Quantity:
    if (scalar := PATTERNS.scalar.fullmatch(text)) is None:
        return Quantity(parse_expression(text))
    sign, number, exponent = scalar.groups("")
    exponent = exponent.strip("{} ")
    decimals = max(0, len(number.partition(".")[2]) - int(exponent or 0))
    digits = len(number.replace(",", "").replace(".", "").lstrip("0"))
    return Quantity(fraction(sign, number, exponent), "", decimals, digits if decimals else 0)


def _endless(sign: str, whole: str, digits: str) -> Answer:
    """`0.1666...`: three equal digits or two equal blocks at the end repeat for ever; other digits
    are an approximation."""
    for period in range(1, len(digits) // 2 + 1):
        block = digits[-period:]
        if digits.endswith(block * (3 if period == 1 else 2)):
            return Quantity(fraction(sign, f"{whole}.{digits[:-period]}", period=block))
    return About(_number(f"{sign}{whole}.{digits}"))


def _in_base(digits: str, base: str) -> Node:
    digits = digits.replace(" ", "")
    radix = int(base) if base.isdigit() else TABLES["base_words"].get(base, 0)
    variable = (digits.isalpha() and (len(digits) == 1 or radix < 11)) or (
        digits != digits.upper() and radix != 16
    )
    if not 2 <= radix <= 36 or variable:
        return parse_expression(f"{digits}_{{{base}}}")
    try:
        return Fraction(int(digits, radix))
    except ValueError:
        raise Refused(f"{digits} has a digit that base {radix} has not") from None

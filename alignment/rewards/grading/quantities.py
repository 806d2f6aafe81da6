"""Quantities and words: numbers in all spellings, units of measure ("cm^2", "dollar/h"), money, times, options, sentences."""

import re
from collections import Counter
from fractions import Fraction

from alignment.rewards.grading.answers import About, Answer, Clock, Listing, Quantity
from alignment.rewards.grading.expressions import (
    NAMES, NUMBER, TRIGONOMETRIC, NoAnswer, Node, Refused, fraction, parse_expression,
)  # fmt: skip
from alignment.rewards.grading.text import TABLES, split

# --- units and numbers in words ---------------------------------------------------------------------------

_UNIT_NAMES = {
    name + plural: unit
    for unit, names in TABLES["units"].items()
    for name in (unit, *names.split())
    for plural in ("", "s")[: 1 + (len(name) > 2 and name.isascii())]  # "ms" is no plural of m
}
_POWER_WORDS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3, "squared": 2, "cubed": 3}
SYMBOLS = {name for name in _UNIT_NAMES if len(name) == 1}  # algebra uses these too: 5m
_NOT_UNITS = set(TABLES["no_units"].split())
_NUMBER_NOUNS = re.compile(  # used as nouns, so no units: 5 sixteenths, 5 twenties, 5 quadrillion
    r"\w*(?:teen(?:th)?|tieth|(?:twen|thir|for|fif|six|seven|eigh|nine)tie|dredth|sandth|ll?ion|ll?ionth)s?|"
    r"(?:eleven|twel[fv]e?)(?:th)?s?|(?:four|fif|six|seven|eigh|nin|ten)ths?"
)
_PLURAL = re.compile(r"[a-z]{2,}(?<!s)s|[a-z]{2,}(?:sse|e)s")
_TRAILING_WORDS = re.compile(
    r" (?:old|long|tall|wide|high|deep|away|left|remaining|total|in total|in all|altogether|each|apiece"
    r"|of (?:the|a|an|all|his|her|their|its)(?: [a-z]+){1,3})$"
)


def without_trailing_words(text: str) -> str:
    """The text without a trailing "in total", "of the apples" or the like; keeps them if they hold a number or `_NOT_UNITS`."""
    match = _TRAILING_WORDS.search(text)
    words = match[0].split() if match else []
    removable = _NOT_UNITS.isdisjoint(words) and not any(number_in_words(word) is not None for word in words)
    return text[: match.start()] if match and removable else text


_WORD = r"[A-Za-zµΩ°¢£Å\u4e00-\u9fff]+\.?"
_FACTOR = re.compile(rf" ?({_WORD})(?: ?\^ ?\{{? ?(-?[0-9]) ?\}}?)?(?: ?[*-])?")


def read_unit(text: str) -> str:
    """The canonical name of a unit, such as "cm^2" or "dollar/h"; "" for other words. A unit is a product of `_UNIT_NAMES` with
    powers, or a ratio of two, or up to three words that end in a plural noun."""
    text = re.sub(r"\\degree ?([CF])\b", r"°\1", text)
    text = text.replace(r"\degree", "degree").replace(r"\Omega", "Ω").replace(r"\mu ", "µ")
    text = TABLES["unit_abbreviations"].get(text.lower(), text)
    text = re.sub(r"(?i)\bdeg(?:ree)?s? (celsius|fahrenheit|[CF])\b", lambda m: f"°{m[1][0].upper()}", text).strip()
    numerator, per, denominator = re.sub(r" ?(?:/|\bper\b|\b(?:an?|every)\b(?= [a-z]+$)) ?", "/", text, count=1).partition("/")
    powers, below = _product(numerator), _product(denominator)
    if not powers or (per and not below):
        return ""
    powers.subtract(below)
    names = {name: f"{name}^{abs(power)}".removesuffix("^1") for name, power in sorted(powers.items())}
    top, bottom = ("*".join(name for key, name in names.items() if powers[key] * sign > 0) for sign in (1, -1))
    return f"{top}/{bottom}" if bottom else top


def _product(text: str) -> Counter[str]:
    """{factor: power} of a unit; {noun: 1} of a plural noun with its adjectives; {} of anything else."""
    head, of, _ = text.strip().partition(" of ")  # 5 cups of flour are 5 cups
    text = head if of and re.fullmatch("[a-z ]+", text) else text.strip()
    factors = list(_FACTOR.finditer(text))
    powers: Counter[str] = Counter()
    last, pending_power = "", 1
    for factor in factors:
        word, power = factor.groups()
        lowered, bare = word.lower(), word.rstrip(".")
        if lowered in ("squared", "cubed") and last:
            powers[last] *= _POWER_WORDS[lowered]
        elif lowered in _POWER_WORDS and not last:
            pending_power = _POWER_WORDS[lowered]
        elif last := _UNIT_NAMES.get(bare) or _UNIT_NAMES.get(lowered.rstrip(".") if len(bare) > 2 - bare.isupper() else ""):
            powers[last] += int(power or pending_power)
            pending_power = 1
        else:
            return Counter(filter(None, [_plural_noun(text)]))
    return powers if "".join(factor[0] for factor in factors) == text else Counter()


def _plural_noun(text: str) -> str:
    words = text.lower().split()
    if not 1 <= len(words) <= 3 or not re.fullmatch("[a-z]{3,} ?" * len(words), " ".join(words)):
        return ""
    if not _NOT_UNITS.isdisjoint(words) or any(word.endswith(("ed", "ly")) and len(words) == 1 for word in words):
        return ""
    if any(number_in_words(word) is not None or _NUMBER_NOUNS.fullmatch(word) for word in words):
        return ""
    known = words[-1] in _UNIT_NAMES and len(words[-1]) > 2
    return " ".join(words) if known or _PLURAL.fullmatch(words[-1]) and not words[-1].endswith(("eds", "lys")) else ""


def same_unit(a: str, b: str) -> bool:
    """Whether two units are the same; "marbles" match "red marbles", which do not match "blue marbles"."""
    if a == b or a.endswith(f" {b}") or b.endswith(f" {a}"):
        return True
    return (a + b).isalpha() and min(len(a), len(b)) > 2 and b in (f"{a}s", a[:-1])


_BELOW_HUNDRED = dict(zip(TABLES["cardinals"].split(), (*range(20), *range(20, 100, 10)), strict=True))
SCALES = TABLES["scales"]


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
    if not text[:1].isalpha():
        return None
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


# --- words, options and sentences ----------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(?:the|an?) (?=\w)")
_LETTERS = re.compile(r"[^\W\d_](?:[^\W\d_]|[' -])*")
_NO_WORD = re.compile(r"[b-df-hj-np-tv-z]{2,3}|a?b?c?d?|x?y?z?")  # ab, xy, pqr: products


def plain_words(text: str) -> str:
    """A text of nothing but words, in one spelling; "" for any other text."""
    if not _LETTERS.fullmatch(text) or len(text) < 2 or not NAMES.isdisjoint(re.findall("[A-Za-z]+", text)):
        return ""
    if _NO_WORD.fullmatch(text) or not re.search(r"[^\W\d_]{2}", text) or quantity_in_words(text) is not None:
        return ""
    return " ".join(_ARTICLES.sub("", text.casefold().replace("-", " ").replace("'", "")).split())


_OPTION = re.compile(r"(?i:(?:the )?(?:correct |right |best )?(?:option|choice|answer) (?:is )?)?\(?([A-Ja-j])\)?[.):]?")
_SET_OF_LETTERS = re.compile(r"\(?[A-J]\)?(?:(?:, ?| ?and |, and | )?\(?[A-J]\)?){1,9}")
_OPTION_TEXT = re.compile(r"(?:(?i:option|choice) )?(?:\(([A-J])\)[:.]?|([A-J])[).:]) ?(?=\S)(.*)")
_OTHER_OPTION = re.compile(r"\([A-J]\)|\b[A-J][).:]|\b[B-J]\b|\band\b")


def same_options(answer: str, truth: str) -> bool:
    """Whether both name the same option, the answer also with its text, "(B) 12", or the same set of options."""
    options = option_letters(truth)
    if not options or options == option_letters(answer):
        return bool(options)
    named = _OPTION_TEXT.fullmatch(answer)
    several = named is None or _OTHER_OPTION.search(named[3]) or qualified(named[3])
    return not several and options == {(named[1] or named[2]).lower()}


def option_letters(text: str) -> frozenset[str]:
    """The letter of "(A)", "A." or "option A", or those of `A, C`, `AC` or `A and C`, in lower case; empty if none."""
    if one := _OPTION.fullmatch(text):
        return frozenset(one[1].lower())
    letters = re.findall("[A-J]", text)
    several = _SET_OF_LETTERS.fullmatch(text) and len(set(letters)) == len(letters)
    return frozenset(map(str.lower, letters)) if several else frozenset()


_SENTENCE = re.compile(
    rf"(?:[A-Za-z']+,? ){{0,10}}(?:{'|'.join(TABLES['verbs'].split())}|equal to|there (?:are|were)|total of|left with)"
    r"(?: (?:him|her|them|it|us|me|you))?(?: (?:now|still|exactly|only|just|all|a total of|equal to))? (?=[-0-9$£€¥\\(\[{])(.*)"
)
_QUALIFYING = frozenset(TABLES["qualifying_words"].split())


def qualified(text: str) -> bool:
    """Whether a text denies, hedges, offers a choice or describes a calculation."""
    words = re.findall("[a-z']+", text.lower())
    return any(word in _QUALIFYING or word.endswith("n't") for word in words)


def answer_in_sentence(text: str) -> str:
    """The answer in a plain sentence, 15 in "So there are 15 ways"; "" if the sentence denies, hedges or offers a choice."""
    match = _SENTENCE.fullmatch(text)
    if match is None or qualified(text):
        return ""
    answer, _, rest = re.fullmatch(r"(.*?)( (?:every|each|at|in|for|on|with|by|after|to) ([A-Za-z' ]+))?", match[1]).groups()
    return "" if any(number_in_words(word) is not None for word in (rest or "").split()) else answer


_WORDS_IN_SENTENCE = re.compile(r"(?:[a-z]+ ){1,5}(?:is|are|was|were) (.*)")


def words_in_sentence(words: str) -> str:
    """The predicate of a plain sentence, "odd" in "the function is odd"; "" if the sentence denies or hedges."""
    match = _WORDS_IN_SENTENCE.fullmatch(words)
    return "" if match is None or qualified(words) else match[1]


_SAME_AGAIN = re.compile(r"(.*[^ ]) \((?:or|=|i\.e\.,?|which is|that is,?) ?(.*)\)")


def two_forms(text: str) -> tuple[str, str] | None:
    """The two forms of an answer with a second form in brackets, `1/4 (or 0.25)`; None for anything else."""
    match = _SAME_AGAIN.fullmatch(text)
    return None if match is None or any(map(_SAME_AGAIN.fullmatch, match.groups())) else (match[1], match[2])


_CLAUSE = re.compile(
    r"(?:,| )? ?(?:(?:where|for|with|and) )?(?:(?:all|any|every|some) )?"
    r"(?:integers? ([a-z])|([a-z])(?: is)?(?: ?∈ ?[ℤℕ]| an?(?:y|ll)? integer| integer))"
)


def without_clause(text: str) -> str:
    """The text without a closing "k ∈ ℤ", which a free parameter implies; the parameter is renamed to n."""
    match = re.search(r"(?:, ?| )(?:where |for |with )", text) or re.search(r", ?(?=[a-z] ?∈)| (?=for integers?\b)", text)
    clause = match and _CLAUSE.fullmatch(text[match.start() :])
    if not clause:
        return text
    whole, text, name = text, text[: match.start()], clause[1] or clause[2]
    alone = re.compile(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])")
    letters = re.sub(r"\\[A-Za-z]+", "", text)
    if name not in letters:
        return whole
    renamed = len(alone.findall(letters)) == letters.count(name) and "n" not in letters
    return alone.sub("n", text) if renamed else text


# --- quantities ------------------------------------------------------------------------------------------

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

"""Quantities and words: numbers in all spellings, units of measure ("cm^2", "dollar/h"), money,
times, options, sentences."""

import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from alignment.rewards.grading import patterns
from alignment.rewards.grading.answers import (
    About,
    Answer,
    Clock,
    Listing,
    Quantity,
    Words,
    are_quantities,
)
from alignment.rewards.grading.expressions import (
    NAMES,
    TRIGONOMETRIC,
    NoAnswer,
    Node,
    Refused,
    fraction,
    parse_expression,
)
from alignment.rewards.grading.notation import TABLES
from alignment.rewards.grading.text import split

_NOT_UNITS = frozenset(TABLES["no_units"].split())
_QUALIFYING = frozenset(TABLES["qualifying_words"].split())
_HEDGE = re.compile(rf"\b(?:{'|'.join(TABLES['hedges'])})\b")
_BOUNDING = re.compile(rf"(?<!\bthe) (?:{TABLES['bounding_words'].replace(' ', '|')})[.!]?$")
SCALES: dict[str, int] = TABLES["scales"]

_CARDINALS = (*range(20), *range(20, 100, 10))
_BELOW_HUNDRED = dict(zip(TABLES["cardinals"].split(), _CARDINALS, strict=True))
_TENS = [word for word, value in _BELOW_HUNDRED.items() if value >= 20]
_CHINESE_QUALIFYING = TABLES["chinese_qualifying"].split()
_CHINESE_COUNTERS = TABLES["chinese_counters"].split()
# What changes the number before it: 5的平方 is 25.
_CHINESE_CALCULATION = re.compile("[平立次]方$|方根|倒数|相反数|阶乘|除|乘|减|加(?!仑)|比")


# --- numbers in words -----------------------------------------------------------------------------


def number_in_words(text: str) -> Fraction | None:
    """The value of "twenty-five", "two thirds" or "three and a half"; None for other words."""
    if len(text) > 80 or not re.fullmatch("[A-Za-z]+(?:[ -][A-Za-z]+)*", text):
        return None
    words = text.lower().replace("-", " ").split()
    if words[0] in ("negative", "minus"):
        value = number_in_words(" ".join(words[1:]))
        return None if value is None else -value
    if "and" in words:
        position = words.index("and")
        whole = _cardinal_in_words(words[:position])
        part = _fraction_in_words(words[position + 1 :])
        if whole is not None and part is not None:
            return whole + part
    part = _fraction_in_words(words)
    if part is not None:
        return part
    return _cardinal_in_words([word for word in words if word != "and"])


_ORDINALS = {word: rank for rank, word in enumerate(TABLES["ordinals"].split())}
for _word, _value in _BELOW_HUNDRED.items():
    if _value > 12:
        _ORDINALS[f"{_word.removesuffix('y')}ieth" if _word[-1] == "y" else f"{_word}th"] = _value
_ORDINALS |= {"hundredth": 100, "thousandth": 1000, "millionth": 1_000_000}


def rank_in_words(text: str) -> int | None:
    """The rank of "second", "twenty-first" or "one hundred and first"; None for other words.

    "one third" and "a fifth" are fractions, and no ranks.
    """
    if len(text) > 80 or not re.fullmatch("[A-Za-z]+(?:[ -][A-Za-z]+)*", text):
        return None
    *leading, last = text.lower().replace("-", " ").split()
    rank = _ORDINALS.get(last)
    leading = [word for word in leading if word != "and"]
    if rank is None or not leading:
        return rank
    before = _cardinal_in_words(leading)
    if before is None:
        return None
    if rank >= 100 and 1 < before < rank:
        return int(before) * rank  # two hundredth
    # The words before end in a larger place: twenty-first, two hundred and twelfth.
    place = 10 if rank < 10 else 100
    is_larger = rank > 0 and rank < 100 and before % place == 0 and before > 0
    return int(before) + rank if is_larger else None


# 第五; 第5名. Groups: the number, what is ranked.
_CHINESE_RANK = re.compile("第([0-9]{1,9}|[〇零一二两三四五六七八九十百千]+)([\u4e00-\u9fff]{0,3})")


def read_rank(text: str, levels: int = 0) -> Answer | None:
    """`second`, `the twenty-first`, `2nd place`, `第二名`; None for other texts. A rank is read as
    its number, with what is ranked as its unit."""
    text = re.sub("^[Tt]he ", "", text)
    if chinese := _CHINESE_RANK.fullmatch(text):
        rank = _number_before_chinese(chinese[1])
        return None if rank is None else Quantity(rank, f"th {chinese[2]}".removesuffix("th "))
    if alone := re.fullmatch("([0-9]{1,9})(?:st|nd|rd|th)", text):
        return Quantity(Fraction(int(alone[1])))
    words, _, noun = text.rpartition(" ")
    if digits := re.fullmatch(r"([0-9]{1,9})(?:st|nd|rd|th) ([a-z]{3,20})", text):
        return Quantity(Fraction(int(digits[1])), f"th {digits[2]}")
    if (rank := rank_in_words(text)) is not None:
        return Quantity(Fraction(rank))
    if words and (rank := rank_in_words(words)) is not None and _is_name(noun):
        return Quantity(Fraction(rank), f"th {noun}")
    return None


def _is_name(noun: str) -> bool:
    """Whether a word may be what is ranked, and not one that makes a fraction or another rank."""
    is_word = re.fullmatch("[a-z]{3,20}", noun) is not None
    return (
        is_word and noun not in _NOT_UNITS and noun not in _QUALIFYING and not is_number_word(noun)
    )


_CHINESE_DIGITS = {"零": 0, "〇": 0, "两": 2} | {
    digit: value for value, digit in enumerate("一二三四五六七八九", start=1)
}
_CHINESE_PLACES = {"十": 10, "百": 100, "千": 1000}
_CHINESE_MYRIADS = {"万": 10**4, "亿": 10**8}


def chinese_number(text: str) -> Fraction | None:
    """The value of 十二, 三百零五, or 三分之一, which is a third; None for other texts."""
    if len(text) > 20 or not text:
        return None
    if text[0] == "负":
        value = chinese_number(text[1:])
        return None if value is None else -value
    whole, mixed, proper = text.partition("又")
    if mixed:
        return _sum_of_chinese(whole, proper)
    units, point, decimals = text.partition("点")
    if point:
        return _chinese_decimal(units, decimals)
    bottom, part, top = text.partition("分之")
    if part:
        below = chinese_number(bottom)
        above = chinese_number(top)
        return None if not below or above is None else above / below
    total = 0
    section = 0  # below ten thousand
    digit = 0
    for character in text:
        if character in _CHINESE_DIGITS:
            if digit:
                return None
            digit = _CHINESE_DIGITS[character]
        elif character in _CHINESE_PLACES:
            section += (digit or 1) * _CHINESE_PLACES[character]
            digit = 0
        elif character in _CHINESE_MYRIADS:
            total = (total + section + digit) * _CHINESE_MYRIADS[character]
            section = digit = 0
        else:
            return None
    return Fraction(total + section + digit)


def _sum_of_chinese(whole: str, proper: str) -> Fraction | None:
    """The value of 三又二分之一, three and a half, from its two parts."""
    units = chinese_number(whole)
    part = chinese_number(proper)
    if units is None or part is None or not 0 < part < 1:
        return None
    return units + part


def _chinese_decimal(units: str, decimals: str) -> Fraction | None:
    """The value of 零点五, from the characters before and after the point."""
    whole = chinese_number(units)
    digits = [_CHINESE_DIGITS.get(character) for character in decimals]
    if whole is None or not digits or None in digits:
        return None
    return whole + Fraction(int("".join(map(str, digits))), 10 ** len(digits))


def _number_before_chinese(text: str) -> Fraction | None:
    """The number of 5 or 五; None for other texts."""
    return Fraction(text) if text.isdigit() else chinese_number(text)


_CHINESE_HALF = re.compile("([0-9]{1,9}|[一二两三四五六七八九十百]*)个?半个?([\u4e00-\u9fff]{0,2})")


def _chinese_quantity(text: str) -> Quantity | None:
    """The quantity of 十二, 十二个, 三分之一 or 两个半小时; None for other texts."""
    if half := _CHINESE_HALF.fullmatch(text):
        whole = _number_before_chinese(half[1])
        if text == "一半" or whole is None:
            whole = Fraction(0)
        if not half[2] or half[2] in _UNIT_NAMES:
            return Quantity(whole + Fraction(1, 2), _UNIT_NAMES.get(half[2], ""))
    if not re.match("[\u4e00-\u9fff〇]", text):
        return None
    value = chinese_number(text)
    if value is not None:
        return Quantity(value)
    for length in (1, 2):
        value = chinese_number(text[:-length])
        unit = text[-length:]
        if value is not None and (unit in _UNIT_NAMES or unit in _CHINESE_COUNTERS):
            return Quantity(value, _UNIT_NAMES.get(unit, unit))
    return None


def is_number_word(word: str) -> bool:
    """Whether a word is a cardinal number or a fraction, such as twelve or half."""
    return number_in_words(word) is not None


def _fraction_in_words(words: list[str]) -> Fraction | None:
    """The value of "a half", "two thirds" or "half a dozen"."""
    if not words:
        return None
    if len(words) > 2 and words[:2] == ["half", "a"] and words[2] in SCALES:
        scale = _cardinal_in_words(words[1:])
        return None if scale is None else scale / 2
    *numerator, noun = words
    bottom = TABLES["denominators"].get(noun.removesuffix("s"))
    # "half" alone is a number, but "third" alone is a rank.
    if bottom is None or (not numerator and bottom != 2):
        return None
    # twenty-fifth and two hundredth are ranks; twenty fifths are 4.
    ends_in_ten = bool(numerator) and numerator[-1] in _TENS
    if noun in _ORDINALS and (ends_in_ten or (numerator and rank_in_words(" ".join(words)))):
        return None
    if numerator in ([], ["a"], ["one"]):
        return Fraction(1) / bottom
    top = _cardinal_in_words(numerator)
    return None if top is None else top / bottom


def _cardinal_in_words(words: list[str]) -> Fraction | None:
    """The value of a whole number in words; "a dozen" and "a hundred and five" begin with one."""
    if len(words) > 1 and words[0] in ("a", "an") and words[1] in SCALES:
        words = ["one", *words[1:]]
    total = 0
    current = 0  # what the next scale multiplies: the 25 of "twenty-five thousand"
    for word in words:
        if word in _BELOW_HUNDRED:
            current += _BELOW_HUNDRED[word]
        elif word in ("hundred", "dozen") and total + current:
            current *= SCALES[word]
        elif word in SCALES and current:
            total += current * SCALES[word]
            current = 0
        else:
            return None
    return Fraction(total + current) if words else None


# --- units ----------------------------------------------------------------------------------------


def _names_of_units() -> dict[str, str]:
    """Each name of a unit, with plurals in -s, and the unit's canonical name."""
    units: dict[str, str] = {}
    for unit, other_names in TABLES["units"].items():
        for name in (unit, *other_names.split()):
            units[name] = unit
            if len(name) > 2 and name.isascii():  # "ms" is no plural of m
                units[f"{name}s"] = unit
    return units


_UNIT_NAMES = _names_of_units()
_POWER_BEFORE = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3}
_POWER_AFTER = {"squared": 2, "cubed": 3}
_POWER_WORDS = _POWER_BEFORE | _POWER_AFTER
SYMBOLS = {name for name in _UNIT_NAMES if len(name) == 1}  # algebra uses these too: 5m

_DEGREES = re.compile(r"(?i)\bdeg(?:ree)?s? (celsius|fahrenheit|[CF])\b")
# "/", "per", "each", and the article of "dollars an hour".
_PER = re.compile(r" ?(?:/|\bper\b|\b(?:an?|each|every)\b(?= [a-z]+$)) ?")


def without_trailing_words(text: str) -> str:
    """The text without a trailing "in total", "of the apples" or the like.

    They stay where they hold a number or a word of `_NOT_UNITS`.
    """
    match = patterns.TRAILING_WORDS.search(text)
    if match is None:
        return text
    words = match[0].split()
    if not _NOT_UNITS.isdisjoint(words) or any(map(is_number_word, words)):
        return text
    return text[: match.start()]


def read_unit(text: str) -> str:
    """The canonical name of a unit, such as "cm^2" or "dollar/h"; "" for other words.

    A unit is a product of names with powers, or a ratio of two, or up to three words that end in a
    plural noun.
    """
    numerator, per, denominator = _PER.sub("/", _spell_unit(text), count=1).partition("/")
    powers = _unit_powers(numerator)
    powers_below = _unit_powers(denominator)
    if not powers or (per and not powers_below):
        return ""
    powers.subtract(powers_below)
    factors = sorted(powers.items())
    top = "*".join(_write_power(name, power) for name, power in factors if power > 0)
    bottom = "*".join(_write_power(name, -power) for name, power in factors if power < 0)
    return f"{top}/{bottom}" if bottom else top


def _spell_unit(text: str) -> str:
    """The text with one character for each sign, and abbreviations written out."""
    text = re.sub(r"\\degree ?([CF])\b", r"°\1", text)
    text = text.replace(r"\degree", "degree").replace(r"\Omega", "Ω").replace(r"\mu ", "µ")
    # 平方 is square, 立方 cubic, and 每 per.
    text = re.sub("([\u4e00-\u9fff]+)每", r"\1/", text)
    text = re.sub("平方([\u4e00-\u9fff]+)", r"\1^2", text)
    text = re.sub("立方([\u4e00-\u9fff]+)", r"\1^3", text)
    text = TABLES["unit_abbreviations"].get(text.lower(), text)
    return _DEGREES.sub(lambda match: f"°{match[1][0].upper()}", text).strip()


def _write_power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}^{power}"


def _unit_powers(text: str) -> Counter[str]:
    """{factor: power} of a unit; {noun: 1} of a plural noun with its adjectives; {} of anything
    else."""
    head, separator, _ = text.strip().partition(" of ")
    # 5 cups of flour are 5 cups.
    has_substance = separator and re.fullmatch("[a-z ]+", text)
    text = head if has_substance else text.strip()

    factors = list(patterns.FACTOR.finditer(text))
    powers: Counter[str] = Counter()
    unit = ""
    power_before = 1
    for factor in factors:
        word = factor[1]
        lowered = word.lower()
        if lowered in _POWER_AFTER and unit:
            powers[unit] *= _POWER_AFTER[lowered]
            continue
        if lowered in _POWER_WORDS and not unit:
            power_before = _POWER_WORDS[lowered]
            continue
        unit = _unit_of_word(word)
        if not unit:
            noun = _plural_noun(text)
            return Counter({noun: 1}) if noun else Counter()
        powers[unit] += int(factor[2] or power_before)
        power_before = 1
    if "".join(factor[0] for factor in factors) != text:
        return Counter()
    if has_substance and set(powers) == {"pound"}:
        return Counter({"lb": powers["pound"]})  # Pounds of apples are no money.
    return powers


def _unit_of_word(word: str) -> str:
    """The unit that a word names; "" if none.

    A longer name may be in any case. Of two letters both may be capitals, KM, but not one, Km.
    """
    name = word.rstrip(".")
    if name in _UNIT_NAMES:
        return _UNIT_NAMES[name]
    if re.fullmatch("[\u4e00-\u9fff]{1,10}", name):
        # Any other Chinese word after a number counts things, unless it changes the number.
        changes = qualified_in_chinese(name) or _CHINESE_CALCULATION.search(name)
        return "" if changes or chinese_number(name[0]) is not None else name
    shortest = 2 if name.isupper() else 3
    if len(name) < shortest:
        return ""
    return _UNIT_NAMES.get(name.lower(), "")


def _plural_noun(text: str) -> str:
    """Up to three words that end in a plural noun, in lower case; "" for anything else."""
    words = text.lower().split()
    noun = " ".join(words)
    if not re.fullmatch("[a-z]{3,}(?: [a-z]{3,}){0,2}", noun) or not _NOT_UNITS.isdisjoint(words):
        return ""
    for word in words:
        if is_number_word(word) or patterns.NUMBER_NOUN.fullmatch(word):
            return ""
    last = words[-1]
    if len(words) == 1 and last.endswith(("ed", "ly")):
        return ""
    if last in _UNIT_NAMES and len(last) > 2:
        return noun
    if patterns.PLURAL.fullmatch(last) and not last.endswith(("eds", "lys")):
        return noun
    return ""


def same_unit(a: str, b: str) -> bool:
    """Whether two units are the same.

    "marbles" match "red marbles", which do not match "blue marbles".
    """
    if "pound" in (a, b) and not {a, b}.isdisjoint(("£", "lb")):
        return True  # The word is of money and of a weight; its sign says which.
    if a == b or a.endswith(f" {b}") or b.endswith(f" {a}"):
        return True
    return (a + b).isalpha() and min(len(a), len(b)) > 2 and b in (f"{a}s", a[:-1])


_SUBSTANCE = re.compile(r"([a-z]+) of ([a-z ]+?)[.]?$")


def substances_differ(a: str, b: str) -> bool:
    """Whether two texts are amounts of two things: 5 cups of flour and 5 cups of sugar. One of
    them may leave the thing out, or say more of it: brown sugar."""
    match = _SUBSTANCE.search(a)
    other = _SUBSTANCE.search(b)
    if match is None or other is None or not (read_unit(match[1]) and read_unit(other[1])):
        return False
    return not same_unit(match[2], other[2])


# half an hour; a quarter of an hour; a week; an hour and a half
_ONE_OF_UNIT = re.compile(
    "(?:((?:an? )?(?:half|quarter|third)|(?:two|three) (?:quarters|thirds)) (?:of )?)?"
    "an? ([a-z]{3,})( and a half)?"
)


def quantity_in_words(text: str, levels: int = 0) -> Quantity | None:
    """The quantity of "twelve dollars", "twenty-five" or "5 and 1/2"; None for other texts."""
    if mixed := re.fullmatch(r"([0-9]{1,9}) and ([0-9]{1,9}) ?/ ?([1-9][0-9]{0,8})", text):
        whole, top, bottom = map(int, mixed.groups())
        return Quantity(whole + Fraction(top, bottom)) if 0 < top < bottom else None
    if (chinese := _chinese_quantity(text)) is not None:
        return chinese
    if part := re.fullmatch("([0-9]{1,9}) ([a-z]{3,})", text):
        noun = part[2].removesuffix("s")
        bottom = TABLES["denominators"].get(noun)
        if bottom and bottom > 2 and noun != "quarter":  # a coin
            return Quantity(Fraction(int(part[1]), bottom))
    if half := re.fullmatch(r"([0-9]{1,9}) and ([a-z]+(?:[ -][a-z]+)?)(?: ([A-Za-z].*))?", text):
        return _mixed_in_words(half)
    if one := _ONE_OF_UNIT.fullmatch(text):
        part = _fraction_in_words(one[1].split()) if one[1] else Fraction(1)
        if part is not None and one[2] in _UNIT_NAMES:
            return Quantity(part + Fraction(1 if one[3] else 0, 2), _UNIT_NAMES[one[2]])
    words = text.split(" ")
    # The unit is at most three words at the end.
    for end in range(len(words), max(0, len(words) - 4), -1):
        value = number_in_words(" ".join(words[:end]))
        if value is None:
            continue
        unit = read_unit(" ".join(words[end:]))
        if unit or end == len(words):
            return Quantity(value, unit)
    return None


def _mixed_in_words(match: re.Match[str]) -> Quantity | None:
    """The quantity of `3 and a half` and `3 and a half hours`; None for other texts."""
    part = _fraction_in_words(re.split("[ -]", match[2]))
    unit = read_unit(match[3] or "")
    if part is None or not part < 1 or bool(match[3]) != bool(unit):
        return None
    return Quantity(int(match[1]) + part, unit)


# --- words, options and sentences -----------------------------------------------------------------


def plain_words(text: str) -> str:
    """A text of nothing but words, in one spelling; "" for any other text."""
    if len(text) < 2 or not patterns.WORDS.fullmatch(text):
        return ""
    if not NAMES.isdisjoint(re.findall("[A-Za-z]+", text)):
        return ""
    if patterns.LETTER_PRODUCT.fullmatch(text) or not re.search(r"[^\W\d_]{2}", text):
        return ""
    if quantity_in_words(text) is not None or read_rank(text) is not None:
        return ""
    if not text.isascii() and chinese_number(answer_in_sentence(text)) is not None:
        return ""  # 概率是三分之一
    spelled = text.casefold().replace("-", " ").replace("'", "")
    return " ".join(patterns.ARTICLE.sub("", spelled).split())


def same_options(answer: str, truth: str) -> bool:
    """Whether both name the same option, or the same set of options.

    The answer may give the option with its text, "(B) 12".
    """
    options = option_letters(truth)
    if not options:
        return False
    letters = _letters(truth)
    answered = _letters(answer)
    is_arranged = letters != sorted(letters) or (answer.isalpha() and answered != sorted(answered))
    if is_arranged:
        # C, A, B is an arrangement, and so is CAB.
        return letters == answered and bool(option_letters(answer))
    if options == option_letters(answer):
        return True
    named = patterns.OPTION_TEXT.fullmatch(answer)
    if named is None or patterns.OTHER_OPTION.search(named[3]) or qualified(named[3]):
        return False
    letter = named[1] or named[2]
    return options == {letter.lower()}


def _letters(text: str) -> list[str]:
    return re.findall(r"\b[A-J]\b" if " " in text else "[A-J]", text)


def option_letters(text: str) -> frozenset[str]:
    """The letter of "(A)", "A." or "option A", or those of `A, C`, `AC` or `A and C`, in lower
    case; empty if none."""
    if single := patterns.OPTION.fullmatch(text):
        return frozenset(single[1].lower())
    letters = re.findall("[A-J]", text)
    if patterns.OPTIONS.fullmatch(text) and len(set(letters)) == len(letters):
        return frozenset(letter.lower() for letter in letters)
    return frozenset()


def qualified(text: str) -> bool:
    """Whether a text denies, hedges, offers a choice or describes a calculation."""
    lowered = small_letters(text)
    words = re.findall("[a-z']+", lowered)
    has_word = any(word in _QUALIFYING or word.endswith("n't") for word in words)
    return has_word or hedged(lowered)


def small_letters(text: str) -> str:
    """The text in small letters, without the month of May, which is no verb."""
    return re.sub(r"(?<=[A-Za-z,] )May\b", "month", text).lower()


def hedged(lowered: str) -> bool:
    """Whether a text in small letters has a phrase that hedges, such as "at best", or ends in a
    word that makes a bound of its number, as "12 apples minimum" does."""
    return _HEDGE.search(lowered) is not None or _BOUNDING.search(lowered) is not None


def qualified_in_chinese(text: str) -> bool:
    """Whether a Chinese text denies, hedges, offers a choice or describes a calculation."""
    text = re.sub("不同|不等式|不等实", "", text)  # different, inequality
    return any(word in text for word in _CHINESE_QUALIFYING)


# 25 square metres: the word squares no number.
_AREA_OR_VOLUME = re.compile(
    r"(?<=[0-9)}i]) (?:square|cubic) (?=(?:units?|[a-z]*met(?:er|re)s?|feet|foot|inch(?:es)?|miles?"
    r"|yards?|[ckm]?m)\b)"
)


def answer_in_sentence(text: str) -> str:
    """The answer in a plain sentence, 15 in "So there are 15 ways" and in 一共有15种方法.

    "" if the sentence denies, hedges or offers a choice.
    """
    if chinese := patterns.CHINESE_SENTENCE.fullmatch(text):
        is_number = chinese_number(chinese[1]) is not None
        checked = text[: chinese.start(1)] if is_number else text
        return "" if qualified_in_chinese(checked) else chinese[1]
    sentence = patterns.SENTENCE.fullmatch(text)
    if sentence is None or qualified(_AREA_OR_VOLUME.sub(" ", text)):
        return ""
    predicate = patterns.SENTENCE_END.fullmatch(sentence[1])
    if predicate is None:
        return ""
    words_after = (predicate[3] or "").split()
    return "" if any(map(is_number_word, words_after)) else predicate[1]


def words_in_sentence(words: str) -> str:
    """The predicate of a plain sentence, "odd" in "the function is odd".

    "" if the sentence denies or hedges.
    """
    match = patterns.PREDICATE.fullmatch(words)
    return "" if match is None or qualified(words) else match[1]


def two_forms(text: str) -> tuple[str, str] | None:
    """The two forms of an answer with a second form in brackets, `1/4 (or 0.25)` or `five (5)`.

    None for anything else.
    """
    again = patterns.NUMBER_AGAIN.fullmatch(text)
    if again and number_in_words(again[1]) is not None:
        return again[1], again[2]
    match = patterns.SAME_AGAIN.fullmatch(text)
    if match is None or any(map(patterns.SAME_AGAIN.fullmatch, match.groups())):
        return None
    return match[1], match[2]


class Clause(NamedTuple):
    """A text without its closing clause, such as "k ∈ ℤ", of a free parameter."""

    formula: str
    parameter: str  # "" where the text has no such clause
    is_integer: bool  # The parameter takes all integers, and not natural numbers alone.


def take_clause(text: str) -> Clause:
    """The text without a closing "k ∈ ℤ"; the parameter is renamed to n where it can be."""
    without = Clause(text, "", False)
    start = patterns.CLAUSE_WORD.search(text) or patterns.CLAUSE_VARIABLE.search(text)
    if start is None:
        return without
    clause = patterns.CLAUSE.fullmatch(text[start.start() :])
    if clause is None:
        return without
    name = clause[1] or clause[2]
    formula = text[: start.start()]
    letters = re.sub(r"\\[A-Za-z]+", "", formula)
    if name not in letters:
        return without
    is_integer = "ℕ" not in clause[0]
    parameter = re.compile(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])")
    stands_alone = len(parameter.findall(letters)) == letters.count(name)
    if stands_alone and "n" not in letters:
        return Clause(parameter.sub("n", formula), "n", is_integer)
    return Clause(formula, name, is_integer)


# --- dates, times, ratios and measures in two units -----------------------------------------------

_MONTHS = {
    name: number
    for number, names in enumerate(TABLES["months"].split(), start=1)
    for name in names.split(",")
}
_WEEKDAY = "(?:(?:sun|mon|tues|wednes|thurs|fri|satur)day,? )?"
_MONTH = rf"({'|'.join(sorted(_MONTHS, key=len, reverse=True))})[.]?"
_DAY = "(?:the )?([0-9]{1,2})(?:st|nd|rd|th)?"
_YEAR = "(?:,? ?([0-9]{4}))?"
# March 5, 2020; the 5th of March 2020; 2020年3月5日. Groups: month, day, year, in any order.
_MONTH_FIRST = re.compile(rf"(?i){_WEEKDAY}{_MONTH} {_DAY}{_YEAR}")
_DAY_FIRST = re.compile(rf"(?i){_WEEKDAY}{_DAY} (?:of )?{_MONTH}{_YEAR}")
_CHINESE_DATE = re.compile("(?:([0-9]{4})年)?([0-9]{1,2})月([0-9]{1,2})[日号]")


def read_date(text: str, levels: int) -> Answer | None:
    """`March 5, 2020`, `the 5th of March`, `3月5日`; None for anything else."""
    if match := _MONTH_FIRST.fullmatch(text):
        month, day, year = match.groups()
    elif match := _DAY_FIRST.fullmatch(text):
        day, month, year = match.groups()
    elif match := _CHINESE_DATE.fullmatch(text):
        year, month, day = match.groups()
    else:
        return None
    number = _MONTHS.get(month.lower()) or int(month)
    return Words(f"date {int(year or 0)}-{number}-{int(day)}")


_SHARE = re.compile(
    "(?:a )?([0-9]+|[a-z]+(?:-[a-z]+)?) (?:in|out of|chances? in) "
    "([0-9]+|[a-z]+(?:-[a-z]+)?)(?: chance)?"
)


def read_share(text: str, levels: int) -> Answer | None:
    """`1 in 8`, `three out of ten`: a fraction not above one; None for anything else."""
    match = _SHARE.fullmatch(text)
    if match is None:
        return None
    numbers = []
    for part in match.groups():
        number = fraction("", part) if part.isdigit() else number_in_words(part)
        numbers.append(number)
    top, bottom = numbers
    if top is None or bottom is None or not 0 <= top <= bottom or not bottom:
        return None
    return Quantity(top / bottom)


# 2h30m; 2 h 30 min. Groups: hours, minutes.
_HOURS_AND_MINUTES = re.compile(r"([0-9]{1,3}) ?h(?:rs?)? ?([0-9]{1,2}) ?m(?:ins?)?")

_TWO_UNITS = re.compile(
    r"""
    ([0-9.]+)[ ]?([A-Za-z]+)\.? ,?[ ](?:and[ ])? ([0-9.]+)[ ]?([A-Za-z]+)\.?
    | ([0-9.]+)[ ]?([\u4e00-\u9fff]{1,3}?) [零又]? ([0-9.]+)[ ]?([\u4e00-\u9fff]{1,3})
    | ([0-9]+)[ ]?' [ ]? ([0-9.]+)[ ]?(?:"|'')  # feet and inches
    """,
    re.VERBOSE,
)


def read_clock(text: str, levels: int) -> Answer | None:
    """`7:30 pm`, `5 o'clock`, `noon`; None for anything else."""
    if text.casefold() in ("noon", "midnight"):
        text = f"12 {text}"
    match = patterns.CLOCK.fullmatch(text)
    if match is None or not (match[2] or match[4] or match[5]):
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    half = (match[5] or match[4] or "").lower().replace(".", "").replace("o'clock", "")
    half = {"noon": "pm", "midnight": "am"}.get(half, half)
    if hour > 24 or minute > 59 or second > 59 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour %= 12
        if half == "pm":
            hour += 12
    elif hour > 12 or hour == 0:
        half = "24"
    return Clock((hour * 60 + minute) * 60 + second, half)


def read_ratio(text: str, levels: int) -> Answer | None:
    """`3:4`, `3 to 4`; None for anything else."""
    words = re.fullmatch(r"([0-9.]+) to ([0-9.]+)", text)
    sides = words.groups() if words else split(text, ":")
    if not 2 <= len(sides) <= 4:
        return None
    parts = tuple(map(read_quantity, sides))
    if not are_quantities(parts):
        raise NoAnswer("a ratio of parts that are no quantities")
    return Listing(":", parts)


def read_two_units(text: str, levels: int) -> Answer | None:
    """`5 feet 3 inches`, `2 hours and 30 minutes`, `5 dollars and 30 cents`, `5'3"`, `2h30m`."""
    if time := _HOURS_AND_MINUTES.fullmatch(text):
        return _listing_of_units((f"{time[1]} h", f"{time[2]} min"))
    match = _TWO_UNITS.fullmatch(text)
    if match is None:
        return None
    groups = [group for group in match.groups() if group]
    if len(groups) == 4:
        first, unit, second, other_unit = groups
        return _listing_of_units((f"{first} {unit}", f"{second} {other_unit}"))
    feet, inches = groups
    return _listing_of_units((f"{feet} ft", f"{inches} in"))


def read_several_units(text: str, levels: int) -> Answer | None:
    """`2 pens, three books and 4 rulers`: quantities of different units."""
    pieces = re.split(r",? and |, | \+ ", text)
    if not 2 <= len(pieces) <= 10:
        return None
    for piece in pieces:
        if not patterns.COUNT.fullmatch(piece) and quantity_in_words(piece) is None:
            return None
    return _listing_of_units(pieces)


def _listing_of_units(texts: Iterable[str]) -> Listing | None:
    """The quantities that texts state, if each has a unit of its own."""
    try:
        parts = tuple(quantity_in_words(text) or read_quantity(text) for text in texts)
    except Refused:
        return None
    if not are_quantities(parts):
        return None
    units = {part.unit for part in parts}
    has_units = "" not in units and len(units) == len(parts)
    return Listing("+", parts) if has_units else None


# --- quantities -----------------------------------------------------------------------------------


def read_quantity(text: str, levels: int = 0) -> Answer:
    """The quantity of a text: its currency, percent sign or unit, and the rest as a number or an
    expression."""
    text = _open_unit(without_trailing_words(text))
    answer = _read_notation(text)
    if answer is not None:
        return answer
    text, unit = _take_currency(text)
    if match := patterns.PERCENT.fullmatch(text):
        words = match[2]
        if words and (qualified(words) or not patterns.SHARE_WORDS.fullmatch(words)):
            raise Refused("words that may change a percentage")
        return _number(match[1])._replace(unit="%")
    if match := patterns.SCALED.fullmatch(text):
        if match[3] and not unit:
            unit = read_unit(match[3])
            if not unit:
                raise Refused("not a unit")
        number = _number(match[1]).value
        if not isinstance(number, Fraction):
            raise Refused("an expression before a word")
        return Quantity(number * SCALES[match[2]], unit)
    if not unit:
        text, unit = _take_unit(text)
    return _number(text)._replace(unit=unit)


def _open_unit(text: str) -> str:
    """`72 (clips)` as `72 clips`, where the brackets hold a unit of several letters."""
    match = patterns.UNIT_IN_BRACKETS.fullmatch(text)
    if match is None or not read_unit(match[2]):
        return text
    return f"{match[1]} {match[2]}"


def _read_notation(text: str) -> Answer | None:
    """A number in another base, with minutes of arc, without an end, or modulo another."""
    if match := patterns.BASED.fullmatch(text):
        if match[4]:
            return Quantity(_in_base(match[5], f"0{match[4].lower()}"))
        return Quantity(_in_base(match[1], match[2] or match[3]))
    if match := patterns.MINUTES.fullmatch(text):
        degrees, minutes, seconds = (fraction("", part or "0") for part in match.groups())
        return Quantity(degrees + minutes / 60 + seconds / 3600, "degree")
    if match := patterns.ENDLESS.fullmatch(text):
        return _endless(match[1], match[2], match[3])
    if match := patterns.MODULO.fullmatch(text):
        modulus = int(match[2])
        return Quantity(parse_expression(match[1]), f"mod {modulus}") if modulus else None
    return None


def _take_currency(text: str) -> tuple[str, str]:
    """The text without its currency, and the unit of money; "$18 per day" has the unit
    "dollar/day"."""
    if match := patterns.MONEY_CODE.fullmatch(text):
        code = match[1].rstrip(".")
        text = f"{match[2]} {code}"
    match = patterns.MONEY.fullmatch(text)
    if match is None:
        return text, ""
    sign = match[1] or ""
    unit = TABLES["currencies"][match[2] or match[5]]
    amount = match[3] or match[4]
    parts = patterns.AMOUNT_PER.fullmatch(amount)
    if parts is None or re.match(r" *(?:[\\^*(+-]|/ ?[^a-z])", parts[2]):
        return sign + amount, unit  # an expression
    words = parts[2].strip()
    if words:
        unit_of_words = read_unit(f"{unit} {words}") or read_unit(parts[2])
        if not unit_of_words:
            raise Refused("not an amount of money")
        # $5 cents is neither dollars nor cents.
        unit = "" if unit_of_words == "cent" else unit_of_words
    return sign + parts[1], unit


def _take_unit(text: str) -> tuple[str, str]:
    """The text without the unit at its end, and the unit, or ""."""
    match = patterns.AMOUNT.fullmatch(text)
    if match is None:
        return text, ""
    amount, gap, words = match.groups()
    unit = _unit_after(amount, gap, words)
    return (amount, unit) if unit else (text, "")


def _unit_after(amount: str, gap: str, words: str) -> str:
    """The unit after an amount, or "".

    A letter and a noun need a space before them (5m is algebra); 2x + 3 h has no unit.
    """
    if words.startswith("\\degree") and any(f"\\{name}" in amount for name in TRIGONOMETRIC):
        return ""  # the degrees of \sin 30°
    letters = re.sub(r"\\[A-Za-z]+|\bpi\b|sqrt", "", amount)
    if re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]*\{)", letters):
        return ""
    if not gap and words in SYMBOLS and words.isascii():
        return ""
    unit = read_unit(words)
    is_glued = not gap and words[0].isascii() and not words.startswith("\\")
    if is_glued and (" " in unit or len(words) == 1 or re.fullmatch("[a-z]{3,}s", unit)):
        return ""
    return unit


def _number(text: str) -> Quantity:
    """The value of a number or an expression, without a unit."""
    scalar = patterns.SCALAR.fullmatch(text)
    if scalar is None:
        return Quantity(parse_expression(text))
    sign, number, exponent = scalar.groups("")
    exponent = exponent.strip("{} ")
    written_decimals = len(number.partition(".")[2])
    decimals = max(0, written_decimals - int(exponent or 0))
    digits = 0
    if decimals:
        digits = len(number.replace(",", "").replace(".", "").lstrip("0"))
    return Quantity(fraction(sign, number, exponent), "", decimals, digits)


def _endless(sign: str, whole: str, digits: str) -> Answer:
    """The value of `0.1666...`.

    Three equal digits or two equal blocks at the end repeat for ever; other digits are an
    approximation.
    """
    for period in range(1, len(digits) // 2 + 1):
        block = digits[-period:]
        repetitions = 3 if period == 1 else 2
        if digits.endswith(block * repetitions):
            return Quantity(fraction(sign, f"{whole}.{digits[:-period]}", period=block))
    return About(_number(f"{sign}{whole}.{digits}"))


def _in_base(digits: str, base: str) -> Node:
    """The value of digits in a base, which is a number, a word or a prefix; or a subscripted
    variable, x_2."""
    digits = digits.replace(" ", "")
    radix = int(base) if base.isdigit() else TABLES["base_words"].get(base, 0)
    is_variable = digits.isalpha() and (len(digits) == 1 or radix < 11)
    if digits != digits.upper() and radix != 16:
        is_variable = True
    if not 2 <= radix <= 36 or is_variable:
        return parse_expression(f"{digits}_{{{base}}}")
    try:
        return Fraction(int(digits, radix))
    except ValueError:
        raise Refused(f"{digits} has a digit that base {radix} has not") from None

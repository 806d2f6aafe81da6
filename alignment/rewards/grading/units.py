"""Units of measure and money, and numbers in words."""

from __future__ import annotations

import re
from fractions import Fraction

# The names of each unit, its canonical name first; names longer than two letters also have a plural in -s.
_UNITS = """
mm millimeter millimetre, cm centimeter centimetre 厘米, dm decimeter decimetre, m meter metre 米, km kilometer
kilometre 千米 公里, nm nanometer, µm micrometer micron, inch inches in, foot feet ft, yard yd, mile mi, mg
milligram, g gram gramme 克, kg kilogram kilo kilogramme 千克 公斤, ounce oz, pound lb lbs, ton tonne, ml mL
milliliter millilitre, l L liter litre cl, cup, pint pt, quart qt, gallon gal, tablespoon tbsp, teaspoon tsp,
ms millisecond, s second sec, minute min mins 分钟, h hour hr hrs 小时, day 天, week wk, fortnight, month, year yr
yrs 岁 年, decade, century centuries, dollar buck usd USD, cent ¢, euro EUR, £ gbp GBP, rupee INR Rs, yen JPY,
yuan RMB CNY 元, degree deg, radian rad, unit, person people 人, child children, man men, woman women, foot
feet, tooth teeth, mouse mice, goose geese, fish, sheep, deer, N newton 牛, eV electronvolt, keV, MeV, GeV,
bar, atm atmosphere, mmHg, erg, Å angstrom, dB decibel, ly lightyear, parsec pc, J joule, kJ kilojoule, W
watt, kW kilowatt, V volt, A amp ampere, Ω ohm, Hz hertz, kHz kilohertz, Pa pascal, kPa kilopascal, K kelvin,
mol mole, °C celsius, °F fahrenheit, acre, hectare ha, calorie cal, kcal, byte, bit, kb KB kilobyte, mb MB
megabyte, gb GB gigabyte, knot, au, piece 个, kWh
"""
_UNIT_NAMES = {
    name + plural: group.split()[0]
    for group in _UNITS.split(",")
    for name in group.split()
    for plural in ("", "s")[: 1 + (len(name) > 2 and name.isascii())]  # "ms" is no plural of m
}
_SPELLED_OUT = {"mph": "mile/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "mps": "m/s", "fps": "ft/s", "cc": "cm^3",
                "rpm": "revolutions/minute", "mpg": "mile/gallon", "sqft": "ft^2"}  # fmt: skip
_SHAPES = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3, "squared": 2, "cubed": 3}
SYMBOLS = {name for name in _UNIT_NAMES if len(name) == 1}  # algebra uses these too: 5m

# Words that are no unit, because they change the number before them or mean something else: 5 dozen is not 5.
_NO_UNIT = set(
    """ten tens dozen dozens hundred hundreds thousand thousands million millions billion billions trillion trillions lakhs
    crores score scores pair pairs couple couples half halves third thirds quarter quarters times positives negatives inverses
    plus minus percents sins logs this thus squares cubes versus always perhaps ones twos threes fours fives sixes sevens
    eights nines or and not over less more than greater fewer remainder mod modulo base to by from with without if else
    is are was were equals except but only about approximately least most between is other others either pi thousandths
    divided multiplied added unless possibly maybe guess guesses choices options answers solutions roots is
    plusminus reciprocals opposites basis gross grosses googol googols""".split()
)
_NUMBERS = re.compile(  # as nouns: 5 sixteenths, 5 twenties, 5 quadrillion
    r"\w*(?:teen(?:th)?|tieth|(?:twen|thir|for|fif|six|seven|eigh|nine)tie|dredth|sandth|ll?ion|ll?ionth)s?|"
    r"(?:eleven|twel[fv]e?)(?:th)?s?|(?:four|fif|six|seven|eigh|nin|ten)ths?"
)
_PLURAL = re.compile(r"[a-z]{2,}(?<!s)s|[a-z]{2,}(?:sse|e)s")
TAIL = re.compile(
    r" (?:old|long|tall|wide|high|deep|away|left|remaining|total|in total|in all|altogether|each|apiece"
    r"|of (?:the|a|an|all|his|her|their|its)(?: [a-z]+){1,3})$"
)


def without_tail(text: str) -> str:
    """The text without "in total", "of the apples" and the like, unless these contain a number."""
    match = TAIL.search(text)
    words = match[0].split() if match else []
    counted = _NO_UNIT.isdisjoint(words) and not any(number_in_words(word) is not None for word in words)
    return text[: match.start()] if match and counted else text


_WORD = r"[A-Za-zµΩ°¢£Å\u4e00-\u9fff]+\.?"
_FACTOR = re.compile(rf" ?({_WORD})(?: ?\^ ?\{{? ?(-?[0-9]) ?\}}?)?")


def read_unit(text: str) -> str:
    """The canonical name of a unit, such as "cm^2" or "dollar/h"; "" for words that are no unit.

    A unit is one of the list above with its power, also per another one, or up to three words that end in a plural noun.
    """
    text = (
        re.sub(r"\\degree ?([CF])\b", r"°\1", text).replace(r"\degree", "degree").replace(r"\Omega", "Ω").replace(r"\mu ", "µ")
    )
    text = _SPELLED_OUT.get(text.lower(), text)
    text = re.sub(r"(?i)\bdeg(?:ree)?s? (celsius|fahrenheit|[CF])\b", lambda m: f"°{m[1][0].upper()}", text).strip()
    above, per, below = re.sub(r" ?(?:/|\bper\b|\b(?:an?|every)\b(?= [a-z]+$)) ?", "/", text, count=1).partition("/")
    powers = _product(above)
    if not powers or (per and not _product(below)):
        return ""
    for name, power in _product(below).items() if per else ():
        powers[name] = powers.get(name, 0) - power
    up, down = (
        "*".join(
            name if abs(power) == 1 else f"{name}^{abs(power)}" for name, power in sorted(powers.items()) if power * sign > 0
        )
        for sign in (1, -1)
    )
    return f"{up}/{down}" if down else up


def _product(text: str) -> dict[str, int]:
    """The power of each factor of a unit, or of a plural noun with its adjectives; {} for anything else."""
    head, of, _ = text.strip().partition(" of ")  # 5 cups of flour are 5 cups
    text = head if of and re.fullmatch("[a-z ]+", text) else text.strip()
    shape, last, at = 0, "", 0
    powers: dict[str, int] = {}
    for match in _FACTOR.finditer(text):
        word, power = match[1], match[2]
        if match.start() != at:
            return {}
        at = match.end() + len(re.match(r" ?[*-]|", text[match.end() :])[0])
        lowered = word.lower()
        if lowered in ("squared", "cubed") and last:
            powers[last] *= _SHAPES[lowered]
        elif lowered in _SHAPES and not last:
            shape = _SHAPES[lowered]
        else:
            bare = word.rstrip(".")
            last = _UNIT_NAMES.get(bare) or (
                _UNIT_NAMES.get(bare.lower(), "") if len(bare) > 2 or (len(bare) > 1 and bare.isupper()) else ""
            )
            if not last:
                return dict.fromkeys([noun], 1) if (noun := _noun(text)) else {}
            powers[last] = powers.get(last, 0) + int(power or shape or 1)
            shape = 0
    return powers if at == len(text) else {}


def _noun(text: str) -> str:
    words = text.lower().split()
    if not 1 <= len(words) <= 3 or not re.fullmatch("[a-z]{3,} ?" * len(words), " ".join(words)):
        return ""
    if not _NO_UNIT.isdisjoint(words) or any(word.endswith(("ed", "ly")) and len(words) == 1 for word in words):
        return ""
    if any(number_in_words(word) is not None or _NUMBERS.fullmatch(word) for word in words):
        return ""
    known = words[-1] in _UNIT_NAMES and len(words[-1]) > 2
    return " ".join(words) if known or _PLURAL.fullmatch(words[-1]) and not words[-1].endswith(("eds", "lys")) else ""


def same_unit(a: str, b: str) -> bool:
    """Whether two units are the same; "marbles" match "red marbles", which do not match "blue marbles"."""
    return (
        a == b
        or a.endswith(f" {b}")
        or b.endswith(f" {a}")
        or ((a + b).isalpha() and min(len(a), len(b)) > 2 and b in (f"{a}s", a[:-1]))
    )


# --- number words ---------------------------------------------------------------------------------------

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
).split()
_TENS = dict(zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 100, 10), strict=True))
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
          "ninth": 9, "tenth": 10}  # fmt: skip


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
        whole, part = _cardinal(words[:at]), _part(words[at + 1 :])
        if whole is not None and part is not None:
            return whole + part
    part = _part(words)
    return part if part is not None else _cardinal([word for word in words if word != "and"])


def quantity_in_words(text: str) -> tuple[Fraction, str] | None:
    """The value and the unit, "" for none, of "twenty-five" or "twelve dollars"; None for other words."""
    if not text[:1].isalpha():
        return None
    words = text.split(" ")
    for end in range(len(words), max(0, len(words) - 4), -1):
        value = number_in_words(" ".join(words[:end]))
        if value is None:
            continue
        unit = read_unit(" ".join(words[end:]))
        if unit or end == len(words):
            return value, unit
    return None


def _part(words: list[str]) -> Fraction | None:
    """The value of "a half" or "two thirds"."""
    bottom = _PARTS.get(words[-1].removesuffix("s")) if words else None
    if bottom is None or (len(words) == 1 and bottom != 2):
        return None
    top = Fraction(1) if words[:-1] in ([], ["a"], ["one"]) else _cardinal(words[:-1])
    return None if top is None else top / bottom


def _cardinal(words: list[str]) -> Fraction | None:
    """The value of a whole number in words."""
    total = current = 0
    for word in words:
        if word in _ONES:
            current += _ONES.index(word)
        elif word in _TENS:
            current += _TENS[word]
        elif word in ("hundred", "dozen") and total + current:
            current *= SCALES[word]
        elif word in SCALES and current:
            total, current = total + current * SCALES[word], 0
        else:
            return None
    return Fraction(total + current) if words else None

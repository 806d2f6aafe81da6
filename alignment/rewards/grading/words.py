"""The words of answers: units of measure and money ("cm^2", "dollar/h"), numbers ("two thirds"), options, whole sentences."""

import re
from collections import Counter
from fractions import Fraction

from alignment.rewards.grading.answers import Quantity
from alignment.rewards.grading.expressions import NAMES
from alignment.rewards.grading.text import TABLES

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


def quantity_in_words(text: str) -> Quantity | None:
    """The quantity of "twelve dollars" or "twenty-five"; None for other words."""
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

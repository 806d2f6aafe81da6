"""Answers in words: option letters, plain words, and the answer inside a sentence. All functions map text to text."""

import re

from alignment.rewards.grading.expressions import NAMES
from alignment.rewards.grading.text import TABLES
from alignment.rewards.grading.units import number_in_words, quantity_in_words

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


def same_options(answer: str, truth: str) -> bool:
    """Whether both name the same option, also with its text, or the same set of options."""
    options = option_letters(truth)
    return bool(options) and options in (option_letters(answer), {option_with_text(answer)})


def option_letters(text: str) -> frozenset[str]:
    """The letter of "(A)", "A." or "option A", or those of `A, C`, `AC` or `A and C`, in lower case; empty if none."""
    if one := _OPTION.fullmatch(text):
        return frozenset(one[1].lower())
    letters = re.findall("[A-J]", text)
    several = _SET_OF_LETTERS.fullmatch(text) and len(set(letters)) == len(letters)
    return frozenset(map(str.lower, letters)) if several else frozenset()


def option_with_text(text: str) -> str:
    """The letter of one option with its text, "(B) 12"; "" for anything else, also for several options."""
    match = _OPTION_TEXT.fullmatch(text)
    if match is None or re.search(r"\([A-J]\)|\b[A-J][).:]|\b[B-J]\b|\band\b", match[3]) or qualified(match[3]):
        return ""
    return (match[1] or match[2]).lower()


_SENTENCE = re.compile(
    r"(?:[A-Za-z']+,? ){0,10}"
    r"(?:is|are|was|were|equals|equal to|be|has|have|had|costs?|earns?|gets?|makes?|pays?|spends?|needs?|takes?|at|"
    r"there are|there were|total of|left with|saves?|sold|sells?|owes?|contains?|weighs?|measures?|travels?|walks?|runs?|"
    r"reads?)(?: (?:him|her|them|it|us|me|you))?(?: (?:now|still|exactly|only|just|all|a total of|equal to))? "
    r"(?=[-0-9$£€¥\\(\[{])(.*)"
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

"""The language of reasoning: which share of its words is in the language of the question.

Scripts tell most languages apart. Those of one script are told apart by their function words, such
as "the" and "und" (`function_words.toml`), word by word and sentence by sentence.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignment.system.files import read_toml

JAPANESE_SCRIPTS = ("CJK", "HIRAGANA", "KATAKANA")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_SENTENCE_END = re.compile(r"[.!?;:\n]+")
_MARKUP = re.compile(r"</?\w+>|\\[A-Za-z]+")
_ENDS_OF_REASONING = ("</think>", "</reasoning>")


def _read_languages() -> dict[str, dict[str, frozenset[str]]]:
    """Script -> word -> the languages whose function word it is."""
    table = read_toml(Path(__file__).with_name("function_words.toml"), "--reward")
    scripts = {}
    for script, lists in table.items():
        languages: dict[str, frozenset[str]] = {}
        for language, words in lists.items():
            for word in words.split():
                languages[word] = languages.get(word, frozenset()) | {language}
        scripts[script.upper()] = languages
    return scripts


LANGUAGES: Mapping[str, Mapping[str, frozenset[str]]] = _read_languages()


def share_in_language(question: str, prompt: str, response: str) -> float:
    """Share of the words of the response's reasoning that are in the language of the question
    (DeepSeek-AI 2025, arXiv:2501.12948, section 2.3.2).

    The reasoning is what stands before the last end of a thought, or else the whole response. The
    language is that of the question or, if it has no words, of the prompt. Characters of Chinese
    count as words; tags and LaTeX commands do not. Reasoning without words has 1. A function word
    is of its own languages, another word of that of most function words in its sentence, or of the
    question's where these do not say.
    """
    expected = _count_scripts(_words(question)) or _count_scripts(_words(prompt))
    reasoning = reasoning_of(response)
    used = _count_scripts(_words(reasoning))
    if not expected or not used:
        return 1.0
    script, _ = expected.most_common(1)[0]
    in_script = used[script] / used.total()
    known = LANGUAGES.get(script)
    if known is None:
        return in_script
    language = _language_of(_words(question), known) or _language_of(_words(prompt), known)
    if language is None:
        return in_script
    return in_script * _share_of_words(reasoning, script, language)


def reasoning_of(response: str) -> str:
    """What stands before the last end of a thought; without one, the whole response."""
    last = -1
    for tag in _ENDS_OF_REASONING:
        last = max(last, response.rfind(tag))
    return response if last < 0 else response[:last]


def _words(text: str) -> list[str]:
    """The words of a text in lower case, without tags and LaTeX commands."""
    return _WORD.findall(_MARKUP.sub(" ", text).lower())


def _share_of_words(text: str, script: str, language: str) -> float:
    """Of the text's words in a script, the share that is in a language of that script."""
    known = LANGUAGES[script]
    number = 0
    inside = 0
    for sentence in _SENTENCE_END.split(_MARKUP.sub(" ", text)):
        words = [word for word in _words(sentence) if _script_of(word) == script]
        of_sentence = _language_of(words, known) or language
        for word in words:
            number += 1
            languages = known.get(word, frozenset({of_sentence}))
            inside += language in languages
    return inside / number if number else 1.0


def _language_of(words: Sequence[str], known: Mapping[str, frozenset[str]]) -> str | None:
    """The language that has most of the function words among these; None where there are none, or
    two languages have as many."""
    counts: Counter[str] = Counter()
    for word in words:
        counts.update(known.get(word, ()))
    if not counts:
        return None
    (language, most), *others = counts.most_common(2)
    if others and others[0][1] == most:
        return None
    return language


def _script_of(word: str) -> str:
    """The script of a word's first letter: the first word of the letter's Unicode name."""
    script, *_ = unicodedata.name(word[0], "OTHER").split()
    return script


def _count_scripts(words: Sequence[str]) -> Counter[str]:
    """The number of words in each script; of Chinese and Japanese, of characters."""
    scripts: Counter[str] = Counter()
    for word in words:
        letters = [_script_of(letter) for letter in word]
        ideographs = [script for script in letters if script in JAPANESE_SCRIPTS]
        scripts.update(ideographs or letters[:1])
    if scripts["HIRAGANA"] or scripts["KATAKANA"]:
        # Japanese mixes three scripts, in any shares.
        scripts["JAPANESE"] = sum(scripts.pop(script, 0) for script in JAPANESE_SCRIPTS)
    return +scripts

"""Between text and token ids, in both directions.

Which ids a model gets for a prompt, and what rules and stop strings see of the ids that it answers
with. Every command, sampler and preview reads and writes text by these functions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

PROBES = ("a", "0", ".")  # texts without special tokens, of which a tokenizer knows one at least
CHAT_PROBE = "qwzx"  # an answer that no chat template has in itself


@dataclass(frozen=True)
class PromptIds:
    """The token ids of each prompt, and in words what was repaired in some of them."""

    ids: list[list[int]]
    repairs: tuple[str, ...]


def prompt_token_ids(tokenizer, prompts: Sequence[str]) -> PromptIds:
    """The ids of prompts that a model continues, with a BOS in front where the tokenizer adds one.

    Two things are repaired. An EOS that the tokenizer appends goes, since a model has nothing to
    say after it. A beginning that the prompt spells out and the tokenizer adds once more, such as
    BOS, stands there once.
    """
    if not prompts:
        return PromptIds([], ())
    encoded = tokenizer(list(prompts), add_special_tokens=True)["input_ids"]
    prefix, suffix = added_ids(tokenizer)
    if not prefix and not suffix:
        return PromptIds(encoded, ())
    spelled = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    # What stays of a suffix ends before its first EOS.
    kept = suffix
    if tokenizer.eos_token_id in suffix:
        kept = suffix[: suffix.index(tokenizer.eos_token_id)]
    repaired = []
    doubled = False
    for ids, plain in zip(encoded, spelled, strict=True):
        if ids != [*prefix, *plain, *suffix]:  # another rule made it, so that nothing is certain
            repaired.append(ids)
            continue
        beginning = prefix
        if prefix and tuple(plain[: len(prefix)]) == prefix:
            doubled = True
            beginning = ()
        repaired.append([*beginning, *plain, *kept])
    repairs = []
    if kept != suffix:
        removed = "".join(tokenizer.convert_ids_to_tokens(list(suffix[len(kept) :])))
        repairs.append(f"the tokenizer appends {removed} to every text: prompts go without it")
    if doubled:
        beginning = "".join(tokenizer.convert_ids_to_tokens(list(prefix)))
        repairs.append(
            f"prompts spell out {beginning}, which the tokenizer adds too: it is there once"
        )
    return PromptIds(repaired, tuple(repairs))


def added_ids(tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer puts before and behind every text, such as BOS and EOS."""
    for probe in PROBES:
        ids = tokenizer(probe, add_special_tokens=True)["input_ids"]
        plain = tokenizer(probe, add_special_tokens=False)["input_ids"]
        if not plain:
            continue
        for start in range(len(ids) - len(plain) + 1):
            end = start + len(plain)
            if ids[start:end] == plain:
                return tuple(ids[:start]), tuple(ids[end:])
    return (), ()


def response_token_ids(tokenizer, responses: Sequence[str]) -> list[tuple[int, ...]]:
    """The ids that a model is taught to answer with: the response's own, and one EOS behind
    them."""
    if not responses:
        return []
    eos = tokenizer.eos_token_id
    encoded = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
    taught = []
    for ids in encoded:
        end = [] if ids[-1:] == [eos] else [eos]
        taught.append((*ids, *end))
    return taught


def end_token_ids(tokenizer, listed: int | Iterable[int] | None) -> frozenset[int]:
    """The ids that end a response.

    They are the tokenizer's EOS, those `listed` as the model's `eos_token_id`, and the special
    token by which its chat template ends the assistant's turn.
    """
    listed_ids = listed if isinstance(listed, Iterable) else [listed]
    candidates = (tokenizer.eos_token_id, *listed_ids, _end_of_turn(tokenizer))
    return frozenset(number for number in candidates if number is not None)


def _end_of_turn(tokenizer) -> int | None:
    """The id of the special token that stands behind an answer in the tokenizer's chat template,
    such as <|im_end|>."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": CHAT_PROBE}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:
        # A template raises errors of its own, of any class, for turns that it does not take.
        return None
    behind = text.rpartition(CHAT_PROBE)[2].lstrip()
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder
    if ids and ids[0] in added and added[ids[0]].special:
        return ids[0]
    return None


class ResponseReader:
    """What rules and stop strings see of a response.

    That is the text of all its tokens, special ones such as <think> included, but for those that
    end it (`end_ids`) or pad. One of these that is itself a stop string, as an EOS token </answer>,
    is seen.
    """

    def __init__(self, tokenizer, end_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self._hidden_ids = self.end_ids | {tokenizer.pad_token_id}
        # Decoding a row's last tokens at every step would cost more than a tiny model's
        # forward pass.
        self._may_complete = lru_cache(maxsize=None)(self._has_last_letter)

    def text(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The text up to and with the first stop string; the last token may carry letters beyond
        it."""
        text = self._decode(self._visible(token_ids, stop))
        ends = [text.index(string) + len(string) for string in stop if string in text]
        return text[: min(ends, default=None)]

    def is_finished(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the last of `token_ids` ends the response: an end token, or one that completes a
        stop string."""
        last = token_ids[-1]
        if last in self.end_ids:
            return True
        if not stop or not self._may_complete(last, tuple(stop)):
            return False
        most_bytes = max(len(string.encode()) for string in stop)  # and so at most as many tokens
        visible = self._visible(token_ids, stop)
        tail = self._decode(visible[-most_bytes - 1 :])
        # A run of byte tokens is decoded as a whole: one that is cut within a character is read as
        # other characters, also behind it.
        if "\ufffd" in tail:
            tail = self._decode(visible)
        return any(string in tail for string in stop)

    def _has_last_letter(self, token: int, stop: tuple[str, ...]) -> bool:
        """Whether the token may hold the last letter, or a part of it, of a stop string."""
        piece = self._decode([token, token])  # twice, as some decoders drop a space in front
        # U+FFFD stands for a part of a character, which those of ASCII are not cut into.
        is_part = "\ufffd" in piece
        return any(string[-1] in piece or (is_part and not string[-1].isascii()) for string in stop)

    def _visible(self, token_ids: Sequence[int], stop: Sequence[str]) -> list[int]:
        """The tokens without those that end or pad, unless one is itself a stop string."""
        visible = []
        for token in token_ids:
            if token not in self._hidden_ids or self._decode([token]) in stop:
                visible.append(token)
        return visible

    def _decode(self, token_ids: Sequence[int]) -> str:
        # Cleaning up would take spaces away that the model has drawn.
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

"""Which token has which id, read from a model's files without a library, and whether a teacher's
ids are the policy's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.system.errors import UserError
from alignment.system.files import read_json


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model."""

    ids: Mapping[str, int]  # Token -> id.
    size: int  # Of the model's log-probs, which may have more places than there are tokens.


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a model's folder; None where its tokenizer.json or config.json does not say
    it."""
    tokenizer_file = folder / "tokenizer.json"
    config_file = folder / "config.json"
    if not tokenizer_file.is_file() or not config_file.is_file():
        return None
    config: Any = read_json(config_file)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    tokenizer: Any = read_json(tokenizer_file)
    tokens = tokenizer.get("model", {}).get("vocab")
    if size is None or tokens is None:
        return None
    if isinstance(tokens, list):  # Of a unigram model: [token, score] in the order of ids.
        ids = {token: index for index, (token, _) in enumerate(tokens)}
    else:
        ids = dict(tokens)
    for added in tokenizer.get("added_tokens", []):
        ids[added["content"]] = added["id"]
    return Vocabulary(ids, size)


def refuse_other_vocabulary(name: str, teacher: Vocabulary, policy: Vocabulary) -> None:
    """Raise `UserError` where a token of the policy's has another id in the tokenizer of the model
    `name`, or none, or where the policy may sample an id that the model has no log-prob for. Tokens
    that the teacher alone has do no harm: the policy never samples them."""
    others = [token for token, index in policy.ids.items() if teacher.ids.get(token) != index]
    remedy = "choose a teacher with the policy's tokenizer"
    if others:
        first = others[0]
        teachers_id = teacher.ids.get(first, "none")
        raise UserError(
            f"--teacher {name}: its tokenizer gives {len(others)} of the policy's"
            f" {len(policy.ids)} tokens another id or none, such as {first!r} (the policy's"
            f" {policy.ids[first]}, the teacher's {teachers_id}): {remedy}"
        )
    if teacher.size < policy.size:
        raise UserError(
            f"--teacher {name}: has {teacher.size} log-probs a token, and the policy {policy.size}:"
            f" {remedy}, and a vocabulary of at least that size"
        )

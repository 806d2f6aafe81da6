"""From text and token ids to padded batches, and from batches to micro-batches."""

from collections.abc import Iterable, Sequence

import torch

from alignment.core.records import Batch
from alignment.core.text import prompt_token_ids


def collate(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], pad_token_id: int
) -> Batch:
    """Right-pad prompt + response and shift by one: a `Batch` [batch, max(len(prompt) +
    len(response)) - 1] on the CPU. Its mask comes from lengths, not `ids != pad`: many tokenizers
    pad with EOS, which is also a real response token."""
    sequences = [
        [*prompt, *response] for prompt, response in zip(prompt_ids, response_ids, strict=True)
    ]
    width = max(map(len, sequences))
    padded = torch.tensor(
        [ids + [pad_token_id] * (width - len(ids)) for ids in sequences], dtype=torch.int64
    )
    first = torch.tensor([[len(prompt) - 1] for prompt in prompt_ids])  # label t is token t + 1
    last = torch.tensor([[len(ids) - 1] for ids in sequences])
    place = torch.arange(width - 1)[None]
    mask = (first <= place) & (place < last)
    return Batch(
        input_ids=padded[:, :-1].contiguous(), labels=padded[:, 1:].contiguous(), response_mask=mask
    )


def take_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows of a batch, without the padding that only the others need."""
    index = torch.as_tensor(rows)
    mask = batch.response_mask[index]
    width = int(mask.any(dim=0).nonzero().max()) + 1
    return Batch(
        input_ids=batch.input_ids[index, :width],
        labels=batch.labels[index, :width],
        response_mask=mask[:, :width],
    )


Row = tuple[tuple[int, ...], tuple[int, ...]]
"""The token ids that go into a model: the prompt's, and the response's without its last, which is
only ever a label."""


def split_rows(input_ids: torch.Tensor, response_mask: torch.Tensor) -> list[Row]:
    """The rows of a batch [batch, sequence] on the CPU, without padding: each ends with its last
    label in the mask."""
    first = response_mask.int().argmax(dim=1).tolist()
    last = response_mask.int().cumsum(dim=1).argmax(dim=1).tolist()
    rows = zip(input_ids.tolist(), first, last, strict=True)
    return [(tuple(ids[: start + 1]), tuple(ids[start + 1 : end + 1])) for ids, start, end in rows]


def rows_by_prompt(
    rows: Sequence[Row], order: Iterable[int] | None = None
) -> dict[tuple[int, ...], list[int]]:
    """Each prompt's rows, by number, in the `order` given; else as they come."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(rows)) if order is None else order:
        groups.setdefault(rows[row][0], []).append(row)
    return groups


def packed_tokens(rows: Sequence[Row]) -> int:
    """Tokens of these rows where rows of one prompt share it."""
    return sum(len(prompt) for prompt in {prompt for prompt, _ in rows}) + sum(
        len(response) for _, response in rows
    )


def cut_by_tokens(rows: Sequence[Row], most_tokens: int) -> list[list[int]]:
    """The row numbers of micro-batches of at most `most_tokens` packed tokens (one row at least):
    rows of one prompt together, and prompts of long responses first, so that memory peaks at once
    and a micro-batch's responses are of similar length."""
    longest_first = sorted(range(len(rows)), key=lambda row: -len(rows[row][1]))
    pieces: list[list[int]] = []
    budget = 0
    for prompt, members in rows_by_prompt(rows, longest_first).items():
        prompt_cost = len(prompt)  # 0 once the current piece holds the prompt
        group_tokens = packed_tokens([rows[row] for row in members])
        for row in members:
            tokens = len(rows[row][1])
            group_fits_elsewhere = prompt_cost and budget < group_tokens <= most_tokens
            if not pieces or prompt_cost + tokens > budget or group_fits_elsewhere:
                pieces.append([])
                budget, prompt_cost = most_tokens, len(prompt)
            pieces[-1].append(row)
            budget, prompt_cost = budget - prompt_cost - tokens, 0
    return pieces


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer
) -> dict[str, torch.Tensor]:
    """Tokenise prompts and outputs apart (so that the border never moves) and `collate` them: the
    `Batch`'s tensors by name."""
    prompt_ids = prompt_token_ids(tokenizer, prompt_strs).ids
    output_ids = tokenizer(list(output_strs), add_special_tokens=False)["input_ids"]
    return vars(collate(prompt_ids, output_ids, pad_token_id(tokenizer)))


def pad_token_id(tokenizer) -> int:
    """The id to pad with: EOS. Any id with an embedding will do, because masks come from lengths; a
    pad token that was added to a tokenizer often has none."""
    return tokenizer.eos_token_id

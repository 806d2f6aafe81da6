"""From text and token ids to padded batches, and from batches to micro-batches."""

from collections.abc import Iterable, Sequence

import torch

from alignment.core.records import Batch
from alignment.core.text import prompt_token_ids


def collate(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], pad_token_id: int
) -> Batch:
    """Prompts and responses, right-padded and shifted by one, as a `Batch` on the CPU.

    Its shape is [batch, max(len(prompt) + len(response)) - 1]. Its mask comes from lengths, not
    `ids != pad`: many tokenizers pad with EOS, which is also a real response token.
    """
    pairs = zip(prompt_ids, response_ids, strict=True)
    sequences = [[*prompt, *response] for prompt, response in pairs]
    width = max(map(len, sequences))
    rows = [ids + [pad_token_id] * (width - len(ids)) for ids in sequences]
    padded = torch.tensor(rows, dtype=torch.int64)
    # Label t is token t + 1, so the labels of a response begin one place before its tokens.
    first_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompt_ids])
    end_B1 = torch.tensor([[len(ids) - 1] for ids in sequences])
    place_1T = torch.arange(width - 1)[None]
    mask = (first_B1 <= place_1T) & (place_1T < end_B1)
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


# The token ids that go into a model: the prompt's, and the response's without its last, which is
# only ever a label.
Row = tuple[tuple[int, ...], tuple[int, ...]]


def split_rows(input_ids: torch.Tensor, response_mask: torch.Tensor) -> list[Row]:
    """The rows of a batch [batch, sequence] on the CPU, without padding: each ends with its last
    label in the mask."""
    # argmax is the first place of the largest value: of the mask the first response label, of its
    # running sum the last.
    first_B = response_mask.int().argmax(dim=1).tolist()
    last_B = response_mask.int().cumsum(dim=1).argmax(dim=1).tolist()
    rows = []
    for ids, first, last in zip(input_ids.tolist(), first_B, last_B, strict=True):
        prompt = tuple(ids[: first + 1])
        response = tuple(ids[first + 1 : last + 1])
        rows.append((prompt, response))
    return rows


def rows_by_prompt(
    rows: Sequence[Row], order: Iterable[int] | None = None
) -> dict[tuple[int, ...], list[int]]:
    """Each prompt's rows, by number, in the `order` given; else as they come."""
    if order is None:
        order = range(len(rows))
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in order:
        prompt, _ = rows[row]
        groups.setdefault(prompt, []).append(row)
    return groups


def packed_tokens(rows: Sequence[Row]) -> int:
    """Tokens of these rows where rows of one prompt share it."""
    prompts = {prompt for prompt, _ in rows}
    response_tokens = sum(len(response) for _, response in rows)
    return sum(map(len, prompts)) + response_tokens


def cut_by_tokens(rows: Sequence[Row], most_tokens: int) -> list[list[int]]:
    """The row numbers of micro-batches of at most `most_tokens` packed tokens (one row at least).

    Rows of one prompt stay together, and prompts of long responses come first, so that memory peaks
    at once and a micro-batch's responses are of similar length.
    """
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
                budget = most_tokens
                prompt_cost = len(prompt)
            pieces[-1].append(row)
            budget -= prompt_cost + tokens
            prompt_cost = 0
    return pieces


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer
) -> dict[str, torch.Tensor]:
    """The tensors of a `Batch`, by name, of prompts and outputs.

    They are tokenised apart, so that the border between them never moves.
    """
    prompt_ids = prompt_token_ids(tokenizer, prompt_strs).ids
    output_ids = tokenizer(list(output_strs), add_special_tokens=False)["input_ids"]
    return vars(collate(prompt_ids, output_ids, pad_token_id(tokenizer)))


def pad_token_id(tokenizer) -> int:
    """The id to pad with: EOS.

    Any id with an embedding will do, because masks come from lengths; a pad token that was added to
    a tokenizer often has none.
    """
    return tokenizer.eos_token_id

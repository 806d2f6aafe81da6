"""From text and token ids to padded batches, and means over masks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignment.records import Batch


def collate(prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], pad_token_id: int) -> Batch:
    """Right-pad prompt + response and shift by one.

    Returns a `Batch` of shape [batch, max(len(prompt) + len(response)) - 1] on the CPU. The mask comes from lengths, not
    from `ids != pad`, because many tokenizers pad with EOS, which is also a real response token.
    """
    sequences = [[*prompt, *response] for prompt, response in zip(prompt_ids, response_ids, strict=True)]
    width = max(map(len, sequences))
    padded = torch.tensor([ids + [pad_token_id] * (width - len(ids)) for ids in sequences], dtype=torch.int64)
    # Label t is token t + 1, so the response's labels start one place before its first token.
    first = torch.tensor([[len(prompt) - 1] for prompt in prompt_ids])
    last = torch.tensor([[len(ids) - 1] for ids in sequences])
    place = torch.arange(width - 1)[None]
    return Batch(
        input_ids=padded[:, :-1].contiguous(),
        labels=padded[:, 1:].contiguous(),
        response_mask=(first <= place) & (place < last),
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


def row_lengths(batch: Batch) -> list[int]:
    """Tokens of each row, prompt and response together, less the one that is only ever a label."""
    last = batch.response_mask.int().cumsum(dim=1).argmax(dim=1)
    return (last + 1).tolist()


def cut_by_tokens(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of similar length, of at most `most_tokens` tokens with padding (one row at least).

    Returns the row numbers of each micro-batch, longest rows first, so that memory peaks at once rather than late.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    pieces: list[list[int]] = []
    for row in order:
        if pieces and lengths[pieces[-1][0]] * (len(pieces[-1]) + 1) <= most_tokens:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces


def tokenize_prompt_and_output(prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer) -> dict[str, torch.Tensor]:
    """Tokenise prompts and outputs apart (so that the border never moves), join, pad and shift.

    Returns {"input_ids", "labels": int64 [batch, sequence], "response_mask": bool [batch, sequence]}, where sequence is
    the longest joined length minus 1.
    """
    prompt_ids = tokenizer(list(prompt_strs))["input_ids"]
    output_ids = tokenizer(list(output_strs), add_special_tokens=False)["input_ids"]
    batch = collate(prompt_ids, output_ids, pad_token_id(tokenizer))
    return {"input_ids": batch.input_ids, "labels": batch.labels, "response_mask": batch.response_mask}


def pad_token_id(tokenizer) -> int:
    """The id to pad with. Any id will do, because masks come from lengths; EOS stands in where there is no pad token."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def masked_mean(tensor: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean over `dim` (all axes when None) of the elements whose mask is true; NaN where the mask is empty."""
    kept = torch.where(mask.bool(), tensor, 0)
    return kept.sum() / mask.sum() if dim is None else kept.sum(dim) / mask.sum(dim)


def masked_normalize(
    tensor: torch.Tensor, mask: torch.Tensor, normalize_constant: float = 1.0, dim: int | None = None
) -> torch.Tensor:
    """Sum over `dim` (all axes when None) of the elements whose mask is true, divided by `normalize_constant`."""
    kept = torch.where(mask.bool(), tensor, 0)
    return (kept.sum() if dim is None else kept.sum(dim)) / normalize_constant

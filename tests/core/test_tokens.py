"""Padding, masks and micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment.core.losses import masked_mean, masked_normalize
from alignment.core.tokens import (
    collate,
    cut_by_tokens,
    packed_tokens,
    split_rows,
    take_rows,
    tokenize_prompt_and_output,
)
from alignment.data.embedded import tiny_tokenizer


def test_collate():
    batch = collate([[1, 2, 3], [4]], [[5], [6, 7, 8, 9, 0]], pad_token_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 5, 0], [4, 6, 7, 8, 9]]
    assert batch.labels.tolist() == [[2, 3, 5, 0, 0], [6, 7, 8, 9, 0]]
    # The last label of the second row is a real 0, the padding of the first row is not.
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 0, 0], [1, 1, 1, 1, 1]]


def test_prompt_and_output_are_tokenised_apart():
    tokenizer = tiny_tokenizer(["What is 3 ?", " 12 </answer>"])
    out = tokenize_prompt_and_output(["What is 3 ?", "What"], [" 12", " 12 </answer>"], tokenizer)
    for row, text in enumerate([" 12", " 12 </answer>"]):
        assert tokenizer.decode(out["labels"][row][out["response_mask"][row]]) == text
    # 4 + 2 tokens and 1 + 3: the longer has 5 places after the shift.
    assert out["input_ids"].shape == out["labels"].shape == out["response_mask"].shape == (2, 5)
    assert torch.equal(out["input_ids"][:, 1:], out["labels"][:, :-1])


def test_masked_mean_and_normalize():
    values, mask = torch.tensor([[1.0, 2, 30], [4, 50, 60]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert masked_mean(values, mask, dim=1).tolist() == [1.5, 4]
    assert masked_mean(values, mask, dim=0)[:2].tolist() == [2.5, 2]
    assert masked_normalize(values, mask, 2.0).item() == 3.5
    assert masked_normalize(values, mask, 2.0, dim=1).tolist() == [1.5, 2]


def test_masked_values_do_not_spread():
    values = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    mean = masked_mean(values, torch.tensor([[True, False]]))
    mean.backward()
    assert mean.item() == 1
    assert values.grad.tolist() == [[1, 0]]


ids = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6), st.data())
def test_rows_survive_collating_and_taking(rows, data):
    batch = collate([p for p, _ in rows], [r for _, r in rows], pad_token_id=0)
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True))
    part = take_rows(batch, picked)
    assert part.labels.shape[1] == max(len(rows[i][0]) + len(rows[i][1]) for i in picked) - 1
    for line, i in enumerate(picked):
        prompt, response = rows[i]
        mask = part.response_mask[line]
        assert part.labels[line][mask].tolist() == response
        assert (
            part.input_ids[line][: len(prompt) + len(response) - 1].tolist()
            == (prompt + response)[:-1]
        )
        assert int(mask.nonzero()[0]) == len(prompt) - 1


rows_of_few_prompts = st.lists(
    st.tuples(st.sampled_from([(1,), (1, 2), (3,) * 9, (4,) * 20]), st.integers(0, 30)), max_size=40
)


@given(rows_of_few_prompts, st.integers(1, 200))
def test_micro_batches_hold_each_row_once_and_keep_to_the_budget(shape, most):
    rows = [(prompt, (0,) * length) for prompt, length in shape]
    pieces = cut_by_tokens(rows, most)
    assert sorted(row for piece in pieces for row in piece) == list(range(len(rows)))
    for piece in pieces:
        assert len(piece) == 1 or packed_tokens([rows[row] for row in piece]) <= most
    # As few as there can be where each prompt fits with all of its responses.
    if rows and packed_tokens(rows) <= most:
        assert len(pieces) == 1


def test_a_shared_prompt_counts_once():
    rows = [((1, 2, 3), (4,)), ((1, 2, 3), (5, 6)), ((1, 2), (3, 4))]
    assert packed_tokens(rows) == 3 + 1 + 2 + 2 + 2
    # The first prompt's rows together take 6: with a budget of 6 the other prompt has a micro-batch
    # of its own.
    assert sorted(map(sorted, cut_by_tokens(rows, 6))) == [[0, 1], [2]]
    # With 5 the prompt is computed twice.
    assert sorted(map(sorted, cut_by_tokens(rows, 5))) == [[0], [1], [2]]
    assert cut_by_tokens(rows, 10) == [[1, 0, 2]]


def test_rows_are_read_off_the_mask():
    batch = collate([[1, 2, 3], [4]], [[5], [6, 7, 8]], pad_token_id=0)
    assert split_rows(batch.input_ids, batch.response_mask) == [((1, 2, 3), ()), ((4,), (6, 7))]

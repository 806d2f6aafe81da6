"""The check of which tokens carry SFT's loss: an example by hand, and each fault that it shows."""

import pytest
import torch

from alignment.core.losses import masked_normalize
from alignment.core.tokens import collate
from alignment.model.loading import load_tokenizer
from alignment.training.sft import tokenise
from alignment.verification import sft_labels
from alignment.verification.sft_labels import Demonstrations

PAIRS = [("What is 2 + 3? <think>", " 2 + 3 = 5 </think>"), ("1 + 1", " 2"), ("7", " 7 7 7")]


@pytest.fixture
def demonstrations(tiny_folder) -> Demonstrations:
    tokenizer = load_tokenizer(str(tiny_folder))
    examples = tokenise(PAIRS, tokenizer, 128)
    prompts = [prompt for prompt, _ in PAIRS]
    responses = [response for _, response in PAIRS]
    return Demonstrations(examples, responses, prompts, 0, tokenizer, tokenizer.eos_token_id, [])


def test_labels_without_a_fault(demonstrations):
    assert demonstrations.wrongly_labelled() == 0


def test_solutions_without_an_end_token(demonstrations):
    cut = [(prompt, response[:-1]) for prompt, response in demonstrations.examples]
    demonstrations.examples[:] = cut
    assert demonstrations.wrongly_labelled() == 3


def test_prompts_that_are_trained(demonstrations):
    first = [((prompt[0],), (*prompt[1:], *rest)) for prompt, rest in demonstrations.examples]
    demonstrations.examples[:] = first
    assert demonstrations.wrongly_labelled() >= 2  # A prompt of one token has no label.


def test_a_mask_by_the_pad_token_which_ends_responses(demonstrations, monkeypatch):
    def unpadded(examples, pad_id):
        batch = collate(*map(list, zip(*examples, strict=True)), pad_id)
        batch.response_mask.logical_and_(batch.labels != pad_id)
        return batch

    monkeypatch.setattr(sft_labels, "collate_examples", unpadded)
    assert demonstrations.wrongly_labelled() == 3


def test_a_mean_of_each_response(demonstrations, monkeypatch):
    def each(tokens, rows, log_probs_bt, mask_bt):
        means = [
            masked_normalize(log_probs_bt[row], mask_bt[row], int(mask_bt[row].sum()))
            for row in rows
        ]
        return -torch.stack(means).mean(), {}

    monkeypatch.setattr(sft_labels, "batch_loss", each)
    assert demonstrations.wrongly_labelled() >= 2

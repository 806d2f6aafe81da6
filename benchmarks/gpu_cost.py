"""What would a pass cost on a GPU? Modelled seconds, operations, bytes and launches of its kernels.

    uv run -m benchmarks.gpu_cost --work update
    uv run -m benchmarks.gpu_cost --work log_probs --micro_batch_tokens 8192
    uv run -m benchmarks.gpu_cost --kernels compiled --uncompiled cast_norm
    uv run -m benchmarks.gpu_cost --figures

The product's own code computes on fake tensors of the true shape (`benchmarks.gpu_trace`), by
default an update of Qwen2.5-Math-1.5B's shape: 16 prompts of 150 tokens with 8 responses of 512 to
1,024 tokens each, all with a gradient. A kernel takes the longest of its operations, its bytes and
the smallest kernel's time, at the share of the card's rates that its class reached on an H200; the
host takes the same time for each launch. Seconds are those of host or card, whichever takes longer,
between any two places where the host waits for a result. alignment/planning/h200.toml has the
coefficients, from which `alignment.plan` has a GPU's seconds, too, and the six measured figures, of
which two were held out; --figures models all six. Every number that this prints is modelled: no GPU
has run it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from alignment.args import RLArgs, from_preset
from alignment.core.records import Rollout, SamplingConfig
from alignment.core.tokens import cut_by_tokens, packed_tokens
from alignment.model.attention import AttentionRule
from alignment.model.frozen import computed_rows
from alignment.model.kernels import fuse_layers, use_fused_kernels
from alignment.model.packing import pack
from alignment.model.recomputation import recompute_mlps
from alignment.planning import placement
from alignment.planning.measured_card import MEASURED
from alignment.policy import lora
from alignment.policy.policy import Objective, PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.sampling.transformers import _SharedDecoding, draw
from alignment.system.terminal import make_table
from alignment.training.update import rollout_objective, rows_with_gradient
from benchmarks.gpu_fused import COMPILED, compiled_functions, liger_kernels
from benchmarks.gpu_trace import (
    CARD,
    CLASSES,
    ELEMENTWISE,
    FLASH_BACKWARD,
    FLASH_FORWARD,
    FUSED,
    READ,
    Kernel,
    fake_model,
    traced_card,
)
from benchmarks.update import Shape, make_rollout
from benchmarks.workloads import make_batch, negative_log_likelihood

PUBLISHED = Path(placement.__file__).parent / "published"
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
Kernels = Literal["eager", "compiled", "liger"]
Work = Literal["update", "log_probs", "sft", "decode", "attention", "attention_forward"]


def shape_of(model: str) -> PretrainedConfig:
    """The configuration of "smollm2", or of a folder of alignment/planning/published."""
    fields = SMOLLM2
    if model != "smollm2":
        fields = json.loads((PUBLISHED / model / "config.json").read_text())
    return AutoConfig.for_model(**fields)


Segment = Counter[Kernel]
"""How often each kernel runs, up to where the host waits for a result."""


# --- the work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is computed, and how."""

    work: Work = "update"
    model: str = "Qwen--Qwen2.5-Math-1.5B"
    micro_batch_tokens: int = 16_384
    liger: bool = False
    """Whether norms, rotary embeddings and MLPs are Liger's kernels."""
    flash: bool = True
    """Whether attention is by flash kernels, as where their self-check passes."""
    kernels: Kernels = "eager"
    """As --kernels. With "liger" the same as `liger`, and compiled log-probs and joints."""
    prompts: int = 16
    group_size: int = 8
    prompt: int = 150
    """Tokens."""
    response: int = 1024
    """Tokens of the longest, the others have at least half of them."""
    rows: Sequence[int] | None = None
    """The rows of an update; None: all."""
    adds: bool = False
    """Whether an update adds to a gradient that is there already."""
    layers: int | None = None
    """Of the model; None: its own."""
    recomputed_mlps: float = 0.0
    """The share of the layers of which the MLP's inside is computed again in backward."""
    uncompiled: Sequence[str] = ()
    """Functions of `COMPILED` whose operators are kernels of their own."""


@dataclass(frozen=True)
class Peak:
    """What a card holds at most."""

    tokens: int
    """Of the micro-batch."""
    held: Mapping[str, int]
    """What made tensors -> their bytes."""


def config_of(setting: Setting) -> PretrainedConfig:
    """The model's configuration."""
    config = shape_of(setting.model)
    if setting.layers is not None:
        config.num_hidden_layers = setting.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: setting.layers]
    return config


@contextmanager
def fake_policy(setting: Setting) -> Iterator[SingleDevicePolicy]:
    """A policy of fake weights in bfloat16; call it in a `traced_card`."""

    def load(*arguments):
        return fake_model(config_of(setting))

    with mock.patch.object(lora, "load_trained_model", load):
        config = PolicyConfig(
            "", (str(CARD),), "bfloat16", micro_batch_tokens=setting.micro_batch_tokens
        )
        yield SingleDevicePolicy(config)


def rollout_of(setting: Setting, args: RLArgs) -> Rollout:
    """A rollout of random tokens, as the measured one."""
    return make_rollout(Shape(setting.prompt, setting.response, setting.prompts), args)


def arguments_of(setting: Setting) -> RLArgs:
    """The measured update's arguments."""
    return from_preset(
        RLArgs,
        "tiny",
        train_mini_batch_size=0,
        group_size=setting.group_size,
        num_steps=1,
        max_new_tokens=setting.response,
    )


def trace_update(setting: Setting) -> list[Kernel]:
    """The kernels of an update's forward and backward passes, without clipping and optimiser."""
    args = arguments_of(setting)
    rollout = rollout_of(setting, args)
    rows = setting.rows or rows_with_gradient(rollout, args.update_config)
    objective = rollout_objective(rollout, range(len(rollout.lengths)), args.update_config)
    return trace_gradient(setting, rollout.batch, rows, objective)


def trace_sft(setting: Setting) -> list[Kernel]:
    """The kernels of a step of supervised fine-tuning on rows that share no prompt."""
    rows = setting.prompts * setting.group_size
    batch = make_batch(rows, 1, setting.prompt, setting.response, first_ids=1000)
    return trace_gradient(setting, batch, range(rows), Objective(negative_log_likelihood))


def trace_gradient(setting: Setting, batch, rows, objective: Objective) -> list[Kernel]:
    """The kernels of `accumulate`."""
    with traced_card(setting.flash) as trace, fake_policy(setting) as policy, ExitStack() as stack:
        apply_kernels(setting, policy.model, trace, stack)

        def accumulate() -> None:
            for _ in policy.accumulate(batch, rows, objective):
                pass

        if setting.adds:
            accumulate()
        return kernels_of(trace, accumulate)


def apply_kernels(setting: Setting, model, trace, stack: ExitStack) -> None:
    """Have stand-ins be counted for a model's kernels, until the stack is left."""
    if setting.liger or setting.kernels == "liger":
        stack.enter_context(liger_kernels(model, trace))
    if setting.kernels == "compiled":
        fuse_layers(model)
    if setting.kernels != "eager":
        stack.enter_context(compiled_functions(trace, setting.uncompiled))
        use_fused_kernels(model)
    if setting.recomputed_mlps:
        layers = model.config.num_hidden_layers
        recompute_mlps(model, round(setting.recomputed_mlps * layers))


def kernels_of(trace, work: Callable[[], object]) -> list[Kernel]:
    """The kernels of `work` alone."""
    trace.kernels.clear()
    work()
    return list(trace.kernels)


def trace_peak(setting: Setting) -> Peak:
    """What the card holds at most in a later micro-batch of an update, of every layer: the largest,
    with all gradients and AdamW's moments."""
    args = arguments_of(setting)
    rollout = rollout_of(setting, args)
    objective = rollout_objective(rollout, range(len(rollout.lengths)), args.update_config)
    with traced_card(setting.flash) as trace, fake_policy(setting) as policy, ExitStack() as stack:
        apply_kernels(setting, policy.model, trace, stack)
        rows = rows_with_gradient(rollout, args.update_config)
        split = computed_rows(policy.model, rollout.batch, rows)
        pieces = cut_by_tokens(split, setting.micro_batch_tokens)
        sizes = [packed_tokens([split[number] for number in piece]) for piece in pieces]
        largest = [rows[number] for number in pieces[sizes.index(max(sizes))]]
        for _ in range(2):
            for _ in policy.accumulate(rollout.batch, largest, objective):
                pass
        parameters = sum(parameter.numel() for parameter in policy.model.parameters())
        return Peak(max(sizes), {**trace.memory.peak, "AdamW's moments": 8 * parameters})


def trace_log_probs(setting: Setting) -> list[Kernel]:
    """The kernels of a pass for log-probs over a rollout."""
    args = arguments_of(setting)
    batch = rollout_of(setting, args).batch
    with traced_card(setting.flash) as trace, fake_policy(setting) as policy, ExitStack() as stack:
        apply_kernels(setting, policy.model, trace, stack)
        distribution = args.update_config.distribution
        return kernels_of(trace, lambda: policy.log_probs(batch, distribution))


def trace_decode(setting: Setting) -> list[Kernel]:
    """The kernels of one token for each of the rows, half of whose tokens are drawn already, by our
    own sampler."""
    sampling = SamplingConfig(
        n=setting.group_size, temperature=1.0, max_new_tokens=setting.response, stop=(), seed=0
    )
    encoded = [[number] * setting.prompt for number in range(setting.prompts)]
    rows = setting.prompts * setting.group_size
    with traced_card(setting.flash) as trace, torch.no_grad():
        model = fake_model(config_of(setting), torch.bfloat16)
        decoding = _SharedDecoding(model, encoded, sampling)
        tokens = torch.zeros(rows, dtype=torch.int64, device=CARD)
        uniforms = torch.zeros(rows, device=CARD)
        decoding.next_logits(tokens)
        for layer in decoding.cache.layers:
            layer.cumulative_length = setting.response // 2

        def step() -> None:
            draw(decoding.next_logits(tokens), uniforms, sampling)

        return kernels_of(trace, step)


def trace_attention(setting: Setting, backward: bool = True) -> list[Kernel]:
    """The kernels of the attention of one layer: two prompts, each with responses of 900 tokens, as
    it was measured; heads of Qwen2.5-Math-1.5B."""
    rows = []
    for group in range(2):
        prompt = (group, *range(setting.prompt - 1))
        rows += [(prompt, tuple(range(900)))] * setting.group_size
    packing = pack(rows, is_fused=setting.kernels != "eager")
    tokens = packing.input_ids_1N.shape[1]
    rule = AttentionRule(128**-0.5)
    with traced_card(setting.flash) as trace, compiled_functions(trace):
        inputs = []
        for heads in (12, 2, 2):
            tensor = torch.empty(1, heads, tokens, 128, dtype=torch.bfloat16, device=CARD)
            inputs.append(tensor.requires_grad_())
        gradient = torch.empty(1, tokens, 12, 128, dtype=torch.bfloat16, device=CARD)
        packing.attend(None, *inputs, rule)  # sends the layout, as the first layer does

        def attend() -> None:
            output = packing.attend(None, *inputs, rule)
            if backward:
                output.backward(gradient)

        return kernels_of(trace, attend)


TRACES: dict[Work, Callable[[Setting], list[Kernel]]] = {
    "update": trace_update,
    "log_probs": trace_log_probs,
    "sft": trace_sft,
    "decode": trace_decode,
    "attention": trace_attention,
    "attention_forward": lambda setting: trace_attention(setting, backward=False),
}

FIGURES: dict[str, Setting] = {
    "update, micro-batches of 16,384 tokens": Setting(flash=False),
    "update, 8,192": Setting(micro_batch_tokens=8192, flash=False),
    "update, 16,384, Liger's kernels": Setting(liger=True, flash=False),
    "log-probs, 16,384": Setting("log_probs", flash=False),
    "attention layer, forward": Setting("attention_forward", flash=False),
    "attention layer, forward and backward": Setting("attention", flash=False),
}
"""The measured work; attention went by its parts there."""


def count_kernels(setting: Setting) -> list[Segment]:
    """How often each kernel of some work runs. All layers of a model are alike, so that those of
    one and of two say what each further layer adds; to trace every layer would take minutes."""
    one = segments_of(TRACES[setting.work](replace(setting, layers=1)))
    if setting.work.startswith("attention"):
        return one
    two = segments_of(TRACES[setting.work](replace(setting, layers=2)))
    further = config_of(setting).num_hidden_layers - 1
    segments = []
    for of_one, of_two in zip(one, two, strict=True):
        total = Counter(of_one)
        for kernel, number in of_two.items():
            total[kernel] += further * (number - of_one[kernel])
        segments.append(total)
    return segments


def segments_of(kernels: Sequence[Kernel]) -> list[Segment]:
    """Kernels in their order, cut where the host waits."""
    segments = [Segment()]
    for kernel in kernels:
        if kernel.kind == READ:
            segments.append(Segment())
        else:
            segments[-1][kernel] += 1
    return segments


def all_of(segments: Sequence[Segment]) -> Segment:
    """The kernels of all segments."""
    return sum(segments, Segment())


# --- its cost -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """What a card and its host do in a second."""

    products: float
    bandwidth: float
    smallest_kernel: float
    """Seconds of a kernel that has nothing to do."""
    launch: float
    """Seconds of the host for each kernel."""
    efficiency: Mapping[str, float]
    """The share of the card's rates that a class of kernels reaches."""

    def card_seconds(self, kernel: Kernel) -> float:
        """Seconds of a kernel on the card."""
        ideal = max(kernel.operations / self.products, kernel.bytes / self.bandwidth)
        least = self.smallest_kernel * kernel.launches
        return max(least, ideal / self.efficiency[kernel.kind])


def measured_rates() -> Rates:
    """The rates of h200.toml."""
    return Rates(
        products=MEASURED["card"]["products"],
        bandwidth=MEASURED["card"]["bandwidth"],
        smallest_kernel=MEASURED["flash"]["smallest_kernel"] / 1e3,
        launch=MEASURED["host"]["launch"],
        efficiency=MEASURED["efficiency"],
    )


@dataclass(frozen=True)
class Cost:
    """Modelled seconds of some work."""

    card: float
    host: float
    seconds: float
    """Of host or card, whichever takes longer between two places where the host waits."""
    launches: int


def cost_of(segments: Sequence[Segment], rates: Rates) -> Cost:
    """What kernels cost, one segment after another."""
    card = 0.0
    host = 0.0
    seconds = 0.0
    for segment in segments:
        card_seconds = seconds_of(segment, rates)
        host_seconds = rates.launch * launches_of(segment)
        card += card_seconds
        host += host_seconds
        seconds += max(card_seconds, host_seconds)
    return Cost(card, host, seconds, launches_of(all_of(segments)))


def seconds_of(segment: Segment, rates: Rates) -> float:
    """Seconds of kernels on the card."""
    return sum(number * rates.card_seconds(kernel) for kernel, number in segment.items())


def launches_of(segment: Segment) -> int:
    """Launches of kernels."""
    return sum(number * kernel.launches for kernel, number in segment.items())


def of_class(segment: Segment, kind: str) -> Segment:
    """The kernels of one class."""
    return Segment({kernel: number for kernel, number in segment.items() if kernel.kind == kind})


# --- the fit --------------------------------------------------------------------------------------


def fitted_efficiency(work: Segment, measured: float, rates: Rates) -> float:
    """The efficiency at which kernels of one class take the measured seconds."""
    low, high = 1e-3, 10.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        guess = Rates(**{**vars(rates), "efficiency": dict.fromkeys(CLASSES, middle)})
        if seconds_of(work, guess) > measured:
            low = middle
        else:
            high = middle
    return middle


def fit() -> Rates:
    """Efficiencies by the profile and by torch's flash kernel; a launch by the update of 8,192
    tokens a micro-batch, which waits for its host."""
    rates = Rates(
        products=MEASURED["card"]["products"],
        bandwidth=MEASURED["card"]["bandwidth"],
        smallest_kernel=MEASURED["flash"]["smallest_kernel"] / 1e3,
        launch=0.0,
        efficiency={},
    )
    profiled = all_of(count_kernels(Setting(rows=range(16), adds=True, flash=False)))
    efficiency = {}
    for kind, milliseconds in MEASURED["profile"].items():
        own = of_class(profiled, kind)
        efficiency[kind] = fitted_efficiency(own, milliseconds / 1e3, rates)
    forward = 4 * 16 * 12 * 128 * 1050**2 / 2
    flash = MEASURED["flash"]
    in_forward = Segment([Kernel("flash", FLASH_FORWARD, operations=forward)])
    in_backward = Segment([Kernel("flash", FLASH_BACKWARD, operations=2.5 * forward)])
    backward_seconds = (flash["both"] - flash["forward"]) / 1e3
    efficiency[FLASH_FORWARD] = fitted_efficiency(in_forward, flash["forward"] / 1e3, rates)
    efficiency[FLASH_BACKWARD] = fitted_efficiency(in_backward, backward_seconds, rates)
    efficiency[FUSED] = efficiency[ELEMENTWISE]
    name = "update, 8,192"
    launches = launches_of(all_of(count_kernels(FIGURES[name])))
    launch = MEASURED["figures"][name]["seconds"] / launches
    return Rates(**{**vars(rates), "efficiency": efficiency, "launch": launch})


# --- command --------------------------------------------------------------------------------------


def table_by_class(segments: Sequence[Segment], rates: Rates, title: str) -> Table:
    """A row for each class, and the sum."""
    work = all_of(segments)
    rows = []
    for kind in CLASSES:
        own = of_class(work, kind)
        if own:
            rows.append(class_row(kind, own, rates))
    cost = cost_of(segments, rates)
    rows.append(class_row("card", work, rates))
    rows.append(("host", "", "", f"{cost.launches:,}", f"{1e3 * cost.host:,.1f}"))
    rows.append(("the longer of both", "", "", "", f"{1e3 * cost.seconds:,.1f}"))
    numbers = ("TFLOP", "GB", "launches", "modelled ms")
    return make_table(title, ("", *numbers), rows, numbers=numbers)


def class_row(name: str, work: Segment, rates: Rates) -> tuple[str, ...]:
    """The cells of some kernels."""
    operations = sum(number * kernel.operations for kernel, number in work.items())
    moved = sum(number * kernel.bytes for kernel, number in work.items())
    return (
        name,
        f"{operations / 1e12:,.2f}",
        f"{moved / 1e9:,.1f}",
        f"{launches_of(work):,}",
        f"{1e3 * seconds_of(work, rates):,.1f}",
    )


def table_of_figures(rates: Rates) -> Table:
    """The six figures, modelled and measured."""
    rows = []
    for name, figure in MEASURED["figures"].items():
        cost = cost_of(count_kernels(FIGURES[name]), rates)
        kind = "fitted"
        if figure["held_out"]:
            kind = "held out"
        rows.append(
            (
                name,
                kind,
                f"{figure['seconds']:.4g}",
                f"{cost.seconds:.4g}",
                f"{cost.seconds / figure['seconds'] - 1:+.0%}",
                f"{cost.card:.4g}",
                f"{cost.host:.4g}",
                f"{cost.launches:,}",
            )
        )
    numbers = ("measured s", "modelled s", "modelled above", "card s", "host s", "launches")
    return make_table("six figures of an H200", ("", "", *numbers), rows, numbers=numbers)


def table_of_peak(peak: Peak) -> Table:
    """What is held at most, by what made it."""
    rows = []
    for name, size in sorted(peak.held.items(), key=lambda item: -item[1]):
        if size >= 5e6:
            rows.append((name, f"{size / 1e9:.2f}"))
    rows.append(("all", f"{sum(peak.held.values()) / 1e9:.2f}"))
    return make_table(f"{peak.tokens:,} tokens, counted", ("", "GB"), rows, numbers=("GB",))


def print_fit(rates: Rates) -> None:
    """Print the tables of the toml file."""
    print("[host]", f"launch = {rates.launch:.3g}", "", "[efficiency]", sep="\n")
    for kind, share in rates.efficiency.items():
        print(f'"{kind}" = {share:.3g}')


def main(
    work: Work = "update",
    model: str = "Qwen--Qwen2.5-Math-1.5B",
    micro_batch_tokens: int = 16_384,
    liger: bool = False,
    flash: bool = True,
    kernels: Kernels = "eager",
    prompts: int = 16,
    group_size: int = 8,
    prompt: int = 150,
    response: int = 1024,
    recomputed_mlps: float = 0.0,
    uncompiled: tuple[str, ...] = (),
    peak: bool = False,
    figures: bool = False,
    fit: bool = False,
) -> None:
    """Print what the work costs, by class of kernels.

    Args:
        work: What is computed.
        model: A folder of alignment/planning/published, or smollm2.
        micro_batch_tokens: Of a micro-batch, at most.
        liger: Whether norms, rotary embeddings and MLPs are Liger's kernels.
        flash: Whether attention is by flash kernels; else by its parts, as before them.
        kernels: As --kernels of train_rl.
        prompts: Of the rollout.
        group_size: Responses to each prompt.
        prompt: Tokens of a prompt.
        response: Tokens of the longest response.
        recomputed_mlps: Share of the layers of which the MLP's inside is computed again; 0 or 1
            without --peak.
        uncompiled: Compiled functions, of `gpu_fused.COMPILED`, that are counted as eager ones.
        peak: Print what an update holds at most instead.
        figures: Model the six measured figures instead.
        fit: Print the coefficients that the measured figures give instead.
    """
    console = Console(width=150)
    if fit:
        return print_fit(globals()["fit"]())
    unknown = sorted(set(uncompiled) - set(COMPILED))
    if unknown:
        names = ", ".join(COMPILED)
        sys.exit(f"--uncompiled {unknown[0]}: no function has this name; there are {names}")
    if uncompiled and kernels != "compiled":
        sys.exit(f"--uncompiled: give --kernels compiled; with {kernels} not all are compiled")
    rates = measured_rates()
    if figures:
        return console.print(table_of_figures(rates))
    setting = Setting(
        work,
        model,
        micro_batch_tokens,
        liger,
        flash,
        kernels,
        prompts,
        group_size,
        prompt,
        response,
        recomputed_mlps=recomputed_mlps,
        uncompiled=uncompiled,
    )
    if peak:
        return console.print(table_of_peak(trace_peak(setting)))
    console.print(table_by_class(count_kernels(setting), rates, f"{work}, {model}: modelled"))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)

"""Write what `alignment.plan` says into the pages and headers of presets that state it.

uv run -m benchmarks.planned_figures

Run it after a coefficient of the planner, a preset or a card has changed: it rewrites the lines
"Peaks by `alignment.plan`" and "With" of the presets' headers, and the tables below a line
`<!-- planned: NAME -->` in docs/. `tests/planning/test_planned_figures.py` fails while a file says
anything else. Figures that were measured stand in these tables too, and are taken from here.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import tyro
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from alignment.args import PRESETS, RLArgs, from_preset, parse, preset_names
from alignment.builders.devices import roles_of
from alignment.builders.prediction import (
    MOST_SHARES,
    Duration,
    Known,
    duration,
    planned_machines,
    predict,
    span,
    step_shape,
)
from alignment.model.shape import ModelShape
from alignment.planning.measured_memory import SPARE
from alignment.planning.peaks import RESERVED, DevicePeak, peak_bytes
from alignment.planning.placement import frozen_share, place
from alignment.planning.seconds import hardware_of
from benchmarks.rank_memory import Case, closed_form
from tests.model.published_shapes import qwen2, qwen2_7b

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 120  # characters of a line of a preset's header
COMMAND = "uv run -m benchmarks.planned_figures"

QWEN_0_5B = qwen2(896, 4864, 24, 14)
QWEN_1_5B = qwen2(1536, 8960, 28, 12)
QWEN_3B = qwen2(2048, 11008, 36, 16)
QWEN_7B = qwen2_7b()
SMOLLM2 = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
TINY = Qwen2Config(
    vocab_size=304,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Machine:
    """A model's shape, and the machine that a preset's header names."""

    config: PretrainedConfig
    gpus: int
    memory: float  # Bytes of each GPU, or of the host without.
    prompts: tuple[int, int] | None = None
    """A quarter more tokens than of the longest prompt, and test problems, of a task whose files
    the plan would read."""


MACHINES: Mapping[str, Machine] = {
    "async_gsm8k": Machine(QWEN_1_5B, 3, 80e9),
    "countdown_qwen2.5_3b": Machine(QWEN_3B, 1, 48.3e9),
    "countdown_qwen2.5_3b_24gb": Machine(QWEN_1_5B, 1, 25.7e9),
    "countdown_tiny": Machine(TINY, 0, 8e9, (26, 212)),
    "qwen2.5_0.5b_gsm8k_trl": Machine(QWEN_0_5B, 1, 24e9),
    "qwen2.5_math_1.5b_gsm8k_8gpu": Machine(QWEN_1_5B, 8, 24e9),
    "single_gpu_gsm8k_kl": Machine(QWEN_1_5B, 1, 25.7e9),
    "smollm2_gsm8k": Machine(SMOLLM2, 1, 24e9),
    "smollm2_svamp": Machine(SMOLLM2, 0, 16e9, (106, 1000)),
    "tiny": Machine(TINY, 0, 8e9, (30, 512)),
}
"""Preset -> what its header's figures are of."""

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "countdown_qwen2.5_3b": (
        "--optimizer adamw_8bit",
        "--no_gradient_checkpointing --micro_batch_tokens 1280",
    ),
    "countdown_qwen2.5_3b_24gb": ("--optimizer adamw_8bit", "--no_gradient_checkpointing"),
    "single_gpu_gsm8k_kl": ("--sampler transformers", "--no_gradient_checkpointing"),
    "smollm2_gsm8k": ("--sampler transformers",),
}
"""Preset -> flags whose peaks its header states, too."""

SMALLEST_CARDS = (16, 24, 40, 48, 80, 96, 141, 192)
"""GB of the cards among which the smallest is sought."""

OPTIMIZERS_OF_CARDS: Mapping[str, Mapping[str, Any]] = {
    "`adamw`": {"optimizer": "adamw"},
    "`adamw_8bit`": {"optimizer": "adamw_8bit"},
    "`adamw_cpu_offload`": {"optimizer": "adamw_cpu_offload"},
    "`adamw`, `--lora_rank 16`": {"optimizer": "adamw", "lora_rank": 16},
}
"""Heading of a column -> arguments of a run."""

PLANNED_COMMANDS = (
    "--preset qwen2.5_math_1.5b_gsm8k_8gpu --hardware 8xA100-80GB",
    "--preset countdown_qwen2.5_3b --hardware 2x8xH100 --policy_parallelism sharded",
    "--preset single_gpu_gsm8k_kl --hardware 1xH200 --sampler vllm",
)
"""Flags of `plan` whose seconds docs/plan.md states."""

MEASURED_STEP = (
    "--preset single_gpu_gsm8k_kl --model Qwen/Qwen2.5-Math-1.5B --sampler vllm --beta 0"
    " --no_gradient_checkpointing --optimizer adamw --prompts_per_rollout 32 --group_size 8"
    " --max_new_tokens 512 --train_mini_batch_size 0 --micro_batch_tokens 16384"
)
MEASURED_SECONDS = {"sampling": "7.2 to 7.9", "update": "5.5 to 5.8", "sync": ".30 to .43"}
"""Phase -> seconds that an H200 took for `MEASURED_STEP` (docs/gpus.md)."""


class Ranks(NamedTuple):
    """A row of the table of ranks."""

    label: str
    ranks: str
    config: PretrainedConfig
    case: Case
    tracked: float | None = None  # GB, by torch's tracker (`benchmarks.rank_memory`).


RANKS = (
    Ranks("Qwen2.5-Math-1.5B, sharded", "1", QWEN_1_5B, Case(1, 1), 36.83),
    Ranks("", "2", QWEN_1_5B, Case(1, 2), 24.48),
    Ranks("", "4", QWEN_1_5B, Case(1, 4), 18.30),
    Ranks("", "8, on one machine or on each of 8", QWEN_1_5B, Case(1, 8), 15.21),
    Ranks("", "64", QWEN_1_5B, Case(1, 64), 12.51),
    Ranks("the same, replicated", "8", QWEN_1_5B, Case(1, 8, replicated=True), 36.83),
    Ranks("Qwen2.5-3B, sharded", "1", QWEN_3B, Case(1, 1), 69.34),
    Ranks("", "2", QWEN_3B, Case(1, 2), 44.65),
    Ranks("", "4", QWEN_3B, Case(1, 4)),
    Ranks("", "8", QWEN_3B, Case(1, 8)),
    Ranks("Qwen2.5-7B, sharded", "1", QWEN_7B, Case(1, 1)),
    Ranks("", "2", QWEN_7B, Case(1, 2)),
    Ranks("", "4", QWEN_7B, Case(1, 4)),
    Ranks("", "8, on one machine or on each of 8", QWEN_7B, Case(1, 8)),
    Ranks("", "64", QWEN_7B, Case(1, 64)),
    Ranks("the same, replicated", "8", QWEN_7B, Case(1, 8, replicated=True)),
    Ranks(
        "Qwen2.5-Math-1.5B, sharded, adapters of rank 16",
        "8",
        QWEN_1_5B,
        Case(1, 8, lora_rank=16),
        11.67,
    ),
    Ranks("Qwen2.5-7B, sharded, adapters of rank 16", "8", QWEN_7B, Case(1, 8, lora_rank=16)),
)


# --- peaks ----------------------------------------------------------------------------------------


@contextmanager
def two_plain_cores() -> Iterator[None]:
    """The CPU that plans without GPUs are of: two cores without bfloat16, whatever this one is."""
    with (
        mock.patch.object(torch, "get_num_threads", lambda: 2),
        mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False),
        mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", lambda: False),
    ):
        yield


def peaks_of(args: RLArgs, machine: Machine) -> list[DevicePeak]:
    """The peaks of a run on a machine, where `--sampler auto` is vLLM on GPUs."""
    prompts = {}
    if machine.prompts:
        prompts["prompts"] = machine.prompts
    roles = roles_of(args, machine.gpus)
    vllm = machine.gpus > 0 and args.sampler != "transformers"
    step = step_shape(args, roles, machine.memory, vllm, **prompts)
    shape = ModelShape.from_config(machine.config, args.lora_rank)
    return peak_bytes(shape, machine.config, roles, step)


def fits(peaks: Sequence[DevicePeak], memory: float) -> bool:
    return all(peak.total <= (1 - SPARE) * memory for peak in peaks)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}"


def sum_of(phase: Mapping[str, int], *kinds: str) -> str:
    """GB of some kinds of a phase; "0" where there is nothing."""
    size = sum(phase.get(kind, 0) for kind in kinds)
    return gigabytes(size) if size >= 5e7 else "0"


# --- headers of presets ---------------------------------------------------------------------------


def header_of(preset: str) -> list[str]:
    """The planned lines of a preset's header: each device's peak, the bytes of the fullest GPU by
    kind, and the peaks with other flags."""
    machine = MACHINES[preset]
    args = from_preset(RLArgs, preset)
    peaks = peaks_of(args, machine)
    lines = [
        f"Peaks by `alignment.plan`, of {gigabytes(machine.memory)} GB each: {listed(peaks)}:"
        f" {verdict(peaks, machine)}."
    ]
    if machine.gpus:
        fullest = max((peak for peak in peaks if "weights" in peak.phases[peak.worst]), key=trained)
        kinds = fullest.phases[fullest.worst]
        parts = [f"{kind} {gigabytes(size)}" for kind, size in kinds.items() if size >= 5e7]
        lines.append(f"Of {fullest.name} in {fullest.worst}: {', '.join(parts)}.")
    for flags in VARIANTS.get(preset, ()):
        other = peaks_of(parse(RLArgs, ["--preset", preset, *flags.split()]), machine)
        lines.append(f"With {flags}: {listed(other)}: {verdict(other, machine)}.")
    wrapped = []
    for line in lines:
        wrapped += textwrap.wrap(
            f"# {line}", WIDTH, subsequent_indent="#   ", break_on_hyphens=False
        )
    return wrapped


def trained(peak: DevicePeak) -> int:
    """Bytes of the trained weights at a device's peak."""
    return peak.phases[peak.worst]["weights"]


def listed(peaks: Sequence[DevicePeak]) -> str:
    return ", ".join(f"{peak.name} {gigabytes(peak.total)}" for peak in peaks)


def verdict(peaks: Sequence[DevicePeak], machine: Machine) -> str:
    return "fits" if fits(peaks, machine.memory) else "does not fit"


def with_header(text: str, preset: str) -> str:
    """A preset's file with its planned lines, which stand before the first empty comment."""
    head, rest = text.split("\n#\n", 1)
    about, *_ = re.split(r"\n# Peaks by", head)
    return "\n".join([about, *header_of(preset)]) + "\n#\n" + rest


# --- tables of pages ------------------------------------------------------------------------------

Rows = list[list[str]]


def table(headings: Sequence[str], rows: Rows, texts: int = 1) -> str:
    """A table in Markdown, whose first `texts` columns are text and the others numbers."""
    rules = ["---"] * texts + ["---:"] * (len(headings) - texts)
    lines = ["| " + " | ".join(headings) + " |", "|" + "|".join(rules) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines).replace("|  |", "| |") + "\n"


def placement_table() -> str:
    args = from_preset(RLArgs, "qwen2.5_math_1.5b_gsm8k_8gpu", optimizer="adamw")
    shape = ModelShape.from_config(QWEN_1_5B)
    roles = roles_of(args, 8)
    shares = place(shape, roles, "adamw", 2, args.policy_parallelism)
    shares.append(frozen_share(shape, roles.reference, "reference", 2))
    rows: Rows = []
    for share in sorted(shares, key=lambda share: share.device):
        rows.append([share.device, words_of_role(share.role), layers_of(shape, share.modules)])
        rows[-1].append(f"{share.bytes / 1e9:.2f}")
    return table(("device", "role", "layers", "GB"), rows, texts=3)


def words_of_role(role: str) -> str:
    return {"sample": "sampler", "eval": "evaluation"}.get(role, role)


def layers_of(shape: ModelShape, modules: Sequence[str]) -> str:
    """Which layers a device has, and the model's ends where they are there."""
    layers = [name.rpartition(".")[2] for name in modules if name in shape.layers]
    if len(layers) == len(shape.layers):
        return "all"
    ends = ", embeddings, head" if shape.head in modules else ""
    return f"{layers[0]}-{layers[-1]}{ends}"


class PeakRow(NamedTuple):
    """A row of the table of presets' peaks."""

    label: str
    preset: str
    flags: Mapping[str, Any]
    machine: Machine
    role: str = "policy"  # Or "sampler": the device with the fullest engine.


def peak_rows() -> list[PeakRow]:
    small = dataclasses.replace(MACHINES["single_gpu_gsm8k_kl"], config=QWEN_0_5B, memory=24e9)
    presets = [
        ("`single_gpu_gsm8k_kl`, vLLM", "single_gpu_gsm8k_kl", {}, None, "policy"),
        ("the same, transformers", "single_gpu_gsm8k_kl", {"sampler": "transformers"}, None, ""),
        ("the same, 0.5 billion, vLLM", "single_gpu_gsm8k_kl", {}, small, ""),
        ("`countdown_qwen2.5_3b`", "countdown_qwen2.5_3b", {}, None, ""),
        ("`countdown_qwen2.5_3b_24gb`", "countdown_qwen2.5_3b_24gb", {}, None, ""),
        (
            "`qwen2.5_math_1.5b_gsm8k_8gpu`, policy",
            "qwen2.5_math_1.5b_gsm8k_8gpu",
            {},
            None,
            "",
        ),
        ("its sampler, evaluation", "qwen2.5_math_1.5b_gsm8k_8gpu", {}, None, "sampler"),
        ("`async_gsm8k`, policy", "async_gsm8k", {}, None, ""),
        ("its sampler", "async_gsm8k", {}, None, "sampler"),
        ("`smollm2_gsm8k`, vLLM", "smollm2_gsm8k", {}, None, ""),
    ]
    return [
        PeakRow(label, preset, flags, machine or MACHINES[preset], role or "policy")
        for label, preset, flags, machine, role in presets
    ]


KINDS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "moments": ("moments",),
    "casts": ("casts",),
    "activations": ("activations",),
    "attention": ("attention",),
    "logits, head": ("logits",),
    "our sampler": ("sampler",),
    "reference": ("reference",),
    "allocator": ("margin",),
}
"""Heading -> kinds of bytes of the trainer's own process."""


def peaks_table() -> str:
    rows: Rows = []
    for row in peak_rows():
        args = from_preset(RLArgs, row.preset, **row.flags)
        peaks = peaks_of(args, row.machine)
        of_policy = [peak for peak in peaks if trained(peak) > 0]
        peak = max(of_policy, key=lambda peak: peak.total)
        if row.role == "sampler":
            others = [peak for peak in peaks if trained(peak) == 0]
            peak = max(others, key=lambda peak: peak.phases[peak.worst]["engine"])
        phase = peak.phases[peak.worst]
        trainer = peak.of_trainer(peak.worst) or 0
        spare = 1 - peak.total / row.machine.memory
        cells = [sum_of(phase, *kinds) for kinds in KINDS.values()]
        cells += [gigabytes(trainer) if trainer else "0", sum_of(phase, "engine")]
        cells += [sum_of(phase, "context", RESERVED), gigabytes(peak.total), f"{spare:.0%}"]
        rows.append([row.label, gigabytes(row.machine.memory), *cells])
        rows[-1][-1] = rows[-1][-1].replace("%", " %")
    headings = ("preset", "card", *KINDS, "trainer", "engine", "CUDA, reserved", "sum", "spare")
    return table(headings, rows)


def cards_table() -> str:
    models = {
        "Qwen2.5-0.5B": QWEN_0_5B,
        "Qwen2.5-1.5B": QWEN_1_5B,
        "Qwen2.5-3B": QWEN_3B,
        "Qwen2.5-7B": QWEN_7B,
    }
    rows: Rows = []
    for name, config in models.items():
        cells = [smallest_card(config, flags) for flags in OPTIMIZERS_OF_CARDS.values()]
        rows.append([name, *cells])
    headings = ("model", *OPTIMIZERS_OF_CARDS)
    return table(headings, rows, texts=len(headings))


def smallest_card(config: PretrainedConfig, flags: Mapping[str, Any]) -> str:
    """The smallest card on which the preset for one GPU fits with vLLM, and the peak there, in
    GB."""
    args = from_preset(RLArgs, "single_gpu_gsm8k_kl", sampler="vllm", **flags)
    for card in SMALLEST_CARDS:
        peaks = peaks_of(args, Machine(config, 1, card * 1e9))
        if fits(peaks, card * 1e9):
            return f"{card} ({gigabytes(max(peak.total for peak in peaks))})"
    return "none"


def ranks_table() -> str:
    rows: Rows = []
    for row in RANKS:
        kinds = closed_form(row.config, row.case)
        total = sum(kinds.values())
        cells = [
            sum_of(kinds, "weights", "gradients", "moments"),
            sum_of(kinds, "casts"),
            sum_of(kinds, "gathered"),
            sum_of(kinds, "activations", "attention"),
            sum_of(kinds, "logits"),
            sum_of(kinds, RESERVED),
            f"{total / 1e9:.2f}",
        ]
        if row.tracked is None:
            cells += ["", ""]
        else:
            cells += [f"{row.tracked:.2f}", f"{100 * (total / (1e9 * row.tracked) - 1):.1f} %"]
        rows.append([row.label, row.ranks, *cells])
    headings = (
        "model",
        "ranks of a machine",
        "weights, gradients, moments",
        "casts",
        "gathered",
        "activations, attention",
        "logits, head",
        "reserved",
        "sum",
        "torch's tracker",
        "form above",
    )
    return table(headings, rows)


def planned_duration(flags: str, known: Known = Known()) -> Duration:  # noqa: B008, it is a tuple
    """The seconds of `plan`'s command with these flags, of which --hardware is the machine."""
    words = flags.split()
    place_of_hardware = words.index("--hardware")
    hardware = hardware_of(words[place_of_hardware + 1])
    run = parse(RLArgs, words[:place_of_hardware] + words[place_of_hardware + 2 :])
    return duration(predict(run, planned_machines(hardware)), hardware, known)


def seconds_table() -> str:
    rows: Rows = []
    for flags in PLANNED_COMMANDS:
        seconds = planned_duration(flags)
        cells = [f"`{flags}`", span(seconds.step), span(seconds.phases["sampling"])]
        rows.append([*cells, span(seconds.gpu_hours)])
    return table(("flags of `plan`", "a step, s", "of which sampling", "GPU-hours"), rows)


def measured_seconds_table() -> str:
    flags = f"{MEASURED_STEP} --hardware 1xH200"
    unknown = planned_duration(flags).phases
    longest = planned_duration(flags, Known(least=MOST_SHARES)).phases
    rows = []
    for phase, took in MEASURED_SECONDS.items():
        rows.append([phase, span(unknown[phase]), span(longest[phase]), took])
    headings = ("phase", "planned, s", "where all responses are longest", "an H200 took")
    return table(headings, rows)


TABLES = {
    "placement": placement_table,
    "peaks": peaks_table,
    "cards": cards_table,
    "ranks": ranks_table,
    "seconds": seconds_table,
    "measured seconds": measured_seconds_table,
}
"""Name in a page's `<!-- planned: NAME -->` -> the table that follows."""


def with_tables(text: str) -> str:
    """A page with its planned tables."""

    def table_of(match: re.Match[str]) -> str:
        return match["mark"] + TABLES[match["name"]]()

    return re.sub(r"(?P<mark><!-- planned: (?P<name>[a-z ]+) -->\n)(?:\|.*\n)*", table_of, text)


# --- all files ------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """The pages that have planned tables."""
    return [page for page in sorted(DOCS.glob("*.md")) if "<!-- planned: " in page.read_text()]


def rewritten(file: Path) -> str:
    """A page's or preset's text with today's planned figures."""
    text = file.read_text()
    with two_plain_cores():
        if file.suffix == ".toml":
            return with_header(text, file.stem)
        return with_tables(text)


def main() -> None:
    """Rewrite all files, and name those that have changed."""
    for file in (*(PRESETS / f"{name}.toml" for name in preset_names()), *pages()):
        text = rewritten(file)
        if text != file.read_text():
            file.write_text(text)
            print(f"rewrote {file.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)

"""Whole commands on machines with simulated GPUs, every process of which checks where its tensors
are."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from simulated_gpus import environment, simulated_gpus

from alignment.model.torch_state import kept_torch_state
from alignment.system.ranks import close_ranks
from tests.command_line import train_here

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = [
    "--sampler",
    "transformers",
    "--dtype",
    "float32",
    "--num_steps",
    "2",
    "--eval_interval",
    "2",
    "--save_interval",
    "2",
    "--max_problems",
    "2",
    "--num_problems",
    "64",  # of 23,677, all of which every start would encode
    "--prompts_per_rollout",
    "2",
    "--group_size",
    "4",
    "--max_new_tokens",
    "8",
    "--beta",
    "0.04",
    "--max_sampler_mismatch",
    "0.001",
    "--reward",
    "random",
    "--deterministic",
    "--sampling_top_p",
    "0.9",
]


def train_on(gpus: int, folder: Path, warm_start: Path, *flags: str) -> list[dict]:
    """The metrics of `train_rl` on a machine with so many simulated GPUs, which this process and
    those that it starts see."""
    command = ["--sft_base", str(warm_start / "sft"), *SMALL, "--output_dir", str(folder), *flags]
    variables = mock.patch.dict(os.environ, environment(gpus))
    with variables, kept_torch_state(), simulated_gpus(gpus):
        try:
            train_here("alignment.train_rl", command, None, folder, 1)
        finally:
            close_ranks()
    (file,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def mixes_devices(printed: str) -> bool:
    """Whether a command says, in an error or in a warning, that tensors of two devices have met."""
    return any(
        words in printed for words in ("DeviceMismatch", "same device", "either on cpu or on")
    )


@pytest.fixture(scope="module")
def one_gpu(warm_start, tmp_path_factory):
    """The metrics of a run on one GPU."""
    return train_on(1, tmp_path_factory.mktemp("one"), warm_start)


# On two GPUs the policy has the first, on five the first two, on eight the first five. Every rank
# is a process: two say what more would.
MACHINES = {
    "auto on five, sampling ahead": (5, ["--rollouts", "async", "--max_staleness", "0"]),
    "layer_split on eight": (8, ["--policy_parallelism", "layer_split"]),
    "sharded on five": (5, ["--policy_parallelism", "sharded"]),
}


@pytest.mark.parametrize(("gpus", "flags"), MACHINES.values(), ids=MACHINES)
def test_what_is_chosen_for_a_machine_trains_as_one_gpu_does(
    gpus, flags, one_gpu, warm_start, tmp_path, capfd
):
    metrics = train_on(gpus, tmp_path, warm_start, *flags)
    assert not mixes_devices("".join(capfd.readouterr()))
    for ours, expected in zip(metrics, one_gpu, strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "entropy"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


# What a hurried hand might write: file, flags of the run, and the text that stands there with what
# replaces it.
PLANTS = {
    "tensors through a wrapped module": (
        "policy/sharded.py",
        ["--policy_parallelism", "sharded", "--policy_ranks", "1"],
        {
            "(model: PreTrainedModel, forward: Callable[[PreTrainedModel], torch.Tensor])": (
                "(model, forward, **planned)"
            ),
            "return forward(model)": "return forward(model, **planned)",
            "self.model.compute(forward)": "self.model.compute(forward.func, **forward.keywords)",
        },
    ),
    "positions of the first GPU": (
        "model/loading.py",
        ["--policy_parallelism", "layer_split", "--policy_devices", "cuda:0", "cuda:1"],
        {
            "{device: packing.to(device).position_ids_1N for device in devices}": "{}",
            "if tensor.device == torch.device(device):": "if True:",
        },
    ),
}


@pytest.mark.parametrize(("file", "flags", "changes"), PLANTS.values(), ids=PLANTS)
def test_a_planted_mixing_of_devices_is_seen(file, flags, changes, warm_start, tmp_path):
    shutil.copytree(
        ROOT / "alignment", tmp_path / "alignment", ignore=shutil.ignore_patterns("__pycache__")
    )
    planted = tmp_path / "alignment" / file
    text = ast.unparse(ast.parse(planted.read_text()))  # whatever its lines are
    for old, new in changes.items():
        assert old in text, f"{file} no longer has: {old}"
        text = text.replace(old, new)
    planted.write_text(text)
    # The check of kernels would meet what is planted first, and give them up.
    short = ["--num_steps", "1", "--max_new_tokens", "8", "--kernels", "eager"]
    command = [sys.executable, "-m", "alignment.train_rl", "--sft_base", str(warm_start / "sft")]
    done = subprocess.run(
        [*command, *SMALL, "--output_dir", str(tmp_path / "runs"), *short, *flags],
        cwd=tmp_path,
        env={**environment(2, tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert mixes_devices(done.stdout + done.stderr), done.stderr
    # A model whose own layers fail is not given up: it takes the plain path, and one line says why.
    assert done.returncode != 0 or "slower, and exact" in done.stderr

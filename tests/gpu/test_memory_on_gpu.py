"""On a GPU: what torch allocates in an update is what was predicted, and with --deterministic a
resumed run has the same bits."""

import dataclasses
import gc
import random
import shutil

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from alignment.args import RLArgs, from_preset
from alignment.builders.checks import check_rl
from alignment.builders.devices import roles_of
from alignment.builders.prediction import step_shape
from alignment.builders.verified_runs import differing_parts
from alignment.core.records import Distribution
from alignment.core.tokens import collate
from alignment.model.shape import ModelShape
from alignment.planning.peak_meter import WHOLE
from alignment.planning.peaks import peak_bytes
from alignment.planning.placement import Roles
from alignment.policy.policy import Objective, PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.runs.state import read_state
from alignment.system.device_memory import total_bytes
from alignment.system.files import read_jsonl
from alignment.train_rl import train
from tests.model.published_shapes import qwen2

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
PROMPT, ROWS, GROUPS = 150, 8, 6
SMALL = {
    "prompts_per_rollout": 2,
    "group_size": 4,
    "train_mini_batch_size": 4,
    "max_new_tokens": 16,
    "max_problems": 4,
}
SMALL |= {
    "reward": "random",
    "num_steps": 2,
    "eval_interval": 2,
    "save_interval": 1,
    "log_state": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Six layers of Qwen2.5-Math-1.5B's, in whose number the count is linear, with its embedding;
    random weights."""
    torch.manual_seed(0)
    with torch.device(GPU):
        model = AutoModelForCausalLM.from_config(qwen2(1536, 8960, 6, 12), dtype=torch.bfloat16)
    model.save_pretrained(made := tmp_path_factory.mktemp("six_layers") / "model")
    return str(made)


@pytest.fixture
def allocated_before():
    """Bytes that torch has allocated for others, once what nobody uses is gone; measures from here
    on."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    return torch.cuda.memory_allocated(GPU)


def rows(longest: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses of random tokens, these between half and the whole of a length."""
    draw = random.Random(0)
    prompts = [[draw.randrange(1000) for _ in range(PROMPT)] for _ in range(GROUPS)]
    lengths = [
        longest if row == 0 else draw.randint(longest // 2, longest)
        for _ in prompts
        for row in range(ROWS)
    ]
    return [prompt for prompt in prompts for _ in range(ROWS)], [
        [draw.randrange(1000) for _ in range(n)] for n in lengths
    ]


def mean(rows, log_probs, mask):
    return (log_probs * mask).sum() / mask.sum(), {}


@pytest.mark.parametrize(
    ("dtype", "tokens", "longest"),
    [("bfloat16", 16384, 512), ("bfloat16", 4096, 256), ("float32", 4096, 256)],
)
def test_an_update_allocates_what_was_predicted(folder, allocated_before, dtype, tokens, longest):
    """From the second step on, when there are moments, at the largest micro-batch: 0 to 15 % less
    than the form says."""
    policy = SingleDevicePolicy(PolicyConfig(folder, (GPU,), dtype, micro_batch_tokens=tokens))
    batch = collate(*rows(longest), 0)
    objective = Objective(mean, Distribution())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(GPU)
        results = list(policy.accumulate(batch, range(GROUPS * ROWS), objective))
        policy.clip_gradient(1.0)
        policy.step(1e-6)
    measured = torch.cuda.max_memory_allocated(GPU) - allocated_before
    args = from_preset(
        RLArgs, "single_gpu_gsm8k_kl", beta=0.0, optimizer="adamw", dtype=dtype, group_size=ROWS
    )
    step = step_shape(args, roles_of(args, 1), total_bytes(GPU), vllm=True)
    step = dataclasses.replace(
        step,
        policy_parallelism="single",
        gradient_checkpointing=False,
        micro_batch_tokens=tokens,
        prompt=PROMPT,
        max_new_tokens=longest,
        truncated=False,
        sampled={},
        update_tokens=GROUPS * (PROMPT + ROWS * longest),
        largest_micro_batch=max(r.sums["tokens"] for r in results),
    )
    policy_alone = Roles((GPU,), sample=(), reference="", eval="")
    peak, *_ = peak_bytes(ModelShape.from_config(policy.config), policy.config, policy_alone, step)
    predicted = peak.of_trainer("update")
    kinds = ", ".join(
        f"{kind} {size / 1e9:.2f}" for kind, size in peak.phases["update"].items() if size
    )
    said = (
        f"{dtype}, {step.largest_micro_batch} tokens: {measured / 1e9:.2f} GB, predicted"
        f" {predicted / 1e9:.2f} ({kinds})"
    )
    print(said)
    assert measured <= predicted <= 1.15 * measured, said


def trained(output, base, **others):
    args = from_preset(
        RLArgs, "tiny", output_dir=str(output), sft_base=str(base), run_name="run", **SMALL | others
    )
    check_rl(args)
    return train(args, Console(quiet=True))


def test_deterministic_kernels_resume_to_the_same_bits(tiny_folder, tmp_path, monkeypatch):
    """A run that is put back to its first checkpoint, as if it had been killed, and resumed. Each
    phase has bytes by torch's allocator, and no fewer by the driver."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        straight = trained(tmp_path / "straight", tiny_folder, deterministic=True)
        shutil.copytree(straight, tmp_path / "resumed" / "run")
        for name in ("step_000002", "final"):
            shutil.rmtree(tmp_path / "resumed" / "run" / name)
        (tmp_path / "resumed" / "run" / "summary.json").unlink()
        resumed = trained(tmp_path / "resumed", tiny_folder, deterministic=True, resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert read_state(resumed, 2) == read_state(straight, 2)
    assert differing_parts(straight, resumed) == []
    peaks = read_jsonl(straight / "metrics.jsonl")[-1]["peak_bytes"]
    for phase in ("sampling", "update", "sync"):
        assert 0 < peaks[GPU][phase][0] <= peaks[GPU + WHOLE][phase][0]
        assert 0 < peaks[GPU][phase][1] < peaks[GPU + WHOLE][phase][1]

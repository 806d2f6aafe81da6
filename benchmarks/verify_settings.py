"""Does `alignment.verify` raise a false alarm?

uv run -m benchmarks.verify_settings
uv run -m benchmarks.verify_settings --first 11 --last 20

Runs `verify`, without the run that is killed and resumed, on the tiny model over sets of arguments:
losses, advantages, parallelisms, optimisers, adapters, asynchronous rollouts, number formats and
schedules. Prints the lines that failed, and how near the others came to their limits. Exit code 1
where a line failed.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from alignment.system.terminal import make_table
from benchmarks.commands import run_command
from benchmarks.faults import BASE, COMMON, RUN, copy_package, message_of, warm_up

# Flags beside those of every set, as a user writes them. BASE is the model that all start from,
# here also a teacher.
SETTINGS = (
    "",
    # Losses, each with advantages and denominators that no other set has.
    "--loss_type no_baseline --group_size 1",
    "--loss_type reinforce_with_baseline --loss_normalization constant --advantage opo",
    "--loss_type grpo_no_clip --loss_normalization token_mean --normalize_by_std --std_of batch",
    "--loss_type gspo --cliprange 0.003 --epochs_per_rollout 2 --advantage maxrl",
    "--loss_type cispo --baseline leave_one_out --epochs_per_rollout 2",
    "--loss_type sapo --train_mini_batch_size 4 --advantage positive_only",
    "--loss_type gmpo --train_mini_batch_size 4 --advantage negative_only",
    "--loss_type dppo --old_log_probs sampler --epochs_per_rollout 2",
    "--advantage pass_at_k --advantage.k 2 --sampler_correction sequence_mask",
    "--advantage problem_average --overlong_buffer 8 --skip_unfinished",
    "--advantage reinforce_plus_plus_baseline --sampler_correction token_truncate --max_refills 2",
    # Terms beside the loss, and selected tokens.
    "--beta 0.1 --kl_estimator k1 --epochs_per_rollout 2 --sampling_temperature 0.7",
    "--entropy_coefficient 0.02 --token_selection top_entropy --sampling_top_p 0.9",
    "--token_selection kl_cov --epochs_per_rollout 2 --sampling_top_k 5",
    "--token_selection clip_cov --covariance_low 0.1 --entropy_target 2.0",
    # Adapters.
    "--lora_rank 4 --beta 0.1 --epochs_per_rollout 2",
    "--lora_rank 4 --lora_alpha 32 --weight_decay 0.1 --optimizer adamw_8bit",
    # Optimisers and schedules.
    "--optimizer adamw_8bit --beta 0.1",
    "--optimizer adamw_cpu_offload --weight_decay 0.1 --max_grad_norm 0.01",
    "--optimizer muon --train_mini_batch_size 8",
    "--epochs_per_rollout 3 --train_mini_batch_size 4 --warmup_steps 5 --lr_schedule linear",
    "--warmup_steps 1 --lr_schedule cosine --num_steps 2 --micro_batch_tokens 64",
    # Number formats.
    "--dtype bfloat16 --beta 0.1",
    # Parallelisms that a CPU has; layer_split takes two devices.
    "--policy_parallelism replicated --policy_ranks 2 --beta 0.1",
    "--policy_parallelism sharded --policy_ranks 2 --optimizer muon",
    "--policy_parallelism sharded --policy_ranks 2 --lora_rank 4 --epochs_per_rollout 2",
    # Asynchronous rollouts.
    "--rollouts async --max_staleness 2",
    "--rollouts async --max_staleness 0 --loss_type cispo",
    # A teacher.
    f"--teacher {BASE} --advantage none --epochs_per_rollout 2",
    f"--teacher {BASE} --teacher_weight 0.5 --loss_type cispo",
)


@dataclass(frozen=True)
class Verdict:
    """What `verify` said about a set of arguments."""

    flags: str
    failed: Sequence[str]
    """The lines that failed, each with what was measured; or the message of a refusal."""
    nearest: str
    """Of the lines with a limit other than 0, the one that came nearest to it, and its share."""
    seconds: float


def verify(flags: str, base: Path) -> Verdict:
    """Run `verify` with some flags."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verify_settings_") as name:
        folder = Path(name)
        copy_package(folder, None)
        (folder / BASE).symlink_to(base)
        own = ["--run_name", RUN, "--kill_after", "0", *flags.split()]
        ended = run_command(folder, "verify", [*COMMON, *own])
        seconds = time.monotonic() - start
        summary = folder / "output" / RUN / "summary.json"
        if not summary.exists():
            return Verdict(flags, [message_of(ended)], "", seconds)
        checks = json.loads(summary.read_text())["checks"]
    failed = []
    shares = {}
    for check in checks:
        if check["passed"] is False:
            failed.append(f"{check['what']}: {check['measured']} {check['error']}".strip())
        if check["passed"] and check["limit"]:
            shares[check["what"]] = check["measured"] / check["limit"]
    nearest = max(shares, key=lambda what: shares[what])
    return Verdict(flags, failed, f"{nearest}: {shares[nearest]:.2g} of its limit", seconds)


def main(first: int = 1, last: int = len(SETTINGS)) -> None:
    """Run `verify` over sets of arguments and print which lines failed.

    Args:
        first: Number of the first set, from 1.
        last: Number of the last.
    """
    console = Console()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="verify_settings_") as name:
        base = warm_up(Path(name))
        for number in range(first, last + 1):
            verdict = verify(SETTINGS[number - 1], base)
            verdicts.append(verdict)
            words = "; ".join(verdict.failed) or "no alarm"
            console.print(f"{number}: {verdict.flags}: {words}", markup=False, soft_wrap=True)
    rows = [
        (verdict.flags, "; ".join(verdict.failed) or "-", verdict.nearest, f"{verdict.seconds:.0f}")
        for verdict in verdicts
    ]
    headings = ("flags", "failed", "nearest to its limit", "seconds")
    console.print(make_table("verify", headings, rows, numbers=("seconds",)))
    alarms = [verdict for verdict in verdicts if verdict.failed]
    console.print(f"{len(verdicts) - len(alarms)} of {len(verdicts)} sets raised no alarm")
    sys.exit(bool(alarms))


if __name__ == "__main__":
    tyro.cli(main)

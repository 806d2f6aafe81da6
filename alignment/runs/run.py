"""One training run: its folder, lock, checkpoints, log, and what happens to it when it stops."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alignment.core.records import Rollout, SampledStep
from alignment.runs.checkpoint import (
    checkpoint_folder,
    drop_old_checkpoints,
    last_whole_step,
    put_aside,
    save_checkpoint,
    save_model,
)
from alignment.runs.health import Health, HealthLimits
from alignment.runs.run_folder import RunFolder, claim_run_folder, refuse_taken_name, resumed_run_name, write_args
from alignment.runs.summary import write_summary
from alignment.system.clock import Clock
from alignment.system.errors import RunStopped, UserError
from alignment.system.files import atomic_folder, lock_run_folder, read_json, read_jsonl
from alignment.system.signals import Interrupted, deliver_signals, signals_are_deferred
from alignment.system.terminal import progress_line

if TYPE_CHECKING:
    from rich.console import Console

FREE_ON_RESUME = frozenset(
    """resume run_name num_steps save_interval keep_checkpoints sampler_timeout max_bad_steps max_grader_failures""".split()
)
"""Arguments that a resumed run may change."""


@dataclass(frozen=True)
class RunConfig:
    """Where a run is written, how long it is, and what its args.json says."""

    output_dir: str
    run_name: str
    default_name: str
    """The name where `run_name` is empty, with the first number that is free."""
    resume: bool
    num_steps: int
    save_interval: int
    keep_checkpoints: int
    limits: HealthLimits
    arguments: Mapping[str, object]
    """All arguments, which a resumed run must share but for `FREE_ON_RESUME`."""
    defaults: Mapping[str, object]
    """What arguments were before they existed, for runs that were started with an older version."""
    seeds: Mapping[str, int]
    resume_command: Callable[[str], str]
    """The command that continues the run of a name."""


class Run:
    """A run that is open. Its folder appears when `start` is called, after everything else could be built."""

    def __init__(self, config: RunConfig, console: Console):
        self.config, self.console = config, console
        self.closing = ExitStack()
        """What is closed when the run ends: samplers, processes, locks."""
        self.clock = Clock()
        self.path: Path | None = None
        self.step = 0
        """The last step that is done."""
        self.resumed_at = 0
        self.started = False
        """Whether there is something to save."""
        self._restarts = 0

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that this run resumes from; None for a new run."""
        return checkpoint_folder(self.path, self.step) if self.step else None

    def resume(self) -> None:
        """Find the run to go on with, lock it, and put damaged checkpoints aside. Raises `UserError` where it cannot go on."""
        output = self.config.output_dir
        self.path = Path(output) / resumed_run_name(output, self.config.run_name, self.config.default_name)
        self.closing.enter_context(lock_run_folder(self.path))
        refuse_other_arguments(self.path, self.config)
        summary = self.path / "summary.json"
        finished = read_json(summary).get("steps", 0) if summary.exists() else 0
        step, damages = (finished, []) if finished >= self.config.num_steps else last_whole_step(self.path)
        if finished >= self.config.num_steps or step > self.config.num_steps:
            raise UserError(f"--resume: {self.path} has already done {step} of --num_steps {self.config.num_steps}")
        for damage in damages:
            self._say(f"{damage}; it is put aside, and the run goes on from step {step}", "red")
        put_aside(self.path, after=step)
        # A shorter run ended with these; its model is still there as its last checkpoint.
        summary.unlink(missing_ok=True)
        shutil.rmtree(self.path / "final", ignore_errors=True)
        self.step = self.resumed_at = step

    def start(self, policy, tokenizer, rollouts, restarts: Callable[[], int]) -> None:
        """Claim the folder, and open its log. `restarts` counts the processes that were lost and replaced so far."""
        config = self.config
        write = functools.partial(write_args, arguments=config.arguments, seeds=config.seeds)
        if self.path is None:
            self.path = claim_run_folder(config.output_dir, config.run_name, config.default_name, write)
            self.closing.enter_context(lock_run_folder(self.path))
        else:
            write(self.path)
        self.folder = RunFolder(self.path, self.step)
        self.closing.callback(self.folder.close)
        self.health = Health(read_jsonl(self.path / "metrics.jsonl"), config.limits)
        self._policy, self._tokenizer, self._rollouts, self._count_restarts = policy, tokenizer, rollouts, restarts
        self._progress = self.closing.enter_context(progress_line("RL", config.num_steps, self.console))
        self.started = True

    def steps(self) -> Iterator[int]:
        """The steps that are left, from 1."""
        for step in range(self.step + 1, self.config.num_steps + 1):
            self.clock.restart()
            yield step

    def log_completions(self, sampled: SampledStep, rollout: Rollout, result) -> None:
        """Write the step's completions with the trainer's log-probs, and the batches for which no update could be made."""
        trainer = rollout.response_values(result.trainer_log_probs_BT, result.rows_with_gradient)
        self.folder.log_completions("rollout", sampled.step, sampled.groups, trainer)
        self.folder.save_bad_batches(rollout, sampled.step, result.bad)

    def log_step(self, sampled: SampledStep, rollout: Rollout, result) -> None:
        """Log a step that is done, with its warnings. From here on signals are delivered. Raises `RunStopped` where the run
        cannot go on to any purpose."""
        restarts = self._count_restarts()
        record = {"step": sampled.step, "micro_batch_tokens": self._policy.micro_batch_tokens, **result.report}
        record |= sampled.report | {"restarts": restarts - self._restarts}
        record |= step_seconds(self.clock, sampled, rollout, result.report["update_tokens"])
        self._restarts = restarts
        warnings, record = self.health.judge(record)
        for warning in warnings:
            self._say(f"warning, step {sampled.step}: {warning}", "yellow")
        self.folder.log_step(record)
        self.step = sampled.step
        deliver_signals()
        self._progress(self.step, f"reward {record['reward']:.2f}, format {record['format_reward']:.2f}")
        self.health.stop_if_hopeless()

    def save_if_due(self) -> None:
        """Write a checkpoint every --save_interval steps, and after the last."""
        if self.step % self.config.save_interval == 0 or self.step == self.config.num_steps:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last step, and drop old ones, but not the one from which a lost sampler starts again."""
        self.folder.flush()
        ahead = self._rollouts.sampled_ahead(self.step)
        save_checkpoint(checkpoint_folder(self.path, self.step), self._policy, self._tokenizer, ahead)
        drop_old_checkpoints(self.path, self.config.keep_checkpoints, spared=self.resumed_at)

    def finish(self, title: str) -> None:
        """Write the final model, the learning curve and the summary, and print before and after."""
        with atomic_folder(self.path / "final") as building:
            save_model(building, lambda folder: self._policy.save(folder, self._tokenizer))
        write_summary(self.path, title, self.console)

    def save_when_stopped(self, stop: BaseException) -> None:
        """Save what is done when a signal or a hopeless run ends the loop, and say how to go on."""
        step = self.step
        try:
            if signals_are_deferred():  # the weights are between two steps: the last checkpoint stands
                step, _ = last_whole_step(self.path)
            elif step and not checkpoint_folder(self.path, step).exists():
                self.save()
        except RunStopped:  # a sampler that is lost has taken with it what older weights had sampled
            step, _ = last_whole_step(self.path)
        self._say(f"stopped after step {step} ({stop}); go on with: {self.config.resume_command(self.path.name)}")

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def explain(self, error: OSError) -> RunStopped:
        """What a full disk, or another fault of the file system, means for a run."""
        kept = "it had no checkpoint yet"
        with suppress(UserError, OSError):
            step, _ = last_whole_step(self.path)
            kept = f"its checkpoint of step {step} is whole" if step else kept
        return RunStopped(f"{error}. The run {self.path} has stopped; {kept}: go on with --resume when that is mended")


@contextmanager
def open_run(config: RunConfig, console: Console) -> Iterator[Run]:
    """A run, locked and resumed where --resume says so. What the run holds is closed at the end; where a signal or a fault
    ends it, what is done is saved first, and the user is told how to go on."""
    run = Run(config, console)
    with run.closing:
        if config.resume:
            run.resume()
        else:
            refuse_taken_name(config.output_dir, config.run_name)
        try:
            yield run
        except (Interrupted, RunStopped) as stop:
            if run.started:
                run.save_when_stopped(stop)
            raise
        except OSError as error:
            if run.started:
                raise run.explain(error) from None
            raise


def refuse_other_arguments(path: Path, config: RunConfig) -> None:
    """Raise `UserError` where a run was started with other arguments than `config` has."""
    before = read_json(path / "args.json").get("args")
    if not isinstance(before, dict):
        raise UserError(f"--resume: {path / 'args.json'} is damaged, so it does not say how the run was started")
    defaults, now = (json.loads(json.dumps(dict(values))) for values in (config.defaults, config.arguments))
    changed = [
        f"--{key} was {before.get(key, defaults.get(key))!r}, now {value!r}"
        for key, value in now.items()
        if before.get(key, defaults.get(key)) != value and key not in FREE_ON_RESUME
    ]
    if changed:
        raise UserError(f"--resume: {path} was started with other arguments: {'; '.join(changed)}")


def step_seconds(clock: Clock, sampled: SampledStep, rollout: Rollout, update_tokens: int) -> dict[str, float]:
    """Seconds by phase, and tokens a second: those sampled, and those, prompts included, that updates computed."""
    return {
        **{f"seconds_{phase}": seconds for phase, seconds in clock.seconds.items()},
        "seconds": clock.elapsed(),
        "tokens_per_second_sample": sum(rollout.lengths) / sampled.seconds["sample"],
        "tokens_per_second_update": update_tokens / clock.seconds["update"],
    }

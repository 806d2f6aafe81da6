"""One training run: its folder, lock, checkpoints and log, and what is saved when it is stopped."""

import json
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from alignment.core.args_file import was_auto
from alignment.core.records import Rollout, SampledStep
from alignment.core.schedules import last_reset
from alignment.runs import run_folder
from alignment.runs.by_heart import by_heart_warning, solved_at_start
from alignment.runs.health import Health
from alignment.runs.held_out import evaluation_words
from alignment.runs.moments import zero_moments
from alignment.runs.state import state_of
from alignment.runs.step_lines import step_lines, step_words
from alignment.runs.summary import write_card, write_summary
from alignment.system.clock import Clock
from alignment.system.command import current_command
from alignment.system.errors import RunStopped, UserError, failure_of_users_code, in_words
from alignment.system.files import atomic_folder, read_json, read_jsonl, write_json
from alignment.system.locks import lock_run_folder
from alignment.system.manifests import digest_of_weights, write_manifest
from alignment.system.signals import Interrupted, deferrable_signals, signals_are_deferred
from alignment.system.terminal import progress_line

# The digests of the weights that a run reads and never trains.
FROZEN_MODELS = "frozen_models.json"


@dataclass(frozen=True)
class RunConfig:
    """The folder, length and checkpoint schedule of a run, and the contents of its args.json."""

    output_dir: str
    run_name: str
    # The name if `run_name` is empty; a second run of this name has the suffix "-2", and so on.
    default_name: str
    resume: bool
    num_steps: int
    save_interval: int
    keep_checkpoints: int
    max_new_tokens: int
    max_bad_steps: int
    max_grader_failures: float
    trackers: tuple[str, ...]
    arguments: Mapping[str, object]
    """All arguments. A resumed run must have the same, but for the `changeable` ones."""
    changeable: frozenset[str]
    setting: frozenset[str]
    """Names of the arguments that decide how far a run is reproducible."""
    # The values of arguments that an older version did not know, so that its args.json lacks them,
    # and of those whose default has another name there.
    defaults: Mapping[str, object]
    seeds: Mapping[str, int]
    command: str  # The command that trains, "train_rl" or "sft".
    # Names of the flags that are "auto"; `arguments` has what each comes to.
    automatic: tuple[str, ...] = ()
    reference_reset_interval: int = 0  # Steps between resets of the reference; 0: never.
    log_state: bool = False  # Whether each step writes a line of state.jsonl before its update.
    target_accuracy: float = 0.0  # The run ends after an evaluation that has it; 0: none.
    compares_rewards: bool = True
    """Whether advantages compare a group's rewards, so that equal ones teach nothing."""


class Restartable(Protocol):
    """A sampler or another process that replaces what it loses, such as an engine that dies."""

    @property
    def restarts(self) -> int:
        """The number of replacements so far."""
        ...

    def close(self) -> None:
        """End it."""


Opened = TypeVar("Opened", bound=Restartable)


@dataclass(frozen=True)
class StartedRun:
    """What a run has from its `start` on."""

    folder: run_folder.RunFolder
    health: Health
    policy: Any
    tokenizer: Any
    rollouts: Any  # None in SFT.
    # Prints a finished step, words on it, and lines of details.
    print_progress: Callable[[int, str, Sequence[str]], None]


class Run:
    """An open run. `start` creates its folder, after everything else has been built."""

    def __init__(self, config: RunConfig, console: Console):
        self.config = config
        self.console = console
        self.closing = ExitStack()  # Closes samplers, processes and locks when the run ends.
        self.clock = Clock()
        self.last_step = 0  # The last finished step.
        self.advantage_state: object = None  # Of the estimator of advantages, after that step.
        self.resumed_at = 0
        self._frozen_models: dict[str, str] = {}  # Name -> digest of its weights.
        self.best_step = 0  # Of SFT with --patience: the step whose weights are the best so far.
        # Whether it is between `start` and `finish`, so that there is something to save.
        self.is_under_way = False
        self._path: Path | None = None
        self._started: StartedRun | None = None
        # What `finish` takes from the process's seconds to get "seconds_beside_steps".
        self._step_seconds = 0.0
        self._opened: list[Restartable] = []
        self._words = ""  # What the progress line says of the last step.
        self._details: tuple[str, ...] = ()  # The lines below it.
        self._broken: dict[str, str] = {}  # Invariants that broke since the last logged step.
        self._restarts = 0  # All restarts of `_opened` up to the last logged step.

    @property
    def path(self) -> Path:
        """The run's folder. Raises RuntimeError before it has one (`start`, `resume`)."""
        if self._path is None:
            raise RuntimeError("the run has no folder yet")
        return self._path

    @property
    def started(self) -> StartedRun:
        """The parts of a run that has started. Raises RuntimeError before (`start`)."""
        if self._started is None:
            raise RuntimeError("the run has not started yet")
        return self._started

    @property
    def folder(self) -> run_folder.RunFolder:
        """The files of the run. Raises RuntimeError before it has started (`start`)."""
        return self.started.folder

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that this run resumes from; None for a new run."""
        if self.last_step == 0:
            return None
        return run_folder.checkpoint_folder(self.path, self.last_step)

    @property
    def last_reset(self) -> int:
        """The last step after which the reference took the policy's weights, of which there is a
        checkpoint; 0: none."""
        return last_reset(self.last_step, self.config.reference_reset_interval)

    @property
    def last_record(self) -> Mapping[str, Any]:
        """The line of metrics.jsonl of the last finished step; empty before the first."""
        if self.last_step == 0:
            return {}
        records = read_jsonl(self.path / "metrics.jsonl")
        return next(record for record in records if record["step"] == self.last_step)

    def resume(self) -> None:
        """Find and lock the run's folder, choose its last whole checkpoint, and rename the damaged
        ones after it. Raises `UserError` if the run cannot continue."""
        config = self.config
        name = run_folder.resumed_run_name(config.output_dir, config.run_name, config.default_name)
        self._path = Path(config.output_dir) / name
        self.closing.enter_context(lock_run_folder(self.path))
        refuse_other_arguments(self.path, config)
        summary = self.path / "summary.json"
        if summary.exists():
            self._refuse_if_done(read_json(summary).get("steps", 0), at=config.num_steps)
        step, damages = run_folder.last_whole_step(self.path, config.reference_reset_interval)
        if step == 0:
            run_folder.refuse_lost_checkpoints(self.path)
        # After exactly `num_steps` steps a run without a summary still has to finish.
        self._refuse_if_done(step, at=config.num_steps + 1)
        for damage in damages:
            self._print(f"{damage}; it is put aside, and the run goes on from step {step}", "red")
        run_folder.put_aside(self.path, after=step)
        # A summary and a final model, if any, are of the same run with a smaller --num_steps. Its
        # last checkpoint has that model, too, or the steps after an earlier one make it again.
        summary.unlink(missing_ok=True)
        shutil.rmtree(self.path / "final", ignore_errors=True)
        self.last_step = step
        self.resumed_at = step
        self._print(f"going on after step {step}, in {self.path}")
        if self.checkpoint:
            self.advantage_state = run_folder.load_advantage_state(self.checkpoint)

    def _refuse_if_done(self, step: int, at: int) -> None:
        """Raise `UserError` if the run has done `step` steps and that is `at` or more."""
        if step >= at:
            raise UserError(
                f"--resume: {self.path} has already done {step} of --num_steps"
                f" {self.config.num_steps}"
            )

    def open(self, process: Opened) -> Opened:
        """Return `process`, after arranging that it is closed when the run ends and that each step
        logs its `restarts`."""
        self._opened.append(process)
        return self.closing.enter_context(closing(process))

    def keep_frozen(self, name: str, folder: str) -> None:
        """Record the weights of a model that the run reads and never trains, such as the
        "reference model" of --beta. A run that resumes with other weights would go on under
        another objective: raises `UserError`. A model of the hub, which is no folder, is left
        out."""
        if not Path(folder).is_dir():
            return
        self._frozen_models[name] = digest_of_weights(Path(folder))
        if self._path is None or not (self.path / FROZEN_MODELS).exists():
            return
        recorded = read_json(self.path / FROZEN_MODELS).get(name)
        if recorded not in (None, self._frozen_models[name]):
            raise UserError(
                f"--resume: the weights of the {name}, in {folder}, are not those that"
                f" {self.path} began with; put these back, or begin another run"
            )

    def start(self, policy, tokenizer, rollouts=None, meter=None) -> None:
        """Create the folder, unless the run resumes, and open its log. SFT has no `rollouts`. With
        `meter`, a `PeakMeter`, peaks of memory are logged, too."""
        config = self.config
        if self._path is None:
            self._path = run_folder.claim_run_folder(
                config.output_dir,
                config.run_name,
                config.default_name,
                config.arguments,
                config.seeds,
                config.automatic,
            )
            self.closing.enter_context(lock_run_folder(self.path))
        else:
            run_folder.write_args(self.path, config.arguments, config.seeds, config.automatic)
        if self._frozen_models and not (self.path / FROZEN_MODELS).exists():
            write_json(self.path / FROZEN_MODELS, self._frozen_models)
        folder = self.closing.enter_context(
            closing(run_folder.RunFolder(self.path, self.last_step, config.trackers))
        )
        health = Health(
            read_jsonl(self.path / "metrics.jsonl"),
            config.max_new_tokens,
            config.max_bad_steps,
            config.max_grader_failures,
            config.compares_rewards,
        )
        self.clock.meter = meter
        # The warm start counts with the steps, because it is made once and serves many runs.
        self._step_seconds = self.clock.seconds.get("warm_start", 0.0)
        name = "RL" if rollouts else "SFT"
        print_progress = self.closing.enter_context(
            progress_line(name, config.num_steps, self.console)
        )
        self._started = StartedRun(folder, health, policy, tokenizer, rollouts, print_progress)
        self.is_under_way = True

    @contextmanager
    def step(self, step: int) -> Iterator[Callable[[], None]]:
        """The caller does one step of RL in the block, and logs it there with `log_step`.

        Yields `defer_signals`, which the caller calls before the weights begin to change. Until
        then a signal interrupts the block at once; afterwards it ends the run after the block.
        Raises `RunStopped` after the block if the run is hopeless (`Health`)."""
        with deferrable_signals() as defer_signals:
            yield defer_signals
            # Set before a deferred signal is raised: the step is done and logged.
            self.last_step = step
        self.started.print_progress(self.last_step, self._words, self._details)
        self.started.health.stop_if_hopeless()

    @contextmanager
    def sft_step(self, step: int) -> Iterator[None]:
        """The caller does one step of SFT in the block, and logs it there with `finish_sft_step`.
        A signal waits for the end of the block. Then a checkpoint is written if one is due."""
        with deferrable_signals() as defer_signals:
            defer_signals()
            yield
            self.last_step = step
        self.started.print_progress(self.last_step, self._words, self._details)
        self.save_if_due()

    def steps(self) -> Iterator[int]:
        """The remaining steps, up to one after whose evaluation the accuracy is
        --target_accuracy; the first step of a run is 1."""
        for step in range(self.last_step + 1, self.config.num_steps + 1):
            if self.is_at_target:
                accuracy = self.folder.evaluated[self.last_step]
                self._print(
                    f"--target_accuracy {self.config.target_accuracy:g} is reached after step"
                    f" {self.last_step} of {self.config.num_steps}: accuracy {accuracy:.3f}"
                )
                return
            self.clock.restart()
            yield step

    @property
    def is_at_target(self) -> bool:
        """Whether the evaluation after the last step has --target_accuracy."""
        target = self.config.target_accuracy
        # Before the first step there is nothing to save.
        is_due = target > 0 and self.last_step > 0
        return is_due and self.folder.evaluated.get(self.last_step, 0.0) >= target

    def log_state(self, sampled: SampledStep) -> None:
        """With --log_state, log digests of what the step's update begins with."""
        if self.config.log_state:
            self.clock.begin("")  # The peak of memory is then counted to no phase of the step.
            state = state_of(self.started.policy, sampled, self.path, self.advantage_state)
            self.folder.log_state(state)

    def log_completions(self, sampled: SampledStep, rollout: Rollout, result) -> None:
        """Write the step's completions with the trainer's log-probs, and each mini-batch whose loss
        or gradient was not finite."""
        log_probs = rollout.response_values(result.trainer_log_probs_BT, result.rows_with_gradient)
        self.folder.log_completions("rollout", sampled.step, sampled.groups, log_probs)
        self.folder.save_bad_batches(rollout, sampled.step, result.bad)

    def log_step(self, sampled: SampledStep, rollout: Rollout, result) -> None:
        """Log a step, and print those of its warnings that the step before did not have."""
        restarts = sum(process.restarts for process in self._opened)
        seconds = self.clock.seconds
        tokens_sampled = sampled.report.get("tokens_sampled", sum(rollout.lengths))
        record: dict[str, Any] = {
            "step": sampled.step,
            "micro_batch_tokens": self.started.policy.micro_batch_tokens,
            **self._reference_report(sampled.step),
            **result.report,
            **sampled.report,
            "restarts": restarts - self._restarts,
            **{f"seconds_{phase}": spent for phase, spent in seconds.items()},
            "seconds": self.clock.elapsed(),
            "tokens_per_second_sample": tokens_sampled / sampled.seconds["sample"],
            # Prompts included.
            "tokens_per_second_update": result.report["update_tokens"] / seconds["update"],
        }
        if self.clock.meter:
            record["peak_bytes"] = self.clock.meter.take(result.report["largest_micro_batch"])
        self._restarts = restarts
        self._step_seconds += record["seconds"]
        broken = {**self._broken, **sampled.warnings, **result.warnings}
        if sampled.step == 1 and sampled.policy_version == 0:
            broken |= self._by_heart(record)
        self._broken = {}
        warnings, record_with_warnings = self.started.health.judge(record, broken)
        for warning in warnings:
            self._print(f"warning, step {sampled.step}: {warning}", "yellow")
        self.folder.log_step(record_with_warnings)
        self._words = step_words(record)
        self._details = step_lines(record)

    def _by_heart(self, record: Mapping[str, Any]) -> dict[str, str]:
        """The warning "by_heart" of the first step's record, if any, beside the first
        evaluation."""
        evaluations = read_jsonl(self.path / "evals.jsonl")
        arguments: Mapping[str, Any] = self.config.arguments
        if not evaluations or arguments.get("train_on") == "solutions":
            return {}
        solved = solved_at_start(
            record, evaluations[0], arguments["reward"], arguments["group_size"]
        )
        words = by_heart_warning(*solved) if solved else ""
        return {"by_heart": words} if words else {}

    def _reference_report(self, step: int) -> dict[str, int]:
        """With resets, the step whose weights the reference has in a step; 0: none of this run."""
        interval = self.config.reference_reset_interval
        if not interval:
            return {}
        return {"reference_step": last_reset(step - 1, interval)}

    def finish_sft_step(self, record: Mapping[str, Any], words: str) -> None:
        """Log a finished step of SFT. `words` are for the progress line."""
        self.folder.log_step(
            {**record, "micro_batch_tokens": self.started.policy.micro_batch_tokens}
        )
        self._words = words

    def save_if_due(self, reset: Callable[[int, Path], None] | None = None) -> None:
        """Write a checkpoint every --save_interval steps, after the last (of --num_steps, or with
        --target_accuracy), after the best (of SFT with --patience), and every
        --reference_reset_interval steps; then call `reset` with the step and the checkpoint, whose
        weights the reference takes."""
        is_reset = self.last_step == self.last_reset
        if (
            self.last_step % self.config.save_interval == 0
            or self.last_step == self.config.num_steps
            or self.is_at_target
            or is_reset
            or self.last_step == self.best_step
        ):
            self.save()
        if is_reset and reset is not None:
            reset(self.last_step, run_folder.checkpoint_folder(self.path, self.last_step))

    def save(self) -> None:
        """Write a checkpoint, and delete old ones but not that of `resumed_at`: the samplers of a
        resumed run load it again when they restart."""
        self.clock.begin("checkpoint")
        self.folder.flush()
        sampled_ahead: Sequence[SampledStep] = ()
        if self.started.rollouts:
            sampled_ahead = self.started.rollouts.sampled_ahead(self.last_step)
        folder = run_folder.checkpoint_folder(self.path, self.last_step)
        run_folder.save_checkpoint(
            folder,
            self.started.policy,
            self.started.tokenizer,
            sampled_ahead,
            self.advantage_state,
        )
        latest = self.started.health.latest
        has_gradient = bool(latest) and bool(latest[-1].get("grad_norm"))
        if has_gradient and zero_moments(folder / run_folder.TRAINER):
            self.warn(
                "zero_moments",
                f"the optimiser's moments in {folder} are 0 after a step with a gradient: does"
                " another optimiser step than the one that is saved? --resume would begin anew",
            )
        run_folder.drop_old_checkpoints(
            self.path,
            self.config.keep_checkpoints,
            spared=(self.resumed_at, self.best_step),
            reset_interval=self.config.reference_reset_interval,
        )

    def finish(self, rule: str) -> None:
        """Write the final model, learning curve and summary, which says that evaluations were
        graded by the rule of that name."""
        # The last checkpoint is written: after an error here there is nothing more to save.
        self.is_under_way = False
        reproducibility = run_folder.reproducibility(self.path, self.config.setting)
        self.clock.begin("checkpoint")
        with atomic_folder(self.path / "final") as building, write_manifest(building):
            self.started.policy.save(building, self.started.tokenizer)
            write_card(building, self.path, reproducibility)
        self.clock.begin("")
        peak_bytes = {}
        if self.clock.meter:
            self.clock.meter.take()
            peak_bytes = self.clock.meter.run
        seconds_of_command = time.time() - current_command().began
        facts = {
            "seconds_beside_steps": seconds_of_command - self._step_seconds,
            "reproducibility": reproducibility,
            "peak_bytes": peak_bytes,
        }
        sampling = evaluation_words(self.config.arguments, rule)
        write_summary(self.path, sampling, self.console, facts)

    def save_when_stopped(self, stop: BaseException) -> None:
        """Save a checkpoint of the last finished step, if its weights are still there, and print
        the command that resumes the run. `stop` is the signal or error that ended the loop."""
        step = self.last_step
        try:
            if signals_are_deferred():
                # An update has begun, so the weights are those of no finished step.
                step = self._last_whole_step()
            elif step and not run_folder.checkpoint_folder(self.path, step).exists():
                self.save()
        except RunStopped:
            # `save` failed: a checkpoint needs the rollouts sampled ahead, and the sampler has
            # died.
            step = self._last_whole_step()
        self.say_how_to_go_on(step, stop)

    def say_how_to_go_on(self, step: int, stop: BaseException) -> None:
        """Print the command that resumes the run after `step`, as the last line that a signal
        leaves."""
        self._print(f"stopped after step {step} ({stop}); go on with: {self.resume_command}")
        if isinstance(stop, Interrupted):
            stop.is_reported = not self.console.quiet

    @property
    def is_unfinished(self) -> bool:
        """Whether the run has a folder, and no summary yet."""
        return self._path is not None and not (self._path / "summary.json").exists()

    def _last_whole_step(self) -> int:
        """The step that `resume` would go on from; 0: none."""
        interval = self.config.reference_reset_interval
        step, _ = run_folder.last_whole_step(self.path, interval)
        return step

    @property
    def resume_command(self) -> str:
        """The command that continues this run with the arguments of its args.json."""
        return f"uv run -m alignment.{self.config.command} --resume {shlex.quote(str(self.path))}"

    def warn(self, name: str, message: str) -> None:
        """Print a warning between two steps, which the record of the next step has, too."""
        self._print(f"warning: {message}", "yellow")
        self._broken[name] = message

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)


@contextmanager
def open_run(config: RunConfig, console: Console) -> Iterator[Run]:
    """Open a run, or resume one with --resume, and close all that it opened after the block.

    If the block ends by a signal, `RunStopped` or an error in the user's own code, a started run
    saves a checkpoint. A signal before it has started or while it finishes leaves the command that
    goes on, where there is a checkpoint. After a fault of the file system the error says which
    checkpoint is whole."""
    run = Run(config, console)
    with run.closing:
        try:
            if config.resume:
                run.resume()
            yield run
        except (Interrupted, RunStopped) as stop:
            if run.is_under_way:
                run.save_when_stopped(stop)
            elif run.last_step and run.is_unfinished and isinstance(stop, Interrupted):
                run.say_how_to_go_on(run.last_step, stop)
            raise
        except OSError as error:  # A full disk or another fault of the file system.
            if not run.is_under_way:
                raise
            kept = "it had no checkpoint yet"
            with suppress(UserError, OSError):
                step = run._last_whole_step()
                if step:
                    kept = f"its checkpoint of step {step} is whole"
            raise RunStopped(
                f"{in_words(error)}. The run {run.path} has stopped; {kept}; when that is mended:"
                f" {run.resume_command}"
            ) from None
        except (Exception, SystemExit) as error:
            failure = failure_of_users_code(error)
            if failure is None:
                raise
            if run.is_under_way:
                run.save_when_stopped(failure)
            raise failure from error


def refuse_other_arguments(path: Path, config: RunConfig) -> None:
    """Raise `UserError` if a run was started with other arguments than those of `config`."""
    record = read_json(path / "args.json")
    recorded = record.get("args")
    if not isinstance(recorded, dict):
        raise UserError(
            f"--resume: {path / 'args.json'} is damaged, so it does not say how the run was started"
        )
    # Through JSON and back, as those recorded were: tuples become lists.
    defaults = json.loads(json.dumps(dict(config.defaults)))
    now = json.loads(json.dumps(dict(config.arguments)))
    changed: list[str] = []
    # Settings that only the recorded loss, say, has.
    gone = [key for key in recorded if "." in key and key not in now]
    for key in (*now, *gone):
        if key in config.changeable:
            continue
        before = recorded.get(key, defaults.get(key))
        if was_auto(record, key):
            before = defaults.get(key)
        if before != now.get(key):
            changed.append(f"--{key} was {before!r}, now {now.get(key)!r}")
    if changed:
        raise UserError(f"--resume: {path} was started with other arguments: {'; '.join(changed)}")

"""From plans to samplers, and the samplers of a training run."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from rich.console import Console

from alignment.builders.policies import ranks_of
from alignment.builders.run_plan import EnginePlan, RunPlan
from alignment.model.loading import load_config, load_tokenizer
from alignment.policy.policy import Policy
from alignment.runs.run import Run
from alignment.sampling.opening import Opening, PolicyToCome
from alignment.sampling.pool import open_sampler
from alignment.sampling.sampler import (
    FIRST_PIECE,
    Sampler,
    Start,
    StoppableSampler,
    engine_name,
    find_engine,
)
from alignment.system.device_memory import release_memory
from alignment.system.remote import Machine


def make_sampler(
    plan: EnginePlan, tokenizer, policy: Policy | None = None, console: Console | None = None
) -> Sampler:
    """The sampler of a plan; it may read `policy` in place. If the engine takes long to open, the
    console shows what it is busy with."""
    engine = find_engine(plan.name)

    def open_with(start: Start) -> Sampler:
        return open_sampler(engine, replace(plan.config, start=start), tokenizer, policy)

    if console is None or not engine.claims_gpu:
        return open_with(Start())
    with ExitStack() as on_failure:
        opening = Opening(engine_title(plan.name), open_with)
        on_failure.callback(opening.close)
        sampler = opening.result(console)
        on_failure.pop_all()  # The engine is open, and the caller's to close.
    return sampler


def engine_title(sampler: str) -> str:
    """The name of --sampler's engine as it is written in a sentence."""
    name = engine_name(sampler)
    if name == "vllm":
        return "vLLM"
    return name


def stoppable(sampler: Sampler, device: str) -> StoppableSampler:
    """The same sampler, on a `device`, but when a signal arrives it returns what it has drawn."""
    device_type = "cuda"
    if device == "cpu":
        device_type = "cpu"
    return StoppableSampler(sampler, FIRST_PIECE[device_type])


class Engines:
    """The samplers of a run by their use, "evaluation" and "rollouts"; if the plan shares one
    sampler, it is "evaluation". Engines that claim a GPU in a process of their own start while the
    models load (`Opening`)."""

    def __init__(self, plan: RunPlan, run: Run, tokenizer):
        self.plan = plan
        self.run = run
        self.tokenizer = tokenizer
        self.openings: dict[str, Opening] = {}
        # The machines that rollouts are sampled on; None is this one.
        self._machines: Sequence[Machine | None] = (None,)
        self._policy_to_come = PolicyToCome(plan.roles.policy)
        self._policy: Policy | PolicyToCome = self._policy_to_come
        if not plan.engines_need_policy:
            self._begin()

    def _begin(self) -> None:
        """Start the processes of engines that take long to open. An engine that has its GPUs to
        itself may take their memory at once; the others wait for `open`."""
        # Imports, before any thread begins, what the threads would import at the same time.
        load_config(self.plan.base)
        for use, engine_plan in self.plan.engines.items():
            engine = find_engine(engine_plan.name)
            if not (engine.can_be_lost and engine.claims_gpu):
                continue
            title = engine_title(engine_plan.name)
            if not self.plan.shares_sampler:
                title = f"{title} ({use})"
            opening = Opening(title, partial(self._start, use))
            self.openings[use] = opening
            self.run.closing.callback(opening.close)
            devices = engine_plan.config.devices
            if "cpu" not in devices and self._devices_of_others(use).isdisjoint(devices):
                opening.allow()

    def _devices_of_others(self, use: str) -> set[str]:
        """The devices of the trainer's models, and of the sampler of the other use."""
        devices = set(self.plan.roles.trainer)
        for other, engine_plan in self.plan.engines.items():
            if other != use:
                devices.update(engine_plan.config.devices)
        return devices

    def use_policy(self, policy: Policy) -> None:
        """Give the engines the policy once it is loaded, and with it the machines of its ranks."""
        self._policy = policy
        self._policy_to_come.policy = policy
        if self.openings:  # They began without waiting for ranks, on this machine.
            return
        ranks = ranks_of(policy)
        if ranks is not None and not self.plan.rollouts.config.url:
            self._machines = (None, *ranks.machines)
        number = len(self._machines)
        if number > 1:
            devices = " ".join(self.plan.roles.sample)
            self.run.console.print(
                f"engines sample on {number} machines, each of which has {devices}"
            )

    def open(self, use: str) -> Sampler:
        """The open sampler of a use, "evaluation" or "rollouts". While this waits, the trainer must
        not allocate memory on the sampler's devices."""
        if use not in self.plan.engines:
            raise RuntimeError("the evaluations' sampler is the rollouts', too")
        if use not in self.openings:
            return self.run.open(self._start(use))
        release_memory()  # An engine refuses to start where less than its share of the GPU is free.
        return self.run.open(self.openings[use].result(self.run.console))

    def _start(self, use: str, start: Start | None = None) -> Sampler:
        """Open the sampler of a use. `start` says when its engines may take memory; by default at
        once."""
        plan = self.plan.engines[use]
        machines: Sequence[Machine | None] = (None,)
        if use == "rollouts" or self.plan.shares_sampler:
            machines = self._machines
        config = replace(
            plan.config,
            policy_version=self.run.last_step,
            machines=tuple(machines),
            start=start or Start(),
        )
        tokenizer = self.tokenizer
        if use == "rollouts":
            # The threads of the two uses must not share a tokenizer.
            tokenizer = load_tokenizer(self.plan.base)
        engine = find_engine(plan.name)
        return open_sampler(engine, config, tokenizer, self._policy, plan.in_process)

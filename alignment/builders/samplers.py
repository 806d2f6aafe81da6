"""From arguments to samplers, and the engines of a training run."""

from contextlib import ExitStack
from functools import partial

from rich.console import Console

from alignment.args import (
    Args,
    RLArgs,
)
from alignment.builders.checks import engines_on_shared_gpu, roles_of
from alignment.model.loading import (
    compute_dtype,
    load_config,
    load_tokenizer,
)
from alignment.planning.placement import engine_share
from alignment.policy.policy import POLICIES, Policy
from alignment.runs.run import (
    Run,
)
from alignment.sampling.opening import Opening, PolicyToCome
from alignment.sampling.pool import open_sampler
from alignment.sampling.sampler import (
    FIRST_PIECE,
    Sampler,
    SamplerConfig,
    SamplerEngine,
    Start,
    StoppableSampler,
    engine_name,
    find_engine,
)
from alignment.system.device_memory import release_memory
from alignment.system.torchrun import PROCESSES


def sampler_config(args: Args, base: str, devices: tuple[str, ...], **facts) -> SamplerConfig:
    """What a sampler on `devices` is started with. `facts` are further fields; `sleeps` holds on
    the policy's GPUs alone."""
    roles = roles_of(args)
    facts["sleeps"] = (
        facts.get("sleeps", False)
        and devices[0] != "cpu"
        and not set(devices).isdisjoint(roles.policy)
    )
    engines = engines_on_shared_gpu(args, roles)
    share = args.gpu_memory_utilization or min(
        engine_share(roles, device, engines) for device in devices
    )
    dtype, parallel = (
        compute_dtype(args.dtype, devices[0]),
        args.sampler_tensor_parallel if len(devices) > 1 else 1,
    )
    facts |= {
        "timeout": args.sampler_timeout,
        "memory_share": share,
        "further_devices": devices[1:],
    }
    return SamplerConfig(base, devices[0], dtype, tensor_parallel=parallel, **facts)


def make_sampler(
    args: Args,
    base: str,
    devices: tuple[str, ...],
    tokenizer,
    policy: Policy | None = None,
    console: Console | None = None,
) -> Sampler:
    """The sampler that --sampler names, with the weights of the folder `base`; it may read `policy`
    in place. One that takes long to open says on the console what is waited for."""
    engine = find_engine(args.sampler)

    def open_with(start: Start) -> Sampler:
        return open_sampler(
            engine, sampler_config(args, base, devices, start=start), tokenizer, policy
        )

    if console is None or not engine.claims_gpu:
        return open_with(Start())
    with ExitStack() as interrupted:
        opening = Opening(engine_title(args.sampler), open_with)
        interrupted.callback(opening.close)
        sampler = opening.result(console)
        interrupted.pop_all()
    return sampler


def engine_title(sampler: str) -> str:
    """The name of --sampler's engine in sentences."""
    name = engine_name(sampler)
    return "vLLM" if name == "vllm" else name


def stoppable(args: Args, sampler: Sampler) -> StoppableSampler:
    """The sampler, which gives what it has drawn where a signal arrives."""
    return StoppableSampler(sampler, FIRST_PIECE["cpu" if roles_of(args).eval == "cpu" else "cuda"])


class Engines:
    """A run's samplers: the evaluations', and the rollouts', which is the same one where they take
    turns on the same devices. An engine in a process of its own starts beside the loading of the
    models (`Opening`)."""

    def __init__(self, args: RLArgs, run: Run, base: str, tokenizer):
        self.args, self.run, self.base, self.tokenizer = args, run, base, tokenizer
        self.roles = roles_of(args)
        # rather than beside them, in processes of their own
        self.between_updates = args.rollouts == "sync"
        self.shared = (
            self.between_updates and self.roles.eval in self.roles.sample and not args.sampler_url
        )
        self.machines = (None,)
        self.coming = PolicyToCome(self.roles.policy)
        self.policy: Policy | PolicyToCome = self.coming
        self.openings: dict[str, Opening] = {}
        # else engines depend on the policy itself
        if not PROCESSES and args.policy_parallelism in (
            "auto",
            *POLICIES,
        ):
            self.begin()

    def begin(self) -> None:
        """Start the processes of engines that take long. Those on devices of nobody else's take
        memory at once."""
        load_config(self.base)  # imports what the threads would import, too
        uses = {"evaluation": self.evaluation_devices} | (
            {} if self.shared else {"rollouts": self.roles.sample}
        )
        for use, devices in uses.items():
            engine = self.engine(use)
            if not (engine.can_be_lost and engine.claims_gpu):
                continue
            title = engine_title(self.args.sampler) + ("" if self.shared else f" ({use})")
            opening = self.openings[use] = Opening(title, partial(self.start, use))
            self.run.closing.callback(opening.close)
            others = {*self.roles.policy, self.roles.reference}.union(
                *(uses[other] for other in uses if other != use)
            )
            if "cpu" not in devices and others.isdisjoint(devices):
                opening.allow()

    def use_policy(self, policy: Policy) -> None:
        """Say which policy has been loaded."""
        self.policy = self.coming.policy = policy
        if self.openings:
            return
        if hasattr(policy, "ranks") and not self.args.sampler_url:
            self.machines = (None, *policy.ranks.machines)
        if len(self.machines) > 1:
            where = (
                f"{len(self.machines)} machines, each of which has {' '.join(self.roles.sample)}"
            )
            self.run.console.print(f"engines sample on {where}")

    def open(self, use: str) -> Sampler:
        """The sampler of the "evaluation", or of the "rollouts". Call this when the trainer takes
        no memory of its devices."""
        if use == "rollouts" and self.shared:
            raise RuntimeError("the evaluations' sampler is the rollouts', too")
        if use not in self.openings:
            return self.run.open(self.start(use))
        release_memory()  # An engine refuses to start where less than its share of the GPU is free.
        return self.run.open(self.openings[use].result(self.run.console))

    def start(self, use: str, start: Start | None = None) -> Sampler:
        """Open the sampler of a use; engines go on when `start` lets them."""
        rollouts = use == "rollouts"
        facts = {
            "policy_version": self.run.last_step,
            "sleeps": self.between_updates if rollouts else True,
        }
        facts["machines"] = self.machines if rollouts or self.shared else (None,)
        if rollouts:
            facts |= {"url": self.args.sampler_url, "weights_folder": self.args.output_dir}
        if start is not None:
            facts["start"] = start
        config = sampler_config(
            self.args,
            self.base,
            self.roles.sample if rollouts else self.evaluation_devices,
            **facts,
        )
        # Tokenizers are not for two threads.
        tokenizer = load_tokenizer(self.base) if rollouts else self.tokenizer
        in_process = self.between_updates if rollouts else True
        return open_sampler(self.engine(use), config, tokenizer, self.policy, in_process)

    @property
    def evaluation_devices(self) -> tuple[str, ...]:
        return self.roles.sample if self.shared else (self.roles.eval,)

    def engine(self, use: str) -> SamplerEngine:
        return find_engine(
            "vllm_server" if use == "rollouts" and self.args.sampler_url else self.args.sampler
        )

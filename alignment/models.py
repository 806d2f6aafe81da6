"""From arguments to policies, samplers, evaluations and warm starts. Below these builders nothing
takes an arguments object."""

import dataclasses
import errno
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from alignment.args import (
    Args,
    RLArgs,
    SFTArgs,
    as_command,
    configuration,
    refuse_missing_warm_start,
)
from alignment.checks import (
    check_processes,
    check_sft,
    devices_of_ranks,
    engines_on_shared_gpu,
    resolve_model,
    roles_of,
)
from alignment.core.records import Endless, Group, Problem, SampledStep, SamplingConfig
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import prompted, trained_response, without_repeated_tag
from alignment.data.tasks import find_task
from alignment.evaluation.accuracy import Evaluation, Evaluator, evaluate_vllm
from alignment.policy.dropout import random_settings
from alignment.policy.frozen import FrozenModel, ReferenceProcess
from alignment.policy.loading import (
    check_token_ids,
    compute_dtype,
    load_config,
    load_tokenizer,
    make_deterministic,
)
from alignment.policy.memory import STATE_SHARE, release_memory, total_bytes
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.placement import (
    ModelShape,
    adapted_layers,
    empty_model,
    engine_share,
    partition_layers,
)
from alignment.policy.policy import POLICIES, RANKED, Policy, PolicyConfig, open_policy
from alignment.policy.saving import check_saving
from alignment.rewards.rules import find_rule
from alignment.rollouts.source import (
    AheadRollouts,
    RolloutSource,
    SyncRollouts,
    collate_groups,
    open_source,
)
from alignment.runs.run import (
    CHANGEABLE_ON_RESUME,
    Run,
    RunConfig,
    open_run,
    refuse_other_arguments,
)
from alignment.runs.run_folder import TRAINER, RunFolder, load_rollouts, resumed_run_name
from alignment.sampling.arrival import prove_adapters_arrive
from alignment.sampling.opening import Opening, PolicyToCome
from alignment.sampling.pool import open_sampler
from alignment.sampling.sampler import (
    FIRST_PIECE,
    OnResponseEnd,
    Sampler,
    SamplerConfig,
    SamplerEngine,
    Start,
    StoppableSampler,
    encode_prompts,
    engine_name,
    find_engine,
)
from alignment.system.errors import UserError
from alignment.system.files import (
    atomic_folder,
    lock_run_folder,
    manifested,
    read_jsonl,
    write_json,
)
from alignment.system.signals import deliver_signals
from alignment.system.terminal import count_parts, say_once
from alignment.system.torchrun import PROCESSES
from alignment.training.sft import Example, SFTConfig, SFTData, fine_tune, tokenise
from alignment.training.update import References, sampler_mismatch

PROBED = 8  # test problems that samplers are asked with random adapters


def make_policy(
    args: Args, base: str, checkpoint: Path | None = None, dropout: bool = False
) -> Policy:
    """The policy that is trained from the folder `base`, with or without the `dropout` of its
    config; with --lora_rank, with a checkpoint's adapters where one is given."""
    if args.lora_rank:
        # says at once where a target is none
        adapted_layers(empty_model(load_config(base)), args.lora_targets)
    devices, kind = kind_of_policy(args, base)
    facts = {
        "devices": devices,
        "dtype": compute_dtype(args.dtype, devices[0]),
        "checkpoint": str(checkpoint or ""),
    }
    return open_policy(
        kind, configuration(PolicyConfig, args, model_path=base, dropout=dropout, **facts)
    )


def kind_of_policy(
    args: Args, base: str, num_gpus: int | None = None, memory: float = 0.0, machines: int = 1
) -> tuple[tuple[str, ...], str]:
    """The policy's devices, and its kind where that is "auto". `num_gpus`, `memory` (bytes) and
    `machines` plan for others."""
    devices = roles_of(args, num_gpus).policy
    if (
        args.policy_parallelism in RANKED
        or args.policy_parallelism == "auto"
        and (args.policy_ranks or PROCESSES)
    ):
        devices = devices_of_ranks(args, devices)

    def fits_each() -> bool:
        if num_gpus is not None and not memory:
            raise UserError(
                "--policy_parallelism auto depends on the memory of a GPU: give --gpu_memory, or"
                " name a kind"
            )
        shape = ModelShape.from_config(load_config(base), args.lora_rank, args.lora_targets)
        state = shape.state_bytes(
            shape.parameters, OPTIMIZERS[getattr(args, "optimizer", "adamw")].device_bytes
        )
        smallest = memory or min(map(total_bytes, devices))
        return state <= STATE_SHARE * smallest / (1 if "cuda" in devices[0] else len(devices))

    kind = args.policy_parallelism
    if kind == "auto":
        alone = max(PROCESSES, machines * len(devices)) == 1
        kind = "single" if alone else "replicated" if fits_each() else "sharded"
    check_processes(args, kind)
    return devices, kind


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


def eval_sampling(args: Args, n: int = 1) -> SamplingConfig:
    """How evaluation samples are drawn. The same seed every time, so that two evaluations differ by
    their models alone."""
    sampling = (args.sampling_temperature, args.sampling_top_p, args.sampling_top_k)
    longest = getattr(args, "eval_max_new_tokens", 0) or args.max_new_tokens
    return SamplingConfig(n, *sampling, longest, find_task(args.task, args.data).stop, args.seed)


def evaluation(
    args: Args, tokenizer, n: int = 1
) -> tuple[Sequence[Problem], Callable[..., Evaluation]]:
    """The test problems with their prompts, and the evaluation of a sampler by `n` samples of each,
    graded by its rules. It takes a function to call with each response, and whether a signal shall
    keep what was sampled (`StoppableSampler`)."""
    task, sampling = find_task(args.task, args.data), eval_sampling(args, n)
    rule = find_rule(args.evaluation_rule, args.reward_timeout)
    problems = prompted(
        task.test_problems(args.dataset_path, args.max_problems),
        args.prompt or task.prompt,
        tokenizer,
    )

    def evaluate(sampler: Sampler, ended: OnResponseEnd = None, keep: bool = False) -> Evaluation:
        drawn_by = stoppable(args, sampler) if keep else sampler
        return evaluate_vllm(drawn_by, rule, problems, sampling, task.rules, ended)

    return problems, evaluate


def stoppable(args: Args, sampler: Sampler) -> StoppableSampler:
    """The sampler, which gives what it has drawn where a signal arrives."""
    return StoppableSampler(sampler, FIRST_PIECE["cpu" if roles_of(args).eval == "cpu" else "cuda"])


def partition_model_across_devices(args: Args, num_gpus: int | None = None) -> dict[str, str]:
    """The policy's `device_map` for `from_pretrained`, module -> device, balanced by bytes;
    `num_gpus`: of another machine."""
    config = load_config(resolve_model(args.model, args.output_dir))
    return partition_layers(ModelShape.from_config(config), roles_of(args, num_gpus).policy)


def run_sft(
    args: SFTArgs, demonstrations: Mapping[str, Sequence[tuple[Problem, str]]], console: Console
) -> Evaluation:
    """Fine-tune --model on `check_sft`'s demonstrations (`train_sft`); returns the evaluation on
    the test problems."""
    torch.manual_seed(args.seed)
    base = resolve_model(args.model, args.output_dir)
    tokenizer = load_tokenizer(base)
    check_saving(base, tokenizer)
    problems, evaluate = evaluation(args, tokenizer)
    encode_problems(problems, base, tokenizer, args.max_new_tokens)  # refuses long ones now
    splits = (
        encode_demonstrations(args, demonstrations[split], base, tokenizer)
        for split in ("train", "test")
    )
    target = train_sft(args, SFTData(*splits, pad_token_id(tokenizer)), base, tokenizer, console)
    sampler = make_sampler(args, str(target), (roles_of(args).eval,), tokenizer, console=console)
    with (
        closing(sampler),
        count_parts("sampling held-out problems", len(problems), console, "response") as ended,
    ):
        result = evaluate(sampler, ended, keep=True)
    with closing(RunFolder(target, args.num_steps, args.trackers)) as log:
        log.log_eval({"step": args.num_steps, **result.record}, result.groups)
    if "left_out" not in result.record:
        write_json(target / "summary.json", result.record)
    return result


def sft_run_config(args: SFTArgs, data: SFTData) -> RunConfig:
    """A new run's folder beside --sft_base, or an unfinished one of the same arguments and `data`
    that no process has."""
    target, digest = (
        Path(args.sft_base),
        hashlib.sha256(repr((data.train, data.validation)).encode()).hexdigest(),
    )
    config = configuration(
        RunConfig,
        args,
        command="sft",
        output_dir=str(target.parent),
        default_name=f"{target.name}_unfinished",
        run_name=args.run_name if args.resume else "",
        defaults={},
        arguments={**dataclasses.asdict(args), "sha256_of_the_tokens": digest},
        seeds={"all": args.seed},
        keep_checkpoints=1,
        max_bad_steps=0,
        max_grader_failures=0.0,
        changeable=CHANGEABLE_ON_RESUME - {"num_steps"},  # on which the learning rate depends
    )
    with suppress(UserError):
        folder = target.parent / resumed_run_name(
            config.output_dir, config.run_name, config.default_name
        )
        with lock_run_folder(folder):
            refuse_other_arguments(folder, config)
        return dataclasses.replace(config, resume=True)
    return config


def train_sft(args: SFTArgs, data: SFTData, base: str, tokenizer, console: Console) -> Path:
    """Fine-tune the model of the folder `base` in a run's folder, save it to --sft_base, and return
    that; the policy makes room for an evaluation's engine. Raises `UserError` where --sft_base
    appears meanwhile: nothing is ever overwritten."""
    target = Path(args.sft_base)
    with open_run(sft_run_config(args, data), console) as run:
        start, previous = base if args.lora_rank else str(run.checkpoint or base), 0
        policy = make_policy(args, start, run.checkpoint, dropout=True)
        if run.checkpoint:
            console.print(
                f"going on after step {run.step}, in {run.path}", markup=False, soft_wrap=True
            )
            policy.load_optimizer(run.checkpoint / TRAINER)
            previous = read_jsonl(run.path / "metrics.jsonl")[-1]["micro_batch_tokens"]
        longest = max(
            len(prompt) + len(response) for prompt, response in (*data.train, *data.validation)
        )
        if message := policy.choose_micro_batch_tokens(longest, previous):
            console.print(message)
        run.start(policy, tokenizer)
        fine_tune(policy, data, configuration(SFTConfig, args), run.finish_sft_step, run.step)
        try:
            with atomic_folder(target) as building:
                # arguments, metrics, the run in trackers
                for file in (
                    *run.path.glob("*.jsonl"),
                    *run.path.glob("*.json"),
                ):
                    shutil.copy(file, building)
                with manifested(building):
                    policy.save(building, tokenizer)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.exists():
                raise MadeMeanwhile(
                    f"--sft_base {target} was made by another command meanwhile; that one is kept"
                ) from None
            raise
        finally:
            if target.exists() and run.path != target:
                shutil.rmtree(run.path, ignore_errors=True)
    return target


def examples(
    args: SFTArgs, demonstrations: Sequence[tuple[Problem, str]], tokenizer, context: int
) -> list[Example]:
    """The demonstrations' prompts and responses as token ids. A tag that ends a prompt and begins
    its response is trained once, which is said."""
    problems, responses = zip(*demonstrations, strict=True)
    problems = prompted(problems, args.prompt or find_task(args.task, args.data).prompt, tokenizer)
    pairs = []
    repeated = 0
    for problem, response in zip(problems, responses, strict=True):
        trained = trained_response(problem, response, tokenizer)
        repeated += without_repeated_tag(problem.prompt, response) != response
        pairs.append((problem.prompt, trained))
    if repeated:
        number = f"{repeated} of {len(pairs)} demonstrations"
        repetition = "begin with the tag that their prompt ends with"
        say_once(f"{number} {repetition}: it is not trained again")
    return tokenise(pairs, tokenizer, context)


def encode_demonstrations(
    args: SFTArgs, demonstrations: Sequence[tuple[Problem, str]], base: str, tokenizer
) -> list[Example]:
    """The `examples` for the model `base`. Raises `UserError`, naming the demonstration, for a
    token without an embedding."""
    config = load_config(base)
    encoded = examples(args, demonstrations, tokenizer, config.max_position_embeddings)
    places = [problem.id for problem, _ in demonstrations]
    whole = [prompt + response for prompt, response in encoded]
    check_token_ids(tokenizer, config.vocab_size, zip(places, whole, strict=True))
    return encoded


def encode_problems(
    problems: Sequence[Problem], base: str, tokenizer, max_new_tokens: int
) -> list[list[int]]:
    """Token ids of the problems' prompts. Raises `UserError` as `encode_prompts` for the context of
    the model `base`, and, naming the problem, for a token without an embedding."""
    config = load_config(base)
    prompts = [problem.prompt for problem in problems]
    encoded = encode_prompts(tokenizer, prompts, config.max_position_embeddings, max_new_tokens)
    check_token_ids(
        tokenizer,
        config.vocab_size,
        zip([problem.id for problem in problems], encoded, strict=True),
    )
    return encoded


class MadeMeanwhile(UserError):
    """Another command has written --sft_base while this one was training."""


def warm_start(args: RLArgs, console: Console) -> str:
    """The folder or hub name of the model that training starts from, made by SFT where the preset
    says so."""
    if not args.sft_base:
        return resolve_model(args.model, args.output_dir)
    refuse_missing_warm_start(args)
    if not Path(args.sft_base).exists():
        console.print(f"{args.sft_base} is not there yet: warming up by SFT, once", markup=False)
        try:  # one warm start for every run, whatever seed and adapters the first one has
            sft_args = dataclasses.replace(
                as_command(SFTArgs, args), seed=RLArgs.seed, lora_rank=0, run_name=""
            )
            run_sft(sft_args, check_sft(sft_args), console)
            deliver_signals()
        except MadeMeanwhile:
            console.print(f"another command has made {args.sft_base} meanwhile", markup=False)
    console.print(f"starting from {args.sft_base}", markup=False)
    return resolve_model(args.sft_base, args.output_dir, "--sft_base")


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
            "policy_version": self.run.step,
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


def build(args: RLArgs, run: Run) -> tuple[Policy, SyncRollouts, References, Evaluator, int]:
    """The objects of the loop, and the padding token's id. `run.start` creates the folder last: a
    mistake leaves none."""
    with run.clock("warm_start"):
        base = str(run.checkpoint or warm_start(args, run.console))
    tokenizer = load_tokenizer(base)
    check_saving(base, tokenizer)
    if args.deterministic:
        make_deterministic()
    engines = Engines(args, run, base, load_tokenizer(base))
    problems, evaluate = evaluation(args, tokenizer)
    source = open_source(args.rollout_config, tokenizer)
    longest = longest_row(args, source, problems, base, tokenizer)
    # to which adapters are added
    start = warm_start(args, run.console) if run.checkpoint and args.lora_rank else base
    policy = make_policy(args, start, run.checkpoint)
    if run.checkpoint:
        policy.load_optimizer(run.checkpoint / TRAINER)
    threads, devices = torch.get_num_threads(), ", ".join(dict.fromkeys(policy.devices))
    place = devices.replace("cpu", f"{threads} CPU thread{'s' * (threads > 1)}")
    run.console.print(
        f"Computing in {str(policy.dtype).removeprefix('torch.')} on {place}", soft_wrap=True
    )
    say_what_is_off(policy, run.console)
    references = make_references(args, run, base, policy)
    engines.use_policy(policy)
    eval_sampler = engines.open("evaluation")
    previous = read_jsonl(run.path / "metrics.jsonl")[-1]["micro_batch_tokens"] if run.step else 0
    if message := policy.choose_micro_batch_tokens(longest, previous):
        run.console.print(message)
    sampler = eval_sampler if engines.shared else engines.open("rollouts")
    pad_id = pad_token_id(tokenizer)

    def check(groups: Sequence[Group]) -> None:
        """Compare the log-probs of an evaluation's own sampler with the trainer's."""
        rollout = collate_groups(groups, args.rollout_config, pad_id)
        sampler_mismatch(policy, rollout, args.sampling.distribution, args.max_sampler_mismatch)

    def request_reference(sampled: SampledStep) -> None:
        """Have a reference model in another process begin with a rollout as soon as it is
        sampled."""
        batch = collate_groups(sampled.groups, args.rollout_config, pad_id).batch
        references.request(sampled.step, batch, policy.micro_batch_tokens)

    if args.lora_rank:
        prompts = [problem.prompt for problem in problems[:PROBED]]
        for each in dict.fromkeys((eval_sampler, sampler)):
            run.console.print(
                prove_adapters_arrive(each, policy, prompts, args.sampling, pad_id), soft_wrap=True
            )
    rollouts = SyncRollouts(source, sampler, run.clock)
    if not engines.between_updates:
        sampled = load_rollouts(run.checkpoint) if run.checkpoint else []
        rollouts = AheadRollouts(
            source, sampler, args.schedule, run.clock, sampled, request_reference
        )
        run.closing.callback(rollouts.close)
    evaluator = Evaluator(
        evaluate, args.eval_interval, eval_sampler, run, policy, None if engines.shared else check
    )
    run.start(policy, tokenizer, rollouts)
    return policy, rollouts, references, evaluator, pad_id


def say_what_is_off(policy: Policy, console: Console) -> None:
    """Print which settings of the model's config RL leaves out: a policy computes in evaluation
    mode, as its sampler does."""
    if settings := ", ".join(
        f"{name} {value:g}" for name, value in random_settings(policy.config).items()
    ):
        reason = "with it log-probs would not be the sampler's"
        console.print(
            f"RL computes without the dropout of the model's config ({settings}): {reason}",
            soft_wrap=True,
        )


def longest_row(
    args: RLArgs, source: RolloutSource, problems: Sequence[Problem], base: str, tokenizer
) -> int:
    """Maximum tokens of a prompt and its response in an update. Raises `UserError` as
    `encode_problems`."""
    known = problems if isinstance(source.problems, Endless) else [*source.problems, *problems]
    longest_response = max(args.max_new_tokens, args.eval_max_new_tokens)
    return (
        max(map(len, encode_problems(known, base, tokenizer, longest_response)))
        + args.max_new_tokens
    )


def make_references(args: RLArgs, run: Run, base: str, policy: Policy) -> References:
    """The sources of old and reference log-probs. The reference model is the model that the run
    started from."""
    config, roles, old_policy = args.update_config, roles_of(args), None
    dtype = getattr(torch, compute_dtype(args.dtype, roles.policy[0]))
    # which share a pass
    if (
        args.copies_old_policy
        and roles.policy != (roles.reference,)
        and not hasattr(policy, "ranks")
    ):
        old_policy = FrozenModel(base, roles.reference, dtype)
    if args.loss.uses_ratio and config.old_log_probs == "ratio_one":
        run.console.print(
            "On-policy (one update per rollout): old log-probs are not needed, clipping has no"
            " effect"
        )
    references = partial(References, config, old_policy, clock=run.clock)
    if not args.beta:
        return references(None)
    if args.lora_rank:
        return references(lambda batch, distribution, _: policy.base_log_probs(batch, distribution))
    start = warm_start(args, run.console) if run.step else base
    if args.rollouts == "sync":
        return references(FrozenModel(start, roles.reference, dtype).log_probs)
    process = ReferenceProcess(
        start, roles.reference, dtype, args.deterministic, args.sampler_timeout
    )
    return references(run.open(process).log_probs, in_background=True)

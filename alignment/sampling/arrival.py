"""Proof that an engine holds the weights that it was sent: checksums of both sides, bit by bit,
after every transfer."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch

from alignment.core.records import Batch, Completion, SamplingConfig
from alignment.core.tokens import collate
from alignment.policy.policy import Policy
from alignment.sampling.sampler import Sampler, put_to_sleep
from alignment.system.errors import RunStopped
from alignment.system.terminal import say_once

COLUMNS = 8  # of each matrix, other ones for each version

# Of each of an engine's tensors, the names of the weights in it, and its checksum.
HeldWeights = Mapping[str, tuple[list[str], int]]
NamedTensors = Iterable[tuple[str, torch.Tensor]]
# Name of a weight -> its checksum and that of its transpose.
Checksums = Mapping[str, tuple[int, ...]]
# Name -> checksums that are computed where the tensors are, each of shape [].
Sums = dict[str, tuple[torch.Tensor, ...]]


class ProvenSampler(Sampler, Protocol):
    """A sampler that can prove which weights it holds."""

    dtype: torch.dtype  # In which it holds the weights.

    def weight_checksums(self, version: int) -> HeldWeights | None:
        """The `tensor_checksum` in `dtype` of each tensor that it holds; None if several workers
        hold parts."""


def checked_columns(width: int, version: int) -> list[int]:
    """The columns of a matrix `width` wide that the checksums of `version` cover."""
    return sorted(random.Random(f"{version} {width}").sample(range(width), min(COLUMNS, width)))


def checksum(tensor: torch.Tensor) -> int:
    """The sum of the squared bit patterns of a tensor's numbers, modulo 2^64. Neither the order of
    the numbers nor zeros change it, so an engine may stack matrices and pad them: the checksum of a
    stack is the sum of its parts'. -0 counts as 0."""
    return int(bit_sum(tensor).item())


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's `checksum` as a tensor [] on its device, so that a GPU does not wait until the
    number has been read."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return (tensor.detach() + 0.0).contiguous().view(integers).long().square().sum()


def read_sums(sums: Sums) -> dict[str, tuple[int, ...]]:
    """The numbers of `sums`, which come from each device in one copy."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for row in sums.values():
        for number in row:
            by_device.setdefault(number.device, []).append(number)
    copied = {device: iter(torch.stack(numbers).tolist()) for device, numbers in by_device.items()}
    read: dict[str, tuple[int, ...]] = {}
    for name, row in sums.items():
        # A device's numbers come back in the order in which they were put into its stack.
        read[name] = tuple(next(copied[number.device]) for number in row)
    return read


def checked_part(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The `checked_columns` of a weight, [..., columns]; the whole weight if it is a vector."""
    if tensor.ndim < 2:
        return tensor
    columns = checked_columns(tensor.shape[-1], version)
    # A column at a time: `index_select` would copy all of a transpose first, which takes longer
    # than its transfer.
    return torch.stack([tensor.detach()[..., column] for column in columns], -1)


def tensor_checksum(tensor: torch.Tensor, version: int, dtype: torch.dtype) -> int:
    """The checksum of a weight's `checked_part` cast to the engine's `dtype`, since some models
    keep routers in float32."""
    return int(tensor_sum(tensor, version, dtype).item())


def tensor_sum(tensor: torch.Tensor, version: int, dtype: torch.dtype) -> torch.Tensor:
    """The `tensor_checksum`, of shape [], on the tensor's device."""
    return bit_sum(checked_part(tensor, version).to(dtype))


def load_proven(sampler: Sampler, named_tensors: NamedTensors, version: int) -> None:
    """Give a sampler new weights. Raises `RunStopped` if it then holds others, where it is a
    `ProvenSampler`."""
    if not hasattr(sampler, "weight_checksums"):
        sampler.load_weights(named_tensors, version)
        return
    proven = cast(ProvenSampler, sampler)
    sent: Sums = {}
    proven.load_weights(with_checksums(named_tensors, proven.dtype, version, sent), version)
    if not sent:
        raise RunStopped(
            f"the sampler took none of the weights of step {version}. Nothing is sampled with the"
            " old ones"
        )
    held = proven.weight_checksums(version)
    if held is not None:
        compare(read_sums(sent), held, version)


def prove_adapters_arrive(
    sampler: Sampler,
    policy: Policy,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    pad_token_id: int,
) -> str:
    """Draw with random adapters, then restore the policy's. Returns a line on how log-probs moved.
    Raises `RunStopped` if they are not the trainer's."""
    sampling = replace(sampling, n=1, max_new_tokens=min(16, sampling.max_new_tokens))
    version = sampler.policy_version
    policy.use_adapters("random")
    load_proven(sampler, policy.weights(), version)
    drawn = [group[0] for group in sampler.sample(prompts, sampling)]
    # The sampler sleeps while the trainer computes; it gets the trained adapters afterwards.
    put_to_sleep(sampler, keep_weights=False)
    batch = collate([c.prompt_ids for c in drawn], [c.token_ids for c in drawn], pad_token_id)
    with_adapters_BT = policy.log_probs(batch, sampling.distribution)
    without_BT = policy.base_log_probs(batch, sampling.distribution)
    from_trainer = mean_distance(with_adapters_BT, batch, drawn)
    from_base = mean_distance(without_BT, batch, drawn)
    words = (
        f"with random ones its log-probs are {from_trainer:.2g} nats a token from the trainer's,"
        f" {from_base:.2g} from the base's"
    )
    if not from_trainer < from_base / 4:
        raise RunStopped(f"adapters do not reach the sampler: {words}. Nothing was trained")
    policy.use_adapters("trained")
    load_proven(sampler, policy.weights(), version)
    return f"adapters reach the sampler: {words}"


def mean_distance(
    log_probs_BT: torch.Tensor, batch: Batch, completions: Sequence[Completion]
) -> float:
    """The mean distance, in nats a token, of log-probs of a batch of completions from those that
    the completions carry."""
    drawn: list[float] = []
    for completion in completions:
        drawn += completion.log_probs
    return (log_probs_BT[batch.response_mask] - torch.tensor(drawn)).abs().mean().item()


def with_checksums(
    named_tensors: NamedTensors, dtype: torch.dtype, version: int, checksums: Sums
) -> NamedTensors:
    """Yield the same tensors, and enter the checksums in `dtype` of each and of its transpose in
    `checksums`. An engine may keep the transpose (vLLM does GPT-2's). So a square matrix wrongly
    transposed passes; the mismatch check of the next update sees it."""
    for name, tensor in named_tensors:
        transpose = tensor.mT if tensor.ndim > 1 else tensor
        checksums[name] = (
            tensor_sum(tensor, version, dtype),
            tensor_sum(transpose, version, dtype),
        )
        yield name, tensor


def compare(sent: Checksums, held: HeldWeights, version: int) -> None:
    """Raise `RunStopped` where an engine holds tensors that differ from those sent and their
    transposes, or were never sent."""
    never_sent: list[str] = []
    wrong: list[str] = []
    known_parts: set[str] = set()
    for name, (parts, number) in held.items():
        known_parts.update(parts)
        if not sent.keys() >= set(parts):
            never_sent.append(name)
        elif not any_sum_matches([sent[part] for part in parts], number):
            wrong.append(name)
    not_held = sorted(sent.keys() - known_parts)
    if never_sent and not_held:
        say_once(
            f"the sampler keeps {len(not_held)} of {len(sent)} weights, such as {not_held[0]},"
            " under names of its own: that they arrive is checked by --max_sampler_mismatch alone"
        )
    else:
        wrong += [*never_sent, *not_held]
    if wrong:
        raise RunStopped(
            f"after step {version} the sampler holds other weights than the trainer: {len(wrong)}"
            f" of {len(held)} tensors differ, such as {wrong[0]}. They did not arrive, or were"
            " applied twice. Nothing is sampled with them: resume the run, and start the server"
            " again where --sampler_url names one. If it stops here once more, the engine keeps"
            " this model's weights in another form: start a new run with --sampler transformers"
        )


def any_sum_matches(parts: Sequence[tuple[int, ...]], number: int) -> bool:
    """Whether `number` is the checksum of a stack of parts, all as they were sent or all
    transposed. Each part has the checksums of both; torch's sums wrap at 2^64."""
    return any((sum(sums) - number) % 2**64 == 0 for sums in zip(*parts, strict=True))

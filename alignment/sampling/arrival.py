"""Proof that an engine holds the weights that it was sent: after every transfer, checksums of the
bits that were sent are compared with checksums of the bits that the engine holds."""

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

COLUMNS = 8  # A checksum covers so many columns of a matrix, other ones for each version.

# Name of one of an engine's tensors -> the names of the weights that it stacks, and its checksum.
HeldWeights = Mapping[str, tuple[list[str], int]]
NamedTensors = Iterable[tuple[str, torch.Tensor]]
# Name of a weight -> its checksum and that of its transpose.
Checksums = Mapping[str, tuple[int, ...]]
# The same, where each checksum is a tensor of shape [] on the device of the weight.
DeviceChecksums = dict[str, tuple[torch.Tensor, ...]]


class ProvenSampler(Sampler, Protocol):
    """A sampler that can compute checksums of the weights that it holds."""

    dtype: torch.dtype  # That of the weights it holds, some of which may have another.

    def weight_checksums(self, version: int) -> HeldWeights | None:
        """The `weight_checksum` in `dtype` of each tensor that the sampler holds; None if its
        workers hold parts of tensors, whose checksums are unknown."""


def choose_columns(width: int, version: int) -> list[int]:
    """The numbers of the columns that the checksums of `version` cover, in a matrix with `width`
    columns. Both sides choose the same."""
    return sorted(random.Random(f"{version} {width}").sample(range(width), min(COLUMNS, width)))


def checksum(tensor: torch.Tensor) -> int:
    """The checksum of a tensor: the bits of each number, read as an integer, squared, and summed
    modulo 2^64; -0 counts as 0.

    The order of the numbers does not change it, nor do zeros. So an engine may pad matrices and
    stack them: the checksum of a stack is the sum of the checksums of its parts."""
    return int(checksum_on_device(tensor).item())


def checksum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The `checksum` as a tensor of shape [] on the tensor's own device. The caller may read it
    later, so that the transfer goes on while the GPU computes it."""
    integer_dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    without_negative_zeros = tensor.detach() + 0.0  # -0.0 + 0.0 is 0.0
    integers = without_negative_zeros.contiguous().view(integer_dtype).long()
    return integers.square().sum()


def read_checksums(checksums: DeviceChecksums) -> dict[str, tuple[int, ...]]:
    """Checksums as Python integers. One copy per device fetches all that are there."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for row in checksums.values():
        for number in row:
            by_device.setdefault(number.device, []).append(number)
    copied = {}
    for device, numbers in by_device.items():
        copied[device] = iter(torch.stack(numbers).tolist())
    read: dict[str, tuple[int, ...]] = {}
    for name, row in checksums.items():
        # A device's numbers come back in the order in which they were put into its stack.
        read[name] = tuple(next(copied[number.device]) for number in row)
    return read


def checked_part(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The part of a weight that its checksum covers: the columns that `choose_columns` returns,
    [..., columns], or the whole weight if it is a vector."""
    if tensor.ndim < 2:
        return tensor
    columns = choose_columns(tensor.shape[-1], version)
    # Columns are selected one by one. `index_select` would first make a contiguous copy of a whole
    # transpose, which takes longer than its transfer to the engine.
    return torch.stack([tensor.detach()[..., column] for column in columns], -1)


def weight_checksum(tensor: torch.Tensor, version: int, dtype: torch.dtype) -> int:
    """The checksum of a weight's `checked_part`, cast to the engine's `dtype`. Both sides cast,
    because some engines keep some weights, such as routers, in float32."""
    return int(weight_checksum_on_device(tensor, version, dtype).item())


def weight_checksum_on_device(
    tensor: torch.Tensor, version: int, dtype: torch.dtype
) -> torch.Tensor:
    """The `weight_checksum` as a tensor of shape [] on the weight's own device."""
    return checksum_on_device(checked_part(tensor, version).to(dtype))


def load_proven(sampler: Sampler, named_tensors: NamedTensors, version: int) -> None:
    """Give a sampler new weights. If it is a `ProvenSampler`, raises `RunStopped` if it then holds
    other weights."""
    if not hasattr(sampler, "weight_checksums"):
        sampler.load_weights(named_tensors, version)
        return
    proven = cast(ProvenSampler, sampler)
    sent: DeviceChecksums = {}  # `record_checksums` fills it as the sampler takes the tensors.
    proven.load_weights(record_checksums(named_tensors, proven.dtype, version, sent), version)
    if not sent:
        raise RunStopped(
            f"the sampler took none of the weights of step {version}. Nothing is sampled with the"
            " old ones"
        )
    held = proven.weight_checksums(version)
    if held is not None:
        compare_checksums(read_checksums(sent), held, version)


def prove_adapters_arrive(
    sampler: Sampler,
    policy: Policy,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    pad_token_id: int,
) -> str:
    """Sample a few tokens with random adapters, to prove that adapters reach the sampler; then give
    it the trained ones.

    Returns a line on how far the sampler's log-probs are from the trainer's with and without these
    adapters. Raises `RunStopped` if the former distance is not below a quarter of the latter."""
    sampling = replace(sampling, n=1, max_new_tokens=min(16, sampling.max_new_tokens))
    version = sampler.policy_version
    policy.use_adapters("random")
    load_proven(sampler, policy.weights(), version)
    completions = [group[0] for group in sampler.sample(prompts, sampling)]
    # The sampler frees its memory for the trainer. Its weights need not be kept, since it gets the
    # trained adapters afterwards.
    put_to_sleep(sampler, keep_weights=False)
    prompt_ids = [completion.prompt_ids for completion in completions]
    token_ids = [completion.token_ids for completion in completions]
    batch = collate(prompt_ids, token_ids, pad_token_id)
    with_adapters_BT = policy.log_probs(batch, sampling.distribution)
    without_adapters_BT = policy.base_log_probs(batch, sampling.distribution)
    from_trainer = mean_distance(with_adapters_BT, batch, completions)
    from_base = mean_distance(without_adapters_BT, batch, completions)
    distances = (
        f"with random ones its log-probs are {from_trainer:.2g} nats a token from the trainer's,"
        f" {from_base:.2g} from the base's"
    )
    if not from_trainer < from_base / 4:
        raise RunStopped(f"adapters do not reach the sampler: {distances}. Nothing was trained")
    policy.use_adapters("trained")
    load_proven(sampler, policy.weights(), version)
    return f"adapters reach the sampler: {distances}"


def mean_distance(
    log_probs_BT: torch.Tensor, batch: Batch, completions: Sequence[Completion]
) -> float:
    """The mean distance, in nats per token, between the trainer's log-probs of completions, which
    `batch` collates, and the sampler's, which the completions carry."""
    sampler_log_probs: list[float] = []
    for completion in completions:
        sampler_log_probs += completion.log_probs
    trainer_log_probs = log_probs_BT[batch.response_mask]
    return (trainer_log_probs - torch.tensor(sampler_log_probs)).abs().mean().item()


def record_checksums(
    named_tensors: NamedTensors, dtype: torch.dtype, version: int, checksums: DeviceChecksums
) -> NamedTensors:
    """Yield the given tensors one by one, and write into `checksums` those of each tensor and of
    its transpose, in `dtype`.

    An engine may keep the transpose of a weight, as vLLM does GPT-2's. A square matrix that it
    transposes by mistake therefore passes; the first update after it fails, because it compares the
    sampler's log-probs with the trainer's (--max_sampler_mismatch)."""
    for name, tensor in named_tensors:
        transpose = tensor.mT if tensor.ndim > 1 else tensor
        checksums[name] = (
            weight_checksum_on_device(tensor, version, dtype),
            weight_checksum_on_device(transpose, version, dtype),
        )
        yield name, tensor


def compare_checksums(sent: Checksums, held: HeldWeights, version: int) -> None:
    """Raise `RunStopped` if a tensor that an engine holds is neither what was sent nor its
    transpose, or if it was never sent, or if a weight that was sent is in no tensor."""
    never_sent: list[str] = []
    wrong: list[str] = []
    held_weights: set[str] = set()
    for tensor_name, (weights, held_checksum) in held.items():
        held_weights.update(weights)
        if not sent.keys() >= set(weights):
            never_sent.append(tensor_name)
        elif not matches_stack([sent[weight] for weight in weights], held_checksum):
            wrong.append(tensor_name)
    not_held = sorted(sent.keys() - held_weights)
    # Both at once: the engine has the weights, under other names than they were sent with.
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


def matches_stack(weights: Sequence[tuple[int, ...]], held_checksum: int) -> bool:
    """Whether a checksum is that of a stack of weights, all as they were sent or all transposed.
    Each weight is given by two checksums, its own and that of its transpose."""
    as_sent_and_transposed = zip(*weights, strict=True)
    # Checksums are equal modulo 2^64, where torch's integers wrap.
    return any((sum(parts) - held_checksum) % 2**64 == 0 for parts in as_sent_and_transposed)

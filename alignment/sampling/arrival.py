"""Proof that an engine holds the weights that it was sent: checksums of both sides, bit by bit,
after every transfer."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from alignment.core.records import SamplingConfig
from alignment.core.tokens import collate
from alignment.policy.policy import Policy
from alignment.sampling.sampler import Sampler, put_to_sleep
from alignment.system.errors import RunStopped
from alignment.system.terminal import say_once

COLUMNS = 8  # of each matrix, other ones for each version

# Of each of an engine's tensors, the names of the weights in it, and its checksum.
Held = Mapping[str, tuple[list[str], int]]
NamedTensors = Iterable[tuple[str, torch.Tensor]]
# Name of a weight -> its checksum and that of its transpose.
Checksums = dict[str, tuple[int, int]]
# Name -> checksums that are computed where the tensors are, each of shape [].
Sums = dict[str, tuple[torch.Tensor, ...]]


def checked_columns(width: int, version: int) -> list[int]:
    """The columns of a matrix `width` wide that the checksums of `version` cover."""
    return sorted(random.Random(f"{version} {width}").sample(range(width), min(COLUMNS, width)))


def checksum(tensor: torch.Tensor) -> int:
    """The sum of the squared bit patterns of a tensor's numbers, modulo 2^64. Neither the order of
    the numbers nor zeros change it, so an engine may stack matrices and pad them: the checksum of a
    stack is the sum of its parts'. -0 counts as 0."""
    return bit_sum(tensor).item()


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's `checksum` as a tensor [] on its device, so that a GPU does not wait until the
    number has been read."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return (tensor.detach() + 0.0).contiguous().view(integers).long().square().sum()


def read_sums(sums: Sums) -> dict[str, tuple[int, ...]]:
    """The numbers, which come from each device in one copy."""
    flat = [each for row in sums.values() for each in row]
    numbers: dict[int, int] = {}
    for device in {each.device for each in flat}:
        places = [place for place, each in enumerate(flat) if each.device == device]
        numbers |= zip(places, torch.stack([flat[place] for place in places]).tolist(), strict=True)
    ordered = iter([numbers[place] for place in range(len(flat))])
    return {name: tuple(next(ordered) for _ in row) for name, row in sums.items()}


def checked_part(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The `checked_columns` of a weight, [..., columns]; the whole weight if it is a vector."""
    if tensor.ndim < 2:
        return tensor
    # A column at a time: `index_select` would copy all of a transpose first, which takes longer
    # than its transfer.
    return torch.stack(
        [tensor.detach()[..., column] for column in checked_columns(tensor.shape[-1], version)], -1
    )


def tensor_checksum(tensor: torch.Tensor, version: int, dtype: torch.dtype) -> int:
    """The checksum of a weight's `checked_part` cast to the engine's `dtype`, since some models
    keep routers in float32."""
    return tensor_sum(tensor, version, dtype).item()


def tensor_sum(tensor: torch.Tensor, version: int, dtype: torch.dtype) -> torch.Tensor:
    """The `tensor_checksum`, of shape [], on the tensor's device."""
    return bit_sum(checked_part(tensor, version).to(dtype))


def load_proven(sampler: Sampler, named_tensors: NamedTensors, version: int) -> None:
    """Give a sampler new weights. Raises `RunStopped` if it then holds others: a sampler may have
    `weight_checksums(version) -> Held | None`, the `tensor_checksum` in its `dtype` of what it
    holds, or None if several workers hold parts."""
    if not hasattr(sampler, "weight_checksums"):
        sampler.load_weights(named_tensors, version)
        return
    sent: Sums = {}
    sampler.load_weights(with_checksums(named_tensors, sampler.dtype, version, sent), version)
    if not sent:
        raise RunStopped(
            f"the sampler took none of the weights of step {version}. Nothing is sampled with the"
            " old ones"
        )
    if (held := sampler.weight_checksums(version)) is not None:
        compare(read_sums(sent), held, version)


def prove_adapters_arrive(
    sampler: Sampler,
    policy: Policy,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    pad_token_id: int,
) -> str:
    """Draw with random adapters, then restore the policy's; says how log-probs moved. `RunStopped`
    if not as the trainer's."""
    sampling, version = (
        replace(sampling, n=1, max_new_tokens=min(16, sampling.max_new_tokens)),
        sampler.policy_version,
    )
    policy.use_adapters("random")
    load_proven(sampler, policy.weights(), version)
    drawn = [completion for (completion,) in sampler.sample(prompts, sampling)]
    # while the trainer computes; the trained adapters follow
    put_to_sleep(sampler, keep_weights=False)
    batch = collate([c.prompt_ids for c in drawn], [c.token_ids for c in drawn], pad_token_id)
    drawn_N = torch.tensor([log_prob for completion in drawn for log_prob in completion.log_probs])
    trainers = (
        policy.log_probs(batch, sampling.distribution),
        policy.base_log_probs(batch, sampling.distribution),
    )
    away, moved = (
        (log_probs_BT[batch.response_mask] - drawn_N).abs().mean().item()
        for log_probs_BT in trainers
    )
    words = (
        f"with random ones its log-probs are {away:.2g} nats a token from the trainer's,"
        f" {moved:.2g} from the base's"
    )
    if not away < moved / 4:
        raise RunStopped(f"adapters do not reach the sampler: {words}. Nothing was trained")
    policy.use_adapters("trained")
    load_proven(sampler, policy.weights(), version)
    return f"adapters reach the sampler: {words}"


def with_checksums(
    named_tensors: NamedTensors, dtype: torch.dtype, version: int, checksums: Sums
) -> NamedTensors:
    """The same tensors. Enters the checksums in `dtype` of each and of its transpose, as which an
    engine may keep it (vLLM does GPT-2's), in `checksums`. So a square matrix wrongly transposed
    passes; the mismatch check of the next update sees it."""
    for name, tensor in named_tensors:
        transpose = tensor.mT if tensor.ndim > 1 else tensor
        checksums[name] = tensor_sum(tensor, version, dtype), tensor_sum(transpose, version, dtype)
        yield name, tensor


def compare(sent: Checksums, held: Held, version: int) -> None:
    """Raise `RunStopped` where an engine holds tensors that differ from those sent and their
    transposes, or were never sent."""
    unsent = [name for name, (parts, _) in held.items() if not sent.keys() >= set(parts)]
    unheld = sent.keys() - {part for parts, _ in held.values() for part in parts}
    known = {name: parts for name, (parts, _) in held.items() if name not in unsent}
    totals = {
        name: [sum(sums) for sums in zip(*map(sent.get, parts), strict=True)]
        for name, parts in known.items()
    }
    # torch's sums wrap
    wrong = [
        name for name in known if all((total - held[name][1]) % 2**64 for total in totals[name])
    ]
    if unsent and unheld:
        say_once(
            f"the sampler keeps {len(unheld)} of {len(sent)} weights, such as {min(unheld)}, under"
            " names of its own: that they arrive is checked by --max_sampler_mismatch alone"
        )
    elif unsent or unheld:
        wrong += [*unsent, *sorted(unheld)]
    if wrong:
        raise RunStopped(
            f"after step {version} the sampler holds other weights than the trainer: {len(wrong)}"
            f" of {len(held)} tensors differ, such as {wrong[0]}. They did not arrive, or were"
            " applied twice. Nothing is sampled with them: resume the run, and start the server"
            " again where --sampler_url names one. If it stops here once more, the engine keeps"
            " this model's weights in another form: start a new run with --sampler transformers"
        )

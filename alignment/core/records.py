"""The data that flows through the loop, frozen: Problem -> Completion -> Group -> Batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

# What a reward function returns: {"reward", "format_reward", "answer_reward"}, each in [0, 1].
Score = dict[str, float]


@dataclass(frozen=True)
class Problem:
    """One verifiable question.

    `prompt` is the whole text that the policy continues; of a chat, its template makes it of the
    (role, text) `turns`, the last of which may begin the response. `columns` are those of the
    user's own row.
    """

    id: str
    question: str
    prompt: str
    ground_truth: str
    turns: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    columns: dict[str, object] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Endless:
    """An endless sequence of problems.

    `make(index)` returns the problem of that index, the same one every time.
    """

    make: Callable[[int], Problem]

    def __getitem__(self, index: int) -> Problem:
        return self.make(index)


Problems = Sequence[Problem] | Endless


@dataclass(frozen=True)
class Distribution:
    """softmax(logits / temperature), within the `top_k` most likely tokens (0: all) and, of these,
    the nucleus that reaches `top_p`.

    The sampler and both sides of every ratio take log-probs under the same one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class SamplingConfig:
    """How to draw completions: `n` for each prompt, each ending at EOS, at the first `stop` string,
    or by length."""

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ("</answer>",)
    seed: int = 0
    first_prompt: int = 0
    """The first prompt's number: `seed` and its number give a prompt's random numbers."""

    @property
    def distribution(self) -> Distribution:
        return Distribution(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    `token_ids` hold every sampled token, the stop string's and EOS included: train on them, never
    on re-tokenised `text`, which rules see (`core.text.ResponseReader`). `log_probs` are nats under
    the distribution they were drawn from, with temperature, top-k and top-p.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    policy_version: int


@dataclass(frozen=True)
class Group:
    """The completions of one problem and their scores, in the same order."""

    problem: Problem
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]


def flatten_completions(groups: Iterable[Group]) -> list[Completion]:
    """The completions of all groups, one group after another."""
    return list(chain.from_iterable(group.completions for group in groups))


def flatten_scores(groups: Iterable[Group]) -> list[Score]:
    """The scores of all completions of all groups, one group after another."""
    return list(chain.from_iterable(group.scores for group in groups))


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences, shifted: `labels[b, t]` follows `input_ids[b, t]`.

    Both are int64 [batch, sequence]. `response_mask`, bool [batch, sequence], is true where the
    label is a response token. With padding on the right, causal attention needs no mask.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    response_mask: torch.Tensor


@dataclass(frozen=True)
class SampledStep:
    """The groups of one step, the version of the weights that sampled them, what is logged of them,
    and seconds by phase."""

    step: int
    policy_version: int
    groups: list[Group]
    report: dict[str, float]
    seconds: dict[str, float]
    # Of the step's first request, in order; refills depend on the answers.
    problem_ids: tuple[str, ...] = ()
    seed: int = 0  # Of that request's samples.
    warnings: dict[str, str] = field(default_factory=dict)
    """Of what must hold of samples: name -> message."""

    @property
    def staleness(self) -> int:
        """Steps between the weights that sampled it and those that it trains."""
        return self.step - 1 - self.policy_version


@dataclass(frozen=True)
class Rollout:
    """One step's B responses, ready to train on.

    `raw_rewards_B1` include overlong penalties; only `counted_B1` ones train.
    """

    batch: Batch
    raw_rewards_B1: torch.Tensor
    counted_B1: torch.Tensor
    sampler_log_probs_BT: torch.Tensor
    advantages_B1: torch.Tensor | None = None
    old_log_probs_BT: torch.Tensor | None = None
    reference_log_probs_BT: torch.Tensor | None = None
    problems: tuple[str, ...] = ()
    """The key of each response's problem: equal keys ask the same question."""
    advantage_state: object = None
    """The state of the estimator after it gave the advantages."""
    # Of the tokens of the next update, those that --token_selection selects, and their share.
    selected_BT: torch.Tensor | None = None
    selected_share: float = 1.0
    teacher_log_probs_BT: torch.Tensor | None = None
    token_advantages_BT: torch.Tensor | None = None
    """With a teacher, the advantages of single tokens, which take the place of `advantages_B1`."""

    @property
    def advantages(self) -> torch.Tensor | None:
        """What a loss takes for advantages: [B, 1], or with a teacher [B, T]."""
        if self.token_advantages_BT is not None:
            return self.token_advantages_BT
        return self.advantages_B1

    @property
    def student_log_probs_BT(self) -> torch.Tensor:
        """The log-probs of the policy that a teacher's are compared with: the old policy's where
        they are known, otherwise the sampler's."""
        if self.old_log_probs_BT is not None:
            return self.old_log_probs_BT
        return self.sampler_log_probs_BT

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each row."""
        return self.batch.response_mask.sum(dim=1).tolist()

    @property
    def trained_rows(self) -> list[int]:
        """The rows that updates are made from."""
        return self.counted_B1.squeeze(1).nonzero().squeeze(1).tolist()

    def response_values(
        self, values_BT: torch.Tensor, rows: Iterable[int]
    ) -> Iterator[list[float]]:
        """Each row's values at its response tokens; none for rows that are not among `rows`."""
        chosen = set(rows)
        masked = zip(values_BT, self.batch.response_mask, strict=True)
        for row, (values, mask) in enumerate(masked):
            if row in chosen:
                yield values[mask].tolist()
            else:
                yield []

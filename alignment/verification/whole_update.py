"""The weights and the optimiser's moments after whole rollouts' updates, as the papers have them,
in float64 on the CPU, one row at a time, by transformers' own model: an oracle for `update`.

Nothing here imports any of the code that trains. Rollouts are plain data; a `setting` maps the name
of a flag to its value. What transformers' own layers compute in float32 (norms, the softmax of
attention, the angles of positions) stays so, which is about 1e-7 of a value."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from alignment.verification.paper_advantages import paper_advantages_of_groups
from alignment.verification.paper_distillation import paper_token_advantages_of_row
from alignment.verification.papers import (
    PaperLogProbs,
    PaperPart,
    PaperSlopes,
    is_near_edge,
    paper_parts,
    paper_slopes,
)

Weights = Mapping[str, torch.Tensor]
Moments = Mapping[str, Mapping[str, torch.Tensor]]
"""Trained tensor -> name of the moment -> the moment."""

# Muon's (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
MUON_MOMENTUM = 0.95
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON_ITERATIONS = 5
MUON_SCALE = 0.2  # Liu et al. 2025, arXiv:2502.16982, section 2.2
# What torch adds to the norm that it divides by.
NORM_EPSILON = 1e-6
EDGE = 1e-5  # nats, that a float32 log-prob may be off
ROUNDING = 2.0**-24  # of float32, as a share of a number, at most
# The share of the peak that a falling schedule ends at.
LAST_SHARE = 0.1
# The losses without a ratio to an old policy.
WITHOUT_RATIO = ("no_baseline", "reinforce_with_baseline")


def takes_samplers_log_probs(setting: Mapping[str, Any]) -> bool:
    """Whether the ratio is to the sampler's log-probs: where a flag says so, and where the
    sampler's weights are stale."""
    is_stale = setting["rollouts"] == "async" and setting["max_staleness"] != 0
    is_sampler = setting["old_log_probs"] == "sampler" or is_stale
    return is_sampler and setting["loss"] not in WITHOUT_RATIO


@dataclass(frozen=True)
class PlainResponse:
    """One sampled response: the token ids of its prompt and its own, its reward, whether it is
    trained on, and the sampler's log-prob of each of its tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    reward: float
    counts: bool
    sampler_log_probs: tuple[float, ...]


@dataclass(frozen=True)
class PlainRollout:
    """The responses of one step, group after group, and the rows of each optimiser update."""

    responses: Sequence[PlainResponse]
    mini_batches: Sequence[Sequence[int]]


@dataclass(frozen=True)
class TrainedState:
    """What is trained, by name, and the optimiser's moments, after so many of its steps."""

    weights: Weights
    moments: Moments
    steps: int


@dataclass(frozen=True)
class Outcome:
    """The state after all updates, and the first update's gradient before the clip, by name."""

    state: TrainedState
    first_gradient: Weights
    is_near_edge: bool
    """Whether rounding may have decided on which side of a clip's bound a ratio was."""


@dataclass(frozen=True)
class TokenValues:
    """The log-prob of each token of a response, and the entropy there before top-k and top-p, and
    after them without its graph, [T], in nats."""

    log_probs: torch.Tensor
    entropies: torch.Tensor
    truncated_entropies: torch.Tensor

    def as_rows(self) -> tuple[list[float], list[float]]:
        return self.log_probs.tolist(), self.entropies.tolist()


class PlainModel:
    """transformers' own model of a folder, on the CPU. `adapted` names the weights that have
    adapters; its other weights stay as they were loaded."""

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float64):
        self.dtype = dtype
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        self.model = loaded.eval()
        self.base = {name: tensor.detach() for name, tensor in loaded.named_parameters()}

    def weights_of(self, trained: Weights, setting: Mapping) -> dict[str, torch.Tensor]:
        """The weights by name that `trained` gives: themselves, or with adapters W + alpha / rank *
        B A (Hu et al. 2021, arXiv:2106.09685, section 4.1)."""
        if not setting["lora_rank"]:
            return dict(trained)
        weights = dict(self.base)
        scale = setting["lora_alpha"] / setting["lora_rank"]
        for name in self.base:
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" not in trained:
                continue
            product = trained[f"{layer}.lora_B.weight"] @ trained[f"{layer}.lora_A.weight"]
            if isinstance(self.model.get_submodule(layer), Conv1D):
                product = product.T
            weights[name] = weights[name] + scale * product
        return weights

    def in_order(self, names: Mapping[str, object]) -> list[str]:
        """The names of trained tensors, in the model's order; each layer's A before its B."""
        if set(names) <= set(self.base):
            return [name for name in self.base if name in names]
        ordered = []
        for name in self.base:
            layer = name.removesuffix(".weight")
            pair = (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight")
            ordered += [adapter for adapter in pair if adapter in names]
        return ordered

    def in_order_of_optimizer(self, weights: Weights) -> list[str]:
        """The names of trained tensors as an optimiser numbers them: matrices, then vectors."""
        ordered = self.in_order(weights)
        decayed = [name for name in ordered if is_decayed(name, weights[name])]
        return decayed + [name for name in ordered if name not in decayed]

    def hidden_matrices(self, weights: Weights) -> set[str]:
        """The names of matrices that are neither an embedding nor the output head."""
        outside = {self.model.get_output_embeddings()}
        outside |= {m for m in self.model.modules() if isinstance(m, torch.nn.Embedding)}
        names_outside = set()
        for module_name, module in self.model.named_modules():
            if module in outside:
                names_outside.add(f"{module_name}.weight")
        matrices = set()
        for name, tensor in weights.items():
            if tensor.ndim == 2 and is_decayed(name, tensor):
                matrices.add(name)
        return matrices - names_outside

    def linear_layers(self, targets: str) -> set[str]:
        """The names of linear layers, but the output head: those whose last names `targets` lists,
        with commas between; all where it is empty."""
        wanted = [target for target in targets.split(",") if target]
        names = set()
        for name, module in self.model.named_modules():
            is_linear = isinstance(module, torch.nn.Linear | Conv1D)
            is_target = not wanted or name.rpartition(".")[2] in wanted
            if is_linear and is_target and module is not self.model.get_output_embeddings():
                names.add(name)
        return names

    def token_values(
        self, weights: Weights, response: PlainResponse, setting: Mapping
    ) -> TokenValues:
        """The values of a response under these weights, with their graph where weights need one."""
        ids = torch.tensor([[*response.prompt, *response.tokens]])
        inputs = {"input_ids": ids, "use_cache": False}
        logits = functional_call(self.model, dict(weights), (), inputs).logits[0]
        logits_TV = logits[len(response.prompt) - 1 : -1].to(self.dtype)
        return values_of_logits(logits_TV, torch.tensor(response.tokens), setting)


def is_decayed(name: str, tensor: torch.Tensor) -> bool:
    """Whether weight decay is of a tensor: of matrices, and of a mixture's stacks of them. Biases
    are vectors, though a mixture stacks its experts' to a tensor of two axes; and Mamba's A is one
    vector a channel (Gu & Dao 2023, arXiv:2312.00752, algorithm 1)."""
    is_vector = re.search(r"(^|\.)(\w+_)?bias$|(^|\.)A_log$", name) is not None
    return tensor.ndim > 1 and not is_vector


def values_of_logits(
    logits_TV: torch.Tensor, tokens_T: torch.Tensor, setting: Mapping
) -> TokenValues:
    """The log-prob of each token under softmax(logits / temperature), within what top-k and top-p
    leave of it unless --log_probs_of is full, and the entropy before they do."""
    tempered_TV = logits_TV / setting["sampling_temperature"]
    kept_TV = torch.ones_like(tempered_TV, dtype=torch.bool)
    if setting["log_probs_of"] == "sampled":
        kept_TV = kept_tokens(tempered_TV.detach(), setting)
        kept_TV.scatter_(1, tokens_T[:, None], True)  # What was sampled was among them.
    truncated_TV = tempered_TV.masked_fill(~kept_TV, -torch.inf).log_softmax(dim=-1)
    log_probs_T = truncated_TV.gather(1, tokens_T[:, None])[:, 0]
    all_TV = tempered_TV.log_softmax(dim=-1)
    truncated_T = torch.special.entr(truncated_TV.detach().exp()).sum(dim=-1)
    return TokenValues(log_probs_T, -(all_TV.exp() * all_TV).sum(dim=-1), truncated_T)


def kept_tokens(logits_TV: torch.Tensor, setting: Mapping) -> torch.Tensor:
    """Whether each token [T, V] is among the top-k and, of these, in the smallest set of the most
    likely ones whose probability reaches top-p (Holtzman et al. 2020, arXiv:1904.09751)."""
    vocabulary = logits_TV.shape[-1]
    top_k = setting["sampling_top_k"] or vocabulary
    ordered, order = logits_TV.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = -torch.inf
    kept = ~ordered.isinf()
    if setting["sampling_top_p"] < 1:  # Of all, none is left out because a sum was rounded up.
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        kept &= before < setting["sampling_top_p"]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter(1, order, kept)


@dataclass(frozen=True)
class UpdateFigures:
    """What one update was computed from."""

    rate: float
    norm: float
    """Of the gradient, before the clip."""
    entropy_coefficient: float
    parts: Mapping[int, PaperPart]
    """Row -> its part of the loss."""
    truncated_entropies: Mapping[int, list[float]]
    """Row -> the entropy at each token, after top-k and top-p."""


@dataclass
class Learner:
    """A model in training: the trained weights and their moments, which updates change."""

    model: PlainModel
    setting: Mapping
    weights: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    steps: int
    teacher: PlainModel | None = None
    entropy_coefficient: float = 0.0
    """That of the next update."""
    averages: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Prompt -> the moving average of its groups' mean rewards (`problem_average`)."""
    updates: int = 0
    """Of the run, so far."""
    first_gradient: dict[str, torch.Tensor] = field(default_factory=dict)
    is_near_edge: bool = False
    reference: Weights | None = None
    """The weights of the reference; None: those that the model was loaded with."""
    figures: list[UpdateFigures] = field(default_factory=list)
    """Of the updates of the last rollout."""
    teacher_kl: float = 0.0
    """The mean over the last rollout's tokens of log pi_student - log pi_teacher."""

    @property
    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The present weights, with what adapters add to them."""
        weights = self.model.weights_of(self.weights, self.setting)
        return {name: tensor.detach() for name, tensor in weights.items()}

    def train_on(self, rollout: PlainRollout) -> None:
        """Make a rollout's updates."""
        self.figures = []
        advantages = self.advantages_of(rollout.responses)
        trained = sorted({row for rows in rollout.mini_batches for row in rows})
        old = self._old_log_probs(rollout, trained)
        reference = dict.fromkeys(trained)
        if self.setting["beta"]:
            reference = self._log_probs_by(self.model, rollout, trained, self.reference)
        token_advantages = self._token_advantages(rollout, trained, advantages, old)
        for rows in rollout.mini_batches:
            parts = StepInputs(rollout.responses, rows, token_advantages, old, reference)
            self._update(parts)

    def advantages_of(self, responses: Sequence[PlainResponse]) -> dict[int, float]:
        """The advantage of each row that counts, from the counted rows of its group."""
        size = self.setting["group_size"]
        if size == 1 and self.setting["loss"] == "no_baseline":
            return dict.fromkeys(range(len(responses)), 0.0)  # One response has no baseline.
        members = []
        for start in range(0, len(responses), size):
            rows = [row for row in range(start, start + size) if responses[row].counts]
            members.append(rows)
        rewards = [[responses[row].reward for row in rows] for rows in members]
        lengths = [[len(responses[row].tokens) for row in rows] for rows in members]
        of_groups = paper_advantages_of_groups(self.setting, rewards, lengths)
        advantages = {}
        for rows, values in zip(members, of_groups, strict=True):
            advantages |= dict(zip(rows, values, strict=True))
        if self.setting["advantage"] == "problem_average":
            return self._advantages_by_average(responses, members)
        return advantages

    def _advantages_by_average(
        self, responses: Sequence[PlainResponse], members: Sequence[Sequence[int]]
    ) -> dict[int, float]:
        """Rewards less the problem's moving average of earlier steps, or where there is none less
        the group's mean (Williams 1992, section 5)."""
        decay = self.setting["advantage.decay"]
        before = dict(self.averages)
        advantages = {}
        for rows in filter(None, members):
            mean = sum(responses[row].reward for row in rows) / len(rows)
            prompt = responses[rows[0]].prompt
            for row in rows:
                advantages[row] = responses[row].reward - before.get(prompt, mean)
            average = self.averages.get(prompt, mean)
            self.averages[prompt] = decay * average + (1 - decay) * mean
        return advantages

    def _old_log_probs(
        self, rollout: PlainRollout, rows: Sequence[int]
    ) -> dict[int, list[float] | None]:
        """The log-probs of the old policy, the one before the rollout's first update, or the
        sampler's. None where it has one update: the old policy is the current one."""
        if takes_samplers_log_probs(self.setting):
            return {row: list(rollout.responses[row].sampler_log_probs) for row in rows}
        if len(rollout.mini_batches) == 1:
            return dict.fromkeys(rows)
        return self._log_probs_by(self.model, rollout, rows, self.whole_weights)

    def _log_probs_by(
        self,
        model: PlainModel,
        rollout: PlainRollout,
        rows: Sequence[int],
        weights: Weights | None = None,
    ) -> dict[int, list[float] | None]:
        """The log-probs of some rows by a model, with the weights that it was loaded with where
        none are given."""
        chosen = model.base if weights is None else weights
        log_probs: dict[int, list[float] | None] = {}
        with torch.no_grad():
            for row in rows:
                values = model.token_values(chosen, rollout.responses[row], self.setting)
                log_probs[row] = values.log_probs.tolist()
        return log_probs

    def _token_advantages(
        self,
        rollout: PlainRollout,
        rows: Sequence[int],
        advantages: Mapping[int, float],
        old: Mapping[int, list[float] | None],
    ) -> dict[int, list[float]]:
        """The advantage of each token of some rows: its response's, and with a teacher its own
        part, against the old policy where its log-probs are computed, else the sampler's."""
        responses = rollout.responses
        of_tokens = {row: [advantages[row]] * len(responses[row].tokens) for row in rows}
        if self.teacher is None:
            return of_tokens
        teachers = self._log_probs_by(self.teacher, rollout, rows)
        differences: list[float] = []
        for row in rows:
            student = old[row] or list(responses[row].sampler_log_probs)
            of_tokens[row] = paper_token_advantages_of_row(
                advantages[row], student, teachers[row] or [], self.setting["teacher_weight"]
            )
            pairs = zip(student, teachers[row] or [], strict=True)
            differences += [of_student - of_teacher for of_student, of_teacher in pairs]
        self.teacher_kl = sum(differences) / max(1, len(differences))
        return of_tokens

    def _update(self, inputs: "StepInputs") -> None:
        """Make one optimiser update."""
        self.updates += 1
        setting = dict(self.setting)
        leaves = {name: tensor.requires_grad_() for name, tensor in self.weights.items()}
        values = None
        if setting["token_selection"] != "none" or setting["entropy_target"]:
            values = self._values_of(inputs)
        if values is not None and setting["entropy_target"]:
            setting["entropy_coefficient"] = self._adapt_entropy_bonus(values)
        gradient = {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
        parts: dict[int, PaperPart] = {}
        truncated_entropies: dict[int, list[float]] = {}
        for row, part_or_none in self._parts(inputs, values, setting):
            weights = self.model.weights_of(leaves, setting)
            now = self.model.token_values(weights, inputs.responses[row], setting)
            part = part_or_none or inputs.part_of(row, now, setting)
            parts[row] = part
            truncated_entropies[row] = now.truncated_entropies.tolist()
            self.is_near_edge |= is_near_edge(part, EDGE)
            add_row_gradient(gradient, leaves, now, paper_slopes(part))
        self.weights = {name: tensor.detach() for name, tensor in leaves.items()}
        if self.updates == 1:
            self.first_gradient = dict(gradient)
        rate = learning_rate(self.setting, self.updates)
        coefficient = setting["entropy_coefficient"]
        self.figures.append(
            UpdateFigures(rate, norm_of(gradient), coefficient, parts, truncated_entropies)
        )
        self.take_step(clipped(gradient, setting["max_grad_norm"]), rate)

    def _values_of(self, inputs: "StepInputs") -> dict[int, TokenValues]:
        """The values of each row of an update, without a graph."""
        with torch.no_grad():
            weights = self.model.weights_of(self.weights, self.setting)
            return {
                row: self.model.token_values(weights, inputs.responses[row], self.setting)
                for row in inputs.rows
            }

    def _parts(
        self,
        inputs: "StepInputs",
        values: Mapping[int, TokenValues] | None,
        setting: Mapping,
    ) -> Iterator[tuple[int, PaperPart | None]]:
        """Each row of an update, with its part of the loss where that depends on the values of all
        rows."""
        if values is None:
            yield from ((row, None) for row in inputs.rows)
            return
        yield from zip(inputs.rows, inputs.parts(values, setting), strict=True)

    def _adapt_entropy_bonus(self, values: Mapping[int, TokenValues]) -> float:
        """The coefficient of an update's entropy bonus: the present one where the mean entropy is
        at most the target, else 0. The next one is a step larger below the target, and a step
        smaller above (He et al. 2025, arXiv:2505.22312, section 3)."""
        entropy = torch.cat([of_row.entropies for of_row in values.values()]).mean().item()
        target = self.setting["entropy_target"]
        present = self.entropy_coefficient
        if entropy < target:
            self.entropy_coefficient = present + self.setting["entropy_delta"]
        if entropy > target:
            self.entropy_coefficient = max(0.0, present - self.setting["entropy_delta"])
        return present if entropy <= target else 0.0

    def take_step(self, gradient: Weights, rate: float) -> None:
        """Make one step of the optimiser. Weight decay is for matrices alone."""
        self.steps += 1
        hidden: set[str] = set()
        if self.setting["optimizer"] == "muon":
            hidden = self.model.hidden_matrices(self.weights)
        for name, weight in self.weights.items():
            decay = 0.0
            if is_decayed(name, weight):
                decay = self.setting["weight_decay"]
            if name in hidden:
                direction, moments = muon_direction(gradient[name], self.moments[name])
            else:
                direction, moments = adam_direction(
                    gradient[name], self.moments[name], self.steps, self.setting
                )
            # Decoupled (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2): the decay is of
            # the weight before the step, and passes through no moment.
            self.weights[name] = weight - rate * (direction + decay * weight)
            self.moments[name] = moments


@dataclass(frozen=True)
class StepInputs:
    """What one optimiser update is computed from: its rows of a rollout's responses, and of each
    row the advantages of its tokens, the old policy's and the reference's log-probs. Where one is
    None, the current policy's take its place."""

    responses: Sequence[PlainResponse]
    rows: Sequence[int]
    advantages: Mapping[int, list[float]]
    old: Mapping[int, list[float] | None]
    reference: Mapping[int, list[float] | None]

    def rows_of_values(self, row: int, values: TokenValues) -> list[list[float]]:
        """The rows of `PaperLogProbs` of one response."""
        policy, entropies = values.as_rows()
        old = self.old[row] or policy
        reference = self.reference[row] or policy
        return [policy, old, reference, list(self.responses[row].sampler_log_probs), entropies]

    @property
    def lengths(self) -> list[int]:
        return [len(self.responses[row].tokens) for row in self.rows]

    def part_of(self, row: int, values: TokenValues, setting: Mapping) -> PaperPart:
        """One row's part of the loss, where no token is selected."""
        return PaperPart(
            setting,
            self.responses[row].reward,
            self.advantages[row],
            self.rows_of_values(row, values),
            [False] * len(self.responses[row].tokens),
            self.lengths,
            share=0.0,
        )

    def parts(self, values: Mapping[int, TokenValues], setting: Mapping) -> list[PaperPart]:
        """Every row's part of the loss, in the order of the rows."""
        of_rows = [self.rows_of_values(row, values[row]) for row in self.rows]
        by_policy = PaperLogProbs(*(list(rows) for rows in zip(*of_rows, strict=True)))
        rewards = [self.responses[row].reward for row in self.rows]
        advantages = [self.advantages[row] for row in self.rows]
        return paper_parts(setting, rewards, advantages, by_policy)


def with_length_rewards(
    responses: Sequence[PlainResponse], setting: Mapping
) -> list[PlainResponse]:
    """The responses with what their lengths add to their rewards."""
    paid = []
    for response in responses:
        added = paper_length_reward(len(response.tokens), setting)
        paid.append(replace(response, reward=response.reward + added))
    return paid


def paper_length_reward(length: int, setting: Mapping) -> float:
    """What DAPO's soft overlong punishment adds to a response's reward (Yu et al. 2025,
    arXiv:2503.14476, eq. 13, with L_max = --max_new_tokens and L_cache = --overlong_buffer)."""
    longest = setting["max_new_tokens"]
    cache = setting["overlong_buffer"]
    if not cache or length <= longest - cache:
        return 0.0
    if length <= longest:
        return (longest - cache - length) / cache
    return -1.0


def add_row_gradient(
    gradient: dict[str, torch.Tensor], leaves: Weights, values: TokenValues, slopes: PaperSlopes
) -> None:
    """Add one row's part of the loss's gradient: the derivatives by its tokens' log-probs and
    entropies, times those of these values by the weights."""
    if not any(slopes.log_probs) and not any(slopes.entropies):
        return
    by_log_probs_T = values.log_probs.new_tensor(slopes.log_probs)
    by_entropies_T = values.entropies.new_tensor(slopes.entropies)
    total = by_log_probs_T @ values.log_probs + by_entropies_T @ values.entropies
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for name, derivative in zip(leaves, found, strict=True):
        if derivative is not None:
            gradient[name] += derivative


def norm_of(tensors: Weights) -> float:
    """The norm of all elements of some tensors."""
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors.values()))


def clipped(gradient: Weights, limit: float) -> dict[str, torch.Tensor]:
    """The gradient, whose norm is brought down to the limit (Pascanu et al. 2013, arXiv:1211.5063,
    algorithm 1); 0 is no limit."""
    if not limit:
        return dict(gradient)
    share = min(1.0, limit / (norm_of(gradient) + NORM_EPSILON))
    return {name: tensor * share for name, tensor in gradient.items()}


def adam_direction(
    gradient: torch.Tensor, moments: Mapping[str, torch.Tensor], step: int, setting: Mapping
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Adam's direction at its `step`-th step (from 1), and the moments after it (Kingma & Ba 2015,
    arXiv:1412.6980, algorithm 1)."""
    beta_1 = setting["adam_beta1"]
    beta_2 = setting["adam_beta2"]
    first = beta_1 * moments["exp_avg"] + (1 - beta_1) * gradient
    second = beta_2 * moments["exp_avg_sq"] + (1 - beta_2) * gradient**2
    unbiased_first = first / (1 - beta_1**step)
    unbiased_second = second / (1 - beta_2**step)
    direction = unbiased_first / (unbiased_second.sqrt() + setting["adam_eps"])
    return direction, {"exp_avg": first, "exp_avg_sq": second}


def muon_direction(
    gradient: torch.Tensor, moments: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Muon's direction, of Nesterov's look-ahead, and the momentum after it. The momentum is an
    average here, a multiple of the post's sum, which the normalisation removes. Without a gradient
    there is no step, which the post leaves open."""
    momentum = MUON_MOMENTUM * moments["momentum"] + (1 - MUON_MOMENTUM) * gradient
    if not gradient.any():
        return torch.zeros_like(gradient), {"momentum": momentum}
    ahead = MUON_MOMENTUM * momentum + (1 - MUON_MOMENTUM) * gradient
    x = ahead / ahead.norm()
    a, b, c = MUON_COEFFICIENTS
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    scale = MUON_SCALE * math.sqrt(max(gradient.shape))
    return scale * x, {"momentum": momentum}


def learning_rate(setting: Mapping, number: int) -> float:
    """The learning rate of the run's update of this number (from 1)."""
    rows = setting["prompts_per_rollout"] * setting["group_size"]
    in_epoch = math.ceil(rows / (setting["train_mini_batch_size"] or rows))
    updates = setting["num_steps"] * setting["epochs_per_rollout"] * in_epoch
    peak = setting["learning_rate"]
    return scheduled_rate(peak, setting["warmup_steps"], setting["lr_schedule"], number, updates)


def scheduled_rate(peak: float, warmup: int, schedule: str, number: int, updates: int) -> float:
    """The learning rate of the update of this number (from 1), of so many: a linear rise to the
    peak at update `warmup`, then the schedule's way to a tenth of it at the last update (half a
    cosine: arXiv:1608.03983, eq. 5)."""
    if number <= warmup:
        return peak * number / warmup
    progress = (number - warmup) / max(1, updates - warmup)
    shares = {
        "constant": 1.0,
        "linear": 1 - (1 - LAST_SHARE) * progress,
        "cosine": LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * progress)) / 2,
    }
    return peak * shares[schedule]


def make_learner(
    model: PlainModel, start: TrainedState, setting: Mapping, teacher: PlainModel | None = None
) -> Learner:
    """A learner at the beginning of a run, with copies of a state in the model's type."""
    moments = {}
    for name, of_tensor in start.moments.items():
        moments[name] = {key: moment.to(model.dtype) for key, moment in of_tensor.items()}
    weights = {name: tensor.to(model.dtype) for name, tensor in start.weights.items()}
    coefficient = setting["entropy_coefficient"]
    return Learner(model, setting, weights, moments, start.steps, teacher, coefficient)


def train(
    model: PlainModel,
    start: TrainedState,
    rollouts: Sequence[PlainRollout],
    setting: Mapping,
    teacher: PlainModel | None = None,
) -> Outcome:
    """The state after the updates on these rollouts, which follow one another from the run's first
    update on."""
    learner = make_learner(model, start, setting, teacher)
    for rollout in rollouts:
        learner.train_on(rollout)
    state = TrainedState(learner.weights, learner.moments, learner.steps)
    return Outcome(state, learner.first_gradient, learner.is_near_edge)


def relative_difference(
    reached: Weights, expected: Weights, start: Weights, roundings: int = 0
) -> float:
    """Of the tensor in which it is largest: the norm of the difference from what is expected, over
    the norm of the change that is expected from `start`. What so many `roundings` of float32 may
    add to each element is no difference."""
    largest = 0.0
    for name, tensor in expected.items():
        difference = (reached[name].to(tensor) - tensor).norm().item()
        difference -= roundings * ROUNDING * tensor.norm().item()
        change = (tensor - start[name].to(tensor)).norm().item()
        if not difference <= 0:  # Unlike difference > 0, this is true of NaN, too.
            largest = max(largest, difference / change if change else math.inf)
            if math.isnan(difference):
                return math.nan
    return largest


def flat_moments(moments: Moments) -> dict[str, torch.Tensor]:
    """Moments by "TENSOR MOMENT"."""
    flat = {}
    for name, of_tensor in moments.items():
        for key, moment in of_tensor.items():
            flat[f"{name} {key}"] = moment
    return flat


def mini_batch_faults(rollout: PlainRollout, epochs: int, size: int, group_size: int) -> list[str]:
    """What is wrong with the rows of a rollout's updates: each epoch takes each row that counts
    once, in mini-batches of `size` rows but for the last, and the rows of a group follow one
    another."""
    counted = [row for row, response in enumerate(rollout.responses) if response.counts]
    in_epoch = math.ceil(len(counted) / size)
    faults = []
    if len(rollout.mini_batches) != epochs * in_epoch:
        faults.append(f"{len(rollout.mini_batches)} mini-batches, not {epochs * in_epoch}")
    for epoch in range(epochs):
        mini_batches = rollout.mini_batches[epoch * in_epoch : (epoch + 1) * in_epoch]
        rows: list[int] = []
        for mini_batch in mini_batches:
            rows += mini_batch
        if sorted(rows) != counted:
            faults.append(f"epoch {epoch + 1} does not take each row once")
        if any(len(mini_batch) != size for mini_batch in mini_batches[:-1]):
            faults.append(f"epoch {epoch + 1} has mini-batches of other sizes")
        groups = [row // group_size for row in rows]
        changes = sum(before != after for before, after in zip(groups, groups[1:], strict=False))
        if changes + 1 != len(set(groups)):
            faults.append(f"epoch {epoch + 1} tears groups apart")
    return faults


def load_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """The adapters of a folder in PEFT's format, by the names of the layers that have them."""
    saved = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}


def cut_family(base: str, folder: Path) -> None:
    """Write the first two layers of a model to a folder, with its embeddings and its head."""
    config: Any = AutoConfig.from_pretrained(base)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, name, value[:2])  # What each layer is, in families of several kinds.
    config.num_hidden_layers = 2
    model: Any = AutoModelForCausalLM.from_pretrained(base, config=config)
    model.save_pretrained(folder)

"""Is what a run of a few steps has left in its folder what the papers make of its own samples?

The run is the command itself, so that its loop counts: which weights sample a step, which responses
count, what a step hands on to the next, the reference, the learning rate, evaluations, and the
model that is saved. Each step's completions are read from the folder, and the steps are trained
once more in float64 (whole_update.py)."""

import functools
import hashlib
import itertools
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from alignment.core.records import Problem
from alignment.system.files import read_jsonl
from alignment.verification.check import Check
from alignment.verification.splits import words_of
from alignment.verification.whole_update import (
    ROUNDING,
    Learner,
    PlainModel,
    PlainResponse,
    PlainRollout,
    TrainedState,
    Weights,
    load_adapters,
    make_learner,
    paper_length_reward,
)

# The norm of the difference of all weights from the papers', as a share of that of their change.
# Adam's first step has the sign of a gradient, which rounding decides where the gradient is near 0.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.75}
# Rules that leave thoughts out see the tag with which a prompt opens one.
RULES_OF_TURNS = ("boxed", "flexible")
MOST_NEAR = 1e-6  # by which figures of a record may differ from those of its answers
Row = Mapping[str, Any]
"""A line of a file of completions."""
MiniBatches = Callable[[int, Sequence[int], Sequence[int]], list[list[int]]]
"""(step, lengths of all rows, trained rows) -> the rows of each update."""


@dataclass(frozen=True)
class Trained:
    """What the papers make of a run's samples."""

    nats: float
    """The largest mean distance of a step's log-probs, as they were sampled, from those of the
    weights that the papers reach at the version that is said to have sampled them."""
    evaluation_nats: float
    """The same of evaluations."""
    weights: float
    """The distance of the saved weights from the papers', as a share of their change."""
    is_near_edge: bool


@dataclass(frozen=True)
class TrainedRun:
    """The folder of a run that has ended, and what it was made with."""

    folder: Path
    plain: PlainModel
    start: Weights
    """What is trained, before the first step: weights, or adapters."""
    setting: Mapping[str, Any]
    """Flag -> value."""
    make_mini_batches: MiniBatches
    test_rows: Sequence[Problem]
    rules: Mapping[str, Callable[[str, str], Mapping[str, float]]]
    evaluation_rule: str
    tokenizer: Any
    nats: float
    """The limit on distances of log-probs."""
    dtype: torch.dtype
    teacher: PlainModel | None = None

    def checks(self, invariants: Sequence[str]) -> Iterator[Check]:
        """Every check of the run; `invariants` are names of warnings of which none may come."""
        words = f"run of {self.steps} steps"
        trained = functools.cache(self.train)
        yield Check(f"{words}, samples: faults", 0.0, self.faults_of_samples)
        yield Check(
            f"{words}, samples: nats from the papers' weights",
            self.nats,
            lambda: trained().nats,
            note=self._described(),
        )
        limit = LIMITS[self.dtype]
        reason = ""
        if self.setting["optimizer"] == "adamw_8bit":
            limit = math.inf  # Moments of 0 that are rounded to 8 bits leave most of a step open.
        if trained().is_near_edge and self.dtype == torch.float32:
            reason = "a ratio was within rounding of its clip's bound"
        yield Check(
            f"{words}, saved weights: from papers' in float64",
            limit,
            lambda: trained().weights,
            not_checked=reason,
        )
        yield Check(f"{words}, evaluations: faults", 0.0, self.faults_of_evaluations)
        yield Check(
            f"{words}, evaluations: nats from the papers' weights",
            self.nats,
            lambda: trained().evaluation_nats,
        )
        yield Check(f"{words}: warnings", 0.0, lambda: self.warnings(invariants))

    @property
    def steps(self) -> int:
        return self.setting["num_steps"]

    def _described(self) -> str:
        setting = self.setting
        return (
            f"(reward {setting['reward']}, {setting['prompts_per_rollout']} prompts of"
            f" {setting['group_size']}, learning rate {setting['learning_rate']:.1g})"
        )

    def rows(self, kind: str, step: int) -> list[dict]:
        """The completions of a step, or of an evaluation after it."""
        return read_jsonl(self.folder / "completions" / f"{kind}_{step:06d}.jsonl")

    def train(self) -> Trained:
        """Train the run's steps once more, by the papers, on the run's own samples."""
        learner = make_learner(self.plain, self._start_state(), self.setting, self.teacher)
        of_version = {0: learner.whole_weights}
        nats = [0.0]
        evaluation_nats = [self._nats(self.rows("eval", 0), of_version[0], self._of_evaluations)]
        for step in range(1, self.steps + 1):
            rows = self.rows("rollout", step)
            weights = of_version.get(rows[0]["policy_version"])
            sampled = {**self.setting, "log_probs_of": "sampled"}
            nats.append(math.inf if weights is None else self._nats(rows, weights, sampled))
            # A step whose responses leave fewer mini-batches has its place in the schedule all the
            # same.
            learner.updates = (step - 1) * self._updates_of_step
            learner.train_on(self._rollout(step, rows))
            of_version[step] = learner.whole_weights
            of_version.pop(step - 1 - self.most_staleness, None)
            self._reset_if_due(learner, step)
        evaluated = self.rows("eval", self.steps)
        last = of_version[self.steps]
        evaluation_nats.append(self._nats(evaluated, last, self._of_evaluations))
        return Trained(
            max(nats), max(evaluation_nats), self._distance(learner), learner.is_near_edge
        )

    @property
    def most_staleness(self) -> int:
        """The most steps that the sampler's weights may be behind."""
        if self.setting["rollouts"] == "sync":
            return 0
        staleness = self.setting["max_staleness"]
        return 1 if staleness is None else staleness

    @property
    def _updates_of_step(self) -> int:
        """The updates of a step all of whose responses count."""
        rows = self.setting["prompts_per_rollout"] * self.setting["group_size"]
        in_epoch = math.ceil(rows / (self.setting["train_mini_batch_size"] or rows))
        return self.setting["epochs_per_rollout"] * in_epoch

    @property
    def _of_evaluations(self) -> Mapping[str, Any]:
        """The setting of evaluations' samples; where they are greedy, log-probs are the model's."""
        own: dict[str, Any] = {"log_probs_of": "sampled"}
        for name in ("temperature", "top_p", "top_k"):
            value = self.setting[f"eval_{name}"]
            own[f"sampling_{name}"] = self.setting[f"sampling_{name}"] if value is None else value
        if own["sampling_temperature"] == 0:
            own |= {"sampling_temperature": 1.0, "sampling_top_p": 1.0, "sampling_top_k": 0}
        return own

    def _start_state(self) -> TrainedState:
        """The state before the first step: moments of 0."""
        keys = dict.fromkeys(self.start, ("exp_avg", "exp_avg_sq"))
        if self.setting["optimizer"] == "muon":
            keys |= dict.fromkeys(self.plain.hidden_matrices(self.start), ("momentum",))
        moments = {}
        for name, tensor in self.start.items():
            moments[name] = {key: torch.zeros_like(tensor) for key in keys[name]}
        return TrainedState(self.start, moments, 0)

    def _rollout(self, step: int, rows: Sequence[Row]) -> PlainRollout:
        """A step's responses, with the rows of each of its updates."""
        responses = [self._response(row) for row in rows]
        trained = [number for number, response in enumerate(responses) if response.counts]
        lengths = [len(response.tokens) for response in responses]
        return PlainRollout(responses, self.make_mini_batches(step, lengths, trained))

    def _response(self, row: Row) -> PlainResponse:
        """A row as the papers take it: with what its length adds to its reward, and whether it
        counts."""
        tokens = tuple(row["token_ids"])
        is_skipped = self.setting["skip_unfinished"] and row["finish_reason"] != "stop"
        return PlainResponse(
            tuple(row["prompt_ids"]),
            tokens,
            row["score"]["reward"] + paper_length_reward(len(tokens), self.setting),
            not is_skipped and "unscored" not in row["score"],
            tuple(row["log_probs"]),
        )

    def _reset_if_due(self, learner: Learner, step: int) -> None:
        """Every --reference_reset_interval steps the reference takes the policy's weights, and with
        --reference_reset_optimizer the moments are forgotten (ProRL, arXiv:2505.24864, section
        2.3)."""
        interval = self.setting["reference_reset_interval"]
        if not interval or step % interval:
            return
        learner.reference = learner.whole_weights
        if self.setting["reference_reset_optimizer"]:
            learner.moments = {
                name: {key: torch.zeros_like(moment) for key, moment in moments.items()}
                for name, moments in learner.moments.items()
            }
            learner.steps = 0

    def _nats(self, rows: Sequence[Row], weights: Weights, setting: Mapping) -> float:
        """The mean distance, a token, of the log-probs of some rows from those of these weights."""
        total = 0.0
        tokens = 0
        for row in rows:
            with torch.no_grad():
                values = self.plain.token_values(weights, self._response(row), setting)
            sampled_T = values.log_probs.new_tensor(row["log_probs"])
            total += (values.log_probs - sampled_T).abs().sum().item()
            tokens += len(sampled_T)
        return total / tokens

    def _distance(self, learner: Learner) -> float:
        """The distance of the saved weights from the learner's, as a share of their change: of the
        model that is loaded from the folder, and of adapters."""
        saved = {}
        for file in sorted((self.folder / "final").glob("*.safetensors")):
            saved |= load_file(file)
        if not self.setting["lora_rank"]:
            roundings = 2 * learner.updates
            return share_of_change(saved, learner.weights, self.start, roundings)
        adapters = load_adapters(self.folder / "final" / "adapter")
        of_adapters = share_of_change(adapters, learner.weights, self.start, 2 * learner.updates)
        merged = share_of_change(saved, learner.whole_weights, self.plain.base, roundings=2)
        return max(of_adapters, merged)

    def faults_of_samples(self) -> list[str]:
        """What is wrong with the completions of a step."""
        faults: list[str] = []
        for step in range(1, self.steps + 1):
            rows = self.rows("rollout", step)
            faults += [f"step {step}: {fault}" for fault in self._faults_of_step(step, rows)]
        records = read_jsonl(self.folder / "metrics.jsonl")
        for record in records:
            rewards = [row["score"]["reward"] for row in self.rows("rollout", record["step"])]
            if not is_near(record["reward"], sum(rewards) / len(rewards)):
                faults.append(f"step {record['step']}: the reward in metrics.jsonl")
        steps = [record["step"] for record in records]
        if steps != list(range(1, self.steps + 1)):
            faults.append(f"metrics.jsonl has steps {steps}")
        return faults

    def _faults_of_step(self, step: int, rows: Sequence[Row]) -> list[str]:
        """What is wrong with a step's completions."""
        setting = self.setting
        faults = []
        size = setting["group_size"]
        if len(rows) != size * setting["prompts_per_rollout"]:
            faults.append(f"{len(rows)} responses")
        for start in range(0, len(rows), size):
            prompts = {(row["problem"], *row["prompt_ids"]) for row in rows[start : start + size]}
            if len(prompts) != 1:
                faults.append(f"{len(prompts)} prompts in a group")
        behind = {step - 1 - row["policy_version"] for row in rows}
        if not behind <= set(range(self.most_staleness + 1)):
            faults.append(f"weights that are {max(behind, key=abs)} steps behind")
        wrong = sum(not self._is_scored_rightly(row) for row in rows)
        if wrong:
            faults.append(f"{wrong} wrong rewards")
        strangers = sum(not self._asks_its_question(row) for row in rows)
        if strangers:
            faults.append(f"{strangers} responses with another prompt's question and truth")
        if step > 1:
            before = [row["token_ids"] for row in self.rows("rollout", step - 1)]
            if before == [row["token_ids"] for row in rows]:
                faults.append("the step before's responses")
        return faults

    def _is_scored_rightly(self, row: Row) -> bool:
        """Whether a row's reward is that of its own text and truth. The negative control "random"
        pays for the first bit of the SHA-256 of the truth, a zero byte and the text."""
        if self.setting["reward"] != "random":
            return True
        text = f"{row['ground_truth']}\0{row['text']}".encode("utf-8", "surrogatepass")
        return row["score"]["reward"] == hashlib.sha256(text).digest()[0] % 2

    def _asks_its_question(self, row: Row) -> bool:
        """Whether a row's prompt holds the question that its truth is of."""
        prompt = self.tokenizer.decode(row["prompt_ids"], clean_up_tokenization_spaces=False)
        return letters_of(row["question"]) in letters_of(prompt)

    def faults_of_evaluations(self) -> list[str]:
        """What is wrong with the evaluations before the first step and after the last."""
        records = {record["step"]: record for record in read_jsonl(self.folder / "evals.jsonl")}
        faults: list[str] = []
        for step in (0, self.steps):
            if step not in records:
                faults.append(f"none after step {step}")
                continue
            found = self._faults_of_evaluation(records[step], self.rows("eval", step))
            faults += [f"after step {step}: {fault}" for fault in found]
        return faults

    def _faults_of_evaluation(self, record: Row, rows: Sequence[Row]) -> list[str]:
        """What is wrong with an evaluation's completions and its record."""
        faults = []
        samples = self.setting["eval_samples"]
        by_problem: dict[str, list[Row]] = {}
        for row in rows:
            by_problem.setdefault(row["problem"], []).append(row)
        if any(len(of_problem) != samples for of_problem in by_problem.values()):
            faults.append("another number of samples than --eval_samples")
        split = {
            (problem.id, words_of(problem.question), problem.ground_truth)
            for problem in self.test_rows
        }
        asked = {(row["problem"], words_of(row["question"]), row["ground_truth"]) for row in rows}
        if not asked <= split:
            faults.append("problems that are not the test split's")
        versions = {row["policy_version"] for row in rows}
        if versions != {record["step"]}:
            faults.append(f"weights of versions {sorted(versions)}")
        rule = self.rules.get(self.evaluation_rule)
        if rule is not None:
            wrong = sum(
                row["score"]["reward"]
                != rule(self._graded_text(row), row["ground_truth"])["reward"]
                for row in rows
            )
            if wrong:
                faults.append(f"{wrong} rewards that are not {self.evaluation_rule}'s")
        return faults + self._faults_of_record(record, list(by_problem.values()))

    def _graded_text(self, row: Row) -> str:
        """What the rule of evaluations sees of a row."""
        prompt = self.tokenizer.decode(row["prompt_ids"], clean_up_tokenization_spaces=False)
        opens_thought = prompt.rstrip().endswith("<think>")
        if self.evaluation_rule in RULES_OF_TURNS and opens_thought:
            return f"<think>{row['text']}"
        return row["text"]

    def _faults_of_record(self, record: Row, groups: Sequence[Sequence[Row]]) -> list[str]:
        """Which figures of an evaluation's record are not those of its completions: averages over
        problems, and pass@k by every choice of k samples (Chen et al. 2021, arXiv:2107.03374)."""
        expected = {
            "avg_all_rewards": mean_of_groups(groups, "reward"),
            "avg_answer_rewards": mean_of_groups(groups, "answer_reward"),
            "avg_format_rewards": mean_of_groups(groups, "format_reward"),
        }
        for name in record:
            if name.startswith("pass@"):
                expected[name] = share_of_choices(groups, int(name.removeprefix("pass@")))
        rows = list(itertools.chain.from_iterable(groups))
        expected["response_length"] = sum(len(row["token_ids"]) for row in rows) / len(rows)
        expected["finished"] = sum(row["finish_reason"] == "stop" for row in rows) / len(rows)
        return [name for name, value in expected.items() if not is_near(record[name], value)]

    def warnings(self, invariants: Sequence[str]) -> list[str]:
        """The names of broken invariants that the run has warned of."""
        names: dict[str, None] = {}
        for record in read_jsonl(self.folder / "metrics.jsonl"):
            names |= dict.fromkeys(name for name in record["warnings"] if name in invariants)
        return list(names)


def letters_of(text: str) -> str:
    """A text but for white space, case, and the forms of characters that a tokenizer may write
    otherwise (Unicode's NFKC)."""
    return "".join(unicodedata.normalize("NFKC", text).split()).casefold()


def is_near(value: float, expected: float) -> bool:
    """Whether two figures are the same but for rounding."""
    return math.isclose(value, expected, rel_tol=MOST_NEAR, abs_tol=MOST_NEAR)


def mean_of_groups(groups: Sequence[Sequence[Row]], part: str) -> float:
    """The mean over problems of the mean of one part of their scores."""
    means = []
    for group in groups:
        means.append(sum(row["score"][part] for row in group) / len(group))
    return sum(means) / len(means)


def share_of_choices(groups: Sequence[Sequence[Row]], number: int) -> float:
    """The mean over problems of the share of choices of so many samples of which one is right."""
    shares = []
    for group in groups:
        is_right = [row["score"]["reward"] == 1 for row in group]
        choices = list(itertools.combinations(is_right, number))
        shares.append(sum(map(any, choices)) / len(choices))
    return sum(shares) / len(shares)


def share_of_change(reached: Weights, expected: Weights, start: Weights, roundings: int) -> float:
    """The norm, over all tensors, of the difference from what is expected, over that of the change
    from `start`. What so many `roundings` of float32 may add is no difference. Infinite where a
    tensor is missing."""
    square_of_difference = 0.0
    square_of_change = 0.0
    for name, tensor in expected.items():
        if name not in reached or reached[name].shape != tensor.shape:
            return math.inf
        difference = (reached[name].to(tensor) - tensor).norm().item()
        change = (tensor - start[name].to(tensor)).norm().item()
        difference -= roundings * ROUNDING * tensor.norm().item()
        square_of_difference += max(0.0, difference) ** 2
        square_of_change += change**2
        if math.isnan(difference):
            return math.nan
    if not square_of_change:
        return math.inf if square_of_difference else 0.0
    return math.sqrt(square_of_difference / square_of_change)

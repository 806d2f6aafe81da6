"""Is what a run of a few steps has left in its folder what the papers make of its own samples?

The run is the command itself, so that its loop counts: which weights sample a step, which responses
count, what a step hands on to the next, the reference, the learning rate, evaluations, the model
that is saved, and what is reported. Each step's completions are read from the folder, and the steps
are trained once more in float64 (whole_update.py)."""

import functools
import hashlib
import itertools
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from alignment.core.records import Problem
from alignment.system.files import read_json, read_jsonl
from alignment.verification.check import Check
from alignment.verification.reported import (
    Row,
    Rules,
    StepFigures,
    Tolerance,
    faults_of_evaluation,
    figures_of_rows,
    figures_of_rules,
    is_near,
    mean_mismatch,
    tolerance_of,
)
from alignment.verification.sharpness import MOST_SHARPER, sure_change_of_power
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
# A shorter gradient may be rounding's: Adam's first steps make it as long as any.
ROUNDING_OF_GRADIENTS = 1e-5
# A teacher's gradient is the difference of two log-probs of a token, each rounded by some 1e-6
# nats: of a shorter one than this, more than a thousandth is rounding's.
ROUNDING_WITH_TEACHER = 0.02
# Rules that leave thoughts out see the tag with which a prompt opens one.
RULES_OF_TURNS = ("boxed", "flexible")
# What a model's config says of how it was saved, not of what it computes.
NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
WHOLE_DISTRIBUTION: Mapping[str, Any] = {
    "log_probs_of": "sampled",
    "sampling_temperature": 1.0,
    "sampling_top_p": 1.0,
    "sampling_top_k": 0,
}
GREEDY = "greedy"  # prefix of the figures of --eval_greedy
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
    greedy_nats: float
    """How much less likely greedy tokens are, on average, than the likeliest."""
    weights: float
    """The distance of the saved weights from the papers', as a share of their change."""
    other_figures: Sequence[str]
    """What is reported of a step that is not so."""
    reason_of_rounding: str
    """Why rounding may have decided on a step; empty where it has not."""


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
    rules: Rules
    evaluation_rule: str
    tokenizer: Any
    stop: Sequence[str]
    """The strings that end a response."""
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
        if self.dtype == torch.float32:
            reason = trained().reason_of_rounding
        yield Check(
            f"{words}, saved weights: from papers' in float64",
            limit,
            lambda: trained().weights,
            not_checked=reason,
        )
        yield Check(f"{words}, saved config, tokenizer: faults", 0.0, self.faults_of_side_files)
        yield Check(
            f"{words}, reported of updates: other figures",
            0.0,
            lambda: list(trained().other_figures),
        )
        yield Check(f"{words}, reported of samples: other figures", 0.0, self.other_figures)
        yield Check(f"{words}, evaluations: faults", 0.0, self.faults_of_evaluations)
        yield Check(
            f"{words}, evaluations: nats from the papers' weights",
            self.nats,
            lambda: trained().evaluation_nats,
        )
        if self.setting["eval_temperature"] != 0:  # Greedy answers are not drawn.
            yield Check(
                f"{words}, evaluations: sharper or flatter than plain",
                MOST_SHARPER,
                self._change_of_evaluations_power,
            )
        if self.setting["eval_greedy"]:
            # Of tokens that are equally likely in 16 bits any is the likeliest.
            yield Check(
                f"{words}, greedy evaluations: nats from the likeliest",
                10 * self.nats,
                lambda: trained().greedy_nats,
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
        other_figures: list[str] = []
        reason = ""
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
            rollout = self._rollout(step, rows)
            before = learner.whole_weights
            learner.train_on(rollout)
            if self._trains_on_rounding(learner):
                reason = "of a step's gradient rounding alone is left"
            found = self._other_figures_of_updates(step, learner)
            if rollout.mini_batches:
                first = [rows[row] for row in rollout.mini_batches[0]]
                found += self._other_log_probs(step, first, before)
            other_figures += [f"{name} of step {step}" for name in found]
            of_version[step] = learner.whole_weights
            of_version.pop(step - 1 - self.most_staleness, None)
            self._reset_if_due(learner, step)
        evaluated = self.rows("eval", self.steps)
        last = of_version[self.steps]
        evaluation_nats.append(self._nats(evaluated, last, self._of_evaluations))
        if learner.is_near_edge:
            reason = "a ratio was within rounding of its clip's bound"
        greedy_nats = 0.0
        if self.setting["eval_greedy"]:
            greedy_nats = self._greedy_nats(last)
            greedy_rows = self.rows(f"eval_{GREEDY}", self.steps)
            # Beside greedy tokens stand the model's own log-probs.
            evaluation_nats.append(self._nats(greedy_rows, last, WHOLE_DISTRIBUTION))
        return Trained(
            max(nats),
            max(evaluation_nats),
            greedy_nats,
            self._distance(learner),
            other_figures,
            reason,
        )

    def _trains_on_rounding(self, learner: Learner) -> bool:
        """Whether an update of the step has a gradient by the papers that is so short that rounding
        decides where it points."""
        shortest = ROUNDING_OF_GRADIENTS if self.teacher is None else ROUNDING_WITH_TEACHER
        return any(0 < update.norm < shortest for update in learner.figures)

    def _other_figures_of_updates(self, step: int, learner: Learner) -> list[str]:
        """What is reported of a step's updates that is not the papers'."""
        if not learner.figures:
            return []
        figures = StepFigures(
            learner.figures,
            self.setting,
            learner.entropy_coefficient,
            learner.teacher_kl if self.teacher is not None else None,
            learner.is_near_edge,
        )
        return figures.faults(self.record(step), self._tolerance)

    @property
    def _tolerance(self) -> Tolerance:
        """How far figures of updates may be from the papers'."""
        return tolerance_of(self.dtype, self.setting["optimizer"])

    def _other_log_probs(self, step: int, rows: Sequence[Row], weights: Weights) -> list[str]:
        """What is wrong with the trainer's log-probs of the rows of a step's first update, which
        must be those of the weights before it, and with their distance from the sampler's in the
        step's record."""
        faults = []
        known = [row for row in rows if row["trainer_log_probs"]]
        if not known:
            return []
        if any(len(row["trainer_log_probs"]) != len(row["token_ids"]) for row in known):
            return ["trainer_log_probs"]
        of_trainer = [{**row, "log_probs": row["trainer_log_probs"]} for row in known]
        if self._nats(of_trainer, weights, self.setting) > self.nats:
            faults.append("trainer_log_probs")
        if self.setting["log_probs_of"] == "sampled":
            record = self.record(step)
            expected = mean_mismatch(known)
            # Two passes of one model differ by rounding, and so may their distances.
            tolerance = Tolerance(self.nats / 10, self._tolerance.relative)
            reported = record["sampler_mismatch"]
            is_possible = (reported == 0) == (record["sampler_mismatch_max"] == 0)
            if not (is_possible and tolerance.allows(reported, expected)):
                faults.append("sampler_mismatch")
        return faults

    @property
    def most_staleness(self) -> int:
        """The most steps that the sampler's weights may be behind."""
        if self.setting["rollouts"] == "sync":
            return 0
        staleness = self.setting["max_staleness"]
        return 1 if staleness is None else staleness

    def _version_for(self, step: int) -> int:
        """The version of the weights that samples a step: the oldest of those that the sampler gets
        and that --max_staleness allows."""
        interval = 1
        if self.setting["rollouts"] != "sync":
            interval = self.setting["sync_every"]
        oldest = max(0, step - 1 - self.most_staleness)
        return next(version for version in range(oldest, step) if version % interval == 0)

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
            own |= WHOLE_DISTRIBUTION
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
        distances = [distance_T.abs() for distance_T, _ in self._distances(rows, weights, setting)]
        return torch.cat(distances).mean().item()

    def _distances(
        self, rows: Sequence[Row], weights: Weights, setting: Mapping
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """By how much each row's log-probs [T] are above those of these weights, and by how much
        these are above the mean log-prob of all tokens there."""
        for row in rows:
            with torch.no_grad():
                values = self.plain.token_values(weights, self._response(row), setting)
            sampled_T = values.log_probs.new_tensor(row["log_probs"])
            yield sampled_T - values.log_probs, values.log_probs + values.truncated_entropies

    def _change_of_evaluations_power(self) -> float:
        """By how much the power of the distribution that evaluations are drawn from differs from 1
        at least: of the weights before the first step, and of the saved ones."""
        setting = self._of_evaluations
        saved = self._saved_weights()
        weights = {name: saved[name].to(tensor) for name, tensor in self.plain.base.items()}
        pairs = list(self._distances(self.rows("eval", 0), self.plain.base, setting))
        pairs += self._distances(self.rows("eval", self.steps), weights, setting)
        off_BT = pad_sequence([distance_T for distance_T, _ in pairs], batch_first=True)
        slopes_BT = pad_sequence([slopes_T for _, slopes_T in pairs], batch_first=True)
        return sure_change_of_power(off_BT, slopes_BT)

    def _greedy_nats(self, weights: Weights) -> float:
        """The mean of -log p of the tokens of the last greedy evaluation, where only the token
        itself and the likeliest one have a chance."""
        rows = self.rows(f"eval_{GREEDY}", self.steps)
        setting = {**WHOLE_DISTRIBUTION, "sampling_top_k": 1}
        of_likeliest = [{**row, "log_probs": [0.0] * len(row["token_ids"])} for row in rows]
        return self._nats(of_likeliest, weights, setting)

    def _distance(self, learner: Learner) -> float:
        """The distance of the saved weights from the learner's, as a share of their change: of the
        model that is loaded from the folder, and of adapters."""
        saved = self._saved_weights()
        if not self.setting["lora_rank"]:
            roundings = 2 * learner.updates
            return share_of_change(saved, learner.weights, self.start, roundings)
        adapters = load_adapters(self.folder / "final" / "adapter")
        of_adapters = share_of_change(adapters, learner.weights, self.start, 2 * learner.updates)
        merged = share_of_change(saved, learner.whole_weights, self.plain.base, roundings=2)
        return max(of_adapters, merged)

    def _saved_weights(self) -> dict[str, torch.Tensor]:
        """The weights of the saved model, with what adapters add to them."""
        saved = {}
        for file in sorted((self.folder / "final").glob("*.safetensors")):
            saved |= load_file(file)
        return saved

    def record(self, step: int) -> Row:
        """What metrics.jsonl says of a step."""
        records = read_jsonl(self.folder / "metrics.jsonl")
        return next(record for record in records if record["step"] == step)

    def other_figures(self) -> list[str]:
        """What is reported that is not so: of steps' completions, and in summary.json."""
        faults: list[str] = []
        records = read_jsonl(self.folder / "metrics.jsonl")
        for record in records:
            step = record["step"]
            rows = self.rows("rollout", step)
            expected = figures_of_rows(rows, self.setting)
            expected |= figures_of_rules(rows, record, self.rules, self._graded_text)
            interval = self.setting["reference_reset_interval"]
            if interval:
                expected["reference_step"] = (step - 1) // interval * interval
            # A padded row has a place less than tokens, since its last token is only ever a label.
            longest = max(len(row["prompt_ids"]) + len(row["token_ids"]) for row in rows)
            padded = len(rows) * (longest - 1) * self.setting["epochs_per_rollout"]
            expected["update_token_share"] = record["update_tokens"] / padded
            if "staleness" in record:
                expected["staleness"] = step - 1 - rows[0]["policy_version"]
            for name, value in expected.items():
                if not is_near(record.get(name, math.nan), value):
                    faults.append(f"{name} of step {step}")
        evaluations = read_jsonl(self.folder / "evals.jsonl")
        summary = read_json(self.folder / "summary.json")
        for name, evaluation in (("before", evaluations[0]), ("after", evaluations[-1])):
            if summary[name] != evaluation:
                faults.append(f"{name} in summary.json")
        if summary["steps"] != self.steps:
            faults.append("steps in summary.json")
        warnings = Counter(itertools.chain.from_iterable(row["warnings"] for row in records))
        if summary["warnings"] != warnings:
            faults.append("warnings in summary.json")
        return faults

    def faults_of_side_files(self) -> list[str]:
        """What is wrong with the config and the tokenizer beside the saved weights: a model that is
        loaded with them must be the one that was trained."""
        faults = []
        saved = AutoConfig.from_pretrained(self.folder / "final").to_dict()
        for name, value in self.plain.model.config.to_dict().items():
            if name not in NOT_OF_THE_MODEL and saved.get(name) != value:
                faults.append(name)
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "final")
        texts = [row["text"] for row in self.rows("eval", 0)]
        texts += [problem.prompt for problem in self.test_rows[: len(texts)]]
        if tokenizer(texts)["input_ids"] != self.tokenizer(texts)["input_ids"]:
            faults.append("tokens of a text")
        for name in ("eos_token_id", "bos_token_id", "chat_template"):
            if getattr(tokenizer, name) != getattr(self.tokenizer, name):
                faults.append(name)
        if (self.folder / "final" / "generation_config.json").exists():
            generation = GenerationConfig.from_pretrained(self.folder / "final")
            if generation.eos_token_id != self.plain.model.generation_config.eos_token_id:
                faults.append("eos_token_id of generation_config.json")
        if self.setting["lora_rank"]:
            adapter = read_json(self.folder / "final" / "adapter" / "adapter_config.json")
            faults += faults_of_adapter_config(adapter, self.setting)
        return faults

    def faults_of_samples(self) -> list[str]:
        """What is wrong with the completions of a step."""
        faults: list[str] = []
        for step in range(1, self.steps + 1):
            rows = self.rows("rollout", step)
            faults += [f"step {step}: {fault}" for fault in self._faults_of_step(step, rows)]
        records = read_jsonl(self.folder / "metrics.jsonl")
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
        if behind != {step - 1 - self._version_for(step)}:
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

    def _goes_on(self, row: Row) -> bool:
        """Whether a response has tokens after a stop string."""
        text = self.tokenizer.decode(row["token_ids"][:-1], clean_up_tokenization_spaces=False)
        return any(string in text for string in self.stop)

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
        distinct = len({words_of(problem.question) for problem in self.test_rows})
        most = self.setting["max_problems"] or distinct
        asks_all = not (self.setting["max_prompt_tokens"] or self.setting.get("validation_share"))
        if len(by_problem) < min(most, distinct) and asks_all:
            faults.append("fewer problems than --max_problems")
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
                != rule(self._graded_text(self.evaluation_rule, row), row["ground_truth"])["reward"]
                for row in rows
            )
            if wrong:
                faults.append(f"{wrong} rewards that are not {self.evaluation_rule}'s")
        strangers = sum(not self._asks_its_question(row) for row in rows)
        if strangers:
            faults.append(f"{strangers} responses with another prompt's question and truth")
        going_on = sum(map(self._goes_on, rows))
        if going_on:
            faults.append(f"{going_on} responses that go on after a stop string")
        longest = self.setting["eval_max_new_tokens"] or self.setting["max_new_tokens"]
        lengths = [len(row["token_ids"]) for row in rows if row["finish_reason"] == "length"]
        if any(length != longest for length in lengths):
            faults.append("responses that were cut off before the longest length")
        expected = figures_of_rules(rows, record, self.rules, self._graded_text)
        faults += [name for name, value in expected.items() if not is_near(record[name], value)]
        return faults + faults_of_evaluation(record, list(by_problem.values()))

    def _graded_text(self, rule: str, row: Row) -> str:
        """What a rule sees of a row."""
        prompt = self.tokenizer.decode(row["prompt_ids"], clean_up_tokenization_spaces=False)
        opens_thought = prompt.rstrip().endswith("<think>")
        if rule in RULES_OF_TURNS and opens_thought:
            return f"<think>{row['text']}"
        return row["text"]

    def warnings(self, invariants: Sequence[str]) -> list[str]:
        """The names of broken invariants that the run has warned of."""
        names: dict[str, None] = {}
        for record in read_jsonl(self.folder / "metrics.jsonl"):
            names |= dict.fromkeys(name for name in record["warnings"] if name in invariants)
        return list(names)


def faults_of_adapter_config(config: Mapping[str, Any], setting: Mapping[str, Any]) -> list[str]:
    """What PEFT would read of saved adapters that is not as they were trained: W + alpha / rank *
    B A."""
    expected = {
        "r": setting["lora_rank"],
        "lora_alpha": setting["lora_alpha"],
        "use_rslora": False,  # alpha / the root of the rank
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return [name for name, value in expected.items() if config.get(name, value) != value]


def letters_of(text: str) -> str:
    """A text but for white space, case, and the forms of characters that a tokenizer may write
    otherwise (Unicode's NFKC)."""
    return "".join(unicodedata.normalize("NFKC", text).split()).casefold()


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

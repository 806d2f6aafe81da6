"""Are answers drawn from the policy's distribution, each by a stream of random numbers of its own,
and do they end where they must?

The distribution is written out here, by plain sorting of the logits of transformers' own model.
Evidence is the product, over tokens, of likelihood ratios of a fault and of faultless draws.
Without a fault its mean is 1 at most, whatever the model and however answers depend on what was
drawn before, so that it exceeds 10^7 with a probability of 10^-7 at most (Markov's inequality).
Each line shows its decimal logarithm."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from alignment.core.records import (
    Completion,
    Group,
    Problem,
    SamplingConfig,
    flatten_completions,
    flatten_scores,
)
from alignment.core.tokens import collate, pad_token_id
from alignment.rewards.rules import Reward
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import RolloutSource
from alignment.sampling.sampler import Sampler
from alignment.verification.check import Check
from alignment.verification.reported import is_near
from alignment.verification.whole_update import kept_tokens

PROMPTS = 4
CANDIDATES = 64  # problems, of which these are the prompts
SAMPLES = 8
MOST_TOKENS = 64
# The lines take the larger of two numbers, or one: eight in all, of which one is above the limit
# without a fault in less than one of 10^6 verifications.
MOST_EVIDENCE = 7.0
# A flat distribution, in which each of the three settings changes most draws.
HOT = {"temperature": 2.0, "top_p": 0.9, "top_k": 7}
HOT_TOKENS = 32
REPORTED_TOKENS = 8  # of each answer to a step whose report is compared with its answers
# How often two rows of one stream draw the same token, as multiples of exp of the odds otherwise.
COUPLINGS = (0.5, 1.0, 2.0, 4.0)
# Powers of the distribution that stand for another temperature.
POWERS = (0.5, 0.75, 0.9, 1.1, 1.3, 2.0)
# Waves of the density of a draw's place in the distribution, where it is not uniform.
WAVES = ((1, 0.8), (1, -0.8), (2, 0.8), (2, -0.8))


@dataclass(frozen=True)
class Row:
    """A response whose tokens have been found in their distributions."""

    token_ids: tuple[int, ...]
    log_probs_TV: torch.Tensor
    """float64 [tokens, vocabulary]; -inf outside of top-k and top-p, but for rounding."""
    places: torch.Tensor
    """[tokens]: the draw's place in the cumulated distribution, uniform within its token."""
    outside: int
    """Tokens outside of top-k and top-p."""


def log_distribution(logits_TV: torch.Tensor, sampling: SamplingConfig, slack: float):
    """Log-probs, float64 [tokens, vocabulary], and which tokens may be drawn: the `top_k` most
    likely ones and, of these, the shortest list that reaches `top_p`. A token that would be one of
    them if the logits were `slack` nats off keeps a finite log-prob."""
    log_probs_TV = (logits_TV.double() / sampling.temperature).log_softmax(-1)
    setting = {"sampling_top_k": sampling.top_k, "sampling_top_p": sampling.top_p}
    in_support_TV = kept_tokens(log_probs_TV, setting)
    mass_T1 = (log_probs_TV.exp() * in_support_TV).sum(-1, keepdim=True)
    least_T1 = log_probs_TV.where(in_support_TV, math.inf).amin(-1, keepdim=True)
    finite_TV = log_probs_TV >= least_T1 - slack
    # The mass before a token may pass top-p by rounding, however unlikely the token is: logits that
    # are `slack` off change the odds of that mass by a factor of exp(2 slack) at most.
    odds = sampling.top_p * math.exp(2 * slack)
    setting["sampling_top_p"] = odds / (odds + 1 - sampling.top_p)
    finite_TV |= kept_tokens(log_probs_TV, setting)
    return (log_probs_TV - mass_T1.log()).where(finite_TV, -math.inf), in_support_TV


def read_row(
    model, completion: Completion, sampling: SamplingConfig, slack: float, noise: torch.Generator
) -> Row:
    """A response, with the distributions that the model draws its tokens from."""
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    with torch.inference_mode():
        logits_TV = model(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1]
    log_probs_TV, in_support_TV = log_distribution(logits_TV, sampling, slack)
    tokens_T1 = torch.tensor(completion.token_ids)[:, None]
    chances_TV = log_probs_TV.exp() * in_support_TV
    drawn_T = chances_TV.gather(-1, tokens_T1)[:, 0]
    below_T = chances_TV.cumsum(-1).gather(-1, tokens_T1)[:, 0] - drawn_T
    uniform_T = torch.rand(len(drawn_T), generator=noise, dtype=torch.float64)
    places_T = below_T + uniform_T * drawn_T
    outside = int(log_probs_TV.gather(-1, tokens_T1).isinf().sum())
    return Row(completion.token_ids, log_probs_TV, places_T[drawn_T > 0], outside)


def of_unlike_lengths(problems: Sequence[Problem], number: int) -> list[Problem]:
    """So many of some problems, two or more, from the longest prompt to the shortest: an engine
    that takes them by their lengths must find its way back. The first ones where too few prompts
    differ."""
    unlike = {problem.prompt: problem for problem in problems}
    if len(unlike) < number:
        return list(problems[:number])
    ordered = sorted(unlike.values(), key=lambda problem: len(problem.prompt), reverse=True)
    last = len(ordered) - 1
    return [ordered[place * last // (number - 1)] for place in range(number)]


def log10_of_mean(evidence: Sequence[float]) -> float:
    """log10 of the mean of numbers that are given by their natural logarithms."""
    logs = torch.tensor(evidence, dtype=torch.float64)
    return ((logs.logsumexp(0) - math.log(len(logs))) / math.log(10)).item()


def evidence_of_temperature(rows: Sequence[Row]) -> float:
    """Evidence that tokens are drawn at another temperature than they should."""
    totals = [0.0] * len(POWERS)
    for row in rows:
        tokens_T1 = torch.tensor(row.token_ids)[:, None]
        drawn_T = row.log_probs_TV.gather(-1, tokens_T1)[:, 0]
        inside = ~drawn_T.isinf()
        for number, power in enumerate(POWERS):
            mass_T = (power * row.log_probs_TV).logsumexp(-1)
            ratios_T = (power - 1) * drawn_T - mass_T
            totals[number] += ratios_T[inside].sum().item()
    return log10_of_mean(totals)


def evidence_of_uneven_draws(rows: Sequence[Row]) -> float:
    """Evidence that draws prefer some places of the distribution, or follow the ones before."""
    totals = []
    for waves, height in WAVES:
        total = 0.0
        steps = 0.0
        for row in rows:
            total += (1 + height * (2 * math.pi * waves * row.places).cos()).log().sum().item()
            moved = row.places.diff()
            steps += (1 + height * (2 * math.pi * waves * moved).cos()).log().sum().item()
        totals += [total, steps]
    return log10_of_mean(totals)


def evidence_of_pair(row: Row, earlier: Row) -> list[float]:
    """Evidence, for each of `COUPLINGS`, that a row was drawn by an earlier row's stream."""
    length = min(len(row.token_ids), len(earlier.token_ids))
    others_T1 = torch.tensor(earlier.token_ids[:length])[:, None]
    own_T = torch.tensor(row.token_ids[:length])
    chances_T = row.log_probs_TV[:length].gather(-1, others_T1)[:, 0].exp().clamp(max=1)
    same_T = own_T == others_T1[:, 0]
    evidence = []
    for coupling in COUPLINGS:
        ratios_T = coupling * same_T - (1 + chances_T * math.expm1(coupling)).log()
        evidence.append(ratios_T.sum().item())
    return evidence


def evidence_of_shared_streams(pairs: Sequence[Sequence[tuple[Row, Row]]]) -> float:
    """Evidence that the rows of some set of pairs share streams; a row is the first of at most one
    pair of each set."""
    totals = []
    for pairs_of_set in pairs:
        sums = torch.zeros(len(COUPLINGS), dtype=torch.float64)
        for row, earlier in pairs_of_set:
            sums += torch.tensor(evidence_of_pair(row, earlier))
        totals += sums.tolist()
    return log10_of_mean(totals)


def pairs_of_samples(rows: Sequence[Row], samples: int) -> list[list[tuple[Row, Row]]]:
    """For each distance, the rows of one prompt that are so far from one another."""
    sets = []
    for distance in range(1, samples):
        later = range(distance, len(rows))
        same = [row for row in later if row // samples == (row - distance) // samples]
        sets.append([(rows[row], rows[row - distance]) for row in same])
    return sets


def pairs_of_prompts(rows: Sequence[Row], samples: int) -> list[list[tuple[Row, Row]]]:
    """For each distance, the rows of two prompts that are so far from one another."""
    sets = []
    for distance in range(1, len(rows)):
        later = range(distance, len(rows))
        others = [row for row in later if row // samples != (row - distance) // samples]
        sets.append([(rows[row], rows[row - distance]) for row in others])
    return sets


def end_ids_of(model, tokenizer) -> set[int]:
    """The tokens that end a response: the tokenizer's, the model's, and any special token by which
    the chat template goes on after an answer."""
    listed = [tokenizer.eos_token_id]
    for config in (model.config, model.generation_config):
        ids = getattr(config, "eos_token_id", None)
        listed += ids if isinstance(ids, list) else [ids]
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "qwzx"}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # Templates raise errors of any class.
            text = ""
        behind = tokenizer(text.rpartition("qwzx")[2], add_special_tokens=False)["input_ids"]
        listed += [token for token in behind if token in tokenizer.all_special_ids][:1]
    return {token for token in listed if token is not None}


@dataclass(frozen=True)
class Ends:
    """What ends a response: end tokens, a stop string, or its longest length."""

    token_ids: set[int]
    stop: Sequence[str]
    most_tokens: int


def ends_wrongly(completion: Completion, ends: Ends, tokenizer) -> bool:
    """Whether a response goes on after its end, or ends before it."""

    def is_at_end(token_ids: Sequence[int]) -> bool:
        text = tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return bool(ends.token_ids & set(token_ids)) or any(stop in text for stop in ends.stop)

    ids = completion.token_ids
    if len(ids) != len(completion.log_probs) or is_at_end(ids[:-1]):
        return True
    if completion.finish_reason == "stop":
        return not is_at_end(ids)
    return is_at_end(ids) or len(ids) != ends.most_tokens


def has_other_text(completion: Completion, ends: Ends, tokenizer) -> bool:
    """Whether a response's text is not that of its tokens, without an end token or padding, up to
    and with the first stop string."""
    seen = []
    for token in completion.token_ids:
        is_stop = tokenizer.decode([token], clean_up_tokenization_spaces=False) in ends.stop
        if is_stop or token not in ends.token_ids | {tokenizer.pad_token_id}:
            seen.append(token)
    text = tokenizer.decode(seen, clean_up_tokenization_spaces=False)
    ends_of_stops = [text.find(stop) + len(stop) for stop in ends.stop if stop in text]
    return completion.text != text[: min(ends_of_stops, default=len(text))]


def prompt_is_encoded_wrongly(prompt: str, ids: Sequence[int], tokenizer) -> bool:
    """Whether the tokens of a prompt are not `wanted_prompt_ids`. False where nothing is known."""
    wanted = wanted_prompt_ids(prompt, tokenizer)
    return wanted is not None and list(ids) != wanted


def wanted_prompt_ids(prompt: str, tokenizer) -> list[int] | None:
    """The tokens of a prompt: its own, with what the tokenizer puts in front of every text, such as
    BOS, once; and behind it nothing from an EOS on. None where the tokenizer does not put its
    tokens around those of the text."""
    plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    whole = tokenizer(prompt)["input_ids"]
    starts = [
        start
        for start in range(len(whole) - len(plain) + 1)
        if whole[start : start + len(plain)] == plain
    ]
    if not starts or not plain:
        return None
    front = whole[: starts[0]]
    behind = whole[starts[0] + len(plain) :]
    if tokenizer.eos_token_id in behind:
        behind = behind[: behind.index(tokenizer.eos_token_id)]
    if front and plain[: len(front)] == front:
        front = []  # The prompt spells it out.
    return [*front, *plain, *behind]


def untrained_answers(completions: Sequence[Completion], pad_id: int) -> int:
    """How many responses' trained tokens, the labels in the mask of their batch, are not all of
    their tokens, the end token or stop string included."""
    prompt_ids = [completion.prompt_ids for completion in completions]
    batch = collate(prompt_ids, [completion.token_ids for completion in completions], pad_id)
    rows = zip(batch.labels, batch.response_mask, completions, strict=True)
    return sum(
        tuple(labels_T[mask_T].tolist()) != completion.token_ids
        for labels_T, mask_T, completion in rows
    )


@dataclass(frozen=True)
class Request:
    """The answers to one request, as rows, and how many of them are faulty."""

    rows: list[Row]
    completions: list[list[Completion]]
    wrong_ends: int
    other_texts: int
    wrong_prompts: int
    untrained: int


class RecordingReward:
    """A reward that keeps the groups that it is given, of which the first one alone teaches: its
    responses get 0, 1 and so on, all others 0.25."""

    def __init__(self, reward: Reward):
        self.rule = reward.rule
        self.groups: list[Group] = []

    def score(
        self, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]
    ) -> list[Group]:
        scored = []
        for problem, of_problem in zip(problems, completions, strict=True):
            is_first = not self.groups and not scored
            scores = []
            for place in range(len(of_problem)):
                reward = 0.25
                if is_first:
                    reward = float(place)
                scores.append({"reward": reward, "format_reward": 0.0, "answer_reward": 0.0})
            scored.append(Group(problem, tuple(of_problem), tuple(scores)))
        self.groups += scored
        return scored


@dataclass(frozen=True)
class SampledAnswers:
    """A run's sampler, the source of its prompts, and transformers' own `model` of the weights that
    the sampler has, on the CPU."""

    sampler: Sampler
    source: RolloutSource
    model: torch.nn.Module
    tokenizer: Any
    slack: float
    """How far, in nats, the sampler's logits may be from the model's."""
    flags: Mapping[str, Any]
    """Flag -> value, of the run."""

    def other_settings(self) -> list[str]:
        """The settings of a step's samples that are not the flags'."""
        config = self.source.config.sampling_of_step(self.source.task.stop, 1)
        wanted = {
            "n": self.flags["group_size"],
            "temperature": self.flags["sampling_temperature"],
            "top_p": self.flags["sampling_top_p"],
            "top_k": self.flags["sampling_top_k"],
            "max_new_tokens": self.flags["max_new_tokens"],
            "stop": self.source.task.stop,
        }
        others = [name for name, value in wanted.items() if getattr(config, name) != value]
        for name in ("data_seed", "sampling_seed"):
            seed = self.flags["seed"] if self.flags[name] is None else self.flags[name]
            if getattr(self.source.config, name) != seed:
                others.append(name)
        return others

    def other_figures(self) -> list[str]:
        """The names of what a step with a refill reports of all answers that were sampled for it
        that is not so."""
        sampling = replace(
            self.source.config.sampling, n=2, max_new_tokens=REPORTED_TOKENS, temperature=1.0
        )
        config = replace(
            self.source.config, prompts_per_rollout=2, max_refills=1, sampling=sampling
        )
        reward = RecordingReward(self.source.reward)
        source = replace(self.source, reward=cast(Reward, reward), config=config)
        report = source.sample_step(1, self.sampler).report
        completions = flatten_completions(reward.groups)
        rewards = [score["reward"] for score in flatten_scores(reward.groups)]
        expected = {
            "prompts_sampled": len(reward.groups),
            "responses_sampled": len(completions),
            "reward_sampled": sum(rewards) / len(rewards),
            "tokens_sampled": sum(len(completion.token_ids) for completion in completions),
        }
        return [name for name, value in expected.items() if not is_near(report[name], value)]

    def same_in_later_piece(self, first: Request, hot: SamplingConfig) -> float:
        """The share of answers, drawn from a flat distribution, that are the same where prompts are
        the later ones of a request that is made piece by piece."""
        later = self.sampler.sample(self.prompts(), replace(hot, first_prompt=PROMPTS))
        pairs = zip(
            itertools.chain.from_iterable(first.completions),
            itertools.chain.from_iterable(later),
            strict=True,
        )
        same = [one.token_ids == other.token_ids for one, other in pairs]
        return sum(same) / len(same)

    def prompts(self) -> list[str]:
        """The run's first prompts."""
        data_seed = self.source.config.data_seed
        first = problems_of_step(self.source.problems, CANDIDATES, data_seed, step=1)
        return [problem.prompt for problem in of_unlike_lengths(first, PROMPTS)]

    def settings(self) -> list[SamplingConfig]:
        """The run's own settings in its first two steps, and a flat distribution."""
        config = self.source.config
        tokens = min(config.sampling.max_new_tokens, MOST_TOKENS)
        settings = []
        for step in (1, 2):
            own = config.sampling_of_step(self.source.task.stop, step)
            settings.append(replace(own, n=SAMPLES, max_new_tokens=tokens))
        hot = replace(settings[0], **HOT, max_new_tokens=min(tokens, HOT_TOKENS))
        return [*settings, hot]

    def draw(self, sampling: SamplingConfig, noise: torch.Generator) -> Request:
        """Sample answers to the run's first prompts."""
        prompts = self.prompts()
        sampled = self.sampler.sample(prompts, sampling)
        completions = list(itertools.chain.from_iterable(sampled))
        end_ids = end_ids_of(self.model, self.tokenizer)
        ends = Ends(end_ids, self.source.task.stop, sampling.max_new_tokens)
        rows = []
        wrong_ends = 0
        other_texts = 0
        for completion in completions:
            rows.append(read_row(self.model, completion, sampling, self.slack, noise))
            wrong_ends += ends_wrongly(completion, ends, self.tokenizer)
            other_texts += has_other_text(completion, ends, self.tokenizer)
        wrong_prompts = 0
        for prompt, group in zip(prompts, sampled, strict=True):
            ids = group[0].prompt_ids
            wrong_prompts += prompt_is_encoded_wrongly(prompt, ids, self.tokenizer)
        untrained = untrained_answers(completions, pad_token_id(self.tokenizer))
        return Request(rows, sampled, wrong_ends, other_texts, wrong_prompts, untrained)

    def checks(self) -> Iterator[Check]:
        """Every check of what the sampler draws."""
        noise = torch.Generator().manual_seed(0)
        settings = self.settings()
        requests = [self.draw(sampling, noise) for sampling in settings]
        every = []
        for request in requests:
            every += request.rows
        yield Check("samples: settings that are not the flags'", 0.0, self.other_settings)
        yield Check(
            "prompts: special tokens doubled, added or missing",
            0.0,
            lambda: sum(request.wrong_prompts for request in requests),
        )
        yield Check(
            "samples: tokens outside of top-k and top-p",
            0.0,
            lambda: sum(row.outside for row in every),
        )
        yield Check(
            "samples: answers that end wrongly",
            0.0,
            lambda: sum(request.wrong_ends for request in requests),
        )
        yield Check(
            "samples: texts that are not their tokens'",
            0.0,
            lambda: sum(request.other_texts for request in requests),
        )
        yield Check(
            "samples: answers not trained to their end",
            0.0,
            lambda: sum(request.untrained for request in requests),
        )
        yield from checks_of_evidence(*(request.rows for request in requests))
        yield Check(
            "prompts of a later piece: share of same answers",
            0.9,
            lambda: self.same_in_later_piece(requests[-1], settings[-1]),
        )
        yield Check("refills: other figures than the answers'", 0.0, self.other_figures)
        yield Check("steps, refills: seeds of samples that are repeated", 0.0, self.repeated_seeds)

    def repeated_seeds(self) -> int:
        """How many of the requests of the first steps, and of two refills of each, draw by a seed
        that another one has, or one of another --sampling_seed."""
        config = self.source.config
        another = replace(config, sampling_seed=config.sampling_seed + 1)
        seeds = []
        for of_seed, step, refill in itertools.product((config, another), range(1, 101), range(3)):
            seeds.append(of_seed.sampling_of_step((), step, refill).seed)
        return len(seeds) - len(set(seeds))


def checks_of_evidence(
    first: Sequence[Row], second: Sequence[Row], hot: Sequence[Row]
) -> Iterator[Check]:
    """The checks of how answers are drawn: those of two steps, and those of a flat distribution."""
    steps = [*first, *second]
    yield Check(
        "samples: evidence of another temperature",
        MOST_EVIDENCE,
        lambda: max(evidence_of_temperature(steps), evidence_of_temperature(hot)),
    )
    yield Check(
        "samples: evidence of uneven draws",
        MOST_EVIDENCE,
        lambda: evidence_of_uneven_draws([*steps, *hot]),
    )
    yield Check(
        "samples of a prompt: evidence of one stream",
        MOST_EVIDENCE,
        lambda: max(
            evidence_of_shared_streams(pairs_of_samples(rows, SAMPLES)) for rows in (first, hot)
        ),
    )
    yield Check(
        "prompts: evidence of one stream",
        MOST_EVIDENCE,
        lambda: max(
            evidence_of_shared_streams(pairs_of_prompts(rows, SAMPLES)) for rows in (first, hot)
        ),
    )
    yield Check(
        "steps: evidence of one stream",
        MOST_EVIDENCE,
        lambda: evidence_of_shared_streams([list(zip(second, first, strict=True))]),
    )

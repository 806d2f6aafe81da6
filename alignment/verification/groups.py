"""Which responses of a group count, what they are paid for their length, and which groups a refill
replaces: by made-up groups, judged by plain rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from alignment.core.records import Completion, Group, Problem
from alignment.rollouts.config import RolloutConfig
from alignment.rollouts.source import collate_groups, refilled_groups
from alignment.verification.check import Check
from alignment.verification.whole_update import paper_length_reward

LONGEST = 12  # tokens of a made-up response
BUFFER = 4
PROMPTS = 5
REFILLS = 3
# How many groups of unequal rewards each request brings: too few at first, none, then too many.
INFORMATIVE = (2, 0, 2, 9)


@dataclass(frozen=True)
class MadeUpGroups:
    """A run's rules of groups, at lengths and numbers that make all of them count."""

    config: RolloutConfig

    def checks(self) -> Iterator[Check]:
        """Every check of groups."""
        yield Check("groups: responses that count or are paid wrongly", 0.0, self.wrong_responses)
        yield Check("groups: faults of refills", 0.0, self.faults_of_refills)

    def _config(self, *, skips: bool, buffer: int) -> RolloutConfig:
        sampling = replace(self.config.sampling, n=4, max_new_tokens=LONGEST)
        return replace(
            self.config,
            sampling=sampling,
            prompts_per_rollout=PROMPTS,
            max_refills=REFILLS,
            skip_unfinished=skips,
            overlong_buffer=buffer,
        )

    def wrong_responses(self) -> int:
        """How many responses of made-up groups count where they must not, or the other way round,
        or have another reward than their score and their length give."""
        wrong = 0
        for skips, buffer in ((False, 0), (False, BUFFER), (True, 0), (True, BUFFER)):
            config = self._config(skips=skips, buffer=buffer)
            groups = [made_up_group(number, rewards=(0, 1, 1, 0.5)) for number in range(4)]
            rollout = collate_groups(groups, config, pad_token_id=0)
            rows: list[tuple[bool, float]] = []
            for group in groups:
                for completion, score in zip(group.completions, group.scores, strict=True):
                    counts = must_count(completion, score, config)
                    rows.append((counts, must_be_paid(completion, score, config)))
            counted = rollout.counted_B1[:, 0].tolist()
            paid = rollout.raw_rewards_B1[:, 0].tolist()
            for (counts, reward), is_counted, is_paid in zip(rows, counted, paid, strict=True):
                wrong += counts != is_counted or abs(reward - is_paid) > 1e-6
        return wrong

    def faults_of_refills(self) -> list[str]:
        """What is wrong with the groups that refills leave (DAPO, Yu et al. 2025, arXiv:2503.14476,
        section 3.2): each refill asks for as many as are missing, and groups of equal rewards
        only fill up."""
        faults: list[str] = []
        for skips, buffer in ((False, 0), (True, BUFFER)):
            config = self._config(skips=skips, buffer=buffer)
            script = Script(config)
            groups, sampled = refilled_groups(script.problems, config, 1, script.sample)
            if script.faults:
                faults += script.faults
            informative = sum(must_teach(group, config) for group in sampled)
            kept = sum(must_teach(group, config) for group in groups)
            if len(groups) != PROMPTS:
                faults.append(f"{len(groups)} groups")
            if kept != min(PROMPTS, informative):
                faults.append(f"{kept} of {informative} groups of unequal rewards")
        return faults


@dataclass
class Script:
    """Answers each request with so many groups of unequal rewards as `INFORMATIVE` says. It notes
    where a request is for another number of problems than are missing."""

    config: RolloutConfig
    faults: list[str] = field(default_factory=list)
    found: int = 0
    requests: int = 0

    @property
    def problems(self) -> list[Problem]:
        return [made_up_problem(number) for number in range(64)]

    def sample(self, problems: Sequence[Problem], refill: int) -> list[Group]:
        missing = PROMPTS - self.found
        if len(problems) != missing:
            self.faults.append(f"refill {refill} asks for {len(problems)}, not {missing}")
        groups = []
        for number, problem in enumerate(problems):
            teaches = number < INFORMATIVE[self.requests]
            groups.append(replace(self._group(number, teaches), problem=problem))
            self.found += teaches
        self.requests += 1
        return groups

    def _group(self, number: int, teaches: bool) -> Group:
        """A group whose rewards differ among the responses that count, or only with those that do
        not; of each kind some differ by a penalty for length alone."""
        differs_by_length = bool(self.config.overlong_buffer) and number % 2 == 1
        if teaches and differs_by_length:
            return made_up_group(number, rewards=(1, 1, 1, 1), lengths=(2, 2, LONGEST, 2))
        if teaches:
            return made_up_group(number, rewards=(0, 1, 1, 0), lengths=(2, 3, 2, 3))
        return made_up_group(number, rewards=(1, 1, 1, 1), lengths=(2, 3, 2, 3))


def made_up_problem(number: int) -> Problem:
    return Problem(f"made up {number}", f"question {number}", f"prompt {number}", str(number))


def made_up_group(
    number: int, rewards: Sequence[float], lengths: Sequence[int] = (3, 9, LONGEST, 10)
) -> Group:
    """A group of four: the first two have ended, the third, if it is of the longest length, was cut
    off, and the last has no score in every second group."""
    completions = []
    scores = []
    for place, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        is_cut = length == LONGEST and number % 3 != 1
        completions.append(
            Completion(
                (1, 2),
                tuple(range(1, length + 1)),
                (-1.0,) * length,
                "",
                "length" if is_cut else "stop",
                0,
            )
        )
        score = {"reward": float(reward), "format_reward": 1.0, "answer_reward": float(reward)}
        if place == 3 and number % 2 == 1:
            score["unscored"] = 1.0
        scores.append(score)
    return Group(made_up_problem(number), tuple(completions), tuple(scores))


def must_count(completion: Completion, score: dict, config: RolloutConfig) -> bool:
    """Whether a response is to be trained on."""
    if "unscored" in score:
        return False
    return not config.skip_unfinished or completion.finish_reason == "stop"


def must_be_paid(completion: Completion, score: dict, config: RolloutConfig) -> float:
    """The reward that a response's score and its length give."""
    setting = {"max_new_tokens": LONGEST, "overlong_buffer": config.overlong_buffer}
    return score["reward"] + paper_length_reward(len(completion.token_ids), setting)


def must_teach(group: Group, config: RolloutConfig) -> bool:
    """Whether rewards differ among the responses of a group that count."""
    rewards = {
        must_be_paid(completion, score, config)
        for completion, score in zip(group.completions, group.scores, strict=True)
        if must_count(completion, score, config)
    }
    return len(rewards) > 1

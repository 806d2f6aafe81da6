"""Advantages and losses slowly, as the papers write them: a token at a time, in Python's own floats, by no code of the package.

`python tests/core/papers.py` writes the table of their values that `alignment.verify` compares training's with."""

import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path

TABLE = Path(__file__).parents[2] / "alignment" / "verification" / "papers.json"
LENGTHS, LONGEST, GROUP = (3, 5, 1, 4, 2, 3), 6, 3  # tokens of made-up responses, --max_new_tokens, --group_size
REWARDS = (1.0, 0.0, 0.5, 0.0, 0.25, 0.5)
STEP = 1e-4  # nats, of the finite differences of a fourth-order formula
Rows = Sequence[Sequence[float]]


def paper_advantage(place: int, rewards: Sequence[float], config: dict) -> float:
    """GRPO's (arXiv:2402.03300, section 4.1.2) or RLOO's (arXiv:2402.14740, eq. 8) of the response at a place, over the std of
    its group or of all rewards (arXiv:2508.08221), or over none (Dr. GRPO, arXiv:2503.20783, section 3.2)."""
    start = place - place % config["group_size"]
    end = start + config["group_size"]
    group, others = rewards[start:end], [*rewards[start:place], *rewards[place + 1 : end]]
    centred = rewards[place] - statistics.fmean({"group_mean": group, "leave_one_out": others}[config["baseline"]])
    stds = {"group": statistics.stdev(group), "group_population": statistics.pstdev(group), "batch": statistics.stdev(rewards)}
    return centred / (stds[config["std_of"]] + config["advantage_eps"]) if config["normalize_by_std"] else centred


def paper_loss(config: dict, advantages: Sequence[float], *policies: Rows) -> float:
    """The loss of an optimiser step on the made-up responses. `policies` are log-probs [B][t]: the policy's where papers stop
    the gradient, the policy's where they do not, the old policy's, the reference's and the sampler's."""
    total, low = 0.0, 1 - config["cliprange"]
    high = 1 + (config["cliprange"] if config["cliprange_high"] is None else config["cliprange_high"])
    level, _, bound = config["sampler_correction"].partition("_")
    cap = config["correction_cap"]

    def clip(ratio: float) -> float:
        return min(max(ratio, low), high)  # DAPO's upper bound: arXiv:2503.14476, eq. 10

    def surrogate(ratio: float, advantage: float) -> float:
        worse = min(ratio * advantage, clip(ratio) * advantage)  # PPO: arXiv:1707.06347, eq. 7
        dual_clip = config["dual_clip"]
        return max(worse, dual_clip * advantage) if dual_clip and advantage < 0 else worse  # arXiv:1912.09729, eq. 5

    for length, reward, advantage, *rows in zip(LENGTHS, REWARDS, advantages, *policies, strict=True):
        _, of_policy, of_old, _, of_sampler = map(sum, rows)
        for held, log_prob, old, reference, sampler in zip(*rows, strict=True):
            loss = {
                "no_baseline": -reward * log_prob,  # Williams 1992
                "reinforce_with_baseline": -advantage * log_prob,
                "grpo_clip": -surrogate(math.exp(log_prob - old), advantage),  # arXiv:2402.03300, eq. 3
                "grpo_no_clip": -math.exp(log_prob - old) * advantage,
                "gspo": -surrogate(math.exp((of_policy - of_old) / length), advantage),  # arXiv:2507.18071, eqs. 5 and 7
                "cispo": -clip(math.exp(held - old)) * advantage * log_prob,  # arXiv:2506.13585, eqs. 4 and 5
            }[config["loss"]]
            # V-trace's truncation (arXiv:1802.01561, eq. 1), or weights beyond the cap left out
            weight = math.exp({"none": 0.0, "token": old - sampler, "sequence": of_old - of_sampler}[level])
            weight = weight if weight <= cap else cap if bound == "truncate" else 0.0
            ratio = reference - log_prob  # Schulman 2020, "Approximating KL divergence"; k3: arXiv:2402.03300, eq. 4
            kl = {"k1": -ratio, "k2": ratio**2 / 2, "k3": math.exp(ratio) - ratio - 1}[config["kl_estimator"]]
            per = {
                "sequence_mean": length * len(LENGTHS),  # arXiv:2402.03300, eq. 3
                "token_mean": sum(LENGTHS),  # arXiv:2503.14476, eq. 8
                "constant": LONGEST * len(LENGTHS),  # arXiv:2503.20783, section 3.2
            }[config["loss_normalization"]]
            total += (weight * loss + config["beta"] * kl) / per
    return total


def paper_gradient(config: dict, advantages: Sequence[float], log_probs: Rows, *others: Rows) -> list[float]:
    """The gradient of `paper_loss` by each log-prob of the policy, one response after another, by finite differences."""

    def moved(place: int, token: int, by: float) -> float:
        rows = [list(row) for row in log_probs]
        rows[place][token] += by
        return paper_loss(config, advantages, log_probs, rows, *others)

    slope = lambda *at: 8 * (moved(*at, STEP) - moved(*at, -STEP)) - (moved(*at, 2 * STEP) - moved(*at, -2 * STEP))
    return [slope(place, token) / (12 * STEP) for place, length in enumerate(LENGTHS) for token in range(length)]


def settings() -> Iterator[tuple[dict, dict]]:
    """Every loss with every normalisation and correction; KL estimators, clips, baselines and deviations take turns."""
    turns = zip(
        cycle(("k1", "k2", "k3")),
        cycle(((None, 0.0), (0.28, 1.5))),
        cycle(product(("group_mean", "leave_one_out"), (True, False), ("group", "group_population", "batch"))),
        strict=False,
    )
    losses = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo")
    corrections = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    every = product(losses, ("sequence_mean", "token_mean", "constant"), corrections)
    for (loss, normalization, correction), (kl, (high, dual_clip), (baseline, by_std, std_of)) in zip(
        every, turns, strict=False
    ):
        numbers = {"cliprange": 0.2, "cliprange_high": high, "dual_clip": dual_clip, "beta": 0.1, "correction_cap": 1.1}
        names = {"loss_normalization": normalization, "kl_estimator": kl, "sampler_correction": correction}
        advantage = {"baseline": baseline, "normalize_by_std": by_std, "std_of": std_of, "advantage_eps": 1e-6}
        yield {"loss": loss, **names, **numbers}, {"group_size": GROUP, **advantage}


def table() -> dict:
    """The made-up responses, and of each setting the advantages, the loss and its gradient."""
    drawn = random.Random(0)
    policies = [[[round(drawn.gauss(-1, 0.3), 3) for _ in range(length)] for length in LENGTHS] for _ in range(4)]
    rows = []
    for loss, advantage in settings():
        advantages = [paper_advantage(place, REWARDS, advantage) for place in range(len(REWARDS))]
        values = [
            *advantages,
            paper_loss(loss, advantages, policies[0], *policies),
            *paper_gradient(loss, advantages, *policies),
        ]
        rows.append({"loss": loss, "advantage": advantage, "values": [round(value, 10) for value in values]})
    return {"rewards": REWARDS, "max_new_tokens": LONGEST, "log_probs": policies, "settings": rows}


def main() -> None:
    whole = table()
    rows = ",\n".join(json.dumps(row) for row in whole.pop("settings"))
    TABLE.write_text(f'{json.dumps(whole)[:-1]},\n"settings": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()

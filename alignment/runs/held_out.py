"""What the evaluations of a run are called, as its record has them: how they were sampled, and
which accuracies there are beside the first."""

from collections.abc import Mapping, Sequence
from typing import Any

ACCURACY = "avg_all_rewards"


def evaluation_words(args: Mapping[str, Any], rule: str = "") -> str:
    """How evaluations were sampled and graded, by a command's arguments: "sampled at T=0.6, 4
    samples a problem". `rule` is the one that graded; by default it is said only where --eval_rule
    names it."""
    temperature = args.get("eval_temperature")
    if temperature is None:
        temperature = args.get("sampling_temperature", 1.0)
    words = ["greedy"]
    if temperature:
        words = [f"sampled at T={temperature:g}"]
    if args.get("eval_top_p") is not None:
        words.append(f"top-p {args['eval_top_p']:g}")
    top_k = args.get("eval_top_k")
    if top_k == 0:
        words.append("no top-k")
    elif top_k is not None:
        words.append(f"top-k {top_k}")
    samples = args.get("eval_samples") or args.get("num_samples") or 1
    if samples > 1:
        words.append(f"{samples} samples a problem")
    rule = rule or args.get("eval_rule", "")
    if rule:
        words.append(f"graded by {rule}")
    if args.get("eval_greedy"):
        words.append("and greedy ones beside them")
    return ", ".join(words)


def further_accuracies(evals: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Label -> key of the accuracies in records of evaluations beside `ACCURACY`: those of other
    tasks and of greedy responses, and of several samples pass@k of the largest k, and maj@k."""
    labels: dict[str, str] = {}
    keys: dict[str, None] = {}
    for record in evals:
        keys |= dict.fromkeys(record)
    for key_of_accuracy in keys:
        if not key_of_accuracy.endswith(ACCURACY):
            continue
        prefix = key_of_accuracy.removesuffix(ACCURACY)
        if prefix:
            labels[prefix.removesuffix("/")] = f"{prefix}{ACCURACY}"
        largest = max((_samples_of(key, f"{prefix}pass@") for key in keys), default=0)
        if largest > 1:
            for metric in (f"pass@{largest}", f"maj@{largest}"):
                if f"{prefix}{metric}" in keys:
                    labels[f"{prefix}{metric}".replace("/", " ")] = f"{prefix}{metric}"
    return labels


def _samples_of(key: str, beginning: str) -> int:
    """The k of a key that is `beginning` and k; 0 of any other key."""
    k = key.removeprefix(beginning)
    return int(k) if k != key and k.isdigit() else 0

"""The rule of the task `evens`."""

import re


def even_between(response, ground_truth):
    """1 for an even number between the two of the ground truth, in answer tags; the format alone
    earns nothing."""
    answer = re.search(r"</think> <answer> (\d+) </answer>$", response)
    low, high = map(int, ground_truth.split())
    right = answer is not None and int(answer[1]) % 2 == 0 and low < int(answer[1]) < high
    return {
        "reward": float(right),
        "format_reward": float(answer is not None),
        "answer_reward": float(right),
    }

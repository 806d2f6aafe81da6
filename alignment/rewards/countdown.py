"""The Countdown rule: an expression uses each given number exactly once, and its value is the
target.

A ground truth is `65 = 19 36 55 7`: the target, then the numbers. Expressions are parsed, never
evaluated as Python: they may hold sums, differences, products, quotients, minus signs and whole
numbers, and nothing else.
"""

import ast
import operator
import re
from fractions import Fraction

from alignment.core.records import Score

MAX_CHARS = 200  # of an expression
EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# One thought and one answer, a line break between them, and nothing else.
TURN = re.compile(
    r"<think>(?:(?!</?think>).)*</think>\n<answer>(?:(?!</?answer>).)*</answer>", re.DOTALL
)
TOLERANCE = Fraction(1, 100_000)
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_reward_fn(response: str, ground_truth: str) -> Score:
    r"""Score the continuation of a prompt that ends in `<think>`.

    Format: 1 for `...</think>\n<answer>...</answer>` alone, else 0.1 for a closed thought, 0.5 for
    an answer in its tags. Answer, which is the reward: 1 where the last answer is right.
    """
    turn = f"<think>{response}".strip()
    answer = countdown_answer(response)
    answer_reward = float(answer is not None and is_right(answer, ground_truth))
    return {
        "reward": answer_reward,
        "format_reward": _format_reward(turn, has_answer=answer is not None),
        "answer_reward": answer_reward,
    }


def countdown_answer(response: str) -> str | None:
    """The text of the last answer in its tags; None where there is none."""
    answers = ANSWER.findall(response)
    return answers[-1].strip() if answers else None


def _format_reward(turn: str, has_answer: bool) -> float:
    if TURN.fullmatch(turn):
        return 1.0
    reward = 0.0
    if "</think>" in turn:
        reward += 0.1
    if has_answer:
        reward += 0.5
    return reward


def is_right(expression: str, ground_truth: str) -> bool:
    """Whether an expression uses each given number exactly once, and no other, and is within 1e-5
    of the target."""
    target, _, numbers = ground_truth.partition("=")
    evaluated = value_of(expression)
    if evaluated is None:
        return False
    value, used = evaluated
    given = [int(number) for number in numbers.split()]
    return sorted(used) == sorted(given) and abs(value - int(target)) < TOLERANCE


def value_of(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it.

    None for a text that is no expression, or divides by zero.
    """
    text = expression.strip()
    if len(text) > MAX_CHARS or not EXPRESSION.fullmatch(text):
        return None
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
        return value, [int(number) for number in re.findall("[0-9]+", text)]
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    """The value of a node. Raises ValueError for anything but + - * / and whole numbers, such as a
    power."""
    match node:
        case ast.Constant(value=int(number)) if number < 10**9:
            return Fraction(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATIONS:
            return OPERATIONS[type(sign)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
    raise ValueError(f"{type(node).__name__} is not allowed")

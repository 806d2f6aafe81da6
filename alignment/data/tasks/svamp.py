"""Rows of SVAMP (Patel et al. 2021, arXiv:2103.07191), each with a worked solution that its equation gives.

Training rows, of MAWPS and ASDiv-A, name their numbers by placeholders, and have an equation in prefix form:

    Question                                                          Numbers     Equation            Answer
    ... number0 books in each of his number1 bookshelves , how ...    56.0 9.0    * number0 number1   504.0

Test rows have the first half of the question as Body, and "( 56.0 * 9.0 )". Both teach

    <think> 56 * 9 = 504 </think> <answer> 504 </answer>"""

import re
from collections.abc import Iterator

from alignment.data.tasks.countdown import OPERATIONS
from alignment.data.tasks.own_data import cell_text
from alignment.system.errors import UserError


def svamp_row(place: str, cells: dict) -> dict[str, str]:
    """The row's question, answer and solution, which is "" where the equation has another value than the answer. Numbers have
    four decimals at most. Raises `UserError`, naming the place, for a malformed row."""
    question, equation, answer = (cell_text(place, cells, column).strip() for column in ("Question", "Equation", "Answer"))
    steps: list[str] = []
    try:
        if "Numbers" in cells:
            numbers = [number(text) for text in cell_text(place, cells, "Numbers").split()]
            question, equation = (re.sub(r"number(\d+)", lambda m: numbers[int(m[1])], text) for text in (question, equation))
            question = re.sub(r" (?=[.,?])", "", question)
        else:
            body = cell_text(place, cells, "Body").strip()
            question = f"{body} {question}" if body[-1] in ".,?!" else f"{body}, {question[0].lower()}{question[1:]}"
        answer, value = number(answer), calculate(iter(equation.split()), steps)
    except (ValueError, LookupError, StopIteration, ArithmeticError, RecursionError) as error:
        raise UserError(
            f"{place}: Numbers, Equation and Answer make no calculation ({str(error) or 'it breaks off'})"
        ) from None
    return {"question": question, "answer": answer, "solution": " ; ".join(steps) if value == answer else ""}


def calculate(tokens: Iterator[str], steps: list[str]) -> str:
    """The value of the equation that `tokens` begin, in prefix form or in parentheses; appends its calculations to `steps`."""
    if (token := next(tokens)) == "(":
        left, sign, right, _ = calculate(tokens, steps), next(tokens), calculate(tokens, steps), next(tokens)
    elif token in OPERATIONS:
        left, sign, right = calculate(tokens, steps), token, calculate(tokens, steps)
    else:
        return number(token)
    result = number(OPERATIONS[sign](float(left), float(right)))
    steps.append(f"{left} {sign} {right} = {result}")
    return result


def number(value: float | str) -> str:
    """A number as people write it: 504, not 504.0; at most four decimals."""
    return f"{round(float(value), 4):.12g}"

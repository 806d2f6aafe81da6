"""Do exactly the tokens of a worked solution, and the end token behind them, carry SFT's loss?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from alignment.training.sft import (
    Example,
    batch_loss,
    collate_examples,
    count_response_tokens,
)
from alignment.verification.check import Check
from alignment.verification.splits import words_of

# Some teachers are careless on purpose: a quarter of the solutions of arithmetic is wrong.
MOST_UNPAID = 0.5


def without_spaces(text: str) -> str:
    """A text but for case and white space."""
    return words_of(text).replace(" ", "")


@dataclass(frozen=True)
class Demonstrations:
    """Some of the worked solutions that a warm start is trained on."""

    examples: Sequence[Example]
    """Token ids of prompts and responses, as SFT takes them."""
    responses: Sequence[str]
    """The solution of each example, as its row has it; its beginning may stand in the prompt."""
    prompts: Sequence[str]
    shared: int
    """How many solutions, of all, are of test questions."""
    tokenizer: Any
    pad_id: int
    paid: Sequence[bool]
    """Whether the rule pays each solution; empty where these are the user's own."""

    def checks(self) -> Iterator[Check]:
        """Every check of the warm start's data."""
        yield Check("warm start: solutions of test questions", 0.0, lambda: self.shared)
        yield Check("warm start: solutions with wrong labels", 0.0, self.wrongly_labelled)
        if self.paid:
            what = "warm start: share of solutions that earn nothing"
            yield Check(what, MOST_UNPAID, lambda: 1 - sum(self.paid) / len(self.paid))

    def wrongly_labelled(self) -> int:
        """How many examples have a loss at other tokens than those of the response and one end
        token behind it, or another weight than 1 / response tokens of the batch."""
        batch = collate_examples(self.examples, self.pad_id)
        rows = range(len(self.examples))
        tokens = count_response_tokens(self.examples)

        def compute_loss(log_probs_BT: torch.Tensor) -> torch.Tensor:
            loss, _ = batch_loss(tokens, rows, log_probs_BT, batch.response_mask)
            return loss

        log_probs_BT = torch.zeros(batch.labels.shape, dtype=torch.float64)
        gradient_BT, _ = torch.func.grad_and_value(compute_loss)(log_probs_BT)
        weights_BT = -gradient_BT
        wrong = 0
        for row in rows:
            carries_T = weights_BT[row] != 0
            weights = weights_BT[row][carries_T]
            trained = batch.labels[row][carries_T].tolist()
            first = int(carries_T.int().argmax())
            prompt = batch.input_ids[row][: first + 1].tolist()
            is_even = torch.allclose(weights, torch.full_like(weights, 1 / self.trained_tokens))
            wrong += not (is_even and self.is_right(row, prompt, trained))
        return wrong

    @property
    def trained_tokens(self) -> int:
        """The tokens of all responses, by the tokenizer, with an end token behind each."""
        return sum(len(response) for _, response in self.examples)

    def is_right(self, row: int, prompt: Sequence[int], trained: Sequence[int]) -> bool:
        """Whether an example trains its solution and one end token, behind its whole prompt."""
        end = self.tokenizer.eos_token_id
        if not trained or trained[-1] != end or end in trained[:-1]:
            return False
        text = words_of(self.decode(trained[:-1]))
        solution = self.responses[row].removesuffix(self.tokenizer.eos_token)
        if not text or not words_of(solution).endswith(text):
            return False
        # The prompt may hold the solution's beginning, such as an opening tag, but no more than it.
        whole = words_of(self.decode([*prompt, *trained[:-1]]))
        if not without_spaces(whole).endswith(without_spaces(solution)):
            return False
        return words_of(self.decode(prompt)).endswith(words_of(self.prompts[row]))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

"""Whether our path through a model gives the log-probs of the model's own forward pass, on a few random tokens."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from alignment.core.tokens import collate
from alignment.policy.log_probs import get_response_log_probs
from alignment.policy.plain_path import own_attention, take_plain_path, takes_plain_path
from alignment.system.errors import UserError

WINDOW = 8
"""Attention windows during a check, so that a short row is longer than they are. It stands for the model's own window, which the
same code reads at the same places."""
WINDOW_NAMES = ("sliding_window", "attention_chunk_size")
ROWS = ((0, 9), (0, 6), (1, 5), (1, 12), (2, 7))
"""Each row's prompt, by number, and its response's tokens: two prompts of two rows, and a row of its own."""
PROMPT_TOKENS = (11, 3, 4)
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Mean nats a token. Sums in another order make some 1e-6 in fp32; a feature that is left out makes tenths to several."""
TOLERANCE_16_BIT = 0.15

Ids = list[int]


def random_ids(model: torch.nn.Module, number: int) -> Ids:
    """Token ids, the same each time, that leave torch's own generators as they are."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (number,), generator=torch.Generator().manual_seed(0)).tolist()


def check_prompts(model: torch.nn.Module) -> list[Ids]:
    """The prompts that checks use."""
    return [piece.tolist() for piece in torch.tensor(random_ids(model, sum(PROMPT_TOKENS))).split(PROMPT_TOKENS)]


@contextmanager
def short_windows(model: torch.nn.Module) -> Iterator[None]:
    """Have a model's attention windows be `WINDOW` long."""
    owners = {id(owner): owner for owner in (model.config, *model.modules())}.values()
    found = [(owner, name, vars(owner).get(name)) for owner in owners for name in WINDOW_NAMES]
    windows = [(owner, name, length) for owner, name, length in found if isinstance(length, int) and length > WINDOW]
    try:
        for owner, name, _ in windows:
            setattr(owner, name, WINDOW)
        yield
    finally:
        for owner, name, length in windows:
            setattr(owner, name, length)


def row_log_probs(model: torch.nn.Module, prompt: Ids, response: Ids) -> torch.Tensor:
    """The response's log-probs [tokens] by the model's own attention and logits, of a row alone."""
    ids = torch.tensor([prompt + response], device=model.get_input_embeddings().weight.device)
    with own_attention(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()
    return logits.log_softmax(dim=-1).gather(-1, torch.tensor(response)[:, None]).squeeze(1)


def disagreement(model: torch.nn.Module, own: torch.Tensor, compute: Callable[[], torch.Tensor]) -> str:
    """How `compute()` differs from a model's own log-probs [N]; empty where it does not."""
    try:
        difference = float((compute() - own).abs().mean())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any kind: a model that does not take what it is given
        return f"fail: {(str(error) or type(error).__name__).splitlines()[0]}"
    limit = TOLERANCE.get(model.dtype, TOLERANCE_16_BIT)
    return "" if difference <= limit else f"differ by {difference:.2g} nats a token from those of the model's own forward pass"


def choose_path(model: torch.nn.Module) -> None:
    """Have a model take the plain path if packed rows are not what it computes itself, and say so.

    Raises `UserError` where its plain path is no better, and for a model that sees later tokens or has no linear head.
    """
    family, head = model.config.model_type, model.get_output_embeddings()
    if getattr(getattr(head, "weight", None), "ndim", 0) != 2:
        raise UserError(f"--model: {family} has no linear output head, so token log-probs cannot be computed from hidden states")
    prompts, ids = check_prompts(model), random_ids(model, sum(number for _, number in ROWS))
    responses = [piece.tolist() for piece in torch.tensor(ids).split([number for _, number in ROWS])]
    batch = collate([prompts[prompt] for prompt, _ in ROWS], responses, pad_token_id=0)
    was_training = model.training
    model.eval()
    with torch.no_grad(), short_windows(model):
        own = torch.cat([row_log_probs(model, *row) for row in zip([prompts[p] for p, _ in ROWS], responses, strict=True)])
        start = row_log_probs(model, prompts[0], responses[0][:3])
        if own.isfinite().all():  # else there is nothing to compare with: damaged weights are the run's to notice

            def ours() -> torch.Tensor:
                mask = batch.response_mask
                return get_response_log_probs(model, batch.input_ids, batch.labels, response_mask=mask)["log_probs"].cpu()[mask]

            if disagreement(model, own[:3], lambda: start):
                raise UserError(f"--model: {family} sees later tokens: it is no causal language model")
            if not takes_plain_path(model) and (reason := disagreement(model, own, ours)):
                say(f"{family}: log-probs of packed rows {reason}; rows are padded, and nothing is shared: slower, and exact")
                take_plain_path(model)
            if takes_plain_path(model) and (reason := disagreement(model, own, ours)):
                raise UserError(f"--model: {family} cannot be trained: log-probs of padded rows {reason}")
    model.train(was_training)


@functools.cache
def say(text: str) -> None:
    """Print a line, once a process."""
    print(text, file=sys.stderr, flush=True)

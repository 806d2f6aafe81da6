"""Whether our path through a model gives the log-probs of the model's own forward pass, on a few
random tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from alignment.core.tokens import collate
from alignment.model.huggingface import PreTrainedModel, input_embeddings
from alignment.model.log_probs import get_response_log_probs
from alignment.model.packing import (
    OWN_ATTENTION,
    attention_named,
    take_plain_path,
    takes_plain_path,
)
from alignment.system.errors import UserError, is_out_of_memory
from alignment.system.terminal import say_once

# Attention windows during a check, shorter than its rows. The same code reads a model's own at the
# same places.
WINDOW = 4
# The tokens of each prompt; each row's prompt, by number, and the tokens of its response. Two
# prompts have two rows each, and one has a single row.
PROMPT_TOKENS = (11, 3, 4)
PROMPT_OF_ROW = (0, 0, 1, 1, 2)
RESPONSE_TOKENS = (9, 6, 5, 12, 7)
# Mean nats a token. Sums in another order make 1e-6 in fp32; a feature left out, tenths to several.
TOLERANCE = 1e-3
Ids = list[int]


class NotFinite(Exception):
    """A model's own log-probs are not finite, so there is nothing to compare with."""


def random_pieces(model: PreTrainedModel, lengths: Sequence[int]) -> list[Ids]:
    """Token ids in pieces, the same each time; torch's own generators stay as they are."""
    vocabulary = input_embeddings(model).shape[0]
    ids = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return [piece.tolist() for piece in ids.split(list(lengths))]


class Float32Mode(TorchFunctionMode):
    """Casts 16-bit numbers to fp32 for each operation that reads them: rounding alone makes tenths
    of a nat in a deep model. What an operation writes into a 16-bit tensor is lost; forward passes
    write into none."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point() and tensor.itemsize < 4:
                return tensor.float()
            return tensor

        args, kwargs = tree_map_only(torch.Tensor, widen, (args, kwargs or {}))
        return function(*args, **kwargs)


def own_log_probs(model: PreTrainedModel, rows: Sequence[tuple[Ids, Ids]]) -> torch.Tensor:
    """The log-probs [N] of (prompt, response) rows' responses, one row after another, by the
    model's own attention and logits. Shorter rows are followed by a token that a causal model does
    not see, so nothing depends on how it takes masks. Raises `UserError` for a model whose own
    forward pass fails, `NotFinite` for damaged weights, which are the run's to notice."""
    ids = [torch.tensor([*prompt, *response]) for prompt, response in rows]
    ids_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    logits_BTV = _own_logits(model, ids_BT)
    # place t has the log-prob of token t + 1
    log_probs_BTV = logits_BTV[:, :-1].float().cpu().log_softmax(dim=-1)
    log_probs_BT = log_probs_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(2)
    responses = []
    for log_probs_T, (prompt, response) in zip(log_probs_BT, rows, strict=True):
        start = len(prompt) - 1
        responses.append(log_probs_T[start : start + len(response)])
    log_probs_N = torch.cat(responses)
    if not log_probs_N.isfinite().all():
        raise NotFinite
    return log_probs_N


def _own_logits(model: PreTrainedModel, ids_BT: torch.Tensor) -> torch.Tensor:
    """The logits [batch, sequence, vocabulary] of a model's own forward pass. Raises `UserError`
    where that fails."""
    try:
        with attention_named(model, OWN_ATTENTION):
            device = input_embeddings(model).device
            return model(input_ids=ids_BT.to(device), use_cache=False).logits
    except Exception as error:  # of any kind: it is the family's code
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"--model: {model.config.model_type}'s own forward pass fails ({_first_line(error)})"
        ) from error


def disagreement(own: torch.Tensor, compute: Callable[[], torch.Tensor]) -> str:
    """How `compute()` differs from a model's own log-probs [N]; empty where it does not."""
    try:
        difference = float((compute() - own).abs().mean())
    except NotFinite:
        raise
    except Exception as error:  # of any kind: a model that does not take what it is given
        # Memory that runs out says nothing of the model, which would compute otherwise in this run.
        if is_out_of_memory(error):
            raise
        return f"fail: {_first_line(error)}"
    if difference <= TOLERANCE:
        return ""
    return f"differ by {difference:.2g} nats a token from those of the model's own forward pass"


def _first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


@dataclass(frozen=True)
class AttentionWindow:
    """An attribute that says how far a model's attention looks back."""

    owner: object
    """The model's config, or one of its modules."""
    name: str
    tokens: int


def _attention_windows(model: PreTrainedModel) -> list[AttentionWindow]:
    """The attention windows of more than `WINDOW` tokens; those without a limit have None."""
    windows = []
    for owner in (model.config, *model.modules()):
        for name in ("sliding_window", "attention_chunk_size"):
            tokens = vars(owner).get(name)
            if isinstance(tokens, int) and tokens > WINDOW:
                windows.append(AttentionWindow(owner, name, tokens))
    return windows


@contextmanager
def self_check_mode(model: PreTrainedModel) -> Iterator[None]:
    """Have a model compute in fp32, its attention windows be `WINDOW` long, its dropout be off, and
    no gradient be kept."""
    windows = _attention_windows(model)
    was_training = model.training
    model.eval()
    try:
        for window in windows:
            setattr(window.owner, window.name, WINDOW)
        with torch.no_grad(), Float32Mode():
            yield
    finally:
        for window in windows:
            setattr(window.owner, window.name, window.tokens)
        model.train(was_training)


OUTCOMES: dict[str, bool] = {}


def run_check_once(name: str, model: PreTrainedModel, check: Callable[[], bool]) -> bool:
    """What `check()` returns; it runs once a process for each folder, configuration, attention and
    kind of devices. The type of the weights makes no difference, since a check computes in fp32.
    False, for this time, where it raises `NotFinite`."""
    devices = {parameter.device for parameter in model.parameters()}
    kinds = [device.type for device in devices]
    config = model.config.to_dict() | {"dtype": None}
    key = str((name, model.name_or_path, model.config._attn_implementation, kinds, config))
    if key not in OUTCOMES:
        try:
            OUTCOMES[key] = check()
        except NotFinite:
            return False
    return OUTCOMES[key]


def choose_path(model: PreTrainedModel) -> bool:
    """Have a model take the plain path if packed rows are not what it computes itself, and say so.
    Returns whether it does. Raises `UserError` where its plain path is no better, and for a model
    that sees later tokens or has no linear head."""
    family = model.config.model_type
    head = model.get_output_embeddings()
    if getattr(getattr(head, "weight", None), "ndim", 0) != 2:
        raise UserError(
            f"--model: {family} has no linear output head, so its log-probs cannot be computed from"
            " hidden states"
        )
    with self_check_mode(model):
        if not takes_plain_path(model):
            reason = _path_disagreement(model)
            if reason:
                take_plain_path(model)
                say_once(
                    f"{family}: log-probs of packed rows {reason}; rows are padded, nothing is"
                    " shared: slower, and exact"
                )
        if takes_plain_path(model):
            reason = _path_disagreement(model)
            if reason:
                raise UserError(
                    f"--model: {family} cannot be trained: log-probs of padded rows {reason}"
                )
    return takes_plain_path(model)


def _path_disagreement(model: PreTrainedModel) -> str:
    """`disagreement` of the log-probs that the policy computes. Raises `UserError` for a model that
    sees later tokens."""
    pieces = random_pieces(model, PROMPT_TOKENS)
    prompts = [pieces[number] for number in PROMPT_OF_ROW]
    responses = random_pieces(model, RESPONSE_TOKENS)
    own_N = own_log_probs(model, list(zip(prompts, responses, strict=True)))
    # What comes after a response's first half must not change the log-probs of that half.
    half_responses = [response[: len(response) // 2] for response in responses]
    halves_N = own_log_probs(model, list(zip(prompts, half_responses, strict=True)))
    in_half = [torch.arange(len(response)) < len(response) // 2 for response in responses]
    difference = (halves_N - own_N[torch.cat(in_half)]).abs().mean()
    if difference > TOLERANCE:
        raise UserError(
            f"--model: {model.config.model_type} sees later tokens: it is no causal language model"
        )
    batch = collate(prompts, responses, pad_token_id=0)

    def packed_log_probs() -> torch.Tensor:
        log_probs_BT = get_response_log_probs(model, **vars(batch))["log_probs"]
        return log_probs_BT.cpu()[batch.response_mask]

    return disagreement(own_N, packed_log_probs)

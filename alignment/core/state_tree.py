"""The state of an estimator of advantages as JSON and tensors, and back, to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# The key of a dict that stands for a tensor, whose value is the tensor's name.
TENSOR = "__tensor__"


def split_tensors(state: Any, tensors: dict[str, Tensor]) -> Any:
    """`state` as JSON has it, with its tensors added to `tensors` by names of their own. Raises
    TypeError for what a checkpoint cannot hold."""
    import torch

    if isinstance(state, torch.Tensor):
        name = str(len(tensors))
        # A copy: a file of safetensors refuses two tensors that share memory.
        tensors[name] = state.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {TENSOR: name}
    if type(state) is list:
        return [split_tensors(part, tensors) for part in state]
    if type(state) is dict:
        if not all(type(key) is str for key in state) or TENSOR in state:
            raise TypeError(f"a dict of the state has a key that is no text, or is {TENSOR!r}")
        return {key: split_tensors(part, tensors) for key, part in state.items()}
    if state is None or type(state) in (bool, int, float, str):
        return state
    raise TypeError(
        f"the state holds {type(state).__name__}; a checkpoint keeps numbers, texts, true, false,"
        " None, tensors, and lists and dicts of these"
    )


def join_tensors(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """The state that `split_tensors` took apart."""
    if isinstance(tree, list):
        return [join_tensors(part, tensors) for part in tree]
    if isinstance(tree, dict):
        if TENSOR in tree:
            return tensors[tree[TENSOR]]
        return {key: join_tensors(part, tensors) for key, part in tree.items()}
    return tree

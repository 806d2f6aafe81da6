"""What this package uses of transformers, without libraries that only other uses need.

transformers loads sharded tensors, torchao and scipy wherever they are installed, for sharded or
quantised models and object detection. It and torch's optimisers load torch's compiler, to exempt
functions from it. Without these, importing this module takes 3.5 s of a core instead of 6. Under
torchrun, beside vLLM, or where transformers is loaded already, all are loaded."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch

COMPILER = "torch._dynamo"
MASKS = "torch._dynamo._trace_wrapped_higher_order_op"


def _unchanged(function: Callable | None = None, *arguments, **options) -> Callable:
    """The function itself: stands for a decorator, with or without options, that changes compiled
    functions only."""
    return function or _unchanged


class CompiledAutograd:
    """Stands for the compiler's own gradients, which torch.func's switch off."""

    _disable = staticmethod(contextlib.nullcontext)

    def __getattr__(self, name: str):
        return getattr(load_compiler().compiled_autograd, name)


class CompilerStandIn(ModuleType):
    """Stands for torch's compiler, until more is needed than has a meaning where nothing is
    compiled: then that is loaded."""

    disable = staticmethod(_unchanged)
    allow_in_graph = staticmethod(_unchanged)
    assume_constant_result = staticmethod(_unchanged)
    # no module is one yet
    eval_frame = SimpleNamespace(OptimizedModule=type("OptimizedModule", (), {}))
    compiled_autograd = CompiledAutograd()
    __path__ = []  # it is a package, whose modules `SubmoduleFinder` finds

    @staticmethod
    def graph_break(*arguments) -> None:
        """Do nothing: there is no graph."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load_compiler(), name)


class SubmoduleFinder(Loader):
    """Finds the modules of torch's compiler while a stand-in is in its place, and loads the
    compiler first."""

    def find_spec(self, name: str, path, target=None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{COMPILER}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        load_compiler()
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been loaded as one of the compiler's."""


FINDER = SubmoduleFinder()


def load_compiler() -> ModuleType:
    """The compiler itself, which takes the place of its stand-in."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        del sys.modules[COMPILER], sys.modules[MASKS], torch._dynamo
    return importlib.import_module(COMPILER)


NEEDED_IN_FULL_BY = {"transformers.modeling_utils", COMPILER, "vllm"}
if NEEDED_IN_FULL_BY.isdisjoint(sys.modules) and "RANK" not in os.environ:
    from transformers import utils

    def is_missing(*arguments) -> bool:
        return False

    # transformers takes these for missing, now and later
    for name in ("torch_distributed", "torch_flex_attn", "torchao", "scipy"):
        for module in (utils, utils.import_utils):
            setattr(module, f"is_{name}_available", is_missing)

    def transform_get_item_to_index():
        return load_compiler()._trace_wrapped_higher_order_op.TransformGetItemToIndex()

    masks: Any = ModuleType(MASKS)
    masks.TransformGetItemToIndex = transform_get_item_to_index
    torch._dynamo = CompilerStandIn(COMPILER)
    sys.modules[COMPILER] = torch._dynamo
    sys.modules[MASKS] = masks
    sys.meta_path.insert(0, FINDER)

from transformers import (  # noqa: E402, F401
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache, StaticLayer  # noqa: E402, F401
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402, F401
from transformers.utils import logging  # noqa: E402, F401
from transformers.utils.hub import cached_file  # noqa: E402, F401


def input_embeddings(model: PreTrainedModel) -> torch.Tensor:
    """The matrix [vocabulary, hidden] of a model's input embeddings."""
    return cast("torch.Tensor", model.get_input_embeddings().weight)


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of a model's decoder, in order."""
    layers: list[torch.nn.Module] = []
    for stack in model.get_decoder().children():
        if isinstance(stack, torch.nn.ModuleList):
            layers += stack
    return layers

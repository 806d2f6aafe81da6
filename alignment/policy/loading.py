"""Loading models and tokenizers onto their devices."""

import contextlib
import functools
import os
from collections.abc import Iterable, Mapping

import torch
from huggingface_hub.utils import logging as hub_logging

from alignment.policy.huggingface import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, logging
from alignment.policy.packing import ATTENTION
from alignment.policy.placement import ModelShape, partition_layers
from alignment.system.errors import UserError

logging.set_verbosity_error()
hub_logging.set_verbosity_error()  # it retries without a connection; our own message says what comes of that
logging.disable_progress_bar()  # loading a model is a matter of seconds; its bars would break up our own


def make_deterministic() -> None:
    """Turn on what torch has against kernels whose sums depend on timing."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first GPU matrix product is made
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def load_config(model_path: str):
    """The model's configuration. Raises `UserError` where it cannot be loaded."""
    return _load(AutoConfig.from_pretrained, model_path)


def _load(loader, model_path: str, **options):
    try:
        return loader(model_path, **options)
    except Exception as error:  # of many kinds, for a folder that transformers cannot make sense of
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--model {model_path}: cannot be loaded from this machine or from the hub ({reason})") from None


def load_tokenizer(model_path: str):
    """The model's tokenizer. Raises `UserError` where it has no end-of-sequence token: a response could never end."""
    load_config(model_path)
    tokenizer = _load(AutoTokenizer.from_pretrained, model_path)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--model {model_path}: its tokenizer has no EOS token, so responses could not be taught to end;"
            ' set "eos_token" in its tokenizer_config.json'
        )
    return tokenizer


def context_length(config) -> int:
    """The most tokens the model takes, prompt and response together."""
    return config.max_position_embeddings


def compute_dtype(name: str, device: str) -> str:
    """The type of matrix products on a device that --dtype names: "auto" is bfloat16 where the device multiplies it faster."""
    if name != "auto":
        return name
    fast = device.startswith("cuda") or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if fast else "float32"


def load_model(model_path: str, devices: tuple[str, ...], dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model, whole on one device or split by layers over several.

    Raises `UserError` for weights that are missing or damaged.
    """
    load_config(model_path)
    model, report = _load(
        AutoModelForCausalLM.from_pretrained, model_path, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
    )
    # transformers would fill these in at random and go on.
    absent = sorted(report["missing_keys"]) + [str(key) for key in report["mismatched_keys"]]
    if absent:
        raise UserError(f"--model {model_path}: {len(absent)} weights are missing or of another shape, such as {absent[0]}")
    if len(devices) == 1:
        return model.to(devices[0])
    return spread(model, partition_layers(ModelShape.from_config(model.config), devices))


def load_weights(model_path: str, dtype: torch.dtype) -> Iterable[tuple[str, torch.Tensor]]:
    """Every weight of a model, on the CPU, by its name; tied weights once. Raises `UserError` as `load_model` does."""
    return load_model(model_path, ("cpu",), dtype).named_parameters()


def spread(model: PreTrainedModel, device_map: Mapping[str, str]) -> PreTrainedModel:
    """Put each module on its device, and have it move its inputs there.

    Done here rather than by `from_pretrained(device_map=...)`, which takes a map with both GPUs and "cpu" to mean weights
    that wait on the CPU and visit a GPU at each use; such weights cannot be trained.
    """
    for name, device in device_map.items():
        model.get_submodule(name).to(device)
    return move_activations(model, device_map)


def move_activations(model: PreTrainedModel, device_map: Mapping[str, str]) -> PreTrainedModel:
    """Before each module's forward, move its inputs to the module's device."""
    for name, device in device_map.items():
        model.get_submodule(name).register_forward_pre_hook(functools.partial(_move_inputs, device), with_kwargs=True)
    return model


def _move_inputs(device: str, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    from accelerate.utils import send_to_device  # here, because it takes seconds to import and one device needs none of it

    move = functools.partial(send_to_device, device=device, non_blocking=device.startswith("cuda"))
    return move(args), move(kwargs)


def devices_of(model: PreTrainedModel) -> list[torch.device]:
    """The devices that a model's weights are on, in forward order."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def first_device(model: PreTrainedModel) -> torch.device:
    """The device that token ids go to."""
    return model.get_input_embeddings().weight.device


def autocast(device: torch.device | str, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype` while the weights stay in float32."""
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype != torch.float32)

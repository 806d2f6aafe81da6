"""Loading policies, references and tokenizers onto their places, and the optimiser."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence

import torch
from accelerate.utils import send_to_device
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from alignment.args import Args, RLArgs
from alignment.core.records import Batch
from alignment.core.tokens import split_rows, take_rows
from alignment.data.embedded import embedded_model
from alignment.policy.log_probs import get_response_log_probs
from alignment.policy.model_paths import model_path
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.packing import ATTENTION
from alignment.policy.parallel_micro_batches import cut_for_parallel, run_parallel
from alignment.policy.placement import ModelShape, Roles, assign_roles, partition_layers
from alignment.system.errors import UserError

logging.set_verbosity_error()
hub_logging.set_verbosity_error()  # its retries without a connection; what comes of them is said in one line
logging.disable_progress_bar()  # loading a model is a matter of seconds; the bars would break up our own


def make_deterministic(args: RLArgs) -> None:
    """--deterministic: what torch has against kernels whose sums depend on timing."""
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first GPU matrix product is made
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def resolve_model(name: str, output_dir: str, flag: str = "--model") -> str:
    """A name that `from_pretrained` takes: embedded models are built on first use, folders must hold a model."""
    embedded = embedded_model(name, output_dir)
    return model_path(name, flag) if embedded is None else str(embedded)


def load_config(model_path: str):
    """The model's configuration. Raises `UserError` where there is none to be had."""
    return _read(AutoConfig.from_pretrained, model_path)


def _read(loader, model_path: str, **how):
    try:
        return loader(model_path, **how)
    except Exception as error:  # of many kinds, for a folder that transformers cannot make sense of
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--model {model_path}: cannot be loaded from this machine or from the hub ({reason})") from None


def load_tokenizer(model_path: str):
    """The model's tokenizer. Raises `UserError` where it has no end-of-sequence token: a response could never end."""
    load_config(model_path)
    tokenizer = _read(AutoTokenizer.from_pretrained, model_path)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--model {model_path}: its tokenizer has no EOS token, so responses could not be taught to end;"
            ' set "eos_token" in its tokenizer_config.json'
        )
    return tokenizer


def context_length(config) -> int:
    """The most tokens the model takes, prompt and response together."""
    return config.max_position_embeddings


def roles_of(args: Args, num_gpus: int | None = None) -> Roles:
    """Which device each role has, by the flags and by the GPUs that are visible. Raises `UserError` where that cannot work."""
    return assign_roles(
        torch.cuda.device_count() if num_gpus is None else num_gpus,
        sample_device=args.sample_device,
        reference_model_device=args.reference_model_device,
        eval_device=args.eval_device,
        policy_devices=args.policy_devices,
        vllm=sampler_kind(args) == "vllm",
    )


def sampler_kind(args: Args) -> str:
    """The engine that --sampler names, with "auto" decided by what is installed."""
    if args.sampler != "auto":
        return args.sampler
    from importlib.util import find_spec

    return "vllm" if find_spec("vllm") else "transformers"


def partition_model_across_devices(args: Args, num_gpus: int | None = None) -> dict[str, str]:
    """The policy's `device_map` for `from_pretrained`: module name -> device.

    The sampler's, the reference's and the evaluation's devices are reserved; the model is split over the rest, balanced
    by bytes (`placement.partition_layers`). `num_gpus` plans for a machine other than this one.
    """
    config = load_config(resolve_model(args.model, args.output_dir))
    return partition_layers(ModelShape.from_config(config), roles_of(args, num_gpus).policy)


def compute_dtype(args: Args, device: str) -> torch.dtype:
    """The type of matrix products on a device, "auto" decided."""
    fast = device.startswith("cuda") or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    name = args.dtype if args.dtype != "auto" else ("bfloat16" if fast else "float32")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_model(model_path: str, devices: tuple[str, ...], dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model, whole on one device or split by layers over several.

    Raises `UserError` for weights that are missing or damaged.
    """
    load_config(model_path)
    model, found = _read(
        AutoModelForCausalLM.from_pretrained,
        model_path,
        dtype=dtype,
        attn_implementation=ATTENTION,
        output_loading_info=True,
    )
    # transformers would fill these in at random and go on.
    absent = sorted(found["missing_keys"]) + [str(key) for key in found["mismatched_keys"]]
    if absent:
        raise UserError(f"--model {model_path}: {len(absent)} weights are missing or of another shape, such as {absent[0]}")
    if len(devices) == 1:
        return model.to(devices[0])
    return spread(model, partition_layers(ModelShape.from_config(model.config), devices))


def spread(model: PreTrainedModel, device_map: Mapping[str, str]) -> PreTrainedModel:
    """Put each module on its device, and have it fetch its inputs there.

    Done here rather than by `from_pretrained(device_map=...)`, which takes a map with both GPUs and "cpu" to mean
    weights that wait on the CPU and are brought in at each use; such weights cannot be trained.
    """
    for name, device in device_map.items():
        model.get_submodule(name).to(device)
    return move_activations(model, device_map)


def move_activations(model: PreTrainedModel, device_map: Mapping[str, str]) -> PreTrainedModel:
    """Before each module's forward, move what it is given to the module's device."""
    for name, device in device_map.items():
        model.get_submodule(name).register_forward_pre_hook(functools.partial(_fetch, device), with_kwargs=True)
    return model


def _fetch(device: str, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    there = functools.partial(send_to_device, device=device, non_blocking=device.startswith("cuda"))
    return there(args), there(kwargs)


def devices_of(model: PreTrainedModel) -> list[torch.device]:
    """The devices that a model's weights are on, in forward order."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype` while the weights stay in float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def policy_log_probs(model: PreTrainedModel, batch: Batch, dtype: torch.dtype, **how) -> dict[str, torch.Tensor]:
    """`get_response_log_probs` of a batch that is still on the CPU, in `dtype`."""
    with autocast(model.get_input_embeddings().weight.device, dtype):
        return get_response_log_probs(model, batch.input_ids, batch.labels, response_mask=batch.response_mask, **how)


def batch_log_probs(
    model: PreTrainedModel,
    batch: Batch,
    distribution: Mapping[str, float],
    micro_batch_tokens: int,
    dtype: torch.dtype,
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """A model's log-probs [B, T] of a batch's responses, on the CPU, 0 elsewhere and in rows that are not among `rows` (None:
    all); `distribution` is what was sampled from."""
    rows = range(len(batch.labels)) if rows is None else rows
    found_BT = torch.zeros(batch.labels.shape)
    split = split_rows(batch.input_ids, batch.response_mask)
    pieces, lanes = cut_for_parallel(model, [split[row] for row in rows], micro_batch_tokens)
    pieces = [[rows[i] for i in piece] for piece in pieces]

    @torch.no_grad()
    def log_probs(piece: Sequence[int]) -> torch.Tensor:
        return policy_log_probs(model, take_rows(batch, piece), dtype, **distribution)["log_probs"].cpu()

    for piece, part_BT in zip(pieces, run_parallel(log_probs, pieces, lanes), strict=True):
        found_BT[piece, : part_BT.shape[1]] = part_BT
    return found_BT


def make_optimizer(
    model: PreTrainedModel, learning_rate: float, weight_decay: float, kind: str = "adamw"
) -> torch.optim.Optimizer:
    """The AdamW that --optimizer names, with betas 0.9 and 0.95; matrices alone decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return OPTIMIZERS[kind](groups, lr=learning_rate, betas=(0.9, 0.95))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set every parameter group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = value

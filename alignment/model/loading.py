"""Loading models and tokenizers onto their devices."""

import contextlib
import copy
import functools
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from alignment.core.text import end_token_ids
from alignment.model.device_map import partition_layers
from alignment.model.huggingface import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    input_embeddings,
    logging,
)
from alignment.model.packing import ATTENTION, OWN_ATTENTION, Packing, take_plain_path
from alignment.model.self_check import (
    NotFinite,
    choose_path,
    disagreement,
    own_log_probs,
    random_pieces,
    run_check_once,
    self_check_mode,
)
from alignment.model.shape import ModelShape, cast_by_autocast
from alignment.system.errors import UserError
from alignment.system.garbage import collect_as_usual
from alignment.system.terminal import say_once

logging.set_verbosity_error()
# it retries without a connection; our own message says what comes of that
hub_logging.set_verbosity_error()
# loading a model is a matter of seconds; its bars would break up our own
logging.disable_progress_bar()
for kind in ("cpu", "cuda"):  # autocast would leave the product of a mixture's experts in float32
    torch.library.register_autocast("aten::_grouped_mm", kind, torch.bfloat16)

# Embeddings are padded to a round number of rows: deepseek-llm-7b's 102400 rows for 100015 tokens,
# 2.3 %, are the most spare ones of the families that are known here.
SPARE_ROWS = 0.1

ALIGNMENT = 64  # bytes, of all that torch allocates on the CPU


def make_deterministic() -> None:
    """Turn on what torch has against kernels whose sums depend on timing."""
    # read when the first GPU matrix product is made
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def load_config(model_path: str):
    """The model's configuration. Raises `UserError` where it cannot be loaded, and for what is no
    causal language model."""
    config = _load(AutoConfig.from_pretrained, model_path)
    if config.is_encoder_decoder:
        reason = "is an encoder and a decoder; use a model that only decodes"
    elif config.get_text_config() is not config:
        reason = (
            "nests its text model in a larger one (text_config); save that part as a folder of its"
            " own and name it"
        )
    elif type(config) not in AutoModelForCausalLM._model_mapping:
        reason = "is of no family that transformers loads as a causal language model"
    elif not _says_how_long(config):
        reason = (
            "does not say how many tokens it takes; add max_position_embeddings to its config.json"
        )
    else:
        return config
    raise UserError(f"--model {model_path} ({config.model_type}) {reason}")


def _says_how_long(config) -> bool:
    """Whether a configuration says how many tokens its model takes."""
    longest = getattr(config, "max_position_embeddings", None)
    return isinstance(longest, int) and longest >= 1


def _load(loader, model_path: str, **options):
    try:
        return loader(model_path, **options)
    except Exception as error:  # of many kinds, for a folder that transformers cannot make sense of
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--model {model_path}: cannot be loaded from this machine or from the hub ({reason})"
        ) from None


def load_generation_config(model_path: str) -> GenerationConfig | None:
    """The defaults of the model's generation_config.json; None without one. Raises `UserError` for
    one that cannot be read."""
    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:  # transformers then takes the model to have none
        return None
    except Exception as error:  # of many kinds: it makes an object of each value
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "correct that file, or delete it"
        raise UserError(
            f"--model {model_path}: its generation_config.json cannot be read ({reason}); {remedy}"
        ) from None


def load_tokenizer(model_path: str):
    """The model's tokenizer. Raises `UserError` if it has no EOS token, makes ids without an
    embedding, or has no tokens for many of the embeddings; says so where the model's own
    configuration names another EOS token."""
    config = load_config(model_path)
    tokenizer = _load(AutoTokenizer.from_pretrained, model_path)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--model {model_path}: its tokenizer has no EOS token, so responses could not be"
            ' taught to end; set "eos_token" in its tokenizer_config.json'
        )
    _check_vocabulary(model_path, tokenizer, config.vocab_size)
    listed = _listed_ends(model_path, load_generation_config(model_path), config)
    if listed and tokenizer.eos_token_id not in listed:
        ours = f"{tokenizer.eos_token} ({tokenizer.eos_token_id})"
        ends = []
        for number in sorted(listed):
            ends.append(f"{tokenizer.convert_ids_to_tokens(number)} ({number})")
        theirs = ", ".join(ends)
        say_once(
            f"--model {model_path}: its tokenizer ends texts with {ours}, its configuration with"
            f" {theirs}: any of these ends a response; are its files of different models?"
        )
    return tokenizer


def _check_vocabulary(model_path: str, tokenizer, vocabulary: int) -> None:
    """Raise `UserError` for a tokenizer that makes ids without one of `vocabulary` embeddings, or
    has no tokens for many of these."""
    ids = set(tokenizer.get_vocab().values())
    # Added tokens come up only where a text spells them out; some families have more of them than
    # embeddings.
    added = tokenizer.added_tokens_decoder.keys() - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    largest = max(ids - added)
    if largest >= vocabulary:
        raise UserError(
            f"--model {model_path}: its tokenizer makes token ids up to {largest}, its config.json"
            f" says vocab_size {vocabulary}; the folder's files are of different models"
        )
    tokens = len([number for number in ids if number < vocabulary])
    if tokens < (1 - SPARE_ROWS) * vocabulary:
        raise UserError(
            f"--model {model_path}: its tokenizer has tokens for {tokens} of the model's"
            f" {vocabulary} embeddings, so that what is drawn of the others has no text; copy the"
            " model's own tokenizer files there, or cut its embeddings (resize_token_embeddings)"
        )


def load_end_ids(model_path: str, tokenizer) -> frozenset[int]:
    """The ids that end a response of the model of that folder or hub name (`end_token_ids`)."""
    config = _load(AutoConfig.from_pretrained, model_path)
    listed = _listed_ends(model_path, load_generation_config(model_path), config)
    return end_token_ids(tokenizer, listed)


def end_ids_of(model: PreTrainedModel, tokenizer) -> frozenset[int]:
    """The ids that end a response of a model that is loaded, as `load_end_ids`."""
    name = str(model.name_or_path)
    return end_token_ids(tokenizer, _listed_ends(name, model.generation_config, model.config))


def _listed_ends(model_path: str, generation: GenerationConfig | None, config) -> set[int]:
    """The `eos_token_id`s of the model's generation_config.json, or of its configuration where that
    names none; less those that cannot be drawn, for which there is no embedding. Raises `UserError`
    for what is no id."""
    listed = getattr(generation, "eos_token_id", None)
    if listed in (None, []):
        listed = getattr(config, "eos_token_id", None)
    several = listed if isinstance(listed, list | tuple) else [listed]
    ends = set()
    for number in several:
        if number is None:
            continue
        if type(number) is not int:
            fault = f"its configuration names the eos_token_id {number!r}, which is no token id"
            raise UserError(
                f"--model {model_path}: {fault}; correct its generation_config.json or config.json"
            )
        if 0 <= number < config.get_text_config().vocab_size:
            ends.add(number)
    return ends


def check_token_ids(tokenizer, vocabulary: int, rows: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Raise `UserError` for the first token without one of the model's `vocabulary` embeddings;
    `rows` are (place, ids)."""
    for place, ids in rows:
        number = max(ids, default=-1)
        if number >= vocabulary:
            fault = f"its token {tokenizer.convert_ids_to_tokens(number)} has id {number}"
            remedy = (
                "leave the token out, or add embeddings (resize_token_embeddings) and train them"
            )
            raise UserError(
                f"{place}: {fault}, and the model has embeddings for ids below {vocabulary} only;"
                f" {remedy}"
            )


def mlp_width(config) -> int:
    """The hidden units of the widest layer's MLP; GPT-2's config leaves them out where they are
    four times the hidden size."""
    width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    width = width or 4 * config.hidden_size
    return max(width) if isinstance(width, list | tuple) else width


def compute_dtype(name: str, device: str) -> str:
    """The type of matrix products on a device that --dtype names: "auto" is bfloat16 where the
    device multiplies it faster."""
    if name != "auto":
        return name
    fast = (
        device.startswith("cuda")
        or torch.cpu._is_amx_tile_supported()
        or torch.cpu._is_avx512_bf16_supported()
    )
    return "bfloat16" if fast else "float32"


def load_model(
    model_path: str,
    devices: tuple[str, ...],
    dtype: torch.dtype,
    products: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load a causal language model on one device, or by layers on several (what autocast would cast
    in `products`, else `dtype`), and choose its path by a self-check. Raises `UserError` for
    missing or damaged weights, or if no path is exact."""
    model = _load_weights(model_path, dtype, products)
    if len(devices) == 1:
        # `to` of transformers is wrapped in a way that hides its arguments' types.
        model = model.to(devices[0])  # pyright: ignore[reportArgumentType]
    else:
        model = spread(model, partition_layers(ModelShape.of(model), devices))
    align_weights(model)
    if run_check_once("path", model, functools.partial(choose_path, model)):
        take_plain_path(model)
    collect_as_usual()  # what a command imports is there now
    return model


@torch.no_grad()
def align_weights(model: PreTrainedModel) -> None:
    """Copy weights on the CPU that do not begin where torch would have put them, at a multiple of
    `ALIGNMENT` bytes.

    safetensors leaves weights in the file that it maps, behind a header of any length. MKL's
    product of one row by a matrix has other bits where that begins at an odd multiple of 8, so a
    resumed run would part from the undisturbed one, which has read another file."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def use_liger_kernel(model: PreTrainedModel, flag: str = "--use_liger_kernel") -> None:
    """Have Liger's Triton kernels compute a model's norms, rotary embeddings and MLPs (Hsu et al.
    2024, arXiv:2410.10989), which `flag` asks for. Raises `UserError` for a family that Liger does
    not know, and where its log-probs would no longer be the model's own: the model and its family's
    code are as before."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = model.config.model_type
    device = first_device(model)
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(
            f"{flag}: Liger has no kernels for {family}; leave the flag out, or give --compile"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where this process's Triton kernels run
    prompts = random_pieces(model, (5, 3))
    responses = random_pieces(model, (9, 6))
    rows = list(zip(prompts, responses, strict=True))
    expected = None
    # damaged weights are the run's to notice
    with contextlib.suppress(NotFinite), self_check_mode(model):
        expected = own_log_probs(model, rows)
    with unchanged_where_it_fails(model):
        _apply_liger_kernels(model, device)
        reason = "are not finite"
        with contextlib.suppress(NotFinite), self_check_mode(model):
            reason = ""
            if expected is not None:
                reason = disagreement(expected, lambda: own_log_probs(model, rows))
        if reason:
            raise UserError(f"{flag}: {family}'s log-probs {reason}; leave the flag out")


def _apply_liger_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """Bind Liger's methods to a model's modules. Other models of the family, which may be on other
    devices, keep their own."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    code = vars(sys.modules[type(model.get_decoder()).__module__])
    rotary = "apply_rotary_pos_emb"
    own = dict(code)
    try:
        _apply_liger_kernel_to_instance(
            model, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        kernels = dict(code)
        code.update(own)

    def rotate(q: torch.Tensor, *rest, **options):
        names = kernels if q.device == device else own
        return names[rotary](q, *rest, **options)

    code[rotary] = rotate  # the one function that layers look up in their family's code


@contextlib.contextmanager
def unchanged_where_it_fails(model: PreTrainedModel) -> Iterator[None]:
    """A block that changes a model's modules, their classes or the files of code that define them.
    Where the block raises, all of these have the attributes that they had, the same objects under
    the same names."""
    modules = list(model.modules())
    names = {type(module).__module__ for module in modules}
    files = [sys.modules[name] for name in sorted(names & sys.modules.keys())]
    classes = list(dict.fromkeys(map(type, modules)))
    for file in files:
        defined = [value for value in vars(file).values() if isinstance(value, type)]
        classes = list(dict.fromkeys([*classes, *defined]))
    namespaces = [vars(file) for file in files]
    for module in modules:
        namespaces += [vars(module), module._modules, module._parameters, module._buffers]
    of_namespaces = [dict(namespace) for namespace in namespaces]
    of_classes = [dict(vars(kind)) for kind in classes]
    try:
        yield
    except BaseException:
        for namespace, before in zip(namespaces, of_namespaces, strict=True):
            for name in namespace.keys() - before.keys():
                del namespace[name]
            namespace.update(before)
        for kind, before in zip(classes, of_classes, strict=True):
            for name in vars(kind).keys() - before.keys():
                delattr(kind, name)
            for name, value in before.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        raise


def _load_weights(
    model_path: str, dtype: torch.dtype, products: torch.dtype | None = None
) -> PreTrainedModel:
    """A model on the CPU, with our attention where its family can have another than its own."""
    # The table of transformers makes its classes when they are looked up: types do not know them.
    family: Any = AutoModelForCausalLM._model_mapping[type(load_config(model_path))]
    # newer families look theirs up in a table
    attention = ATTENTION if family._supports_attention_backend else OWN_ATTENTION

    def make(model, config):  # each weight is loaded in the type that it is made with
        family.__init__(model, config)
        for parameter in cast_by_autocast(model):
            parameter.data = parameter.data.to(products or dtype)

    family_in_types = type(
        family.__name__, (family,), {"__module__": family.__module__, "__init__": make}
    )
    options = {"dtype": dtype, "attn_implementation": attention, "output_loading_info": True}
    model, report = _load(family_in_types.from_pretrained, model_path, **options)
    # transformers would fill these in at random and go on.
    absent = sorted(report["missing_keys"]) + [str(key) for key in report["mismatched_keys"]]
    if absent:
        raise UserError(
            f"--model {model_path}: {len(absent)} weights are missing or of another shape, such as"
            f" {absent[0]}"
        )
    return model


def load_weights(model_path: str, dtype: torch.dtype) -> Iterable[tuple[str, torch.Tensor]]:
    """Every weight of a model, on the CPU, by its name; tied weights once. Raises `UserError` as
    `load_model` does."""
    return _load_weights(model_path, dtype).named_parameters()


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy weights over a model's own of these names, in place, cast to their type; leaves those
    that are its own already."""
    own = dict(model.named_parameters())
    for name, tensor in weights:
        if own[name].data_ptr() != tensor.data_ptr():
            own[name].copy_(tensor, non_blocking=True)


def spread(model: PreTrainedModel, device_map: Mapping[str, str]) -> PreTrainedModel:
    """Put each module on its device, and have it move its inputs there: see `partition_layers` for
    why accelerate does not."""
    for name, device in device_map.items():
        model.get_submodule(name).to(device)
    return move_activations(model, device_map)


def move_activations(model: PreTrainedModel, device_map: Mapping[str, str]) -> PreTrainedModel:
    """Before each module's forward, move its inputs to the module's device; hidden states alone
    come from another GPU.

    A copy between GPUs makes both wait for each other. So positions come from the host and rotary
    embeddings are computed on every device, each once a forward; of anything else that has no
    gradient a device gets one copy, however many modules ask."""
    devices = list(dict.fromkeys(device_map.values()))
    mover = ActivationMover(devices)
    model.get_decoder().register_forward_pre_hook(mover.note_positions, with_kwargs=True)
    for name, device in device_map.items():
        module = model.get_submodule(name)
        if _is_rotary_embedding(module):
            replicas = _replicate(module, [other for other in devices if other != device])
            compute_elsewhere = functools.partial(mover.compute_elsewhere, replicas)
            module.register_forward_hook(compute_elsewhere, with_kwargs=True)
        move_inputs = functools.partial(mover.move_inputs, device)
        module.register_forward_pre_hook(move_inputs, with_kwargs=True)
    return model


def _is_rotary_embedding(module: torch.nn.Module) -> bool:
    """Whether a module computes with positions alone: it has buffers, its frequencies, and no
    parameters."""
    has_parameters = next(module.parameters(), None) is not None
    has_buffers = next(module.buffers(), None) is not None
    return has_buffers and not has_parameters


def _replicate(module: torch.nn.Module, devices: Sequence[str]) -> dict[str, torch.nn.Module]:
    """Each device's copy of a module without parameters, with its buffers there."""
    replicas = {}
    for device in devices:
        # `deepcopy` takes what this says instead of a copy of its own
        buffers = {id(buffer): buffer.to(device) for buffer in module.buffers()}
        replicas[device] = copy.deepcopy(module, buffers)
    return replicas


class ActivationMover:
    """The hooks of `move_activations`, and the copies of tensors that these share."""

    def __init__(self, devices: Sequence[str]):
        self.devices = devices
        # A tensor -> the same on other devices, while the tensor lives: until backward where layers
        # are run again there.
        self.copies: MutableMapping[torch.Tensor, dict[str, torch.Tensor]] = (
            WeakTensorKeyDictionary()
        )

    def note_positions(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Before the decoder: of a packed sequence the host has the positions for each device."""
        packing = kwargs.get("layout")
        if isinstance(packing, Packing):
            devices = self.devices
            positions = {device: packing.to(device).position_ids_1N for device in devices}
            self.copies[kwargs["position_ids"]] = positions

    def move_inputs(
        self, device: str, module: torch.nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        """Before a module: its inputs on its device."""
        return tree_map_only(torch.Tensor, functools.partial(self._moved, device), (args, kwargs))

    def compute_elsewhere(
        self, replicas: Mapping[str, torch.nn.Module], module, args, kwargs, outputs
    ) -> None:
        """After a module of which other devices have replicas: compute its outputs there, too."""
        for device, replica in replicas.items():
            args_there, kwargs_there = tree_map_only(
                torch.Tensor, functools.partial(self._stand_in, device), (args, kwargs)
            )
            elsewhere = replica(*args_there, **kwargs_there)
            for output, other in zip(tree_leaves(outputs), tree_leaves(elsewhere), strict=True):
                self.copies.setdefault(output, {})[device] = other

    def _moved(self, device: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == torch.device(device):
            return tensor
        if tensor.requires_grad:
            return copy_between(tensor, torch.device(device))
        copies = self.copies.setdefault(tensor, {})
        if device not in copies:
            copies[device] = copy_between(tensor, torch.device(device))
        return copies[device]

    def _stand_in(self, device: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's copy; of one of floating point, which tells a rotary embedding only a type,
        one without its values."""
        if tensor.is_floating_point():
            return tensor.new_empty(1, device=device).expand(tensor.shape)
        return self._moved(device, tensor)


STREAMS: dict[tuple[torch.device, torch.device], tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


def copy_between(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor's copy on another device, whose gradient goes back. Between GPUs torch has the
    current streams of both wait for each other; here these are streams of this pair of GPUs, so
    that only what reads the copy waits. A gradient comes by the same streams, and waits for what
    its GPU was given before. What comes to a CPU has arrived."""
    if not tensor.is_cuda or device.type != "cuda":
        return tensor.to(device, non_blocking=device.type == "cuda")
    pair = (tensor.device, device)
    if pair not in STREAMS:
        STREAMS[pair] = (torch.cuda.Stream(tensor.device), torch.cuda.Stream(device))
    leaving, arriving = STREAMS[pair]
    leaving.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(leaving), torch.cuda.stream(arriving):
        copied = tensor.to(device, non_blocking=True)
    torch.cuda.current_stream(device).wait_stream(arriving)
    tensor.record_stream(leaving)  # whose memory nobody else gets before these streams have read it
    copied.record_stream(torch.cuda.current_stream(device))
    return copied


def devices_of(model: PreTrainedModel) -> list[torch.device]:
    """The devices that a model's weights are on, in forward order."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def first_device(model: PreTrainedModel) -> torch.device:
    """The device that token ids go to."""
    return input_embeddings(model).device


def autocast(device: torch.device | str, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype` while the weights stay in float32."""
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype != torch.float32)

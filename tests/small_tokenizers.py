"""Tokenizers of several kinds, made in a moment, which spell the tags of reasoning in tokens of
their own."""

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
LETTERS = [chr(code) for code in range(32, 127)]


def byte_level() -> Tokenizer:
    """Byte-level BPE without a merge, as GPT-2's and Qwen's begin."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Letters, a space as U+2581 in front of each word, bytes of all others, as Llama 2's."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *LETTERS[1:]]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def word_level() -> Tokenizer:
    """A letter, a word or a space is a token; others are unknown."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *LETTERS, "\n"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def word_piece() -> Tokenizer:
    """Words and signs, put together with spaces between them."""
    words = [
        "so",
        "it",
        "is",
        "don",
        "'",
        "t",
        ",",
        ".",
        "answer",
        "think",
        "<",
        ">",
        "/",
        *"0123456789",
    ]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def lowercase() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


KINDS = {
    kind.__name__: kind for kind in (byte_level, sentence_piece, word_level, word_piece, lowercase)
}


def wrapped(tokenizer: Tokenizer, tags: bool | None = None, **options) -> PreTrainedTokenizerFast:
    """For transformers, with special BOS, EOS and PAD; `tags`: whether the tags are special, None:
    there are none. `options` are of each tag."""
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    if tags is not None:
        options = {"normalized": False} | options
        add = tokenizer.add_special_tokens if tags else tokenizer.add_tokens
        add([AddedToken(tag, special=tags, **options) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ENDS)


def adding(tokenizer: Tokenizer, single: str) -> Tokenizer:
    """The tokenizer, which puts special tokens around each text, such as "<s> $A </s>"."""
    words = [word for word in single.split() if word != "$A"]
    ids = [(word, tokenizer.token_to_id(word)) for word in dict.fromkeys(words)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


def save_model(folder, tokenizer, **config) -> str:
    """A random Llama of as many tokens as the tokenizer has, unless `config` says otherwise, and
    the tokenizer, in a folder."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    shape = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**(sizes | shape | config))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)

"""Prompts to token ids and token ids to text, by tokenizers of several kinds."""

import pytest
from small_tokenizers import (
    KINDS,
    TAGS,
    adding,
    byte_level,
    sentence_piece,
    word_level,
    word_piece,
    wrapped,
)
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from alignment.core.text import ResponseReader, end_token_ids, prompt_token_ids, response_token_ids
from alignment.core.tokens import tokenize_prompt_and_output

SAID = "so it is 7 . </think> <answer> 7 </answer>"
STOP = ("</answer>",)


def reader(tokenizer, *listed: int) -> ResponseReader:
    return ResponseReader(tokenizer, end_token_ids(tokenizer, listed))


def drawn(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# --- what rules and stop strings see --------------------------------------------------------------

TAG_OPTIONS = [
    {},
    {"lstrip": True},
    {"rstrip": True},
    {"lstrip": True, "rstrip": True},
    {"normalized": True},
]


@pytest.mark.parametrize("options", TAG_OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_special_tags_are_seen_as_plain_ones_are(kind, options):
    texts = []
    for special in (True, False):
        tokenizer = wrapped(KINDS[kind](), special, **options)
        ids = drawn(tokenizer, SAID)
        ids += drawn(tokenizer, "</s><pad><pad>")
        assert set(tokenizer.convert_tokens_to_ids(list(TAGS[1:]))) < set(ids)
        texts.append(reader(tokenizer).text(ids, STOP))
    assert texts[0] == texts[1]
    seen = texts[0].split() if "lstrip" not in options and "rstrip" not in options else texts[0]
    assert all(tag in seen for tag in TAGS[1:]) and texts[0].endswith("</answer>")
    assert "</s>" not in texts[0] and "<pad>" not in texts[0] and "<think>" not in texts[0]


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "word_level", "lowercase"])
@pytest.mark.parametrize(
    "stop", [STOP, ("<answer>", "</answer>"), ("7 ", "\u3002"), ("<think> 7", "k>")]
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(kind, special, stop):
    """Token by token, against the whole text of each beginning."""
    tokenizer = wrapped(KINDS[kind](), special)
    for text in (
        SAID,
        " 7 7<think> 7 k>",
        "a\u3002b",
        "a\u4e8c\u3002b",  # of byte tokens alone, in some tokenizers
        "</think></answer></answer>",
    ):
        ids = drawn(tokenizer, text)
        beginnings = [ids[:length] for length in range(1, len(ids) + 1)]
        whole = [
            tokenizer.backend_tokenizer.decode(beginning, skip_special_tokens=False)
            for beginning in beginnings
        ]
        expected = next((i for i, words in enumerate(whole) if any(s in words for s in stop)), None)
        finished = [reader(tokenizer).is_finished(beginning, stop) for beginning in beginnings]
        assert (finished.index(True) if True in finished else None) == expected
        if expected is not None:
            first = min(whole[expected].index(s) + len(s) for s in stop if s in whole[expected])
            assert reader(tokenizer).text(beginnings[expected], stop) == whole[expected][:first]


def test_end_tokens_are_the_tokenizers_those_listed_and_the_end_of_the_assistants_turn():
    tokenizer = wrapped(byte_level(), True)
    eos, turn = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    assert end_token_ids(tokenizer, None) == end_token_ids(tokenizer, eos) == {eos}
    assert end_token_ids(tokenizer, [90, eos, 91]) == {eos, 90, 91}
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert end_token_ids(tokenizer, None) == {eos, turn}
    ended = reader(tokenizer)
    ids = drawn(tokenizer, "7<|im_end|>")
    assert ended.is_finished(ids, STOP) and not ended.is_finished(ids[:-1], STOP)
    assert ended.text(ids, STOP) == "7"
    assert ended.text(drawn(tokenizer, "<|im_start|>7<s>"), STOP) == "<|im_start|>7<s>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }} and so on<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.content }} </s>{% endfor %}",
        "none of it",
    ],
)
def test_a_chat_template_without_a_token_of_its_own_behind_the_answer_adds_no_end(template):
    tokenizer = wrapped(byte_level())
    tokenizer.chat_template = template
    assert end_token_ids(tokenizer, None) == {tokenizer.eos_token_id}


def test_an_eos_token_that_is_the_stop_string_is_seen():
    tokenizer = wrapped(byte_level(), True)
    tokenizer.eos_token = "</answer>"
    ids = drawn(tokenizer, "<answer> 7 </answer>")
    assert reader(tokenizer).is_finished(ids, STOP)
    assert reader(tokenizer).text(ids, STOP) == "<answer> 7 </answer>"
    assert reader(tokenizer).text(ids, ()) == "<answer> 7 "


def test_no_space_is_cleaned_up():
    tokenizer = wrapped(word_piece(), True)
    tokenizer.clean_up_tokenization_spaces = True
    assert reader(tokenizer).text(drawn(tokenizer, "it don't , 7 ."), STOP) == "it don ' t , 7 ."


def test_a_tokenizer_without_padding_or_with_eos_for_it_loses_nothing_else():
    for pad in (None, "</s>"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=byte_level(), eos_token="</s>", pad_token=pad
        )
        assert reader(tokenizer).text(drawn(tokenizer, "7 <pad> 8</s>"), ()) == "7 <pad> 8"


# --- prompts --------------------------------------------------------------------------------------

WITH_ENDS = ("$A", "<s> $A", "$A </s>", "<s> $A </s>", "<s> <|im_start|> $A", "$A </s> <s>")


@pytest.mark.parametrize("single", WITH_ENDS)
@pytest.mark.parametrize("kind", [byte_level, sentence_piece, word_level])
def test_an_eos_that_the_tokenizer_appends_goes_and_what_it_puts_in_front_stays(kind, single):
    tokenizer = wrapped(adding(kind(), single), True)
    front = [tokenizer.convert_tokens_to_ids(word) for word in single.split("$A")[0].split()]
    prompts = ["7 + 1 <think>", "8", "7</s>"]  # the last spells it out: that is the prompt's own
    encoded = prompt_token_ids(tokenizer, prompts)
    assert encoded.ids == [front + drawn(tokenizer, prompt) for prompt in prompts]
    appended = single.partition("$A")[2].replace(" ", "")
    said = f"the tokenizer appends {appended} to every text: prompts go without it"
    assert encoded.repairs == ((said,) if appended else ())


@pytest.mark.parametrize("single", WITH_ENDS)
@pytest.mark.parametrize("kind", [byte_level, sentence_piece, word_level])
def test_a_beginning_that_prompt_and_tokenizer_both_have_is_there_once(kind, single):
    tokenizer = wrapped(adding(kind(), single), True)
    front = single.split("$A")[0].replace(" ", "")
    encoded = prompt_token_ids(tokenizer, [f"{front}7 <think>", f"{front}<s>7"])
    assert encoded.ids == [drawn(tokenizer, f"{front}7 <think>"), drawn(tokenizer, f"{front}<s>7")]
    said = f"prompts spell out {front}, which the tokenizer adds too: it is there once"
    assert (said in encoded.repairs) == bool(front)


def test_bos_spelled_out_beside_a_tokenizer_that_adds_none_is_the_prompts_own():
    tokenizer = wrapped(byte_level())
    assert prompt_token_ids(tokenizer, ["<s><s>7"]).ids == [drawn(tokenizer, "<s><s>7")]
    assert prompt_token_ids(tokenizer, ["7</s>"]).ids == [drawn(tokenizer, "7</s>")]


def test_one_token_for_bos_and_eos_stays_in_front_and_goes_behind():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=adding(byte_level(), "</s> $A </s>"), bos_token="</s>", eos_token="</s>"
    )
    eos = tokenizer.eos_token_id
    assert prompt_token_ids(tokenizer, ["7", "</s>7"]).ids == [[eos, *drawn(tokenizer, "7")]] * 2


@pytest.mark.parametrize(
    ("bos", "eos"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_llamas_tokenizer_with_add_eos_token(bos, eos):
    vocabulary = {
        token: number
        for number, token in enumerate(("<unk>", "<s>", "</s>", "\u2581", *"0123456789+"))
    }
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=[], add_bos_token=bos, add_eos_token=eos)
    plain = tokenizer("7 + 8", add_special_tokens=False)["input_ids"]
    assert tokenizer("7 + 8")["input_ids"] == [1] * bos + plain + [2] * eos
    assert prompt_token_ids(tokenizer, ["7 + 8"]).ids == [[1] * bos + plain]


def test_no_prompt_and_an_empty_one():
    tokenizer = wrapped(adding(byte_level(), "<s> $A </s>"))
    assert prompt_token_ids(tokenizer, []).ids == []
    assert prompt_token_ids(tokenizer, [""]).ids == [[tokenizer.bos_token_id]]


def test_a_response_ends_with_one_eos():
    tokenizer = wrapped(adding(byte_level(), "<s> $A </s>"), True)
    eos = tokenizer.eos_token_id
    plain = drawn(tokenizer, " 7 </answer>")
    assert (
        response_token_ids(tokenizer, [" 7 </answer>", " 7 </answer></s>"]) == [(*plain, eos)] * 2
    )


def test_the_labels_of_tokenize_prompt_and_output_follow_no_eos():
    tokenizer = wrapped(adding(byte_level(), "<s> $A </s>"))
    made = tokenize_prompt_and_output(["7"], ["8"], tokenizer)
    (seven,), (eight,) = drawn(tokenizer, "7"), drawn(tokenizer, "8")
    assert made["input_ids"].tolist() == [[tokenizer.bos_token_id, seven]]
    assert made["labels"].tolist() == [[seven, eight]]

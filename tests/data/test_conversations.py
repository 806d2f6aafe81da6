"""What SFT trains of messages: thoughts as the chat template renders them, one opening tag, no
message of weight 0, and the assistant's header never, whatever the template lacks."""

import json

import pytest

from alignment.args import SFTArgs
from alignment.core.records import Problem
from alignment.data.prompts import prompted, without_repeated_tag
from alignment.data.tasks.own_data import read_demonstrations
from alignment.system.errors import UserError

END = "<|endoftext|>"
TURN = "[{{ m.role }}]{{ m.content }}<|endoftext|>"
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"
LOOP = "{% for m in messages %}"
PLAIN = LOOP + TURN + "{% endfor %}" + PROMPT
# As Qwen3's: thoughts of the last turn alone, in front of its content.
THINKS = (
    LOOP + "[{{ m.role }}]{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content"
    " }}\n</think>\n\n{% endif %}{{ m.content }}<|endoftext|>{% endfor %}" + PROMPT
)
# As Qwen3-Thinking's: the generation prompt opens the thought.
OPENS = THINKS.replace(PROMPT, "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}")
# As DeepSeek-R1's: opens the thought, and renders no thoughts of messages.
OPENS_ONLY = PLAIN.replace(PROMPT, "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}")
NO_PROMPT = LOOP + TURN + "{% endfor %}"  # no generation prompt, and a header
NO_HEADER = (
    LOOP + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)
# A conversation with an answer does not begin as the one without.
UNTOLD = "{{ messages | length }}" + LOOP + TURN + "{% endfor %}"


@pytest.fixture
def shown(tiny_folder, tmp_path):
    """A function that gives prompt and response, as the tokens of SFT's examples, of rows by a chat
    template."""
    from alignment.builders.warm_start import tokenise_demonstrations
    from alignment.model.loading import load_tokenizer

    def showing(template: str | None, *rows: dict) -> list[tuple[str, str]]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = load_tokenizer(str(tiny_folder))
        tokenizer.chat_template = template
        read = tokenise_demonstrations(SFTArgs(), read_demonstrations(str(file)), tokenizer, 256)
        return [tuple(map(tokenizer.decode, example)) for example in read]

    return showing


def said(role: str, text: str, **more) -> dict:
    return {"role": role, "content": text, **more}


ASKED = said("user", "Q")
THOUGHTFUL = {"messages": [ASKED, said("assistant", "22", reasoning_content="I add: 22.")]}
LATER = {
    "messages": [
        *THOUGHTFUL["messages"],
        said("user", "Q2"),
        said("assistant", "23", reasoning_content="Again."),
    ]
}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_trained_as_the_template_renders_them(key, shown):
    row = {"messages": [ASKED, said("assistant", "22", **{key: "I add: 22."})]}
    template = THINKS.replace("reasoning_content", key)
    assert shown(template, row) == [
        (f"[user]Q{END}[assistant]", f"<think>\nI add: 22.\n</think>\n\n22{END}")
    ]


def test_thoughts_after_a_prompt_that_opens_them(shown):
    assert shown(OPENS, THOUGHTFUL) == [
        (f"[user]Q{END}[assistant]<think>\n", f"I add: 22.\n</think>\n\n22{END}")
    ]


def test_earlier_thoughts_are_in_the_prompt_only_where_the_template_puts_them(shown):
    first, second = shown(THINKS, LATER)
    assert first == (f"[user]Q{END}[assistant]", f"<think>\nI add: 22.\n</think>\n\n22{END}")
    assert second == (
        f"[user]Q{END}[assistant]22{END}[user]Q2{END}[assistant]",
        f"<think>\nAgain.\n</think>\n\n23{END}",
    )


def test_thoughts_of_a_prompt_of_messages(shown):
    row = {"prompt": LATER["messages"][:3], "completion": LATER["messages"][3:]}
    assert shown(THINKS, row) == shown(THINKS, LATER)[1:]


def test_an_empty_thought_is_none(shown):
    rows = [
        {"messages": [ASKED, said("assistant", " R", reasoning_content=value)]}
        for value in (None, "")
    ]
    assert [response for _, response in shown(None, *rows)] == [
        f" R{END}"
    ] * 2  # by the run's template


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (
            None,
            THOUGHTFUL,
            "rows.jsonl:1: it is a chat, and the tokenizer of this model has no chat template",
        ),
        (
            PLAIN,
            THOUGHTFUL,
            (
                'rows.jsonl:1: the chat template of this model does not render "reasoning_content"'
                " at all: write it"
            ),
        ),
        (
            OPENS_ONLY,
            THOUGHTFUL,
            'rows.jsonl:1: the chat template .* does not render "reasoning_content" at all',
        ),
        (
            THINKS.replace(PROMPT, "{% if add_generation_prompt %}[assistant] so{% endif %}"),
            THOUGHTFUL,
            'does not render "reasoning_content" after its own generation prompt',
        ),
        (
            PLAIN,
            {"messages": [said("user", "Q", reasoning_content="x"), said("assistant", "R")]},
            "only the assistant thinks",
        ),
        (
            PLAIN,
            {"messages": [ASKED, said("assistant", "R", reasoning_content=["x"])]},
            '"reasoning_content" must hold text',
        ),
        (
            PLAIN,
            {"messages": [ASKED, said("assistant", "R", tool_calls=[{"id": 1}])]},
            'a message has "tool_calls", which is not',
        ),
        (
            PLAIN,
            {"messages": [ASKED, said("assistant", "R", weight=0.5)]},
            '"weight" must be 0 .* or 1, not 0.5',
        ),
        (
            PLAIN,
            {"messages": [ASKED, said("assistant", "R", weight="0")]},
            "\"weight\" must be 0 .* or 1, not '0'",
        ),
        (
            UNTOLD,
            {
                "messages": [
                    *THOUGHTFUL["messages"][:1],
                    said("assistant", "R"),
                    ASKED,
                    said("assistant", "R2"),
                ]
            },
            "has no generation prompt, and what begins an answer cannot be told",
        ),
    ],
)
def test_what_would_be_lost_is_refused(template, row, message, shown):
    with pytest.raises(UserError, match=message):
        shown(template, row)


@pytest.mark.parametrize(
    ("prompt", "response", "trained"),
    [
        ("[assistant]<think>\n", "<think>\nI add.\n</think>\n\n22", "I add.\n</think>\n\n22"),
        ("[assistant]<think>\n", "<think>I add.</think>22", "I add.</think>22"),
        ("Assistant: <think>", "<think> I add. </think>", " I add. </think>"),
        ("Assistant: <think>", " \n<think>\nI add.", "\nI add."),
        ("[THINK]", "[THINK]I add.[/THINK]", "I add.[/THINK]"),
        ("Assistant: <think>", "I <think> so", "I <think> so"),
        ("Assistant: <think>", " <answer> 5 </answer>", " <answer> 5 </answer>"),
        ("Assistant:", "<think>\nI add.", "<think>\nI add."),
        ("say <think> first.", "<think>\nI add.", "<think>\nI add."),
        ("a </think>", "</think> b", "</think> b"),
        ("P:<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n22", "22"),  # where thinking is off
        ("P:<think>\n\n</think>\n\n", "<think>\nI add.\n</think>22", "<think>\nI add.\n</think>22"),
        ("P: <|think|>", "<|think|>I add.", "I add."),
        (
            "P: \u25c1think\u25b7",
            "\u25c1think\u25b7I add.\u25c1/think\u25b7",
            "I add.\u25c1/think\u25b7",
        ),
        ("<|start|><|channel|>analysis<|message|>", "<|channel|>analysis<|message|>I", "I"),
        ("<think>I add.</think> <answer>", "<answer> 5", " 5"),
    ],
)
def test_a_tag_that_ends_the_prompt_is_not_trained_again(prompt, response, trained):
    assert without_repeated_tag(prompt, response) == trained


def test_a_tag_is_trained_once_in_every_shape_of_rows(shown, capsys):
    thought = "<think>\nI add.\n</think> 22"
    chat = {"messages": [said("system", "S"), ASKED, said("assistant", thought)]}
    rows = [
        {"messages": [ASKED, said("assistant", thought)]},
        {"question": "Q", "response": thought},
        {"prompt": "P: <think>\n", "completion": thought},
        {"question": "Q", "response": " 22"},
    ]
    assert [
        prompt.count("<think>") + response.count("<think>")
        for prompt, response in shown(OPENS_ONLY, chat, *rows)
    ] == [1] * 5
    assert (
        "4 of 5 demonstrations begin with the tag that their prompt ends with: it is not trained"
        in capsys.readouterr().err
    )
    assert shown(OPENS_ONLY, chat) == [
        (f"[system]S{END}[user]Q{END}[assistant]<think>\n", f"I add.\n</think> 22{END}")
    ]


def test_messages_of_weight_0_are_context_only(shown, tmp_path, capsys):
    bad, good = said("assistant", "bad", weight=0), said("assistant", "22", weight=1)
    rows = [
        {"messages": [ASKED, bad, said("user", "Again?"), good]},
        {"messages": [ASKED, bad]},
        {"messages": [ASKED, said("assistant", "R", weight=None)]},
        {"messages": [ASKED, said("assistant", "R2", weight=1.0)]},
        {"prompt": [ASKED, bad, ASKED], "completion": [said("assistant", "R3", weight=False)]},
        {"messages": [ASKED, good, ASKED, bad]},
    ]
    texts = shown(PLAIN, *rows)
    assert [response for _, response in texts] == [f"22{END}", f"R{END}", f"R2{END}", f"22{END}"]
    assert texts[0][0] == f"[user]Q{END}[assistant]bad{END}[user]Again?{END}[assistant]"
    err = capsys.readouterr().err
    assert err == f"{tmp_path}/rows.jsonl: 4 messages of weight 0: context only, not trained\n"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {
                "messages": [
                    ASKED,
                    said("assistant", "R", train=False),
                    ASKED,
                    said("assistant", "R2"),
                ]
            },
            'messages have "train": not read, and no message is left out for it',
        ),
        (
            {
                "messages": [
                    said("user", "Q", name="A"),
                    said("assistant", "R", loss_mask=0, weight=1),
                ]
            },
            'messages have "loss_mask", "name": not read, and no message is left out for it',
        ),
        (
            {"question": "Q", "response": "R", "reasoning": "I add.", "weight": 0},
            (
                'rows have "weight", "reasoning": not read, the response is trained as it stands;'
                " messages can have thoughts and weights"
            ),
        ),
        (
            {
                "prompt": [ASKED],
                "completion": [said("assistant", "R")],
                "reasoning_content": "I add.",
            },
            (
                'rows have "reasoning_content": not read, the response is trained as it stands;'
                " messages can have thoughts and weights"
            ),
        ),
        ({"question": "Q", "response": "R", "id": 7, "thinking": None}, None),
    ],
)
def test_keys_that_may_say_what_is_trained_and_are_not_read_are_said(
    row, line, shown, tmp_path, capsys
):
    shown(PLAIN, row)
    expected = f"{tmp_path}/rows.jsonl: {line}\n" if line else ""
    assert capsys.readouterr().err == expected


TWO = {"messages": [ASKED, said("assistant", "R"), said("user", "Q2"), said("assistant", "R2")]}


def test_a_template_without_a_generation_prompt_gives_its_own_header(shown, capsys):
    expected = [
        (f"[user]Q{END}[assistant]", f"R{END}"),
        (f"[user]Q{END}[assistant]R{END}[user]Q2{END}[assistant]", f"R2{END}"),
    ]
    assert shown(PLAIN, TWO) == expected
    assert capsys.readouterr().err == ""
    assert shown(NO_PROMPT, TWO) == expected
    assert (
        capsys.readouterr().err
        == "the chat template of this model has no generation prompt: prompts end with"
        " '[assistant]', as its answers begin\n"
    )


def test_a_template_without_a_header_needs_none(shown, capsys):
    assert shown(NO_HEADER, TWO)[0] == ("[INST] Q [/INST]", f"R{END}")
    assert capsys.readouterr().err == ""


def test_prompts_of_rl_get_the_header_too(tiny_folder):
    from alignment.data.prompts import CHATS
    from alignment.model.loading import load_tokenizer

    tokenizer = load_tokenizer(str(tiny_folder))
    prompts = []
    for template in (PLAIN, NO_PROMPT):
        tokenizer.chat_template = template
        [problem] = prompted([Problem("1", "Why?", "", "")], sorted(CHATS)[0], tokenizer)
        prompts.append(problem.prompt)
    assert prompts[0] == prompts[1] and prompts[0].count("[assistant]") == 1

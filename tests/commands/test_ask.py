"""One question to several models: what is printed, and what is typed."""

import io
import shutil
import sys

import pytest

from alignment import ask
from alignment.core.records import Completion
from tests.command_line import exit_code


class Answering:
    """A sampler whose answers are the same to every prompt."""

    def __init__(self, texts):
        self.texts = texts
        self.prompts = []

    def sample(self, prompts, sampling):
        self.prompts += prompts
        return [
            [
                Completion((1,), (2, 3), (-0.5, -0.5), text, finish_reason, 0)
                for text, finish_reason in self.texts
            ]
        ]

    def close(self):
        pass


@pytest.fixture
def answering(monkeypatch):
    sampler = Answering(
        [(" so </think> <answer> 7 </answer>", "stop"), (" so </think> <answer> 8", "length")]
    )
    monkeypatch.setattr("alignment.builders.samplers.make_sampler", lambda *_, **__: sampler)
    return sampler


def run(monkeypatch, tiny_folder, *flags) -> int:
    models = ["--models", str(tiny_folder), str(tiny_folder.parent / tiny_folder.name)]
    return exit_code(monkeypatch, ask.main, "alignment.ask", *models, "--num_samples", "2", *flags)


def test_each_answer_is_printed_with_its_rewards(answering, tiny_folder, monkeypatch, capsys):
    flags = ["--question", "What is 3 + 4?", "--gold", "7"]
    assert run(monkeypatch, tiny_folder, *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "so </think> <answer> 7 </answer>",
        "[2 tokens, ended, reward 1, format_reward 1, answer_reward 1]",
        "so </think> <answer> 8",
        "[2 tokens, cut at --max_new_tokens, reward 0, format_reward 0, answer_reward 0]",
    ]
    [prompt] = answering.prompts
    assert "What is 3 + 4?" in prompt and prompt.endswith("<think>")


@pytest.mark.parametrize("is_trained_here", [False, True])
def test_a_chat_model_is_asked_in_its_template_unless_a_run_trained_it(
    is_trained_here, answering, tiny_folder, tmp_path, monkeypatch, capsys
):
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %} assistant{% endif %}"
    (model / "chat_template.jinja").write_text(template)
    if is_trained_here:
        (model / "args.json").write_text("{}")
    words = ["alignment.ask", "--model", str(model), "--question", "3 + 4?", "--num_samples", "2"]
    assert exit_code(monkeypatch, ask.main, *words) == 0
    [prompt] = answering.prompts
    assert prompt.endswith("<think>" if is_trained_here else " assistant")
    said = f"{model} is asked in its own chat template"
    assert (said in capsys.readouterr().err) is not is_trained_here


def test_questions_are_typed_until_an_empty_line(answering, tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 1?\n2 + 2?\n\n3 + 3?\n"))
    assert run(monkeypatch, tiny_folder) == 0
    asked = [prompt for prompt in answering.prompts if "+" in prompt]
    assert ["1 + 1?" in asked[0], "2 + 2?" in asked[1], len(asked)] == [True, True, 2]
    assert "reward" not in capsys.readouterr().out


def test_a_typed_question_that_is_too_long_is_said_and_the_next_is_answered(
    answering, tiny_folder, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 " * 3000 + "\n2 + 2?\n"))
    assert run(monkeypatch, tiny_folder) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and "context" in printed.err
    assert len(answering.prompts) == 1

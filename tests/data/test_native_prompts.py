r"""Prompts in the tokenizer's own chat template, and which prompt and rule a run comes to."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import small_tokenizers
from command_line import exit_code

from alignment import evaluate, rejection_sample, sft, train_rl
from alignment.ablation.design import grid
from alignment.args import (
    EvaluateArgs,
    RLArgs,
    SFTArgs,
    SweepArgs,
    command_line,
    parse,
    swept_values,
)
from alignment.builders.base_models import has_chat_template
from alignment.builders.checks import run_config
from alignment.builders.evaluations import prepare_evaluation, warn_of_shown_tests
from alignment.builders.warm_start import tokenise_demonstrations
from alignment.config import presets
from alignment.config.command_line import args_of_run
from alignment.core.records import Problem
from alignment.core.text import prompt_token_ids
from alignment.data.prompts import (
    ChatOptions,
    chat_turns,
    prompted,
    read_system_prompt,
    read_template,
)
from alignment.data.tasks import TASKS, Task, answer_in_box
from alignment.model.loading import load_tokenizer
from alignment.rewards.rules import find_reward, find_rule
from alignment.rollouts.source import open_source
from alignment.runs.run import refuse_other_arguments
from alignment.runs.run_folder import write_args
from alignment.system.errors import UserError

IM_START = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + IM_START
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
PROBLEM = Problem("1", "What is 2 + {x}?", "", "4")


def tokenizer_with(chat_template: str | None, kind=small_tokenizers.byte_level):
    tokenizer = small_tokenizers.wrapped(kind())
    tokenizer.chat_template = chat_template
    return tokenizer


def turns(text: str) -> list[str]:
    return [turn.split("<|im_end|>")[0] for turn in text.split("<|im_start|>")[1:]]


def test_a_chat_asks_for_a_box_where_the_makers_of_the_model_do():
    """Qwen2.5-Math has it as the system turn; models without a published one, behind the
    question."""
    qwen = tokenizer_with(IM_START + "{# You are Qwen, created by Alibaba Cloud #}")
    other = tokenizer_with(IM_START)
    boxed = ChatOptions(boxed=True)
    [problem] = prompted([PROBLEM], "chat", qwen, boxed)
    assert turns(problem.prompt) == [f"system\n{BOXED}", "user\nWhat is 2 + {x}?", "assistant\n"]
    assert problem.turns == (("system", BOXED), ("user", "What is 2 + {x}?"))
    [problem] = prompted([PROBLEM], "chat", other, boxed)
    assert turns(problem.prompt) == [f"user\nWhat is 2 + {{x}}?\n\n{BOXED}", "assistant\n"]
    [problem] = prompted([PROBLEM], "chat", qwen)  # graded otherwise: nothing is asked for
    assert turns(problem.prompt) == ["user\nWhat is 2 + {x}?", "assistant\n"]


def test_a_system_prompt_of_ones_own_moves_the_instruction_and_examples_are_turns(tmp_path):
    (tmp_path / "system.txt").write_text("Be brief.\n")
    system = read_system_prompt(str(tmp_path / "system.txt"))
    assert system == "Be brief." and read_system_prompt("so " * 3000) == "so " * 3000
    qwen = tokenizer_with(IM_START + "{# You are Qwen, created by Alibaba Cloud #}")
    options = ChatOptions(system, boxed=True, examples=(("1 + 1?", "\\boxed{2}"),))
    [problem] = prompted([PROBLEM], "chat", qwen, options)
    assert turns(problem.prompt) == [
        "system\nBe brief.",
        f"user\n1 + 1?\n\n{BOXED}",
        "assistant\n\\boxed{2}",
        f"user\nWhat is 2 + {{x}}?\n\n{BOXED}",
        "assistant\n",
    ]
    options = ChatOptions("End with \\boxed{}.", boxed=True)
    [problem] = prompted([PROBLEM], "chat", qwen, options)
    assert problem.prompt.count("boxed") == 1


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_template_that_spells_bos_out_gives_one_bos(adds_bos):
    base = small_tokenizers.byte_level()
    if adds_bos:
        base = small_tokenizers.adding(base, "<s> $A")
    tokenizer = tokenizer_with(WITH_BOS, lambda: base)
    [problem] = prompted([PROBLEM], "chat", tokenizer, ChatOptions(boxed=True))
    [ids] = prompt_token_ids(tokenizer, [problem.prompt]).ids
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


def test_an_empty_prompt_is_the_models_choice():
    chat, base = tokenizer_with(IM_START), tokenizer_with(None)
    boxed = ChatOptions(boxed=True)
    assert prompted([PROBLEM], "", chat, boxed) == prompted([PROBLEM], "chat", chat, boxed)
    [problem] = prompted([PROBLEM], "", base, boxed)
    assert problem.prompt == f"What is 2 + {{x}}?\n{BOXED}\n"
    [problem] = prompted([PROBLEM], "", base)
    assert problem.prompt == "What is 2 + {x}?"


ANSWERED = (("boxed", "flexible"), ("\nQuestion:",))


def format_of(task: Task, prompt: str = "", reward: str = "auto") -> tuple:
    task = task.in_format(prompt, reward)
    return task.prompt, task.rules, task.stop


def test_prompt_and_rule_choose_each_other_and_defaults_stay():
    gsm8k = TASKS["gsm8k"]
    box = ("boxed", "flexible")
    for task in TASKS.values():
        assert task.in_format("", "auto") is task.in_format("", "format:0.5,accuracy") is task
    assert format_of(gsm8k, "chat") == ("chat", box, ())
    assert format_of(gsm8k, "chat", "format:0.5,accuracy") == ("chat", box, ())
    assert format_of(gsm8k, "", "boxed") == ("", box, ())
    assert format_of(gsm8k, "r1_zero", "boxed") == ("r1_zero", box, gsm8k.stop)
    assert format_of(gsm8k, "tiny") == ("tiny", gsm8k.rules, gsm8k.stop)
    assert format_of(gsm8k, "question")[1] == ("flexible", "boxed")
    assert format_of(gsm8k, "question_answer")[2] == ("\nQuestion:",)
    countdown = TASKS["countdown"]
    assert format_of(countdown, "chat") == ("chat", ("countdown",), countdown.stop)
    unnamed = Task("mine", gsm8k.problems, gsm8k.demonstrations)
    assert format_of(unnamed) == ("", box, ())
    boxes = Task("mine", gsm8k.problems, gsm8k.demonstrations, "question_answer")
    assert format_of(boxes) == format_of(boxes, "", "boxed") == ("question_answer", *ANSWERED)
    assert RLArgs(task="gsm8k", prompt="chat").evaluation_rule == "boxed"
    assert RLArgs(task="gsm8k", prompt="chat", reward="flexible").evaluation_rule == "flexible"


TAGS = ("r1_zero", "r1_zero_strict")


@pytest.mark.parametrize("reward", TAGS)
@pytest.mark.parametrize("prompt", ["chat", "boxed", "question", "question_answer"])
def test_a_named_reward_stands_in_a_prompt_that_asks_for_a_box(prompt, reward, tmp_path):
    """From Python, the command line, a sweep's factor, and args.json at resume."""
    flags = ["--task", "gsm8k", "--prompt", prompt, "--reward", reward]
    swept = parse(SweepArgs, [*flags, "auto"])
    [named, chosen] = grid("tiny", swept_values(swept), "rollouts").values()
    for args in (
        parse(RLArgs, flags),
        RLArgs(task="gsm8k", prompt=prompt, reward=reward),
        parse(RLArgs, command_line(named)),
        resumed(named, tmp_path / "named"),
    ):
        assert args.evaluation_rule == args.resolved_reward == reward
        task = args.task_in_format
        assert (task.prompt, task.rules, task.stop) == (prompt, TAGS, ("</answer>",))
        assert not task.wants_box
        source = find_reward(args.rollout_config.reward, task.rules)
        assert source.rule is find_rule(reward)
    for args in (chosen, resumed(chosen, tmp_path / "chosen")):
        assert args.reward == "auto" and args.recorded_values["reward"] in ("boxed", "flexible")
        assert args.task_in_format == TASKS["gsm8k"].in_format(prompt, "auto")


def resumed(args: RLArgs, folder: Path) -> RLArgs:
    """What a run with these arguments goes on with."""
    config = run_config(args)
    folder.mkdir()
    write_args(folder, config.arguments, config.seeds, config.automatic)
    again = args_of_run(RLArgs, folder)
    refuse_other_arguments(folder, run_config(again))
    return again


def test_a_preset_that_names_the_reward_counts_as_naming_it(tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "PRESETS", tmp_path)
    (tmp_path / "mine.toml").write_text('task = "gsm8k"\nprompt = "chat"\nreward = "r1_zero"\n')
    for args in (parse(RLArgs, ["--preset", "mine"]), RLArgs(preset="mine")):
        assert args.evaluation_rule == "r1_zero"
    assert RLArgs(preset="mine", reward="auto").evaluation_rule == "boxed"


def test_an_older_run_in_a_chat_goes_on_with_its_box(tmp_path):
    """There r1_zero was the default, and gave way to the box also where it had been named."""
    config = run_config(RLArgs(task="gsm8k", prompt="chat"))
    arguments = {**config.arguments, "reward": "r1_zero"}
    (tmp_path / "args.json").write_text(json.dumps({"args": arguments}))
    again = args_of_run(RLArgs, tmp_path)
    assert again.resolved_reward == "boxed"
    refuse_other_arguments(tmp_path, run_config(again))
    named = dataclasses.replace(again, reward="r1_zero")
    with pytest.raises(UserError, match="--reward was 'boxed', now 'r1_zero'"):
        refuse_other_arguments(tmp_path, run_config(named))


def test_worked_solutions_of_a_chat_end_in_a_box():
    response = " 48/2 = 24 </think> <answer> 24 </answer>"
    assert answer_in_box(response) == "48/2 = 24\nThe final answer is \\boxed{24}."
    assert answer_in_box("own words") == "own words"
    # a row whose solution boxes its answer
    response = "So $\\boxed{24}$. </think> <answer> 24 </answer>"
    assert answer_in_box(response) == "So $\\boxed{24}$."
    response = "So $\\boxed{24}$. Halved: 12. </think> <answer> 12 </answer>"
    assert answer_in_box(response).endswith("The final answer is \\boxed{12}.")


@pytest.mark.parametrize("command", [evaluate, rejection_sample, sft, train_rl])
def test_a_model_without_a_chat_template_is_refused_before_it_loads(
    command, tmp_path, monkeypatch, capsys
):
    flags = {
        rejection_sample: ["--output", "kept.jsonl"],
        sft: ["--sft_base", "made"],
        train_rl: ["--sft_base", ""],
    }
    monkeypatch.chdir(tmp_path)
    words = ["--prompt", "chat", *flags.get(command, [])]
    assert exit_code(monkeypatch, command.main, command.__name__, *words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --prompt chat: the tokenizer of --model tiny has no chat ")


def test_whether_there_is_a_chat_template_is_read_from_files(tmp_path):
    assert has_chat_template("smollm2") and not has_chat_template("tiny")
    assert has_chat_template("some/hub-name") is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert has_chat_template(str(tmp_path)) is False
    (tmp_path / "chat_template.jinja").write_text(IM_START)
    assert has_chat_template(str(tmp_path)) is True


MINE = """### system
Answer in tags.
### user
Q: 1 + 1?
### assistant
<think> two </think> <answer> 2 </answer>
### user
Q: {question}
"""


def test_a_chat_from_a_file_and_its_examples(tmp_path):
    qwen = tokenizer_with(IM_START)
    file = tmp_path / "mine.chat"
    file.write_text(MINE)
    [problem] = prompted([PROBLEM], str(file), qwen)
    assert turns(problem.prompt) == [
        "system\nAnswer in tags.",
        "user\nQ: 1 + 1?",
        "assistant\n<think> two </think> <answer> 2 </answer>",
        "user\nQ: What is 2 + {x}?",
        "assistant\n",
    ]
    assert problem.turns[-1] == ("user", "Q: What is 2 + {x}?")
    shown = ChatOptions(examples=(("3 + 3?", "so </think> <answer> 6 </answer>"),))
    [problem] = prompted([PROBLEM], str(file), qwen, shown)
    assert turns(problem.prompt)[3:5] == [
        "user\nQ: 3 + 3?",
        "assistant\nso </think> <answer> 6 </answer>",
    ]
    assert turns(problem.prompt)[5] == "user\nQ: What is 2 + {x}?"
    # A last turn of the assistant begins the response, and the answers of examples too.
    file.write_text("### user\n{question}\n### assistant\nSo.\n<think>\n")
    [problem] = prompted([PROBLEM], str(file), qwen, shown)
    assert turns(problem.prompt) == [
        "user\n3 + 3?",
        "assistant\nSo.\n<think>so </think> <answer> 6 </answer>",
        "user\nWhat is 2 + {x}?",
        "assistant\nSo.\n<think>",
    ]
    assert problem.turns[-1] == ("assistant", "So.\n<think>")
    # Only the last line break of the file is not part of the prompt.
    file.write_text("### user\n{question}\n### assistant\n<think>\n\n")
    assert chat_turns(str(file))[-1] == ("assistant", "<think>\n")
    file.write_text("### user\n{question}\n### assistant\n<think>")
    assert chat_turns(str(file))[-1] == ("assistant", "<think>")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{question}", "the text '{question}' is in no turn of the chat"),
        ("### user\nso", "the file has no place for the question"),
        ("### human\n{question}", "### human is no turn of a chat"),
        ("### system\n{question}", "its turns are system; after the system's"),
        ("### user\na\n### user\n{question}", "its turns are user, user; after the system's"),
        ("### system\n{question}\n### user\nso", "write {question} into the last ### user turn"),
    ],
)
def test_a_file_that_is_no_chat_is_refused(tmp_path, text, fault):
    file = tmp_path / "mine.chat"
    file.write_text(text)
    with pytest.raises(UserError, match=f"^--prompt {re.escape(f'{file}: {fault}')}"):
        read_template(str(file))


def test_worked_examples_stand_before_every_question(tiny_folder, tmp_path):
    """In RL, in evaluations of a run and of `evaluate`, in demonstrations, and in previews, which
    read these."""
    tokenizer = load_tokenizer(tiny_folder)
    file = tmp_path / "shown.jsonl"
    file.write_text('{"question": "What is 1 + 1?", "response": " two </think>"}\n')
    shown = "User: What is 1 + 1?\nAssistant: <think> two </think>\n\nUser: What is "
    args = RLArgs(few_shot=str(file), max_problems=2)
    problems = open_source(args.rollout_config, tokenizer).problems
    evaluated = prepare_evaluation(args, tokenizer).problems
    alone = EvaluateArgs(few_shot=str(file), max_problems=2)
    for problem in (problems[0], *evaluated, *prepare_evaluation(alone, tokenizer).problems):
        assert problem.prompt.startswith(shown)
    sft_args = SFTArgs(few_shot=str(file))
    [(prompt, _)] = tokenise_demonstrations(
        sft_args, [(PROBLEM, " 4 </think>")], tokenizer, context=256
    )
    assert tokenizer.decode(prompt).startswith(shown)
    with pytest.raises(UserError, match="^--few_shot .*: must be left out with --examples"):
        EvaluateArgs(few_shot=str(file), examples=2)


@pytest.mark.parametrize("reward", ["flexible", "boxed"])
def test_an_answer_in_tags_ends_with_them_whatever_rule_grades_it(reward, tmp_path):
    """Else the last number or box of a base model's continuation would be graded."""
    gsm8k = TASKS["gsm8k"]
    file = tmp_path / "mine.txt"
    file.write_text("{question} Write <answer> your answer </answer>.\n")
    for prompt in ("r1_zero", "think_answer", "reasoning_answer", str(file)):
        assert gsm8k.in_format(prompt, reward).stop == ("</answer>",), prompt
    assert TASKS["arithmetic"].in_format("tiny", reward).stop == ("</answer>",)
    file.write_text("{question} Put the answer into a box.\n")
    for prompt in ("boxed", "question", "", str(file)):
        assert gsm8k.in_format(prompt, reward).stop == (), prompt


def test_examples_that_ask_a_test_question_are_said(tmp_path, capsys):
    task = TASKS["arithmetic"]
    file = tmp_path / "shown.jsonl"
    questions = (task.test_problems("", 1)[0].question, "What is one half of two apples?")
    rows = [json.dumps({"question": question, "response": " so"}) for question in questions]
    file.write_text("\n".join(rows))
    warn_of_shown_tests(EvaluateArgs(task="arithmetic", few_shot=str(file)), task)
    assert "1 of 2 examples ask a test question of --task arithmetic" in "".join(
        capsys.readouterr()
    )
    file.write_text(rows[1])
    warn_of_shown_tests(EvaluateArgs(task="arithmetic", few_shot=str(file)), task)
    assert "ask a test question" not in "".join(capsys.readouterr())


def test_a_chat_with_tags_is_graded_by_them():
    gsm8k = TASKS["gsm8k"]
    tags = (("think_answer", "flexible"), ("</answer>",))
    assert format_of(gsm8k, "mine.chat") == ("mine.chat", *tags)
    assert format_of(gsm8k, "reasoning_answer", "soft_format:2") == ("reasoning_answer", *tags)
    assert format_of(gsm8k, "chat", "think_answer") == ("chat", *tags)
    assert format_of(gsm8k, "", "think_answer") == ("r1_zero", *tags)
    assert format_of(gsm8k, "mine.chat", "r1_zero") == ("mine.chat", gsm8k.rules, gsm8k.stop)
    assert format_of(gsm8k, "mine.chat", "boxed") == ("mine.chat", ("boxed", "flexible"), ())
    assert format_of(TASKS["countdown"], "mine.chat")[1] == ("countdown",)
    assert RLArgs(task="gsm8k", prompt="mine.chat").resolved_reward == "think_answer"
    qwen = tokenizer_with(IM_START)
    [problem] = prompted([PROBLEM], "reasoning_answer", qwen)
    assert len(turns(problem.prompt)) == 5 and problem.prompt.endswith("assistant\n")

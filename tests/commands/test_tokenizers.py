"""Commands on models whose tokenizers are unlike others, or not their own. None of these models has
weights that could load."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_tokenizers import (
    adding,
    byte_level,
    save_model,
    sentence_piece,
    word_level,
    word_piece,
    wrapped,
)

from alignment import evaluate, rejection_sample, sft, train_rl
from alignment.args import EvaluateArgs, RLArgs, SFTArgs, from_preset
from alignment.builders import training
from alignment.builders.evaluations import PreparedEvaluation, prepare_evaluation
from alignment.builders.run_plan import plan_run
from alignment.builders.training import longest_row
from alignment.builders.warm_start import encode_demonstrations, encode_problems
from alignment.core.records import Problem, SamplingConfig
from alignment.model.loading import load_config, load_end_ids, load_model, load_tokenizer
from alignment.rewards.rules import find_rule
from alignment.rollouts.config import training_problems
from alignment.rollouts.source import open_source
from alignment.sampling.sampler import encode_prompts
from alignment.sampling.transformers import TransformersSampler
from alignment.system import terminal
from alignment.system.errors import UserError
from alignment.training.sft import tokenise


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that saves a model of a tokenizer in the folder `model`, beside ten questions; its
    weights are no weights."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n} + 1?", "solution": "so", "answer": str(n + 1)} for n in range(10)]
    tested = [row | {"question": f"What is {row['question']}"} for row in rows[:3]]
    for name, content in (("train", rows), ("test", tested)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))

    def saving(tokenizer, **config) -> str:
        folder = save_model(tmp_path / "model", tokenizer, **config)
        (tmp_path / "model" / "model.safetensors").write_bytes(b"none")
        return folder

    return saving


DATA = ("--task", "file:train.jsonl", "--test_split", "test.jsonl")


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a command on the folder `model` and gives what it prints on stdout and
    stderr."""
    terminal.say_once.cache_clear()

    def running(command, *flags: str) -> tuple[str, str]:
        length = ("--max_new_tokens", "40") if command is not sft else ()
        monkeypatch.setattr(
            sys,
            "argv",
            [command.__name__, "--model", "model", *DATA, "--prompt", "tiny", *length, *flags],
        )
        command.main()
        return capsys.readouterr()

    return running


# --- the preview shows what would really happen ---------------------------------------------------


@pytest.mark.parametrize("tags", [True, False, None])
@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
def test_the_preview_pays_tags_that_the_tokenizer_can_say(made, run, kind, tags):
    made(wrapped(kind(), tags))
    out, _ = run(evaluate, "--preview", "1")
    first = out.split("the gold answer: 1\n")[1].splitlines()[0]
    assert re.fullmatch(
        r"  in tags: ' ?</think> <answer> 1 </answer>' gets reward 1, format_reward 1,"
        r" answer_reward 1",
        first,
    )


def test_the_preview_shows_that_a_tokenizer_loses_tags(made, run):
    made(wrapped(word_piece()))
    out, _ = run(evaluate, "--preview", "1")
    assert "  in tags: '< / think > < answer > 1 < / answer >' gets reward 0," in out
    assert "warning: none is paid more than without the answer" in out


def test_the_preview_of_rl_shows_the_prompt_as_it_is_sampled_from(made, run):
    made(wrapped(adding(byte_level(), "<s> $A </s>"), True))
    out, err = run(train_rl, "--sft_base", "", "--preview", "1")
    assert re.search(
        r"the prompt, \d+ tokens:\n<s>User: \d \+ 1\?\nAssistant: <think>\nthe gold answer", out
    )
    assert err.count("the tokenizer appends </s> to every text: prompts go without it\n") == 1


def test_the_preview_of_sft_shows_one_bos_and_one_eos(made, run, tmp_path):
    made(wrapped(adding(byte_level(), "<s> $A </s>"), True))
    (tmp_path / "own.prompt").write_text("<s>Q: {question}")
    out, err = run(sft, "--preview", "1", "--sft_base", "new", "--prompt", "own.prompt")
    assert re.search(r"not trained:\n<s>Q: \d \+ 1\?\n", out)
    assert re.search(r"tokens, all trained:\n so </think>.*</answer></s>\n", out)
    assert err.count("prompts spell out <s>, which the tokenizer adds too: it is there once\n") == 1


# --- RL and SFT see the same prompts --------------------------------------------------------------


@pytest.mark.parametrize(
    "single", ["$A", "$A </s>", "<s> $A", "<s> $A </s>", "<s> <|im_start|> $A </s> </s>"]
)
@pytest.mark.parametrize("kind", [byte_level, sentence_piece, word_level])
def test_sft_trains_behind_the_prompts_that_rl_samples_from(kind, single):
    tokenizer = wrapped(adding(kind(), single), True)
    prompts = ["7 <think>", "<s>7 <think>", "<s><|im_start|>7", "7</s>"]
    sampled = encode_prompts(tokenizer, prompts, context=256, max_new_tokens=8)
    trained = tokenise([(prompt, " 7</answer>") for prompt in prompts], tokenizer, context=256)
    assert [list(prompt) for prompt, _ in trained] == sampled
    for ids in (sampled[0], sampled[2]):
        assert ids.count(tokenizer.bos_token_id) <= 1 and tokenizer.eos_token_id not in ids


def test_the_longest_prompt_is_counted_as_it_is_sampled_from(made):
    folder = made(wrapped(adding(byte_level(), "<s> $A </s>"), True))
    tokenizer = load_tokenizer(folder)
    args = from_preset(
        RLArgs,
        "tiny",
        task="file:train.jsonl",
        test_split="test.jsonl",
        prompt="tiny",
        max_new_tokens=40,
    )
    source = open_source(args.rollout_config, tokenizer)
    longest = len("User: 9 + 1?\nAssistant: ") + len(["<s>", "<think>"])
    evaluations = {"": PreparedEvaluation([], find_rule("r1_zero"), SamplingConfig(), [])}
    assert longest_row(plan_run(args, folder), source, evaluations, tokenizer) == longest + 40
    assert len(training_problems(source.problems, longest, 0, tokenizer)) == 10


def test_a_prompt_beyond_the_context_is_named_and_can_be_left_out(made, capsys):
    folder = made(wrapped(byte_level(), True))
    room = load_config(folder).max_position_embeddings - 40  # for responses
    rows = Path("test.jsonl").read_text()
    long_row = {"question": "long " * 20, "solution": "so", "answer": "1"}
    Path("long.jsonl").write_text(json.dumps(long_row) + "\n" + rows)
    tokenizer = load_tokenizer(folder)
    data: dict[str, Any] = {"task": "file:train.jsonl", "prompt": "tiny"}
    data["test_split"] = "long.jsonl"
    args = EvaluateArgs(model=folder, max_new_tokens=room, **data)
    problems = prepare_evaluation(args, tokenizer).problems
    with pytest.raises(UserError, match=r"long.jsonl:1: a prompt of .* by --max_prompt_tokens 40"):
        encode_problems(problems, folder, tokenizer, room)
    terminal.say_once.cache_clear()
    short = prepare_evaluation(replace(args, max_prompt_tokens=40), tokenizer).problems
    assert [problem.id for problem in short] == [problem.id for problem in problems[1:]]
    assert len(encode_problems(short, folder, tokenizer, room)) == 3
    assert capsys.readouterr().err.count("1 of 4 test problems of --task file:train.jsonl") == 1
    rl_args = from_preset(RLArgs, "tiny", max_prompt_tokens=40, **data)
    assert len(prepare_evaluation(rl_args, tokenizer).problems) == 3


def test_a_training_prompt_beyond_the_context_is_found_before_the_warm_start(made, monkeypatch):
    """The warm start, which is not made here, comes after the prompts."""
    folder = made(wrapped(byte_level(), True))
    context = load_config(folder).max_position_embeddings
    long_row = {"question": "long " * context, "solution": "so", "answer": "1"}
    rows = Path("train.jsonl").read_text()
    Path("train_long.jsonl").write_text(rows + json.dumps(long_row) + "\n")
    args = from_preset(
        RLArgs,
        "tiny",
        model=folder,
        sft_base="not_made_yet",
        task="file:train_long.jsonl",
        test_split="test.jsonl",
        prompt="tiny",
    )
    monkeypatch.setattr(training, "prepare_warm_start", lambda *_: "the warm start")
    console = Console(quiet=True)
    with pytest.raises(
        UserError, match=r"train_long.jsonl:11: a prompt of .* by --max_prompt_tokens"
    ):
        training.first_model(args, console)
    with pytest.raises(UserError, match="--max_prompt_tokens 2: every prompt is longer"):
        training.first_model(replace(args, max_prompt_tokens=2), console)
    short = replace(args, max_prompt_tokens=40)
    assert training.first_model(short, console) == "the warm start"


def test_a_folder_without_a_tokenizer_is_refused_at_once(made, run):
    made(wrapped(byte_level(), True))
    for file in Path("model").glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match="--model model: its folder has no tokenizer .none of toke"):
        run(evaluate)


# --- files of other models ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spare", "refused"), [(0, False), (10, False), (29, False), (31, True), (5000, True)]
)
def test_a_tokenizer_with_far_fewer_tokens_than_embeddings_is_refused(made, spare, refused):
    """Of 266 tokens: 29 of 295 embeddings are 9.8 % of them, 31 of 297 are 10.4 %."""
    tokenizer = wrapped(byte_level(), True)
    assert len(tokenizer) == 266
    folder = made(tokenizer, vocab_size=266 + spare)
    if not refused:
        assert len(load_tokenizer(folder)) == 266
        return
    with pytest.raises(
        UserError, match=f"has tokens for 266 of the model's {266 + spare} embeddings"
    ):
        load_tokenizer(folder)


def test_another_eos_than_the_configurations_is_said_once(made, run):
    tokenizer = wrapped(byte_level(), True)
    folder = made(tokenizer, eos_token_id=[5, 7])
    _, err = run(evaluate, "--preview", "1")
    assert (
        err.count("its tokenizer ends texts with </s> (2), its configuration with <|im_end|> (5), ")
        == 1
    )
    assert load_end_ids(folder, tokenizer) == {2, 5, 7}


@pytest.mark.parametrize("listed", [2, [2], [5, 2], None])
def test_an_eos_that_the_configuration_lists_needs_no_words(made, run, listed):
    made(wrapped(byte_level(), True), eos_token_id=listed)
    assert run(evaluate, "--preview", "1").err == ""


def name_ends(folder: str, listed: object) -> None:
    """Have a model's generation_config.json name `listed` as its eos_token_id."""
    text = json.dumps({"temperature": 0.6, "do_sample": True, "eos_token_id": listed})
    (Path(folder) / "generation_config.json").write_text(text)


@pytest.mark.parametrize(
    ("listed", "ends"),
    [
        (None, {2, 5, 7}),  # where the defaults of sampling name none, the configuration's count
        ([], {2, 5, 7}),
        ([9], {2, 9}),
        ([2, -1, 99_999], {2}),  # what has no embedding is never drawn
    ],
)
def test_ends_are_the_generation_configs_else_the_configurations(made, listed, ends):
    tokenizer = wrapped(byte_level(), True)
    folder = save_model(Path(made(tokenizer)).with_name("whole"), tokenizer, eos_token_id=[5, 7])
    name_ends(folder, listed)
    assert load_end_ids(folder, tokenizer) == ends
    model = load_model(folder, ("cpu",), torch.float32)
    sampler = TransformersSampler(model, tokenizer, 256)
    assert sampler.responses.end_ids == ends


@pytest.mark.parametrize("listed", ["2", True, 2.0, [[2]], {"a": 2}])
def test_what_is_no_token_id_ends_nothing_and_is_refused(made, run, listed):
    name_ends(made(wrapped(byte_level(), True)), listed)
    message = f"names the eos_token_id {listed[0] if isinstance(listed, list) else listed!r}, "
    with pytest.raises(UserError, match=re.escape(message)):
        run(evaluate, "--preview", "1")


# --- tokens without an embedding ------------------------------------------------------------------


@pytest.fixture
def too_small(made):
    """A model of four embeddings less than its tokenizer has tokens, as where tags were added and
    nothing was resized."""
    tokenizer = wrapped(byte_level(), True)
    return made(tokenizer, vocab_size=len(tokenizer) - 4)


THINK = r"its token <think> has id 262, and the model has embeddings for ids below 262 only"


@pytest.mark.parametrize(
    ("command", "flags", "place"),
    [
        (evaluate, (), "test.jsonl:1"),
        (evaluate, ("--preview", "1"), "test.jsonl:1"),
        (train_rl, ("--sft_base", ""), "train.jsonl:1"),
        (train_rl, ("--sft_base", "", "--preview", "1"), r"train.jsonl:\d+"),
        (sft, ("--sft_base", "new"), "test.jsonl:1"),
        (rejection_sample, ("--output", "kept.jsonl"), "train.jsonl:1"),
    ],
)
def test_a_prompt_with_a_token_without_an_embedding_is_refused_before_weights_load(
    too_small, run, command, flags, place
):
    with pytest.raises(
        UserError, match=f"^{place}: {THINK}; leave the token out, or add embeddings"
    ):
        run(command, *flags)


def test_a_demonstration_with_a_token_without_an_embedding_is_refused(too_small, run, tmp_path):
    (tmp_path / "plain.prompt").write_text("Q: {question}")
    demonstrations = [
        {"prompt": "Q: 1?", "response": text} for text in (" 1", " 2", " so </think> 3")
    ]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    with pytest.raises(
        UserError, match=r"^shown.jsonl:3: its token </think> has id 263, .* ids below 262 only"
    ):
        run(sft, "--demonstrations", "shown.jsonl", "--sft_base", "new", "--prompt", "plain.prompt")
    assert not (tmp_path / "new").exists()


def test_tokens_without_an_embedding_that_no_text_spells_out_are_no_fault(too_small):
    tokenizer = load_tokenizer(too_small)
    demonstrations = [(Problem("1", "", "Q:", ""), " 1")]
    [(prompt, response)] = encode_demonstrations(SFTArgs(), demonstrations, too_small, tokenizer)
    assert tokenizer.decode(prompt + response) == "Q: 1</s>"

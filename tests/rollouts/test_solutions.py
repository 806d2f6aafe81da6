"""Worked solutions in the place of samples: which ones, and that updates on them are those of
SFT."""

import dataclasses
import json

import pytest
from rollout_helpers import ARGS, open_tiny

from alignment.args import from_preset
from alignment.config.commands import RLArgs
from alignment.core.records import Endless, SamplingConfig, flatten_completions
from alignment.data.questions import in_sft_share
from alignment.data.tasks import find_task
from alignment.data.tasks.own_data import DataConfig
from alignment.model.loading import load_tokenizer
from alignment.rollouts.solutions import SolutionSampler, solved_problems, worked_solutions
from alignment.rollouts.source import collate_groups, open_source
from alignment.system.errors import UserError
from alignment.training.sft import SFTConfig, SFTData, fine_tune
from alignment.training.update import update

SOLUTIONS = {
    "train_on": "solutions",
    "loss_type": "no_baseline",
    "group_size": 1,
    "loss_normalization": "token_mean",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return load_tokenizer(str(tiny_folder))


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    """SFT of a file of sums with worked solutions, the last of which has none."""
    rows = []
    for number in range(60):
        total = number + 2
        steps = f"{number} + 2 = {total}" + " ." * (number % 3)
        answer = f"{steps} #### {total}" if number < 59 else str(total)
        rows.append(json.dumps({"question": f"{number} + 2 =", "answer": answer}))
    file = tmp_path_factory.mktemp("rows") / "sums.jsonl"
    file.write_text("\n".join(rows))
    return dataclasses.replace(ARGS, **SOLUTIONS, task=f"file:{file}")


def listed(problems):
    """Problems that are not endless."""
    assert not isinstance(problems, Endless)
    return list(problems)


def test_solutions_are_of_the_problems_that_rl_asks(args, tokenizer):
    """Their prompts are RL's, to the letter, and none is of SFT's share; those that are missing
    have no solution that SFT could train on."""
    config = dataclasses.replace(args, sft_share=0.5).rollout_config
    source = open_source(config, tokenizer)
    of_rl = open_source(dataclasses.replace(config, train_on="samples"), tokenizer)
    asked = listed(source.problems)
    assert 15 < len(asked) < 45
    assert source.solutions is not None and of_rl.solutions is None
    assert {problem.prompt for problem in asked} == set(source.solutions.responses)
    task = find_task(args.task, DataConfig())
    taught = {problem.question for problem, _ in task.demonstrations("train", "", 0)}
    assert asked == [problem for problem in listed(of_rl.problems) if problem.question in taught]
    assert not any(in_sft_share(task.key(problem), 0.5) for problem in asked)


def test_endless_problems_give_way_to_those_of_the_solutions():
    problems = find_task("arithmetic").test_split("")[:5]
    pairs = [(problem, "1") for problem in problems[:3]]
    assert solved_problems(Endless(lambda index: problems[0]), pairs) == list(problems[:3])
    assert solved_problems(problems[2:], pairs) == [problems[2]]


def test_solutions_that_rl_could_not_sample_are_left_out(args, tokenizer, capsys):
    """Every third has one full stop, every third two."""
    task = find_task(args.task, DataConfig())
    every = worked_solutions(task, args.rollout_config, tokenizer)
    lengths = [len(tokenizer(response)["input_ids"]) + 1 for _, response in every]  # and EOS
    longest = max(lengths)

    def with_most(tokens):
        sampling = SamplingConfig(max_new_tokens=tokens)
        return dataclasses.replace(args.rollout_config, sampling=sampling)

    kept = worked_solutions(task, with_most(longest - 1), tokenizer)
    number = lengths.count(longest)
    assert len(kept) == len(every) - number and number > 5
    said = " ".join(capsys.readouterr().err.split())
    assert f"{number} of {len(every)} worked solutions of --task file:" in said
    with pytest.raises(UserError, match="^--train_on solutions: .* none is left to train on$"):
        worked_solutions(task, with_most(1), tokenizer)


def test_an_update_on_solutions_is_a_step_of_sft(args, tokenizer, tiny_folder):
    """The same loss and gradient as SFT has of the same examples, rewards and all."""
    config = args.rollout_config
    source = open_source(config, tokenizer)
    assert source.solutions is not None
    sampled = source.sample_step(1, source.solutions)
    assert [group.scores[0]["reward"] for group in sampled.groups] == [1.0] * 4
    completions = flatten_completions(sampled.groups)
    assert all(set(completion.log_probs) == {0.0} for completion in completions)
    rollout = collate_groups(sampled.groups, config, pad_token_id=1)
    report = update(open_tiny(tiny_folder), rollout, args.update_config, 1).report
    records = []
    examples = [(completion.prompt_ids, completion.token_ids) for completion in completions]
    sft = SFTConfig(1, 4, True, 1e-2, 0, 1.0, 1, seed=0)
    fine_tune(
        open_tiny(tiny_folder),
        SFTData(examples, examples, pad_token_id=1),
        sft,
        lambda record, words: records.append(record),
    )
    assert report["loss"] == pytest.approx(records[0]["loss"], rel=1e-6)
    assert report["grad_norm"] == pytest.approx(records[0]["grad_norm"], rel=1e-5)
    # no sampler drew them, so none is compared with the trainer
    assert report["sampler_mismatch"] is None


def test_the_sampler_answers_with_the_weights_of_the_step(tokenizer):
    prompt = "1 + 1 ="
    solutions = SolutionSampler({prompt: " 2"}, tokenizer)
    solutions.load_weights([], 4)
    [[completion]] = solutions.sample([prompt], SamplingConfig(n=1))
    assert completion.policy_version == 4 and completion.finish_reason == "stop"
    assert tokenizer.decode(completion.token_ids[:-1]) == " 2"
    assert completion.token_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "values",
    [
        {"loss_type": "grpo_clip", "group_size": 8},
        {"group_size": 2},
        {"rollouts": "async"},
        {"sampler_correction": "token_truncate", "epochs_per_rollout": 2},
        {"beta": 0.1},
        {"sampler_url": "http://host:1"},
    ],
)
def test_solutions_go_without_what_samples_alone_have(values):
    with pytest.raises(UserError, match="^--train_on solutions: must be samples, or go with"):
        from_preset(RLArgs, "tiny", **{**SOLUTIONS, **values})

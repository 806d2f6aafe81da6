"""What is judged of the samples of a run that `verify` starts."""

from types import SimpleNamespace

import pytest

from alignment.verification.whole_run import TrainedRun, faults_of_adapter_config, letters_of

TOKENIZER = SimpleNamespace(decode=lambda ids, **options: "".join(map(chr, ids)))


def run_of(rows, tmp_path, **setting):
    """A run of one step with these rows, and of this setting."""
    values = {"group_size": 1, "prompts_per_rollout": len(rows), "rollouts": "sync"}
    values |= {"num_steps": 1, "reward": "accuracy", **setting}
    fields = dict.fromkeys(TrainedRun.__dataclass_fields__)
    return TrainedRun(**{**fields, "folder": tmp_path, "setting": values, "tokenizer": TOKENIZER})


def row(prompt: str, question: str):
    return {
        "problem": question,
        "question": question,
        "prompt_ids": list(map(ord, prompt)),
        "token_ids": [1],
        "policy_version": 0,
    }


ONE = row("User: What is 1 + 2?\nAssistant:", "What is 1 + 2?")
TWO = row("User: What is 3 + 4?\nAssistant:", "What is 3 + 4?")


def test_responses_with_another_prompts_truth_are_seen(tmp_path):
    run = run_of([ONE, TWO], tmp_path)
    assert run._faults_of_step(1, [ONE, TWO]) == []
    exchanged = [{**ONE, "question": TWO["question"]}, {**TWO, "question": ONE["question"]}]
    assert run._faults_of_step(1, exchanged) == [
        "2 responses with another prompt's question and truth"
    ]
    assert run._faults_of_step(1, [ONE, {**TWO, "question": ONE["question"]}]) == [
        "1 responses with another prompt's question and truth"
    ]


@pytest.mark.parametrize(
    ("question", "prompt"),
    [
        ("What is  1\n+ 2?", "<s> what is 1 + 2 ?</s>"),  # white space and case
        ("Half is ½, twice ２.", "Q: Half is 1⁄2, twice 2."),  # forms of characters
        ("", "A prompt without a question of its own"),
    ],
)
def test_what_a_tokenizer_may_change_of_a_question_is_no_fault(question, prompt):
    assert letters_of(question) in letters_of(prompt)


def test_adapters_whose_config_is_not_that_of_the_training():
    setting = {"lora_rank": 4, "lora_alpha": 8.0}
    saved = {"r": 4, "lora_alpha": 8, "use_rslora": False, "rank_pattern": {}}
    assert faults_of_adapter_config(saved, setting) == []
    assert faults_of_adapter_config({**saved, "lora_alpha": 16}, setting) == ["lora_alpha"]
    assert faults_of_adapter_config({**saved, "use_rslora": True}, setting) == ["use_rslora"]

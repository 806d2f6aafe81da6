"""What is judged of the samples of a run that `verify` starts."""

from types import SimpleNamespace

import pytest
import torch

from alignment.system.files import write_jsonl
from alignment.verification.sharpness import MOST_SHARPER
from alignment.verification.whole_run import TrainedRun, faults_of_adapter_config, letters_of
from alignment.verification.whole_update import values_of_logits

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


def logits_of(prompt) -> torch.Tensor:
    """The logits of 20 tokens behind a prompt of one token, which decides them."""
    generator = torch.Generator().manual_seed(prompt[0])
    return 2 * torch.randn(20, 32, generator=generator)


def drawn_at(temperature: float, step: int) -> list[dict]:
    """The rows of an evaluation of 12 problems, drawn at a temperature from logits in 16 bits."""
    generator = torch.Generator().manual_seed(step)
    rows = []
    for number in range(12):
        log_probs_TV = (logits_of([number]).bfloat16().float() / temperature).log_softmax(-1)
        tokens_T1 = torch.multinomial(log_probs_TV.exp(), 1, generator=generator)
        drawn = {"token_ids": tokens_T1[:, 0].tolist(), "finish_reason": "stop"}
        drawn["log_probs"] = log_probs_TV.gather(1, tokens_T1)[:, 0].tolist()
        rows.append({**row(chr(number), ""), **drawn, "score": {"reward": 0.0}})
    return rows


@pytest.mark.parametrize("temperature", [1.0, 1.1, 0.9])
def test_evaluations_at_another_temperature_in_16_bits(temperature, tmp_path):
    def token_values(weights, response, setting):
        return values_of_logits(logits_of(response.prompt), torch.tensor(response.tokens), setting)

    setting = dict.fromkeys(("eval_temperature", "eval_top_p", "eval_top_k"))
    setting |= {"sampling_temperature": 1.0, "sampling_top_p": 1.0, "sampling_top_k": 0}
    setting |= {"overlong_buffer": 0, "max_new_tokens": 20, "skip_unfinished": False}
    run = run_of([], tmp_path, **setting)
    object.__setattr__(run, "plain", SimpleNamespace(base={}, token_values=token_values))
    (tmp_path / "completions").mkdir()
    for step in (0, 1):
        write_jsonl(tmp_path / f"completions/eval_{step:06d}.jsonl", drawn_at(temperature, step))
    is_seen = run._change_of_evaluations_power() > MOST_SHARPER
    assert is_seen == (temperature != 1)

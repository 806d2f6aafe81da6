"""SFT, RL and an evaluation in the chat template of a model: one format from the demonstrations to
the last answer."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from alignment import evaluate, sft, train_rl
from alignment.system.files import read_jsonl
from tests.command_line import exit_code

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
FLAGS = ["--prompt", "chat", "--output_dir", ".", "--max_new_tokens", "72", "--max_problems", "4"]
SFT = ["--model", "chat", "--sft_base", "warm", "--num_steps", "10", "--batch_size", "8"]
RL = ["--sft_base", "warm", "--num_steps", "2", "--prompts_per_rollout", "4", "--group_size", "4"]
RL += ["--num_problems", "64", "--run_name", "run"]
EVALUATION = ["--model", "run/final", "--run_name", "evaluated"]


def test_a_model_with_a_chat_template_answers_in_boxes_in_every_command(
    tiny_folder, tmp_path, monkeypatch, capsys, undrawn_curve
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "chat")
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("chat")

    def run(command, *flags: str) -> str:
        code = exit_code(monkeypatch, command.main, command.__name__, *flags, *FLAGS)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    shown = run(sft, *SFT, "--preview", "1")
    assert "<assistant>" in shown
    assert "The final answer is \\boxed{" in shown
    run(sft, *SFT)
    trained = run(train_rl, *RL)
    assert "graded by boxed" in " ".join(trained.split())
    run(evaluate, *EVALUATION)

    for folder in ("warm", "run", "evaluated"):
        record = json.loads(Path(folder, "args.json").read_text())
        assert record["args"]["reward"] == "boxed"
        assert record["auto"] == ["reward"]
    for line in read_jsonl(Path("run/completions/rollout_000002.jsonl")):
        prompt = tokenizer.decode(line["prompt_ids"])
        assert prompt == f"<user>{line['question']}\n\n{BOXED}</user><assistant>"
    final = AutoTokenizer.from_pretrained("run/final")
    assert final.chat_template == TEMPLATE
    [evaluation] = read_jsonl(Path("evaluated/evals.jsonl"))
    assert {"reward_boxed", "reward_flexible"} < evaluation.keys()

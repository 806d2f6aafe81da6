"""The model card of a run."""

import json

from huggingface_hub import ModelCard

from alignment.args import RLArgs, parse
from alignment.builders.checks import run_config
from alignment.runs.run_folder import write_args
from alignment.runs.summary import write_card

EVALS = [
    {
        "step": step,
        "problems": 200,
        "avg_all_rewards": accuracy,
        "avg_all_rewards_ci": [accuracy - 0.05, accuracy + 0.05],
        "avg_format_rewards": 0.5,
        "avg_format_rewards_ci": [0.4, 0.6],
    }
    for step, accuracy in ((0, 0.25), (10, 0.625), (20, 0.75))
]
STEPS = [
    {
        "updates": 2,
        "bad_updates": bad,
        "grading_failed": 1,
        "responses": 8,
        "sampler_mismatch": mismatch,
    }
    for bad, mismatch in ((1, 0.002), (0, None))
]


def card(folder, monkeypatch, *flags: str) -> ModelCard:
    """The card of a run that was started with these flags."""
    monkeypatch.setattr("sys.argv", ["/home/me/alignment/train_rl.py", *flags])
    config = run_config(parse(RLArgs, [*flags]))
    (folder / "final").mkdir()
    write_args(folder, config.arguments, config.seeds)
    (folder / "evals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in EVALS))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in STEPS))
    write_card(folder / "final", folder, "to rounding")
    return ModelCard.load(folder / "final" / "README.md")


def test_it_says_what_was_trained_how_well_and_on_what(tmp_path, monkeypatch):
    flags = [
        "--task",
        "gsm8k",
        "--model",
        "Qwen/Qwen2.5-Math-1.5B",
        "--sft_base",
        "",
        "--beta",
        "0.04",
        "--run_name",
        "it's",
    ]
    made = card(tmp_path, monkeypatch, *flags)
    assert (
        made.data.base_model == "Qwen/Qwen2.5-Math-1.5B"
        and made.data.license is None
        and "grpo_clip" in made.data.tags
    )
    assert (
        "| accuracy | 0.250 [0.200, 0.300] | 0.750 [0.700, 0.800] |" in made.text
        and "on 200 held-out questions" in made.text
    )
    line = (
        "python -m alignment.train_rl --task gsm8k --model Qwen/Qwen2.5-Math-1.5B --sft_base ''"
        " --beta 0.04 --run_name 'it'\\''s'"
    )
    assert (
        f"```\n{line} \n```" in made.text
        and "/home/me" not in made.text
        and "| `beta` | `0.04` |" in made.text
    )
    assert "at most 0.002 nats" in made.text and "4 updates, of which 1 were left out" in made.text
    assert "as checked by `alignment.verify`: to rounding." in made.text
    assert "2 of 16 training responses could not be graded" in made.text and "torch 2." in made.text


def test_the_licence_is_what_the_folder_of_the_base_model_states(tmp_path, monkeypatch):
    base, run = tmp_path / "org" / "base", tmp_path / "run"
    base.mkdir(parents=True)
    run.mkdir()
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    monkeypatch.chdir(tmp_path)
    made = card(run, monkeypatch, "--model", "org/base")
    assert made.data.license == "mit" and made.data.base_model is None

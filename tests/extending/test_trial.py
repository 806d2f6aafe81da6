"""Code of the user's own that cannot work is refused before anything loads, in one line with its
place; a sweep starts no run."""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from command_line import exit_code

from alignment import evaluate, sweep, train_rl
from alignment.ablation import schedule
from alignment.args import RLArgs, from_preset
from alignment.core.losses import LOSSES
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl
from alignment.training.trial import try_loss

HEAD = """import torch
from alignment.core.losses import Loss, LossInputs

def loss(inputs):
    new, old, weight, mask = inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.mask
"""
# body of the loss -> what the line says of it, and whether it has the line of the last statement
BAD = {
    "raise KeyError('x')": "KeyError: 'x' (",
    "return inputs.require('reference_log_probs'), {}": (
        "ValueError: this loss needs reference_log_probs ("
    ),
    "return new @ new, {}": "RuntimeError: ",
    "return -weight * new": (
        "it returns a tensor of [4, 5], float32, not (loss of every token, what to log of every"
        " token) ("
    ),
    "return (-weight * new).sum(), {}": (
        "its loss is a tensor of [], float32, and must be a tensor of [4, 5], a number for every"
    ),
    "return (-weight * new).mean(1, keepdim=True), {}": (
        "its loss is a tensor of [4, 1], float32, and must be a tensor of [4, 5]"
    ),
    "return (-weight * new).detach(), {}": (
        "its loss has no gradient: it does not depend on log_probs, or detaches them ("
    ),
    "return new > 0, {}": "its loss is a tensor of [4, 5], bool, and must be",
    "return 0.0, {}": "its loss is float (0.0), and must be a tensor of [4, 5]",
    "return new * float('nan'), {}": "its loss is not finite (",
    "return (new - new).sqrt() * weight, {}": "its gradient is not finite (",
    "return [-weight * new, {}]": "it returns list ([tensor([[",
    "import sys; sys.exit(0)": "it has called sys.exit(0) (",
    "weight.add_(1); return -weight * new, {}": "it writes into its inputs (advantages): ",
    "mask.fill_(True); return -weight * new, {}": "it writes into its inputs (mask): ",
    "return -weight * new, None": (
        "what it logs is NoneType (None), and must be a dict of tensors ("
    ),
    "return -weight * new, {'ratio': (new - old).exp().detach()}": (
        "it logs one of 'ratio' and 'clipped', which go together ("
    ),
    "return -weight * new, {'ratio': new.detach(), 'clipped': 0 * new}": (
        "what it logs as 'clipped' is a tensor of [4, 5], float"
    ),
    "return -weight * new, {'ratio': new.mean(), 'clipped': new > 0}": (
        "what it logs as 'ratio' is a tensor of [], float32, and"
    ),
}
ONLY_SOME = {  # that work on four responses whose policy has moved
    "return -weight * new / (new - old)[mask].abs().max(), {}": (
        "to which the policy gives the old probability"
    ),
    "return -weight * new / weight.std(), {}": "for one response",
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A function that writes a module of the user's own, which can be imported; returns its name
    and its file."""
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "package"))

    def write(text: str) -> tuple[str, Path]:
        (tmp_path / "package").mkdir(exist_ok=True)
        name = f"own_{uuid.uuid4().hex}"  # a module that has been imported once stays what it was
        file = tmp_path / "package" / f"{name}.py"
        file.write_text(text)
        return name, file

    return write


def tried(name: str) -> None:
    args = from_preset(RLArgs, "tiny", loss_type=name)
    try_loss(name, args.update_config.loss)


@pytest.mark.parametrize("body", BAD)
def test_a_loss_that_cannot_work_is_refused(body, own):
    module, file = own(f"{HEAD}    {body}\n")
    with pytest.raises(UserError) as caught:
        tried(f"{module}:loss")
    assert str(caught.value).startswith(f"--loss_type {module}:loss: {BAD[body]}")
    raised = "Error" in BAD[body].partition(":")[0] or "sys.exit" in body
    assert f" ({file}:{6 if raised else 4}). This was for four responses, made up; docs/" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", ONLY_SOME)
def test_one_that_works_only_sometimes_too(body, own):
    module, _ = own(f"{HEAD}    {body}\n")
    with pytest.raises(UserError, match=f"not finite.*{ONLY_SOME[body]}"):
        tried(f"{module}:loss")


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("weight='advantage'", "its weight is 'advantage', and must be one of"),
        ("at_ratio_one='ppo'", "its at_ratio_one 'ppo' is none of no_baseline, "),
    ],
)
def test_the_facts_of_an_entry_are_checked(fact, said, own):
    module, _ = own(f"{HEAD}    return -weight * new, {{}}\n\nentry = Loss(loss, {fact})\n")
    with pytest.raises(UserError, match=said):
        tried(f"{module}:entry")


@pytest.mark.parametrize("name", [*LOSSES, "my_package.topr:topr", "my_package.topr:entry"])
def test_losses_that_work_pass(name):
    before = torch.get_rng_state()
    for numbers in (
        {},
        {"beta": 0.1, "loss_normalization": "token_mean"},
        {"sampler_correction": "token_mask"},
    ):
        args = from_preset(RLArgs, "tiny", loss_type=name, **numbers)
        try_loss(name, args.update_config.loss)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("flag", "wanted"), [("--loss_type", "(inputs)"), ("--advantage", "(inputs, state)")]
)
def test_a_function_with_other_arguments_is_refused_without_a_call(
    flag, wanted, own, rl_flags, monkeypatch, capsys
):
    module, file = own("def four(a, b, c, d):\n    raise SystemExit\n")
    words = ["alignment.train_rl", *rl_flags, flag, f"{module}:four"]
    assert exit_code(monkeypatch, train_rl.main, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = f"error: {flag} {module}:four: it is called with {wanted}: missing a required argument: "
    assert line.startswith(said) and line.endswith(f" ({file}:1)")


def test_the_command_says_it_before_a_model_loads(own, rl_flags, tmp_path, monkeypatch, capsys):
    module, file = own(f"{HEAD}    raise KeyError('x')\n")
    monkeypatch.setattr("alignment.model.loading.load_model", None)
    words = ["alignment.train_rl", *rl_flags, "--loss_type", f"{module}:loss"]
    assert exit_code(monkeypatch, train_rl.main, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --loss_type {module}:loss: KeyError: 'x' ({file}:6)")
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise KeyError('rare')", "KeyError: 'rare'"),
        ("import sys; sys.exit(0)", "it has called sys.exit(0)"),
    ],
)
def test_a_loss_that_fails_in_a_run_stops_it_in_one_line_and_saves(
    statement, said, own, rl_flags, tmp_path, monkeypatch, capsys
):
    """As where it is wrong for some data alone: exit code 2, which a sweep does not try again."""
    text = (
        f"{HEAD}    if len(calls) == 9:\n        {statement}\n    calls.append(1)\n    return"
        " -weight * new, {}\n"
    )
    module, file = own(f"calls = []\n{text}")
    small = [
        "--loss_type",
        f"{module}:loss",
        "--train_mini_batch_size",
        "0",
        "--micro_batch_tokens",
        "100000",
        "--num_steps",
        "9",
    ]
    calls = 6  # of the three trials
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one micro-batch a step
    try:
        assert exit_code(monkeypatch, train_rl.main, "alignment.train_rl", *rl_flags, *small) == 2
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == f"error: {said} ({file}:8)"
    (run,) = tmp_path.glob("tiny_own_*")
    done = len(read_jsonl(run / "metrics.jsonl"))
    assert done == 9 - calls and (run / f"step_{done:06d}" / "manifest.sha256.json").exists()
    assert f"stopped after step {done}" in printed.out.replace("\n", " ")


def refused_sweep(monkeypatch, capsys, output: Path, *varied: str) -> str:
    """The error of a sweep that varies an argument so, and that is refused."""
    flags = [*varied, "--seed", "0", "1", "--sft_base", "", "--executor", "local"]
    flags += ["--output_dir", str(output)]
    assert exit_code(monkeypatch, sweep.main, "alignment.sweep", *flags) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_sweep_starts_no_run_with_such_a_loss(own, tmp_path, monkeypatch, capsys):
    module, file = own(f"{HEAD}    return new, 1, 2\n")
    started = []
    monkeypatch.setattr(schedule, "start_command", lambda *given: started.append(given))
    output = tmp_path / "out"
    varied = ("--loss_type", "grpo_clip", f"{module}:loss")
    line = refused_sweep(monkeypatch, capsys, output, *varied)
    assert (
        line.startswith(f"error: --loss_type {module}:loss: it returns tuple (")
        and f"({file}:4)" in line
    )
    assert not started and not output.exists()


def test_a_sweep_starts_no_run_with_a_reward_that_fails(own, tmp_path, monkeypatch, capsys):
    module, file = own("def reward(response, ground_truth):\n    return {}[ground_truth]\n")
    varied = ("--reward", "r1_zero", f"{module}:reward")
    line = refused_sweep(monkeypatch, capsys, tmp_path / "out", *varied)
    assert (
        line.startswith(f"error: --reward {module}:reward: ")
        and f"({file}:2)" in line
        and "KeyError" in line
    )


RULE = """from my_package import evens
import dataclasses

def rule(response, ground_truth):
    {body}

task = dataclasses.replace(evens.task, rules=(f"{{__name__}}:rule",))
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return {'reward': int(response)}", "ValueError: invalid literal"),
        (
            "return {'reward': 1.0}",
            "gave {'reward': 1.0}; a rule gives reward, format_reward and answer_reward",
        ),
        (
            "return dict.fromkeys(('reward', 'format_reward', 'answer_reward'), float('nan'))",
            "which is no number",
        ),
        ("return None", "gave None; a rule gives"),
        ("import sys; sys.exit(3)", "sys.exit(3)"),
        (
            "return dict.fromkeys(('reward', 'format_reward', 'answer_reward'), 10**400)",
            "000, which is no number",
        ),
    ],
)
def test_an_evaluation_tries_a_rule_of_the_users_own_before_a_model_loads(
    body, said, own, tmp_path, monkeypatch, capsys
):
    module, file = own(RULE.format(body=body))
    monkeypatch.setattr("alignment.model.loading.load_model", None)
    flags = ["--task", f"{module}:task", "--reward", f"{module}:rule", "--model", "tiny"]
    flags += ["--output_dir", str(tmp_path)]
    assert exit_code(monkeypatch, evaluate.main, "alignment.evaluate", *flags) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        line.startswith(f"error: --reward {module}:rule: ")
        and said in line
        and "This was a made-up response" in line
    )


@pytest.mark.parametrize(
    ("problems", "said"),
    [
        ("    return {}[split]", "KeyError: 'test' (/"),
        (
            "    return 7",
            "its problems of the split test are int (7), and must be a list of Problem",
        ),
        (
            "    return ['2 + 2']",
            "its problems of the split test hold str (2 + 2), and must be a list of Problem",
        ),
        ("    yield 1", "its problems of the split test are generator"),
    ],
)
def test_a_task_that_fails_is_one_line(problems, said, own, tmp_path, monkeypatch, capsys):
    text = "from alignment.data.tasks import Task\n\ndef problems(split, path):\n"
    module, file = own(f"{text}{problems}\n\ntask = Task('own', problems, None, 'tiny')\n")
    flags = ["--task", f"{module}:task", "--model", "tiny", "--output_dir", str(tmp_path / "out")]
    assert exit_code(monkeypatch, evaluate.main, "alignment.evaluate", *flags) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: --task own: {said}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["sampler", "policy_parallelism"])
def test_an_engine_or_a_policy_that_fails_is_one_line(kind, own, rl_flags, monkeypatch, capsys):
    module, file = own("def engine(*given):\n    raise AttributeError('no engine')\n")
    words = [*rl_flags, f"--{kind}", f"{module}:engine"]
    assert exit_code(monkeypatch, train_rl.main, "alignment.train_rl", *words) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1] == f"error: AttributeError: no engine ({file}:2)"
    )


def test_our_own_errors_keep_their_traceback():
    """Also where a script of the user's own calls the command."""
    script = (
        "from alignment.system.errors import run_command\nimport json\nrun_command(lambda:"
        " json.loads(1))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and "Traceback" in ended.stderr

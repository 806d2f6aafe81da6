"""Warm up, train, evaluate and compare the embedded tiny model from Python: about four minutes on
two cores, and nothing to download. A notebook takes each `# %%` as a cell; as a script,
`uv run docs/from_python.py`, it runs from top to bottom. docs/python.md says more."""

# %% Arguments are those of the command line: what is not named has the preset's value
from pathlib import Path

from alignment import (
    EvaluateArgs,
    RLArgs,
    RunResult,
    SFTArgs,
    UserError,
    compare,
    evaluate,
    read_run,
    train,
    train_sft,
)

FOLDER = Path("checkpoints/from_python")
WARM_START = str(FOLDER / "sft")
WARM_UP_STEPS = 465  # one pass over the demonstrations
NUM_STEPS = 20
MAX_PROBLEMS = 256

# %% A mistake is an exception with the line that a command would print
try:
    RLArgs(group_sise=8)  # pyright: ignore[reportCallIssue]
except UserError as mistake:
    print(mistake)

# %% Warm up on worked solutions, once
if Path(WARM_START).exists():
    warm_start = read_run(WARM_START)
else:
    warm_start = train_sft(
        SFTArgs(
            sft_base=WARM_START,
            num_steps=WARM_UP_STEPS,
            max_problems=MAX_PROBLEMS,
            output_dir=str(FOLDER),
        )
    )
print(warm_start)

# %% Train two arms, which differ in the loss, with two seeds each
runs: list[RunResult] = []
for loss_type in ("grpo_clip", "no_baseline"):
    for seed in (0, 1):
        args = RLArgs(
            loss_type=loss_type,
            seed=seed,
            num_steps=NUM_STEPS,
            eval_interval=NUM_STEPS,
            max_problems=MAX_PROBLEMS,
            sft_base=WARM_START,
            output_dir=str(FOLDER),
        )
        runs.append(train(args))

# %% Accuracies with their 95 % intervals, and a dict for each step
for run in runs:
    before, after = run.accuracies[0], run.accuracies[-1]
    print(f"{run.path.name}: {before.value:.3f} -> {after}")
print([round(step["reward"], 2) for step in runs[0].metrics])

# %% The verdict, as `alignment.report` prints it, and as a record
verdicts = compare(*runs)
print(verdicts)
for verdict in verdicts.comparisons:
    print(verdict.kind, round(verdict.difference, 3), (verdict.low, verdict.high))

# %% Two models on the same problems
models = (WARM_START, str(runs[0].model))
result = evaluate(EvaluateArgs(compare=models, max_problems=MAX_PROBLEMS, output_dir=str(FOLDER)))
print(result)

"""The learning curve of one run, as a picture in its folder."""

from collections.abc import Sequence
from pathlib import Path

from alignment.runs.run_folder import Record


def plot_learning_curve(path: Path, metrics: Sequence[Record], evals: Sequence[Record], title: str) -> None:
    """Write a PNG of training reward, held-out accuracy with its 95 % interval, and response length over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    steps = [m["step"] for m in metrics]
    top.plot(steps, [m["reward"] for m in metrics], color="tab:gray", alpha=0.6, label="training reward")
    top.plot(steps, [m["format_reward"] for m in metrics], color="tab:orange", alpha=0.6, label="training format reward")
    eval_steps, accuracy = [e["step"] for e in evals], [e["avg_all_rewards"] for e in evals]
    spread = [[a - e["avg_all_rewards_ci"][0], e["avg_all_rewards_ci"][1] - a] for a, e in zip(accuracy, evals, strict=True)]
    top.errorbar(
        eval_steps,
        accuracy,
        yerr=list(zip(*spread, strict=True)),
        color="tab:blue",
        marker="o",
        capsize=3,
        label="held-out accuracy (95 %)",
    )
    top.set(ylim=(0, 1), title=title)
    top.legend(loc="best")
    top.grid(alpha=0.3)
    bottom.plot(steps, [m["response_length"] for m in metrics], color="tab:green")
    bottom.set(xlabel="rollout step", ylabel="response tokens")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)

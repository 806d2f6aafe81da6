"""Write the report of a sweep, or of runs: verdicts first, then the curves, samples and commands
behind them.

uv run -m alignment.report --runs checkpoints/sweep_tiny_loss_type_group_size"""

import time
from pathlib import Path

from alignment.args import ReportArgs, parse
from alignment.system.errors import UserError, run_command
from alignment.system.terminal import make_console


def main() -> None:
    args = parse(ReportArgs)
    from alignment.ablation.study import read_study

    console = make_console()
    folders = [Path(run) for run in args.runs]
    while True:
        study = read_study(folders, args.tie, args.match, args.measure)
        if study.runs:
            from alignment.ablation.report import report  # loads scipy and matplotlib

            output = Path(args.output) if args.output else folders[0]
            report(study, output, console)
        elif not args.follow:
            raise UserError(
                f"--runs {' '.join(args.runs)}: no finished run there, and no single run with an"
                " evaluation"
            )
        if not args.follow or study.is_finished:
            break
        time.sleep(30)  # the page of an unfinished study loads itself again as often


if __name__ == "__main__":
    run_command(main)

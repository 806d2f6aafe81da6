"""A study: finished runs, from a sweep's folder or several run folders, grouped into the arms that a report compares."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignment.ablation.design import ALPHA, varied_values
from alignment.runs.run_records import Run, read_run
from alignment.system.errors import UserError
from alignment.system.files import read_json

RUN_ARGUMENTS = {"seed", "run_name", "output_dir", "resume"}  # the runs of one arm may differ in these


@dataclass(frozen=True)
class Study:
    """Finished runs by arm and seed, and the settings of the sweep. `missing` names the unfinished runs."""

    arms: Mapping[str, Mapping[int, Run]]
    varied: Mapping[str, Mapping[str, object]]  # For each arm, its values of the arguments in which arms differ.
    missing: tuple[str, ...]
    tie: float
    hold: str  # "rollouts" or "prompts" (--hold of `sweep`); "" without a sweep
    warnings: tuple[str, ...]
    command: str
    alpha: float = ALPHA  # Largest probability that a table has any false verdict.

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms.values() for run in arm.values()]


def read_study(folders: Sequence[Path], tie: float = 0.03) -> Study:
    """Read a sweep's folder, or group run folders into arms by their arguments. Raises `UserError` for a folder that is
    neither, for damaged files, and for two runs of equal arguments and seed."""
    if len(folders) == 1 and (folders[0] / "sweep.json").exists():
        return _read_sweep(folders[0])
    runs = [read_run(folder) for folder in folders]
    names = {key for run in runs for key in run.args if key not in RUN_ARGUMENTS}
    differing = sorted(name for name in names if len({json.dumps(run.args.get(name)) for run in runs}) > 1)
    arms: dict[str, dict[int, Run]] = {}
    varied: dict[str, dict[str, object]] = {}
    for run in runs:
        values = {name: run.args.get(name) for name in differing}
        arm = ", ".join(f"{name} {value}" for name, value in values.items()) or "all runs"
        if run.seed in arms.setdefault(arm, {}):
            raise UserError(f"{run.path} and {arms[arm][run.seed].path} have the same arguments and seed")
        varied[arm] = values
        if run.finished:
            arms[arm][run.seed] = run
    missing = tuple(run.path.name for run in runs if not run.finished)
    return Study(arms, varied, missing, tie, "", (), "")


def _read_sweep(folder: Path) -> Study:
    sweep = read_json(folder / "sweep.json")
    types = {"arms": dict, "seeds": list, "command": list, "warnings": list, "tie": float, "alpha": float, "hold": str}
    planned = sweep.get("arms")
    complete = all(isinstance(sweep.get(key), of_type) for key, of_type in types.items())
    if not (complete and planned and all(isinstance(arm, dict) for arm in planned.values())):
        raise UserError(f"{folder / 'sweep.json'} is damaged: it needs {', '.join(types)}")
    arms: dict[str, dict[int, Run]] = {arm: {} for arm in planned}
    expected = {(arm, seed) for arm in planned for seed in sweep["seeds"] if type(seed) is int}
    for path in sorted(folder.glob("*_seed*")):
        arm, _, seed = path.name.rpartition("_seed")
        if arm not in arms or not seed.isdigit():
            continue
        expected.add((arm, int(seed)))
        if (path / "args.json").exists() and (run := read_run(path)).finished:
            arms[arm][int(seed)] = run
    return Study(
        arms=arms,
        varied=varied_values(planned),
        missing=tuple(f"{arm}_seed{seed}" for arm, seed in sorted(expected) if seed not in arms[arm]),
        tie=sweep["tie"],
        hold=sweep["hold"],
        warnings=tuple(map(str, sweep["warnings"])),
        command=shell_command(["", *map(str, sweep["command"])]),
        alpha=sweep["alpha"],
    )


def shell_command(command: Sequence[str]) -> str:
    """A recorded command line as a user would type it. It drops --resume, which `sweep` adds when it restarts a run."""
    words = [word for word in command if word != "--resume"]
    if len(words) > 1 and words[1].endswith(".py"):
        words = ["uv", "run", "-m", f"alignment.{Path(words[1]).stem}", *words[2:]]
    return shlex.join(words)

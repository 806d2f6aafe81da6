"""What the documents say exists: links, commands, flags, files, names in the code, and the fields
of a run's files."""

import ast
import dataclasses
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import small_tokenizers
from pages import DOCUMENTS, ROOT

from alignment.__main__ import command_names
from alignment.args import EvaluateArgs, RLArgs, parse
from alignment.builders import base_models
from alignment.builders.checks import check_rl
from alignment.core.records import Completion
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.rewards.rules import find_reward

# Looked up, not read: claims' verdicts, fields of files, and planted faults.
REFERENCE = {"claims.md", "files.md", "verify_faults.md"}
# of uv, TensorBoard, commands, vLLM
OTHER_PROGRAMS = {
    "extra",
    "group",
    "logdir",
    "help",
    "version",
    "print_config",
    "middleware",
}
# of torchrun, vLLM
OTHER_PROGRAMS |= {
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "max_restarts",
    "host",
    "port",
}

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def links(document: Path) -> list[tuple[str, str]]:
    """The (text, target) of each link to a file of this repository."""
    found = re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", document.read_text())
    return [
        (text, target) for text, target in found if not target.startswith(("http://", "https://"))
    ]


def code(document: Path) -> str:
    """The code in a document: indented lines, and what stands between backticks."""
    text = document.read_text()
    return "\n".join([*re.findall(r"^    .*", text, re.M), *re.findall(r"`([^`]+)`", text)])


def heading_names(document: Path) -> set[str]:
    """The names by which links reach a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def defined_names(file: Path) -> set[str]:
    """Names of the functions, classes, methods and variables that a module defines, methods as
    Class.method too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef)
            }
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@functools.cache
def flags() -> set[str]:
    """Every argument of every command and benchmark: the annotated fields of their classes and
    arguments of their `main`s."""
    names = set()
    for file in [
        *(ROOT / "alignment").glob("*.py"),
        *(ROOT / "alignment/config").glob("*.py"),
        *(ROOT / "benchmarks").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                names |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return names | {f"no_{name}" for name in names}


@each_document
def test_every_link_resolves(document):
    for text, target in links(document):
        path, _, heading = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        assert not heading or heading in heading_names(file), target
        if file.suffix == ".py" and re.fullmatch(r"`[\w.]+`", text):
            assert text.strip("`") in defined_names(file), f"{text} is not in {target}"


@each_document
def test_every_command_and_module_exists(document):
    for module in re.findall(r"-m ((?:alignment|benchmarks)\.[a-z]\w*)", code(document)):
        assert "__main__" in (ROOT / f"{module.replace('.', '/')}.py").read_text(), module
    for name in re.findall(r"(?<![\w/.])(?:alignment|benchmarks)(?:\.[a-z]\w*)+", code(document)):
        assert importlib.util.find_spec(name), name


def test_the_table_of_commands_has_every_command():
    commands = set(command_names())
    listed = re.search(r"\| command \|.*?\n\n", (ROOT / "README.md").read_text(), re.S)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", listed, re.M)) == commands


@each_document
def test_every_flag_is_one_of_a_command(document):
    # A flag with a point in it, such as --loss.alpha, is a setting of one loss alone.
    named = set(re.findall(r"(?<![\w-])--([a-z]\w*)(?![\w-]|\.\w)", code(document)))
    assert named <= flags() | OTHER_PROGRAMS


@each_document
def test_every_file_that_is_named_exists(document):
    for name in re.findall(
        r"(?<![\w/.<])(?:alignment|benchmarks|tests|docs)/[\w./-]*", code(document)
    ):
        assert (ROOT / name.rstrip(".")).exists(), name
    for name in re.findall(r"--preset ([\w.]+)", code(document)):
        assert name == "NAME" or (ROOT / f"alignment/presets/{name.rstrip('.')}.toml").exists(), (
            name
        )


def test_every_preset_has_a_row_in_the_quickstart():
    rows = set(re.findall(r"^\| `([\w.]+)`", (ROOT / "docs/quickstart.md").read_text(), re.M))
    assert {file.stem for file in (ROOT / "alignment/presets").glob("*.toml")} <= rows


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_guide_to_contributing_fits_a_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


@each_document
def test_no_page_is_long_but_tables_of_reference(document):
    if document.name == "CHANGELOG.md":  # which grows with every version
        return
    lines = document.read_text().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(lines) <= 200 or (document.name in REFERENCE and len(rows) > len(lines) / 4)


def test_the_readme_leads_to_every_page():
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    followed = {target.partition("#")[0] for _, target in links(ROOT / "README.md")}
    assert pages <= followed


# --- the rooms ------------------------------------------------------------------------------------


def rooms() -> dict[str, set[str]]:
    """What each room may import, by the table of docs/architecture.md."""
    rows = re.findall(
        r"^\| `(\w+)/` \|.*\| (.*) \|$", (ROOT / "docs/architecture.md").read_text(), re.M
    )
    return {
        room: set(re.findall(r"\w+", allowed)) - {"nothing", "of", "ours", "and"}
        for room, allowed in rows
    }


def test_the_table_of_rooms_and_its_drawing_say_what_the_code_imports():
    may_import = rooms()
    assert set(may_import) == {
        folder.parent.name for folder in (ROOT / "alignment").glob("*/__init__.py")
    }
    for room, allowed in may_import.items():
        for file in (ROOT / "alignment" / room).rglob("*.py"):
            assert set(
                re.findall(r"(?:from|import) alignment\.(\w+)", file.read_text())
            ) <= allowed | {room}, file
    drawing = re.search(r"```mermaid(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.S)[1]
    arrows = {
        room: set(to.split(" & "))
        for room, to in re.findall(r"^ *(\w+) --> (.*)", drawing, re.M)
        if room in may_import
    }
    assert arrows == {
        room: drawn for room, to in may_import.items() if (drawn := to - {"core", "system", "args"})
    }


# --- the fields of a run's files ------------------------------------------------------------------


RECORDED = """--reward random,format --beta 0.04 --sampler_correction token_truncate --max_refills 1
    --entropy_target 0.5 --token_selection top_entropy
    --overlong_buffer 4 --prompts_per_rollout 2 --group_size 4 --train_mini_batch_size 4
    --max_new_tokens 16 --max_problems 4 --eval_interval 1 --num_steps 2 --num_problems 64
    --run_name run"""


@pytest.fixture(scope="module")
def recorded(tiny_folder, tmp_path_factory) -> Path:
    """The folder of a run of two steps with all that adds fields to its files, but for asynchronous
    rollouts."""
    output = tmp_path_factory.mktemp("recorded")
    places = ["--sft_base", str(tiny_folder), "--output_dir", str(output)]
    run = [sys.executable, "-m", "alignment.train_rl", *RECORDED.split(), *places]
    subprocess.run(run, cwd=ROOT, check=True, capture_output=True)
    return output / "run"


def listed(heading: str) -> re.Pattern:
    """The fields that the tables under a heading of docs/files.md list; capitals in a name stand
    for anything."""
    text = (ROOT / "docs/files.md").read_text()
    section = text[text.index(f"## {heading}\n") :].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    names = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    return re.compile("|".join(re.sub("[A-Z]+", r"\\w+", re.escape(name)) for name in names))


def fields_of(file: Path) -> set[str]:
    """The names of all fields in a JSON file, or in the lines of a JSON-lines file."""
    text = file.read_text()
    records = (
        [json.loads(line) for line in text.splitlines()]
        if file.suffix == ".jsonl"
        else [json.loads(text)]
    )
    return {name for record in records for name in record}


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "heading", "also"),
    [
        (
            "metrics.jsonl",
            "metrics.jsonl",
            {"staleness", "seconds_wait", "teacher_kl", "seconds_teacher"},
        ),
        ("evals.jsonl", "evals.jsonl", {"model", "pass@8", "maj@8"}),
        (
            "completions/*.jsonl",
            "completions/",
            {field.name for field in dataclasses.fields(Completion)},
        ),
        ("args.json", "args.json and summary.json", set()),
        ("summary.json", "args.json and summary.json", set()),
    ],
)
def test_every_field_of_a_run_is_listed(recorded, files, heading, also):
    fields = also.union(*(fields_of(file) for file in recorded.glob(files)))
    assert len(fields) >= 4
    assert not [name for name in fields if not listed(heading).fullmatch(name)]


@pytest.mark.slow
def test_every_field_of_metrics_that_is_listed_is_one_of_a_run(recorded):
    """But for those of asynchronous rollouts, of a teacher, and of a reference that is reset."""
    fields = fields_of(recorded / "metrics.jsonl") | {"staleness", "seconds_wait"}
    fields |= {"teacher_kl", "seconds_teacher", "reference_step"}
    text = (
        (ROOT / "docs/files.md").read_text().partition("## metrics.jsonl")[2].partition("\n## ")[0]
    )
    names = [
        name
        for cell in re.findall(r"^\| (`[^|]*) \|", text, re.M)
        for name in re.findall(r"`([^`]+)`", cell)
    ]
    assert len(names) > 45
    assert [
        n
        for n in names
        if not any(re.fullmatch(re.sub("[A-Z]+", r"[\\w.:]+", n), field) for field in fields)
    ] == []


def test_the_names_that_trl_logs_are_trls():
    text = (
        (ROOT / "docs/files.md").read_text().partition("## metrics.jsonl")[2].partition("\n## ")[0]
    )
    names = set(
        re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\|.*\| ([^|]*) \|$", text, re.M)))
    ) - {"rewards/NAME/mean"}
    folders = [
        Path(importlib.util.find_spec(name).origin).parent for name in ("trl", "transformers")
    ]
    source = (folders[0] / "trainer/grpo_trainer.py").read_text() + (
        folders[1] / "trainer.py"
    ).read_text()
    assert len(names) >= 14 and "rewards/{reward_func_name}/mean" in source
    assert [name for name in names if f'"{name}"' not in source] == []


@pytest.mark.slow
def test_the_recorded_run_has_the_fields_that_few_runs_have(recorded):
    rare = {
        "kl",
        "correction_mean",
        "overlong_penalty",
        "prompts_sampled",
        "responses_sampled",
        "reward_sampled",
        "tokens_sampled",
        "selected_fraction",
        "entropy_coefficient_next",
        "ratio_mean",
        "part_random",
        "seconds_reference",
    }
    assert rare <= fields_of(recorded / "metrics.jsonl")


@pytest.mark.slow
def test_every_file_of_a_run_is_listed(recorded):
    tree = (ROOT / "docs/files.md").read_text().split("\n## ")[0]
    for path in recorded.iterdir():
        assert re.sub(r"\d{6}", "NNNNNN", path.name) in tree


# --- what TRL calls it ----------------------------------------------------------------------------


def annotated_fields(package: str, file: str, *classes: str) -> set[str]:
    """The annotated fields of a package's classes, read from their source: importing TRL would take
    longer than the test."""
    tree = ast.parse((Path(importlib.util.find_spec(package).origin).parent / file).read_text())
    bodies = [
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes
    ]
    assert len(bodies) == len(classes)
    return {part.target.id for body in bodies for part in body if isinstance(part, ast.AnnAssign)}


def page_of_trl() -> tuple[str, list[list[str]]]:
    """The part of the page that is about TRL, and the cells of its tables."""
    text = (
        (ROOT / "docs/coming_from.md")
        .read_text()
        .partition("## TRL: ")[2]
        .partition("## TRL's first")[0]
    )
    rows = [
        row
        for row in re.findall(r"^\| (.*) \|$", text, re.M)
        if not row.startswith(("TRL |", "---"))
    ]
    return text, [row.split(" | ") for row in rows]


def test_every_setting_of_trls_grpo_is_on_the_page_under_its_name():
    own = annotated_fields("trl", "trainer/grpo_config.py", "GRPOConfig")
    inherited = annotated_fields("trl", "trainer/base_config.py", "_BaseConfig")
    inherited |= annotated_fields("transformers", "training_args.py", "TrainingArguments")
    source = Path(importlib.util.find_spec("trl").origin).parent / "trainer/grpo_trainer.py"
    trainer = next(
        n
        for n in ast.parse(source.read_text()).body
        if isinstance(n, ast.ClassDef) and n.name == "GRPOTrainer"
    )
    start = next(n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    settings = own | inherited | {argument.arg for argument in start.args.args}
    text, rows = page_of_trl()
    assert own <= set(re.findall(r"\w+", text))
    values = {"sapo", "vespo", "luspo", "batch", "none"}  # of `loss_type` and `scale_rewards`
    named = {
        name
        for first, *_ in rows
        for cell in re.findall(r"`([^`]+)`", first)
        for name in re.findall(r"^\w+", cell)
    }
    assert len(named) > 90 and named - values <= settings


def test_what_trls_settings_become_is_a_flag_of_train_rl_or_of_evaluate():
    _, rows = page_of_trl()
    own = {f.name for cls in (RLArgs, EvaluateArgs) for f in dataclasses.fields(cls)}
    flags_named = re.findall(r"--(?:no_)?(\w+)", " ".join(second for _, second, *_ in rows))
    assert len(flags_named) > 40 and set(flags_named) <= own


def test_the_first_run_of_trl_goes_as_the_page_says(tmp_path, monkeypatch):
    text = (ROOT / "docs/coming_from.md").read_text()
    block = text.split("```python\n")[1].split("```")[0]
    function = block[block.index("def reward") : block.index("trainer =")]
    (tmp_path / "my_rewards.py").write_text(function)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "What is {n} + 2?"}}\n' for n in range(40))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = next(
        line for line in text.splitlines() if "reward_num_unique_letters --prompts" in line
    )
    args = parse(RLArgs, shlex.split(command.partition("alignment.train_rl")[2]))
    # The page's model is one of the hub, which no test asks.
    monkeypatch.setattr(base_models, "check_hub", lambda name, flag: None)
    check_rl(args)
    problem = find_task(args.task, args.data).training_problems("")[0]
    tokenizer = small_tokenizers.wrapped(small_tokenizers.byte_level())
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = f"{turns}<assistant>"
    [asked] = prompted([problem], args.prompt, tokenizer)
    assert asked.prompt == f"<user>{problem.question}<assistant>"
    texts = ["abab", "abc"]
    completions = [[Completion((), (), (), text, "stop", 0) for text in texts]]
    [group] = find_reward(args.reward, ("r1_zero",)).score([asked], completions)
    assert [score["reward"] for score in group.scores] == [2, 3]


# --- what the program prints ----------------------------------------------------------------------


def printed_lines() -> list[re.Pattern]:
    """Every text in the package with 20 letters of its own or more; what it fills in stands for
    anything."""
    patterns = []
    for file in (ROOT / "alignment").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else None for part in node.values
                ]
                if len("".join(part or "" for part in parts)) >= 20:
                    patterns.append(
                        "".join(".*" if part is None else re.escape(part) for part in parts)
                    )
    return [re.compile(pattern) for pattern in patterns]


def test_the_lines_under_troubleshooting_are_the_programs():
    lines = re.findall(r"^    (.+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    lines = [
        re.sub(r"^warning, step \d+: ", "", line)
        for line in lines
        if not line.strip().startswith("uv run")
    ]
    lines.remove("RL, step 5 of 8, reward 0.00, format 0.00")  # put together of two short texts
    patterns = printed_lines()
    assert len(lines) >= 13
    assert [
        line
        for line in lines
        if not any(p.fullmatch(line) or p.fullmatch(line.removeprefix("error: ")) for p in patterns)
    ] == []

"""What a document puts between backticks is there: files, and names of the code.

`test_documents.py` follows links, commands and flags, and compares fields and settings. Here are
bare names, which a change of the code leaves behind most easily.
"""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import DOCUMENTS, ROOT

from alignment.core.losses import CORRECTIONS

# Names of other programs that a user meets beside ours. None of them stands in our code.
OTHER_PROGRAMS = {
    "Python": {"async", "def"},
    "GNU's OpenMP": {"GOMP_SPINCOUNT"},
    "the processor": {"avx512_bf16"},
    "uv": {"pytest", "group", "dev", "extra"},
    "torchrun": {"max_restarts", "nnodes"},
    "SLURM and submitit": {"array_parallelism", "scancel", "signal_delay_s"},
    "PEFT and its models": {"PeftModel", "k_proj", "q_proj", "v_proj"},
    "vLLM": {"VLLM_CPU_OMP_THREADS_BIND"},
    "trackers": {"WANDB_MODE", "offline", "TRACKIO_DIR", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"},
    "TRL's rewards": {"environments", "log_extra", "log_metric", "reward_weights", "trainer_state"},
    "lm_eval": {"METRIC_stderr"},
    "chat templates": {"im_end", "im_start"},
    "data sets of messages": {"loss_mask"},
    "MLflow": {"pass_4"},
    "what JSON makes of LaTeX": {"imes", "rac"},
}
# Columns that hold the names of another program: (page, heading of the column).
OTHER_COLUMNS = {
    ("coming_from.md", "TRL"),
    ("coming_from.md", "verl"),
    ("coming_from.md", "open-instruct (`grpo_fast`)"),
    ("coming_from.md", "what differs"),
    ("coming_from_code.md", "theirs"),
    ("extending_rewards.md", "TRL"),
    ("files.md", "in TRL"),
}
SUFFIXES = "py|toml|md|json|jsonl|j2|html|tex|csv|txt|png|lock|yml|cff|safetensors|prompt|chat"

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


# --- what a document names ------------------------------------------------------------------------


def prose(text: str) -> str:
    """A Markdown text without its code blocks, whose commands and files other tests follow."""
    without_fences = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    .*$", "", without_fences, flags=re.MULTILINE)


def code_blocks(text: str) -> str:
    """The fenced and the indented lines of a Markdown text."""
    fences = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fences, *re.findall(r"^    .*$", text, re.MULTILINE)])


def fenced(text: str) -> str:
    """The code that a page shows as a reader's own file."""
    return "\n".join(re.findall(r"^```python$(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def own_columns(page: str, text: str) -> str:
    """The text without the columns of its tables that hold names of another program."""
    kept, left_out = [], set()
    for line in text.splitlines():
        if not line.startswith("|"):
            kept, left_out = [*kept, line], set()
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        headings = {number for number, cell in enumerate(cells) if (page, cell) in OTHER_COLUMNS}
        left_out = left_out or headings
        kept.append(" | ".join(c for number, c in enumerate(cells) if number not in left_out))
    return "\n".join(kept)


def spans(document: Path) -> list[str]:
    """What stands between backticks, but sentences: what a program prints has spaces."""
    text = own_columns(document.name, prose(document.read_text()))
    found = re.findall(r"`([^`\n]+)`", text)
    return [span for span in found if " " not in span or span.startswith(("--", "uv run "))]


def is_path(span: str) -> bool:
    named = re.fullmatch(rf"[\w.*<>/-]+\.(?:{SUFFIXES})|[\w.*<>-]+(?:/[\w.*<>-]+)*/", span)
    return named is not None or span.startswith(("alignment/", "benchmarks/", "docs/", "tests/"))


def is_of_the_reader(span: str) -> bool:
    """Whether it is an example of what a reader's own files may be called."""
    return "my_" in span or span.startswith("package.module")


def words(span: str) -> list[str]:
    """The identifiers of a span; none of LaTeX, of placeholders in capitals and of a reader."""
    if "\\" in span or is_path(span) or is_of_the_reader(span):
        return []
    identifiers = re.findall(r"(?<![\w.-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", span)
    parts = [part for identifier in identifiers for part in identifier.split(".")]
    return [part for part in parts if not re.fullmatch(r"[A-Z]+", part)]


# --- what there is --------------------------------------------------------------------------------


@functools.cache
def repository() -> list[str]:
    """The paths of all files, and of all folders with a slash at the end."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = listed.stdout.splitlines()
    folders = {f"{folder}/" for file in files for folder in Path(file).parents}
    return [*files, *sorted(folders)]


@functools.cache
def written_files() -> re.Pattern:
    """The files and folders that commands write, by the trees and the sentences of docs/files.md.

    Capitals, stars, numbers of steps and what is between angle brackets stand for anything.
    """
    text = (ROOT / "docs/files.md").read_text()
    trees = re.findall(r"^ {4,}(\S.*?)(?: {2,}.*)?$", text, re.MULTILINE)
    names = [name for tree in trees for name in tree.split(", ")]
    names += re.findall(r"^## (\w+\.jsonl)$", text, re.MULTILINE)
    names += [span for span in re.findall(r"`([^`\n]+)`", prose(text)) if is_path(span)]
    patterns = [re.sub(r"<\w+>|[A-Z]+|\d{6}|\\\*", r"[\\w.-]+", re.escape(name)) for name in names]
    return re.compile("|".join(patterns))


@functools.cache
def sources() -> list[Path]:
    """The modules of the package, of its benchmarks, and of the extensions that the pages show."""
    folders = ("alignment/", "benchmarks/", "tests/extending/my_package/")
    return [
        ROOT / file for file in repository() if file.startswith(folders) and file.endswith(".py")
    ]


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def names_in(tree: ast.Module) -> Iterator[str]:
    """Names in a module's code, and words in its strings; docstrings and comments say nothing."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    named = (*documented, ast.Name, ast.Attribute, ast.arg, ast.keyword, ast.alias, ast.Constant)
    nodes = [node for node in ast.walk(tree) if isinstance(node, named)]
    bodies = [node for node in nodes if isinstance(node, documented)]
    docstrings = {node.body[0].value for node in bodies if ast.get_docstring(node, clean=False)}
    for node in nodes:
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
            ):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")
            case ast.Constant(value=str(text)) if node not in docstrings:
                yield text
                yield from re.findall(r"\w+", text)


@functools.cache
def vocabulary() -> set[str]:
    """Every name of the code, of the tables and templates beside it, and of files and folders."""
    known = {name for file in sources() for name in names_in(parsed(file))}
    for path in repository():
        known |= {*Path(path).parts, *re.findall(r"\w+", path), Path(path).stem}
        if path.startswith("alignment/") and path.endswith((".toml", ".j2")):
            known |= set(re.findall(r"\w+", (ROOT / path).read_text()))
    return known.union(CORRECTIONS, *OTHER_PROGRAMS.values())


@functools.cache
def fields() -> re.Pattern:
    """The fields of a run's files, by docs/files.md, which another test compares with a run."""
    text = (ROOT / "docs/files.md").read_text()
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return re.compile("|".join(re.sub("[A-Z]+", r"[\\w.]+", re.escape(name)) for name in names))


@functools.cache
def members() -> dict[str, set[str]]:
    """Class -> its methods and fields, those of our classes that it inherits from included."""
    trees = [parsed(file) for file in sources()]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {node.name: set(names_in(ast.Module(node.body, []))) for node in classes}
    inherited = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for node in classes
    }
    for _ in range(4):  # as deep as classes inherit here
        for name, bases in inherited.items():
            own[name] = own[name].union(*(own.get(base, set()) for base in bases))
    return own


def defined_in(file: Path) -> set[str]:
    """The names that a module defines; none where there is no such module."""
    if not file.exists():
        return set()
    tree = parsed(file)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    assigned += [
        target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    ]
    return defined | {target.id for target in assigned if isinstance(target, ast.Name)}


# --- the facts ------------------------------------------------------------------------------------


def missing_paths(document: Path) -> list[str]:
    own = set(re.findall(r"[\w.]+", code_blocks(document.read_text())))
    paths = [span for span in spans(document) if is_path(span) and not is_of_the_reader(span)]
    return [path for path in paths if path not in own and not path_exists(path)]


def path_exists(path: str) -> bool:
    ignored = (ROOT / ".gitignore").read_text().split()
    ours = any(f"/{known}".endswith((f"/{path}", f"/{path}/")) for known in repository())
    written = re.sub(r"[<>]", "", path).replace("*", "any")
    return ours or path in ignored or written_files().fullmatch(written) is not None


def missing_names(document: Path) -> list[str]:
    text = document.read_text()
    known = vocabulary() | set(re.findall(r"\w+", fenced(text)))
    unknown = []
    for span in spans(document):
        if span in known or is_written(span):
            continue
        unknown += [word for word in words(span) if word not in known and not is_written(word)]
    return unknown


def is_written(name: str) -> bool:
    """Whether it is a field of a run's files, or one of its folders."""
    is_folder = written_files().fullmatch(f"{name}/") is not None
    return is_folder or fields().fullmatch(name) is not None


def missing_members(document: Path) -> list[str]:
    """Class.name, of a class of ours that has no such method or field."""
    dotted = [span.removesuffix("()").split(".") for span in spans(document)]
    pairs = [parts for parts in dotted if len(parts) == 2 and parts[0] in members()]
    return [f"{owner}.{name}" for owner, name in pairs if name not in members()[owner]]


def misplaced(document: Path) -> list[str]:
    """`NAME` in `FILE`, of a file that does not define the name."""
    form = r"`(\w+)`(?: and `(\w+)`)? in\s`((?:alignment|benchmarks)/[\w/]+\.py)`"
    said = re.findall(form, document.read_text())
    pairs = [(name, file) for *names, file in said for name in names if name]
    return [f"{name} in {file}" for name, file in pairs if name not in defined_in(ROOT / file)]


@each_document
def test_every_file_between_backticks_is_there(document):
    assert missing_paths(document) == []


@each_document
def test_every_name_between_backticks_is_there(document):
    assert missing_names(document) == []
    assert missing_members(document) == []
    assert misplaced(document) == []


def test_what_is_gone_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "    uv run -m alignment.sft --task file:sums.csv\n\n"
        "`sums.csv`, `alignment/policy/policies.py`, `losses.py`, `places_of_old.py`\n"
        "`step_000020/`, `held/`\n"
        "`LossInputs`, `LossInput`, `collate_groups`, `collate_rows`, `--loss_type grpo_klip`\n"
        "`Completion.token_ids`, `Completion.tokens_of`, `RULES` in `alignment/core/losses.py`\n"
        "| TRL | here |\n|---|---|\n| `of_trl` | `of_ours` |\n"
    )
    assert missing_paths(page) == ["alignment/policy/policies.py", "places_of_old.py", "held/"]
    assert missing_names(page) == [
        "LossInput",
        "collate_rows",
        "grpo_klip",
        "tokens_of",
        "of_trl",
        "of_ours",
    ]
    assert missing_members(page) == ["Completion.tokens_of"]
    assert misplaced(page) == ["RULES in alignment/core/losses.py"]
    other = page.rename(tmp_path / "coming_from.md")
    assert missing_names(other)[-1] == "of_ours" and "of_trl" not in missing_names(other)

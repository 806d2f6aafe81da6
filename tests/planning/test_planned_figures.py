"""What pages and presets state of plans is what the plan says today, and each coefficient of the
planner says where it comes from."""

import ast
import re
from pathlib import Path

import pytest

from alignment.args import PRESETS, preset_names
from benchmarks.planned_figures import COMMAND, DOCS, MACHINES, pages, rewritten, with_header

ROOT = Path(__file__).parents[2]
FILES = (
    "alignment/model/activations.py",
    "alignment/policy/micro_batches.py",
    "alignment/builders/prediction.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "alignment/planning").glob("*.py"))),
)
NO_COEFFICIENTS = {
    *("FP32", "BF16", "WEIGHT_BYTES", "WEIGHT_AND_GRADIENT"),  # bytes of a number, by its type
    *("MACHINES", "PUBLISHED"),
}
# of a formula: halves and means, a product's two operations, units
PLAIN_NUMBERS = {0, 1, 2, -1, -2, 1e9, 3600, 10, 1024}


@pytest.mark.parametrize("preset", preset_names())
def test_a_presets_header_states_todays_plan(preset):
    file = PRESETS / f"{preset}.toml"
    assert rewritten(file) == file.read_text(), f"run {COMMAND}"


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_pages_tables_state_todays_plan(page):
    assert rewritten(page) == page.read_text(), f"run {COMMAND}"


def test_stale_figures_are_replaced():
    text = (PRESETS / "tiny.toml").read_text()
    stale = re.sub(r"cpu \d\.\d", "cpu 9.9", text)
    assert stale != text and with_header(stale, "tiny").count("Peaks by `alignment.plan`") == 1
    assert set(MACHINES) == set(preset_names())
    assert {page.name for page in pages()} == {"plan.md", "plan_measured.md"}
    assert DOCS == ROOT / "docs"


def coefficients(file: str) -> dict[str, str]:
    """The module's constants of numbers, and the text below each."""
    body = ast.parse((ROOT / file).read_text()).body
    found = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            value = node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        name = ast.unparse(target)
        has_number = any(
            isinstance(part, ast.Constant) and isinstance(part.value, int | float)
            for part in ast.walk(value)
        )
        if name in NO_COEFFICIENTS or not has_number or not name.isupper():
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        found[name] = str(following.value.value) if is_text else ""
    return found


COEFFICIENTS = [(file, name) for file in FILES for name in coefficients(file)]


@pytest.mark.parametrize(("file", "name"), COEFFICIENTS)
def test_a_coefficient_says_source_refutation_and_readers(file, name):
    text = " ".join(coefficients(file)[name].split())
    assert re.match(r"\w.*\. (Source|Assumption): .*\. Shown wrong by: .*\. Read by: .*\.$", text)
    readers = re.findall(r"`(\w+)`", text.partition("Read by:")[2])
    assert readers
    sources = [path.read_text() for path in (ROOT / "alignment").rglob("*.py")]
    for reader in readers:
        assert any(is_read(source, reader, name) for source in sources), reader


def is_read(source: str, reader: str, name: str) -> bool:
    """Whether a function or class of this name reads the constant."""
    if name not in source or reader not in source:
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == reader:
            return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))
    return False


@pytest.mark.parametrize("file", FILES)
def test_no_formula_has_a_number_without_a_name(file):
    faults = []
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.BinOp):
                for side in (part.left, part.right):
                    is_number = isinstance(side, ast.Constant) and isinstance(
                        side.value, int | float
                    )
                    if is_number and side.value not in PLAIN_NUMBERS:
                        faults.append(f"{node.name}:{part.lineno} {ast.unparse(part)}")
    assert faults == []

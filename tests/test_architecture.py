"""The architecture, read from syntax trees: which room imports which, who owns the weights, how
large functions are.

Every check takes the package as {dotted module name: syntax tree} and returns its faults as text.
"""

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "alignment"

# Room -> the rooms, or single modules, that it may import besides itself.
MAY_IMPORT = {
    "core": (),
    "system": (),
    "data": ("core", "system"),
    "rewards": ("core", "system"),
    "model": ("core", "system"),
    "policy": ("core", "system", "model"),
    "planning": ("core", "system", "model", "policy"),
    "sampling": ("core", "system", "model", "policy"),
    "rollouts": ("core", "system", "data", "rewards", "model", "policy", "sampling"),
    "training": ("core", "system", "model", "policy", "rollouts"),
    "verification": (
        "core",
        "system",
        "rewards",
        "model",
        "policy",
        "sampling",
        "rollouts",
        "training",
    ),
    "runs": ("core", "system"),
    "evaluation": ("core", "system", "data", "rewards", "sampling"),
    # An ablation is about the arguments of train_rl; its reports ask a task which questions are the
    # same.
    "ablation": ("core", "system", "runs", "args", "config", "data.tasks", "data.questions"),
    # Arguments are checked against tables and configurations, never against what loads a model.
    "config": (
        "core",
        "system",
        "policy.optimizers",
        "rollouts.config",
        "policy.policy",
        "rewards.rules",
        "sampling.sampler",
        "data.tasks",
        "data.pass_rates",
        "runs.trackers",
    ),
    "args": ("system", "config", "data.tasks", "rewards.rules"),
    # From arguments to objects: everything but the commands, which build with it.
    "builders": (
        "core",
        "system",
        "data",
        "rewards",
        "model",
        "policy",
        "planning",
        "sampling",
        "rollouts",
        "training",
        "runs",
        "evaluation",
        "ablation",
        "config",
        "args",
        "verification",
    ),
}
# Beside the commands: the arguments, what Python programs call, and the names of the field.
TOP_LEVEL = {
    "api",
    "args",
    "models",
    "preview",
    "grpo",
    "drgrpo_grader",
    "llm_from_scratch",
    "tokens",
    "log_probs",
}
ARGUMENT_CLASSES = {"RLArgs", "SFTArgs", "Args", "EvaluateArgs", "SweepOptions"}
KINDS = "alignment.policy.policy"  # the table of kinds of policy
# a design consists of arguments, and so does one that tunes them
TAKES_ARGUMENTS = {"alignment.ablation.design", "alignment.ablation.tuning"}
MOST_PARAMETERS = 6
# Names of the field, whose signatures are older than this code; and `attention`, which transformers
# calls.
GIVEN_SIGNATURES = {
    "grpo_microbatch_train_step",
    "compute_policy_gradient_loss",
    "get_response_log_probs",
    "attention",
}
MOST_LINES = 60
CALLED = {"parameters", "named_parameters", "get_output_embeddings"}
READ = {"grad", "lm_head"}
# Our own decoding loop runs a model layer by layer: its own one, or one that `Policy.model_on`
# lends it to be read.
READS_WEIGHTS = {  # engines with weights of their own
    "alignment.sampling.transformers",
    "alignment.sampling.vllm",
    "alignment.sampling.vllm_memory",
    "alignment.verification.whole_update",  # An oracle, whose model is transformers' own.
}
# Oracles that share nothing with what they check: they import one another, and else libraries.
ORACLES = {
    "alignment.verification.papers",
    "alignment.verification.paper_advantages",
    "alignment.verification.paper_distillation",
    "alignment.verification.reported",
    "alignment.verification.whole_update",
}
ONLY_IMPORTERS = {
    **dict.fromkeys(("wandb", "trackio", "mlflow"), {"alignment.runs.trackers"}),
    "vllm": {
        "alignment.sampling.vllm",
        "alignment.sampling.vllm_memory",
        "alignment.sampling.vllm_weights",
    },
    "torchao": {"alignment.policy.adamw_8bit"},
    "peft": {"alignment.policy.lora"},
    "liger_kernel": {"alignment.model.loading"},
}
RUNS_TEXT = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "sympify",
    "parse_expr",
    "parse_latex",
    "loads",
    "load",
}
READERS = {"json", "safetensors", "tomllib", "re"}  # their functions of these names run nothing

Package = dict[str, ast.Module]


def read_package() -> Package:
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {module_name(path): ast.parse(path.read_text()) for path in files}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported(tree: ast.AST, with_types: bool = True) -> frozenset[str]:
    """Dotted names that a module imports, in its functions too; of `from a import b` both a and
    a.b.

    Without `with_types` the imports under TYPE_CHECKING are left out.
    """
    names: set[str] = set()
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        nodes += node.orelse if for_types and not with_types else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@functools.cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a module, which thirty checks look through: to walk there takes longer than to
    look."""
    return tuple(ast.walk(tree))


def last_name(node: ast.AST) -> str:
    """`step` of self.optimizer.step and of step; empty for what is no name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def functions(package: Package) -> Iterator[tuple[str, ast.FunctionDef]]:
    for name, tree in package.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [each for each in every if each.arg not in ("self", "cls", "ctx")]


def is_command(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in tree.body
    )


def room_of(module: str) -> str:
    """`core` of alignment.core.losses, `args` of alignment.args."""
    return module.split(".")[1] if "." in module else ""


# --- the checks -----------------------------------------------------------------------------------


def forbidden_imports(package: Package) -> list[str]:
    faults = []
    for name, tree in package.items():
        room = room_of(name)
        if room not in MAY_IMPORT:
            continue
        allowed = tuple(f"{PACKAGE}.{target}" for target in (room, *MAY_IMPORT[room]))
        for target in imported(tree) & set(package) - {PACKAGE}:
            if not any(f"{target}.".startswith(f"{prefix}.") for prefix in allowed):
                faults.append(f"{name} imports {target}")
    return faults


def oracles_that_import_the_program(package: Package) -> list[str]:
    faults = []
    for name in sorted(ORACLES):
        targets = imported(package[name]) & set(package) - ORACLES
        targets -= {PACKAGE, f"{PACKAGE}.verification"}
        faults += [f"{name} imports {target}" for target in sorted(targets)]
    return faults


def circles(package: Package) -> list[str]:
    """One circle of files, where there is any; imports inside functions count."""
    graph = {
        name: (imported(tree, with_types=False) & set(package)) - {name, PACKAGE}
        for name, tree in package.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def commands_that_import_commands(package: Package) -> list[str]:
    commands = {name for name, tree in package.items() if name.count(".") == 1 and is_command(tree)}
    return [
        f"{name} imports {other}"
        for name in commands
        for other in (imported(package[name]) & commands) - {name}
    ]


def strangers_at_the_top(package: Package) -> list[str]:
    rooms = {room_of(name) for name in package if name.count(".") > 1}
    top = {
        name: tree
        for name, tree in package.items()
        if name.count(".") == 1 and room_of(name) not in rooms
    }
    return [
        name
        for name, tree in top.items()
        if room_of(name) not in TOP_LEVEL and not is_command(tree)
    ]


def rooms_without_arrows(package: Package) -> list[str]:
    return sorted({room_of(name) for name in package if name.count(".") > 1} - set(MAY_IMPORT))


def uses_of_weights(package: Package) -> list[str]:
    """Attributes of a model's weights and gradients, and optimiser steps, outside model/ and
    policy/."""
    return [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in package.items()
        if room_of(name) not in ("model", "policy") and name not in READS_WEIGHTS
        for node in nodes_of(tree)
        if touches_weights(node)
    ]


def touches_weights(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        is_step = node.attr == "step" and last_name(node.value).endswith("optimizer")
        return node.attr in READ or is_step
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CALLED
    )


def branches_on_a_loss(package: Package) -> list[str]:
    return [
        f"{name}:{node.lineno}"
        for name, tree in package.items()
        for node in nodes_of(tree)
        if isinstance(node, ast.Compare)
        and "loss_type" in map(last_name, (node.left, *node.comparators))
        or isinstance(node, ast.Match)
        and last_name(node.subject) == "loss_type"
    ]


def names_of_policy_kinds(package: Package) -> list[str]:
    """Kinds of policy that a module names, beside that of their table: facts of an entry decide."""
    table = next(
        node.value
        for node in package[KINDS].body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "POLICIES"
    )
    assert isinstance(table, ast.Dict)
    kinds = {ast.literal_eval(key) for key in table.keys if key is not None}
    return [
        f"{name}:{node.lineno} {node.value}"
        for name, tree in package.items()
        if name != KINDS
        for node in nodes_of(tree)
        if isinstance(node, ast.Constant) and node.value in kinds
    ]


def functions_of_arguments(package: Package) -> list[str]:
    return [
        f"{name}.{function.name}({ast.unparse(parameter)})"
        for name, function in functions(package)
        if name.count(".") > 1
        and room_of(name) not in ("builders", "config")
        and name not in TAKES_ARGUMENTS
        for parameter in parameters(function)
        if parameter.annotation
        and ARGUMENT_CLASSES
        & {word.id for word in ast.walk(annotation(parameter)) if isinstance(word, ast.Name)}
    ]


def annotation(parameter: ast.arg) -> ast.expr:
    """The annotation, parsed where it is written as a string."""
    quoted = isinstance(parameter.annotation, ast.Constant) and isinstance(
        parameter.annotation.value, str
    )
    return ast.parse(parameter.annotation.value, mode="eval") if quoted else parameter.annotation


def functions_of_many_parameters(package: Package) -> list[str]:
    return [
        f"{name}.{function.name}: {len(parameters(function))} parameters"
        for name, function in functions(package)
        if len(parameters(function)) > MOST_PARAMETERS and function.name not in GIVEN_SIGNATURES
    ]


def long_functions(package: Package) -> list[str]:
    lengths = [
        (name, function, function.end_lineno - function.lineno + 1)
        for name, function in functions(package)
    ]
    return [
        f"{name}.{function.name}: {lines} lines"
        for name, function, lines in lengths
        if lines > MOST_LINES
    ]


def imports_of_optional_packages(package: Package) -> list[str]:
    return [
        f"{name} imports {library}"
        for name, tree in package.items()
        for library, importers in ONLY_IMPORTERS.items()
        if library in {target.split(".")[0] for target in imported(tree)} and name not in importers
    ]


def evaluations_of_text(package: Package) -> list[str]:
    return [
        f"{name}:{node.lineno}"
        for name, tree in package.items()
        for node in nodes_of(tree)
        if evaluates_text(node)
    ]


def evaluates_text(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in RUNS_TEXT
    if not (isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)):
        return False
    # torch.distributed.checkpoint unpickles, but not with a `storage_reader` of safetensors.
    safe = node.func.value.id in READERS or any(
        word.arg in ("weights_only", "storage_reader") for word in node.keywords
    )
    return node.func.attr in RUNS_TEXT and not safe and bool(node.args)  # model.eval() takes none


# A module of each kind of fault, by its name, and the check that must see it.
PLANTED = [
    (forbidden_imports, "alignment.core.new", "def f():\n    from alignment.system import files"),
    (
        forbidden_imports,
        "alignment.runs.new",
        "if TYPE_CHECKING:\n    from alignment.policy.policy import Policy",
    ),
    (forbidden_imports, "alignment.args", "from alignment.model.loading import load_model"),
    (
        oracles_that_import_the_program,
        "alignment.verification.whole_update",
        "def f():\n    from alignment.core import losses",
    ),
    (circles, "alignment.core.records", "def f():\n    from alignment.core import tokens"),
    (
        commands_that_import_commands,
        "alignment.sft",
        "import alignment.train_rl\nif __name__ == '__main__':\n    pass",
    ),
    (strangers_at_the_top, "alignment.helpers", "x = 1"),
    (rooms_without_arrows, "alignment.utils.text", "x = 1"),
    (
        uses_of_weights,
        "alignment.training.new",
        "def f(model):\n    return list(model.parameters())",
    ),
    (uses_of_weights, "alignment.training.new", "self.optimizer.step()"),
    (uses_of_weights, "alignment.sampling.new", "head = model.lm_head.weight"),
    (
        branches_on_a_loss,
        "alignment.training.new",
        "def f(args):\n    return 'grpo_clip' == args.loss_type",
    ),
    (branches_on_a_loss, "alignment.core.new", "if loss_type in ('gspo', 'cispo'):\n    pass"),
    (names_of_policy_kinds, "alignment.planning.new", "def f(kind):\n    return kind == 'single'"),
    (functions_of_arguments, "alignment.training.new", "def f(*, args: 'RLArgs | None'): ..."),
    (
        functions_of_many_parameters,
        "alignment.new",
        "class A:\n    def f(self, a, b, c, *, d, e, f, g): ...",
    ),
    (long_functions, "alignment.new", "def f():\n" + "    x = 1\n" * MOST_LINES),
    (
        imports_of_optional_packages,
        "alignment.new",
        "def f():\n    from torchao.optim import AdamW8bit",
    ),
    (evaluations_of_text, "alignment.new", "f = lambda text: eval(text)"),
    (evaluations_of_text, "alignment.new", "state = torch.load(file)"),
]
CHECKS = list(dict.fromkeys(check for check, *_ in PLANTED))


@pytest.fixture(scope="module")
def package() -> Package:
    return read_package()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_has_no(check, package):
    assert check(package) == []


@pytest.mark.parametrize(("check", "name", "source"), PLANTED)
def test_a_planted_fault_is_seen(check, name, source, package):
    assert check({**package, name: ast.parse(source)})  # the package itself has no faults


def test_the_loop_fits_on_a_screen():
    assert len((ROOT / PACKAGE / "train_rl.py").read_text().splitlines()) <= MOST_LINES

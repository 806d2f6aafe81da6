"""Readers of files that anything may have happened to: data or a `UserError`, whatever the
bytes."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from alignment.ablation.design import named_arms
from alignment.ablation.study import read_run, read_study
from alignment.data.tasks import published
from alignment.system.errors import UserError
from alignment.system.files import atomic_folder, read_jsonl
from alignment.system.manifests import find_damage, write_manifest
from benchmarks import audit_grader

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGS = json.dumps(
    {"args": {"seed": 0, "loss_type": "grpo_clip"}, "command": ["train_rl"], "versions": {}}
)
SWEEP = json.dumps(
    {
        "arms": {"a": {"x": 1}},
        "seeds": [0],
        "command": ["x"],
        "tie": 0.03,
        "hold": "rollouts",
        "warnings": [],
        "alpha": 0.05,
    }
)
FILES = {
    "args.json": ARGS,
    "sweep.json": SWEEP,
    "metrics.jsonl": '{"step": 1}\n',
    "evals.jsonl": '{"step": 1}\n',
}


@st.composite
def damaged(draw, text: str) -> bytes:
    """Other bytes, other JSON, or this text with a stretch of it replaced."""
    kind = draw(st.sampled_from(["bytes", "json", "cut", "swapped value"]))
    if kind == "bytes":
        return draw(st.binary(max_size=40))
    if kind == "json":
        return json.dumps(draw(JSON)).encode()
    if kind == "swapped value":
        facts = json.loads(text)
        facts[draw(st.sampled_from(sorted(facts)))] = draw(JSON)
        return json.dumps(facts).encode()
    begin, end = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    return (text[:begin] + text[end:]).encode()


fuzzed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("name", FILES)
@fuzzed
@given(data=st.data())
def test_run_folders(name, tmp_path, data):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    (tmp_path / name).write_bytes(data.draw(damaged(FILES[name].strip())))
    if name != "sweep.json":
        (tmp_path / "sweep.json").unlink()
    for read in (read_run, lambda path: read_study([path])):
        try:
            read(tmp_path)
        except UserError as error:
            assert str(tmp_path) in str(error)


@fuzzed
@given(content=st.binary(max_size=60) | damaged('{"question": "?", "answer": "#### 5"}'))
def test_problems(tmp_path, content):
    (tmp_path / "train.jsonl").write_bytes(content)
    try:
        for problem in published.problems("gsm8k", "train", str(tmp_path)):
            assert isinstance(problem.ground_truth, str)
    except UserError as error:
        assert "train.jsonl" in str(error)


@fuzzed
@given(content=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_lines_of_json(tmp_path, content):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(content)
    try:
        records = read_jsonl(file)
    except UserError as error:
        assert str(file) in str(error)
    else:
        assert all(isinstance(record, dict) for record in records)


def test_an_unfinished_last_line_is_left_out_and_any_other_is_named(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_jsonl(file) == [{"a": 1}, {"a": 2}]
    file.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(UserError, match="lines.jsonl:2: not a JSON object"):
        read_jsonl(file)


@fuzzed
@given(
    content=st.binary(max_size=40)
    | st.sampled_from(["[arms.a]\n", "x = 1\n[arms.b]\nseed = 2\n"]).map(str.encode)
)
def test_arms(tmp_path, content):
    file = tmp_path / "arms.toml"
    file.write_bytes(content)
    try:
        named_arms(str(file), "tiny", {})
    except UserError as error:
        assert "arms.toml" in str(error)


@fuzzed
@given(
    field=st.sampled_from(
        ["cliprange", "group_size", "loss_type", "data_seed", "deterministic", "model"]
    ),
    value=JSON,
)
def test_values_of_arms(tmp_path, field, value):
    file = tmp_path / "arms.toml"
    file.write_text(f"[arms.a]\n{field} = {json.dumps(value)}\n")
    try:
        named_arms(str(file), "tiny", {})
    except UserError as error:
        assert "arms.toml" in str(error) or f"--{field}" in str(error)


@fuzzed
@given(content=damaged('{"text": "1", "ground_truth": "1", "score": {"reward": 1}}'))
def test_completions(tmp_path, content):
    file = tmp_path / "completions.jsonl"
    file.write_bytes(content)
    try:
        audit_grader.read_completions(file)
    except UserError as error:
        assert "completions.jsonl" in str(error)


@fuzzed
@given(content=damaged('{"weights": {"bytes": 3, "sha256": "0"}}'))
@example(content=b'{"": {"bytes": 3, "sha256": "0"}}')  # the folder itself
def test_a_manifest_is_whole_or_named(tmp_path, content):
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(b"abc")
    (folder / "manifest.sha256.json").write_bytes(content)
    wrong = find_damage(folder)
    assert wrong is None or "manifest" in wrong or "weights" in wrong or "is missing" in wrong


@given(
    content=st.binary(min_size=1, max_size=200), place=st.integers(0, 10_000), bit=st.integers(0, 7)
)
def test_one_changed_bit_is_found(tmp_path_factory, content, place, bit):
    folder = tmp_path_factory.mktemp("folder") / "checkpoint"
    with atomic_folder(folder) as building, write_manifest(building):
        (building / "weights").write_bytes(content)
    assert find_damage(folder) is None
    spoilt = np.frombuffer(content, dtype=np.uint8).copy()
    spoilt[place % len(content)] ^= 1 << bit
    (folder / "weights").write_bytes(spoilt.tobytes())
    assert find_damage(folder) == "weights has changed since it was written"


def test_versions_that_are_no_text_are_read_as_text(tmp_path):
    for file in ("args.json", "evals.jsonl", "metrics.jsonl", "summary.json"):
        if file in FILES:
            (tmp_path / file).write_text(FILES[file])
    facts = json.loads(FILES["args.json"])
    (tmp_path / "args.json").write_text(json.dumps({**facts, "versions": {"torch": [2]}}))
    assert read_run(tmp_path).versions == {"torch": "[2]"}
    assert read_study([tmp_path]).warnings == ()

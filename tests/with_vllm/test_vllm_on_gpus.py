"""What vLLM runs on GPUs and never on a CPU, Model Runner V2, as far as its sources tell: the parts
that the sampler uses."""

import ast
import importlib.util
import os
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import model as model_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from alignment.sampling import vllm
from alignment.sampling.vllm_server import FACTS

FOLDER = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


def methods(file: str, name: str) -> dict[str, list[str]]:
    """Methods of a class in one of vLLM's files, which need no GPU to be read: name ->
    arguments."""
    tree = ast.parse((FOLDER / file).read_text())
    (definition,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    )
    functions = (node for node in definition.body if isinstance(node, ast.FunctionDef))
    return {
        function.name: [argument.arg for argument in function.args.args] for function in functions
    }


@pytest.mark.parametrize("file", ["v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"])
def test_both_runners_take_weights_and_show_their_model(file):
    runner = methods(file, "GPUModelRunner")
    assert runner["get_model"] == ["self"] and runner["reload_weights"][:2] == [
        "self",
        "weights_iterator",
    ]


def test_the_gpu_worker_hands_weights_on_to_its_runner():
    worker = methods("v1/worker/gpu_worker.py", "Worker")
    assert {"reload_weights", "get_model"} <= worker.keys()


def test_the_second_runner_reports_log_probs_of_the_distribution_that_it_samples_from():
    source = (FOLDER / "v1/worker/gpu/sample/sampler.py").read_text()
    assert "logprobs_mode in PROCESSED_LOGPROBS_MODES" in source
    modes = next(
        ast.unparse(node.value)
        for file in (
            FOLDER / "v1/worker/gpu/sample/sampler.py",
            FOLDER / "config/model.py",
            FOLDER / "v1/sample/sampler.py",
        )
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and "PROCESSED_LOGPROBS_MODES" in ast.unparse(node).split("=")[0]
    )
    assert "'processed_logprobs'" in modes


def test_the_second_runner_refuses_nothing_that_the_sampler_sets():
    """What it does not support, it says by these words; the sampler sets neither speculation nor
    parallelism of any kind."""
    source = (FOLDER / "config/vllm.py").read_text()
    tree = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and node.name == "_get_v2_model_runner_unsupported_features"
    )
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "unsupported.append"
    ]
    reasons = [ast.unparse(call.args[0]) for call in calls]
    known = ("speculative", "parallel", "ubatching", "microbatching", "draft", "dual batch", "DBO")
    assert reasons and all(any(word in reason for word in known) for reason in reasons), reasons


def test_the_older_runner_can_be_chosen():
    source = (FOLDER / "config/vllm.py").read_text()
    assert "use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER" in source


@pytest.mark.parametrize(
    ("file", "error", "advised"),
    [
        ("v1/worker/gpu/model_runner.py", "no kernel for this", True),
        ("v1/worker/gpu/model_runner.py", "CUDA out of memory. Tried to allocate", False),
        ("v1/worker/gpu_worker.py", "Free memory on device is less than", False),
        ("v1/worker/gpu_model_runner.py", "an error of the older runner", False),
        ("model_executor/model_loader/weight_utils.py", "no such weights", False),
    ],
)
def test_the_older_runner_is_advised_where_the_newer_one_fails(file, error, advised, monkeypatch):
    assert (FOLDER / file).is_file()
    scope = {"error": RuntimeError(error)}
    exec(compile("def of_torch(): raise error", "/torch/library.py", "exec"), scope)
    exec(compile("def start(*arguments): of_torch()", FOLDER / file, "exec"), scope)
    monkeypatch.setitem(vllm.VERBS, "start", scope["start"])
    ours, workers = Pipe()
    ours.send(("start", ()))
    with pytest.raises(RuntimeError):
        vllm.serve(os.dup(workers.fileno()))
    failure, _ = ours.recv()
    assert (
        failure.startswith(f"RuntimeError: {error}")
        and ("VLLM_USE_V2_MODEL_RUNNER=0" in failure) is advised
    )


@pytest.mark.parametrize(
    ("device_type", "batch_invariant", "dtype"),
    [
        ("cuda", "0", torch.float32),
        ("cuda", "1", torch.bfloat16),  # These kernels are none of a product with an fp32 result.
        ("cpu", "0", torch.bfloat16),
    ],
)
def test_logits_of_16_bit_weights_are_of_the_trainers_type(device_type, batch_invariant, dtype):
    name = vllm.head_dtype(device_type, {"VLLM_BATCH_INVARIANT": batch_invariant})
    config = SimpleNamespace(head_dtype=name)
    assert model_config._get_head_dtype(config, torch.bfloat16, "generate") == dtype


def test_the_servers_command_has_them_in_fp32():
    words = FACTS["command"].format(model="M", dtype="bfloat16", context=64, module="m").split()
    options = words[words.index("serve") + 2 : words.index("--host")]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", "M", *options])
    assert parsed.hf_overrides == {"head_dtype": "float32"}


def test_no_text_is_made_of_log_probs(monkeypatch):
    """A tokenizer is not asked, and a token's log-prob stays what it is."""
    make = LogprobsProcessor.__dict__["from_new_request"]
    monkeypatch.setattr(LogprobsProcessor, "from_new_request", make)
    vllm.leave_out_text_of_log_probs()
    request = SimpleNamespace(sampling_params=SamplingParams(logprobs=0))
    tokenizer = Mock(side_effect=AssertionError)
    processor = LogprobsProcessor.from_new_request(tokenizer, request)
    ids, log_probs, ranks = np.array([[7]]), np.array([[-0.5]]), np.array([3])
    lists = LogprobsLists(ids, log_probs, ranks, None)
    processor.update_from_output(EngineCoreOutput("a request", [7], new_logprobs=lists))
    assert processor.logprobs[0][7].logprob == -0.5
    assert processor.logprobs[0][7].decoded_token is None
    assert not tokenizer.mock_calls

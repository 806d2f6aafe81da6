"""Liger's kernels beside a model's own code, on the CPU by Triton's interpreter
(TRITON_INTERPRET=1). Prints how far the gradients of two steps are apart, relative to their norms,
and fails where that is too far, or a kernel has not run."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from triton.runtime import interpreter

from alignment.core.tokens import collate
from alignment.model.loading import load_model, use_liger_kernel
from alignment.policy.policy import Objective, Policy, PolicyConfig, open_policy

KERNELS = (LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction)
# Five rows of three prompts, two of which have two rows.
ROWS = [
    ((1, 2, 3), (4, 5, 6, 7)),
    ((1, 2, 3), (8, 9)),
    ((5, 6), (1, 2, 3, 4, 5, 6)),
    ((5, 6), (3,)),
    ((7,), (8, 9)),
]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
ran = set()


def complete_interpreter() -> None:
    """Give Triton's interpreter what it lacks: numbers of floating point as arguments, and CUDA's
    rsqrt."""
    convert = interpreter._implicit_cvt

    def convert_floats_too(argument):
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(
            interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32
        )

    interpreter._implicit_cvt = convert_floats_too
    rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)


def note_runs(kernel) -> None:
    forward = kernel.forward
    kernel.forward = staticmethod(lambda *args: (ran.add(kernel), forward(*args))[1])


def mean(rows, log_probs, mask):
    return (log_probs * mask).sum() / len(ROWS), {}


def gradients(policy: Policy) -> torch.Tensor:
    """Those of two steps, one after another."""
    found = []
    for _ in range(2):
        list(
            policy.accumulate(
                collate(*zip(*ROWS, strict=True), 0),
                range(len(ROWS)),
                Objective(mean, entropy=False),
            )
        )
        found.append(policy.gradient())
        policy.step(1e-3)
    return torch.stack(found)


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # the interpreter is one thread's
    complete_interpreter()
    for kernel in KERNELS:
        note_runs(kernel)
    for kind, config, family in (
        ("single", LlamaConfig, LlamaForCausalLM),
        ("sharded", Qwen3Config, Qwen3ForCausalLM),
    ):
        torch.manual_seed(0)
        family(config(**SIZES)).save_pretrained(folder / family.__name__)
        of_policy = PolicyConfig(
            str(folder / family.__name__), ("cpu",), "float32", micro_batch_tokens=1000
        )
        own = gradients(open_policy("single", of_policy))
        assert not ran, "a kernel runs without the flag"
        policy = open_policy(kind, dataclasses.replace(of_policy, use_liger_kernel=True))
        differences = (gradients(policy) - own).norm(dim=1) / own.norm(dim=1)
        print(f"{family.__name__}, {kind}: {differences.tolist()}")
        assert differences[0] < 1e-6 and differences[1] < 1e-5
        assert ran == set(KERNELS), "a kernel has not run"
        ran.clear()
        # A model that is loaded later has the family's norms and MLPs.
        later = load_model(str(folder / family.__name__), ("cpu",), torch.float32)
        assert "Liger" in repr(getattr(policy, "_own", policy).model) and "Liger" not in repr(later)
    code = dict(vars(sys.modules[Qwen3ForCausalLM.__module__]))
    rms_norm.rsqrt = lambda x: 1.1 / tl.sqrt(x)  # a kernel that is wrong
    try:
        use_liger_kernel(later)
    finally:  # the model and its family's code are as they were
        assert ran, "a kernel has not run"
        assert "Liger" not in repr(later) and vars(sys.modules[Qwen3ForCausalLM.__module__]) == code


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""transformers as this package loads it: without the compiler of torch, which is there as soon as
it is used."""

import subprocess
import sys

import pytest

LEFT_OUT = ("scipy", "torchao", "torch._inductor", "torch.distributed.tensor")


def result(code: str) -> str:
    """What a fresh interpreter prints that has loaded transformers through this package."""
    script = f"import sys, torch\nimport alignment.model.huggingface\n{code}"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.slow
def test_a_model_is_loaded_and_stepped_and_a_gradient_taken_without_the_compiler(tiny_folder):
    code = f"""
from alignment.model.loading import load_model
from alignment.policy.single_device import make_optimizer
model = load_model({str(tiny_folder)!r}, ("cpu",), torch.float32)
optimizer = make_optimizer(model, 0.1, 0.0)
model(torch.tensor([[1, 2]])).logits.sum().backward()
before = model.lm_head.weight.clone()
optimizer.step()
torch.func.grad(lambda x: x * x)(torch.ones(()))
changed = bool((before != model.lm_head.weight).any())
print([name for name in {LEFT_OUT} if name in sys.modules], changed)
"""
    assert result(code) == "[] True"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "print(torch.compile(lambda x: 2 * x + 1, backend='eager')(torch.ones(1)).item())",
        (
            "from transformers.masking_utils import TransformGetItemToIndex as masks\nwith masks():"
            " print(3.0)"
        ),
    ],
    ids=["compiles", "masks"],
)
def test_the_compiler_is_loaded_where_it_is_used(code):
    assert result(f"{code}\nassert '_inductor' in dir(torch)") == "3.0"

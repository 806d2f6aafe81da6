"""transformers as this package loads it: without the libraries that only quantised or sharded models need."""

import subprocess
import sys

LEFT_OUT = ("scipy", "torchao")


def result(code: str) -> str:
    """What a fresh interpreter prints that has loaded transformers through this package."""
    script = f"import sys, torch\nimport alignment.policy.huggingface\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_a_model_is_loaded_and_an_optimizer_steps_without_other_uses_libraries(tiny_folder):
    code = f"""
from alignment.policy.loading import load_model
from alignment.policy.optimizers import make_optimizer
model = load_model({str(tiny_folder)!r}, ("cpu",), torch.float32)
optimizer = make_optimizer(model, 0.1, 0.0)
model(torch.tensor([[1, 2]])).logits.sum().backward()
before = model.lm_head.weight.clone()
optimizer.step()
print([name for name in {LEFT_OUT} if name in sys.modules], bool((before != model.lm_head.weight).any()))
"""
    assert result(code) == "[] True"


"""What a command says of an error that ends it."""

import pytest
import torch

from alignment.system.errors import run_command


def test_memory_that_runs_out_is_one_line_and_no_traceback(capsys):
    def main():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 4 GiB.\nmore")

    with pytest.raises(SystemExit) as stopped:
        run_command(main)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 1
    assert line == "error: CUDA out of memory. Tried to allocate 20.00 GiB: docs/devices.md says what to do when memory is short"

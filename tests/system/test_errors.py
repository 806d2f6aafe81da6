"""What a command says of an error that ends it."""

import sys

import pytest
import torch

from alignment.system.errors import in_words, run_command
from alignment.system.signals import Interrupted


def test_memory_that_runs_out_is_one_line_and_no_traceback(capsys):
    def main():
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 4 GiB.\nmore"
        )

    with pytest.raises(SystemExit) as stopped:
        run_command(main)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 1
    assert (
        line
        == "error: CUDA out of memory. Tried to allocate 20.00 GiB: docs/devices.md says what to do"
        " when memory is short"
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda: torch.empty(2**58), "DefaultCPUAllocator: can't allocate memory: you tried to"),
        (lambda: bytearray(2**62), "memory ran out: docs/devices.md says"),
    ],
)
def test_the_hosts_memory_that_runs_out_is_one_line_too(fault, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_command(fault)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 1
    assert line.startswith(f"error: {words}") and line.endswith("when memory is short")


def test_an_error_of_the_file_system_is_its_path_and_what_is_wrong(tmp_path, capsys):
    missing = tmp_path / "missing"
    for path, fault in ((tmp_path, "is a directory"), (missing, "no such file or directory")):
        with pytest.raises(SystemExit) as stopped:
            run_command(path.read_text)
        assert stopped.value.code == 2 and capsys.readouterr().err == f"error: {path}: {fault}\n"
    assert in_words(OSError("no path")) == "no path" and in_words(ValueError("x")) == "x"


@pytest.mark.parametrize(
    ("out_is_terminal", "err_is_terminal", "lines"),
    [(False, True, 1), (True, True, 0), (False, False, 0)],
)
def test_a_signal_is_said_on_a_terminal_whose_output_goes_into_a_file(
    out_is_terminal, err_is_terminal, lines, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: out_is_terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: err_is_terminal)
    stop = Interrupted(2)
    stop.is_reported = True  # by a line of the output

    def main():
        raise stop

    with pytest.raises(SystemExit) as stopped:
        run_command(main)
    expected = "interrupted by SIGINT; the last line of the output says how to go on\n"
    assert stopped.value.code == 130 and capsys.readouterr().err == expected * lines

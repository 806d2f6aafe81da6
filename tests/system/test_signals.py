"""Where a signal interrupts a block whose signals can be deferred, and where it waits."""

import os
import signal
from contextlib import contextmanager

import pytest

from alignment.system.signals import (
    Interrupted,
    deferrable_signals,
    interruptible,
    signals_are_deferred,
)


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def noted(log: list[str]):
    """The block of a step, in which `defer` is to be called before it must be finished."""
    with interruptible(), deferrable_signals() as defer:
        log.append("begun")
        yield defer
        log.append("finished")


def test_a_signal_interrupts_the_block_at_once_before_it_is_deferred():
    log: list[str] = []
    with pytest.raises(Interrupted), noted(log):
        send()
        log.append("not reached")
    assert log == ["begun"]


def test_a_deferred_signal_waits_for_the_end_of_the_block():
    log: list[str] = []
    with pytest.raises(Interrupted) as stop, noted(log) as defer:
        defer()
        send()
        log.append("changed")
    assert log == ["begun", "changed", "finished"] and stop.value.signum == signal.SIGTERM
    assert not signals_are_deferred()


def test_without_a_signal_the_next_block_can_be_interrupted_at_once_again():
    log: list[str] = []
    with pytest.raises(Interrupted), interruptible():
        with deferrable_signals() as defer:
            defer()
        assert not signals_are_deferred()
        send()
        log.append("not reached")
    assert log == []


def test_signals_stay_held_back_after_a_block_that_fails_until_the_command_ends():
    with interruptible():
        with pytest.raises(ValueError), deferrable_signals() as defer:
            defer()
            raise ValueError
        send()  # while what has failed is saved
        assert signals_are_deferred()
    with interruptible():
        assert not signals_are_deferred()

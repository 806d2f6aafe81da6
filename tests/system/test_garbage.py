"""How often Python looks for garbage while a command starts, and afterwards."""

import gc

import torch

from alignment.model.loading import load_model
from alignment.system.errors import run_command
from alignment.system.garbage import collect_as_usual


def test_a_command_collects_seldom_until_a_model_is_loaded(tiny_folder):
    usual = gc.get_threshold()
    seen = []

    def main():
        seen.append(gc.get_threshold())
        load_model(str(tiny_folder), ("cpu",), torch.float32)
        seen.append(gc.get_threshold())

    run_command(main)
    assert seen[0][0] > 10 * usual[0] and seen[1] == gc.get_threshold() == usual
    run_command(lambda: None)
    assert gc.get_threshold() == usual


def test_a_users_own_setting_stays():
    usual = gc.get_threshold()
    gc.set_threshold(5000, 20, 20)
    try:
        collect_as_usual()
        assert gc.get_threshold() == (5000, 20, 20)
    finally:
        gc.set_threshold(*usual)

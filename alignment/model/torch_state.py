"""What runs change in torch for the whole process: a program that calls us may use torch itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def kept_torch_state() -> Iterator[None]:
    """Put back after the block what runs change: the states of torch's random numbers, the number
    of its threads, and whether it computes deterministically, with the variable that goes with
    that."""
    cpu_state = torch.get_rng_state()
    gpu_states: list[torch.Tensor] = []
    if torch.cuda.is_initialized():
        gpu_states = torch.cuda.get_rng_state_all()
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    variable = os.environ.get(CUBLAS_VARIABLE)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if gpu_states:
            torch.cuda.set_rng_state_all(gpu_states)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
        torch.backends.cudnn.benchmark = benchmark
        if variable is None:
            os.environ.pop(CUBLAS_VARIABLE, None)

"""Micro-batches side by side: the same gradients as one after another, bit by bit the same in every
run."""

import functools
import itertools
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_helpers import rollout_of
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from alignment.args import RLArgs, from_preset
from alignment.core.records import Completion, Distribution, Group, Problem
from alignment.core.tokens import collate, packed_tokens
from alignment.model import parallel_micro_batches
from alignment.model.packing import ATTENTION
from alignment.model.parallel_micro_batches import (
    OrderedAccumulation,
    cut_for_parallel,
    run_parallel,
)
from alignment.policy.policy import Objective
from alignment.training import sft
from alignment.training.update import rollout_objective

ARGS = from_preset(RLArgs, "tiny", prompts_per_rollout=4, group_size=4, train_mini_batch_size=0)


@pytest.fixture(autouse=True)
def threads():
    """Sets torch's number of threads for a test; two unless it says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def model(policy):
    return policy.model


# --- order ----------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1, 1, width=32)), max_size=7),
    st.integers(1, 3),
    st.data(),
)
def test_gradients_are_added_in_one_order_however_long_each_takes(values, at_once, data):
    """Of a block, the first addition of each piece and then the second; with one worker, piece by
    piece."""
    delays = [data.draw(st.sampled_from([0.0, 0.001, 0.003])) for _ in values]
    parameter = torch.nn.Parameter(torch.zeros(1))

    def work(number: int) -> int:
        for value in values[number]:
            time.sleep(delays[number])
            (parameter * value).sum().backward()
        return number

    assert list(run_parallel(work, range(len(values)), at_once, [parameter])) == list(
        range(len(values))
    )
    total = np.float32(0)
    for start in range(0, len(values), at_once):
        for addition in zip(*values[start : start + at_once], strict=True):
            for value in addition:
                total += np.float32(value)
    assert (0 if parameter.grad is None else parameter.grad.item()) == total


def test_a_worker_that_fails_or_adds_nothing_holds_up_no_other():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    done = []

    def work(number: int) -> None:
        time.sleep(0.01 * (2 - number % 2))  # the second of a block comes first, and has to wait
        if number == 2:
            raise ValueError("of no use")
        ((first if number else second) * 2.0).sum().backward()
        done.append(number)

    with pytest.raises(ValueError, match="of no use"):
        list(run_parallel(work, range(6), 2, [first, second]))
    assert {0, 1} <= set(done) <= {0, 1, 3}  # the block that fails is the last one
    assert first.grad.item() == 2 * (len(done) - 1) and second.grad.item() == 2
    assert torch.get_num_threads() == 2
    (second * 3.0).sum().backward()  # no hook is left that would wait for a turn
    assert second.grad.item() == 5


def test_a_signal_ends_workers_at_their_next_gradient():
    """The pool would otherwise wait for ever, where one worker waits for another that has not
    begun."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    order = OrderedAccumulation([parameter])
    order.begin(2)
    failures, begun = [], threading.Event()

    def work(_) -> None:
        (parameter * 1.0).sum().backward()
        begun.set()
        (parameter * 1.0).sum().backward()  # the other worker's first addition comes before it

    def worker() -> None:
        try:
            order.run(0, 1, work, None)
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=worker, daemon=True)
    thread.start()
    begun.wait()
    thread.join(0.1)
    assert thread.is_alive()
    order.stop()
    thread.join(10)
    order.close()
    assert (
        not thread.is_alive() and "a signal has come" in failures[0] and parameter.grad.item() == 1
    )


def test_workers_share_the_threads(threads):
    threads(5)
    seen = list(run_parallel(lambda _: torch.get_num_threads(), range(5), 2))
    # the last piece, alone in its block, has all of them
    assert seen == [3, 2, 3, 2, 5] and torch.get_num_threads() == 5


# --- cuts -----------------------------------------------------------------------------------------


def rows_of(*prompt_groups: tuple[int, int, int]):
    """Rows of prompts: (tokens of the prompt, responses, tokens of each)."""
    return [
        ((number,) * prompt, (0,) * each)
        for number, (prompt, many, each) in enumerate(prompt_groups)
        for _ in range(many)
    ]


def test_each_worker_gets_half_and_prompts_stay_whole(model, threads):
    rows = rows_of(*[(10, 4, 5)] * 4)  # 30 packed tokens a prompt
    assert cut_for_parallel(model, rows, 1000) == ([[*range(8)], [*range(8, 16)]], 2)
    assert cut_for_parallel(model, rows, 60) == ([[*range(i, i + 4)] for i in (0, 4, 8, 12)], 2)
    # For less, a prompt's rows would have to be torn apart, and the prompt computed in each part.
    assert cut_for_parallel(model, rows, 59) == ([[*range(i, i + 4)] for i in (0, 4, 8, 12)], 1)
    threads(1)
    assert cut_for_parallel(model, rows, 1000) == ([[*range(16)]], 1)


def test_one_worker_where_several_would_disturb_each_other(model):
    rows, whole = rows_of((10, 4, 5), (10, 4, 5)), ([[*range(8)]], 1)
    assert cut_for_parallel(model, rows, 1000)[1] == 2
    model.dropout = torch.nn.Dropout(0.1)
    assert cut_for_parallel(model, rows, 1000) == whole
    model.dropout.p = 0.0
    assert cut_for_parallel(model, rows, 1000)[1] == 2
    model.model.rotary_emb.rope_type = {
        "full_attention": "longrope",
        "sliding_attention": "default",
    }
    assert cut_for_parallel(model, rows, 1000) == whole
    model.model.rotary_emb = LlamaRotaryEmbedding(
        LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    )
    assert cut_for_parallel(model, rows, 1000) == whole
    model.model.rotary_emb.rope_type = "default"
    assert cut_for_parallel(model, rows, 1000)[1] == 2
    model.config._attn_implementation = "sdpa"
    assert cut_for_parallel(model, rows, 1000) == whole
    model.config._attn_implementation = ATTENTION
    assert cut_for_parallel(model, rows, 1000)[1] == 2
    assert cut_for_parallel(model.to("meta"), rows, 1000) == whole


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8
    ),
    st.integers(1, 200),
)
def test_cuts_hold_each_row_once_and_keep_to_the_budget_together(prompt_groups, most):
    rows, model = rows_of(*prompt_groups), torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(_attn_implementation=ATTENTION)
    pieces, at_once = cut_for_parallel(model, rows, most)
    assert sorted(itertools.chain(*pieces)) == list(range(len(rows)))
    for start in range(0, len(pieces), at_once):
        block = pieces[start : start + at_once]
        together = sum(packed_tokens([rows[i] for i in piece]) for piece in block)
        assert together <= most or (at_once == 1 and len(block[0]) == 1)


# --- updates and supervised training --------------------------------------------------------------


def random_rollout():
    """Random tokens, four groups of four, prompts and responses of several lengths."""
    rng = random.Random(0)
    score = {"format_reward": 0.0, "answer_reward": 0.0}
    groups = []
    for group in range(4):
        prompt = tuple(rng.randrange(90) for _ in range(5 + group))
        responses = [tuple(rng.randrange(90) for _ in range(3 + i)) for i in range(4)]
        completions = tuple(
            Completion(prompt, ids, (-1.0,) * len(ids), "", "stop", 0) for ids in responses
        )
        groups.append(
            Group(
                Problem("", "", "", ""),
                completions,
                tuple({"reward": i % 2.0, **score} for i in range(4)),
            )
        )
    return rollout_of(groups, ARGS, pad=0)


@pytest.fixture
def hook_counts(monkeypatch):
    """The number of hooks that each parallel pass has set."""
    counts = []

    class CountingAccumulation(OrderedAccumulation):
        def __init__(self, parameters):
            super().__init__(parameters)
            counts.append(len(self.hooks))

    monkeypatch.setattr(parallel_micro_batches, "OrderedAccumulation", CountingAccumulation)
    return counts


def taken_gradient(policy) -> torch.Tensor:
    gradient = policy.gradient()
    policy.drop_gradient()
    return gradient


def test_an_updates_gradient_is_that_of_one_after_another(policy, threads, hook_counts):
    rollout, gradients, log_probs = random_rollout(), {}, {}
    objective = rollout_objective(rollout, range(16), ARGS.update_config)
    for key, many, policy.micro_batch_tokens in (
        ("one", 1, 1000),
        ("two", 2, 1000),
        ("again", 2, 1000),
        ("small", 2, 60),
    ):
        threads(many)
        rows = [
            list(result.rows) for result in policy.accumulate(rollout.batch, range(16), objective)
        ]
        assert sorted(itertools.chain(*rows)) == list(range(16))
        assert len(rows) == {"one": 1, "small": 4}.get(key, 2)
        gradients[key] = taken_gradient(policy)
        log_probs[key] = policy.log_probs(rollout.batch, Distribution())
    hooks = 2 * len(list(policy.model.parameters()))
    # an update's additions wait for their turns; log-probs add nothing
    assert hook_counts == [hooks, 0] * 3
    assert torch.equal(gradients["two"], gradients["again"]) and torch.equal(
        log_probs["two"], log_probs["again"]
    )
    for key in ("two", "small"):
        torch.testing.assert_close(gradients[key], gradients["one"], rtol=0, atol=1e-6)
        torch.testing.assert_close(log_probs[key], log_probs["one"], rtol=0, atol=1e-5)
    assert not log_probs["two"].requires_grad and gradients["one"].abs().max() > 1e-3


def test_supervised_gradients_and_losses_are_those_of_one_after_another(
    policy, threads, hook_counts
):
    rng = random.Random(0)
    examples = [
        (tuple(rng.randrange(90) for _ in range(6)), (rng.randrange(90),) * (2 + i % 5))
        for i in range(12)
    ]
    policy.micro_batch_tokens = 1000
    batch, tokens = (
        collate(*zip(*examples, strict=True), 0),
        sum(len(response) for _, response in examples),
    )
    objective, ends = Objective(functools.partial(sft.batch_loss, tokens), entropy=False), []
    for many in (1, 2):
        threads(many)
        loss = sum(
            result.sums["loss"]
            for result in policy.accumulate(batch, range(len(examples)), objective)
        ).item()
        ends.append((loss, sft.validation_loss(policy, examples, 0), taken_gradient(policy)))
    assert hook_counts == [2 * len(list(policy.model.parameters())), 0]
    (loss, validation, one), (other_loss, other_validation, two) = ends
    assert loss == pytest.approx(other_loss, abs=1e-5) and validation == pytest.approx(
        other_validation, abs=1e-5
    )
    # there is no dropout, and the batch is the validation set
    assert loss == pytest.approx(validation, abs=1e-5)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


@pytest.mark.parametrize("broken", [0, 1])
def test_what_runs_beside_a_failure_is_told_to_stop(broken):
    stopped = threading.Event()

    def work(piece: int) -> None:
        if piece == broken:
            raise ValueError("broken")
        assert stopped.wait(60)

    with pytest.raises(ValueError, match="broken"):
        list(run_parallel(work, range(2), 2, stop=stopped.set))
    assert stopped.is_set()

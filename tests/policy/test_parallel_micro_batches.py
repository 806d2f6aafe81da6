"""Micro-batches side by side: the same gradients as one after another, bit by bit the same in every run."""

import dataclasses
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
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from alignment import sft
from alignment.args import RLArgs, SFTArgs, from_preset
from alignment.core.records import Completion, Group, Problem
from alignment.core.tokens import packed_tokens
from alignment.policy import parallel_micro_batches
from alignment.policy.loading import batch_log_probs, load_model
from alignment.policy.packing import ATTENTION
from alignment.policy.parallel_micro_batches import OrderedAccumulation, cut_for_parallel, run_parallel
from alignment.rollouts.batches import make_rollout
from alignment.training.update import backward

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@pytest.fixture(autouse=True)
def threads():
    """Sets torch's number of threads for a test; two unless it says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def policy(tiny_folder):
    return load_model(str(tiny_folder), ("cpu",), torch.float32)


# --- order --------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1, 1, width=32)), max_size=7), st.integers(1, 3), st.data()
)
def test_gradients_are_added_in_one_order_however_long_each_takes(values, at_once, data):
    """Of a block, the first addition of each piece and then the second; with one lane, piece by piece."""
    delays = [data.draw(st.sampled_from([0.0, 0.001, 0.003])) for _ in values]
    parameter = torch.nn.Parameter(torch.zeros(1))

    def work(number: int) -> int:
        for value in values[number]:
            time.sleep(delays[number])
            (parameter * value).sum().backward()
        return number

    assert list(run_parallel(work, range(len(values)), at_once, [parameter])) == list(range(len(values)))
    total = np.float32(0)
    for start in range(0, len(values), at_once):
        for addition in zip(*values[start : start + at_once], strict=True):
            for value in addition:
                total += np.float32(value)
    assert (0 if parameter.grad is None else parameter.grad.item()) == total


def test_a_lane_that_fails_or_adds_nothing_holds_up_no_other():
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
    (second * 3.0).sum().backward()  # no hook is left that would ask whose turn it is
    assert second.grad.item() == 5


def test_a_signal_ends_lanes_at_their_next_gradient():
    """Whoever waits for them would otherwise wait for ever, where one lane waits for another that has not begun."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    turns = OrderedAccumulation([parameter])
    turns.begin(2)
    failures, begun = [], threading.Event()

    def work(_) -> None:
        (parameter * 1.0).sum().backward()
        begun.set()
        (parameter * 1.0).sum().backward()  # the other lane's first addition comes before it

    def lane() -> None:
        try:
            turns.take(0, 1, work, None)
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    begun.wait()
    thread.join(0.1)
    assert thread.is_alive()
    turns.stop()
    thread.join(10)
    turns.close()
    assert not thread.is_alive() and "a signal has come" in failures[0] and parameter.grad.item() == 1


def test_lanes_share_the_threads(threads):
    threads(5)
    seen = list(run_parallel(lambda _: torch.get_num_threads(), range(5), 2))
    assert seen == [3, 2, 3, 2, 5] and torch.get_num_threads() == 5  # the odd one out has all of them


# --- cuts ---------------------------------------------------------------------------------------------------------


def rows_of(*prompt_groups: tuple[int, int, int]):
    """Rows of prompts: (tokens of the prompt, responses, tokens of each)."""
    return [((number,) * prompt, (0,) * each) for number, (prompt, many, each) in enumerate(prompt_groups) for _ in range(many)]


def test_each_lane_gets_its_half_and_prompts_stay_whole(policy, threads):
    rows = rows_of(*[(10, 4, 5)] * 4)  # 30 packed tokens a prompt
    assert cut_for_parallel(policy, rows, 1000) == ([[*range(8)], [*range(8, 16)]], 2)
    assert cut_for_parallel(policy, rows, 60) == ([[*range(i, i + 4)] for i in (0, 4, 8, 12)], 2)
    # For less, a prompt's rows would have to be torn apart, and the prompt computed in each part.
    assert cut_for_parallel(policy, rows, 59) == ([[*range(i, i + 4)] for i in (0, 4, 8, 12)], 1)
    threads(1)
    assert cut_for_parallel(policy, rows, 1000) == ([[*range(16)]], 1)


def test_where_lanes_would_get_in_each_others_way_there_is_one(policy):
    rows, whole = rows_of((10, 4, 5), (10, 4, 5)), ([[*range(8)]], 1)
    assert cut_for_parallel(policy, rows, 1000)[1] == 2
    policy.dropout = torch.nn.Dropout(0.1)
    assert cut_for_parallel(policy, rows, 1000) == whole
    policy.dropout.p = 0.0
    assert cut_for_parallel(policy, rows, 1000)[1] == 2
    policy.model.rotary_emb.rope_type = {"full_attention": "longrope", "sliding_attention": "default"}
    assert cut_for_parallel(policy, rows, 1000) == whole
    policy.model.rotary_emb = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=dict(rope_type="dynamic", factor=2.0)))
    assert cut_for_parallel(policy, rows, 1000) == whole
    policy.model.rotary_emb.rope_type = "default"
    assert cut_for_parallel(policy, rows, 1000)[1] == 2
    policy.config._attn_implementation = "sdpa"
    assert cut_for_parallel(policy, rows, 1000) == whole
    policy.config._attn_implementation = ATTENTION
    assert cut_for_parallel(policy, rows, 1000)[1] == 2
    assert cut_for_parallel(policy.to("meta"), rows, 1000) == whole


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8), st.integers(1, 200)
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


# --- what goes through lanes --------------------------------------------------------------------------------------


def rollout_of(args: RLArgs):
    """Random tokens, four groups of four, prompts and responses of several lengths."""
    rng = random.Random(0)
    score = {"format_reward": 0.0, "answer_reward": 0.0}
    groups = []
    for group in range(4):
        prompt = tuple(rng.randrange(90) for _ in range(5 + group))
        drawn = [tuple(rng.randrange(90) for _ in range(3 + i)) for i in range(4)]
        completions = tuple(Completion(prompt, ids, (-1.0,) * len(ids), "", "stop", 0) for ids in drawn)
        groups.append(Group(Problem("", "", "", ""), completions, tuple({"reward": i % 2.0, **score} for i in range(4))))
    return make_rollout(groups, args, pad=0)


@pytest.fixture
def hooked(monkeypatch):
    """How many hooks each use of lanes has set."""
    seen = []

    class Watched(OrderedAccumulation):
        def __init__(self, parameters):
            super().__init__(parameters)
            seen.append(len(self.hooks))

    monkeypatch.setattr(parallel_micro_batches, "OrderedAccumulation", Watched)
    return seen


def gradient_of(policy) -> torch.Tensor:
    found = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    policy.zero_grad(set_to_none=True)
    return found


def test_an_updates_gradient_is_that_of_one_after_another(policy, threads, hooked):
    args = from_preset(RLArgs, "tiny", prompts_per_rollout=4, group_size=4, train_mini_batch_size=0)
    rollout = rollout_of(args)
    found, log_probs = {}, {}
    for key, many, tokens in (("one", 1, 1000), ("two", 2, 1000), ("again", 2, 1000), ("small", 2, 60)):
        threads(many)
        cut = dataclasses.replace(args, micro_batch_tokens=tokens)
        rows = [list(rows) for rows, *_ in backward(policy, rollout, range(16), 16.0, cut, torch.float32)]
        assert sorted(itertools.chain(*rows)) == list(range(16))
        assert len(rows) == {"one": 1, "small": 4}.get(key, 2)
        found[key] = gradient_of(policy)
        log_probs[key] = batch_log_probs(policy, rollout.batch, PLAIN, tokens, torch.float32)
    each = 2 * len(list(policy.parameters()))
    assert hooked == [each, 0] * 3  # an update's additions wait for their turns; log-probs add nothing
    assert torch.equal(found["two"], found["again"]) and torch.equal(log_probs["two"], log_probs["again"])
    for key in ("two", "small"):
        torch.testing.assert_close(found[key], found["one"], rtol=0, atol=1e-6)
        torch.testing.assert_close(log_probs[key], log_probs["one"], rtol=0, atol=1e-5)
    assert not log_probs["two"].requires_grad and found["one"].abs().max() > 1e-3


def test_supervised_gradients_and_losses_are_those_of_one_after_another(policy, threads, hooked):
    rng = random.Random(0)
    examples = [(tuple(rng.randrange(90) for _ in range(6)), (rng.randrange(90),) * (2 + i % 5)) for i in range(12)]
    tokens = from_preset(SFTArgs, "tiny", micro_batch_tokens=1000).micro_batch_tokens
    ends = []
    for many in (1, 2):
        threads(many)
        losses = list(sft.backward(policy, examples, 0, tokens, torch.float32))
        assert len(losses) == many
        validation = sft.validation_loss(policy, examples, 0, tokens, torch.float32)
        ends.append((sum(losses).item(), validation, gradient_of(policy)))
    assert hooked == [2 * len(list(policy.parameters())), 0]
    (loss, validation, one), (other_loss, other_validation, two) = ends
    assert loss == pytest.approx(other_loss, abs=1e-5) and validation == pytest.approx(other_validation, abs=1e-5)
    assert loss == pytest.approx(validation, abs=1e-5)  # there is no dropout, and the batch is the validation set
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)

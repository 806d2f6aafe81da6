"""A third kind of policy: one file, by its path or as an entry of `POLICIES`; the same weights to
the bit."""

import pytest

from alignment.policy.policy import POLICIES, PolicyConfig, PolicyKind, open_policy

PATH = "my_package.flat_policy:FlatPolicy"


def test_parameters_are_views_into_the_buffers(tiny_folder):
    policy = open_policy(PATH, PolicyConfig(str(tiny_folder), ("cpu",), "float32"))
    weights = dict(policy.weights())
    assert {tensor.untyped_storage().data_ptr() for tensor in weights.values()} == {
        b.data_ptr() for b in policy.buffers
    }
    assert len(policy.buffers) > 2 and sum(map(len, policy.buffers)) == sum(
        tensor.numel() for tensor in weights.values()
    )
    assert (
        policy.gradient().shape == (sum(map(len, policy.buffers)),) and not policy.gradient().any()
    )


@pytest.mark.slow
def test_a_whole_run_ends_in_the_weights_of_a_policy_on_one_device(
    train, train_in_two_parts, weights, monkeypatch
):
    expected = weights(train("--run_name", "single", "--policy_parallelism", "single"))
    assert weights(train("--run_name", "by_path", "--policy_parallelism", PATH)) == expected
    entry = PolicyKind(PATH, one_device=True, keeps_gradients=True, lends_model=False)
    monkeypatch.setitem(POLICIES, "flat", entry)
    by_name = ("--run_name", "by_name", "--policy_parallelism", "flat")
    assert weights(train_in_two_parts(*by_name)) == expected

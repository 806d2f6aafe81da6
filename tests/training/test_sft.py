"""What supervised fine-tuning says while it runs."""

from types import SimpleNamespace

import pytest
import torch
from rollout_helpers import open_tiny
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.system.errors import RunStopped
from alignment.training import sft
from alignment.training.sft import SFTConfig, SFTData, best_step, fine_tune, is_patience_over


@pytest.mark.parametrize(
    ("curriculum", "ends"),
    [(True, ["50% of the curriculum", "100% of the curriculum"]), (False, ["", ""])],
)
def test_a_validation_loss_says_how_much_of_the_curriculum_came_before(curriculum, ends, tmp_path):
    """Under a curriculum it rises at first: the examples that it is of may be of a kind that comes
    later."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    policy, said = open_tiny(str(tmp_path / "model")), []
    policy.micro_batch_tokens = 64
    data = SFTData([((1, 2), (3, 4)), ((1,), (5,)), ((2,), (6,)), ((3,), (7,))], [((1,), (8,))], 0)
    settings = {
        "num_steps": 2,
        "batch_size": 2,
        "curriculum": curriculum,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
    }
    sft_config = SFTConfig(**settings, max_grad_norm=1.0, eval_interval=1, seed=0)
    fine_tune(
        policy,
        data,
        sft_config,
        lambda record, words: said.append((record["validation_loss"], words)),
    )
    for (loss, words), end in zip(said, ends, strict=True):
        assert words == f"validation loss {loss:.3f}" + (f", after {end}" if end else "")


def test_dropout_draws_by_the_step_and_not_by_what_came_before(tmp_path):
    """So a resumed run, which makes the later steps alone, ends with the weights of an undisturbed
    one."""
    folder = str(tmp_path / "model")
    GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    ).save_pretrained(folder)
    data = SFTData([((1, 2), (3, 4)), ((1,), (5,)), ((2,), (6,)), ((3,), (7,))], [((1,), (8,))], 0)
    # a rate of the step alone
    settings = {"batch_size": 2, "curriculum": True, "learning_rate": 1e-2, "warmup_steps": 4}

    def trained(*parts: tuple[int, int], dropout: bool = True) -> list[torch.Tensor]:
        """The weights after steps that are made in parts, (steps done, last step)."""
        policy = SingleDevicePolicy(
            PolicyConfig(folder, ("cpu",), "float32", micro_batch_tokens=64, dropout=dropout)
        )
        for done, last in parts:
            torch.rand(7)
            sft_config = SFTConfig(
                num_steps=last, **settings, max_grad_norm=1.0, eval_interval=1, seed=0
            )
            fine_tune(policy, data, sft_config, lambda record, words: None, done)
        return [weight.clone() for _, weight in policy.weights()]

    whole = trained((0, 4))
    assert all(torch.equal(*pair) for pair in zip(whole, trained((0, 2), (2, 4)), strict=True))
    assert not all(
        torch.equal(*pair) for pair in zip(whole, trained((0, 4), dropout=False), strict=True)
    )


@pytest.mark.parametrize(
    ("accuracies", "patience", "best", "is_over"),
    [
        ({10: 0.2, 20: 0.3}, 1, 20, False),
        ({10: 0.2, 20: 0.3, 30: 0.3}, 1, 20, True),
        ({10: 0.2, 20: 0.3, 30: 0.1}, 2, 20, False),
        ({10: 0.2, 20: 0.3, 30: 0.1, 40: 0.2}, 2, 20, True),
        ({10: 0.2, 20: 0.1, 30: 0.1}, 0, 10, False),
        ({10: 0.0, 20: 0.0, 30: 0.0}, 1, 30, False),  # nothing is learnt yet
    ],
)
def test_patience_ends_after_the_first_best_accuracy(accuracies, patience, best, is_over):
    assert best_step(accuracies) == best
    assert is_patience_over(accuracies, patience) is is_over
    assert is_patience_over({}, patience) is False


class DivergingPolicy:
    """A policy whose losses are infinite in some steps. `taken` has the rates of the steps that
    change it."""

    def __init__(self, infinite: set[int]):
        self.infinite = infinite
        self.step_number = 0
        self.taken: list[float] = []
        self.dropped = 0

    def accumulate(self, batch, rows, objective):
        self.step_number += 1
        loss = torch.inf if self.step_number in self.infinite else 1.0
        return [SimpleNamespace(sums={"loss": loss})]

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        return torch.tensor(0.5)

    def step(self, learning_rate: float) -> None:
        self.taken.append(learning_rate)

    def drop_gradient(self) -> None:
        self.dropped += 1


def numbers_of_steps(policy: DivergingPolicy, monkeypatch) -> list[dict]:
    monkeypatch.setattr(sft, "validation_loss", lambda *arguments: 0.0)
    data = SFTData([((1,), (2,))], [((1,), (2,))], 0)
    config = SFTConfig(6, 1, False, 1e-3, 0, 1.0, 6, 0, "constant")
    records = []
    fine_tune(policy, data, config, lambda record, words: records.append(record))
    return records


def test_a_step_that_is_not_finite_changes_nothing(monkeypatch):
    policy = DivergingPolicy({2, 3, 5})
    records = numbers_of_steps(policy, monkeypatch)
    assert [record["bad_updates"] for record in records] == [0, 1, 1, 0, 1, 0]
    assert [record["loss"] for record in records] == [1.0, None, None, 1.0, None, 1.0]
    assert (policy.taken, policy.dropped) == ([1e-3] * 3, 3)


def test_three_steps_in_a_row_that_are_not_finite_stop_the_training(monkeypatch):
    policy = DivergingPolicy({3, 4, 5})
    with pytest.raises(RunStopped, match="3 steps in a row, the last of them 5, had no finite"):
        numbers_of_steps(policy, monkeypatch)
    assert (policy.taken, policy.dropped) == ([1e-3] * 2, 3)

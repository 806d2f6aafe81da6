"""A model of the hub that cannot be had is said at once."""

import huggingface_hub
import pytest
from huggingface_hub import constants

from alignment.builders import base_models
from alignment.builders.checks import check_judges
from alignment.system.errors import UserError

NAME = "nobody/nothing"


@pytest.fixture
def hub(monkeypatch):
    """A function that says how the hub answers: with an error, or None."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def answers(error: Exception | None) -> None:
        def wait(address: str) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(base_models, "wait_for_hub", wait)

    return answers


def test_a_hub_that_answers_is_asked_for_the_model_later(hub):
    hub(None)
    base_models.check_hub(NAME, "--model")


@pytest.mark.parametrize(
    ("error", "reason"), [(TimeoutError(), "no answer"), (OSError("no route"), "no route")]
)
def test_a_hub_that_does_not_answer_is_named(hub, error, reason):
    hub(error)
    with pytest.raises(UserError, match=f"^--teacher {NAME}: is not on .*: {reason}.; mend the"):
        base_models.check_hub(NAME, "--teacher")


def test_a_judge_of_the_hub_is_looked_for_before_anything_loads(hub):
    hub(TimeoutError())
    with pytest.raises(UserError, match=f"^--reward judge: {NAME}: is not on this machine, and"):
        check_judges(f"accuracy,judge:{NAME}@helpful:0.5")
    check_judges("accuracy,format:0.5")


def test_without_the_hub_by_choice_the_variable_is_named(hub, monkeypatch):
    hub(AssertionError("it is not asked"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"--model {NAME}: is not on .* HF_HUB_OFFLINE is set"):
        base_models.check_hub(NAME, "--model")


def test_a_model_that_was_downloaded_needs_no_hub(hub, monkeypatch):
    hub(AssertionError("it is not asked"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names: "/a/config.json")
    base_models.check_hub(NAME, "--model")

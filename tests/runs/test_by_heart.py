"""A policy that solves its training problems far better than held-out ones before RL is named."""

import numpy as np
import pytest

from alignment.runs.by_heart import FAR, Solved, by_heart_warning, least_difference, solved_at_start


def test_the_least_difference_by_hand():
    """56 of 70 and 48 of 80. Wilson: (0.8 + 3.8416 / 140) / (1 + 3.8416 / 70) = 0.78440 less
    1.96 / 1.05488 sqrt(0.16 / 70 + 3.8416 / 19600) = 0.09255, so 0.69185; and 0.59542 and 0.10486,
    so 0.70028. 0.2 - sqrt(0.10815^2 + 0.10028^2) = 0.0525."""
    assert least_difference(Solved(0.8, 70), Solved(0.6, 80)) == pytest.approx(0.0525, abs=1e-4)


def test_a_warm_start_that_knows_its_problems_is_named_by_eight_prompts():
    words = by_heart_warning(Solved(0.77, 8), Solved(0.158, 1000))
    assert words.startswith(
        "before the first update the policy solves 77% of 8 training problems and 16% of 1000"
        " held-out ones, at least 27% more (95 % interval)"
    )
    assert by_heart_warning(Solved(0.3, 8), Solved(0.158, 1000)) == ""
    assert by_heart_warning(Solved(0.158, 1000), Solved(0.77, 8)) == ""


@pytest.mark.parametrize(("prompts", "samples"), [(8, 8), (32, 8), (8, 1)])
@pytest.mark.parametrize("accuracy", [0.02, 0.16, 0.5, 0.9])
def test_equal_problems_are_seldom_named(prompts, samples, accuracy):
    """Of 2,000 runs, each question with an accuracy of its own: 2.5 % at most where training
    problems are as hard as held-out ones, and 6 % (8 prompts of one sample, where the interval is
    coarsest; 0.5 points are a standard error) where they are easier by just `FAR`."""
    rng = np.random.default_rng(0)

    def means(mean: float, questions: int) -> np.ndarray:
        chance_RQ = rng.beta(mean, 1 - mean, (2000, questions))
        return (rng.binomial(samples, chance_RQ) / samples).mean(axis=1)

    held_out = rng.binomial(500, accuracy, 2000) / 500  # of one sample each
    for mean, most in ((accuracy, 0.025), (accuracy + FAR * 0.99, 0.06)):
        named = 0
        for trained, other in zip(means(mean, prompts), held_out, strict=True):
            named += least_difference(Solved(trained, prompts), Solved(other, 500)) > FAR
        assert named / 2000 <= most


def test_what_is_compared():
    """The same rule on both sides; with refills the reward of all that was sampled, where that is
    this rule."""
    evaluation = {"reward_r1_zero": 0.25, "reward_r1_zero_strict": 0.2, "problems": 40}
    step = {"reward": 0.5, "reward_r1_zero": 0.75, "responses": 32}
    assert solved_at_start(step, evaluation, "random", 4) == (Solved(0.75, 8), Solved(0.25, 40))
    refilled = {**step, "reward_sampled": 0.4, "prompts_sampled": 12}
    assert solved_at_start(refilled, evaluation, "r1_zero", 4) == (
        Solved(0.4, 12),
        Solved(0.25, 40),
    )
    assert solved_at_start(refilled, evaluation, "format:0.5,accuracy", 4) is None
    assert solved_at_start(step, {"problems": 40}, "r1_zero", 4) is None

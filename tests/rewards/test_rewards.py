"""Response-level rules: what counts as the one final answer, and what does not."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.core.records import Completion, Problem
from alignment.rewards.r1_zero import r1_zero_reward_fn, r1_zero_strict_reward_fn, strict_answer
from alignment.rewards.rules import (
    CONTROLS,
    evaluation_rule,
    find_reward,
    find_rule,
    grading_report,
    random_reward,
    score_groups,
    try_reward,
)
from alignment.system.errors import RunStopped, UserError

HERE = Path(__file__).parent
HACKS = [json.loads(line) for line in (HERE / "hacks.jsonl").read_text("utf-8").splitlines()]
HONEST = [json.loads(line) for line in (HERE / "honest.jsonl").read_text("utf-8").splitlines()]
RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
WRONG = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
MISSHAPEN = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}


def test_no_hack_is_rewarded():
    assert len(HACKS) >= 40
    paid = [
        h["name"]
        for h in HACKS
        if r1_zero_strict_reward_fn(h["response"], h["ground_truth"])["reward"]
    ]
    assert paid == []


def test_the_published_rule_pays_for_some():
    assert (
        5 <= sum(r1_zero_reward_fn(h["response"], h["ground_truth"])["reward"] for h in HACKS) <= 30
    )


def test_honest_responses_are_rewarded():
    assert len(HONEST) >= 30
    unpaid = [
        h["name"]
        for h in HONEST
        if r1_zero_strict_reward_fn(h["response"], h["ground_truth"]) != RIGHT
    ]
    assert unpaid == []


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("2 + 3 is 5 </think> <answer> 5 </answer>", RIGHT),
        ("<think> 2 + 3 </think> <answer>5</answer>\n", RIGHT),
        (
            "6? <answer> 6 </answer> no </think> <answer> 5 </answer>",
            RIGHT,
        ),  # the thinking is not looked at
        # Two blocks are two guesses.
        ("</think> <answer> 4 </answer> <answer> 5 </answer>", MISSHAPEN),
        ("</think> <answer> 5 </answer> <answer> 4 </answer>", MISSHAPEN),
        ("</think>\n<answer> 5 </answer>\n<answer> 5 </answer>\n", MISSHAPEN),
        ("</think> <answer> 4 </answer> or <answer> 5 </answer>", MISSHAPEN),
        ("</think> <answer> 5 </answer> 6", MISSHAPEN),
        ("</think> <answer> <answer> 5 </answer> </answer>", MISSHAPEN),
        ("</think> <answer> 5", MISSHAPEN),
        ("</think>\n<answer> 5 </answer>", RIGHT),  # a line break, as chat models write
        ("2 + 3\n</think> \n\n <answer>\n5\n</answer>", RIGHT),
        ("</think>\t<answer> 5 </answer>", RIGHT),
        ("</think>\n\n<answer> 4 </answer> or <answer> 5 </answer>", MISSHAPEN),
        ("</think>\nso\n<answer> 5 </answer>", MISSHAPEN),
        ("</think>\n<answer> 4 </answer>", WRONG),
        ("</think><answer> 5 </answer>", RIGHT),
        ("</think> so <answer> 5 </answer>", MISSHAPEN),
        ("</think> </think> <answer> 5 </answer>", MISSHAPEN),
        ("a <think> b </think> <answer> 5 </answer>", MISSHAPEN),
        ("</think> <answer> <think> 5 </answer>", MISSHAPEN),
        ("</think> <answer></answer>", WRONG),
        (r"\boxed{5} </think> <answer> 4 </answer>", WRONG),
        (r"</think> <answer> 4, \boxed{5} </answer>", WRONG),
        (r"</think> <answer> \boxed{4} \boxed{5} </answer>", WRONG),
        (r"</think> <answer> $x = \boxed{5}$. </answer>", RIGHT),
        (r"</think> <answer> The final answer is $\boxed{5}$. </answer>", RIGHT),
        ("</think> <answer> 2 + 3 </answer>", WRONG),
        ("</think> <answer> 10/2 </answer>", WRONG),
        ("</think> <answer> 2 + 3 = 5 </answer>", RIGHT),
        ("</think> <answer> 5 = 2 + 3 </answer>", WRONG),
        (r"</think> <answer> \sqrt{25} </answer>", WRONG),
        (r"</think> <answer> 0.5 \times 10^1 </answer>", RIGHT),
        ("</think> <answer> five </answer>", RIGHT),
        ("</think> <answer> There are 5 apples. </answer>", RIGHT),
        ("</think> <answer> There are not 5 apples. </answer>", WRONG),
    ],
)
def test_the_strict_rule(response, score):
    assert r1_zero_strict_reward_fn(response, "5") == score


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("3/4", "0.75", 1),
        ("6/8", "3/4", 1),
        ("1/2 + 1/4", "3/4", 0),
        ("x + x", "2x", 1),
        (r"1 + \sqrt{2}", r"\sqrt2+1", 1),
    ],
)
def test_only_a_number_has_to_be_worked_out(answer, truth, reward):
    assert (
        r1_zero_strict_reward_fn(f"</think> <answer> {answer} </answer>", truth)["reward"] == reward
    )


PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", " ", "<answer>", "</answer>", "5", "6", r"\boxed{5}", "\n", "or"]
    ),
    max_size=12,
)


@given(PIECES.map("".join))
def test_the_strict_reward_is_never_above_the_published_one(response):
    spaced = re.sub(r"</think>\s*<answer>", "</think> <answer>", response)
    strict, published = r1_zero_strict_reward_fn(response, "5"), r1_zero_reward_fn(spaced, "5")
    assert all(strict[part] <= published[part] for part in strict)
    assert (strict_answer(spaced) is None) == (strict["format_reward"] == 0)


PROBLEM = Problem("a", "What is 2 + 3?", "User: What is 2 + 3?\nAssistant: <think>", "5")
MATHS = ("r1_zero", "r1_zero_strict")


def completion(text: str) -> Completion:
    return Completion((1,), (2,), (-0.1,), text, "stop", 0)


@pytest.mark.parametrize("rule", ["boxed", "flexible"])
def test_a_rule_as_a_part_sees_the_thought_that_the_prompt_has_opened(rule):
    in_thought = [[completion(r"It may be \boxed{5}, but")]]
    for name in (rule, f"{rule}:1.0"):
        [group] = find_reward(name, ("boxed", "flexible")).score([PROBLEM], in_thought)
        assert (
            group.scores[0]["reward"]
            == find_rule(rule)("<think>It may be \\boxed{5}, but", "5")["reward"]
        ), name


def rewarded(name: str, response: str, problem: Problem = PROBLEM) -> dict[str, float]:
    """The score of one response by --reward `name`."""
    (group,) = find_reward(name, MATHS).score([problem], [[completion(response)]])
    return group.scores[0]


@pytest.mark.parametrize(
    ("response", "format_only", "inverted"),
    [("</think> <answer> 5 </answer>", 1, 0), ("</think> <answer> 6 </answer>", 1, 1), ("5", 0, 0)],
)
def test_controls_teach_nothing_about_answers(response, format_only, inverted):
    assert rewarded("format_only", response)["reward"] == format_only
    assert rewarded("inverted", response)["reward"] == inverted
    assert rewarded("random", response)["reward"] in (0.0, 1.0)
    true = r1_zero_reward_fn(response, "5")
    for name in CONTROLS:
        score = rewarded(name, response)
        assert score == {**true, "reward": score["reward"], f"part_{name}": score["reward"]}
        assert find_rule(evaluation_rule(name, MATHS)) is r1_zero_reward_fn
    assert find_rule(evaluation_rule("r1_zero_strict", MATHS)) is r1_zero_strict_reward_fn


def test_the_random_reward_is_a_fair_coin_that_can_be_thrown_again():
    thrown = [random_reward(f"</think> <answer> {i} </answer>", "5") for i in range(4000)]
    assert abs(sum(thrown) / 4000 - 0.5) < 0.03
    assert thrown == [random_reward(f"</think> <answer> {i} </answer>", "5") for i in range(4000)]
    assert random_reward("\ud800", "5") in (0.0, 1.0)


def test_scores_keep_their_order_and_the_report_shows_what_the_rule_decides():
    problems = [Problem("a", "?", "", "5"), Problem("b", "?", "", "7")]
    texts = [
        ["</think> <answer> 5 </answer>", "</think> <answer> 2 + 3 </answer>"],
        ["</think> <answer> 8 </answer>", "x"],
    ]
    groups = score_groups(
        problems, [[completion(text) for text in drawn] for drawn in texts], r1_zero_reward_fn
    )
    assert [[score["reward"] for score in group.scores] for group in groups] == [[1, 1], [0, 0]]
    assert grading_report(groups, MATHS) == {
        "reward_r1_zero": 0.5,
        "reward_r1_zero_strict": 0.25,
        "grading_failed": 0,
    }


GOOD = " 2 + 3 = 5 </think> <answer> 5 </answer>"


@pytest.mark.parametrize(
    ("part", "response", "expected"),
    [
        ("format", GOOD, 1),
        ("format", "5", 0),
        ("accuracy", GOOD, 1),
        ("accuracy", "</think> <answer> 6 </answer>", 0),
        ("tag_count", GOOD, 1),  # the opening tag is the prompt's
        ("tag_count", GOOD + "</answer>", 0.75),
        ("tag_count", "", 0.25),
        ("reasoning_steps", "First, 2. Then, 3.", 2 / 3),
        ("reasoning_steps", "Step 1: a\nStep 2: b\nStep 3: c\nStep 4: d", 1),
        ("reasoning_steps", "5", 0),
        ("signed_format", GOOD, 1.25),
        ("signed_format", GOOD + " and so on", -1),
        ("signed_format", "a <think> b </think> <answer> 5 </answer>", -1),
        ("signed_accuracy", "it is 7, no, 5.0", 1),
        ("signed_accuracy", "5, or 1,005", -1),
        ("signed_accuracy", "five", -1),
        ("signed_accuracy", "it is \u22125", -1),  # Unicode's minus sign
        ("language_consistency", "two and three 得到五", 0.5),  # three words, three characters
        ("language_consistency", "\\frac{2}{3} </think> 5", 1),
    ],
)
def test_parts(part, response, expected):
    assert rewarded(part, response)[f"part_{part}"] == pytest.approx(expected)


def test_the_language_is_the_questions_own():
    asked = Problem("b", "二加三等于几?", "", "5")
    assert rewarded("language_consistency", "答案是 five", asked)["reward"] == 0.75
    assert rewarded("language_consistency", "пять", asked)["reward"] == 0
    japanese = Problem("c", "二たす三はいくつですか。", "", "5")
    assert rewarded("language_consistency", "こたえは五です", japanese)["reward"] == 1


SPANISH = "Primero sumamos los dos números y luego tenemos el resultado."
ENGLISH = "First we add the two numbers and then we have the result."


@pytest.mark.parametrize(
    ("question", "reasoning", "share"),
    [
        ("What is 2 + 3?", ENGLISH, 1),
        # No word of the ten is one of English: "no" and the like would be.
        ("What is 2 + 3?", SPANISH, 0),
        ("¿Cuántos son 2 y 3 en total?", SPANISH, 1),
        # Twelve English words and ten Spanish ones.
        ("What is 2 + 3?", f"{ENGLISH} {SPANISH}", 12 / 22),
        ("Wie viele sind es, wenn er 2 und 3 hat?", ENGLISH, 0),
        # In an English sentence "und" alone is not: 4 of 5.
        ("What is 2 + 3?", "the two und the three", 4 / 5),
        # The answer, behind the reasoning, does not count.
        ("What is 2 + 3?", f"{ENGLISH} </think> {SPANISH}", 1),
        ("What is 2 + 3?", f"{SPANISH} </think> {ENGLISH}", 0),
        ("Сколько будет 2 и 3?", "Сначала это было 2 и 3", 1),
        ("Сколько будет 2 и 3?", "Спочатку це було 2 і 3", 0),
        ("2 + 3 = ?", SPANISH, 0),  # the prompt is English
        ("x + y", "x + y = z, x = 5", 1),
        ("What is 2 + 3?", "", 1),
    ],
)
def test_languages_of_one_script_are_told_apart(question, reasoning, share):
    prompt = f"Answer the question that is given.\nUser: {question}\nAssistant: <think>"
    problem = Problem("a", question, prompt, "5")
    scored = rewarded("language_consistency", reasoning, problem)
    assert scored["reward"] == pytest.approx(share)


def test_a_weighted_sum_and_its_parts():
    score = rewarded("format:0.5,tag_count:0.5,accuracy:2", "</think> <answer> 6 </answer>")
    assert (
        score["reward"] == 0.5 + 0.5 and score["answer_reward"] == 0 and score["format_reward"] == 1
    )
    assert {name: value for name, value in score.items() if name.startswith("part_")} == {
        "part_format": 1,
        "part_tag_count": 1,
        "part_accuracy": 0,
    }


USERS = """
import asyncio, json, os, re, time

def by_length(response, ground_truth):
    return len(response) / 10

def like_trl(prompts, completions, ground_truth, **columns):
    assert set(columns) == {"question", "answer", "id", "completion_ids"}
    assert prompts[0].endswith("<think>")
    assert columns["completion_ids"] == [[2] for _ in prompts]
    return [None if truth in text else 2 for text, truth in zip(completions, ground_truth)]

def of_fewer(completions, answer):
    return [1.0]

def too_few(completions, **columns):
    return []

def no_number(response, ground_truth):
    return "much"

def breaks(response, ground_truth):
    return {}["missing"]

def infinite(response, ground_truth):
    return float("inf")

def no_reward(response, ground_truth):
    return {"score": 1}

def leaves(response, ground_truth):
    raise SystemExit(3)

def not_a_number(completions, **columns):
    return [float("nan") for _ in completions]

def forgets(response, ground_truth):
    pass

def forgets_all(completions, **columns):
    pass

def in_a_library(response, ground_truth):
    return json.loads(response)

def of_three(response, ground_truth, question):
    return 1.0

def of_the_state(completions, trainer_state):
    return [1.0 for _ in completions]

def tensors(completions, **columns):
    import numpy
    return numpy.array([0.5] * len(completions))

def one_by_one(**columns):
    for _ in columns["completions"]:
        yield 0.25

async def later(completions, **columns):
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    return [loop is LOOPS.setdefault("loop", loop) for _ in completions]

class Judge:
    async def __call__(self, response, ground_truth):
        return await asyncio.sleep(0, 0.75)

def in_a_rank(response, ground_truth):
    import os
    return float("RANK" in os.environ or "WORLD_SIZE" in os.environ)

def counts(response, ground_truth):
    CALLS.append(response)
    return len(CALLS)

def hangs(response, ground_truth):
    # holds the interpreter's lock where there are many a's
    return float(re.match("(a+)+$", response) is None)

def waits(completions, **columns):
    time.sleep(600)

def is_killed(response, ground_truth):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

def needs_memory(response, ground_truth):
    raise MemoryError

def needs_memory_in_torch(response, ground_truth):
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes")

LOOPS, CALLS, judge = {}, [], Judge()
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "users_rewards.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("by_length:0.5", 0.5 * len(GOOD) / 10),
        (
            "like_trl:-1,accuracy",
            1,
        ),  # None: it does not apply, so that the other part is the whole reward
        ("of_fewer", 1),
        ("tensors", 0.5),
        ("one_by_one", 0.25),
        ("later", 1),
        ("judge", 0.75),
    ],
)
def test_functions_of_the_users_own(users, name, expected):
    for _ in range(2):  # the second time in the same process, and loop
        assert rewarded(f"users_rewards:{name}", GOOD)["reward"] == pytest.approx(expected)


def test_a_function_is_no_rank_of_torchrun(users, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rewarded("users_rewards:in_a_rank", GOOD)["reward"] == 0


def test_a_function_keeps_its_state_from_call_to_call(users):
    assert [rewarded("users_rewards:counts", GOOD)["reward"] for _ in range(3)] == [1, 2, 3]


def test_a_part_that_does_not_apply_is_left_out_of_the_sum_and_of_its_mean(users):
    drawn = [[completion(GOOD), completion("</think> <answer> 6 </answer>")]]
    (group,) = find_reward("users_rewards:like_trl", MATHS).score([PROBLEM], drawn)
    part = "part_users_rewards.like_trl"
    unscored, scored = group.scores
    assert unscored["reward"] == 0 and unscored["unscored"] == 1 and part not in unscored
    assert scored["reward"] == scored[part] == 2 and "unscored" not in scored
    assert grading_report([group], MATHS)[part] == 2
    (group,) = find_reward("users_rewards:like_trl,accuracy", MATHS).score([PROBLEM], drawn)
    assert [score["reward"] for score in group.scores] == [1, 2] and not any(
        "unscored" in score for score in group.scores
    )


def test_chats_are_lists_of_messages_and_columns_those_of_the_data(tmp_path, monkeypatch):
    turns = [
        {"role": "user", "content": "Q: What is 2 + 3?"},
        {"role": "assistant", "content": "<think>"},
    ]
    expected = (turns, [{"role": "assistant", "content": GOOD}], [2], "2 + 3 #### 5", 7)
    source = "def chat(prompts, completions, completion_ids, answer, level):\n"
    source += (
        "    return [float(row == EXPECTED) for row in zip(prompts, completions, completion_ids,"
        " answer, level)]\n"
    )
    (tmp_path / "users_chat.py").write_text(f"{source}EXPECTED = {expected!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = tuple((turn["role"], turn["content"]) for turn in turns)
    problem = dataclasses.replace(
        PROBLEM, turns=asked, columns={"prompt": "?", "answer": "2 + 3 #### 5", "level": 7}
    )
    reward = find_reward("users_chat:chat", MATHS)
    assert reward.score([problem], [[completion(GOOD)]])[0].scores[0]["reward"] == 1
    assert (
        reward.score([dataclasses.replace(problem, turns=())], [[completion(GOOD)]])[0].scores[0][
            "reward"
        ]
        == 0
    )


@pytest.mark.parametrize(("name", "text"), [("hangs", "a" * 40 + "b"), ("waits", GOOD)])
def test_a_call_that_hangs_ends_in_one_line_and_the_next_one_starts_anew(users, name, text):
    reward = find_reward(f"users_rewards:{name}", MATHS, seconds=0.5)
    with pytest.raises(
        RunStopped,
        match=(
            f"^--reward users_rewards:{name}: the function gave no answer within 0.5 s .--reward_ti"
        ),
    ):
        reward.score([PROBLEM], [[completion(text)]])
    if name == "hangs":
        assert reward.score([PROBLEM], [[completion(GOOD)]])[0].scores[0]["reward"] == 1


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("breaks", 2),
        ("leaves", 2),
        ("no_number", 2),
        ("too_few", 2),
        ("is_killed", 1),
        ("waits", 1),
        ("needs_memory", 1),
        ("needs_memory_in_torch", 1),
    ],
)
def test_an_exception_of_a_function_is_not_tried_again_but_a_lost_call_may_be(users, name, code):
    """By the exit code, which a sweep reads: it tries 1 again, and 2 not."""
    reward = find_reward(f"users_rewards:{name}", MATHS, seconds=0.5)
    with pytest.raises(RunStopped) as stopped:
        reward.score([PROBLEM], [[completion(GOOD)]])
    assert stopped.value.code == code


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "there is no such reward"),
        ("format:0.5,format", "named twice"),
        ("countdown", "does not fit this --task"),
        ("users_rewards:missing", "cannot be imported"),
        ("no_module:f", "cannot be imported"),
        ("users_rewards:USERS", "cannot be imported"),
        ("builtins:max", "cannot be imported"),
        ("accuracy:half", "the weight 'half' is no number"),
        ("users_rewards:infinite", "gave inf, which is no number"),
        ("users_rewards:not_a_number", "gave nan, which is no number"),
        ("users_rewards:no_reward", "gave {'score': 1}, which is no number"),
        ("users_rewards:leaves", r"it has called sys.exit\(3\)"),
        ("users_rewards:forgets", "gave None, which is no number"),
        ("users_rewards:forgets_all", "gave None for 2 completions"),
        (
            "users_rewards:too_few",
            "gave 0 rewards for 2 completions, and must give a list of as many numbers",
        ),
        ("users_rewards:no_number", "gave 'much', which is no number"),
        ("users_rewards:breaks", r"KeyError: 'missing' \(.*users_rewards.py:23\)"),
        ("users_rewards:in_a_library", r"JSONDecodeError: .* \(.*users_rewards.py:44\)"),
        (
            "users_rewards:of_three",
            "missing 1 required positional argument: 'question'.*docs/extending_rewards.md says",
        ),
        ("users_rewards:of_the_state", "missing 1 required positional argument: 'trainer_state'"),
    ],
)
def test_rewards_that_cannot_be_are_named_before_a_model_loads(users, name, message):
    with pytest.raises(UserError, match=message) as refused:
        try_reward(find_reward(name, MATHS), PROBLEM)
    assert refused.value.code == 2 and "\n" not in str(refused.value)


OWN_RULE = """
def rule(response, ground_truth):
    right = float(ground_truth in response)
    return {"reward": right, "format_reward": 1.0, "answer_reward": right}

def no_score(response, ground_truth):
    return 1.0

def breaks(response, ground_truth):
    return {}["missing"]

def breaks_too(response, ground_truth):
    return {}["missing"]
"""


def test_a_task_may_have_a_rule_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "users_rule.py").write_text(OWN_RULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = ("users_rule:rule",)
    (group,) = find_reward("users_rule:rule", rules).score(
        [PROBLEM], [[completion("it is 5"), completion("6")]]
    )
    assert [score["reward"] for score in group.scores] == [1, 0]
    assert grading_report([group], rules) == {"reward_users_rule.rule": 0.5, "grading_failed": 0}
    assert find_rule(evaluation_rule("random", rules))("5", "5")["reward"] == 1
    with pytest.raises(
        UserError, match="r1_zero: it does not fit this --task, which is graded by users_rule:rule"
    ):
        find_reward("r1_zero", rules)
    for name, message in (
        ("no_score", "gave 1.0; a rule gives reward, format_reward"),
        ("breaks", r"KeyError.*users_rule.py:10"),
    ):
        with pytest.raises(RunStopped, match=message):
            find_rule(evaluation_rule("random", (f"users_rule:{name}",)))("5", "5")
    # The same function by two flags: each error names its own.
    for flag in ("--eval_rule", "--reward"):
        with pytest.raises(RunStopped, match=f"^{flag} users_rule:breaks_too: "):
            find_rule("users_rule:breaks_too", flag=flag)("5", "5")
    with pytest.raises(UserError, match="^--eval_rule users_rule:absent: cannot be imported"):
        find_rule("users_rule:absent", flag="--eval_rule")


def test_a_part_that_cannot_go_with_a_rule_says_why():
    with pytest.raises(
        UserError, match="--reward signed_accuracy: it looks for a number that is the answer"
    ):
        find_reward("format,signed_accuracy:0.5", ("countdown",))

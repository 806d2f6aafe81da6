"""A frozen model as a part of a reward: the probability that it answers a rubric by yes.

`judge:MODEL@RUBRIC` names the model, a folder or a name of the hub, and the rubric: a name of
`RUBRICS`, or a file. A rubric has a place for the `{question}`, and for the whole `{response}` or
its `{summary}`, which is what stands behind the thought. DeepSeek-AI 2025 (arXiv:2501.12948,
section 2.3.4) rewards the helpfulness of the summary and the harmlessness of the whole response, by
models that were trained on preferences; here a model is asked.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.core.flag import flag
from alignment.core.records import Completion, Problem, Score
from alignment.rewards.language import reasoning_of
from alignment.system.errors import UserError
from alignment.system.files import read_text
from alignment.system.nearest import did_you_mean

RUBRICS = {file.stem: file for file in sorted((Path(__file__).parent / "rubrics").glob("*.txt"))}
"""Name -> file of the rubrics that come with the package."""
_NAME = re.compile(r"judge:(?P<model>[^@]+)@(?P<rubric>.+)")
# A tokenizer may have a token for a word with a space before it and another for one without.
_WORDS = {
    "yes": ("yes", "Yes", " yes", " Yes"),
    "no": ("no", "No", " no", " No"),
}
_END_OF_THOUGHT = re.compile(r"</(?:think|reasoning)>")
_TAG = re.compile(r"</?(?:think|reasoning|answer)>")


@dataclass(frozen=True)
class JudgeSettings:
    """Where judges compute."""

    judge_device: str = flag("cpu")
    """judge: device of the judges, such as cuda:1; in float32 on a CPU, else in bfloat16. `plan`
    does not count them."""


@dataclass(frozen=True)
class JudgeName:
    """What `judge:MODEL@RUBRIC` names."""

    model: str
    rubric: str

    @property
    def metric(self) -> str:
        """The part's name in metrics: judge.MODEL@RUBRIC, each without its folders."""
        return f"judge.{Path(self.model).name}@{Path(self.rubric).stem}"


def judge_name(part: str) -> JudgeName | None:
    """What a part of --reward names, where it is a judge; None where it is none."""
    match = _NAME.fullmatch(part)
    return None if match is None else JudgeName(match["model"], match["rubric"])


def find_judge(name: JudgeName) -> Callable[..., list[float | None]]:
    """The part that is a judge. Its model loads with the first call.

    Raises `UserError` for a rubric that cannot be, and for a folder without a model.
    """
    rubric = read_rubric(name.rubric)
    folder = Path(name.model).expanduser()
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name.model) is not None
    looks_local = folder.exists() or folder.parent.is_dir() or not is_hub_name
    if not (folder / "config.json").is_file() and looks_local:
        raise UserError(
            f"--reward judge:{name.model}: there is no model in this folder; name one that has a"
            " config.json, or OWNER/NAME of the hub"
        )

    def judge(
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        scores: Sequence[Score],
        settings: JudgeSettings,
    ) -> list[float | None]:
        model = load_judge(name.model, settings.judge_device)
        rewards: list[float | None] = []
        for problem, completion in zip(problems, completions, strict=True):
            # One response at a time: its reward does not depend on what shares a batch.
            rewards.append(model.probability_of_yes(filled(rubric, problem, completion.text)))
        return rewards

    # `settings_class` reads the annotation, which a function inside a function does not resolve.
    judge.__annotations__["settings"] = JudgeSettings
    return judge


def read_rubric(name: str) -> str:
    """The text of a rubric. Raises `UserError` where there is none, or it lacks a place."""
    path = RUBRICS.get(name, Path(name))
    if not path.is_file():
        raise UserError(
            f"--reward judge:...@{name}: there is no such rubric; choose one of"
            f" {', '.join(RUBRICS)}, or a file{did_you_mean(name, RUBRICS)}"
        )
    text = read_text(path).strip()
    if "{response}" not in text and "{summary}" not in text:
        raise UserError(
            f"--reward judge:...@{name}: the rubric has no place for what is judged; write"
            " {response} or {summary} where it goes"
        )
    return text


def filled(rubric: str, problem: Problem, response: str) -> str:
    """A rubric with the question, and the response or its summary, in their places."""
    texts = {
        "question": problem.question or problem.prompt,
        "response": response,
        "summary": summary_of(response),
    }
    return re.sub(r"\{(question|response|summary)\}", lambda place: texts[place[1]], rubric)


def summary_of(response: str) -> str:
    """What stands behind the last end of a thought, without tags; without a thought, the whole
    response."""
    reasoning = reasoning_of(response)
    behind = response
    if reasoning != response:
        behind = _END_OF_THOUGHT.sub("", response[len(reasoning) :], count=1)
    return _TAG.sub("", behind).strip()


@dataclass(frozen=True)
class Judge:
    """A loaded judge."""

    model: Any
    tokenizer: Any
    device: str

    def probability_of_yes(self, text: str) -> float:
        """The probability that the answer's first token is a yes, given that it is a yes or a no:
        by the logits, in float32, behind the text as a user's turn where there is a chat
        template."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor([self.token_ids(text)], device=self.device)
            logits = self.model(input_ids=ids).logits[0, -1].float()
        yes = torch.logsumexp(logits[self.first_tokens("yes")], dim=0)
        no = torch.logsumexp(logits[self.first_tokens("no")], dim=0)
        return torch.sigmoid(yes - no).item()

    def token_ids(self, text: str) -> list[int]:
        """The text's ids, up to where the answer begins."""
        if not getattr(self.tokenizer, "chat_template", None):
            return self.tokenizer.encode(f"{text}\nAnswer:")
        messages = [{"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(prompt, add_special_tokens=False)

    def first_tokens(self, answer: str) -> list[int]:
        """The first token of each spelling of "yes" or "no", none twice, without those that begin
        the other answer too, such as a space."""
        ids: dict[str, list[int]] = {}
        for name, spellings in _WORDS.items():
            ids[name] = [
                self.tokenizer.encode(word, add_special_tokens=False)[0] for word in spellings
            ]
        shared = set(ids["yes"]) & set(ids["no"])
        return [token for token in dict.fromkeys(ids[answer]) if token not in shared]


@functools.cache
def load_judge(model: str, device: str) -> Judge:
    """The judge of this name, loaded once a process. Raises `UserError` where it cannot load, and
    where its yes and no begin with the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        network = network.to(device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        one_line = " ".join(str(error).split())[:300]
        raise UserError(f"--reward judge:{model}: it cannot be loaded ({one_line})") from None
    judge = Judge(network, tokenizer, device)
    if not judge.first_tokens("yes") or not judge.first_tokens("no"):
        raise UserError(
            f"--reward judge:{model}: its tokenizer begins yes and no with the same tokens, so that"
            " it cannot tell them apart; name another model"
        )
    return judge

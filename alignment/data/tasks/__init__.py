"""Tasks: where problems and worked solutions come from. `TASKS` lists them all."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, overload

from alignment.core.records import Endless, Problem, Problems
from alignment.data.answer_cells import IN_BOX, final_answer
from alignment.data.prompts import (
    ChatOptions,
    is_chat_file,
    prompted,
    read_template,
    trained_response,
)
from alignment.data.questions import (
    Key,
    distinct,
    in_sft_share,
    in_validation_split,
    is_held_out_of_sft,
    only,
    plain,
    question_text,
    without,
)
from alignment.data.rows import READERS
from alignment.data.tasks import arithmetic, countdown, own_data, published
from alignment.data.tasks.own_data import DataConfig, Demonstration
from alignment.system.errors import UserError, in_one_line, place_in_users_code
from alignment.system.registry import find

Split = Literal["train", "test"]
EvalSplit = Literal["test", "validation"]
"""The held-out questions that an evaluation asks."""


END_TOKEN_ALONE = ("none",)
"""The value of --stop that is no string: only the end token ends a response."""
MOST_HELD_OUT = 256  # training problems that SFT measures its accuracy on
ENDLESS_LOOKED_AT = 20_000  # problems without end among which these are
BOXED_RULES = ("boxed", "flexible")
"""The rules that grade an answer in a box, the one that is demanded first."""


@dataclass(frozen=True)
class AnswerFormat:
    """The rules that grade what a prompt asks for, and the strings that end a response to it."""

    rules: tuple[str, ...]
    stop: tuple[str, ...] = ()


BOXED_FORMAT = AnswerFormat(BOXED_RULES)
END_OF_TAGS = ("</answer>",)
TAGGED_CHAT_FORMAT = AnswerFormat(("think_answer", "flexible"), END_OF_TAGS)
"""A chat that asks for a thought and an answer in their tags."""
# Prompts of mathematical questions that ask for another format than `r1_zero`. "" leaves the choice
# to the model.
FORMATS: Mapping[str, AnswerFormat] = {
    "": BOXED_FORMAT,
    "chat": BOXED_FORMAT,
    "boxed": BOXED_FORMAT,
    "question": AnswerFormat(("flexible", "boxed")),
    "question_answer": AnswerFormat(BOXED_RULES, ("\nQuestion:",)),
    "think_answer": TAGGED_CHAT_FORMAT,
    "think_answer_lines": TAGGED_CHAT_FORMAT,
    "reasoning_answer": TAGGED_CHAT_FORMAT,
}
# A rule -> the format that it grades, in whatever prompt.
_FORMATS_OF_RULES: Mapping[str, AnswerFormat] = {
    "boxed": BOXED_FORMAT,
    "flexible": BOXED_FORMAT,
    "think_answer": TAGGED_CHAT_FORMAT,
}


def format_of_prompt(name: str) -> AnswerFormat | None:
    """The format that a mathematical prompt asks for: of `FORMATS`, or, in a chat from a file, a
    thought and an answer in tags; None for others, which leave it to the task."""
    if is_chat_file(name):
        return TAGGED_CHAT_FORMAT
    return FORMATS.get(name)


def is_in_tags(name: str) -> bool:
    """Whether a prompt asks for an answer in tags, whatever rule grades it."""
    if name == "tiny":  # its model has learnt them
        return True
    with suppress(UserError):  # `check` refuses a file that is missing
        return END_OF_TAGS[0] in read_template(name)
    return False


@dataclass(frozen=True)
class Task:
    """One source of verifiable problems."""

    name: str
    problems: Callable[[Split, str], Problems]
    """`problems(split, dataset_path)` returns a split's problems, the same ones every time. Only
    training problems may be `Endless`."""
    demonstrations: Callable[[Split, str, int], Sequence[tuple[Problem, str]]]
    """`demonstrations(split, dataset_path, seed)` returns (problem, response) pairs, for SFT."""
    prompt: str = ""
    """The name of the prompt template; empty: `chat` and a box where the model has a chat template,
    else a box in plain text."""
    rules: tuple[str, ...] = ("r1_zero", "r1_zero_strict")
    """The rules that can grade a response, each of `RULES` or a function of the user's own,
    package.module:function. Evaluations are by the first."""
    stop: tuple[str, ...] = END_OF_TAGS
    """The strings that end a response."""
    key: Key = question_text
    """Problems with equal `key` ask the same question: evaluations ask it once, and training leaves
    it to the test split."""
    right_answer: Callable[[Problem], str] = operator.attrgetter("ground_truth")
    """An answer to a problem that its rules pay, for a look at them."""

    def in_format(self, prompt: str, reward: str) -> "Task":
        """This task with the prompt, rules and stop strings that --prompt and --reward ask for.

        The format of the prompt (`format_of_prompt`) replaces the tags of `r1_zero`, and so does
        that of a rule which grades another one, in a prompt of the model's choice if this is a box
        and no prompt is named here or by the task; a response to a prompt in tags ends with them.
        Where neither is given, the task's own format stays. A task that `r1_zero` cannot grade
        keeps its rules, and so does one whose reward is named and one of them: its prompt then asks
        for no box."""
        name = prompt
        leaves_choice = reward in BOXED_RULES and format_of_prompt(self.prompt) is None
        if not prompt and not ("r1_zero" in self.rules and leaves_choice):
            name = self.prompt
        graded = _FORMATS_OF_RULES.get(reward)
        answer_format = format_of_prompt(name) or graded
        if graded is None and reward in self.rules:
            answer_format = None
        if "r1_zero" not in self.rules or answer_format is None:
            return self if name == self.prompt else replace(self, prompt=name)
        if graded is not None and reward not in answer_format.rules:
            answer_format = graded
        stop = answer_format.stop
        if not stop and is_in_tags(name):
            stop = END_OF_TAGS
        return replace(self, prompt=name, rules=answer_format.rules, stop=stop)

    def with_stop(self, stop: tuple[str, ...]) -> "Task":
        """This task with the strings of --stop in the place of its own; () leaves those."""
        if not stop:
            return self
        if stop == END_TOKEN_ALONE:
            return replace(self, stop=())
        return replace(self, stop=stop)

    @property
    def wants_box(self) -> bool:
        """Whether a chat asks for the final answer in a box: the first of the rules grades it."""
        return self.rules[0] == "boxed"

    @overload
    def with_prompts(
        self,
        problems: Sequence[Problem],
        tokenizer,
        system_prompt: str = ...,
        examples: Sequence[tuple[str, str]] = ...,
    ) -> Sequence[Problem]: ...
    @overload
    def with_prompts(
        self,
        problems: Problems,
        tokenizer,
        system_prompt: str = ...,
        examples: Sequence[tuple[str, str]] = ...,
    ) -> Problems: ...

    def with_prompts(
        self,
        problems: Problems,
        tokenizer,
        system_prompt: str = "",
        examples: Sequence[tuple[str, str]] = (),
    ) -> Problems:
        """The problems as the prompt puts them, after (question, response) examples.

        Raises `UserError` as `prompted` does."""
        options = ChatOptions(system_prompt, self.wants_box, tuple(examples))
        return prompted(problems, self.prompt, tokenizer, options)

    def as_taught(
        self,
        demonstrations: Sequence[Demonstration],
        tokenizer,
        system_prompt: str = "",
        examples: Sequence[tuple[str, str]] = (),
    ) -> list[Demonstration]:
        """The demonstrations with their prompts (`with_prompts`), and the responses as SFT teaches
        them behind these (`trained_response`).

        Raises `UserError` as both do."""
        problems = self.with_prompts(
            [problem for problem, _ in demonstrations], tokenizer, system_prompt, examples
        )
        taught = []
        for problem, (_, response) in zip(problems, demonstrations, strict=True):
            taught.append((problem, trained_response(problem, response, tokenizer)))
        return taught

    def in_boxes(self, demonstrations: Sequence[Demonstration]) -> Sequence[Demonstration]:
        """The task's own demonstrations, whose answers are in a box where the prompt asks for
        one."""
        if not self.wants_box:
            return demonstrations
        return [(problem, answer_in_box(response)) for problem, response in demonstrations]

    def test_split(self, dataset_path: str) -> Sequence[Problem]:
        """The problems of the test split, of which several may ask the same question. Raises
        `UserError` where they are `Endless`."""
        problems = self.problems("test", dataset_path)
        if isinstance(problems, Endless):
            raise UserError(f"--task {self.name}: its test problems must be a list, not Endless")
        return problems

    def test_problems(
        self,
        dataset_path: str,
        max_problems: int = 0,
        eval_split: EvalSplit = "test",
        validation_share: float = 0.0,
    ) -> list[Problem]:
        """The first `max_problems` (0: all) distinct questions of the test split: intervals count
        each as one observation. With a `validation_share`, those of `eval_split`: about that share
        of the questions is the validation split, by a hash, and the others are the test split."""
        problems = self.test_split(dataset_path)
        if validation_share:
            asks_validation = eval_split == "validation"
            kept = []
            for problem in problems:
                if in_validation_split(self.key(problem), validation_share) == asks_validation:
                    kept.append(problem)
            problems = kept
        return distinct(problems, self.key, max_problems or None)

    def training_problems(self, dataset_path: str, sft_share: float = 0.0) -> Problems:
        """The training split without the questions of the test split, and without SFT's share."""
        untested = self._untested_problems(dataset_path)
        if not sft_share:
            return untested
        return only(
            untested,
            lambda problem: not in_sft_share(self.key(problem), sft_share),
            "are SFT's (--sft_share)",
        )

    def _untested_problems(self, dataset_path: str) -> Problems:
        """The training split without the questions of the test split."""
        tested = self._tested_keys(dataset_path)
        return without(self.problems("train", dataset_path), tested, self.key)

    def held_out_of_sft(self, dataset_path: str, sft_share: float) -> list[Problem]:
        """The first `MOST_HELD_OUT` distinct training problems, none of a test question, that SFT
        measures its accuracy on."""
        problems = self.training_problems(dataset_path)
        listed: Sequence[Problem]
        if isinstance(problems, Endless):
            listed = [problems[index] for index in range(ENDLESS_LOOKED_AT)]
        else:
            listed = problems
        held_out = [
            problem for problem in listed if is_held_out_of_sft(self.key(problem), sft_share)
        ]
        return distinct(held_out, self.key, MOST_HELD_OUT)

    def taught(
        self,
        demonstrations: Sequence[tuple[Problem, str]],
        dataset_path: str,
        sft_share: float,
        holds_out: bool,
    ) -> list[tuple[Problem, str]]:
        """The (problem, response) pairs that SFT trains on: those whose questions, in all turns,
        are of its share (0: of any), and where it `holds_out` problems, none of theirs. A problem
        that has its prompt already, and no question, asks what the training problem of that prompt
        asks."""
        keys_of_prompts: dict[str, str] = {}
        problems = self.problems("train", dataset_path)
        has_prompts_alone = any(not problem.question for problem, _ in demonstrations)
        if has_prompts_alone and not isinstance(problems, Endless):
            keys_of_prompts = {plain(problem.prompt): self.key(problem) for problem in problems}
        kept = []
        for problem, response in demonstrations:
            keys = self._keys(problem)
            if not problem.question:
                keys = [keys_of_prompts.get(plain(problem.prompt), key) for key in keys]
            is_sfts = not sft_share or all(in_sft_share(key, sft_share) for key in keys)
            is_held_out = holds_out and any(is_held_out_of_sft(key, sft_share) for key in keys)
            if is_sfts and not is_held_out:
                kept.append((problem, response))
        return kept

    def untested(
        self, demonstrations: Sequence[tuple[Problem, str]], dataset_path: str
    ) -> list[tuple[Problem, str]]:
        """The (problem, response) pairs without the questions of the test split. A problem that has
        its prompt already, and no question, asks what the test problem of that prompt asks."""
        test_prompts = {plain(problem.prompt) for problem in self.test_split(dataset_path)}
        tested = self._tested_keys(dataset_path) | test_prompts
        kept = []
        for problem, response in demonstrations:
            if tested.isdisjoint(self._keys(problem)):
                kept.append((problem, response))
        return kept

    def _keys(self, problem: Problem) -> list[str]:
        """The keys of a problem, and of each turn of its conversation as a question."""
        as_questions = [replace(problem, question=text) for _, text in problem.turns]
        return [self.key(question) for question in (problem, *as_questions)]

    def _tested_keys(self, dataset_path: str) -> frozenset[str]:
        """The keys of the problems of the test split."""
        return frozenset(map(self.key, self.test_split(dataset_path)))


def _published_task(name: str, prompt: str) -> Task:
    """The task of a data set of published files."""
    return Task(
        name,
        partial(published.problems, name),
        partial(published.demonstrations, name),
        prompt,
    )


_TASKS = (
    Task("arithmetic", arithmetic.problems, arithmetic.demonstrations, "tiny", key=arithmetic.key),
    _published_task("gsm8k", "r1_zero"),
    _published_task("svamp", "tiny"),
    Task(
        "countdown",
        countdown.problems,
        countdown.demonstrations,
        "countdown_en",
        ("countdown",),
        key=countdown.key,
        right_answer=countdown.right_answer,
    ),
    Task(
        "countdown_small",
        partial(countdown.problems, size=countdown.SMALL),
        countdown.small_demonstrations,
        "tiny",
        ("countdown",),
        key=countdown.key,
        right_answer=countdown.right_answer,
    ),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _TASKS}


def find_task(name: str, data: DataConfig = DataConfig()) -> Task:  # noqa: B008, it is frozen
    """The task `name` of `TASKS`, the user's package.module:name, or `data`'s file:FILE or hf:NAME;
    else raises `UserError`."""
    if name.startswith(("file:", "hf:")):
        if name in ("file:", "hf:"):
            raise UserError(f"--task {name} names nothing: write file:FILE, or hf:NAME")
        return Task(
            name,
            partial(own_data.problems, name, data),
            partial(own_data.demonstrations, name, data),
            "r1_zero",
        )
    if data != DataConfig():
        raise UserError(
            f"--task {name} has rows of its own: --{', --'.join(vars(data))} go with file:FILE and"
            " hf:NAME"
        )
    if name not in TASKS:
        refuse_bare_path("--task", name)
    return find("--task", name, TASKS)


def refuse_bare_path(flag: str, name: str) -> None:
    """Raise `UserError` where a flag that takes file:FILE and hf:FOLDER has a path alone: one that
    is there, or the name of a file with rows."""
    path = Path(name)
    if path.is_dir() and len(path.parts) > 1:
        raise UserError(f"{flag} {name}: is a folder: write hf:{name}, or file: and a file in it")
    if path.is_file() or path.suffix in (".jsonl", *READERS):
        raise UserError(
            f"{flag} {name}: the rows of a file are named with file: before it: write file:{name}"
        )


# A worked solution, as the tasks' demonstrations have it.
_IN_TAGS = re.compile(
    r"\s*(?P<thought>.*?)\s*</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL
)


def answer_in_box(response: str) -> str:
    r"""A worked solution as a chat gives it: the thought, and the answer in \boxed{}, unless the
    thought ends with it in one; unchanged where it has no tags."""
    match = _IN_TAGS.fullmatch(response)
    if match is None:
        return response
    stated = final_answer(match["thought"])
    if stated.source == IN_BOX and stated.answer == match["answer"].strip():
        return match["thought"]
    answer = rf"The final answer is \boxed{{{match['answer'].strip()}}}."
    return f"{match['thought']}\n{answer}".lstrip()


def check_fields(task: Task) -> None:
    """Raise `UserError` where the rules or stop strings of a task of the user's own are no texts:
    of one text alone, each letter would be one, and an empty one ends every response."""
    for field in ("rules", "stop"):
        value = getattr(task, field)
        is_missing = field == "rules" and not value
        if is_missing or not _are_texts(value):
            raise UserError(
                f"--task {task.name}: its {field} are {value!r}, and must be a tuple of texts, none"
                " of them empty"
            )


def _are_texts(value: object) -> bool:
    """Whether a value is a tuple or list of texts, none of them empty."""
    if not isinstance(value, tuple | list):
        return False
    return all(isinstance(text, str) and text for text in value)


def try_rows(
    task: Task, kind: Literal["problems", "demonstrations"], split: Split, *arguments
) -> None:
    """Call a task of the user's own for its rows of a split; do nothing for our own tasks and
    readers.

    Raises `UserError` where the user's function fails, and where it returns no list of `Problem`,
    or of (`Problem`, response)."""
    ours = TASKS.get(task.name)
    is_ours = ours is not None and ours.problems is task.problems
    if is_ours or task.name.startswith(("file:", "hf:")):
        return
    try:
        rows = getattr(task, kind)(split, *arguments)
    except Exception as error:
        if isinstance(error, UserError) or not place_in_users_code(error):
            raise
        raise UserError(f"--task {task.name}: {in_one_line(error)}") from None
    wanted = "Problem" if kind == "problems" else "(Problem, response)"
    fault = f"--task {task.name}: its {kind} of the split {split}"
    if isinstance(rows, Endless):
        return
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise UserError(
            f"{fault} are {type(rows).__name__} ({str(rows)[:60]}), and must be a list of {wanted}"
        )
    for row in rows:
        fits = isinstance(row, Problem)
        if kind == "demonstrations":
            fits = isinstance(row, Sequence) and list(map(type, row)) == [Problem, str]
        if not fits:
            raise UserError(
                f"{fault} hold {type(row).__name__} ({str(row)[:60]}), and must be a list of"
                f" {wanted}"
            )

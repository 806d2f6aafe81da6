"""Problems, prompts and rewards."""

from dataclasses import dataclass

from alignment.config.flag import flag

ALL_PASS_RATES = "0-1"


@dataclass(frozen=True)
class DataFlags:
    """Where problems come from, how they are asked, and what answers are paid for."""

    task: str = flag("arithmetic", group="data")
    """Where problems come from: arithmetic, gsm8k, svamp, countdown, countdown_small; rows of your
    own, file:FILE (JSONL, JSON, CSV, Parquet) or hf:NAME (a hub's data set or a folder,
    hf:NAME:SUBSET); or your own `Task`, as package.module:name."""
    reward: str = flag("auto", group="data")
    """What responses are paid for. auto: boxed with --prompt chat, boxed or question_answer,
    flexible with question, think_answer with chats that ask for tags, else the task's rule. A rule:
    r1_zero, as published, r1_zero_strict, for exactly one worked-out final answer, think_answer,
    for a thought and an answer in tags with any white space between, boxed, for the last
    \\boxed{}, flexible, for the last box or number, or countdown. Or a weighted sum, such as
    format:0.5,tag_count:0.5,accuracy, of: format, accuracy, tag_count, reasoning_steps,
    language_consistency, cosine_length, signed_format, signed_accuracy, parts as published
    elsewhere (open_r1_format, simple_grpo_format, grpo_zero_answer, soft_format; docs/rewards.md
    has all), a judge (judge:MODEL@RUBRIC), majority_vote, for the answer of most responses to the
    problem, the negative controls random, format_only and inverted, and functions of your own, as
    package.module:function, which are called with a response and its ground truth, or as TRL calls
    them."""
    reward_timeout: float = flag(60.0, group="data", above=0, bookkeeping=True, changeable=True)
    """Seconds of one call of a reward function of your own, after which the run saves and stops."""
    prompt: str = flag("", group="data")
    """Prompt template: chat, the question in the model's own chat template; boxed, question or
    question_answer, for base models; r1_zero, tiny, countdown_en, countdown_zh; the chats
    think_answer, think_answer_lines and reasoning_answer, which ask for tags; a file with
    {question}, or FILE.chat with the turns of a chat. Empty: the task's own, or with --reward boxed
    chat where the model has a chat template, else boxed."""
    dataset_path: str = flag("", group="data")
    """Folder of the task's files, or of one for each of --eval_tasks; empty: where `download` puts
    them."""
    question_column: str = flag("question", group="data")
    """Column of your rows' questions."""
    answer_column: str = flag("answer", group="data")
    """Column of your rows' answers."""
    answer_pattern: str = flag("", group="data")
    """Regular expression whose group is the final answer there; empty: the last `####` line, else
    what is in the last \\boxed{}, else all."""
    test_split: str = flag("", group="data")
    """File, or split of hf: data, of the test problems of --task file: or hf:, or where --task is
    neither, of the one in --eval_tasks; empty: the split test, or one question in 8."""
    system_prompt: str = flag("", group="data")
    """System turn of --prompt chat, as text or as a file that has it; empty: what the model's
    makers publish, or the chat template's own."""
    few_shot: str = flag("", group="data")
    """JSONL file of worked examples, each with a "question" and a "response", that are put before
    every question: as earlier turns of a chat, else as text. Empty: none."""


@dataclass(frozen=True)
class SFTShareFlags:
    """How SFT and RL share out the training problems."""

    sft_share: float = flag(0.0, group="data", at_least=0, below=1, zero="both train on all")
    """Share of the training questions, by a hash, that SFT trains on; RL trains on the others. 0:
    both train on all, so that RL asks what SFT may have learnt by heart."""


@dataclass(frozen=True)
class TrainingDataFlags:
    """Which training problems RL takes."""

    num_problems: int = flag(0, group="data", at_least=0, zero="all")
    """Training problems, the first ones; 0: all."""
    max_prompt_tokens: int = flag(0, group="data", at_least=0, zero="any length")
    """Longest prompt, in tokens; problems with longer ones are left out of training and of
    evaluations. 0: any length."""
    pass_rates: str = flag("", group="data")
    """File of training problems' measured pass rates, which `rejection_sample` and `evaluate` write
    with several samples a problem; training takes those in --pass_rate_band. Empty: none."""
    pass_rate_band: str = flag(ALL_PASS_RATES, group="data")
    """Pass rates LOW-HIGH, both included, of the problems to train on, such as 0.2-0.8; problems
    that are not in the file are left out."""
    max_solution_tokens: int = flag(0, group="data", at_least=0, zero="any length")
    """Longest worked solution of a row, in tokens; problems with longer ones are left out of
    training. 0: any length."""

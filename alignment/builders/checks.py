"""What can be said of arguments before a model, or a tensor library, is loaded."""

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from alignment.args import (
    CHANGEABLE_ON_RESUME,
    REPRODUCIBILITY_SETTING,
    Args,
    EvaluateArgs,
    RLArgs,
    SFTArgs,
    configuration,
    from_preset,
    preset_title,
    refuse_missing_warm_start,
)
from alignment.builders.base_models import (
    EMBEDDED,
    check_model,
    check_tokenizer_files,
    context_of,
    is_larger_than_tiny,
)
from alignment.builders.data_checks import (
    check_pass_rates,
    check_test_split,
    check_training_split,
    print_left_out,
    print_shared_questions,
)
from alignment.builders.devices import check_policy_devices, check_processes
from alignment.builders.held_out import held_out_arguments
from alignment.config.flag import defaults_of_flags
from alignment.config.settings import own_flags
from alignment.config.words import given_words
from alignment.core.advantages import ADVANTAGES
from alignment.core.losses import LOSSES
from alignment.core.records import Problem, Problems
from alignment.data.prompts import CHAT, chat_turns, read_system_prompt, read_template
from alignment.data.tasks import (
    BOXED_RULES,
    Split,
    Task,
    check_fields,
    find_task,
    own_data,
    try_rows,
)
from alignment.data.tasks.own_data import Demonstration, read_examples
from alignment.model.vocabulary import read_vocabulary, refuse_other_vocabulary
from alignment.rewards.judge import judge_name
from alignment.rewards.rules import (
    RULES,
    Reward,
    check_reward_name,
    find_evaluation_rule,
    find_reward,
    find_rule,
    named_parts,
    try_reward,
)
from alignment.runs.run import RunConfig
from alignment.runs.run_folder import plain_name, refuse_taken_name, resumed_run_name
from alignment.runs.trackers import TRACKERS, find_tracker
from alignment.sampling.sampler import check_sampler_url, find_engine
from alignment.system.clock import start_in_background
from alignment.system.command import current_command
from alignment.system.errors import UserError, in_words
from alignment.system.files import read_json, try_writing
from alignment.system.manifests import sha256
from alignment.system.registry import check_call, find
from alignment.system.terminal import say_once

# Numbers of a preset that suit models of one size.
NUMBERS_OF_A_MODEL = ("learning_rate", "max_new_tokens")
SERVER_SECONDS = 5  # that a vLLM server has to take a connection


def check(args: Args) -> Task:
    """The task that --task names. Raises `UserError` for a task, reward, template, sampler, output
    folder or policy that cannot be."""
    check_fields(find_task(args.task, args.data))
    task = args.task_in_format
    check_reward_name(args.reward, task.rules, args.reward_timeout)
    read_template(task.prompt)
    read_system_prompt(args.system_prompt)
    read_examples(args.few_shot)
    check_evaluation_rule(args, task)
    if args.system_prompt and task.prompt not in ("", CHAT):
        raise UserError(
            f"--system_prompt goes with --prompt chat, and the prompt is {task.prompt}: leave out"
            " one of the two"
        )
    if args.sampler == "vllm_server":
        raise UserError(
            "--sampler vllm_server: give the server's address instead, --sampler_url"
            " http://HOST:PORT"
        )
    find_engine(args.sampler)
    check_trackers(args.trackers)
    check_processes(args, args.policy_parallelism)
    output_dir = Path(args.output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"--output_dir {args.output_dir}: is a file; name a folder")
    if not getattr(args, "preview", 0):
        check_output(args.output_dir)
    return task


def check_rl(args: RLArgs) -> None:
    """Check a run's arguments. Raises `UserError` as `check` and for a bad reward, warm start,
    resumed run, server or data."""
    task = check(args)
    check_loss(args)
    reward = find_reward(args.reward, task.rules, args.reward_timeout, args.reward_settings)
    check_judges(args.resolved_reward)
    if args.sampler_url:
        token = os.environ.get("ALIGNMENT_SAMPLER_TOKEN", "")
        urls = args.sampler_url.split(",")
        for url in urls:
            check_sampler_url(url, token)
        for url in urls:
            check_server(url)
    if args.resume:
        resumed_run_name(args.output_dir, args.run_name, default_run_name(args))
    else:
        refuse_taken_name(
            args.output_dir, args.run_name, "continue it with --resume or name another"
        )
        refuse_missing_warm_start(args)
        refuse_other_share(args)
        if args.sft_base:
            check_model(args.sft_base, "--sft_base", made=args.auto_sft)
        check_tokenizer_files(task, args.sft_base, "--sft_base")
        if not args.sft_base or not Path(args.sft_base).exists():
            check_model(args.model, "--model")
            check_tokenizer_files(task, args.model)
        check_length(args, policy_folder(args))
    check_teacher(args)
    check_test_split(task, args.dataset_path, args.max_problems)
    held_out = check_held_out(args)
    training = check_training_split(task, args.dataset_path, args.sft_share)
    training = check_pass_rates(args, training)
    print_shared_questions(training, held_out, "training problems")
    check_reward(args, task, reward, training[0])
    say_numbers_of_tiny(args, policy_folder(args))
    # This comes last, because it may load torch to count the GPUs.
    check_policy_devices(args)


def say_numbers_of_tiny(args: RLArgs | SFTArgs, model: str) -> None:
    """Print which numbers are those of the default preset, where the model that training begins
    with is too large for them. A resumed run keeps its numbers."""
    if args.resume or args.preset != Args.preset or not is_larger_than_tiny(model):
        return
    preset = from_preset(type(args), args.preset)
    words = current_command().words
    numbers = []
    for name in NUMBERS_OF_A_MODEL:
        is_presets = getattr(args, name) == getattr(preset, name)
        if is_presets and not given_words(words, name):
            numbers.append(f"--{name} {getattr(args, name)}")
    if numbers:
        flag = "--model" if model == args.model else "--sft_base"
        verb, pronoun = ("are", "them") if len(numbers) > 1 else ("is", "it")
        say_once(
            f"{flag} {model}: {' and '.join(numbers)} {verb} of --preset {args.preset}, the"
            f" default, which is for a tiny model; name {pronoun}, or another preset (`presets`"
            " lists all)"
        )


def check_judges(reward: str) -> None:
    """Raise `UserError` where the model of a judge in the reward is one of the hub that is neither
    on this machine nor can be downloaded."""
    for part, _ in named_parts(reward):
        judge = judge_name(part)
        if judge is not None:
            check_model(judge.model, "--reward judge:")


def check_server(url: str) -> None:
    """Raise `UserError` where nothing takes connections at the address of a vLLM server. Behind a
    proxy that cannot be told."""
    if getproxies():
        return
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)

    def connect() -> None:
        socket.create_connection((address.hostname, port), timeout=SERVER_SECONDS).close()

    try:
        # In a thread, because looking up the name obeys no timeout.
        start_in_background(connect).result(SERVER_SECONDS)
    except OSError as error:
        raise UserError(
            f"--sampler_url: the vLLM server at {url} cannot be reached"
            f" ({type(error).__name__}: {error.strerror or 'no answer'}). Check host and port, and"
            " start it as docs/asynchronous.md says"
        ) from None


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UserError` for a tracker whose library is not installed, and for one of the user's own
    that cannot be imported."""
    for name in names:
        find_tracker(name)
        # each of ours has the name of its library
        if name in TRACKERS and name not in sys.modules and find_spec(name) is None:
            raise UserError(
                f"--trackers {name}: {name} is not installed; start with `uv run --extra {name}"
                " ...`, or leave it out"
            )


def check_evaluation_rule(args: Args, task: Task) -> None:
    """Raise `UserError` where --eval_rule is no rule, or one that cannot grade the task."""
    name = args.eval_rule
    rules_of_task = find_task(args.task, args.data).rules
    fitting = [*task.rules, *rules_of_task]
    if "r1_zero" in rules_of_task:
        # Whatever the prompt asks for, they look for a number.
        fitting += [*BOXED_RULES, "think_answer"]
    if not name or name in fitting:
        return
    if name in RULES:
        raise UserError(
            f"--eval_rule {name}: it does not fit --task {args.task}, which is graded by"
            f" {' or '.join(dict.fromkeys(fitting))}"
        )
    find("--eval_rule", name, RULES, wrap=lambda function: function)


def check_held_out(args: RLArgs | SFTArgs) -> Mapping[str, Sequence[Problem]]:
    """Check the tasks of --eval_tasks, as `check` does, and return their test problems, by the
    prefix of their metrics."""
    held_out: dict[str, Sequence[Problem]] = {}
    for prefix, task_args in held_out_arguments(args).items():
        if prefix:
            task = check(task_args)
            problems = check_test_split(task, task_args.dataset_path, task_args.max_problems)
            check_rules(task_args, task, problems)
            held_out[prefix] = problems
    return held_out


def check_teacher(args: RLArgs) -> None:
    """Raise `UserError` where there is no model of --teacher, or where its tokenizer's files or its
    vocabulary's size do not suit the policy's. What is not on this machine, or made later, is
    compared where it is loaded."""
    if not args.teacher:
        return
    check_model(args.teacher, "--teacher")
    vocabularies = []
    for name in (policy_folder(args), args.teacher):
        folder = Path(name).expanduser()
        if name in EMBEDDED:
            folder = Path(args.output_dir) / f"{name}_base"
        vocabularies.append(read_vocabulary(folder))
    policys, teachers = vocabularies
    if policys is not None and teachers is not None:
        refuse_other_vocabulary(args.teacher, teachers, policys)


def policy_folder(args: RLArgs) -> str:
    """The model that training begins with: that of --sft_base, or where it is not made yet or not
    given, that of --model."""
    has_warm_start = args.sft_base and Path(args.sft_base).exists()
    return args.sft_base if has_warm_start else args.model


def check_length(args: Args, model: str) -> None:
    """Raise `UserError` where a response of --max_new_tokens leaves no room for a prompt in the
    model's context. Lengths of prompts are checked with the tokenizer, later."""
    context = context_of(model)
    lengths = {"--max_new_tokens": args.max_new_tokens}
    if isinstance(args, RLArgs):
        lengths["--eval_max_new_tokens"] = args.eval_max_new_tokens
    for flag, length in lengths.items():
        if context is not None and length >= context:
            raise UserError(
                f"{flag} {length}: the context of {model} is {context} tokens, for a prompt and its"
                " response; give fewer"
            )


def check_loss(args: RLArgs) -> None:
    """Try a loss and an advantage of the user's own on made-up responses. Raises `UserError` where
    no update can be made of what they give."""
    # What a signature shows is said before torch loads.
    if args.estimator not in ADVANTAGES.values():
        check_call("--advantage", args.advantage, args.estimator.function, "inputs", "state")
    if args.loss not in LOSSES.values():
        check_call("--loss_type", args.loss_type, args.loss.function, "inputs")
    if args.estimator not in ADVANTAGES.values():
        from alignment.training.trial import try_advantage  # Here, because it loads torch.

        try_advantage(args.advantage, args.update_config.advantage)
    if args.loss not in LOSSES.values():
        from alignment.training.trial import try_loss  # Here, because it loads torch.

        try_loss(args.loss_type, args.update_config.loss, has_teacher=args.teacher != "")


def check_reward(args: RLArgs, task: Task, reward: Reward, problem: Problem) -> None:
    """Score made-up responses to a problem. Raises `UserError` where a function of the user's own
    cannot."""
    prompted = dataclasses.replace(
        problem, prompt=read_template(task.prompt), turns=chat_turns(task.prompt, problem.question)
    )
    try_reward(reward, prompted)
    check_rules(args, task, [problem])


def check_rules(args: Args, task: Task, problems: Problems) -> None:
    """Have the task's rules that are functions of the user's own, by which evaluations grade, score
    made-up responses to the first of some problems. Raises `UserError` where one cannot."""
    names = dict.fromkeys((*task.rules, args.evaluation_rule))
    for name in names:
        if name not in RULES and problems:
            evaluates = isinstance(args, RLArgs | SFTArgs | EvaluateArgs)
            if evaluates and name == args.evaluation_rule:
                rule = find_evaluation_rule(name, args.reward_timeout, args.eval_rule)
            else:
                flag = "--eval_rule" if name == args.eval_rule else "--reward"
                rule = find_rule(name, args.reward_timeout, flag=flag)
            try_reward(Reward(rule), problems[0])


def check_output(folder: str | Path, name: str = "room") -> None:
    """Raise `UserError` where `folder`, which may not exist yet, cannot be written, or its disk is
    full, or where nothing in it can have that `name`."""
    try:
        try_writing(Path(folder), name)
    except OSError as error:
        raise UserError(
            f"{in_words(error)}: nothing could be saved there; name another folder, or make room"
        ) from None


def check_sft(args: SFTArgs) -> Mapping[str, Sequence[Demonstration]]:
    """The demonstrations of "train" and "test". Raises `UserError` as `check`, for a taken folder,
    no base model, bad data, a --sft_share or --patience that leaves nothing."""
    target = Path(args.sft_base)
    if target.exists() and not args.preview:
        raise UserError(
            f"--sft_base {args.sft_base} exists already: delete it, or name another folder"
        )
    task = check(args)
    check_model(args.model, "--model")
    check_tokenizer_files(task, args.model)
    check_length(args, args.model)
    if args.resume:
        resumed_run_name(str(target.parent), args.run_name, f"{target.name}_unfinished")
    if not args.preview:
        check_output(target.parent, target.name)
    check_rules(args, task, check_test_split(task, args.dataset_path, args.max_problems))
    held_out = check_held_out(args)
    if not args.demonstrations:
        try_rows(task, "demonstrations", "train", args.dataset_path, args.seed)
    training = read_demonstrations(args, task, "train")
    untested = task.untested(training, args.dataset_path)
    print_left_out(len(training), len(untested), "demonstrations")
    kept = check_sft_share(args, task, untested)
    print_shared_questions([problem for problem, _ in kept], held_out, "demonstrations")
    splits = {"train": kept, "test": read_demonstrations(args, task, "test") or kept}
    say_numbers_of_tiny(args, args.model)
    check_policy_devices(args)
    return splits


def check_sft_share(
    args: SFTArgs, task: Task, demonstrations: Sequence[Demonstration]
) -> Sequence[Demonstration]:
    """The demonstrations that --sft_share and --patience leave to train on; prints how many. Raises
    `UserError` where none is left, or --patience has no problem to measure on."""
    if not args.sft_share and not args.patience:
        return demonstrations
    flags = []
    if args.sft_share:
        flags.append(f"--sft_share {args.sft_share:g}")
    if args.patience:
        flags.append(f"--patience {args.patience}")
    holds_out = args.patience > 0
    kept = task.taught(demonstrations, args.dataset_path, args.sft_share, holds_out)
    line = (
        f"{' and '.join(flags)}: SFT trains on {len(kept)} of {len(demonstrations)} demonstrations"
    )
    if not kept:
        raise UserError(f"{line}; give a larger share")
    if holds_out:
        held_out = len(task.held_out_of_sft(args.dataset_path, args.sft_share))
        if not held_out:
            raise UserError(f"{line}, and no training problem is left to measure on")
        line += f", and measures its accuracy on {held_out} problems beside them"
    print(line, file=sys.stderr)
    return kept


def refuse_other_share(args: RLArgs) -> None:
    """Raise `UserError` where the warm start of --sft_base, or without one the model of an SFT that
    --model names, has trained on problems that --sft_share gives to RL, as its args.json says."""
    flag = "--sft_base" if args.sft_base else "--model"
    folder = args.sft_base or args.model
    record = Path(folder).expanduser() / "args.json"
    if not folder or not args.sft_share or not record.is_file():
        return
    arguments = read_json(record).get("args", {})
    if not args.sft_base and "curriculum" not in arguments:  # a flag of SFT alone
        return
    taught = arguments.get("sft_share", 0.0)
    if 0 < taught <= args.sft_share:
        return
    trained_on = f"those of --sft_share {taught:g}" if taught else "all problems"
    raise UserError(
        f"--sft_share {args.sft_share:g}: the warm start {folder} was trained on"
        f" {trained_on}, so RL would ask what it has seen; name another {flag}, or give"
        f" --sft_share {taught:g}"
    )


def read_demonstrations(args: SFTArgs, task: Task, split: Split) -> Sequence[Demonstration]:
    """A split of the worked solutions of the files of --demonstrations, or of the task's own."""
    if not args.demonstrations:
        return task.demonstrations(split, args.dataset_path, args.seed)
    rows = own_data.read_demonstrations(*args.demonstrations)
    return own_data.of_split(rows, split, args.seed, task.key)


def resumed_if_restarted(args: RLArgs) -> RLArgs:
    """The arguments, with --resume where torchrun may have started this command before and its run
    is there. It starts all ranks again after one is lost, but tells only the machine that lost it,
    so a run with a --run_name goes on where it is."""
    is_torchruns = "TORCHELASTIC_RUN_ID" in os.environ
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if is_torchruns and (args.run_name or is_restarted) and not args.resume:
        with suppress(UserError):
            resumed_run_name(args.output_dir, args.run_name, default_run_name(args))
            return dataclasses.replace(args, resume=True)
    return args


def default_run_name(args: RLArgs) -> str:
    """What a run's folder is called where --run_name is empty."""
    return plain_name(f"{preset_title(args.preset)}_{args.loss_type}_seed{args.seed}")


def run_config(args: RLArgs) -> RunConfig:
    """The folder and schedule of the run, and the contents of its args.json."""
    own = own_flags(args)
    changeable_settings = {name for name, flag in own.items() if flag.facts.changeable}
    changeable = CHANGEABLE_ON_RESUME | changeable_settings
    if args.lr_schedule != "constant":  # The learning rate depends on the number of steps.
        changeable -= {"num_steps"}
    arguments = args.recorded_values
    if args.pass_rates:
        # A file of other pass rates selects other problems, so a run cannot go on with it.
        arguments["sha256_of_pass_rates"] = sha256(Path(args.pass_rates))
    defaults = defaults_of_flags(RLArgs) | {name: own.default for name, own in own.items()}
    return configuration(
        RunConfig,
        args,
        default_name=default_run_name(args),
        command="train_rl",
        arguments=arguments,
        changeable=changeable,
        setting=REPRODUCIBILITY_SETTING,
        compares_rewards=not args.learner_of_equal_groups,
        defaults=defaults | {"reward": args.default_reward},
    )

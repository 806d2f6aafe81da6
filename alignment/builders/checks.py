"""What can be said of arguments before a model, or a tensor library, is loaded."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from alignment.args import (
    CHANGEABLE_ON_RESUME,
    REPRODUCIBILITY_SETTING,
    Args,
    RLArgs,
    SFTArgs,
    configuration,
    refuse_missing_warm_start,
)
from alignment.builders.held_out import held_out_arguments
from alignment.config.data import ALL_PASS_RATES
from alignment.config.flag import defaults_of_flags
from alignment.config.settings import flag_values, own_flags
from alignment.core.advantages import ADVANTAGES
from alignment.core.losses import LOSSES
from alignment.core.records import Endless, Problem, Problems
from alignment.data.pass_rates import PassRates, problems_in_band, read_band, read_pass_rates
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
from alignment.data.tasks.own_data import Demonstration
from alignment.model.vocabulary import read_vocabulary, refuse_other_vocabulary
from alignment.planning.placement import Roles, assign_roles, with_teacher
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import POLICIES
from alignment.rewards.rules import (
    RULES,
    Reward,
    check_reward_name,
    find_reward,
    find_rule,
    try_reward,
)
from alignment.runs.run import RunConfig
from alignment.runs.run_folder import plain_name, refuse_taken_name, resumed_run_name
from alignment.sampling.sampler import check_sampler_url, find_engine, named_engine
from alignment.system.errors import UserError, in_words
from alignment.system.files import read_json, try_writing
from alignment.system.gpus import has_gpu_files, unusable_driver
from alignment.system.manifests import MANIFEST, find_damage, sha256
from alignment.system.registry import find
from alignment.system.torchrun import PROCESSES, PROCESSES_HERE

# Models that `alignment.data.embedded` builds without a download.
EMBEDDED = ("tiny", "tiny_student", "smollm2")
EMBEDDED_CHATS = ("smollm2",)  # those of them with a chat template
# Files of a tokenizer's chat templates; older ones have them in tokenizer_config.json.
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check(args: Args) -> Task:
    """The task that --task names. Raises `UserError` for a task, reward, template, sampler, output
    folder or policy that cannot be."""
    check_fields(find_task(args.task, args.data))
    task = args.task_in_format
    check_reward_name(args.reward, task.rules, args.reward_timeout)
    read_template(task.prompt)
    read_system_prompt(args.system_prompt)
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
    if args.sampler_url:
        token = os.environ.get("ALIGNMENT_SAMPLER_TOKEN", "")
        for url in args.sampler_url.split(","):
            check_sampler_url(url, token)
    if args.resume:
        resumed_run_name(args.output_dir, args.run_name, default_run_name(args))
    else:
        refuse_taken_name(
            args.output_dir, args.run_name, "continue it with --resume or name another"
        )
        refuse_missing_warm_start(args)
        if args.sft_base:
            check_model_path(args.sft_base, "--sft_base", made=args.auto_sft)
        check_chat_template(task, args.sft_base, "--sft_base")
        if not args.sft_base or not Path(args.sft_base).exists():
            check_model_path(args.model, "--model")
            check_chat_template(task, args.model)
    check_teacher(args)
    check_test_split(task, args.dataset_path, args.max_problems)
    check_held_out(args)
    training = check_pass_rates(args, check_training_split(task, args.dataset_path))
    check_reward(args, task, reward, training[0])
    # This comes last, because it may load torch to count the GPUs.
    check_kernels(args, devices_of_ranks(args, roles_of(args).policy))


def check_evaluation_rule(args: Args, task: Task) -> None:
    """Raise `UserError` where --eval_rule is no rule, or one that cannot grade the task."""
    name = args.eval_rule
    rules_of_task = find_task(args.task, args.data).rules
    fitting = [*task.rules, *rules_of_task]
    if "r1_zero" in rules_of_task:
        fitting += BOXED_RULES  # Whatever the prompt asks for, they look for a number.
    if not name or name in fitting:
        return
    if name in RULES:
        raise UserError(
            f"--eval_rule {name}: it does not fit --task {args.task}, which is graded by"
            f" {' or '.join(dict.fromkeys(fitting))}"
        )
    find("--eval_rule", name, RULES, wrap=lambda function: function)


def check_held_out(args: RLArgs | SFTArgs) -> None:
    """Check the tasks of --eval_tasks, as `check` does, and read their test problems."""
    for prefix, task_args in held_out_arguments(args).items():
        if prefix:
            task = check(task_args)
            problems = check_test_split(task, task_args.dataset_path, task_args.max_problems)
            check_rules(task_args, task, problems)


def check_teacher(args: RLArgs) -> None:
    """Raise `UserError` where there is no model of --teacher, or where its tokenizer's files or its
    vocabulary's size do not suit the policy's. What is not on this machine, or made later, is
    compared where it is loaded."""
    if not args.teacher:
        return
    check_model_path(args.teacher, "--teacher")
    has_warm_start = args.sft_base and Path(args.sft_base).exists()
    policy = args.sft_base if has_warm_start else args.model
    vocabularies = []
    for name in (policy, args.teacher):
        folder = Path(name).expanduser()
        if name in EMBEDDED:
            folder = Path(args.output_dir) / f"{name}_base"
        vocabularies.append(read_vocabulary(folder))
    policys, teachers = vocabularies
    if policys is not None and teachers is not None:
        refuse_other_vocabulary(args.teacher, teachers, policys)


def check_loss(args: RLArgs) -> None:
    """Try a loss and an advantage of the user's own on made-up responses. Raises `UserError` where
    no update can be made of what they give."""
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
            try_reward(Reward(find_rule(name, args.reward_timeout)), problems[0])


def check_output(folder: str | Path, name: str = "room") -> None:
    """Raise `UserError` where `folder`, which may not exist yet, cannot be written, or its disk is
    full, or where nothing in it can have that `name`."""
    try:
        try_writing(Path(folder), name)
    except OSError as error:
        raise UserError(
            f"{in_words(error)}: nothing could be saved there; name another folder, or make room"
        ) from None


def check_test_split(task: Task, dataset_path: str, max_problems: int) -> list[Problem]:
    """The first `max_problems` (0: all) distinct test questions. Prints how many repeat. Raises
    `UserError` for bad data."""
    try_rows(task, "problems", "test", dataset_path)
    number = len(task.test_split(dataset_path))
    problems = task.test_problems(dataset_path)
    if len(problems) < number:
        repeated = f"{number - len(problems)} of {number} questions twice or more"
        print(f"the test split has {repeated}: each is asked once", file=sys.stderr)
    return problems[: max_problems or None]


def check_training_split(task: Task, dataset_path: str) -> Problems:
    """The training problems that ask what no test problem asks; prints how many do. Raises
    `UserError` for none or bad data."""
    try_rows(task, "problems", "train", dataset_path)
    problems = task.problems("train", dataset_path)
    kept = task.training_problems(dataset_path)
    if not isinstance(problems, Endless) and not isinstance(kept, Endless):
        _print_left_out(len(problems), len(kept), "training problems")
    return kept


def check_pass_rates(args: RLArgs, problems: Problems) -> Problems:
    """Those of a task's training problems that --pass_rate_band keeps; prints how many they are,
    and where the file is of another task or model. Raises `UserError` for a file that is not there
    or damaged, and where no problem is kept."""
    if not args.pass_rates:
        if args.pass_rate_band != ALL_PASS_RATES:
            raise UserError(
                f"--pass_rate_band {args.pass_rate_band}: needs --pass_rates FILE, which"
                " `rejection_sample` and `evaluate` write with several samples a problem"
            )
        return problems
    band = read_band(args.pass_rate_band)
    assert band is not None  # The arguments are checked when they are made.
    rates = read_pass_rates(args.pass_rates)
    selection = problems_in_band(problems, rates, band)
    _print_other_source(args, rates)
    number = len(selection.kept) + len(selection.outside) + selection.unmeasured
    left_out = []
    if selection.outside:
        least, most = min(selection.outside), max(selection.outside)
        left_out.append(f"{len(selection.outside)} have other rates, {least:.2f} .. {most:.2f}")
    if selection.unmeasured:
        left_out.append(f"{selection.unmeasured} are not in {args.pass_rates}")
    kept = len(selection.kept) or "none"
    reasons = "".join(f"; {reason}" for reason in left_out)
    line = f"--pass_rate_band {args.pass_rate_band} keeps {kept} of {number} training problems"
    if not selection.kept:
        raise UserError(f"{line}{reasons}: choose another band, or measure this --task's problems")
    print(f"{line}{reasons}", file=sys.stderr)
    return selection.kept


def _print_other_source(args: RLArgs, rates: PassRates) -> None:
    """Print where pass rates were measured on another task, or of another model than the run starts
    from."""
    start = args.sft_base or args.model
    if rates.tasks and args.task not in rates.tasks:
        print(
            f"--pass_rates {args.pass_rates}: measured on --task {', '.join(rates.tasks)}, and this"
            f" run's is {args.task}",
            file=sys.stderr,
        )
    if rates.model and Path(rates.model) != Path(start):
        print(
            f"--pass_rates {args.pass_rates}: measured of {rates.model}, and this run starts from"
            f" {start}",
            file=sys.stderr,
        )


def _print_left_out(number: int, kept: int, noun: str) -> None:
    """Print how many of `number` rows are left out because a test problem asks the same. Raises
    `UserError` where none is kept."""
    if not number:
        raise UserError(f"the task's data hold no {noun}")
    if not kept:
        raise UserError(
            f"every one of {number} {noun} asks what a test problem asks: none is left to train on"
        )
    if kept < number:
        print(
            f"{number - kept} of {number} {noun} ask what a test problem asks: they are left out",
            file=sys.stderr,
        )


def check_sft(args: SFTArgs) -> Mapping[str, Sequence[Demonstration]]:
    """The demonstrations of "train" and "test". Raises `UserError` as `check`, for a taken folder,
    no base model, bad data."""
    target = Path(args.sft_base)
    if target.exists() and not args.preview:
        raise UserError(
            f"--sft_base {args.sft_base} exists already: delete it, or name another folder"
        )
    task = check(args)
    check_model_path(args.model, "--model")
    check_chat_template(task, args.model)
    if args.resume:
        resumed_run_name(str(target.parent), args.run_name, f"{target.name}_unfinished")
    if not args.preview:
        check_output(target.parent, target.name)
    check_rules(args, task, check_test_split(task, args.dataset_path, args.max_problems))
    check_held_out(args)
    if not args.demonstrations:
        try_rows(task, "demonstrations", "train", args.dataset_path, args.seed)
    training = _read_demonstrations(args, task, "train")
    kept = task.untested(training, args.dataset_path)
    _print_left_out(len(training), len(kept), "demonstrations")
    splits = {"train": kept, "test": _read_demonstrations(args, task, "test") or kept}
    check_kernels(args, devices_of_ranks(args, roles_of(args).policy))
    return splits


def _read_demonstrations(args: SFTArgs, task: Task, split: Split) -> Sequence[Demonstration]:
    """A split of the files of --demonstrations, or of the task's own."""
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
    return plain_name(f"{args.preset}_{args.loss_type}_seed{args.seed}")


def run_config(args: RLArgs) -> RunConfig:
    """The folder and schedule of the run, and the contents of its args.json."""
    own = own_flags(args)
    changeable_settings = {name for name, flag in own.items() if flag.facts.changeable}
    changeable = CHANGEABLE_ON_RESUME | changeable_settings
    if args.lr_schedule != "constant":  # The learning rate depends on the number of steps.
        changeable -= {"num_steps"}
    arguments = flag_values(args)
    if args.pass_rates:
        # A file of other pass rates selects other problems, so a run cannot go on with it.
        arguments["sha256_of_pass_rates"] = sha256(Path(args.pass_rates))
    return configuration(
        RunConfig,
        args,
        default_name=default_run_name(args),
        command="train_rl",
        arguments=arguments,
        changeable=changeable,
        setting=REPRODUCIBILITY_SETTING,
        defaults=defaults_of_flags(RLArgs) | {name: own.default for name, own in own.items()},
    )


def roles_of(args: Args, num_gpus: int | None = None) -> Roles:
    """Which device each role has, by the flags and the number of GPUs; None: those that are
    visible. Raises `UserError` where that cannot work."""
    if num_gpus is None:
        num_gpus = visible_gpus()
    claims_gpu = named_engine(args.sampler).claims_gpu
    roles = assign_roles(
        num_gpus,
        ",".join(args.sample_device) or None,
        args.reference_model_device,
        args.eval_device,
        args.policy_devices,
        claims_gpu,
    )
    if isinstance(args, RLArgs) and args.teacher:
        roles = with_teacher(roles, args.teacher_device, num_gpus, bool(args.policy_devices))
    number = len(roles.sample)
    parallel = args.sampler_tensor_parallel
    if parallel > 1 and not claims_gpu:
        raise UserError(
            f"--sampler_tensor_parallel {parallel}: only vLLM takes several devices; choose"
            " --sampler vllm"
        )
    if number % parallel:
        named = f"{number} ({' '.join(roles.sample)}); name {parallel} for each engine"
        raise UserError(f"--sampler_tensor_parallel {parallel}: --sample_device names {named}")
    return roles


def devices_of_ranks(args: Args, devices: tuple[str, ...]) -> tuple[str, ...]:
    """The device of each of this machine's ranks: --policy_ranks of the policy's devices, or of
    torchrun's processes; ranks without GPUs share the CPU. Raises `UserError` where there are too
    few devices."""
    number = PROCESSES_HERE or args.policy_ranks or len(devices)
    if args.policy_ranks not in (0, number):
        raise UserError(
            f"--policy_ranks {args.policy_ranks}: torchrun has started {number} processes here;"
            " leave the flag out"
        )
    if devices == ("cpu",):
        return devices * number
    if number > len(devices):
        raise UserError(
            f"--policy_ranks {number}: the policy has {len(devices)} devices ({', '.join(devices)})"
        )
    return devices[:number]


def check_processes(args: Args, kind: str) -> None:
    """Raise `UserError` for an unknown kind of policy, several processes of a policy that is one,
    and an optimiser that it does not take."""
    names = dict.fromkeys(("auto", *POLICIES), "")
    find("--policy_parallelism", kind, names, wrap=lambda policy_class: policy_class)
    # "auto" becomes a kind that fits the processes; of a user's own class nothing is known.
    policy = POLICIES.get(kind)
    if policy is None:
        return
    several = _several_processes(args)
    if several and not policy.ranked:
        raise UserError(f"{several}: a policy that is {kind} is one process")
    optimizer = getattr(args, "optimizer", "")
    if optimizer in policy.refused_optimizers:
        *others, last = (name for name in OPTIMIZERS if name not in policy.refused_optimizers)
        raise UserError(
            f"--optimizer {optimizer}: a {kind} policy takes {', '.join(others)} or {last}"
        )


def _several_processes(args: Args) -> str:
    """What asks for several processes of the policy; empty where nothing does."""
    for flag in ("machines", "policy_ranks"):
        number = getattr(args, flag, 1)
        if number > 1:
            return f"--{flag} {number}"
    if PROCESSES > 1:
        return f"torchrun has started {PROCESSES} processes"
    return ""


def check_kernels(args: Args, devices: tuple[str, ...]) -> None:
    """Raise `UserError` where --compile finds no compiler, or where Liger's kernels cannot run on
    the policy's `devices`."""
    on_cpu = devices[0] == "cpu"
    kind = POLICIES.get(args.policy_parallelism)
    is_split = len(devices) > 1 and kind is not None and not kind.ranked
    if args.use_liger_kernel and (on_cpu or is_split):
        remedy = "leave the flag out"
        if is_split:
            remedy = "choose --policy_parallelism sharded"
        raise UserError(
            "--use_liger_kernel needs a GPU for each process of the policy, not"
            f" {' '.join(devices)}: {remedy}"
        )
    if not args.compile and not args.use_liger_kernel:
        return
    # torch compiles C++ for a CPU, and launchers of Triton's kernels, in C, for a GPU.
    variable = "CC"
    compilers = ["gcc", "clang"]
    needed_packages = ""
    has_packages = True
    if on_cpu:
        variable = "CXX"
        compilers = ["g++"]
    else:
        needed_packages = " and triton"
        has_packages = find_spec("triton") is not None
    if variable in os.environ:
        compilers = [os.environ[variable]]
    if not any(map(shutil.which, compilers)) or not has_packages:
        flag = "--compile" if args.compile else "--use_liger_kernel"
        raise UserError(
            f"{flag} needs {compilers[0]}{needed_packages}: install that, or leave the flag out"
        )


def visible_gpus() -> int:
    """The number of GPUs that torch sees. Raises `UserError` where the machine has some that torch
    cannot use."""
    if not has_gpu_files():
        return 0
    fault = unusable_driver()
    if fault:
        raise UserError(
            f"{fault}. Update the driver, or hide the GPUs by CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    import torch  # Here, because it takes seconds.

    return torch.cuda.device_count()


def check_model_path(name: str, flag: str, made: bool = False) -> str | None:
    """A local model's folder; None for an embedded or hub one. Raises `UserError` for no model
    there, unless to be `made`."""
    looks_local = (
        name.startswith((".", "/", "~"))
        or name.count("/") != 1
        or Path(name).exists()
        or Path(name).parent.is_dir()
    )
    if name in EMBEDDED or not looks_local:
        return None
    folder = Path(name).expanduser()
    if (folder / "final" / "config.json").is_file():
        raise UserError(
            f"{flag} {name}: is a run's folder; name the model in it, {folder / 'final'}"
        )
    will_be_made = made and not folder.exists()
    if not (folder / "config.json").is_file() and not will_be_made:
        choices = (
            '"tiny", "smollm2", a Hugging Face folder, or a hub name such as Qwen/Qwen2.5-Math-1.5B'
        )
        raise UserError(
            f"{flag} {name}: no model folder (with a config.json) is there; give {choices}"
        )
    return str(folder)


def check_chat_template(task: Task, model: str, flag: str = "--model") -> None:
    """Raise `UserError` where the prompt is `chat` and the model's tokenizer is known to have no
    chat template."""
    if task.prompt == CHAT and has_chat_template(model) is False:
        raise UserError(
            f"--prompt chat: the tokenizer of {flag} {model} has no chat template; choose"
            " --prompt boxed, which asks a base model for the same, or another model"
        )


def has_chat_template(model: str) -> bool | None:
    """Whether the tokenizer of a model has a chat template, read from its files without a library;
    None where they are not on this machine."""
    if model in EMBEDDED:
        return model in EMBEDDED_CHATS
    folder = Path(model).expanduser()
    if any((folder / name).exists() for name in TEMPLATE_FILES):
        return True
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    return bool(read_json(config).get("chat_template"))


def resolve_model(name: str, output_dir: str, flag: str = "--model") -> str:
    """A name that `from_pretrained` takes: embedded models are built on first use, folders must
    hold a whole model."""
    if name in EMBEDDED:
        from alignment.data.embedded import embedded_model  # Here, because it loads torch.

        return str(embedded_model(name, output_dir))
    folder = check_model_path(name, flag)
    if folder is None:
        return name
    if (Path(folder) / MANIFEST).exists():
        fault = find_damage(Path(folder))
        if fault:
            raise UserError(
                f"{flag} {name}: {fault}; if you changed it on purpose, delete its {MANIFEST}"
            )
    return folder

"""Faults that show only where something comes again, for `benchmarks.plants`: a further
micro-batch, mini-batch, epoch, pass or step, a rank, a group of two, a run that is resumed."""

import json

from benchmarks.plant import (
    AHEAD,
    FOUND_AT_LOAD,
    SEVERAL_MINI_BATCHES,
    SEVERAL_UPDATES,
    SHARDED,
    WITH_ADAPTERS,
    WITH_REFILLS,
    WITH_RESETS,
    WITH_STATE,
    of_file,
)
from benchmarks.plants_of_results import OWN_ROWS, RESUMED, SUMS, WITH_OWN_ROWS

RATES = "rates.jsonl"
WITH_RATES = ("--pass_rates", RATES, "--pass_rate_band", "0.2-0.8")
# A fifth of the problems has each rate from 0 to 1.
RATES_OF_ROWS = {
    RATES: "".join(
        json.dumps({"question": f"What is {text}?", "samples": 4, "correct": number % 5}) + "\n"
        for number, text in enumerate(SUMS)
    )
}

PIECES = [
    *of_file(
        "core/tokens.py",
        (
            "micro-batches as wide as their first row",
            "    width = int(mask.any(dim=0).nonzero().max()) + 1\n",
            "    width = int(mask[0].nonzero().max()) + 1\n",
        ),
        (
            "the first row of each further micro-batch left out",
            "                pieces.append([])\n                budget = most_tokens\n",
            "                pieces.append([])\n                budget = most_tokens\n"
            "                if len(pieces) > 1:\n                    continue\n",
        ),
    ),
    *of_file(
        "model/short_rows.py",
        (
            "responses that see the padding of shorter prompts",
            "is_prefix_XQP = (prefix_XP >= 0)",
            "is_prefix_XQP = (prefix_XP >= -1)",
            (),
            FOUND_AT_LOAD,
        ),
    ),
    *of_file(
        "core/text.py",
        (
            "stop strings that are looked for in the last token alone",
            "tail = self._decode(visible[-most_bytes - 1 :])",
            "tail = self._decode(visible[-1:])",
        ),
    ),
    *of_file(
        "training/results.py",
        (
            "reported sums of the first micro-batch alone",
            ".item() for result in results]",
            ".item() for result in results[:1]]",
        ),
    ),
]

UPDATES = [
    *of_file(
        "training/update.py",
        (
            "a second epoch in the order of the step after",
            'seed = f"update {config.data_seed} {step} {epoch}"',
            'seed = f"update {config.data_seed} {step + epoch}"',
        ),
        (
            "reported figures of a step's last mini-batch alone",
            "        stepped += results\n",
            "        stepped = results\n",
            SEVERAL_MINI_BATCHES,
        ),
        (
            "skipped updates that no step reports",
            '"bad_updates": len(bad)}',
            '"bad_updates": 0}',
        ),
        (
            "a reported share of computed tokens that is of one epoch's",
            "rollout.batch.labels.numel() * config.epochs_per_rollout",
            "rollout.batch.labels.numel()",
            SEVERAL_UPDATES,
        ),
        (
            "a reference that is asked before its reset",
            'if name == "reference" and reset_of_step != self._last_reset:',
            "if False:",
            (*AHEAD, *WITH_RESETS),
        ),
    ),
    *of_file(
        "training/preparation.py",
        (
            "the same random numbers in each update's selection",
            'derived_seed("selection", config.seed, number)',
            'derived_seed("selection", config.seed)',
            ("--token_selection", "clip_cov", "--covariance_low", "0.1"),
        ),
    ),
    *of_file(
        "core/selection.py",
        (
            "one more token selected than the share is",
            "return max(1, int(share * tokens))",
            "return max(1, int(share * tokens) + 1)",
            ("--token_selection", "top_entropy"),
        ),
    ),
    *of_file(
        "config/commands.py",
        (
            "old log-probs of the trainer for samples of stale weights",
            '(self.staleness > 0 or self.old_log_probs == "sampler")',
            '(self.old_log_probs == "sampler")',
            (*AHEAD, *SEVERAL_UPDATES),
        ),
    ),
]

GROUPS = [
    *of_file(
        "core/advantages.py",
        (
            "a problem's second group in a step that sees its first",
            "        baselines.append(averages.get(problem, mean))\n    baseline_P1",
            "        baselines.append(averages.get(problem, mean))\n"
            "        averages[problem] = mean\n"
            "    baseline_P1",
            WITH_STATE,
        ),
        (
            "groups with the problems of other groups",
            "tuple(problems[:: config.group_size])",
            "tuple(problems[: len(rewards_PG)])",
            WITH_STATE,
        ),
        (
            "a baseline of groups of two that counts both",
            "    others_P1 = (number_P1 - 1).clamp(min=1)\n",
            "    others_P1 = (number_P1 - 1).clamp(min=2)\n",
            ("--baseline", "leave_one_out", "--group_size", "2"),
        ),
    ),
    *of_file(
        "rewards/rules.py",
        (
            "votes of all problems that are counted as one's",
            "                votes.setdefault(problem.id, Counter())[answer] += 1\n"
            "        values: list[float | None] = []\n"
            "        for problem, answer in zip(problems, answers, strict=True):\n"
            "            is_majority = answer is not None and votes[problem.id]",
            '                votes.setdefault("", Counter())[answer] += 1\n'
            "        values: list[float | None] = []\n"
            "        for problem, answer in zip(problems, answers, strict=True):\n"
            '            is_majority = answer is not None and votes[""]',
            ("--reward", "majority_vote"),
        ),
    ),
    *of_file(
        "rollouts/config.py",
        (
            "a step over the end of a pass in that pass's order",
            "_order_of_pass(data_seed, pass_number, size)",
            "_order_of_pass(data_seed, places[0] // size, size)",
            ("--num_problems", "18"),
        ),
        (
            "refills that may ask a problem twice",
            "return rng.sample(problems, min(number, len(problems)))",
            "return rng.choices(problems, k=min(number, len(problems)))",
            (*WITH_REFILLS, "--num_problems", "18"),
        ),
    ),
    *of_file(
        "data/pass_rates.py",
        (
            "problems that are easier than --pass_rate_band",
            "elif band.low <= rate <= band.high:",
            "elif band.low <= rate:",
            (*WITH_OWN_ROWS, *WITH_RATES),
            "",
            {**OWN_ROWS, **RATES_OF_ROWS},
        ),
    ),
    *of_file(
        "data/tasks/countdown.py",
        (
            "questions of Countdown with another target",
            'question = f"{listed} -> {target}"',
            'question = f"{listed} -> {target + 1}"',
            ("--task", "countdown_small"),
        ),
    ),
]

RESUMES = [
    *of_file(
        "builders/training.py",
        (
            "a resumed run whose reset reference is the first one again",
            "    if run.last_reset:\n",
            "    if False:\n",
            (*WITH_RESETS, *RESUMED),
        ),
    ),
    *of_file(
        "runs/run_folder.py",
        (
            "a resumed run that keeps the records of a step which it repeats",
            'record["step"] <= step]',
            'record["step"] <= step + 1]',
            RESUMED,
        ),
    ),
    *of_file(
        "rollouts/source.py",
        (
            "checkpoints with the first alone of several rollouts sampled ahead",
            "for later in range(step + 1, self._steps.stop):\n            if",
            "for later in range(step + 1, min(step + 2, self._steps.stop)):\n            if",
            ("--rollouts", "async", "--max_staleness", "2", "--kill_after", "2"),
        ),
    ),
    *of_file(
        "policy/single_device.py",
        (
            "moments of ranks that are loaded as 0",
            "        load_checkpoint(tensors, storage_reader=reader, no_dist=True)\n",
            "        load_checkpoint(tensors, storage_reader=reader, no_dist=True)\n"
            "    for tensor in tensors.values():\n"
            "        tensor.mul_(tensor.ndim == 0)\n",
            (*SHARDED, *RESUMED),
        ),
    ),
    *of_file(
        "policy/adamw_cpu_offload.py",
        (
            "a loaded offloaded optimiser that counts its steps anew",
            "dict(values) for index, values",
            '{**values, "step": torch.zeros(())} for index, values',
            ("--optimizer", "adamw_cpu_offload"),
        ),
    ),
    *of_file(
        "policy/muon.py",
        (
            "no decay of hidden matrices",
            '        weight.mul_(1 - group["lr"] * group["weight_decay"])\n',
            "",
            ("--optimizer", "muon"),
        ),
    ),
    *of_file(
        "policy/lora.py",
        (
            "random adapters of the proof of arrival that stay",
            "            b.copy_(layer.trained_b)\n",
            "            pass\n",
            WITH_ADAPTERS,
        ),
    ),
]

EVALUATIONS = [
    *of_file(
        "builders/evaluations.py",
        (
            "evaluations a tenth too hot, in 16 bits",
            "        args.evaluation_temperature,\n",
            "        1.1 * args.evaluation_temperature,\n",
            ("--dtype", "bfloat16"),
        ),
    ),
    *of_file(
        "sampling/transformers.py",
        (
            "log-probs of 0 for greedy answers",
            "        log_probs = logits.float().log_softmax(dim=-1)\n",
            "        log_probs = 0 * logits.float()\n",
        ),
    ),
    *of_file(
        "evaluation/accuracy.py",
        (
            "figures of greedy answers in the place of the samples'",
            'record |= {f"{prefix}/{name}": value',
            "record |= {name: value",
        ),
    ),
    *of_file(
        "runs/summary.py",
        (
            "a summary with the warnings of the last step alone",
            'itertools.chain.from_iterable(record["warnings"] for record in metrics)',
            'metrics[-1]["warnings"]',
        ),
    ),
]

PLANTS_OF_REPEATS = [*PIECES, *UPDATES, *GROUPS, *RESUMES, *EVALUATIONS]

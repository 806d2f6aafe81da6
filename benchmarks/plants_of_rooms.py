"""Faults deep in the rooms: an engine's cache, what a checkpoint holds beside weights, passes in
micro-batches, worked solutions, and figures that nothing else is computed from."""

from benchmarks.plant import AHEAD, IN_16_BITS, SEVERAL_SAMPLES, WITH_RESETS, of_file

WITH_RESUME = ("--kill_after", "1")

SAMPLING = [
    *of_file(
        "sampling/transformers.py",
        (
            "samples a tenth too hot, in 16 bits",
            "        uniforms = draw_uniforms(len(prompts), sampling)\n",
            "        uniforms = draw_uniforms(len(prompts), sampling)\n"
            "        hotter = {**vars(sampling), 'temperature': 1.1 * sampling.temperature}\n"
            "        sampling = SamplingConfig(**hotter)\n",
            IN_16_BITS,
        ),
        (
            "attention to the latest eight tokens of a response alone",
            "        return self.keys[:, :, :end], self.values[:, :, :end]\n",
            "        first = max(0, end - 8)\n"
            "        return self.keys[:, :, first:end], self.values[:, :, first:end]\n",
        ),
        (
            "keys and values of other responses once some have ended",
            "self.cache.batch_select_indices(keep)\n",
            "self.cache.batch_select_indices(torch.arange(len(keep), device=keep.device))\n",
            ("--max_new_tokens", "64"),
        ),
    ),
    *of_file(
        "builders/run_plan.py",
        (
            "a sampler in bfloat16",
            "        dtype=compute_dtype(args.dtype, first),\n",
            '        dtype="bfloat16",\n',
        ),
    ),
]
ROLLOUTS = [
    *of_file(
        "rollouts/source.py",
        (
            "checkpoints without the rollouts that are sampled ahead",
            "            if self._schedule.version_for(later) < step:\n",
            "            if self._schedule.version_for(later) < 0:\n",
            (*AHEAD, *WITH_RESUME),
        ),
        (
            "a reported penalty for length with the wrong sign",
            "(length_penalty(completion, config) for completion in completions)\n",
            "(-length_penalty(completion, config) for completion in completions)\n",
            ("--overlong_buffer", "16"),
        ),
    ),
]
RUNS = [
    *of_file(
        "runs/run.py",
        (
            "a reported reference that is a step too new",
            'return {"reference_step": last_reset(step - 1, interval)}',
            'return {"reference_step": last_reset(step, interval)}',
            WITH_RESETS,
        ),
    ),
    *of_file(
        "runs/run_folder.py",
        (
            "log-probs of four digits in the rollouts of a checkpoint",
            "return Completion(tuple(prompt_ids), tuple(token_ids), tuple(log_probs), **others)\n",
            "short = tuple(round(log_prob, 4) for log_prob in log_probs)\n"
            "    return Completion(tuple(prompt_ids), tuple(token_ids), short, **others)\n",
            (*AHEAD, *WITH_RESUME),
        ),
    ),
]
EVALUATIONS = [
    *of_file(
        "evaluation/accuracy.py",
        (
            "a pass@k of answers that are paid in part",
            '[score for score in group.scores if score["reward"] == 1]',
            '[score for score in group.scores if score["reward"] > 0]',
        ),
        (
            "votes of an evaluation that are all for one answer",
            "numbers.setdefault(answer, len(numbers) - 1)",
            "numbers.setdefault(answer, 0)",
            SEVERAL_SAMPLES,
        ),
        (
            "right answers that count as mere format",
            'return "format and answer" if score["answer_reward"] else "format only"',
            'return "format and answer" if score["answer_reward"] > 1 else "format only"',
        ),
    ),
    *of_file(
        "builders/evaluations.py",
        (
            "evaluations that no seed decides",
            "        args.seed,\n    )\n",
            '        int.from_bytes(__import__("os").urandom(3), "big"),\n    )\n',
            WITH_RESUME,
        ),
    ),
]
POLICIES = [
    *of_file(
        "policy/single_device.py",
        (
            "a loaded optimiser that counts its steps anew",
            "            state.setdefault(int(index), {})[key] = tensor\n",
            '            state.setdefault(int(index), {})[key] = tensor * (key != "step")\n',
        ),
    ),
    *of_file(
        "model/recomputation.py",
        (
            "layers that are computed again with half of their gradient",
            "    return checkpoint(forward, *arguments, use_reentrant=False, **options)\n",
            "    first, *others = arguments\n"
            "    first = 0.5 * first + 0.5 * first.detach()\n"
            "    return checkpoint(forward, first, *others, use_reentrant=False, **options)\n",
            ("--gradient_checkpointing",),
        ),
    ),
    *of_file(
        "model/frozen.py",
        (
            "log-probs of a micro-batch's rows in reverse",
            "            values_KBT[:, [rows[i] for i in piece], : part_kbt.shape[2]] = part_kbt\n",
            "            chosen = [rows[i] for i in reversed(piece)]\n"
            "            values_KBT[:, chosen, : part_kbt.shape[2]] = part_kbt\n",
        ),
    ),
]
SOLUTIONS = of_file(
    "data/tasks/arithmetic.py",
    (
        "worked solutions of wrong answers",
        "    answer = steps[-1].result\n",
        "    answer = steps[-1].result + 1\n",
    ),
)

PLANTS_OF_ROOMS = [*SAMPLING, *ROLLOUTS, *RUNS, *EVALUATIONS, *POLICIES, *SOLUTIONS]

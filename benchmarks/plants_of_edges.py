"""Faults at the edges of a run, for `benchmarks.plants`: options that stand at neutral defaults,
work that is cut into pieces, ranks, resets, and the files and splits beside what is trained."""

from benchmarks.plant import (
    AHEAD,
    REPLICATED,
    SEVERAL_UPDATES,
    SHARDED,
    WITH_ADAPTERS,
    WITH_REFERENCE,
    WITH_RESETS,
    of_file,
)

# A warm start of half of the questions, which `verify` makes.
TWO_ENGINES = ("--sample_device", "cpu", "cpu")
WITH_SHARE = ("--sft_base", "taught", "--sft_share", "0.5")

FORMULAS = [
    *of_file(
        "core/losses.py",
        (
            "GMPO's bounds swapped",
            "log_ratio_BT.clamp(-inputs.settings.clip_low, inputs.settings.clip_high)",
            "log_ratio_BT.clamp(-inputs.settings.clip_high, inputs.settings.clip_low)",
        ),
        (
            "DPPO's divergence of the sampled token alone",
            "return p * (old_log_probs - log_probs) + (1 - p) * ((-p).log1p() - (-q).log1p())",
            "return p * (old_log_probs - log_probs)",
        ),
        (
            "a weight of CISPO that has a gradient",
            "ratio_BT = (inputs.log_probs.detach() - old_log_probs).exp()",
            "ratio_BT = (inputs.log_probs - old_log_probs).exp()",
        ),
        (
            "a dual clip of positive advantages",
            '.where(advantages < 0, float("-inf"))',
            '.where(advantages > 0, float("-inf"))',
        ),
        (
            "a geometric mean over padding, too",
            "    tokens_B1 = mask.sum(dim=1, keepdim=True)\n",
            "    tokens_B1 = mask.shape[1]\n",
        ),
    ),
    *of_file(
        "core/advantages.py",
        (
            "a std of the batch that has responses which do not count",
            "std = DEVIATIONS[config.std_of](squares_P1, number_P1, inputs.rewards_PG[counted_PG])",
            "std = DEVIATIONS[config.std_of](squares_P1, number_P1, inputs.rewards_PG.flatten())",
        ),
        (
            "wrong responses with a positive weight",
            "_signed(inputs, 1.0, settings.negative_weight, settings.threshold)",
            "_signed(inputs, 1.0, -settings.negative_weight, settings.threshold)",
        ),
        (
            "right responses that no positive weight counts",
            "_signed(inputs, settings.positive_weight, 1.0, settings.threshold)",
            "_signed(inputs, 0.0, 1.0, settings.threshold)",
        ),
    ),
    *of_file(
        "core/schedules.py",
        (
            "a linear fall to 0",
            "    return 1 - FALL * done / updates\n",
            "    return 1 - done / updates\n",
            ("--lr_schedule", "linear", "--warmup_steps", "0"),
        ),
    ),
]

UPDATES = [
    *of_file(
        "training/update.py",
        (
            "the limit of stale samplers for all",
            "    bound = max(limit, STALE_MISMATCH) if steps_old else limit\n",
            "    bound = max(limit, STALE_MISMATCH)\n",
        ),
        (
            "a schedule that counts a step for an update",
            "    previous_updates = (step - 1) * config.updates_per_rollout\n",
            "    previous_updates = step - 1\n",
            (*SEVERAL_UPDATES, "--lr_schedule", "linear"),
        ),
        (
            "a reference's log-probs before the truncation",
            "            distribution = self.config.loss_distribution\n",
            "            distribution = Distribution(self.config.distribution.temperature)\n",
            (*WITH_REFERENCE, "--sampling_top_p", "0.8"),
        ),
        (
            "a token mean over responses of the longest one's length",
            "    lengths = rollout.lengths\n    denominator",
            "    lengths = [max(rollout.lengths)] * len(rollout.lengths)\n    denominator",
            ("--loss_normalization", "token_mean", "--max_new_tokens", "64"),
        ),
    ),
    *of_file(
        "config/commands.py",
        (
            "a schedule of half of the run's updates",
            "return self.num_steps * self.updates_per_rollout",
            "return max(1, self.num_steps * self.updates_per_rollout // 2)",
            ("--lr_schedule", "linear", *SEVERAL_UPDATES),
        ),
    ),
]

POLICIES = [
    *of_file(
        "policy/single_device.py",
        (
            "vectors left out of the clip",
            "torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)",
            "torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.ndim > 1],"
            " max_norm)",
            ("--max_grad_norm", "0.01"),
        ),
        (
            "a reset that leaves the number of steps",
            "        self.optimizer.state.clear()\n",
            "        for state in self.optimizer.state.values():\n"
            "            state['exp_avg'].zero_()\n"
            "            state['exp_avg_sq'].zero_()\n",
            (*WITH_RESETS, "--reference_reset_optimizer"),
        ),
        (
            "each rank's part clipped by its own norm",
            "        return whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(),"
            " max_norm))\n",
            "        parts = [own_part(p.grad) for p in self.model.parameters()]\n"
            "        norm = torch.nn.utils.get_total_norm(parts)\n"
            "        for part in parts:\n"
            "            part.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))\n"
            "        return norm\n",
            (*SHARDED, "--max_grad_norm", "0.01"),
        ),
    ),
    *of_file(
        "policy/sharded.py",
        (
            "a denominator of the rows of each rank",
            "        results = super().accumulate(batch, self._own_rows(batch, rows), objective)\n",
            "        own_rows = self._own_rows(batch, rows)\n"
            "        own = dataclasses.replace(objective.loss, denominator=len(own_rows) or 1)\n"
            "        objective = dataclasses.replace(objective, loss=own)\n"
            "        results = super().accumulate(batch, own_rows, objective)\n",
            REPLICATED,
        ),
        (
            "reports of the first rank alone",
            "        return list(chain.from_iterable(by_rank or []))\n",
            "        return list(chain.from_iterable((by_rank or [])[:1]))\n",
            REPLICATED,
        ),
    ),
    *of_file(
        "policy/lora.py",
        (
            "adapters whose config has another alpha",
            '        model.peft_config["default"].save_pretrained(folder / ADAPTER)\n',
            '        config = __import__("copy").copy(model.peft_config["default"])\n'
            "        config.lora_alpha *= 2\n"
            "        config.save_pretrained(folder / ADAPTER)\n",
            WITH_ADAPTERS,
        ),
        (
            "adapters of which A is frozen",
            "        inject_adapter_in_model(lora, model)\n",
            "        inject_adapter_in_model(lora, model)\n"
            "    for name, parameter in model.named_parameters():\n"
            '        parameter.requires_grad_("lora_B" in name)\n',
            WITH_ADAPTERS,
        ),
        (
            "resumed adapters that are the first ones",
            "        parameter.copy_(saved[name])\n"
            "    for name, weight in merged_weights(model):\n",
            "        saved[name]\n    for name, weight in ():\n",
            (*WITH_ADAPTERS, "--kill_after", "1"),
        ),
    ),
    *of_file(
        "model/saving.py",
        (
            "a saved model that never ends",
            "    if generation is not None:\n",
            "    if generation is not None:\n"
            '        generation = __import__("copy").copy(generation)\n'
            "        generation.eos_token_id = 2\n",
        ),
    ),
    *of_file(
        "model/log_probs.py",
        (
            "a head's gradient of the last piece of rows alone",
            "                    to_weight = added_product(\n"
            "                        to_weight, by_logits.T,",
            "                    to_weight = added_product(\n"
            "                        None, by_logits.T,",
        ),
        (
            "the first labels for each piece of rows",
            "        kept = sampling_logits(z, **vars(distribution), keep=labels_N[rows])\n",
            "        kept = sampling_logits(z, **vars(distribution), keep=labels_N[: len(z)])\n",
            ("--sampling_top_p", "0.8"),
        ),
    ),
]

SAMPLING = [
    *of_file(
        "sampling/transformers.py",
        (
            "the first random numbers for each wave of prompts",
            "uniforms_of_rows = uniforms[wave].flatten(0, 1)",
            "uniforms_of_rows = uniforms[: len(wave)].flatten(0, 1)",
        ),
        (
            "responses in the order of the lengths of their prompts",
            "                prompt = wave[number // sampling.n]\n                groups[prompt]",
            "                prompt = number // sampling.n\n                groups[prompt]",
        ),
    ),
    *of_file(
        "sampling/pool.py",
        (
            "engines that all draw the first prompts' random numbers",
            "first_prompt=sampling.first_prompt + first)",
            "first_prompt=sampling.first_prompt)",
            TWO_ENGINES,
        ),
        (
            "weights for the first engine alone",
            "        self._on_all_engines(load_or_replace)\n",
            "        load_or_replace(next(iter(self._starts)))\n",
            TWO_ENGINES,
        ),
    ),
    *of_file(
        "rollouts/source.py",
        (
            "weights that wait for the sampler in bfloat16",
            "                cast = tensor.detach().to(self._dtype)\n",
            "                cast = tensor.detach().bfloat16().to(self._dtype)\n",
            AHEAD,
        ),
    ),
    *of_file(
        "rollouts/config.py",
        (
            "versions of the weights that are rounded down",
            "        syncs = -(-oldest_allowed // self.sync_every)  # Ceiling division.\n",
            "        syncs = oldest_allowed // self.sync_every\n",
            (*AHEAD, "--sync_every", "2"),
        ),
    ),
    *of_file(
        "model/frozen.py",
        (
            "a reference in another process that keeps its weights",
            "        model.reload(path)\n",
            "        pass\n",
            (*AHEAD, *WITH_RESETS),
        ),
    ),
]

DATA = [
    *of_file(
        "data/tasks/__init__.py",
        (
            "training on the questions of the warm start",
            "        if not sft_share:\n            return untested\n",
            "        if True:\n            return untested\n",
            WITH_SHARE,
        ),
        (
            "test questions for validation",
            '            asks_validation = eval_split == "validation"\n',
            '            asks_validation = eval_split == "test"\n',
            ("--validation_share", "0.1", "--eval_split", "validation"),
        ),
    ),
    *of_file(
        "builders/evaluations.py",
        (
            "other held-out tasks that ask the questions of --task",
            "prepare_evaluation(evaluation_args, tokenizer, samples)",
            "prepare_evaluation(args, tokenizer, samples)",
            ("--eval_tasks", "countdown_small"),
        ),
    ),
    *of_file(
        "rewards/rules.py",
        (
            "a cosine of length upside down",
            "(1 + math.cos(math.pi * length / settings.longest)) / 2",
            "(1 - math.cos(math.pi * length / settings.longest)) / 2",
            ("--reward", "accuracy:1,cosine_length:0.1"),
        ),
        (
            "tags that may come twice",
            "if turn.count(tag) == 1]",
            "if turn.count(tag) >= 1]",
            ("--reward", "accuracy:1,tag_count:0.1"),
        ),
        (
            "the first number in the place of the last",
            "grade(numbers[-1], ground_truth)",
            "grade(numbers[0], ground_truth)",
            ("--reward", "signed_accuracy:1,signed_format:1"),
        ),
        (
            "a control that pays right answers",
            'score["format_reward"] * (1 - score["answer_reward"])',
            'score["format_reward"] * score["answer_reward"]',
            ("--reward", "inverted"),
        ),
    ),
    *of_file(
        "builders/warm_start.py",
        (
            "a validation loss of the solutions that are trained",
            'validation=encode_demonstrations(args, demonstrations["test"], base, tokenizer),',
            'validation=encode_demonstrations(args, demonstrations["train"], base, tokenizer),',
            (),
            "the loss of the whole warm start is for people to read: nothing is trained or chosen"
            " by it, and `verify` makes steps of its own",
        ),
    ),
]

PLANTS_OF_EDGES = [*FORMULAS, *UPDATES, *POLICIES, *SAMPLING, *DATA]

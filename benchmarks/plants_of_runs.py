"""Faults to plant around the updates of a run: which problems are asked and which responses count,
the loop and what it hands over, checkpoints, evaluations, warm starts, and the engine's requests;
and further ones of advantages, losses and policies."""

from benchmarks.plant import (
    AHEAD,
    REPLICATED,
    SEVERAL_MINI_BATCHES,
    SEVERAL_UPDATES,
    SHARDED,
    WITH_ADAPTERS,
    WITH_REFERENCE,
    WITH_REFILLS,
    WITH_RESETS,
    WITH_SKIPPED,
    WITH_STATE,
    WITH_TEACHER,
    of_file,
)

EACH_NUMBER_ONCE = (
    "each random number still decides one draw, so that samples stay independent; what changes is"
    " that answers depend on when others end, which rounding makes them do as well"
)

GROUPS = [
    *of_file(
        "rollouts/source.py",
        (
            "responses that ended left out, cut-off ones trained",
            'ended = completion.finish_reason == "stop" or not config.skip_unfinished',
            'ended = completion.finish_reason != "stop" or not config.skip_unfinished',
            WITH_SKIPPED,
        ),
        (
            "cut-off responses that are trained on",
            'ended = completion.finish_reason == "stop" or not config.skip_unfinished',
            "ended = True",
            WITH_SKIPPED,
        ),
        (
            "responses without a score that count",
            'return ended and "unscored" not in score',
            "return ended",
        ),
        (
            "groups of equal rewards kept, others replaced",
            "key=lambda group: not is_informative(group, config)",
            "key=lambda group: is_informative(group, config)",
            WITH_REFILLS,
        ),
        (
            "penalties for length that make no group informative",
            'rewards.add(score["reward"] + length_penalty(completion, config))',
            'rewards.add(score["reward"])',
            (*WITH_REFILLS, "--overlong_buffer", "8"),
        ),
        (
            "the sampler's log-probs of a response in reverse",
            "chain.from_iterable(completion.log_probs for completion in completions)",
            "chain.from_iterable(completion.log_probs[::-1] for completion in completions)",
        ),
        (
            "an estimator that forgets its state",
            "advantages_PG, next_state = compute_advantages(inputs, state)",
            "advantages_PG, next_state = compute_advantages(inputs, None)",
            WITH_STATE,
        ),
        (
            "weights that change while the sampler waits for them",
            'copies.append((name, cast.to("cpu", copy=True)))',
            'copies.append((name, cast.to("cpu")))',
            AHEAD,
            "a sampler that takes the weights before the next update changes them has the right"
            " ones: the fault is a race, which the trainer wins on few machines",
        ),
        (
            "new weights of which only the version is sent",
            "        load_proven(self.sampler, policy.weights(), version)\n\n    def sampled_ahead",
            "        self.sampler.policy_version = version\n\n    def sampled_ahead",
            WITH_ADAPTERS,
        ),
    ),
    *of_file(
        "rollouts/config.py",
        (
            "stop strings that no sampler gets",
            "dataclasses.replace(self.sampling, stop=stop, seed",
            "dataclasses.replace(self.sampling, stop=(), seed",
        ),
        (
            "refills by the random numbers of the first request",
            "        if refill:\n            parts.append(refill)",
            "        if False:\n            parts.append(refill)",
            WITH_REFILLS,
        ),
        (
            "problems in the order of the file",
            'random.Random(f"order {seed} {number}").sample(range(size), size)',
            "list(range(size))",
        ),
        (
            "the same order in each pass",
            'random.Random(f"order {seed} {number}")',
            'random.Random(f"order {seed}")',
        ),
        (
            "the same order by every --data_seed",
            'random.Random(f"order {seed} {number}")',
            'random.Random(f"order {number}")',
        ),
        (
            "weights a step staler than --max_staleness",
            "oldest_allowed = step - 1 - self.max_staleness",
            "oldest_allowed = step - 2 - self.max_staleness",
            AHEAD,
        ),
    ),
]

LOOP = [
    *of_file(
        "train_rl.py",
        (
            "the estimator's state lost between steps",
            "run.advantage_state = rollout.advantage_state",
            "run.advantage_state = None",
            WITH_STATE,
        ),
        (
            "an entropy bonus that no step hands on",
            "config = result.config  #",
            "config = parts.update_config  #",
            ("--entropy_target", "2.0"),
        ),
        (
            "the learning rate of the step before",
            "result = update(policy, rollout, config, step, sampled",
            "result = update(policy, rollout, config, max(1, step - 1), sampled",
            ("--warmup_steps", "3"),
        ),
        (
            "no old log-probs",
            "rollout = parts.references.annotate(rollout, policy, step)  # their log-probs",
            "parts.references.annotate(rollout, policy, step)",
            SEVERAL_UPDATES,
        ),
        (
            "the first step's groups trained in every step",
            "rollout = collate_groups(sampled.groups, args",
            "first = locals().setdefault('first', sampled)\n"
            "                rollout = collate_groups(first.groups, args",
        ),
    ),
    *of_file(
        "builders/training.py",
        (
            "a reference that has the adapters in training",
            "            return policy.base_log_probs(batch, distribution)",
            "            return policy.log_probs(batch, distribution)",
            (*WITH_ADAPTERS, *WITH_REFERENCE),
        ),
        (
            "a reference in bfloat16",
            "        model = FrozenModel(folder, device, dtype)\n",
            "        model = FrozenModel(folder, device, torch.bfloat16)\n",
            WITH_REFERENCE,
        ),
        (
            "a resumed run without moments",
            "        policy.load_optimizer(run.checkpoint / TRAINER)",
            "        pass",
            ("--kill_after", "1"),
        ),
    ),
    *of_file(
        "training/update.py",
        (
            "an entropy bonus that no update hands on",
            "        config = prepared.next_config",
            "        config = prepared.config",
            ("--entropy_target", "2.0", *SEVERAL_MINI_BATCHES),
        ),
        (
            "the sampler's log-probs of the row before",
            "sampler_log_probs=take(rollout.sampler_log_probs_BT)",
            "sampler_log_probs=take(rollout.sampler_log_probs_BT.roll(1, 0))",
            ("--sampler_correction", "token_truncate"),
        ),
        (
            "the same order of groups in each epoch",
            'seed = f"update {config.data_seed} {step} {epoch}"',
            'seed = f"update {config.data_seed} {step}"',
            (*SEVERAL_UPDATES, *SEVERAL_MINI_BATCHES),
        ),
        (
            "groups that are not shuffled",
            "shuffled = random.Random(seed).sample(groups, len(groups))",
            "shuffled = groups",
            SEVERAL_MINI_BATCHES,
        ),
        (
            "rows without an advantage left out of the KL penalty",
            "is_penalised = config.loss.beta or selection_adds or",
            "is_penalised = selection_adds or",
            WITH_REFERENCE,
        ),
        (
            "a reference that never takes the policy's weights",
            "        reload(str(checkpoint))\n",
            "",
            WITH_RESETS,
        ),
        (
            "teacher and student swapped",
            "rollout.advantages_B1, teacher_BT, rollout.student_log_probs_BT, weight",
            "rollout.advantages_B1, rollout.student_log_probs_BT, teacher_BT, weight",
            (*WITH_TEACHER, "--sampling_temperature", "0.7"),
        ),
    ),
    *of_file(
        "training/preparation.py",
        (
            "an entropy bonus that falls below the target",
            "following = coefficient + config.entropy_delta",
            "following = coefficient - config.entropy_delta",
            ("--entropy_target", "3.0", *SEVERAL_MINI_BATCHES),
        ),
        (
            "tokens of other mini-batches among the selected",
            "    mask_BT[rows] = rollout.batch.response_mask[rows]\n",
            "    mask_BT = rollout.batch.response_mask.clone()\n",
            ("--token_selection", "top_entropy", *SEVERAL_MINI_BATCHES),
        ),
    ),
]

FORMULAS = [
    *of_file(
        "core/losses.py",
        (
            "reference and policy swapped in the KL penalty's estimate",
            "KL_ESTIMATORS[estimator](reference_log_probs - policy_log_probs)",
            "KL_ESTIMATORS[estimator](policy_log_probs - reference_log_probs)",
            WITH_REFERENCE,
        ),
        (
            "a sequence's weight that is its tokens' mean",
            "    return log_weight_BT.sum(dim=1, keepdim=True).expand_as(log_weight_BT)\n",
            "    return log_weight_BT.mean(dim=1, keepdim=True).expand_as(log_weight_BT)\n",
            ("--sampler_correction", "sequence_truncate"),
        ),
        (
            "an importance weight upside down",
            "log_weight_BT = (old_log_probs - sampler_log_probs).where(mask, 0).detach()",
            "log_weight_BT = (sampler_log_probs - old_log_probs).where(mask, 0).detach()",
            ("--sampler_correction", "token_truncate"),
        ),
        (
            "a KL penalty weighted by the sampler's correction",
            "        loss_BT = loss_BT + config.beta * kl_BT\n",
            "        loss_BT = loss_BT + config.beta * kl_BT * per_token.get('weight', 1)\n",
            (*WITH_REFERENCE, "--sampler_correction", "token_truncate"),
        ),
    ),
    *of_file(
        "core/advantages.py",
        (
            "a mean over responses that do not count",
            "    number_P1 = inputs.counted_PG.sum(dim=1, keepdim=True)\n    sum_P1",
            "    number_P1 = inputs.counted_PG.sum(1, keepdim=True) * 0 + 4\n    sum_P1",
            WITH_SKIPPED,
        ),
        (
            "a moving average that forgets at once",
            "averages[problem] = decay * averages.get(problem, mean) + (1 - decay) * mean",
            "averages[problem] = (1 - decay) * averages.get(problem, mean) + decay * mean",
            WITH_STATE,
        ),
        (
            "a penalty for length from the limit on",
            "excess = max(0, length - (max_new_tokens - buffer))",
            "excess = max(0, length - max_new_tokens)",
            ("--overlong_buffer", "8"),
        ),
    ),
    *of_file(
        "core/schedules.py",
        (
            "a cosine of twice the length",
            "math.cos(math.pi * done / updates)",
            "math.cos(math.pi * done / updates / 2)",
            ("--lr_schedule", "cosine", "--warmup_steps", "0", "--num_steps", "2"),
        ),
    ),
]

POLICIES = [
    *of_file(
        "policy/lora.py",
        (
            "adapters of twice their --lora_alpha",
            "lora_alpha=config.lora_alpha,",
            "lora_alpha=2 * config.lora_alpha,",
            WITH_ADAPTERS,
        ),
        (
            "no adapter on the last layer",
            "    layers = adapted_layers(model, config.lora_targets)\n",
            "    layers = adapted_layers(model, config.lora_targets)\n    layers.popitem()\n",
            WITH_ADAPTERS,
        ),
    ),
    *of_file(
        "policy/single_device.py",
        (
            "a saved model of the weights before the last step",
            "            state_dict = {name: tensor.cpu() for name, tensor in self.weights()}",
            "            state_dict = {n: getattr(self, 'last', {}).get(n, t.cpu()) for n, t in"
            " self.weights()}\n            self.last = state_dict",
            WITH_ADAPTERS,
        ),
        (
            "weights that are rounded to bfloat16 after a step",
            "        self.optimizer.step()\n        self.drop_gradient()",
            "        self.optimizer.step()\n        self.drop_gradient()\n        for p in"
            " self.model.parameters():\n            p.data = p.data.bfloat16().float()",
        ),
        (
            "a micro-batch's loss left out of the backward pass",
            "        loss.backward()\n        self.log_probs",
            "        (loss * (0 not in self.rows)).backward()\n        self.log_probs",
        ),
    ),
    *of_file(
        "model/saving.py",
        (
            "a saved model in bfloat16",
            "            model.save_pretrained(folder, state_dict=state_dict)",
            "            model.save_pretrained(folder, state_dict={n: t.bfloat16() for n, t in"
            " (state_dict or model.state_dict()).items()})",
        ),
    ),
    *of_file(
        "model/loading.py",
        (
            "norms that no copy gets",
            "        if own[name].data_ptr() != tensor.data_ptr():",
            "        if own[name].data_ptr() != tensor.data_ptr() and tensor.ndim > 1:",
            AHEAD,
        ),
    ),
    *of_file(
        "policy/sharded.py",
        (
            "gradients of ranks averaged in the place of a sum",
            "module.set_gradient_divide_factor(1.0)",
            "module.set_gradient_divide_factor(2.0)",
            SHARDED,
        ),
        (
            "gradients summed over ranks after the first micro-batch alone",
            "self.model.set_requires_all_reduce(number == most)",
            "self.model.set_requires_all_reduce(number == 1)",
            REPLICATED,
        ),
        (
            "log-probs of a rank's own rows alone",
            "        dist.all_reduce(values_KBT)  #",
            "        #",
            (*REPLICATED, *WITH_REFERENCE, *SEVERAL_UPDATES),
        ),
        (
            "a row of each group that no rank computes",
            "        rows_of_rank[rank] += numbers\n",
            "        rows_of_rank[rank] += numbers[:-1]\n",
            SHARDED,
        ),
    ),
    *of_file(
        "policy/adamw_cpu_offload.py",
        (
            "second moments in bfloat16",
            "        p.copy_(weight)\n",
            "        p.copy_(weight)\n"
            "        state['exp_avg_sq'].copy_(state['exp_avg_sq'].bfloat16())\n",
            ("--optimizer", "adamw_cpu_offload"),
        ),
    ),
    *of_file(
        "policy/adamw_8bit.py",
        (
            "a signed second moment after a checkpoint",
            'is_signed = moment == "exp_avg"',
            "is_signed = True",
            ("--optimizer", "adamw_8bit"),
            "torchao reads a moment's own table of values, whatever its sign is said to be",
        ),
    ),
]

ANSWERS = [
    *of_file(
        "sampling/transformers.py",
        (
            "all responses that have ended by themselves",
            '"stop" if row.finished else "length"',
            '"stop" if row.finished or True else "length"',
        ),
        (
            "random numbers of later prompts that are the first ones'",
            "    return uniforms[sampling.first_prompt :]",
            "    return uniforms[:prompts]",
        ),
        (
            "random numbers of other rows once some have ended",
            "                    uniforms = uniforms[keep]\n",
            "",
            (),
            EACH_NUMBER_ONCE,
        ),
    ),
    *of_file(
        "core/text.py",
        (
            "answers without their stop string",
            "ends = [text.index(string) + len(string) for string in stop if string in text]",
            "ends = [text.index(string) for string in stop if string in text]",
        ),
        (
            "no end token behind a worked solution",
            "        end = [] if ids[-1:] == [eos] else [eos]\n",
            "        end = []\n",
        ),
    ),
    *of_file(
        "rewards/rules.py",
        (
            "responses graded by another problem's truth",
            "    pairs = list(zip(problems, completions, strict=True))",
            "    pairs = list(zip(problems[::-1], completions, strict=True))",
        ),
        (
            "responses graded by the first problem's truth",
            "        problem = problems[number]\n",
            "        problem = problems[0]\n",
        ),
        (
            "parts of a reward that all weigh 1",
            "terms.append(part.weight * value)",
            "terms.append(value)",
            ("--reward", "accuracy:1,format:0.1"),
        ),
    ),
]

EVALUATIONS = [
    *of_file(
        "builders/evaluations.py",
        (
            "evaluations at the temperature of rollouts",
            "        args.evaluation_temperature,\n",
            "        args.sampling_temperature,\n",
            ("--eval_temperature", "0.5"),
        ),
        (
            "evaluations by another rule",
            "find_evaluation_rule(args.evaluation_rule, args.reward_timeout, args.eval_rule)",
            'find_evaluation_rule("flexible", args.reward_timeout, args.eval_rule)',
        ),
        (
            "evaluations of fewer responses than --eval_samples",
            "    return SamplingConfig(\n        n,\n",
            "    return SamplingConfig(\n        1,\n",
            ("--eval_samples", "4"),
        ),
    ),
    *of_file(
        "evaluation/accuracy.py",
        (
            "evaluations by weights of steps before",
            "        if self.sampler.policy_version != step:",
            "        if False:",
            AHEAD,
        ),
        (
            "a pass@k of one more sample that is wrong",
            "return 1 - math.comb(n - correct, k) / math.comb(n, k)",
            "return 1 - math.comb(n - correct, k) / math.comb(n + 1, k)",
            ("--eval_samples", "4"),
        ),
        (
            "averages of each problem's best answer",
            "        rows.append([score[part] for score in group.scores])",
            "        rows.append([max(score[part] for score in group.scores)] * len(group.scores))",
            ("--eval_samples", "4"),
        ),
    ),
    *of_file(
        "config/commands.py",
        (
            "rollouts that are shorter than --max_new_tokens",
            "            self.sampling_top_k,\n            self.max_new_tokens,\n",
            "            self.sampling_top_k,\n            self.max_new_tokens // 2,\n",
        ),
    ),
]

WARM_STARTS = [
    *of_file(
        "training/sft.py",
        (
            "no clip in the warm start",
            "grad_norm = policy.clip_gradient(config.norm_limit)",
            "grad_norm = policy.clip_gradient(1e9)",
        ),
        (
            "the learning rate of the step after in the warm start",
            "rate = learning_rate(config, step)",
            "rate = learning_rate(config, step + 1)",
        ),
        (
            "a mean over micro-batches in the warm start",
            "return -masked_normalize(log_probs_bt, mask_bt, batch_tokens), {}",
            "return -masked_normalize(log_probs_bt, mask_bt, int(mask_bt.sum())), {}",
        ),
        (
            "worked solutions behind the last whole batch left out",
            "for start in range(0, len(ordered), config.batch_size):",
            "for start in range(0, len(ordered) - config.batch_size, config.batch_size):",
        ),
        (
            "the same order in each epoch of the warm start",
            'random.Random(f"sft {config.seed} {epoch}").shuffle(ordered)',
            'random.Random(f"sft {config.seed}").shuffle(ordered)',
        ),
    ),
    *of_file(
        "data/tasks/arithmetic.py",
        (
            "truths that ignore precedence",
            "last = solve(expression, by_precedence=True)[-1]",
            "last = solve(expression, by_precedence=False)[-1]",
        ),
    ),
]

PLANTS_OF_RUNS = [
    *GROUPS,
    *LOOP,
    *FORMULAS,
    *POLICIES,
    *ANSWERS,
    *EVALUATIONS,
    *WARM_STARTS,
]

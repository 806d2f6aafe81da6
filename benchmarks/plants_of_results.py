"""Faults to plant in prompts, data, number formats, and in what a run reports: `benchmarks.plants`
lists them beside the others."""

import json

from benchmarks.plant import (
    AHEAD,
    IN_16_BITS,
    SEVERAL_MINI_BATCHES,
    SEVERAL_SAMPLES,
    SEVERAL_UPDATES,
    WITH_ADAPTERS,
    WITH_BONUS,
    WITH_REFERENCE,
    WITH_REFILLS,
    WITH_RESETS,
    WITH_STATE,
    WITH_TEACHER,
    WITH_TEMPERATURE,
    WITH_TOP_P,
    of_file,
)

ROWS = "rows.jsonl"
SUMS = ["2 + 3", "4 + 5", "7 - 2", "9 + 8", "6 * 2", "3 + 8", "5 * 5", "8 - 1", "1 + 9", "4 * 7"]
SUMS += ["9 - 4", "2 * 8", "6 + 6", "3 * 9", "7 + 4", "8 + 5", "5 - 3", "9 * 2", "1 + 6", "4 - 2"]
OWN_ROWS = {
    ROWS: "".join(
        json.dumps({"question": f"What is {text}?", "answer": str(eval(text))}) + "\n"
        for text in SUMS
    )
}
WITH_OWN_ROWS = ("--task", f"file:{ROWS}")
RESUMED = ("--kill_after", "1")
NO_DROPOUT = "the tiny model has no dropout, so that nothing is left out by chance"
A_PICTURE = "what a picture shows is not read"

PROMPTS = [
    *of_file(
        "data/prompts/__init__.py",
        (
            "prompts of the bare question",
            "    if not turns:\n        return read_template(name)\n    beginning",
            '    if not turns:\n        return "{question}"\n    beginning',
        ),
        (
            "prompts without the end of their template",
            "    if not turns:\n        return read_template(name)\n    beginning",
            "    if not turns:\n        return read_template(name)[:-8]\n    beginning",
        ),
        (
            "questions in small letters",
            'prompt = before + template.replace("{question}", problem.question)',
            'prompt = before + template.replace("{question}", problem.question.lower())',
        ),
    ),
    *of_file(
        "builders/evaluations.py",
        (
            "evaluations by another prompt than the rollouts'",
            "        problems=_problems_asked(args, problems, tokenizer),",
            "        problems=[__import__('dataclasses').replace(p, prompt=p.prompt + '\\n') for p"
            " in _problems_asked(args, problems, tokenizer)],",
        ),
        (
            "evaluations without stop strings",
            "        args.task_in_format.stop,\n        args.seed,",
            "        (),\n        args.seed,",
        ),
        (
            "evaluations cut off at half of their longest response",
            "    return args.max_new_tokens\n",
            "    return args.max_new_tokens // 2\n",
        ),
        (
            "evaluations of the first problem alone",
            "        problems=_problems_asked(args, problems, tokenizer),",
            "        problems=list(_problems_asked(args, problems, tokenizer))[:1],",
        ),
        (
            "evaluations of each problem twice",
            "        problems=_problems_asked(args, problems, tokenizer),",
            "        problems=2 * list(_problems_asked(args, problems, tokenizer)),",
        ),
        (
            "evaluations without --eval_top_k",
            "        args.evaluation_top_k,\n",
            "        0,\n",
            ("--eval_top_k", "5"),
        ),
    ),
    *of_file(
        "builders/held_out.py",
        (
            "greedy evaluations that are drawn",
            "eval_temperature=0.0, eval_greedy=False",
            "eval_temperature=None, eval_greedy=False",
            ("--eval_greedy",),
        ),
    ),
    *of_file(
        "core/text.py",
        (
            "worked solutions without their first token",
            "        taught.append((*ids, *end))",
            "        taught.append((*ids[1:], *end))",
        ),
        (
            "responses that end a token after their stop string",
            "        tail = self._decode(visible[-most_bytes - 1 :])\n",
            "        tail = self._decode(visible[-most_bytes - 2 : -1])\n",
        ),
    ),
]

DATA = [
    *of_file(
        "rollouts/config.py",
        (
            "all problems, whatever --num_problems is",
            "with_short_prompts(problems, max_prompt_tokens, tokenizer)[: num_problems or None]",
            "with_short_prompts(problems, max_prompt_tokens, tokenizer)[:]",
            ("--num_problems", "8"),
        ),
        (
            "all prompts, whatever --max_prompt_tokens is",
            "        if len(ids) <= max_prompt_tokens:",
            "        if len(ids) <= 10 * max_prompt_tokens:",
            ("--max_prompt_tokens", "21"),
        ),
        (
            "weights that are fresher than --max_staleness",
            "oldest_allowed = step - 1 - self.max_staleness",
            "oldest_allowed = step - 1",
            AHEAD,
        ),
    ),
    *of_file(
        "data/tasks/__init__.py",
        (
            "the task's stop strings in the place of --stop",
            "        return replace(self, stop=stop)",
            "        return self",
            ("--stop", "7"),
        ),
        (
            "evaluations of half of --max_problems",
            "self.key, max_problems or None)",
            "self.key, max_problems // 2 or None)",
        ),
    ),
    *of_file(
        "data/tasks/own_data.py",
        (
            "rows with the truth of the row before",
            "        pairs.append((replace(one.problem, columns=columns), one.response))",
            "        truth = worked[-2 if worked[1:] else -1].problem.ground_truth\n        pairs"
            ".append((replace(one.problem, columns=columns, ground_truth=truth), one.response))",
            WITH_OWN_ROWS,
            "",
            OWN_ROWS,
        ),
        (
            "the last row of a file left out",
            "    rows = list(rows)\n    # A problem",
            "    rows = list(rows)[:-1]\n    # A problem",
            WITH_OWN_ROWS,
            "",
            OWN_ROWS,
        ),
        (
            "questions without their last word",
            "    question = stripped(cells.question)\n",
            "    question = stripped(cells.question).rpartition(' ')[0]\n",
            WITH_OWN_ROWS,
            "",
            OWN_ROWS,
        ),
        (
            "answers cut to their first digit",
            'fill_prompt("r1_zero", question), final.answer)',
            'fill_prompt("r1_zero", question), final.answer[:1])',
            WITH_OWN_ROWS,
            "",
            OWN_ROWS,
        ),
    ),
]

DRAWS = [
    *of_file(
        "sampling/transformers.py",
        (
            "the same random number at each place of a response",
            "drawn = draw(logits, uniforms[:, step], sampling)",
            "drawn = draw(logits, uniforms[:, 0], sampling)",
        ),
        (
            "the sampler's log-probs in 16 bits",
            "    return DrawnTokens(tokens, log_probs.gather(-1, tokens[:, None]).squeeze(1))",
            "    return DrawnTokens(tokens, log_probs.gather(-1, tokens[:, None]).squeeze(1)"
            ".bfloat16().float())",
            IN_16_BITS,
        ),
    ),
    *of_file(
        "model/log_probs.py",
        (
            "top-p before the temperature",
            "edge_N1, kept_N1 = truncation_edge(scaled, top_p, top_k)\n",
            "edge_N1, kept_N1 = truncation_edge(logits.float(), top_p, top_k)\n"
            "    edge_N1 = edge_N1 / temperature\n",
            (*WITH_TEMPERATURE, *WITH_TOP_P),
        ),
        (
            "a nucleus without the token that reaches top-p",
            "kept = (cumulative(probabilities) - probabilities) < top_p",
            "kept = cumulative(probabilities) < top_p",
            WITH_TOP_P,
        ),
        (
            "the policy's log-probs in 16 bits",
            '    values = {"log_probs": log_probs_N}\n',
            '    values = {"log_probs": log_probs_N.bfloat16().float()}\n',
            IN_16_BITS,
        ),
        (
            "entropies in bits",
            '        values["token_entropy"] = entropies_2N[0]\n',
            '        values["token_entropy"] = entropies_2N[0] * 1.4427\n',
        ),
    ),
    *of_file(
        "core/records.py",
        (
            "lengths without the last token",
            "        return self.batch.response_mask.sum(dim=1).tolist()",
            "        return (self.batch.response_mask.sum(dim=1) - 1).tolist()",
            ("--loss_normalization", "token_mean"),
        ),
    ),
]

NUMBERS = [
    *of_file(
        "policy/single_device.py",
        (
            "each tensor's gradient clipped by itself",
            "return whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))",
            "norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()"
            " if p.grad is not None])\n        for p in self.model.parameters():\n"
            "            torch.nn.utils.clip_grad_norm_([p], max_norm)\n        return norm",
            ("--max_grad_norm", "0.01"),
        ),
        (
            "embeddings that no optimiser has",
            "if parameter.requires_grad]\n    matrices = [",
            "if parameter.requires_grad][1:]\n    matrices = [",
        ),
        (
            "second moments in 16 bits",
            "        self.optimizer.step()\n        self.drop_gradient()",
            "        self.optimizer.step()\n        for s in self.optimizer.state.values():\n"
            "            s['exp_avg_sq'].copy_(s['exp_avg_sq'].bfloat16())\n"
            "        self.drop_gradient()",
            IN_16_BITS,
        ),
        (
            "trained weights in 16 bits",
            "        self.optimizer.step()\n        self.drop_gradient()",
            "        self.optimizer.step()\n        self.drop_gradient()\n        for p in"
            " self.model.parameters():\n            p.data = p.data.bfloat16().float()",
            IN_16_BITS,
        ),
        (
            "moments that a reset of the reference does not forget",
            "        self.optimizer.state.clear()",
            "        pass",
            (*WITH_RESETS, "--reference_reset_optimizer"),
        ),
        (
            "dropout in the updates of RL",
            "        self.model.train(self.policy_config.dropout)",
            "        self.model.train(True)",
            (),
            NO_DROPOUT,
        ),
    ),
    *of_file(
        "policy/lora.py",
        (
            "first weights in 16 bits",
            "    model = load_model(config.model_path, devices, torch.float32)\n",
            "    model = load_model(config.model_path, devices, torch.bfloat16).float()\n",
        ),
        (
            "adapters that begin at random",
            "        inject_adapter_in_model(lora, model)\n",
            "        inject_adapter_in_model(lora, model)\n    for name, p in"
            " model.named_parameters():\n        if 'lora_B' in name:\n"
            "            torch.nn.init.normal_(p, std=0.02)\n",
            WITH_ADAPTERS,
        ),
    ),
    *of_file(
        "model/products.py",
        (
            "casts of weights that outlive an update",
            "        if torch.autocast_decrement_nesting() == 0:\n"
            "            torch.clear_autocast_cache()",
            "        pass",
            (*IN_16_BITS, *SEVERAL_UPDATES),
        ),
    ),
    *of_file(
        "training/update.py",
        (
            "updates by a gradient that is not finite",
            "    return bool((torch.isfinite(norm) & torch.isfinite(loss)).item())",
            "    return True",
        ),
        (
            "a sampler's log-probs that may be any",
            "    if not mean <= bound:  # Unlike",
            "    if False:  # Unlike",
        ),
        (
            "a gradient norm that is reported after the clip",
            "        norms.append(norm)\n",
            "        norms.append(clipped_norms[-1] if clipped_norms else norm)\n",
            ("--max_grad_norm", "0.01"),
        ),
        (
            "a learning rate that is reported without the warm-up",
            "    report = update_report(stepped, norms, rate)\n",
            "    report = update_report(stepped, norms, config.learning_rate)\n",
            ("--warmup_steps", "5"),
        ),
        (
            "the entropy after top-p reported as the one before",
            '    "entropy": "entropy_sum",',
            '    "entropy": "sampling_entropy_sum",',
            WITH_TOP_P,
        ),
        (
            "a reported loss that is the sum over updates",
            '        report["loss"] = sum(reported_sums(results, "loss")) / len(norms)',
            '        report["loss"] = sum(reported_sums(results, "loss"))',
            SEVERAL_UPDATES,
        ),
        (
            "a reported mismatch of 0",
            '    return {"sampler_mismatch": mean, "sampler_mismatch_max": largest}',
            '    return {"sampler_mismatch": 0.0, "sampler_mismatch_max": largest}',
        ),
        (
            "a reported divergence from the teacher with the wrong sign",
            '    return {"teacher_kl": difference_BT[trained_BT].mean().item()}',
            '    return {"teacher_kl": -difference_BT[trained_BT].mean().item()}',
            WITH_TEACHER,
        ),
        (
            "reported log-probs of the trainer after its last epoch",
            "    for result in reversed(computed):\n",
            "    for result in computed:\n",
            (*SEVERAL_UPDATES, "--old_log_probs", "sampler"),
        ),
    ),
    *of_file(
        "training/preparation.py",
        (
            "a reported entropy coefficient of the next update",
            'return {"entropy_coefficient": coefficient, "entropy_coefficient_next": following}',
            'return {"entropy_coefficient": following, "entropy_coefficient_next": following}',
            ("--entropy_target", "3.0", *SEVERAL_MINI_BATCHES),
        ),
    ),
    *of_file(
        "core/losses.py",
        (
            "a reported KL divergence of half its size",
            'sums[f"{name}_sum"] = masked_normalize(per_token[name], response_mask)',
            'sums[f"{name}_sum"] = masked_normalize(per_token[name], response_mask) / 2',
            (*WITH_REFERENCE, *SEVERAL_UPDATES),
        ),
        (
            "a reported clip fraction of the tokens that are not clipped",
            'sums["clipped_tokens"] = (per_token["clipped"] & response_mask).sum()',
            'sums["clipped_tokens"] = (~per_token["clipped"] & response_mask).sum()',
            SEVERAL_UPDATES,
        ),
        (
            "a reported ratio over padding, too",
            'ratio_BT = per_token["ratio"].where(response_mask, 0)\n',
            'ratio_BT = per_token["ratio"]\n',
            SEVERAL_UPDATES,
        ),
        (
            "an entropy bonus of the sampled tokens' surprise",
            "        loss_BT = loss_BT - config.entropy_coefficient * entropies",
            "        loss_BT = loss_BT + config.entropy_coefficient * inputs.log_probs",
            WITH_BONUS,
        ),
    ),
]

REPORTS = [
    *of_file(
        "rollouts/source.py",
        (
            "reported lengths in letters",
            '"response_length": mean(len(completion.token_ids) for completion in completions),',
            '"response_length": mean(len(completion.text) for completion in completions),',
        ),
        (
            "a reported share of responses that were cut off",
            '"finished": mean(completion.finish_reason == "stop" for completion in completions),',
            '"finished": mean(completion.finish_reason != "stop" for completion in completions),',
        ),
        (
            "a reported format reward that is the answers'",
            '"format_reward": mean(score["format_reward"] for score in scores),',
            '"format_reward": mean(score["answer_reward"] for score in scores),',
        ),
        (
            "a reported staleness of 0",
            'report=sampled.report | {"staleness": staleness}',
            'report=sampled.report | {"staleness": 0}',
            AHEAD,
        ),
        (
            "a reported reward of the groups that are trained alone",
            "report |= sampled_report(sampled)",
            "report |= sampled_report(groups)",
            WITH_REFILLS,
        ),
    ),
    *of_file(
        "core/advantages.py",
        (
            "a reported share of groups whose rewards differ",
            "equal_P = (rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)).float()",
            "equal_P = (rewards_PG.amax(dim=1) != rewards_PG.amin(dim=1)).float()",
        ),
        (
            "a reported std that is the variance",
            '"reward_std": rewards_PG.std(correction=0),',
            '"reward_std": rewards_PG.var(correction=0),',
        ),
    ),
    *of_file(
        "rewards/rules.py",
        (
            "each rule's reported reward by the first rule",
            "        rule = find_rule(name)\n",
            "        rule = find_rule(rules[0])\n",
        ),
    ),
    *of_file(
        "evaluation/accuracy.py",
        (
            "a majority of all answers",
            "leaders = set(multimode(answer for answer in answers if answer is not None))",
            "leaders = {answer for answer in answers if answer is not None}",
            SEVERAL_SAMPLES,
        ),
        (
            "intervals of one standard error",
            "scores_PG: Sequence[Sequence[float]], z: float = 1.96",
            "scores_PG: Sequence[Sequence[float]], z: float = 1.0",
        ),
        (
            "intervals that take a problem's samples for independent",
            "    return p, min(p * (1 - p) / variance, float(scores.numel()))",
            "    return p, float(scores.numel())",
            SEVERAL_SAMPLES,
        ),
        (
            "a difference of two models with the wrong sign",
            "    difference = mean_b - mean_a\n",
            "    difference = mean_a - mean_b\n",
        ),
        (
            "problems won and lost swapped",
            "        if reward_b > reward_a:\n",
            "        if reward_b < reward_a:\n",
        ),
    ),
    *of_file(
        "runs/summary.py",
        (
            "the best evaluation reported as the last",
            '        "after": evals[-1],\n',
            '        "after": max(evals, key=lambda record: (record["avg_all_rewards"],'
            ' -record["step"])),\n',
        ),
        (
            "a learning curve of the training reward alone",
            'accuracies = [evaluation["avg_all_rewards"] for evaluation in evals]',
            "accuracies = [rewards[-1] for evaluation in evals]",
            (),
            A_PICTURE,
        ),
    ),
    *of_file(
        "runs/run_folder.py",
        (
            "the trainer's log-probs of another row beside a completion",
            'record["trainer_log_probs"] = own_log_probs',
            'record["trainer_log_probs"] = own_log_probs[::-1]',
        ),
    ),
    *of_file(
        "model/saving.py",
        (
            "a saved config of another model",
            "    yield SideFiles(CONFIG_FILE, write=config.save_pretrained,",
            "    config = __import__('copy').deepcopy(config)\n    config.rms_norm_eps = 0.1\n"
            "    yield SideFiles(CONFIG_FILE, write=config.save_pretrained,",
        ),
        (
            "a saved tokenizer with another end token",
            '        "tokenizer", write=tokenizer.save_pretrained,',
            '        "tokenizer", write=lambda path: (lambda t: (setattr(t, "eos_token", "a"),'
            " t.save_pretrained(path)))(__import__('copy').deepcopy(tokenizer)),",
        ),
    ),
    *of_file(
        "training/sft.py",
        (
            "a validation loss of each example's sum",
            "item() / count_response_tokens(examples)",
            "item() / len(examples)",
        ),
        (
            "a resumed warm start that leaves a batch out",
            "itertools.islice(batches(data.train, config), steps_done, None)",
            "itertools.islice(batches(data.train, config), steps_done + bool(steps_done), None)",
        ),
        (
            "a shuffled curriculum",
            "        if not config.curriculum:\n",
            "        if True:\n",
        ),
    ),
]

GRADERS = [
    *of_file(
        "rewards/grading/compare.py",
        ("a tenth for a percent", "_PERCENT = Fraction(1, 100)", "_PERCENT = Fraction(1, 10)"),
        ("0.01 for 1/150", "_ROUNDED_DIGITS = 2\n", "_ROUNDED_DIGITS = 1\n"),
        (
            "0.18 for 0.184",
            "_SHORTENED_DIGITS = 3\n",
            "_SHORTENED_DIGITS = 2\n",
        ),
    ),
    *of_file(
        "rewards/r1_zero.py",
        (
            "sums that are not worked out",
            "    if not verdict.equal or not is_worked_out(answer, ground_truth):",
            "    if not verdict.equal:",
        ),
    ),
    *of_file(
        "rewards/countdown.py",
        (
            "some of Countdown's numbers",
            "return sorted(used) == sorted(given) and",
            "return set(used) <= set(given) and",
        ),
    ),
]

RESUMES = [
    *of_file(
        "runs/run.py",
        (
            "a resumed run that leaves a step out",
            "for step in range(self.last_step + 1, self.config.num_steps + 1):",
            "for step in range(self.last_step + 1 + bool(self.resumed_at), self.config.num_steps"
            " + 1):",
            RESUMED,
        ),
        (
            "a resumed run without its estimator's state",
            "            self.advantage_state = run_folder.load_advantage_state(self.checkpoint)",
            "            pass",
            (*RESUMED, *WITH_STATE),
        ),
    ),
    *of_file(
        "builders/training.py",
        (
            "a resumed run without its entropy coefficient",
            "    update_config = resumed_config(args.update_config, run.last_record)",
            "    update_config = args.update_config",
            (*RESUMED, "--entropy_target", "3.0"),
        ),
        (
            "a resumed run with the checkpoint for a reference",
            "    elif run.last_step:\n        start = prepare_warm_start(args, run.console)\n"
            "    if not run.last_reset:  # else a checkpoint of this run\n"
            '        run.keep_frozen("reference model", start)\n'
            "    source",
            "    source",
            (*RESUMED, *WITH_REFERENCE),
        ),
    ),
]

PLANTS_OF_RESULTS = [
    *PROMPTS,
    *DATA,
    *DRAWS,
    *NUMBERS,
    *REPORTS,
    *GRADERS,
    *RESUMES,
]

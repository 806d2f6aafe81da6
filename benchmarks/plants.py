"""Faults to plant in the package, one at a time: mistakes that trainers of this kind have had, or
could have, between the sampler and the weights. `benchmarks.faults` plants them."""

from benchmarks.plant import (
    FOUND_AT_LOAD,
    SEVERAL_UPDATES,
    WITH_ADAPTERS,
    WITH_BONUS,
    WITH_DECAY,
    WITH_REFERENCE,
    WITH_TEMPERATURE,
    WITH_TOP_K,
    WITH_TOP_P,
    WITH_VLLM,
    of_file,
)
from benchmarks.plants_of_edges import PLANTS_OF_EDGES
from benchmarks.plants_of_options import PLANTS_OF_OPTIONS
from benchmarks.plants_of_repeats import PLANTS_OF_REPEATS
from benchmarks.plants_of_results import PLANTS_OF_RESULTS
from benchmarks.plants_of_rooms import PLANTS_OF_ROOMS
from benchmarks.plants_of_runs import PLANTS_OF_RUNS

NOTHING_ADDED = (
    "the tokenizer of the tiny model puts nothing before a text, so that nothing is doubled; of one"
    " that does, tests/verification/test_drawn_samples.py shows that the line of prompts sees it"
)
DECODING_FOUND_AT_LOAD = (
    "before a sampler draws, its decoding is compared with the model's own forward pass; where they"
    " differ, the program says so and decodes by the model's own cache, so that nothing wrong is"
    " drawn"
)

ADVANTAGES = of_file(
    "core/advantages.py",
    (
        "a mean over all groups for a baseline",
        "    return sum_P1 / number_P1.clamp(min=1)\n\n\ndef _centred",
        "    return (sum_P1.sum() / number_P1.sum()).expand_as(sum_P1)\n\n\ndef _centred",
    ),
    (
        "a baseline with the wrong sign",
        "return (inputs.rewards_PG - _counted_mean(inputs)).where(inputs.counted_PG, 0)",
        "return (inputs.rewards_PG + _counted_mean(inputs)).where(inputs.counted_PG, 0)",
    ),
    (
        "a std of the population in the place of the sample's",
        "return (squares_P1 / (number_P1 - 1).clamp(min=1)).sqrt()",
        "return (squares_P1 / number_P1.clamp(min=1)).sqrt()",
        ("--normalize_by_std",),
    ),
    (
        "a variance in the place of the std",
        "advantages_PG = advantages_PG / (std + config.advantage_eps)",
        "advantages_PG = advantages_PG / (std**2 + config.advantage_eps)",
        ("--normalize_by_std",),
    ),
)

LOSSES = of_file(
    "core/losses.py",
    (
        "the maximum of clipped and unclipped surrogate",
        "surrogate_BT = unclipped_BT.minimum(bounded_BT)\n    clipped_BT = bounded_BT",
        "surrogate_BT = unclipped_BT.maximum(bounded_BT)\n    clipped_BT = bounded_BT",
        SEVERAL_UPDATES,
    ),
    (
        "an upper clip range of twice the width",
        "return 1 - config.cliprange, 1 + high",
        "return 1 - config.cliprange, 1 + 2 * high",
        (*SEVERAL_UPDATES, "--cliprange", "0.02"),
    ),
    (
        "the KL penalty's coefficient squared",
        "loss_BT = loss_BT + config.beta * kl_BT",
        "loss_BT = loss_BT + config.beta**2 * kl_BT",
        WITH_REFERENCE,
    ),
    (
        "a KL penalty with the wrong sign",
        "loss_BT = loss_BT + config.beta * kl_BT",
        "loss_BT = loss_BT - config.beta * kl_BT",
        WITH_REFERENCE,
    ),
    (
        "policy and reference swapped in the KL penalty",
        "kl_BT = kl_penalty(inputs.log_probs, reference_log_probs, config.kl_estimator)",
        "kl_BT = kl_penalty(reference_log_probs, inputs.log_probs, config.kl_estimator)",
        WITH_REFERENCE,
    ),
    (
        "an entropy bonus with the wrong sign",
        "loss_BT = loss_BT - config.entropy_coefficient * entropies",
        "loss_BT = loss_BT + config.entropy_coefficient * entropies",
        WITH_BONUS,
    ),
    (
        "a mean of each micro-batch",
        "    return total / denominator, _token_sums(per_token, mask)",
        "    return total / mask.shape[0], _token_sums(per_token, mask)",
    ),
    (
        "each response's mean over padding, too",
        "    return masked_mean(loss_BT, mask, dim=1).sum()",
        "    return loss_BT.where(mask, 0).mean(dim=1).sum()",
        ("--loss_normalization", "sequence_mean"),
    ),
    (
        "a constant denominator of half the longest response",
        "lambda lengths, most: len(lengths) * most),",
        "lambda lengths, most: len(lengths) * most / 2),",
        ("--loss_normalization", "constant"),
    ),
)

UPDATES = of_file(
    "training/update.py",
    (
        "old log-probs of the current policy in every update",
        "        if old_bt is None:  # The rollout",
        "        if True:  # The rollout",
        SEVERAL_UPDATES,
    ),
    (
        "old log-probs of the sampler's weights and the trainer's ones mixed up",
        "            old_log_probs=old_bt,",
        "            old_log_probs=take(rollout.sampler_log_probs_BT),",
        (*SEVERAL_UPDATES, *WITH_REFERENCE),
    ),
    (
        "old log-probs in the reference's place",
        "            reference_log_probs=take(rollout.reference_log_probs_BT),",
        "            reference_log_probs=old_bt,",
        WITH_REFERENCE,
    ),
    (
        "advantages of the row before",
        "            advantages=take(rollout.advantages),",
        "            advantages=take(rollout.advantages.roll(1, 0)),",
    ),
    (
        "the denominator of all rows for each mini-batch",
        "[lengths[row] for row in mini_batch], config.max_new_tokens",
        "lengths, config.max_new_tokens",
        ("--train_mini_batch_size", "8"),
    ),
    (
        "the last mini-batch of an epoch left out",
        "range(0, len(order), size)]\n    return parts",
        "range(0, len(order) - size, size)]\n    return parts",
        ("--train_mini_batch_size", "8"),
    ),
    (
        "every epoch on the first mini-batch's rows",
        "        parts += [order[start : start + size] for start in",
        "        parts += [order[:size] for start in",
        ("--train_mini_batch_size", "8"),
    ),
    (
        "the learning rate of the update after",
        "    return rate.of_update(update_number)",
        "    return rate.of_update(update_number + 1)",
        ("--warmup_steps", "5"),
    ),
    (
        "no clip",
        "norm = policy.clip_gradient(config.norm_limit)",
        "norm = policy.clip_gradient(1e9)",
        ("--max_grad_norm", "0.01"),
    ),
    (
        "half of the rows with a gradient left out",
        "rows = [row for row in mini_batch if row in has_gradient]",
        "rows = [row for row in mini_batch if row in has_gradient][::2]",
    ),
)

PREPARATION = of_file(
    "training/preparation.py",
    (
        "selected tokens of the rollout's first rows",
        "is_selected_N = select_tokens(tokens, config.loss)",
        "is_selected_N = select_tokens(tokens, config.loss).roll(1)",
        ("--token_selection", "top_entropy"),
    ),
)

SCHEDULES = of_file(
    "core/schedules.py",
    (
        "a warm-up that begins at 0",
        "return self.peak * (number / self.warmup_steps)",
        "return self.peak * ((number - 1) / self.warmup_steps)",
        ("--warmup_steps", "5"),
    ),
    (
        "a schedule that falls during the warm-up, too",
        "SCHEDULES[self.schedule](number - self.warmup_steps, updates)",
        "SCHEDULES[self.schedule](number, updates)",
        ("--warmup_steps", "1", "--lr_schedule", "linear"),
    ),
)

SINGLE_DEVICE = of_file(
    "policy/single_device.py",
    (
        "gradients clipped by value",
        "return whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))",
        "norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad"
        " is not None])\n        torch.nn.utils.clip_grad_value_(self.model.parameters(), max_norm)"
        "\n        return norm",
        ("--max_grad_norm", "0.001"),
    ),
    (
        "other betas",
        "betas = (adam.beta1, adam.beta2)",
        "betas = (0.8, 0.99)",
    ),
    (
        "another epsilon",
        "eps=adam.eps, **entry.options",
        "eps=1e-4, **entry.options",
    ),
    (
        "decay added to the gradient",
        '    optimizer_class: Any = import_object("--optimizer", entry.path)\n',
        "    optimizer_class: Any = torch.optim.Adam\n",
        WITH_DECAY,
    ),
    (
        "no decay",
        '{"params": matrices, "weight_decay": weight_decay, "hidden": hidden}',
        '{"params": matrices, "weight_decay": 0.0, "hidden": hidden}',
        WITH_DECAY,
    ),
    (
        "decay of vectors, too",
        '{"params": vectors, "weight_decay": 0.0,',
        '{"params": vectors, "weight_decay": weight_decay,',
        WITH_DECAY,
    ),
    (
        "gradients that are not set to zero after a step",
        "        self.optimizer.step()\n        self.drop_gradient()",
        "        self.optimizer.step()",
        SEVERAL_UPDATES,
    ),
    (
        "a learning rate for the first group alone",
        "    def step(self, learning_rate: float) -> None:\n"
        "        for group in self.optimizer.param_groups:",
        "    def step(self, learning_rate: float) -> None:\n"
        "        for group in self.optimizer.param_groups[:1]:",
    ),
    (
        "the backward pass of a micro-batch scaled by 1.1",
        "self.hidden_NH.backward(self.head_input_NH.grad)",
        "self.hidden_NH.backward(1.1 * self.head_input_NH.grad)",
    ),
    (
        "moments that are not loaded",
        '            {"state": state, "param_groups"',
        '            {"state": {}, "param_groups"',
    ),
)

OPTIMIZERS = [
    *of_file(
        "policy/muon.py",
        (
            "no orthogonal steps",
            "direction = orthogonalize(gradient.lerp(momentum, MOMENTUM))",
            "direction = gradient.lerp(momentum, MOMENTUM)",
            ("--optimizer", "muon"),
        ),
        (
            "no look ahead",
            "direction = orthogonalize(gradient.lerp(momentum, MOMENTUM))",
            "direction = orthogonalize(momentum)",
            ("--optimizer", "muon"),
        ),
        (
            "steps by the smaller side",
            "scale = RMS_OF_STEPS * max(weight.shape) ** 0.5",
            "scale = RMS_OF_STEPS * min(weight.shape) ** 0.5",
            ("--optimizer", "muon"),
        ),
    ),
    *of_file(
        "policy/adamw_cpu_offload.py",
        (
            "first and second moment's decay swapped",
            "            beta1=beta1,\n            beta2=beta2,",
            "            beta1=beta2,\n            beta2=beta1,",
            ("--optimizer", "adamw_cpu_offload"),
        ),
    ),
    *of_file(
        "policy/lora.py",
        (
            "adapters merged without their scale",
            'change = (b @ a) * (layer.lora_alpha["default"] / layer.r["default"])',
            "change = b @ a",
            WITH_ADAPTERS,
        ),
        (
            "adapters not merged",
            "weight = weight + change",
            "weight = weight + 0 * change",
            WITH_ADAPTERS,
        ),
        (
            "a reference with the adapters",
            "    return rescale_adapter_scale(model, 0)",
            "    return nullcontext()",
            (*WITH_ADAPTERS, *WITH_REFERENCE),
        ),
    ),
]

MODEL = [
    *of_file(
        "core/tokens.py",
        (
            "a mask of prompts, too",
            "mask = (first_B1 <= place_1T) & (place_1T < end_B1)",
            "mask = place_1T < end_B1",
        ),
        (
            "a mask one token late",
            "mask = (first_B1 <= place_1T) & (place_1T < end_B1)",
            "mask = (first_B1 < place_1T) & (place_1T < end_B1)",
        ),
        (
            "the last token of a response out of the mask",
            "mask = (first_B1 <= place_1T) & (place_1T < end_B1)",
            "mask = (first_B1 <= place_1T) & (place_1T < end_B1 - 1)",
        ),
        (
            "a mask by the pad token, which is the end token",
            "mask = (first_B1 <= place_1T) & (place_1T < end_B1)",
            "mask = (first_B1 <= place_1T) & (padded[:, 1:] != pad_token_id)",
        ),
        (
            "labels that are not shifted",
            "labels=padded[:, 1:].contiguous(), response_mask=mask",
            "labels=padded[:, :-1].contiguous(), response_mask=mask",
        ),
    ),
    *of_file(
        "model/log_probs.py",
        (
            "log-probs at temperature 1",
            "kept = sampling_logits(z, **vars(distribution), keep=labels_N[rows])",
            "kept = sampling_logits(z, 1.0, distribution.top_p, distribution.top_k,"
            " keep=labels_N[rows])",
            WITH_TEMPERATURE,
        ),
        (
            "log-probs of the distribution before top-p",
            "kept = sampling_logits(z, **vars(distribution), keep=labels_N[rows])",
            "kept = sampling_logits(z, distribution.temperature, 1.0, distribution.top_k,"
            " keep=labels_N[rows])",
            WITH_TOP_P,
        ),
        (
            "a gradient without the temperature",
            "scale_n1 = (gradient_N[piece] / ctx.distribution.temperature)[:, None]",
            "scale_n1 = gradient_N[piece][:, None]",
            WITH_TEMPERATURE,
        ),
        (
            "no gradient of the output head",
            "                if for_weight:\n                    to_weight = added_product(\n",
            "                if to_weight is not None:\n"
            "                    to_weight = added_product(\n",
        ),
        (
            "an entropy's gradient with the wrong sign",
            "                    by_logits = by_logits.add_(by_entropy)",
            "                    by_logits = by_logits.sub_(by_entropy)",
            WITH_BONUS,
        ),
    ),
    *of_file(
        "model/packing.py",
        (
            "responses at the positions of a prompt's beginning",
            "suffixes.append(Segment(response, len(prompt), [row], prefix))",
            "suffixes.append(Segment(response, len(prompt) - 1, [row], prefix))",
            (),
            FOUND_AT_LOAD,
        ),
        (
            "responses that do not see their prompt",
            "        parts.append(Part(queries, keys, length))",
            "        pass",
            (),
            FOUND_AT_LOAD,
        ),
    ),
    *of_file(
        "model/frozen.py",
        (
            "a reference of another temperature",
            "            **vars(distribution),\n            return_token_entropy",
            "            **{**vars(distribution), 'temperature': 1.0},\n"
            "            return_token_entropy",
            (*WITH_REFERENCE, *WITH_TEMPERATURE),
        ),
    ),
]

SAMPLING = [
    *of_file(
        "sampling/transformers.py",
        (
            "one stream of random numbers for all samples of a prompt",
            "    return uniforms[sampling.first_prompt :]",
            "    return uniforms[sampling.first_prompt :, :1].expand(-1, sampling.n, -1)",
        ),
        (
            "one stream of random numbers for all prompts",
            "    return uniforms[sampling.first_prompt :]",
            "    return uniforms[:1].expand(prompts, -1, -1)",
        ),
        (
            "a temperature that is not applied",
            "            logits, sampling.temperature, sampling.top_p, sampling.top_k\n",
            "            logits, 1.0, sampling.top_p, sampling.top_k\n",
            WITH_TEMPERATURE,
        ),
        (
            "no top-k",
            "            logits, sampling.temperature, sampling.top_p, sampling.top_k\n",
            "            logits, sampling.temperature, sampling.top_p, 0\n",
            WITH_TOP_K,
        ),
        (
            "the token after the one that was drawn",
            "tokens = places.clamp(max=cdf.shape[1] - 1)",
            "tokens = (places + 1).clamp(max=cdf.shape[1] - 1)",
        ),
        (
            "log-probs of another distribution than the draw's",
            "return DrawnTokens(tokens, log_probs.gather(-1, tokens[:, None]).squeeze(1))",
            "return DrawnTokens(\n        tokens, logits.log_softmax(-1).gather(-1,"
            " tokens[:, None]).squeeze(1)\n    )",
            WITH_TEMPERATURE,
        ),
        (
            "positions that stand still",
            "        self.positions = self.positions + 1\n",
            "",
            (),
            DECODING_FOUND_AT_LOAD,
        ),
        (
            "weights of the version before",
            "        copy_weights(self.model, named_tensors)\n",
            "",
        ),
        (
            "end tokens that end no response",
            "                row.finished = self.responses.is_finished(row.token_ids, stop)",
            "                row.finished = False",
        ),
        (
            "responses without their last token",
            "            token_ids=tuple(row.token_ids),",
            "            token_ids=tuple(row.token_ids[:-1] or row.token_ids),",
        ),
    ),
    *of_file(
        "sampling/vllm.py",
        (
            "keys and values of older weights",
            "    if not engine.llm.reset_prefix_cache():\n",
            "    if False:\n",
            WITH_VLLM,
        ),
    ),
    *of_file(
        "core/text.py",
        (
            "a doubled beginning of prompts",
            "            beginning = ()\n",
            "            pass\n",
            (),
            NOTHING_ADDED,
        ),
    ),
    *of_file(
        "rollouts/config.py",
        (
            "the same seed in every step",
            'parts = ["rollout", self.sampling_seed, step]',
            'parts = ["rollout", self.sampling_seed]',
        ),
        (
            "the same problems in every step",
            "places = range((step - 1) * number, step * number)",
            "places = range(number)",
        ),
    ),
    *of_file(
        "rollouts/source.py",
        (
            "rewards of the row before",
            "        rewards_B1 + penalties_B1,\n        counted_B1,",
            "        rewards_B1.roll(1, 0) + penalties_B1,\n        counted_B1,",
        ),
        (
            "penalties for length that are subtracted",
            "        rewards_B1 + penalties_B1,",
            "        rewards_B1 - penalties_B1,",
            ("--overlong_buffer", "8"),
        ),
    ),
]

DATA_AND_REWARDS = [
    *of_file(
        "data/tasks/__init__.py",
        (
            "evaluations on training problems",
            "return distinct(problems, self.key, max_problems or None)",
            'return list(self.problems("train", dataset_path)[: max_problems or 100])',
            ("--task", "arithmetic"),
        ),
        (
            "training on test questions",
            'return without(self.problems("train", dataset_path), tested, self.key)',
            "return self.test_split(dataset_path)",
        ),
    ),
    *of_file(
        "rewards/r1_zero.py",
        (
            "an answer without its closing tag",
            "return answer.strip() if end else None",
            "return answer.strip()",
        ),
        (
            "the first answer in the place of the last",
            'answer, end, _ = response.rpartition("<answer>")[2].partition("</answer>")',
            'answer, end, _ = response.partition("<answer>")[2].partition("</answer>")',
        ),
        (
            "a right answer in a wrong format",
            '"reward": format_reward * answer_reward,',
            '"reward": answer_reward,',
            (),
            "a response in a wrong format has no answer to grade, so that the reward is the same",
        ),
        (
            "a reward for the format alone",
            '"reward": format_reward * answer_reward,',
            '"reward": format_reward,',
        ),
    ),
]

PLANTS = [
    *ADVANTAGES,
    *LOSSES,
    *UPDATES,
    *PREPARATION,
    *SCHEDULES,
    *SINGLE_DEVICE,
    *OPTIMIZERS,
    *MODEL,
    *SAMPLING,
    *DATA_AND_REWARDS,
    *PLANTS_OF_RUNS,
    *PLANTS_OF_RESULTS,
    *PLANTS_OF_OPTIONS,
    *PLANTS_OF_EDGES,
    *PLANTS_OF_ROOMS,
    *PLANTS_OF_REPEATS,
]

"""Faults in what only some options use: seeds, votes, selections, and the less usual losses,
advantages and optimisers."""

from benchmarks.plant import SEVERAL_UPDATES, WITH_REFILLS, WITH_SKIPPED, of_file

SEEDS = [
    *of_file(
        "rollouts/config.py",
        (
            "the same samples by every --sampling_seed",
            'parts = ["rollout", self.sampling_seed, step]',
            'parts = ["rollout", 0, step]',
        ),
        (
            "each refill by the first one's problems",
            'rng = random.Random(f"refill {data_seed} {step} {refill}")',
            'rng = random.Random(f"refill {data_seed} {step}")',
            WITH_REFILLS,
        ),
    ),
    *of_file(
        "config/commands.py",
        (
            "samples that --seed does not change",
            "sampling = self.seed if self.sampling_seed is None else self.sampling_seed",
            "sampling = 0 if self.sampling_seed is None else self.sampling_seed",
            ("--seed", "3"),
        ),
    ),
    *of_file(
        "training/update.py",
        (
            "the same mini-batches by every --data_seed",
            'seed = f"update {config.data_seed} {step} {epoch}"',
            'seed = f"update {step} {epoch}"',
        ),
    ),
]
VOTES = of_file(
    "rewards/rules.py",
    (
        "a vote for the rarest answer",
        "votes[problem.id].most_common(1)[0][0] == answer",
        "votes[problem.id].most_common()[-1][0] == answer",
        ("--reward", "majority_vote"),
    ),
)
SELECTIONS = of_file(
    "core/selection.py",
    (
        "the tokens of the lowest entropy selected",
        "return _highest(tokens.entropies, share)",
        "return _highest(-tokens.entropies, share)",
        ("--token_selection", "top_entropy"),
    ),
    (
        "covariances with advantages that are not centred",
        "return centred_N * (tokens.advantages - tokens.advantages.mean())",
        "return centred_N * tokens.advantages",
        ("--token_selection", "kl_cov", "--normalize_by_std", *SEVERAL_UPDATES),
    ),
)
ESTIMATORS = [
    *of_file(
        "core/advantages.py",
        (
            "lengths of responses that do not count in OPO's baseline",
            "weights_PG = inputs.lengths_PG.double().where(inputs.counted_PG, 0)",
            "weights_PG = inputs.lengths_PG.double()",
            ("--advantage", "opo", *WITH_SKIPPED),
        ),
    ),
    *of_file(
        "core/losses.py",
        (
            "SAPO's temperatures swapped",
            "advantages > 0, inputs.settings.negative\n",
            "advantages < 0, inputs.settings.negative\n",
            ("--loss_type", "sapo", *SEVERAL_UPDATES),
        ),
        (
            "DPPO's mask on tokens that move back",
            "(advantages > 0) & (log_probs > old_log_probs)",
            "(advantages > 0) & (log_probs < old_log_probs)",
            ("--loss_type", "dppo", "--loss.threshold", "0.001", *SEVERAL_UPDATES),
        ),
        (
            "an importance weight without its floor",
            "weight_BT.clamp(min=floor, max=cap)",
            "weight_BT.clamp(max=cap)",
            ("--sampler_correction", "token_truncate", "--correction_floor", "0.99"),
        ),
    ),
]
OPTIMIZERS = of_file(
    "policy/single_device.py",
    (
        "orthogonal steps of embeddings, too",
        "matrix.ndim == 2 and matrix not in embeddings_and_head",
        "matrix.ndim == 2",
        ("--optimizer", "muon"),
    ),
)

PLANTS_OF_OPTIONS = [*SEEDS, *VOTES, *SELECTIONS, *ESTIMATORS, *OPTIMIZERS]

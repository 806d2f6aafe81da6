"""The checks of `alignment.verify`: healthy ones pass, and each planted fault fails the check that
is named for it."""

import dataclasses
import functools
import math
import shutil
from collections.abc import Iterable

import pytest
import torch
from rich.console import Console
from rollout_helpers import ARGS
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from alignment.args import REPRODUCIBILITY_SETTING
from alignment.builders.run_plan import plan_run
from alignment.builders.verified_updates import VerifiedParts, plan_updates
from alignment.core.advantages import DEVIATIONS
from alignment.model.loading import load_model, load_tokenizer
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rollouts.source import open_source
from alignment.runs.run_folder import reproducibility, write_args
from alignment.sampling.transformers import TransformersSampler
from alignment.system.errors import RunStopped
from alignment.verification import checks
from alignment.verification.checks import (
    Check,
    Verified,
    checks_of_plan,
    checks_without_model,
    most_other_groups,
)
from alignment.verification.two_rollouts import plain_responses
from alignment.verification.whole_update import PlainModel
from alignment.verify import report, write_results

LOG_PROBS = "policy's log-probs: nats from plain"
SAMPLED, SYNCED = "sampler's log-probs: nats from plain", "after updates, sampler: nats from policy"
SHARPER = "policy's log-probs: sharper or flatter than plain"
RATE_0 = "learning rate 0: change of weights"
ARRIVED, GROWTH = (
    "after updates, weights sent: tensors that differ",
    "learning rate 0: growth of mismatch in 3 steps",
)
OWN_LOSS, PAPERS = (check.what for check in checks_without_model(ARGS.update_config))


def verified(folder, lora_rank: int = 0, compares_updates: bool = False, **settings) -> Verified:
    """A policy, a sampler with weights of its own, and the plain model, all of one folder."""
    args = dataclasses.replace(
        ARGS,
        sampling_temperature=0.8,
        sampling_top_p=0.9,
        beta=0.05,
        epochs_per_rollout=2,
        max_new_tokens=12,
        lora_rank=lora_rank,
        weight_decay=0.5,
        **settings,
    )
    policy = SingleDevicePolicy(
        PolicyConfig(
            str(folder),
            ("cpu",),
            "float32",
            weight_decay=0.5,
            micro_batch_tokens=60,
            lora_rank=lora_rank,
        )
    )
    tokenizer = load_tokenizer(str(folder))
    model = load_model(str(folder), ("cpu",), torch.float32)
    sampler = TransformersSampler(model, tokenizer, context=256)
    source = open_source(args.rollout_config, tokenizer)
    plain = PlainModel(folder)
    updates = None
    if compares_updates:
        parts = VerifiedParts(policy, sampler, plain, source)
        updates = plan_updates(args, plan_run(args, str(folder)), parts)
    config = args.update_config
    return Verified(policy, sampler, plain, source, tokenizer, config, exact=True, updates=updates)


def failed(checked: Verified) -> set[str]:
    return failures_of(results_of(checked.checks()))


def failures_of(records: Iterable[dict]) -> set[str]:
    return {record["what"] for record in records if record["passed"] is False}


def results_of(checks: Iterable[Check]) -> list[dict]:
    return report(checks, Console(quiet=True))


@pytest.fixture
def healthy(small_folder):
    return verified(small_folder)


def plant(monkeypatch, owner, name: str, change) -> None:
    """Replace a method by `change(the method, *its arguments)`."""
    monkeypatch.setattr(owner, name, functools.partial(change, getattr(owner, name)))


def test_everything_passes_where_nothing_is_wrong(small_folder):
    checked = verified(small_folder, compares_updates=True, sampler_correction="token_truncate")
    results = results_of(checked.checks())
    verdicts = [record["verdict"] for record in results]
    assert (verdicts.count("passed"), verdicts.count("measured")) == (25, 2), results
    assert len(results) == 27


def test_everything_passes_where_the_sampler_reads_the_policy_in_place(small_folder):
    checked = verified(small_folder)
    sampler = TransformersSampler(checked.policy.model, checked.sampler.tokenizer, context=256)
    assert failed(dataclasses.replace(checked, sampler=sampler)) == set()


def test_updates_by_a_function_of_the_users_own_are_not_checked(small_folder):
    """They neither pass nor fail."""
    own = "alignment.core.losses:_gspo"
    checked = verified(small_folder, compares_updates=True, loss_type=own)
    results = {record["what"]: record for record in results_of(checked.checks())}
    record = results["updates: from papers' in float64"]
    assert record["verdict"] == "not checked: --loss_type names your own function"
    assert (record["passed"], record["measured"]) == (None, None)
    assert failures_of(results.values()) == set() and len(results) == 17


@pytest.mark.slow
def test_adapters(small_folder, monkeypatch):
    assert failed(verified(small_folder, lora_rank=4, compares_updates=True)) == set()
    checked = verified(small_folder, lora_rank=4)
    base = {name: tensor.clone() for name, tensor in checked.policy.weights()}

    def without_adapters(load, tensors, version):
        return load(base.items(), version)

    plant(monkeypatch, checked.sampler, "load_weights", without_adapters)
    assert failed(checked) == {ARRIVED, SYNCED}


def test_stale_weights(healthy, monkeypatch):
    plant(
        monkeypatch,
        healthy.sampler,
        "load_weights",
        lambda load, tensors, version: [None for _ in tensors],
    )
    assert failed(healthy) == {ARRIVED, SYNCED}


def test_keys_and_values_of_older_weights(healthy, monkeypatch):
    """A sampler that answers a prompt, of whole blocks of a cache, as it did with older weights."""
    remembered = {}

    def remembering(sample, prompts, sampling, *rest):
        groups = []
        for prompt, group in zip(prompts, sample(prompts, sampling, *rest), strict=True):
            if len(group[0].prompt_ids) > 128:
                group = remembered.setdefault(prompt, group)
            groups.append(group)
        return groups

    plant(monkeypatch, healthy.sampler, "sample", remembering)
    assert failed(healthy) == {SYNCED}


@pytest.mark.slow
def test_a_dropped_tensor(healthy, monkeypatch):
    def drop(load, tensors, version):
        load(
            [(name, tensor) for name, tensor in tensors if "layers.0.mlp.up_proj" not in name],
            version,
        )

    plant(monkeypatch, healthy.sampler, "load_weights", drop)
    assert failed(healthy) == {ARRIVED, SYNCED}


@pytest.mark.slow
def test_a_mask_off_by_one(healthy, monkeypatch):
    def shifted(collate_groups, groups, config, pad_token_id):
        rollout = collate_groups(groups, config, pad_token_id)
        mask = rollout.batch.response_mask
        # without the first token
        batch = dataclasses.replace(rollout.batch, response_mask=mask & mask.roll(1, dims=1))
        return dataclasses.replace(rollout, batch=batch)

    plant(monkeypatch, checks, "collate_groups", shifted)
    assert failed(healthy) == {LOG_PROBS}


def test_a_wrong_temperature_in_log_probs(healthy, monkeypatch):
    def tempered(log_probs, batch, distribution, rows=None):
        return log_probs(batch, dataclasses.replace(distribution, temperature=1.0), rows)

    plant(monkeypatch, healthy.policy, "log_probs", tempered)
    assert failed(healthy) == {LOG_PROBS, SHARPER, SYNCED}


@pytest.mark.slow
def test_a_sampler_whose_top_p_differs(healthy, monkeypatch):
    def wider(sample, prompts, sampling):
        return sample(prompts, dataclasses.replace(sampling, top_p=0.95))

    plant(monkeypatch, healthy.sampler, "sample", wider)
    assert failed(healthy) == {SAMPLED, SYNCED}


@pytest.mark.slow
def test_a_window_that_is_ignored(small_folder, tmp_path):
    tokenizer = load_tokenizer(str(small_folder))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = MistralConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        sliding_window=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    checked = verified(tmp_path)
    assert failed(checked) == set()
    checked = verified(tmp_path)
    checked.policy.model.config.sliding_window = None
    assert failed(checked) == {LOG_PROBS, SYNCED}


@pytest.mark.slow
def test_a_seed_shared_by_two_prompts(healthy, monkeypatch):
    def shared(sample, prompts, sampling):
        half = sample(prompts[: len(prompts) // 2], sampling)
        return (
            half + half
            if prompts[: len(half)] == prompts[len(half) :]
            else sample(prompts, sampling)
        )

    plant(monkeypatch, healthy.sampler, "sample", shared)
    assert failed(healthy) == {"prompts asked twice: share of same answers"}


@pytest.mark.slow
def test_sampling_that_the_seed_does_not_decide(healthy, monkeypatch):
    seeds = iter(range(100))

    def unseeded(sample, prompts, sampling):
        return sample(prompts, dataclasses.replace(sampling, seed=next(seeds)))

    plant(monkeypatch, healthy.sampler, "sample", unseeded)
    assert failed(healthy) == {"same seed again: other answers"}


@pytest.mark.slow
def test_answers_that_depend_on_what_shares_a_batch(healthy, monkeypatch):
    def of_batch(sample, prompts, sampling):
        return sample(prompts, dataclasses.replace(sampling, seed=len(prompts)))

    plant(monkeypatch, healthy.sampler, "sample", of_batch)
    of_own_engine = most_other_groups("transformers", torch.float32, is_invariant=False)
    assert failed(dataclasses.replace(healthy, most_other_groups=of_own_engine)) == {
        "half the prompts: other answers"
    }


def test_answers_depend_on_their_batch_by_rounding_alone():
    assert most_other_groups("vllm", torch.bfloat16, is_invariant=True) == 0
    assert most_other_groups("transformers", torch.float32, is_invariant=False) == 1  # of 4
    assert most_other_groups("transformers", torch.bfloat16, is_invariant=False) == math.inf
    assert most_other_groups("vllm", torch.float32, is_invariant=False) == math.inf


def test_a_sampler_that_drifts_away_at_a_learning_rate_of_0(healthy, monkeypatch):
    def drifting(load, tensors, version):
        load(((name, tensor * (1 + 2e-3 * (version - 1))) for name, tensor in tensors), version)

    plant(monkeypatch, healthy.sampler, "load_weights", drifting)
    assert failed(healthy) == {GROWTH}


def failed_without_model(**settings) -> set[str]:
    results = results_of(checks_without_model(dataclasses.replace(ARGS, **settings).update_config))
    return failures_of(results)


def test_a_biased_std(monkeypatch):
    monkeypatch.setitem(DEVIATIONS, "group", DEVIATIONS["group_population"])
    assert failed_without_model(std_of="group") == {OWN_LOSS, PAPERS}
    assert failed_without_model(std_of="batch") == {PAPERS}


def test_what_is_the_same_for_all_models_passes():
    assert failed_without_model() == set()


@pytest.mark.parametrize(
    ("measured", "word"),
    [
        ((0.0, 0.0, 0.0), "bitwise"),
        ((0.0, 1e-9, 0.0), "to rounding"),
        ((2.0, 1e-9, 0.0), "statistical"),
        ((0.0, 0.0, 1.0), "not verified"),
    ],
)
def test_how_far_a_run_is_reproducible(tmp_path, measured, word):
    """The third check, which has a limit of 0, fails where it is above."""
    words, limits = ("statistical", "to rounding", ""), (math.inf, math.inf, 0.0)
    checked = [
        Check("a <b>", limit, lambda number=number: number, at_best)
        for limit, number, at_best in zip(limits, measured, words, strict=True)
    ]
    (tmp_path / "verify").mkdir()
    (tmp_path / "run").mkdir()
    for folder in ("verify", "run"):
        write_args(tmp_path / folder, {"preset": "tiny", "model": "tiny", "seed": len(folder)}, {})
    assert reproducibility(tmp_path / "run", REPRODUCIBILITY_SETTING) == "not verified"
    assert write_results(tmp_path / "verify", results_of(checked), "base") == word
    assert reproducibility(tmp_path / "run", REPRODUCIBILITY_SETTING) == word
    (tmp_path / "paper").mkdir()
    shutil.copy(tmp_path / "verify" / "verification.html", tmp_path / "paper")
    assert reproducibility(tmp_path / "run", REPRODUCIBILITY_SETTING) == word
    page = (tmp_path / "verify" / "verification.html").read_text()
    assert f"<strong>{word}</strong>" in page and "a &lt;b&gt;" in page and "<td>torch</td>" in page
    assert "Judged weights: base." in page
    write_args(tmp_path / "run", {"preset": "tiny", "model": "another"}, {})
    assert reproducibility(tmp_path / "run", REPRODUCIBILITY_SETTING) == "not verified"


@pytest.mark.slow
def test_an_update_that_ignores_the_learning_rate(healthy, monkeypatch):
    plant(monkeypatch, healthy.policy, "step", lambda step, rate: step(1e-3))
    assert failed(healthy) == {RATE_0}


def test_skipped_updates_that_no_step_reports(healthy, monkeypatch):
    rollout = healthy.made_up(healthy.sample()[:2])
    assert healthy.faults_of_infinite(rollout) == []

    def without_count(update, *arguments, **options):
        result = update(*arguments, **options)
        return dataclasses.replace(result, report=result.report | {"bad_updates": 0})

    plant(monkeypatch, checks, "update", without_count)
    assert healthy.faults_of_infinite(rollout) == ["a report of other than 2 skipped updates"]


def test_tokens_that_are_drawn_alike_in_each_update(small_folder, monkeypatch):
    checked = verified(small_folder, token_selection="clip_cov")
    rollout = checked.made_up(checked.sample()[:2])
    assert checked.fixed_selections(rollout) == []

    def as_in_the_first_update(prepare, policy, rollout, rows, config, number):
        return prepare(policy, rollout, rows, config, 1)

    plant(monkeypatch, checks, "prepare_update", as_in_the_first_update)
    assert checked.fixed_selections(rollout) == ["the same tokens in the next update"]


def test_memory_and_seconds_beside_what_plan_said():
    """The worst device took 12 of 10 GB; the worst phase, which may take 2 to 4 s, took 16: a busy
    machine's, and no failure."""
    peaks = {"cuda:0": (9e9, 10e9), "cuda:1": (12e9, 10e9)}
    seconds = {"sample": (3.0, (2.0, 4.0)), "update": (16.0, (2.0, 4.0))}
    memory, time = checks_of_plan(peaks, seconds)
    assert (memory.what, time.what) == ("peak / plan's: cuda:1", "seconds / plan's range: update")
    assert memory.quantity() == pytest.approx(1.2) and time.quantity() == 4.0
    (fast,) = checks_of_plan({}, {"sample": (3.0, (2.0, 4.0)), "update": (0.5, (2.0, 4.0))})
    assert fast.what.endswith("update") and fast.quantity() == 4.0
    within = results_of(checks_of_plan({"cpu": (9e9, 10e9)}, {"sample": (3.0, (2.0, 4.0))}))
    assert [record["verdict"] for record in within] == ["passed", "measured"]
    assert within[0]["measured"] == pytest.approx(0.9)
    records = results_of(checks_of_plan(peaks, seconds))
    assert [record["verdict"] for record in records] == ["FAILED", "measured"]
    assert time.limit == math.inf and fast.limit == math.inf


def test_a_plan_that_is_wrong_says_nothing_of_results(tmp_path):
    write_args(tmp_path, {"preset": "tiny", "model": "tiny", "seed": 0}, {})
    records = results_of(
        [Check("the same", 0.0, lambda: 0.0), *checks_of_plan({"cpu": (2e9, 1e9)}, {})]
    )
    assert [record["passed"] for record in records] == [True, False]
    assert write_results(tmp_path, records, "base") == "bitwise"
    failing = results_of([Check("the same", 0.0, lambda: 1.0)])
    assert write_results(tmp_path, failing, "base") == "not verified"


def test_a_quantity_that_is_no_number_fails():
    (record,) = results_of([Check("", 1.0, lambda: math.nan)])
    assert record["passed"] is False and record["measured"] is None


def test_a_run_that_would_stop_fails_with_its_reason():
    def stop():
        raise RunStopped("the sampler took none of the weights")

    (record,) = results_of([Check("", math.inf, stop)])
    assert record["passed"] is False and record["error"] == "the sampler took none of the weights"


def test_the_plain_log_probs_are_those_of_transformers_own_model(healthy, small_folder):
    group = healthy.sample()[0]
    completion = group.completions[0]
    model = AutoModelForCausalLM.from_pretrained(
        small_folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        log_probs_TV = (
            model(ids).logits[0, len(completion.prompt_ids) - 1 : -1] / 0.8
        ).log_softmax(dim=-1)
    want_T = log_probs_TV.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    setting = {"sampling_temperature": 0.8, "sampling_top_p": 1.0, "sampling_top_k": 0}
    setting["log_probs_of"] = "sampled"
    (response, *_) = plain_responses([group])
    values = healthy.plain.token_values(healthy.plain.base, response, setting)
    assert torch.allclose(values.log_probs.float(), want_T, atol=1e-5)

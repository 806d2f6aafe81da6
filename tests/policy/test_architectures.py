"""Every family against its own forward pass, row by row: log-probs, gradients, decoding; the self-check; what is refused."""

import copy
import json
import time

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from alignment.core.records import SamplingConfig
from alignment.policy import log_probs, packing, self_check
from alignment.policy.loading import load_config, load_model, load_tokenizer, spread
from alignment.policy.log_probs import LabelLogProbs
from alignment.policy.packing import AttentionRule
from alignment.policy.plain_path import takes_plain_path
from alignment.policy.self_check import choose_path
from alignment.sampling import transformers as sampling_module
from alignment.sampling.transformers import TransformersSampler, choose_decoding
from alignment.system.errors import UserError
from benchmarks.architectures import FAMILIES, NoTokenizer, decoding_difference, family_model, training_differences

PLAIN = {"stablelm", "gptj", "bloom", "falcon", "mpt", "codegen"}


@pytest.fixture(autouse=True)
def forget_lines():
    self_check.say.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_gradients_and_decoding_are_those_of_the_models_own_forward_pass(family):
    model = family_model(family)
    choose_path(model)
    assert takes_plain_path(model) == (family in PLAIN)
    assert max(training_differences(model)) < 2e-5
    assert decoding_difference(model) < 2e-5
    sampler = TransformersSampler(model, NoTokenizer(), 64)
    choose_decoding(sampler)
    assert sampler.plain_path == (family in PLAIN)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "granite", "phi"])
def test_pieces_of_the_head_give_the_same(family, monkeypatch):
    monkeypatch.setattr(log_probs, "LOGITS_IN_MEMORY", 64 * 5)  # five rows at a time
    assert max(training_differences(family_model(family))) < 2e-5

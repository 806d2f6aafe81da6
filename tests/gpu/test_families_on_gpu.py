"""Every family of models on a GPU: our log-probs, gradients and decoding against the model's own
forward pass there."""

import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.core.text import ResponseReader
from alignment.model.log_probs import get_response_log_probs
from alignment.model.packing import OWN_ATTENTION, attention_named
from alignment.model.self_check import choose_path
from alignment.sampling.transformers import TransformersSampler, choose_decoding
from benchmarks import families

GPU = "cuda:0"


@pytest.fixture(autouse=True)
def products_in_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def own_logits(model, ids: list[int]) -> torch.Tensor:
    """The model's own logits [T, V] after each token of a row, by its family's attention."""
    with attention_named(model, OWN_ATTENTION):
        return model(input_ids=torch.tensor([ids], device=GPU), use_cache=False).logits[0].float()


def own_log_probs(model, batch) -> torch.Tensor:
    """log p of every response token, row by row, each row alone and without padding."""
    found = []
    for ids, labels, mask in zip(batch.input_ids, batch.labels, batch.response_mask, strict=True):
        places = mask.nonzero()[:, 0]
        logits = own_logits(model, ids[: places[-1] + 1].tolist())[places.to(GPU)]
        chosen = labels[places].to(GPU)
        found.append(logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_computes_on_a_gpu_what_its_own_forward_pass_does(name, figures):
    model = families.family_model(name).to(GPU)
    choose_path(model)
    torch.manual_seed(1)
    batch = families.rows_of([(11, 12), (3, 9), (5, 8)], repeats=3)
    own = own_log_probs(model, batch)
    weights = torch.randn(len(own), generator=torch.Generator().manual_seed(3)).to(GPU)
    expected = families.gradients(model, weights @ own)
    mask = batch.response_mask
    ours = get_response_log_probs(model, batch.input_ids, batch.labels, response_mask=mask)[
        "log_probs"
    ][mask.to(GPU)]
    gradient = families.gradients(model, weights @ ours)
    nats = (ours - own).abs().max().item()
    relative = ((gradient - expected).norm() / expected.norm()).item()
    figures(f"family {name}: nats, gradient", f"{nats:.1e}, {relative:.1e}")
    assert nats < 1e-4 and relative < 1e-4


@pytest.mark.parametrize("name", families.FAMILIES)
@torch.inference_mode()
def test_a_family_decodes_on_a_gpu_the_tokens_that_its_own_forward_pass_likes_best(name):
    model = families.family_model(name).to(GPU)
    choose_path(model)
    sampler = TransformersSampler(model, families.NoTokenizer(), 64)
    # without an end: every row is decoded to its full length
    sampler.responses = ResponseReader(sampler.tokenizer, ())
    choose_decoding(sampler)
    torch.manual_seed(2)
    prompts = [torch.randint(3, 64, (length,)).tolist() for length in (11, 4, 1)]
    sampling = SamplingConfig(n=2, temperature=0, max_new_tokens=12, stop=())
    waves = [[0], [1], [2]] if sampler.plain_path else [[0, 1, 2]]
    rows = []
    for wave in waves:
        rows += sampler.decode_wave(
            prompts, wave, torch.zeros(2 * len(wave), 12, device=GPU), sampling, None
        )
    for index, row in enumerate(rows):
        prompt = prompts[index // 2]
        log_probs = own_logits(model, prompt + row.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(-1, torch.tensor(row.token_ids, device=GPU)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.log_probs), chosen.cpu(), rtol=0, atol=1e-4)
        assert (log_probs.max(-1).values - chosen).max() < 1e-4

"""A sampler engine: `generate` of transformers, one prompt after another, at a temperature above
0."""

import torch
from transformers import AutoModelForCausalLM

from alignment.core.records import Completion
from alignment.core.text import ResponseReader, end_token_ids
from alignment.sampling.sampler import SamplerEngine, encode_prompts


class GenerateSampler:
    """A `Sampler` (alignment/sampling/sampler.py)."""

    restarts = 0

    def __init__(self, config, tokenizer, policy):
        self.tokenizer, self.policy_version = tokenizer, config.policy_version
        dtype = getattr(torch, config.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=dtype).to(
            config.device
        )
        self.context = self.model.config.max_position_embeddings
        self.responses = ResponseReader(
            tokenizer, end_token_ids(tokenizer, self.model.generation_config.eos_token_id)
        )

    def load_weights(self, named_tensors, version):
        # tied weights come under one of their names
        self.model.load_state_dict(dict(named_tensors), strict=False)
        self.policy_version = version

    def sample(self, prompts, sampling, on_response_end=None):
        encoded = encode_prompts(self.tokenizer, prompts, self.context, sampling.max_new_tokens)
        return [
            self.sample_prompt(number, ids, sampling)
            for number, ids in enumerate(encoded, sampling.first_prompt)
        ]

    def sample_prompt(self, number, prompt_ids, sampling):
        # of the prompt alone, so that several engines draw what one does
        torch.manual_seed(sampling.seed + number)
        input_ids_1P = torch.tensor([prompt_ids], device=self.model.device)
        drawn = self.model.generate(
            input_ids_1P,
            attention_mask=torch.ones_like(input_ids_1P),
            do_sample=True,
            num_return_sequences=sampling.n,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_strings=list(sampling.stop),
            tokenizer=self.tokenizer,
            eos_token_id=sorted(self.responses.end_ids),
            pad_token_id=self.tokenizer.eos_token_id,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens_nT = drawn.sequences[:, len(prompt_ids) :]
        scores_nTV = torch.stack(drawn.scores, dim=1)  # after temperature, top-k and top-p
        log_probs_nT = scores_nTV.log_softmax(-1).gather(-1, tokens_nT[..., None])[..., 0]
        return [
            self.completion(prompt_ids, *row, sampling.stop)
            for row in zip(tokens_nT.tolist(), log_probs_nT.tolist(), strict=True)
        ]

    def completion(self, prompt_ids, token_ids, log_probs, stop):
        """One row, up to its end: what follows is padding."""
        for length in range(1, len(token_ids) + 1):
            finished = self.responses.is_finished(token_ids[:length], stop)
            if finished:
                break
        text = self.responses.text(token_ids[:length], stop)
        ids, probs = tuple(token_ids[:length]), tuple(log_probs[:length])
        return Completion(
            tuple(prompt_ids),
            ids,
            probs,
            text,
            "stop" if finished else "length",
            self.policy_version,
        )

    def close(self):
        self.model = None


engine = SamplerEngine(GenerateSampler)

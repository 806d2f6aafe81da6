"""Completions in the folder of a run."""

import dataclasses

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alignment.core.records import Completion, Group, Problem, Rollout
from alignment.core.tokens import collate
from alignment.runs.run_folder import RunFolder


def test_tensorboard_has_one_sample_of_each_evaluation_as_text(tmp_path):
    completion = Completion((1,), (2,), (-0.1,), "<script>\x1b", "stop", 0)
    group = Group(Problem("a", "<b>q", "", ""), (completion,), ({"reward": 1.0},))
    run = RunFolder(tmp_path, trackers=["tensorboard"])
    for step in (0, 5):
        run.log_eval({"step": step}, [group])
    run.log_completions("rollout", 5, [group])
    run.close()
    RunFolder(tmp_path, 5, ["tensorboard"]).close()  # resumed
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    samples = events.Tensors("eval/sample/text_summary")
    assert [sample.step for sample in samples] == [0, 5]
    assert list(samples[0].tensor_proto.string_val) == [b"<pre>&lt;b&gt;q\n\n&lt;script&gt;\\x1b</pre>"]


def test_a_bad_batch_whose_mask_is_a_view_is_saved(tmp_path):
    batch = collate([[1, 2]] * 2, [[3, 4], [5]], pad_token_id=0)
    batch = dataclasses.replace(batch, response_mask=batch.response_mask.t().contiguous().t())
    assert not batch.response_mask.is_contiguous()
    ones_21 = torch.ones(2, 1)
    run = RunFolder(tmp_path)
    run.save_bad_batches(Rollout(batch, ones_21, ones_21.bool(), torch.zeros(batch.labels.shape)), 3, [[0, 1]])
    run.close()
    saved = load_file(tmp_path / "bad_batches" / "step_000003_1.safetensors")
    assert saved["response_mask"].tolist() == batch.response_mask.tolist() and saved["labels"].tolist() == batch.labels.tolist()

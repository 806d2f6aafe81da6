"""Completions in the folder of a run."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alignment.core.records import Completion, Group, Problem
from alignment.runs.run_folder import RunFolder


def test_tensorboard_has_one_sample_of_each_evaluation_as_text(tmp_path):
    completion = Completion((1,), (2,), (-0.1,), "<script>\x1b", "stop", 0)
    group = Group(Problem("a", "<b>q", "", ""), (completion,), ({"reward": 1.0},))
    run = RunFolder(tmp_path)
    for step in (0, 5):
        run.log_completions("eval", step, [group])
    run.log_completions("rollout", 5, [group])
    run.close()
    RunFolder(tmp_path, 5).close()  # resumed
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    samples = events.Tensors("eval/sample/text_summary")
    assert [sample.step for sample in samples] == [0, 5]
    assert list(samples[0].tensor_proto.string_val) == [b"<pre>&lt;b&gt;q\n\n&lt;script&gt;\\x1b</pre>"]

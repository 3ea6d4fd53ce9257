"""What notebook 11 computes of the backward pass: what is kept; recorded training steps, and the reader's own."""

import pytest
import torch

from tests.course.recorded_rows import record, row
from twell_lab.bench import training
from twell_lab.course.backward import data as backward
from twell_lab.course.recorded import LOGNORMAL
from twell_lab.ops import clock as clocks
from twell_lab.ops.reference import GatedFeedForward


def test_what_torch_saves_of_a_dense_layer_is_listed():
    layer = GatedFeedForward(16, 48)
    with backward.saved_tensors(layer) as saved:
        y = layer(torch.randn(10, 16))
    assert [tensor["shape"] for tensor in saved] == [[10, 16], [10, 48], [10, 48], [10, 48]]
    assert [tensor["bytes"] for tensor in saved] == [4 * 10 * 16, *[4 * 10 * 48] * 3]
    y.sum().backward()  # the hooks hand back what they were given
    assert layer.up_proj.weight.grad.abs().sum() > 0


def compared(nnz: float = 29.02, workload: str = LOGNORMAL, ms: float = 3.0, choice: str = "twell") -> list[dict]:
    times = {"dense eager": 6.0, "dense compiled": 5.4, "forced twell": ms, "planned": ms, "planned compiled": 2.7}
    peaks = {"dense eager": 1012 * 2**20, "forced twell": 390 * 2**20}
    shared = {"kind": "training", "nnz": nnz, "workload": workload, "choice": choice}
    return [
        row(path, each, 6.0, x_compiled=5.4 / each, peak_bytes=peaks.get(path), **shared)
        for path, each in times.items()
    ]


def test_layers_are_of_one_size_and_workload_and_whole_models_are_read_too(keep):
    trained = compared(60.0, "trained, L1 0.0001, layer 0")
    model = [each | {"layers": 8} for each in compared(20.0, "whole step, 8 layers")]
    others = [row("planned", tokens=1, kind="training"), row("planned (graph)", kind="training")]
    made = [*trained, *compared(), *model, *others]
    keep(record("training", "2026-11-21T00:00:00Z", made, ()))
    rows = backward.recorded()
    assert [each["nnz"] for each in backward.layers(rows)] == [29.02] * 5
    assert sum(each["workload"].startswith("whole step") for each in rows) == 5 and backward.recorded("RTX") == []


def test_your_own_steps_are_checked_and_come_as_rows(my_gpu, monkeypatch):
    """Real layers on the CPU, and a clock that makes up its times."""
    layer, inputs = clocks.workload(32, 64, 256, 8, "lognormal", torch.bfloat16, "cpu")
    times = {"dense eager": [6.0, 6.0], "forced twell": [3.0, 3.0]}
    monkeypatch.setattr(clocks, "time_cuda", lambda calls: times)
    rows = backward.step_rows(layer, inputs, 8)
    assert [(each["path"], each["nnz"], each["x_dense"]) for each in rows] == [
        ("dense eager", 8, 1.0),
        ("forced twell", 8, 2.0),
    ]
    assert rows[0]["device"] == "My GPU" and (rows[0]["tokens"], rows[0]["d_model"], rows[0]["d_ff"]) == (32, 64, 256)


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    monkeypatch.setattr(clocks, "time_cuda", lambda calls: pytest.fail("it was timed"))
    dense = training.dense_layer
    monkeypatch.setattr(training, "our_layer", lambda path: lambda x, gate, up, down: dense(x, gate, up, 2 * down))
    layer, inputs = clocks.workload(32, 64, 256, 8, "lognormal", torch.bfloat16, "cpu")
    with pytest.raises(clocks.WrongResult, match="a gradient is off by"):
        backward.step_rows(layer, inputs, 8)

"""The run of notebook 11 that switches its layers, a few steps of it, and what is said of a run."""

from dataclasses import replace

import pytest
import torch

from twell_lab.course import training
from twell_lab.course.backward import live
from twell_lab.course.backward.data import worst
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.sparse_ffn import SparseFFN

SIZES = {"d_model": 16, "heads": 2, "d_ff": 32, "layers": 2, "batch": 2, "context": 16}


@pytest.fixture(scope="module")
def begun():
    """A run of one step, which no layer of it has changed its path in."""
    config = replace(training.SMALL, text=training.some_text(60_000), steps=1, **SIZES)
    return config, *live.train(config, "cpu", 0.0)


def test_both_paths_have_the_same_gradients_and_leave_the_model_alone(begun):
    _, model, windows, history = begun
    layers = [layer.module for layer in feed_forwards(model)]
    assert history == [] and all(isinstance(layer, SparseFFN) and layer.learning == "dense" for layer in layers)
    batch = next(windows)
    assert batch.shape == (2, 17) and not torch.equal(batch, next(windows))
    sparse, dense = (live.gradients(model, batch, path, 0.1) for path in ("twell", "dense"))
    assert len(sparse) == len(list(model.parameters()))
    assert worst(sparse, dense) < 1e-5
    assert worst(live.gradients(model, batch, "twell", 0.0), dense) > 1e-3  # L1 is in them
    assert {layer.module.learning for layer in feed_forwards(model)} == {"dense"}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("limit", "path"), [(0.0, "dense"), (1e9, "twell")])
def test_a_run_changes_layers_over_at_the_limit(begun, limit, path):
    config = replace(begun[0], steps=5)
    model, windows, history = live.train(config, "cpu", limit, every=2)
    assert [row["step"] for row in history] == [2, 4] and all(row["bytes"] > 0 for row in history)
    assert history[-1]["paths"] == [path, path] == [layer.module.learning for layer in feed_forwards(model)]
    assert all(0 < nnz <= 32 for nnz in history[0]["nnz"]) and next(windows).shape == (2, 17)
    assert not torch.equal(next(model.parameters()), next(begun[1].parameters()))  # it learned

"""Training: the loss is the one written down, the same seed repeats, and L1 really makes layers sparse."""

import dataclasses
import json
import re
import sys

import pytest
import torch

from tests.training.train.small_runs import hidden_values, text_of
from twell_lab.core import DeviceError, TextError
from twell_lab.layers.terms import layer_terms
from twell_lab.models.tiny import LanguageModel
from twell_lab.training.config import learning_rate
from twell_lab.training.loop import initial_model, train
from twell_lab.training.objective import bits_per_byte, cross_entropy
from twell_lab.training.text.source import random_windows

# The loss


@pytest.mark.parametrize("gated", [True, False])
def test_the_l1_gradient_is_that_of_the_written_out_formula(tiny, gated):
    """Against autograd of the definition, token by token and neuron by neuron, in float64."""
    model = initial_model(tiny(gated=gated)).double()
    windows = torch.randint(256, (2, 17))
    inputs = []
    hooks = [layer.mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0])) for layer in model.layers]
    with layer_terms(model) as terms:
        cross_entropy(model, windows)
    for hook in hooks:
        hook.remove()
    weights, penalty = dict(model.named_parameters()), sum(term.l1 for term in terms) / 2
    got = torch.autograd.grad(penalty, weights.values(), allow_unused=True, retain_graph=True)
    total = 0.0
    for layer, x in zip(model.layers, inputs, strict=True):
        for token in x.flatten(0, 1):
            h = layer.mlp.up_proj.weight @ token
            h = h * (layer.mlp.gate_proj.weight @ token).clamp(min=0) if gated else h.clamp(min=0)
            total = total + sum(abs(value) for value in h)
    expected = total / (2 * 16) / 2  # tokens, layers
    torch.testing.assert_close(penalty, expected)
    wanted = torch.autograd.grad(expected, weights.values(), allow_unused=True)
    assert any(grad is not None and grad.abs().sum() > 0 for grad in wanted)
    for name, one, other in zip(weights, got, wanted, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, msg=name)


def test_the_loss_of_the_history_is_cross_entropy_plus_l1_times_the_penalty(tiny, some_text):
    """The first row against the model before training, on the first windows of the same order."""
    config = tiny(l1=0.37, steps=1, seed=3)
    row = train(config, progress=False).history[0]
    model = initial_model(config)
    windows = random_windows(some_text.split()[0].tokens, 4, 16, torch.Generator().manual_seed(3))
    with hidden_values(model) as hidden:
        scores = model(windows[:, :-1])
    chosen = scores.log_softmax(-1).gather(-1, windows[:, 1:, None])
    assert row["ce"] == pytest.approx(-chosen.mean().item(), rel=1e-5)
    assert row["l1_term"] == pytest.approx(0.37 * sum(h.abs().sum(-1).mean() for h in hidden).item() / 2, rel=1e-5)
    assert row["loss"] == pytest.approx(row["ce"] + row["l1_term"], rel=1e-6)
    assert row["nnz_layers"] == pytest.approx([(h != 0).sum().item() / 64 for h in hidden])
    assert row["nnz"] == pytest.approx(sum(row["nnz_layers"]) / 2)
    assert row["l1_layers"] == pytest.approx([h.abs().sum().item() / 64 for h in hidden], rel=1e-5)
    assert row["tokens_per_s"] > 0 and row["dead_layers"] is None


def test_bits_per_byte_of_a_model_that_knows_nothing_are_eight(tiny):
    model = initial_model(tiny())
    with torch.no_grad():
        model.norm.weight.zero_()
    windows = torch.randint(256, (70, 17))  # more than one batch of them, the last one short
    assert bits_per_byte(model, windows) == pytest.approx(8.0, abs=1e-5)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth(tiny):
    rates = [learning_rate(tiny(steps=100, warmup=10, lr=1.0), step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0, abs=0.03)
    assert rates.index(max(rates)) == 9 and rates[-1] == pytest.approx(0.1, abs=0.001)
    assert learning_rate(tiny(warmup=0, lr=1.0), 1) == 1.0


def test_the_same_seed_gives_the_same_curve_bit_for_bit(tiny, curve):
    """And the reader's generator is left alone."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        results.append(train(tiny(), progress=False))
        assert torch.equal(torch.random.get_rng_state(), state)
    assert curve(results[0].history) == curve(results[1].history)
    assert all(map(torch.equal, *(result.model.parameters() for result in results)))
    one, other = initial_model(tiny(seed=0)), initial_model(tiny(seed=1))
    assert not torch.equal(one.head.weight, other.head.weight)


def test_l1_makes_the_layers_sparse_and_training_lowers_the_loss(tiny):
    config = tiny(steps=100, batch=8, d_model=32, d_ff=64, lr=1e-2, warmup=10, eval_every=50)
    dense, sparse = (train(dataclasses.replace(config, l1=l1), progress=False) for l1 in (0.0, 0.1))
    assert dense.validation_bits_per_byte < 4.5 and sparse.validation_bits_per_byte < 4.5
    assert sparse.mean_nnz < 0.25 * dense.mean_nnz
    assert dense.history[-1]["l1_term"] == 0 < sparse.history[-1]["l1_term"]


def test_the_history_the_summary_and_the_bar_say_what_happened(tiny, some_text, capsys, monkeypatch):
    rows = []
    result = train(tiny(steps=6), progress=True, on_step=rows.append)
    assert capsys.readouterr() == ("", "")  # no bar for a file
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    train(tiny(steps=6), progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and re.search(r"6/6.*left, \d+\.\d{3} bits per byte, nnz \d+", shown.err)
    assert rows == result.history and [row["step"] for row in rows] == [1, 2, 4, 6]
    assert [row["step"] for row in rows if "val_bits_per_byte" in row] == [4, 6]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[-1] <= result.seconds and result.tokens == 6 * 4 * 16
    assert result.validation_bits_per_byte == rows[-1]["val_bits_per_byte"]
    assert len(result.density) == len(result.dead) == 2
    assert result.mean_nnz == pytest.approx(sum(result.density) / 2 * 32)
    assert result.text["sha256"] == some_text.sha256
    assert result.text["training_size"] + result.text["validation_size"] == some_text.size
    assert isinstance(result.model, LanguageModel) and not result.model.training
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in result.model.modules())
    summary = json.loads(json.dumps(result.summary(), allow_nan=False))
    assert summary["config"]["l1"] == 0.01 and "text" not in summary["config"]
    assert summary["parameters"] == sum(weight.numel() for weight in result.model.parameters())


@pytest.mark.parametrize("missing", ["cuda:99", "mps", "meta"])
def test_a_missing_device_is_named(tiny, missing):
    with pytest.raises(DeviceError, match=missing) as refused:
        train(tiny(device=missing), progress=False)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("size, words", [(100, "8 windows of 16 need at least 129"), (1, "at least 2")])
def test_too_little_text_names_what_it_needs(tiny, size, words):
    with pytest.raises(TextError, match=words):
        train(tiny(text=text_of(bytes(size)), batch=8), progress=False)

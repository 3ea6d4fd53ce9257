"""The trainer's options: precision, compilation, parts of a step, schedules of L1, dead neurons, kernels,
tokenizers."""

import copy
import functools
import json
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.training.train.small_runs import SMALL, hidden_values
from twell_lab.analysis import switching
from twell_lab.app import cli
from twell_lab.core import InputError
from twell_lab.cuda.launch import lie
from twell_lab.layers.find import FeedForward, feed_forwards
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel
from twell_lab.ops import train as operator
from twell_lab.training import loop as running
from twell_lab.training import objective
from twell_lab.training.loop import initial_model, train
from twell_lab.training.objective import bits_per_byte, cross_entropy, l1_coefficient
from twell_lab.training.text.source import load, random_windows, spread_windows

PLAIN = dict(activation="relu2", gated=False)


@pytest.fixture(scope="module")
def dense(tiny):
    """The result of the run with these changes, made once."""
    return functools.cache(lambda **changes: train(tiny(**changes), progress=False))


@pytest.fixture
def graphs(monkeypatch):
    """Counts what torch.compile traces, for a compiler that changes nothing: code generation takes half a minute."""
    graphs = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    torch._dynamo.reset()
    return graphs


def close(history, other, rel):
    for one, two in zip(history, other, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=rel)
        assert one["nnz"] == pytest.approx(two["nnz"], rel=max(rel, 1e-3))
        assert one["l1_layers"] == pytest.approx(two["l1_layers"], rel=max(rel, 1e-4))


@pytest.mark.parametrize(
    "changes, rel",
    [({"accumulate": 2}, 1e-4), ({"accumulate": 4}, 1e-4), ({"dtype": "bfloat16"}, 5e-3)]
    + [({"kernels": kernels, **more}, 1e-5) for kernels in ("sparse", "auto") for more in ({}, PLAIN)],
    ids=str,
)
def test_every_way_to_compute_a_step_gives_the_same_curve_and_a_dense_model(tiny, dense, changes, rel):
    plain = dense(**(PLAIN if "activation" in changes else {}))
    result = train(tiny(**changes), progress=False)
    close(result.history, plain.history, rel)
    assert result.validation_bits_per_byte == pytest.approx(plain.validation_bits_per_byte, rel=rel)
    assert "dtype" not in changes or result.history != plain.history
    assert [type(module) for module in result.model.modules()] == [type(module) for module in plain.model.modules()]
    assert {weight.dtype for weight in result.model.parameters()} == {torch.float32}
    tokens = torch.randint(50, (2, 9))
    with torch.no_grad():
        expected = result.model(tokens)
        torch.testing.assert_close(sparsify(result.model, "twell")(tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compiled_run_has_one_graph_and_the_same_curve(tiny, graphs, dtype):
    """L1 begins in mid-run."""
    options = dict(dtype=dtype, l1_delay=4, l1_warmup=4, accumulate=2, dead_window=100)
    result = train(tiny(compile=True, **options), progress=False)
    assert graphs.frame_count == 1
    close(result.history, train(tiny(**options), progress=False).history, 1e-6)


def test_each_path_is_compiled_once_however_many_layers_change_over(tiny, graphs, monkeypatch):
    """The ten layers change over one by one, at ten rows. torch gives up compiling a function after eight times."""
    change_over = lambda run, *_: run.layers[min(run.step - 1, 9)].module.learn("twell")  # noqa: E731
    monkeypatch.setattr(running.Run, "follow", change_over)
    config = dict(layers=10, log_every=1, kernels="auto")
    result = train(tiny(**config, compile=True), progress=False)
    assert graphs.frame_count == 3  # the two, and the cross-entropy
    monkeypatch.undo()
    close(result.history, train(tiny(**config), progress=False).history, 1e-5)


def switch_at(below):
    """What makes a Switch whose layers all change over at so many neurons."""
    return lambda model: switching.Switch(model, {layer.name: below for layer in feed_forwards(model)})


def test_layers_change_over_when_they_fire_little_enough(tiny, dense, monkeypatch):
    """From the dense path to the kernels, each layer by its own nnz, at the rows of the history."""
    taken, follow = [], running.Run.follow
    monkeypatch.setattr(running, "Switch", switch_at(8.0))

    def watched(run, nnz, *others):
        follow(run, nnz, *others)
        taken.append((nnz, [layer.module.learning for layer in run.layers]))

    monkeypatch.setattr(running.Run, "follow", watched)
    config = dict(l1=1.0, lr=0.05, warmup=2, steps=16)
    result = train(tiny(kernels="auto", **config), progress=False)
    close(result.history, dense(**config).history, 1e-3)
    assert [nnz for nnz, _ in taken] == [row["nnz_layers"] for row in result.history]
    assert {"dense"} == set(taken[0][1]) and {"twell"} == set(taken[-1][1])
    for value, path in ((value, path) for row in taken for value, path in zip(*row, strict=True)):
        assert 7.2 <= value <= 8.8 or path == ("twell" if value < 7.2 else "dense")


def test_lost_tokens_reach_the_history_and_send_a_layer_back(tiny, monkeypatch):
    """On a CPU none is lost: here the operator says that half of them are, in the second layer."""
    real, calls = operator.train, []

    def losing(*arguments, path):
        calls.append(path)
        y, l1, kept = real(*arguments, path=path)
        gap = kept.new_zeros(lie(4 * len(kept))[1] // 4 - len(kept))
        lost = kept.new_tensor([len(kept) // 2 if len(calls) % 2 == 0 else 0])
        return y, l1, torch.cat([kept, gap, lost]) if path == "twell" else kept

    monkeypatch.setattr(operator, "train", losing)
    monkeypatch.setattr(running, "Switch", switch_at(1000.0))
    monkeypatch.setattr(switching, "LOST", 1e4)
    result = train(tiny(kernels="auto", accumulate=2, steps=6, log_every=1), progress=False)
    lost = [row["lost_layers"] for row in result.history]
    assert lost[0] == [0, 0] and lost[1] == [0, pytest.approx(0.5)] and lost[2:] == [[0, 0]] * 4
    assert "lost_layers" not in train(tiny(steps=2), progress=False).history[0]


DYING = dict(l1=1.0, lr=0.08, warmup=2, steps=40, dead_window=60, log_every=1)


def test_the_coefficient_waits_and_then_climbs(tiny):
    config = tiny(l1=2.0, l1_delay=3, l1_warmup=4)
    assert [l1_coefficient(2.0, 3, 4, step) for step in range(1, 10)] == [0, 0, 0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert [l1_coefficient(2.0, 1, 0, step) for step in (1, 2)] == [0, 2.0]
    terms = [row["l1_term"] / (sum(row["l1_layers"]) / 2) for row in train(config, progress=False).history]
    assert terms == pytest.approx([0, 0, 0.5, 1.5, 2.0, 2.0, 2.0], abs=1e-5)


def test_the_dead_are_those_that_did_not_fire_within_the_window(tiny, some_text):
    """Counted from gradients in training; here from the activations themselves, with the weights standing still."""
    few = {**DYING, "lr": 1e-30, "batch": 1, "context": 4}
    config = tiny(**{**few, "steps": 4, "dead_window": 3})
    rows = train(config, progress=False).history
    model, order = initial_model(config), torch.Generator().manual_seed(0)
    fired = []
    for row in rows:
        windows = random_windows(some_text.split()[0].tokens, 1, 4, order)
        with hidden_values(model) as hidden:
            model(windows[:, :-1])
        fired.append([(h != 0).flatten(0, 1).any(0) for h in hidden])
        assert row["dead_layers"] == [int((~layer).sum()) for layer in fired[-1]]  # four tokens a step
    assert any(sum(row["dead_layers"]) for row in rows)
    both = train(tiny(**{**few, "steps": 2, "dead_window": 8}), progress=False).history
    silent_in_both = [int((~(a | b)).sum()) for a, b in zip(*fired[:2], strict=True)]
    assert [row["dead_layers"] for row in both] == [[0, 0], silent_in_both]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_dead_rows_move_as_the_papers_equation_says(bias, gated):
    dead, drawn = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0]).bool(), lambda: torch.Generator().manual_seed(7)
    gate, up, down = nn.Linear(5, 8, bias), nn.Linear(5, 8, bias), nn.Linear(8, 5, bias)
    changed = FeedForward("", nn.Module(), gate if gated else None, up, down)
    before = copy.deepcopy(changed)
    silence = objective.Silence([changed], drawn())
    silence.revive(1, 0.1)
    assert torch.equal(changed.pattern.weight, before.pattern.weight)
    changed.pattern.weight.grad = torch.where(dead[:, None], 0.0, torch.rand(8, 5))
    silence.count(1)
    silence.revive(1, 0.1)
    expected = before.pattern.weight.detach().clone()
    expected[dead] = 0.9 * expected[dead] + 0.1 * 0.02 * torch.randn(3, 5, generator=drawn())
    torch.testing.assert_close(changed.pattern.weight.detach(), expected)
    assert torch.equal(changed.down.weight, before.down.weight)
    assert torch.equal(changed.up.weight, before.up.weight) == gated
    if bias:
        torch.testing.assert_close(changed.pattern.bias, torch.where(dead, 0.9, 1.0) * before.pattern.bias)


@pytest.mark.filterwarnings("ignore:step .*no neuron fires")
def test_reinitialised_rows_bring_dead_neurons_back(tiny, monkeypatch):
    monkeypatch.setattr(objective, "SIGMA", 1.0)  # as large as these weights are
    left = train(tiny(**DYING), progress=False)
    brought = train(tiny(**DYING, reinit=0.5, dead_every=1), progress=False)
    assert sum(left.history[-1]["dead_layers"]) > 2 * sum(brought.history[-1]["dead_layers"])


@pytest.mark.filterwarnings("error")
def test_that_no_neuron_fires_is_told_once_with_the_numbers(tiny):
    with pytest.warns(UserWarning, match=r"no neuron fires in any of the 2 layers of 32 .*l1 1000 ") as told:
        result = train(tiny(l1=1000.0, lr=0.1, warmup=0, steps=40), progress=False)
    assert len(told) == 1 and math.isfinite(result.history[-1]["loss"])


def test_a_bpe_is_trained_saved_and_read_back(some_text, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "text.py").write_bytes(some_text.tokens.numpy().tobytes())
    out, text = str(tmp_path / "out"), ["--text", str(tmp_path / "text.py")]
    short = "--tokenizer=bpe:300 --steps=4 --batch=4 --context=16 --json".split()
    assert cli.main(["train", *text, *SMALL, *short, "--out", out]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert LanguageModel.load(out).config.vocabulary == summary["text"]["tokenizer"]["vocabulary"] == 300
    assert 5 < summary["validation_bits_per_byte"] < 9
    assert cli.main(["profile", out, *text, "--json"]) == 0
    assert cli.main(["train", "--resume", out, "--steps", "5"]) == 0
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert cli.main(["profile", out, *text]) == 2
    assert "a vocabulary of 300, and 256 would be read: bytes, as there is no" in capsys.readouterr().err


def test_bits_per_byte_count_the_bytes_that_were_predicted(tiny, some_text):
    """Not those of the whole held-out text: few windows may hold longer tokens, or shorter ones."""
    pytest.importorskip("tokenizers")
    config = tiny(tokenizer="bpe:600", eval_windows=2)
    whole = load(some_text, tokenizer="bpe:600")
    held_out, lengths = whole.split()[1], whole.tokenizer.lengths
    windows = spread_windows(held_out.tokens, 2, 16)
    model = initial_model(config, 600)
    nats = sum(cross_entropy(model, window[None]).item() * 16 for window in windows)
    pieces = sum(len(whole.tokenizer.decode(window[1:])) for window in windows)
    assert bits_per_byte(model, windows, lengths) == pytest.approx(nats / math.log(2) / pieces, rel=1e-5)
    average = held_out.size / len(held_out.tokens)
    assert pieces / (2 * 16) != pytest.approx(average, rel=0.02)  # or this text shows nothing
    trained = train(config, progress=False)
    assert trained.validation_bits_per_byte == bits_per_byte(trained.model, windows, lengths)


WRONG = {"l1": (-1e-9, math.nan, "0.1", None, 1e39), "steps": (0, 1.5), "heads": (3,), "d_ff": (12.5,), "lr": (0,)}
WRONG |= {"gated": ("yes",), "seed": (-1, True, 2**64), "device": (3.5, torch.device("cpu")), "text": (7,)}
WRONG |= {"dtype": ("float16",), "compile": (1,), "accumulate": (0,), "dead_window": (-1,), "reinit": (1.5, 0.1)}
WRONG |= {"tokenizer": (7,)}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name(tiny, name, value):
    with pytest.raises(InputError, match=f"{name}.*accepted"):
        tiny(**{name: value})


def test_what_does_not_go_together_is_named_and_numbers_of_numpy_are_numbers(tiny):
    with pytest.raises(InputError, match="config is a dict; accepted: a TrainConfig"):
        train({"l1": 1.0})
    with pytest.raises(InputError, match="batch is 4 with accumulate 3 and 1 processes; accepted: a multiple of 3"):
        train(tiny(accumulate=3))
    for kernels in ("auto", "sparse"):
        with pytest.raises(InputError, match=f"kernels is '{kernels}' with activation 'relu2' in gated layers; acc"):
            tiny(kernels=kernels, activation="relu2")
    assert tiny(l1=np.float64(1e-5), lr=np.float64(1e-3)).l1 == 1e-5


@pytest.mark.filterwarnings("always:step .*no neuron fires")
def test_a_warning_is_one_line_on_the_command_line(some_text, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.py").write_bytes(some_text.tokens.numpy().tobytes())
    silencing = "--steps=60 --d-ff=8 --l1=1e4 --lr=0.05 --warmup=0".split()
    lines = []
    monkeypatch.setattr(warnings, "showwarning", lambda *what: lines.append(warnings.formatwarning(*what[:4])))
    assert cli.main(["train", "--text", str(tmp_path / "text.py"), *SMALL, *silencing]) == 0
    (line,) = [line for line in lines if "no neuron fires" in line]
    assert line.startswith("\ntwell-lab: warning: step ") and line.strip().count("\n") == 0

"""The trainer's options: precision, compilation, parts of a step, schedules of L1, dead neurons, kernels,
tokenizers."""

import argparse
import dataclasses
import functools
import json
import math
import warnings
from typing import Literal

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.training.train.small_runs import SMALL
from twell_lab.analysis import switching
from twell_lab.app import cli
from twell_lab.app import options as options_module
from twell_lab.core import InputError
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel
from twell_lab.ops import train as operator
from twell_lab.training import run as running
from twell_lab.training.config import TrainResult
from twell_lab.training.loop import initial_model, train
from twell_lab.training.objective import Objective, bits_per_byte, cross_entropy, hidden_activations
from twell_lab.training.schedule import l1_coefficient
from twell_lab.training.text import load
from twell_lab.training.text.source import random_windows, spread_windows


@pytest.fixture(scope="module")
def plain(tiny):
    return train(tiny(), progress=False)


def close(history, other, rel):
    for one, two in zip(history, other, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=rel)
        assert one["nnz"] == pytest.approx(two["nnz"], rel=max(rel, 1e-3))
        assert one["l1_layers"] == pytest.approx(two["l1_layers"], rel=max(rel, 1e-4))


def test_a_step_in_parts_is_the_step(tiny, plain):
    for parts in (2, 4):
        close(train(tiny(accumulate=parts), progress=False).history, plain.history, 1e-4)


def test_bfloat16_trains_the_same_weights_with_coarser_products(tiny, plain):
    result = train(tiny(dtype="bfloat16"), progress=False)
    close(result.history, plain.history, 5e-3)
    assert result.history != plain.history
    assert {weight.dtype for weight in result.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compiled_run_has_one_graph_and_the_same_curve(tiny, monkeypatch, dtype):
    """torch.compile's tracing without its code generation, which takes half a minute; L1 begins in mid-run."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    options = dict(dtype=dtype, l1_delay=4, l1_warmup=4, accumulate=2, dead_window=100)
    result = train(tiny(compile=True, **options), progress=False)
    assert len(graphs) == 1
    close(result.history, train(tiny(**options), progress=False).history, 1e-6)


def test_the_coefficient_waits_and_then_climbs(tiny):
    config = tiny(l1=2.0, l1_delay=3, l1_warmup=4)
    assert [l1_coefficient(config, step) for step in range(1, 10)] == [0, 0, 0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert l1_coefficient(tiny(l1=2.0), 1) == 2.0
    terms = {row["step"]: row["l1_term"] / (sum(row["l1_layers"]) / 2) for row in train(config, progress=False).history}
    assert [round(value, 5) for value in terms.values()] == [0, 0, 0.5, 1.5, 2.0, 2.0, 2.0]


# Dead neurons

DYING = dict(l1=1.0, lr=0.08, warmup=2, steps=40, dead_window=60, log_every=1)


def test_the_dead_are_those_that_did_not_fire_within_the_window(tiny, some_text):
    """Counted from gradients in training; here from the activations themselves, with the weights standing still."""
    config = tiny(**{**DYING, "lr": 1e-30, "steps": 4}, d_ff=512)
    rows = train(config, progress=False).history
    model, order = initial_model(config), torch.Generator().manual_seed(0)
    fired = []
    for row in rows:
        windows = random_windows(some_text.split()[0].data, 4, 16, order)
        with hidden_activations(model) as hidden:
            model(windows[:, :-1])
        fired.append([(h != 0).flatten(0, 1).any(0) for h in hidden])
        assert row["dead_layers"] == [int((~layer).sum()) for layer in fired[-1]]  # 64 tokens a step, a window of 60
    assert any(sum(row["dead_layers"]) for row in rows)
    both = train(tiny(**{**DYING, "lr": 1e-30, "steps": 2, "dead_window": 128}, d_ff=512), progress=False).history
    assert [row["dead_layers"] for row in both] == [
        [0, 0],
        [int((~(a | b)).sum()) for a, b in zip(*fired[:2], strict=True)],
    ]


@pytest.mark.filterwarnings("ignore:step .*no neuron fires")
def test_reinitialised_rows_bring_dead_neurons_back(tiny):
    left = train(tiny(**DYING), progress=False)
    brought = train(tiny(**DYING, reinit=0.5, reinit_sigma=1.0, dead_every=1), progress=False)
    assert sum(left.history[-1]["dead_layers"]) > 2 * sum(brought.history[-1]["dead_layers"])


def test_a_coefficient_that_kills_every_neuron_is_told_with_the_numbers(tiny):
    with pytest.warns(UserWarning, match=r"step \d+: no neuron fires in any of the 2 layers of 32 .*l1 1000 ") as seen:
        result = train(tiny(l1=1000.0, lr=0.1, warmup=0, steps=40), progress=False)
    assert result.history[-1]["nnz"] == 0 and math.isfinite(result.history[-1]["loss"])
    assert len([each for each in seen if "no neuron fires" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tiny(), progress=False)


def test_a_text_read_many_times_over_is_told_with_the_numbers(tiny, some_text):
    few = dataclasses.replace(some_text, data=some_text.data[:190])  # 171 to train on, 768 read
    with pytest.warns(UserWarning, match="^12 steps of 4 windows of 16 tokens read a text of 171 .* 4 times over"):
        train(tiny(text=few), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tiny(text=few, steps=10), progress=False)  # 3.7 times


@pytest.mark.parametrize("kernels", ["auto", "sparse"])
def test_squared_relu_in_gated_layers_has_no_sparse_layers(tiny, kernels):
    with pytest.raises(InputError, match=f"kernels is '{kernels}' with activation 'relu2' in gated layers; accepted"):
        tiny(kernels=kernels, activation="relu2")


@pytest.mark.parametrize("kernels", ["auto", "sparse"])
def test_squared_relu_in_plain_layers_trains_to_the_same_curve_and_is_swapped(tiny, kernels):
    dense = train(tiny(activation="relu2", gated=False), progress=False)
    result = train(tiny(activation="relu2", gated=False, kernels=kernels), progress=False)
    close(result.history, dense.history, 1e-5)
    assert result.validation_bits_per_byte == pytest.approx(dense.validation_bits_per_byte, rel=1e-5)
    model, tokens = result.model.eval(), torch.randint(50, (2, 9))
    with torch.no_grad():
        expected = model(tokens)
        torch.testing.assert_close(sparsify(model, "twell")(tokens), expected, rtol=1e-4, atol=1e-4)


# Other ways to compute the same


@pytest.mark.parametrize("kernels", ["sparse", "auto"])
def test_sparse_layers_train_to_the_same_curve(tiny, plain, kernels):
    result = train(tiny(kernels=kernels), progress=False)
    close(result.history, plain.history, 1e-5)
    assert [type(module) for module in result.model.modules()] == [type(module) for module in plain.model.modules()]
    assert result.validation_bits_per_byte == pytest.approx(plain.validation_bits_per_byte, rel=1e-5)
    assert not any(module._forward_pre_hooks for module in result.model.modules())


def test_layers_change_over_when_they_fire_little_enough(tiny, monkeypatch, some_text):
    """From the dense path to the kernels, each layer by its own nnz, at the rows of the history."""
    seen = []
    follow = running.Run.follow
    monkeypatch.setattr(running, "Switch", functools.partial(switching.Switch, below=8.0))

    def watched(run, nnz, *others):
        follow(run, nnz, *others)
        seen.append((nnz, [layer.module.learning for layer in run.layers]))

    monkeypatch.setattr(running.Run, "follow", watched)
    config = dict(l1=1.0, lr=0.05, warmup=2, steps=16)
    result = train(tiny(kernels="auto", **config), progress=False)
    close(result.history, train(tiny(**config), progress=False).history, 1e-3)
    assert [nnz for nnz, _ in seen] == [row["nnz_layers"] for row in result.history]
    assert {"dense"} == set(seen[0][1]) and {"twell"} == set(seen[-1][1])
    for nnz, paths in seen:
        assert all(
            path == ("twell" if value < 7.2 else "dense")
            for value, path in zip(nnz, paths, strict=True)
            if not 7.2 <= value <= 8.8
        )


@pytest.fixture
def graphs(monkeypatch):
    """Counts what is compiled, by a compiler that changes nothing."""
    made = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=made))
    torch._dynamo.reset()
    return made


def change_over(run, *_):
    """The ten layers change over to the kernels one by one, at the first ten rows of the history."""
    run.layers[min(run.step - 1, 9)].module.learn("twell")


def test_each_path_is_compiled_once_however_many_layers_change_over(tiny, graphs, monkeypatch):
    """torch gives up compiling a function after eight times."""
    monkeypatch.setattr(running.Run, "follow", change_over)
    config = dict(layers=10, log_every=1, kernels="auto")
    result = train(tiny(**config, compile=True), progress=False)
    assert graphs.frame_count == 3  # the two, and the cross-entropy
    monkeypatch.undo()
    close(result.history, train(tiny(**config), progress=False).history, 1e-5)


def test_lost_tokens_reach_the_history_and_send_a_layer_back(tiny, monkeypatch):
    """On a CPU none is lost: here the operator says that half of them are, in the second layer."""
    real, calls = operator.train, []

    def losing(*arguments, path):
        calls.append(path)
        y, l1, kept, _ = real(*arguments, path=path)
        lost = torch.tensor([kept.numel() // 2 if len(calls) % 2 == 0 else 0])
        return y, l1, kept, lost if path == "twell" else None

    monkeypatch.setattr(operator, "train", losing)
    monkeypatch.setattr(running, "Switch", functools.partial(switching.Switch, below=1000.0))
    monkeypatch.setattr(switching, "LOST", 1e4)
    result = train(tiny(kernels="auto", accumulate=2, steps=6, log_every=1), progress=False)
    lost = [row["lost_layers"] for row in result.history]
    assert lost[0] == [0, 0] and lost[1] == [0, pytest.approx(0.5)] and lost[2:] == [[0, 0]] * 4
    assert "lost_layers" not in train(tiny(steps=2), progress=False).history[0]


def test_an_objective_leaves_validations_alone(tiny):
    model = initial_model(tiny())
    measured = Objective(model)
    windows = torch.randint(256, (2, 17))
    model(windows[:, :-1])
    assert measured.seen == [[], []]
    loss, numbers, *by_layer = measured(windows, None, False)
    assert loss.requires_grad and numbers[1] == 0 and measured.seen == [[], []]
    assert [each.numel() for each in by_layer] == [0] * 5


def test_a_bpe_is_trained_saved_and_read_back(some_text, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "text.py").write_bytes(some_text.data.numpy().tobytes())
    out = tmp_path / "out"
    short = "--tokenizer=bpe:300 --steps=4 --batch=4 --context=16 --json".split()
    assert cli.main(["train", "--text", str(tmp_path / "text.py"), *SMALL, *short, "--out", str(out)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert LanguageModel.load(out).config.vocabulary == summary["text"]["tokenizer"]["vocabulary"] == 300
    assert (out / "tokenizer.json").is_file() and 5 < summary["validation_bits_per_byte"] < 9
    assert cli.main(["profile", str(out), "--text", str(tmp_path / "text.py"), "--json"]) == 0
    assert cli.main(["train", "--resume", str(out), "--json"]) == 0
    (out / "tokenizer.json").unlink()
    assert cli.main(["profile", str(out), "--text", str(tmp_path / "text.py")]) == 2
    assert "a vocabulary of 300, and 256 would be read: bytes, as there is no" in capsys.readouterr().err


# What is refused


WRONG = {"l1": (-1e-9, math.nan, "0.1", None, 1e39), "steps": (0, 1.5), "heads": (3,), "d_ff": (12.5,), "lr": (0,)}
WRONG |= {"gated": ("yes",), "seed": (-1, True, 2**64), "device": (3.5, torch.device("cpu")), "text": (7,)}
WRONG |= {"dtype": ("float16",), "compile": (1,), "accumulate": (0, 3), "dead_window": (-1,), "reinit": (1.5, 0.1)}
WRONG |= {"checkpoint_every": (-1, "5"), "tokenizer": (7,)}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name(tiny, name, value):
    with pytest.raises(InputError, match=f"{name}.*accepted"):
        tiny(**{name: value})


def test_what_is_no_config_is_named_and_numbers_of_numpy_are_numbers(tiny, capsys):
    with pytest.raises(InputError, match="config is a dict; accepted: a TrainConfig"):
        train({"l1": 1.0})
    assert cli.main(["train", "--checkpoint-every", "10"]) == 2
    assert "--checkpoint-every is 10 without --out; accepted" in capsys.readouterr().err
    assert tiny(l1=np.float64(1e-5), lr=np.float64(1e-3)).l1 == 1e-5


def test_bits_per_byte_count_the_bytes_that_were_predicted(tiny, some_text):
    """Not those of the whole held-out text: few windows may hold longer tokens, or shorter ones."""
    pytest.importorskip("tokenizers")
    config = tiny(tokenizer="bpe:600", eval_windows=3)
    whole = load.load_any(some_text, tokenizer="bpe:600")
    held_out, lengths = whole.split()[1], whole.tokenizer.lengths
    windows = spread_windows(held_out.tokens, 3, 16)
    model = initial_model(config, 600)
    nats = sum(cross_entropy(model, window[None]).item() * 16 for window in windows)
    pieces = sum(len(whole.tokenizer.decode(window[1:])) for window in windows)
    assert bits_per_byte(model, windows, lengths) == pytest.approx(nats / math.log(2) / pieces, rel=1e-5)
    assert pieces / (3 * 16) != pytest.approx(
        held_out.size / len(held_out.tokens), rel=0.02
    )  # or this text shows nothing
    trained = train(config, progress=False)
    assert trained.validation_bits_per_byte == bits_per_byte(trained.model, windows, lengths)
    bytes_alone = spread_windows(some_text.data, 3, 16)
    assert bits_per_byte(initial_model(config), bytes_alone) == bits_per_byte(
        initial_model(config), bytes_alone, torch.ones(256)
    )


@pytest.mark.filterwarnings("always:step .*no neuron fires")
def test_a_warning_is_one_line_on_the_command_line(some_text, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.py").write_bytes(some_text.data.numpy().tobytes())
    silencing = "--steps=60 --d-ff=8 --l1=1e4 --lr=0.05 --warmup=0".split()
    lines = []
    monkeypatch.setattr(warnings, "showwarning", lambda *what: lines.append(warnings.formatwarning(*what[:4])))
    assert cli.main(["train", "--text", str(tmp_path / "text.py"), *SMALL, *silencing]) == 0
    (line,) = [line for line in lines if "no neuron fires" in line]
    assert line.startswith("\ntwell-lab: warning: step ") and line.strip().count("\n") == 0


def test_a_summary_names_the_tokenizers_file_alone(tiny, tmp_path):
    kept = dict.fromkeys(
        ("history", "validation_bits_per_byte", "mean_nnz", "density", "dead", "text", "seconds", "tokens")
    )
    for given, shown in ((tmp_path / "own.json", "own.json"), ("bpe:300", "bpe:300"), (None, None)):
        result = TrainResult(torch.nn.Identity(), tiny(tokenizer=given), **kept)
        assert json.loads(json.dumps(result.summary()))["config"]["tokenizer"] == shown


@dataclasses.dataclass
class Settings:
    """What a test of its own is told: 100% its own.

    text: a file.

    The sizes:
        size_of_all: all of them, with kind.
    """

    text: str | None = None
    size_of_all: float = 2e-3
    kind: Literal["one", "two"] = "one"
    fast: bool = False
    from_: int | None = None


def test_any_field_of_a_dataclass_is_an_option():
    parser = argparse.ArgumentParser(prog="settings")
    options_module.add_fields(parser, Settings)
    assert options_module.given(parser.parse_args([]), Settings) == {}
    asked = parser.parse_args("--text a --size-of-all 1e-4 --kind two --fast --from 5".split())
    told = {"text": "a", "size_of_all": 1e-4, "kind": "two", "fast": True, "from_": 5}
    assert options_module.given(asked, Settings) == told
    first, sizes = " ".join(parser.format_help().split()).split(" the sizes: ")
    assert "--from N" in first and "--kind {one,two} [one]" in first and sizes.endswith("with kind [0.002]")
    with pytest.raises(SystemExit):
        parser.parse_args(["--size-of-all", "x"])

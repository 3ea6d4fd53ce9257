"""What is predicted for GPUs that are not here, and how far off that is said to be."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab import records
from twell_lab.analysis import predict
from twell_lab.analysis.profile import FiringProfile, LayerProfile
from twell_lab.analysis.running import POSITIONS
from twell_lab.app import cli
from twell_lab.core import InputError
from twell_lab.ops import clock


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_the_chances_of_each_number_of_neurons_are_those_of_all_patterns(rates):
    found = predict._sums(torch.tensor(rates, dtype=torch.float64))
    expected = [0.0] * (len(rates) + 1)
    for pattern in range(2 ** len(rates)):
        fires = [pattern >> i & 1 for i in range(len(rates))]
        expected[sum(fires)] += math.prod(rate if fire else 1 - rate for rate, fire in zip(rates, fires))
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_a_layer_fires_as_its_drawn_workload_does():
    firing = predict.firing_of(100.0, 32, 1024)
    assert firing.frequency.sum().item() == pytest.approx(100) and firing.totals.sum().item() == pytest.approx(1)
    counts = torch.arange(1025, dtype=torch.float64)
    assert (firing.totals * counts).sum().item() == pytest.approx(100)
    drawn = torch.rand(20_000, 1024, generator=torch.Generator().manual_seed(0)) < clock.firing_rates(1024, 100.0)
    share = (drawn.view(-1, 4, 256).sum(2) > 31).any(1).double().mean().item()
    assert 0.01 < share < 0.5 and firing.overflowing == pytest.approx(share, abs=0.01)


def test_a_datasheet_becomes_rates_by_the_shares_that_an_h100_reached():
    known = {each["name"]: each for each in predict.datasheets()}
    h100, card = predict.rates_of("NVIDIA H100 80GB HBM3"), predict.rates_of("rtx 4090")
    assert (h100.device, h100.bandwidth, h100.l2, h100.fuses) == ("H100 SXM", 3.0e12, 7.4e12, True)
    assert card.device == "RTX 4090" and not card.fuses and card.cache == 72 * 2**20
    for name in ("bandwidth", "matmul"):
        datasheet = "bandwidth_gb_s" if name == "bandwidth" else "tensor_tflops"
        shares = [getattr(rates, name) / known[rates.device][datasheet] for rates in (h100, card)]
        assert shares[0] == pytest.approx(shares[1])
    assert all(predict.rates_of(name).matmul > 1e13 for name in known)
    assert predict.rates_of("T4").dtype == "float16"
    names = {"4090": "RTX 4090", "rtx 3090": "RTX 3090", "5070": "RTX 5070", "pcie h100": "H100 PCIe"}
    assert {words: predict.rates_of(words).device for words in names} == names
    for words in ("", "H100", "RTX 6090", "a100 80"):  # none, or several
        with pytest.raises(InputError, match="accepted: "):
            predict.rates_of(words)


def test_sparse_wins_where_weights_come_from_memory_and_loses_where_too_many_neurons_fire():
    rows = {(row["tokens"], row["path"]): row for row in predict.predict("RTX 4090", 29)}
    assert {path for _, path in rows} == {"dense", "twell"}  # hot neurons are packed with the others there
    assert 2.5 < rows[1, "twell"]["x_dense"] < 3 and rows[1, "dense"]["x_dense"] == 1
    for row in rows.values():
        assert row["read_mb"] == pytest.approx(3 * 2048 * 5632 * 2 / 1e6) or row["path"] != "dense"
        assert (row["read_mb"] < rows[row["tokens"], "dense"]["read_mb"]) == (row["path"] != "dense")
    many = {row["path"]: row for row in predict.predict("H100 SXM", 800, tokens=[16384])}
    assert many["twell"]["x_dense"] < 0.9 and [*many][-1].startswith("hot_cold ")


def test_the_errors_are_those_of_recorded_layers():
    (row,) = [each for each in predict.errors() if each["gpu"] == "H100 SXM"]
    assert row["layers"] > 30 and 0.3 < row["least"] < 0.9 < row["median"] < 1.1 < row["most"] < 1.5

    def recorded(path, ms, **changes):
        shape = {"tokens": 16384, "d_model": 2048, "d_ff": 5632, "nnz": 29.0, "gated": True, "kind": "inference"}
        row = {**shape, "workload": "independent, lognormal", "device": "NVIDIA L4", "path": path, "ms": ms, **changes}
        return records.Record("inference", "a test's own", [row], "2026-01-01T00:00:00Z", None, None, {}, kernels={})

    ms = {row["path"]: row["ms"] for row in predict.predict("L4", 29, tokens=[16384])}
    made = [recorded("forced dense", ms["dense"] * 2), recorded("forced twell", ms["twell"] / 2)]
    skipped = [
        recorded("planned", 1.0),
        recorded("forced dense", 1.0, device="a GPU of no datasheet"),
        recorded("forced twell", 1.0, workload="overflow: 20%"),
    ]
    (row,) = predict.errors([*skipped, *made])
    assert (row["gpu"], row["layers"], row["least"], row["most"]) == ("L4", 2, pytest.approx(0.5), pytest.approx(2))
    assert predict.errors([]) == []


def profiled(*nnzs: float, tokens: int = 1000) -> FiringProfile:
    """Of layers in which so many of 5,632 neurons fire for a token, drawn."""
    layers = []
    for number, nnz in enumerate(nnzs):
        firing = predict.firing_of(nnz)
        counts = (firing.frequency * tokens).round().long()
        histogram, in_tile = (firing.totals * tokens).round().long(), torch.zeros(257, dtype=torch.int64)
        counted = histogram, counts, in_tile, 0, *torch.zeros(2, len(POSITIONS), dtype=torch.int64)
        layers.append(LayerProfile(f"layers.{number}", 2048, 5632, True, tokens, 256, 32, *counted))
    return FiringProfile(layers)


def test_a_profile_is_judged():
    sparse = predict.verdict(profiled(8, 29))
    assert sparse.startswith("0.14% to 0.51% ") and ", 0.33% on average" in sparse and "tl.plan chooses" in sparse
    assert "train with a larger L1 penalty" in predict.verdict(profiled(600, 700))
    many = predict.verdict(profiled(3300))
    assert many.startswith("58.59% ") and "30.0% of all fired for none" in many and "worth it for few tokens" in many
    (layer,) = profiled(29).layers
    every = {"neuron_counts": torch.full((5632,), 1000), "nnz_histogram": 1000 * torch.eye(5633).long()[-1]}
    assert "tl.relufy first" in predict.verdict(FiringProfile([replace(layer, d_model=16384, **every)]))
    assert "nothing to say" in predict.verdict(profiled(29, tokens=0))


@pytest.mark.parametrize(
    "asked, message",
    [
        (dict(gpu="GTX 1080"), "gpu is 'GTX 1080'; accepted: T4, L4"),
        (dict(nnz=4000), "nnz is 4000"),
        (dict(nnz=float("nan")), "nnz is nan"),
        (dict(nnz=[29]), r"nnz is \[29\]"),
        (dict(tokens=[1.5]), "tokens is 1.5"),
        (dict(tokens=[2**64]), "tokens is 18446744073709551616"),
        (dict(d_model=0), "d_model is 0"),
        (dict(d_ff=2**30), "up to 262,144 of d_ff"),
    ],
)
def test_what_is_not_accepted(asked, message):
    with pytest.raises(InputError, match=message):
        predict.predict(**{"gpu": "T4", "nnz": 29, **asked})


def test_the_command(capsys, monkeypatch):
    recorded = [{"gpu": "H100 SXM", "layers": 40, "least": 0.5, "median": 1.0, "most": 1.4}]
    monkeypatch.setattr(predict, "errors", lambda: recorded)
    assert cli.main(["predict", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [each["name"] for each in predict.datasheets()]
    given = ["predict", "L4", "--nnz", "8", "--tokens", "1"]
    assert cli.main([*given, "--no-gated", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == json.loads(json.dumps(predict.predict("L4", 8.0, tokens=[1], gated=False)))
    assert cli.main(given) == 0
    out = capsys.readouterr().out
    assert "twell" in out and "from the vendor's figures" in out and "recorded on an H100 SXM would be predicted" in out
    assert cli.main(["predict", "nothing"]) != 0 and "accepted: T4" in capsys.readouterr().err

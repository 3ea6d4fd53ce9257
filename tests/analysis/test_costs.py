"""Predictions against times that were measured elsewhere, and what must hold whatever the rates."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.conftest import H100
from twell_lab.analysis.costs import Firing, by_choice, measure_rates, predict
from twell_lab.analysis.profile import profile
from twell_lab.core import DeviceError
from twell_lab.layers.choice import Choice
from twell_lab.ops import clock, dispatch

PATHS = [Choice("dense"), Choice("twell"), Choice("hot_cold", 256), Choice("hot_cold", 1024)]


def firing(nnz, d_model=2048, d_ff=5632, gated=True, kind="lognormal"):
    frequency = clock.firing_rates(d_ff, nnz, kind).sort(descending=True).values
    totals = torch.zeros(d_ff + 1, dtype=torch.float64)
    totals[round(nnz)] = 1
    return Firing(d_model, gated, frequency, totals)


def us(choice, fired, rates, tokens=16384):
    return predict(choice, fired, rates, tokens, 2)["total"]


# Eager dense and the published kernels on an H100, microseconds (the same tables notebook 09 starts from).
@pytest.mark.parametrize("nnz, dense, twell", [(8, 1860, 740), (29, 1890, 1070), (60, 1900, 1600), (120, 1900, 2600)])
def test_times_measured_on_an_h100_are_predicted(rates, nnz, dense, twell):
    fired = firing(nnz)
    assert us(Choice("dense"), fired, rates) == pytest.approx(dense, rel=0.1)
    assert us(Choice("twell"), fired, rates) == pytest.approx(twell, rel=0.2)  # ours packs after the GEMM, as it was


@pytest.mark.parametrize("tokens, dense", [(1, 36.9), (16, 37.9), (64, 39.8)])
def test_decoding_is_predicted_from_the_bytes_of_the_weights(rates, tokens, dense):
    assert us(Choice("dense"), firing(29), rates, tokens) == pytest.approx(dense, rel=0.1)
    assert us(Choice("twell"), firing(29), rates, tokens) < 0.5 * dense


def test_parts_add_up_and_a_fused_layer_saves_its_values_trips(rates):
    fused = replace(rates, fuses=True)
    for choice in PATHS:
        parts = predict(choice, firing(60), rates, 4096, 2)
        assert parts.pop("total") == pytest.approx(sum(parts.values())) and min(parts.values()) >= 0
        assert us(choice, firing(60), fused, 4096) < us(choice, firing(60), rates, 4096)
        assert us(choice, firing(60), fused, 64) == us(choice, firing(60), rates, 64)


@pytest.mark.parametrize(
    "choice, least",
    [
        (Choice("dense"), dispatch.LEAST_HIDDEN),
        (Choice("twell"), dispatch.LEAST_PACKED),
        (Choice("hot_cold", 256), dispatch.LEAST_PACKED),
    ],
    ids=str,
)
def test_a_path_is_taken_to_fuse_from_as_many_tokens_as_it_does(rates, choice, least):
    fused, fired = replace(rates, fuses=True), firing(29)
    memory = lambda rates, tokens: predict(choice, fired, rates, tokens, 2)["memory"]  # noqa: E731
    assert memory(fused, least - 1) == memory(rates, least - 1) and memory(fused, least) < memory(rates, least)


def test_each_path_has_its_best_hot_size_where_hot_neurons_are_computed_apart(rates):
    rates = replace(rates, dtype="bfloat16")
    fired, fused, apart = firing(120), replace(rates, fuses=True), {"hot_cold"}
    for tokens, more in ((1, set()), (16384, apart)):
        took = by_choice(fired, fused, tokens)
        assert {choice.path for choice in took} == {"dense", "twell"} | more
        assert {choice.path for choice in by_choice(fired, rates, tokens)} == {"dense", "twell"}
    (best,) = [choice for choice in took if choice.hot]
    assert all(took[best] <= us(Choice("hot_cold", hot), fired, fused) for hot in range(256, 5632, 256))
    assert Choice("hot_cold", 768) in by_choice(fired, fused, 16384, hot=768)


@given(
    nnz=st.floats(0.5, 300),
    more=st.floats(1.0, 2.0),
    tokens=st.integers(1, 20000),
    hot=st.sampled_from([0, 256, 1024]),
    cache=st.sampled_from([0, 4_000_000, 50_000_000]),
    fuses=st.booleans(),
)
def test_more_firing_never_costs_less(nnz, more, tokens, hot, cache, fuses):
    rates, choice = replace(H100, cache=cache, fuses=fuses), Choice("hot_cold", hot) if hot else Choice()
    few = replace(firing(nnz), totals=firing(min(nnz, dispatch.HEAVY)).totals)  # more entries would be computed densely
    many = replace(few, frequency=(few.frequency * more).clamp(max=1.0))
    assert us(choice, many, rates, tokens) >= us(choice, few, rates, tokens) * (1 - 1e-9)
    now, then = (predict(choice, few, rates, n, 2) for n in (tokens, tokens + 1))
    assert all(then[part] >= now[part] * (1 - 1e-9) for part in ("gemm", "rows"))
    # From there on values are multiplied where they are, and launches saved.
    if not fuses or tokens + 1 not in (dispatch.LEAST_HIDDEN, dispatch.LEAST_PACKED):
        assert then["total"] >= now["total"] * (1 - 1e-9)
    assert us(Choice("dense"), many, rates, tokens) == us(Choice("dense"), few, rates, tokens)


def test_rows_that_fire_beyond_every_slot_cost_the_dense_layer_once_more(rates):
    fired = firing(60)
    totals = torch.zeros(5633, dtype=torch.float64)
    totals[60], totals[5000] = 0.9, 0.1
    assert replace(fired, totals=totals).lost(0) == pytest.approx(0.1)
    more = us(Choice(), replace(fired, totals=totals), rates) - us(Choice(), fired, rates)
    assert more == pytest.approx(0.1 * us(Choice("dense"), fired, rates), rel=0.01)


def test_overflow_counts_where_the_pool_cannot_hold_it(rates):
    even, crowded = firing(60), replace(firing(60), overflowing=0.5, excess=40.0)
    assert even.lost(0) == 0 and 0.3 < crowded.lost(0) < 0.5 and replace(crowded, excess=3.0).lost(0) == 0
    assert crowded.lost(256) == 0  # in the order of a plan the neurons are spread


def test_firing_of_a_profile(layer, profiled):
    (found,) = profiled.layers
    fired = Firing.of(found)
    assert fired.frequency.sum().item() == pytest.approx(found.mean_nnz) and fired.d_ff == 600
    assert torch.equal(fired.frequency, fired.frequency.sort(descending=True).values)
    assert fired.totals.sum().item() == pytest.approx(1) and fired.overflowing == found.overflow_rows
    everything = profile(layer[0], layer[1][:1], tile=256, words=2).layers[0]
    over = (everything.tile_histogram * (torch.arange(257) - 1).clamp(min=0)).sum().item()
    assert Firing.of(everything).excess == pytest.approx(over / 90)


def test_measured_rates():
    rates = measure_rates("cpu")
    assert (rates.device, rates.dtype, rates.cache, rates.fuses) == ("CPU", "float32", 0, False)
    assert 1e8 < rates.bandwidth < 1e13 and 1e8 < rates.matmul < 1e14 and 0 < rates.launch < 1e-2
    with pytest.raises(DeviceError, match="nonsense"):
        measure_rates("nonsense")


def test_tokens_with_many_entries_cost_as_much_as_dense_ones_where_kernels_are_fused(rates):
    d_ff, totals = 5632, torch.zeros(5633, dtype=torch.float64)
    totals[20], totals[600] = 0.95, 0.05
    mean = 0.95 * 20 + 0.05 * 600
    fired = Firing(2048, True, torch.full((d_ff,), mean / d_ff, dtype=torch.float64), totals)
    assert fired.heavy(0) == pytest.approx((0.05, 30 / mean))
    assert fired.heavy(d_ff) == (0, 0)
    fused = replace(rates, fuses=True)
    walked, finished = (predict(Choice("twell"), fired, each, 16384, 2) for each in (rates, fused))
    dense = predict(Choice("dense"), fired, fused, 16384, 2)["total"]
    assert finished["rows"] == pytest.approx(walked["rows"] * (1 - 30 / mean))
    assert finished["lost"] == pytest.approx(0.05 * dense, rel=0.05) and walked["lost"] == 0

"""The change between paths while a model is trained: by how many neurons fire, and by what was lost."""

from __future__ import annotations

import pytest
import torch

from twell_lab.analysis import costs, switching
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.terms import LayerTerm
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import survivors, train_lost

CONFIG = ModelConfig(vocabulary=32, d_model=16, layers=2, heads=2, d_ff=256, context=12)
RATES = costs.Rates("a GPU", "bfloat16", bandwidth=3e12, l2=7.4e12, matmul=7e14, launch=2e-6)
FIRST, SECOND = NAMES = ("layers.0.mlp", "layers.1.mlp")


@pytest.fixture
def net():
    torch.manual_seed(0)
    return sparsify(LanguageModel(CONFIG), "twell")


@pytest.fixture
def tensor_cores(monkeypatch):
    """Whether a GPU finishes lost rows on tensor cores."""
    rows = {"number": 512}
    monkeypatch.setattr(switching.train_lost, "tensor_core_rows", lambda *_: rows["number"])
    return rows


def terms_of(*nnz, lost=(None, None)):
    lost = [None if share is None else torch.tensor(share) for share in lost]
    return [LayerTerm(name, torch.zeros(()), torch.tensor(float(n)), share) for name, n, share in zip(NAMES, nnz, lost)]


def heavy_term(nnz, light, heavy, lost=None):
    rest = (None if value is None else torch.tensor(value) for value in (nnz, lost, light, heavy))
    return LayerTerm(FIRST, torch.zeros(()), *rest)


def paths(net):
    return [found.module.learning for found in feed_forwards(net)]


def test_break_even_is_where_both_sides_cost_the_same():
    n = switching.break_even(RATES, 2048, 5632)
    gemm, row = 2 * 2048 * 5632 / 7e14, 2048 * 2 / 7.4e12
    dense = 9 * gemm + 11 * 5632 * 2 / 3e12
    sparse = gemm + 5632 / 3e12 + 6 * 2048 * 2 / 3e12 + 7 * n * row
    assert abs(dense - sparse) < 1e-12 and 40 < n < 120
    slow = costs.Rates("a GPU", "bfloat16", bandwidth=1e9, l2=1e9, matmul=7e14, launch=0)
    assert switching.break_even(slow, 2048, 5632, gated=False) >= 0


def test_layers_change_over_one_by_one_and_not_at_the_first_sign(net):
    for nnz, below, changes, found in (
        ((100, 10), 50, {FIRST: "dense"}, ["dense", "twell"]),
        ((47, 53), 50, {}, ["dense", "twell"]),
        ((44, 56), 50, {FIRST: "twell", SECOND: "dense"}, ["twell", "dense"]),
        ((torch.nan, 1), {FIRST: 5, SECOND: 5.0}, {FIRST: "dense", SECOND: "twell"}, ["dense", "twell"]),
    ):
        assert switching.switch(net, terms_of(*nnz), below=below) == changes and paths(net) == found


def test_tokens_without_room_count_as_what_they_cost(net):
    fast = 1 / train_lost.TOKENS_A_ROW
    assert switching.switch(net, terms_of(10, 10, lost=(fast, 0.0)), below=50) == {}
    rest = 60 - switching.LOST_TO_TENSOR_CORES * CONFIG.d_ff * fast
    share = fast + rest / (switching.LOST * CONFIG.d_ff)  # costs as much as 60 neurons firing
    assert switching.switch(net, terms_of(10, 10, lost=(share, 0.0)), below=50) == {FIRST: "dense"}


SHARE = 512 / 16384


@pytest.mark.parametrize(
    "rows, term, expected",
    [
        # 512 of 16,384 tokens with 1,500 of 5,632 neurons: 76 fire on average, above the break-even of 75, yet the step
        # takes 2.5 ms on the sparse path and 4.8 on the dense one.
        (512, (75.7, 28.1, SHARE), 28.1 + 0.07 * 5632 * SHARE),
        # The sparse path loses these very rows, and no others: they cost as much, once.
        (512, (75.7, 28.1, SHARE, SHARE), 28.1 + 0.07 * 5632 * SHARE),
        (512, (75.7, 28.1, SHARE, 0.2), 28.1 + 5632 * (0.07 / 8 + 0.3 * (0.2 - 1 / 8))),
        # More of them than tensor cores take are walked, as all are where there are none.
        (512, (300.0, 28.1, 0.2), 300.0),
        (0, (75.7, 28.1, SHARE), 75.7),
    ],
)
def test_few_tokens_with_many_neurons_cost_what_lost_ones_do(tensor_cores, rows, term, expected):
    tensor_cores["number"] = rows
    assert switching.cost(heavy_term(*term), torch.empty(5632, 2048, device="meta")) == pytest.approx(expected)


def test_a_layer_sent_back_by_lost_tokens_does_not_return_for_its_heavy_ones(net, tensor_cores):
    change = switching.Switch(net, below={FIRST: 50.0, SECOND: 50.0})
    assert change.see([heavy_term(60.0, 10.0, 0.1, lost=1.0)]) == {FIRST: "dense"}
    assert change.below[FIRST] == pytest.approx(10.0 + switching.LOST_TO_TENSOR_CORES * CONFIG.d_ff * 0.1)
    assert change.see([heavy_term(60.0, 10.0, 0.1)]) == {}
    assert change.see([heavy_term(60.0, 0.8 * 10.0, 0.1)]) == {FIRST: "twell"}


def test_a_layer_that_lost_tokens_send_back_waits_until_fewer_neurons_fire(net):
    below = {FIRST: 50.0, SECOND: 50.0}
    change = switching.Switch(net, below=below)
    assert change.see(terms_of(10, 10, lost=(1.0, None))[:1]) == {FIRST: "dense"}
    assert change.below == {FIRST: 10, SECOND: 50} and below == {FIRST: 50, SECOND: 50}
    # What sent it back cannot be seen from there.
    assert change.see(terms_of(10, 10)[1:]) == change.see(terms_of(10, 10)) == change.see(terms_of(9.1, 10)) == {}
    assert change.see(terms_of(8, 10)) == {FIRST: "twell"}
    assert change.see(terms_of(70, 70)) == {FIRST: "dense", SECOND: "dense"}  # too many fire, none is lost
    assert change.below[SECOND] == 50


@pytest.mark.parametrize("takes", [True, False])
def test_a_break_even_stays_within_the_room_for_entries_and_is_none_without_kernels(net, monkeypatch, takes):
    tokens = 100
    monkeypatch.setattr(switching.costs, "measure_rates", lambda *_: RATES)
    monkeypatch.setattr(switching.train, "takes", lambda *_: takes)
    monkeypatch.setattr(switching, "break_even", lambda *_: 1e6)
    limit, entries = switching.Switch(net).measure(tokens)[FIRST], survivors.capacity_for(tokens, CONFIG.d_ff)
    if takes:
        assert 0.8 * entries < limit * tokens < limit * (1 + switching.MARGIN) * tokens < entries
    else:
        assert limit == 0.0


def test_a_model_without_sparse_layers_is_left_alone():
    assert switching.switch(LanguageModel(CONFIG), terms_of(1, 1), below=50) == {}

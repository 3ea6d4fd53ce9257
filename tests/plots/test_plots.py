"""Figures: what they draw is what they were given."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab import formats, plots
from twell_lab.analysis.profile import profile
from twell_lab.core import InputError
from twell_lab.models.tiny import LanguageModel, ModelConfig


def profiled(fires: torch.Tensor) -> SimpleNamespace:
    """A profile of one layer, from a boolean [tokens, d_ff]."""
    layer = SimpleNamespace(
        name="layers.0.mlp",
        d_ff=fires.shape[1],
        density=fires.double().mean().item(),
        nnz_histogram=torch.bincount(fires.sum(1), minlength=fires.shape[1] + 1),
        neuron_frequency=fires.double().mean(0),
    )
    return SimpleNamespace(layers=[layer])


@pytest.fixture(scope="module")
def firing():
    model = LanguageModel(ModelConfig(d_model=16, layers=2, heads=2, d_ff=32, context=8))
    return profile(model, torch.randint(256, (4, 8)))


def test_firing_bars_are_means_and_whiskers_the_middle_of_the_tokens():
    fires = torch.zeros(100, 10, dtype=torch.bool)
    fires[:50, :2] = fires[50:, :4] = True
    (bars,) = plots.firing_by_layer(profiled(fires)).data
    assert bars.y[0] == pytest.approx(30.0) and bars.x[0] == "layer 0<br>30%"
    assert bars.error_y.array[0] == pytest.approx(10.0)
    assert bars.error_y.arrayminus[0] == pytest.approx(10.0)


def test_neuron_frequency_counts_the_dead():
    fires = torch.zeros(10, 5, dtype=torch.bool)
    fires[:, 3], fires[:2, 1] = True, True
    figure = plots.neuron_frequency(profiled(fires))
    assert list(figure.data[0].y) == pytest.approx([100.0, 20.0])
    assert "3 of 5" in figure.layout.annotations[0].text


def test_firing_by_position_has_each_layer_and_all_together(firing):
    rows, figure = firing.by_position(), plots.firing_by_position(firing)
    assert [end.text for end in figure.layout.annotations] == ["layer 0", "layer 1"]
    one, two, both = figure.data
    assert list(both.x) == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert list(both.y) == pytest.approx([100 * row["density"] for row in rows])
    assert list(both.y) == pytest.approx([(a + b) / 2 for a, b in zip(one.y, two.y)])
    grouped = [
        {"first": first, "last": last, "tokens": 3, "density": 0.5, "layers": [None]}
        for first, last in ((0, 0), (8, 15), (2**31, None))
    ]
    known = SimpleNamespace(by_position=lambda: grouped, layers=firing.layers[:1])
    (layer, both) = plots.firing_by_position(known).data
    assert list(both.x) == ["0", "8-15", "2147483648 on"] and list(layer.y) == [None] * 3
    with pytest.raises(InputError, match="no position"):
        unknown = LanguageModel(ModelConfig(d_model=8, layers=1, heads=1, d_ff=8)).layers[0].mlp
        plots.firing_by_position(profile(unknown, torch.ones(2, 8)))


def test_a_layer_in_which_nothing_fires_is_drawn():
    silent = profiled(torch.zeros(3, 4, dtype=torch.bool))
    assert not plots.neuron_frequency(silent).data[0].y
    assert list(plots.firing_by_layer(silent).data[0].y) == [0.0]


def test_a_layer_or_a_tile_that_is_not_there_is_refused(firing):
    with pytest.raises(InputError, match="layers 0 to 1"):
        plots.neuron_frequency(firing, 2)
    with pytest.raises(InputError, match="tiles 0 to 0"):
        plots.tile_of(formats.TwELL.from_gate(torch.ones(1, 4, dtype=torch.bfloat16), tile=4, words=4), 0, 1)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    width=st.integers(1, 70),
    share=st.sampled_from([0.0, 0.2, 1.0]),
    words=st.integers(2, 33),
    seed=st.integers(0, 99),
)
def test_a_tile_read_back_from_its_words_is_the_tile(dtype, width, share, words, seed):
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(2, width, generator=generator).abs()
    gate = torch.where(torch.rand(2, width, generator=generator) < share, gate, -gate).to(dtype)
    packed = formats.TwELL.from_gate(gate, tile=32, words=words)
    for tile in range(packed.packed.shape[1]):
        at = json.loads(json.dumps(plots.tile_of(packed, 1, tile)))
        part = gate[1, 32 * tile : 32 * (tile + 1)]
        kept = part.clamp(min=0).nonzero()[:, 0].tolist()
        assert at["count"] == at["words"][0] == len(kept) and at["width"] == len(part)
        assert len(at["words"]) == min(len(kept), words - 1) + 1
        assert [plots.decode(word, at["dtype"]) for word in at["words"][1:] + at["tail"]] == [
            (part[column].item(), column) for column in kept
        ]


@pytest.mark.parametrize(
    "given, shown",
    [
        (["layers.0.mlp", "layers.1.mlp"], ["layer 0", "layer 1"]),
        (["a.0.mlp", "b.0.mlp"], ["a.0.mlp", "b.0.mlp"]),
        ([""], ["layer"]),
    ],
)
def test_layers_are_never_merged_by_their_short_names(given, shown):
    assert plots.layer_names(given) == shown


@pytest.mark.parametrize("histogram, ends", [([10], (0, 0)), ([0, 0, 5], (2, 2)), ([1] * 100, (5, 94)), ([0], (0, 0))])
def test_percentiles_of_a_histogram(histogram, ends):
    assert plots.percentiles(histogram) == ends

"""The notebook on other sparsities: its patterns, what pruning costs, its times, and what a threshold leaves."""

import pytest
import torch

from twell_lab.course.sparsity_map import data, figures
from twell_lab.course.sparsity_map.data import pays_after
from twell_lab.models.tiny import LanguageModel, ModelConfig

FAST = {"dense": [1.0] * 5, "CSR": [0.01, 0.03, 0.1, 0.3, 1.0], "blocks 16": [2.0] * 5, "blocks 32": [2.0] * 5}


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(d_model=32, layers=1, heads=2, d_ff=64, context=16)).eval()


@pytest.fixture
def weighed(subject):
    weight = subject.layers[0].mlp.up_proj.weight.detach()
    return data.Weighed(weight, torch.randn(20, 32), "CPU", times={name: [*ms] for name, ms in FAST.items()})


def row(path, pattern, ms, dense=1.0, density=0.1, **more):
    shared = {"kind": "comparison", "pattern": pattern, "density": density, "where": "yours, now, on CPU"}
    return shared | {"path": path, "ms": ms, "dense_ms": dense, "x_dense": dense / ms, "samples": [ms] * 4} | more


ROWS = [
    row("dense eager", "scattered", 1.0),
    row("CSR", "scattered", 0.5),
    row("ELL", "scattered", 2.0),
    row("part: CSR, conversion", "scattered", 1.2),
    row("part: ELL, conversion", "scattered", 0.1),
    row("dense eager", "blocks 32 x 32", 1.0, density=0.5),
    row("CSR", "blocks 32 x 32", 0.25, density=0.5),
    row("part: CSR, conversion", "blocks 32 x 32", 0.1, density=0.5),
]


def test_when_a_conversion_pays():
    assert pays_after(10, 1, 2) == 10 and pays_after(0.5, 1, 4) == 1 and pays_after(3, 2, 2) is None
    for conversion, sparse, dense in torch.rand(50, 3).tolist():
        count = pays_after(conversion, sparse, dense)
        assert (count is None) == (sparse >= dense)
        if count is not None:
            assert conversion + count * sparse <= count * dense + 1e-9
            assert conversion + (count - 1) * sparse > (count - 1) * dense - 1e-9


def test_times_here_are_checked_rows_of_every_pattern(monkeypatch):
    monkeypatch.setattr(data, "_CPU", (64, 64, 16))
    made = data.timed_here("cpu", 0.9, ["scattered", "tiles 32 x 1"])
    assert {each["pattern"] for each in made} == {"scattered", "tiles 32 x 1"}
    assert all(each["where"] == "yours, now, on CPU" and each["path"] != "TwELL" for each in made)
    assert len(data.products(made)) < len(made)


def measured(path, pattern, **x):
    """Rows of a method and of dense, times as fast by density; the middle half lies within 5% of the median."""
    spread = (0.9, 0.95, 1.0, 1.05, 1.1)
    for density, each in ((float(name[1:]) / 1000, each) for name, each in x.items()):
        yield row(path, pattern, 1 / each, density=density, samples=[way / each for way in spread])
        yield row("dense eager", pattern, 1.0, density=density, samples=[*spread])


def test_where_a_first_method_begins_to_win():
    table = [
        *measured("A", "scattered", d1=9.0, d10=2.0, d50=1.02, d500=0.1),  # at d50 the samples overlap
        *measured("B", "scattered", d1=0.9, d10=0.8, d50=3.0, d500=0.1),  # only in between
        *measured("C", "blocks 32 x 32", d1=9.0, d10=8.0, d50=0.5),
        *measured("D", "tiles 32 x 1", d1=0.5, d10=0.4),
        *measured("2:4 (torch: cuSPARSELt, searched)", "2:4", d500=1.4),
        *measured("2:4 (torch: cuSPARSELt)", "2:4", d500=1.01),
    ]
    assert data.begins(table) == {"scattered": (0.01, 0.05), "blocks 32 x 32": (0.01, 0.05), "2:4": (0.5, None)}
    assert data.begins([*measured("D", "scattered", d1=0.5)]) == {}


@pytest.mark.parametrize("density", [0.01, 0.02, 0.1, 0.55, 1.0])
def test_a_time_on_the_line_between(weighed, density):
    assert data._time(weighed, "CSR", density) == pytest.approx(density)
    assert data._time(weighed, "CSR", 0.0) == pytest.approx(0.01) and data._time(weighed, "2:4", density) is None


def test_a_view_counts_what_is_left(weighed):
    weight = weighed.weight
    threshold = float(weight.abs().double().quantile(0.8))
    seen = data.view(weighed, threshold)
    kept = weight.abs() > threshold
    assert seen["density"] == pytest.approx(0.2, abs=0.01) == float(kept.double().mean())
    assert seen["by_row"] == sorted((kept.double().mean(1)).tolist(), reverse=True)
    assert seen["violations"] == float((kept.view(64, 8, 4).sum(-1) > 2).double().mean())
    right = weighed.inputs @ weight.t()
    off = float((weighed.inputs @ (weight * kept).t() - right).norm() / right.norm())
    assert seen["error"] == pytest.approx(off, rel=1e-3)
    nnz = int(kept.sum())
    assert seen["bytes"]["dense"] == 2 * weight.numel() and seen["bytes"]["CSR"] == 6 * nnz + 4 * 65
    assert (seen["bytes"]["2:4"] is None) == (seen["violations"] > 0) and seen["ms"]["2:4"] is None


def test_the_ends_of_the_slider(weighed):
    everything, nothing = data.view(weighed, 0.0), data.view(weighed, float(weighed.weight.abs().max()))
    assert everything["density"] == 1 and everything["error"] == 0 and everything["filled"] == {16: 1.0, 32: 1.0}
    assert nothing["density"] == 0 and nothing["error"] == 1 and nothing["filled"] == {16: 0.0, 32: 0.0}
    assert nothing["bytes"]["2:4"] == weighed.weight.numel() + weighed.weight.numel() // 8
    titles = [figures.picture(seen).layout.title.text for seen in (everything, nothing)]
    assert "fewest bytes as dense" in titles[0] and "least time as CSR" in titles[1]

"""The notebook on choosing a path: what each method computes, its times, its sentences, and the map."""

import pytest
import torch

from tests.course import recorded_rows
from twell_lab.bench import comparison, methods
from twell_lab.course.choosing import data, figures
from twell_lab.ops import clock as clocks
from twell_lab.records import Record

WHERE = "yours, now, on CPU"
SMALL = methods.Sizes(64, 768, (1, 8), 8, torch.float32, "cpu", 0.01)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(data, "sizes_for", lambda device: SMALL)


def row(method, tokens, share, x_dense, **more):
    exact = method not in (methods.EXPERTS, methods.PREDICTED)
    said = {"method": method, "tokens": tokens, "share": share, "x_dense": x_dense}
    return said | {"exact": exact, "where": WHERE} | more


MAP = [
    row(methods.DENSE, 1, 0.01, 1.0),
    row(methods.PACKED, 1, 0.01, 2.0),
    row(methods.PREDICTED, 1, 0.01, 5.0),
    row(methods.DENSE, 64, 0.01, 1.0),
    row(methods.TILES, 64, 0.01, 1.04),
    row(methods.EXPERTS, 64, 0.01, 3.0),
    row(methods.DENSE, 64, 0.5, 1.0),
    row(methods.PACKED, 64, 0.5, 0.5),
]


def test_what_each_method_computes_of_who_fires():
    fires = torch.rand(64, 400) < 0.05
    kinds = data.works(fires)
    assert {each.shape for each in kinds.values()} == {(64, 64)}
    wanted = kinds["packed, each entry alone"] == data.NEEDED
    for name, each in kinds.items():
        missed = (each == data.MISSED).any()
        assert ("lossy" in name) or not missed
        assert torch.equal((each == data.NEEDED) | (each == data.MISSED), wanted)
    assert (kinds["dense"] >= data.FOR_NOTHING).all() and not (kinds["packed, each entry alone"] == 1).any()
    tiles = kinds["micro-tiles of 32 tokens"].view(2, 32, 64) != data.SKIPPED
    assert torch.equal(tiles.any(1), tiles.all(1)) and torch.equal(tiles.any(1), wanted.view(2, 32, 64).any(1))
    groups = kinds["experts of 16 neurons"].view(64, 4, 16) != data.SKIPPED
    assert torch.equal(groups.any(2), groups.all(2)) and torch.equal(groups.any(2), wanted.view(64, 4, 16).any(2))
    drawn = figures.works(kinds)
    assert drawn.layout.annotations[0].text == "dense: 100%"
    assert sum(trace.type == "heatmap" for trace in drawn.data) == len(kinds)


def test_finding_micro_tiles_is_drawn_as_time():
    shape = comparison.Shape(64, 64, 16, torch.float32, "cpu", 0.01)
    tiled = [method for method in comparison.METHODS if method.name == methods.TILES]
    cases = [(pattern, sparsity) for pattern in ("scattered", "tiles 32 x 1") for sparsity in (0.5, 0.9)]
    drawn = figures.products(
        [row | {"where": WHERE} for case in cases for row in comparison.product_rows(*case, shape, tiled)]
    )
    assert len(drawn.data) == 4 and drawn.data[2].y[0] < drawn.data[0].y[0]


def test_padding_is_drawn_with_where_it_was_timed():
    rows = [{"path": path, "real": real, "ms": real, "where": WHERE} for path in ("a", "b", "c") for real in (1.0, 0.5)]
    drawn = figures.padding(rows)
    assert len(drawn.data) == 4 and drawn.layout.title.text.endswith(f"<sub>{WHERE}</sub>")


def test_the_map_holds_each_method_against_dense_first():
    rows = data.map_rows("cpu", (1 / 256, 1 / 8))
    timed = lambda tokens, share: {
        each["method"] for each in rows if (each["tokens"], each["share"]) == (tokens, share)
    }
    exact = {methods.DENSE, methods.PACKED, methods.SPLIT, methods.TILES}
    assert timed(1, 1 / 256) == exact | {methods.PREDICTED} and timed(8, 1 / 256) == exact
    assert timed(8, 1 / 8) == exact | {methods.EXPERTS} and [*figures.COLOUR] == [*methods.METHODS]
    assert all(each["exact"] == (each["method"] in exact) for each in rows)


def test_a_wrong_method_is_not_timed(monkeypatch):
    monkeypatch.setattr(methods, "by_stripes", lambda layer, down_t, x: layer(x) * 1.01)
    with pytest.raises(clocks.WrongResult, match="micro-tiles 32 x 1: off by 0.01"):
        data.map_rows("cpu", (1 / 8,))


def test_the_winners():
    exact, everything = data.winners(MAP), data.winners(MAP, exact=False)
    assert {at: each["method"] for at, each in exact.items()} == {
        (0.01, 1): methods.PACKED,
        (0.01, 64): methods.DENSE,  # 1.04 times may be noise
        (0.5, 64): methods.DENSE,
    }
    assert everything[0.01, 1]["method"] == methods.PREDICTED and everything[0.01, 64]["method"] == methods.EXPERTS
    left, right = (trace for trace in figures.winners(MAP).data if trace.type == "heatmap")
    assert [*left.text[0]] == ["packed<br><b>2</b>", "dense<br><b>1</b>"]
    assert left.x == ("1", "64") and left.y == ("1%", "50%")
    assert len([t for t in figures.winners(MAP[:2]).data if t.type == "heatmap"]) == 1


def test_the_recorded_map(keep):
    times = {"dense eager": 1.0, "forced twell": 0.5, "forced hot_cold 512": 0.4}
    times |= dict.fromkeys(("forced twell (graph)", "forced hot_cold 512 (graph)", "planned"), 0.1)
    rows = [recorded_rows.row(path, ms, 1.0, spread=0.0, samples=[ms]) for path, ms in times.items()]
    keep(Record.new("inference", "made up", rows, {}))
    found = data.recorded_map()
    assert [(each["method"], each["x_dense"]) for each in found] == [
        (methods.DENSE, 1.0),
        (methods.PACKED, 2.0),
        (methods.SPLIT, 2.5),
    ]
    assert all(each["where"].startswith("recorded on NVIDIA H100") for each in found)


def test_the_map_is_recorded_with_every_method_and_read(keep):
    made = methods.map_rows(1 / 8, SMALL)
    assert {each["path"] for each in made} == {"dense eager", *methods.METHODS} - {methods.DENSE}
    assert all(each["kind"] == "map" and each["share"] == 1 / 8 and each["wall_ms"] > 0 for each in made)
    assert all(each["nnz"] == pytest.approx(768 / 8, rel=0.3) and each["tokens"] in (1, 8) for each in made)
    assert {each["path"] for each in made if each["tokens"] == 8} == {each["path"] for each in made} - {
        methods.PREDICTED
    }
    keep(Record.new("comparison", "made up", [each | {"device": "NVIDIA H200"} for each in made], {}))
    found = data.recorded_maps()
    assert {(each["method"], each["tokens"]) for each in found} == {
        (methods.DENSE if each["path"] == "dense eager" else each["path"], each["tokens"]) for each in made
    }

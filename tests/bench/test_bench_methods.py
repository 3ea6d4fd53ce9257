"""Methods of the map, padding and experts: held against the dense layer. The map's times are tested with the course."""

import pytest
import torch

from twell_lab.bench import methods
from twell_lab.ops import clock
from twell_lab.records import Record
from twell_lab.sparsities.padding import add_padding

FEW = methods.Sizes(32, 64, (1, 64), 4, torch.float32, "cpu", 0.01)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_stripes_give_the_dense_result(tokens, share):
    layer, (x, *_) = clock.workload(tokens, 24, 40, share * 40, "uniform", torch.float32, "cpu")
    with torch.no_grad():
        y = methods.by_stripes(layer, layer.down_proj.weight.t().contiguous(), x)
        torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
def test_padding_removed_beside_all_tokens(share, layers):
    made = methods.padding_rows(share, layers, FEW)
    Record.new("comparison", "a test", made)
    assert [row["path"] for row in made] == ["dense eager", "padding removed", "real tokens alone"]
    for row in made:
        assert row["tokens"] == 64 and row["real"] == pytest.approx(64 * share, abs=4) and row["layers"] == layers
        assert row["x_dense"] == row["dense_ms"] / row["ms"] and row["wall_ms"] > 0
        assert row["workload"].startswith(f"{layers} layer")


def test_what_padding_puts_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(methods, "add_padding", lambda rows, padding: add_padding(rows.flip(0), padding))
    with pytest.raises(clock.WrongResult, match="padding removed: off by"):
        methods.padding_rows(0.5, 2, FEW)


def test_ways_of_experts_beside_the_loop():
    made = methods.experts_rows(4, 48, FEW)
    Record.new("comparison", "a test", made)
    assert [row["path"] for row in made] == ["dense eager", "grouped", "padded"]
    assert all(row["kind"] == "experts" and row["experts"] == 4 and row["d_ff"] == 48 for row in made)
    assert all(row["density"] == 0.5 for row in made)

"""The weights' gradients of a sparse layer: kernels run on the CPU, against plain sums in float64."""

from dataclasses import replace

import pytest
import torch

from tests.ops.columns.layers import Layer, bits, pattern
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.ops import train_columns

simulated = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@simulated
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens, d_ff, d_model", [(1, 1, 8), (5, 37, 8), (67, 41, 264), (130, 300, 40)])
def test_odd_sizes(tokens, d_ff, d_model, gated, version):
    lost = (2, tokens - 1) if tokens > 4 else ()
    layer = Layer.draw(pattern(tokens, d_ff), d_model, gated=gated, lost=lost)
    found = layer.check(biases=tokens != 67, version=version)
    assert all(torch.equal(a, b) for a, b in zip(bits(found), bits(layer.run(tokens != 67, version))))


@simulated
@pytest.mark.parametrize("gated, version", [(True, 1), (True, 2), (False, 2)])
def test_no_race_and_nothing_out_of_bounds(gated, version, monkeypatch):
    """Several chunks of more than 32 rows, a list in pieces, teams of every size."""
    monkeypatch.setattr(train_columns, "_COUNTS", 13 * 3)
    fires = pattern(1100, 13, 0.1)
    fires[:, 7] = torch.arange(1100) % 2 == 0
    fires[:, 9] = torch.arange(1100) % 5 == 0
    layer = Layer.draw(fires, 16, gated=gated)
    with simulator.program.watching("faults") as runs:
        layer.check(version=version)
    assert runs[0].grid[0] == 3


@simulated
def test_fp16():
    Layer.draw(pattern(50, 70), 72, torch.float16).check()


@simulated
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_records(rows, gated):
    """Rows of more than 32 survivors, chunks of several rows, rows without any."""
    fires = pattern(rows, 150, 0.3)
    layer = Layer.draw(fires, 8, gated=gated, lost=(0,) if rows > 1 else ())
    layer.check_records(train_columns.by_column(layer.s, layer.dh, 150, layer.x.dtype))


@simulated
def test_several_slabs_of_columns_and_few_chunks(monkeypatch):
    monkeypatch.setattr(train_columns, "_COUNTS", 100_000)  # two chunks
    generator = torch.Generator().manual_seed(3)
    fires = torch.rand(90, 40_001, generator=generator) < 0.0005
    fires[:, [16383, 16384, 32767, 32768, 40_000]] = True
    layer = Layer.draw(fires, 8)
    layer.check_records(train_columns.by_column(layer.s, layer.dh, 40_001, layer.x.dtype))


@simulated
def test_as_many_chunks_as_there_can_be():
    """256 chunks of 32 rows: every group of the scan has its eight chunks."""
    fires = pattern(8192, 5, 0.02)
    fires[-1, 3] = True
    layer = Layer.draw(fires, 8)
    layer.check_records(train_columns.by_column(layer.s, layer.dh, 5, layer.x.dtype))


@simulated
@pytest.mark.parametrize("gated", [True, False])
def test_lists_of_every_class(gated, monkeypatch):
    """One to eight warps a list, whole pieces, a piece of one record; as many pieces as there can be."""
    lengths = [0, 1, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1025, 2048, 2049, 0, 2100, 3]
    fires = torch.zeros(2100, len(lengths), dtype=torch.bool)
    for column, length in enumerate(lengths):
        fires[torch.randperm(2100, generator=torch.Generator().manual_seed(column))[:length], column] = True
    layer = Layer.draw(fires, 16, gated=gated)
    layer.check()
    for pieces in (16, 24):
        monkeypatch.setattr(train_columns, "_LEAST_PIECES", pieces)
        monkeypatch.setattr(train_columns, "_MOST_PIECES", pieces)
        layer.check()
    records = sum(lengths)
    plan = train_columns.by_column(layer.s, layer.dh, len(lengths), layer.x.dtype).plan
    assert plan[:2].tolist() == [records, 128]


@pytest.mark.parametrize("pieces", [16, 100, 512])
def test_room_for_pieces_and_blocks(pieces):
    """However the records are spread, the plan needs no more partial rows and blocks than are allocated."""
    generator = torch.Generator().manual_seed(pieces)
    for trial in range(300):
        d_ff = int(torch.randint(1, 3000, (1,), generator=generator))
        scale = 10.0 ** float(torch.rand(1, generator=generator) * 6)
        counts = (torch.randn(d_ff, generator=generator).mul(trial % 5).exp() * scale / d_ff).long()
        units = train_columns._UNITS_A_PIECE * pieces
        unit = max(128, -(-int(counts.sum()) // units))
        if trial % 3 == 0:  # the worst: just past a power of two
            counts = torch.where(counts > 0, unit * 2 ** torch.randint(0, 4, (d_ff,), generator=generator) + 1, 0)
            counts[counts.cumsum(0) > unit * units] = 0
        whole = counts[counts > 8 * unit]
        cut = int((-(-whole // (8 * unit))).sum())
        blocks = cut
        for k, team in enumerate((8, 4, 2, 1, 1, 1, 1, 1), 1):  # as columns.cuh has the classes
            most, least = 8 * unit >> k - 1, 8 * unit >> k if k < 7 else 0
            listed = (counts > least) & (counts <= most) if k < 8 else counts == 0
            blocks += -(-int(listed.sum()) * team // 8)
        assert cut <= pieces and len(whole) <= pieces // 2
        assert blocks <= train_columns._most_blocks(d_ff, pieces)


@simulated
def test_no_tokens_and_no_survivors():
    layer = Layer.draw(torch.zeros(9, 12, dtype=torch.bool), 8)
    assert not any(t.any() for t in bits(layer.check()))
    empty = Layer.draw(torch.zeros(0, 12, dtype=torch.bool), 8)
    found = empty.run()
    assert found["dgate"].shape == (12, 8) and not any(t.any() for t in bits(found))


@simulated
def test_values_that_are_not_finite_stay_with_their_neuron():
    fires = pattern(40, 30)
    layer = Layer.draw(fires, 24)
    at = int(layer.s.spans[7, 0])
    layer.dh[at] = torch.inf
    column = int(layer.s.words[at]) & 0xFFFF
    found = layer.run()
    others = torch.arange(30) != column
    assert not found["dup"][column].isfinite().any() and found["dup"][others].isfinite().all()
    assert found["ddown_t"].isfinite().all() and not found["dup_bias"][column].isfinite()


def test_bad_input():
    layer = Layer.draw(pattern(20, 30), 24)
    for change in (
        {"x": layer.x.float()},
        {"x": layer.x[:, :20]},
        {"dy": layer.dy[:19]},
        {"dh": layer.dh.double()},
        {"dh": layer.dh[1:]},
        {"s": replace(layer.s, spans=layer.s.spans[1:])},
    ):
        with pytest.raises(InputError, match="accepted"):
            replace(layer, **change).run()
    with pytest.raises(InputError, match="version is 3"):
        layer.run(version=3)
    with pytest.raises(InputError, match="d_ff is 65537"):
        train_columns.weight_gradients(layer.x, layer.dy, layer.s, layer.dh, 65537, False)

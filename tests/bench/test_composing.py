"""2:4 with INT8, padding with ReLU zeros, and the chip's latencies: their calls and rows, as far as a CPU has them."""

import pytest
import torch

from twell_lab.bench import chip, composing, methods
from twell_lab.core import StackError
from twell_lab.course.capstone.gpu import cubin
from twell_lab.records import Record


def product(packed, b, *, alpha=None, out_dtype=None, transpose_result=False, alg_id=0):
    """cuSPARSELt's INT8 product."""
    sums = packed.double() @ b.double()
    y = (sums if alpha is None else alpha[:, None] * sums).to(out_dtype)
    return y.t().contiguous() if transpose_result else y


def as_it_comes(*given, transpose_result, **how):
    """The same of a version that writes y^T alone."""
    if transpose_result:
        raise RuntimeError("not supported")
    return product(*given, **how)


@pytest.fixture(params=(product, as_it_comes))
def sparse(monkeypatch, request):
    monkeypatch.setattr(torch, "_cslt_compress", lambda values: values)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", request.param)
    monkeypatch.setattr(torch, "_cslt_sparse_mm_search", lambda *_, **__: 3)


@pytest.mark.parametrize("searched", (False, True))
def test_each_product_is_right_beside_its_own_operands(sparse, searched):
    left_out = {}
    made = composing.quantised_rows(searched, (48, 64, 32), left_out, "cpu")
    Record.new("composing", "a test", made)
    rows = {row["path"]: row for row in made}
    both = {"INT8 and 2:4, scaled after", "INT8 and 2:4, W's scales inside"}
    ends = () if searched else ("scaled after", "scaled inside", "the sums alone")
    assert rows.keys() == {"dense eager", "INT8 and 2:4, the sums alone"} | both | {f"INT8, {end}" for end in ends}
    assert [path.rpartition(", ")[2] for path in left_out] == ["2:4"]
    assert all(row["error_over_allowed"] <= composing.WRONG and row["x_dense"] > 0 for row in made)
    assert rows["dense eager"]["error"] < 0.004 and all(0.2 < rows[path]["error"] < 0.5 for path in both)


def test_a_wrong_product_is_left_out(sparse, monkeypatch):
    monkeypatch.setattr(torch, "_cslt_sparse_mm", lambda *given, **how: product(*given, **how) * 2)
    left_out = {}
    assert [row["path"] for row in composing.quantised_rows(True, (48, 64, 32), left_out, "cpu")] == ["dense eager"]
    assert ["WrongResult" in why for why in left_out.values()] == [False, True, True, True]


def test_padding_and_silent_neurons_alone_and_both():
    made = composing.padded_rows(1 / 16, methods.Sizes(32, 64, (64,), 4, torch.float32, "cpu", 0.01))
    Record.new("composing", "a test", made)
    alone = ["dense eager", "padding removed", "micro-tiles 32 x 1", "padding removed, micro-tiles 32 x 1"]
    assert [row["path"] for row in made] == [*alone, "packed (TwELL)", "padding removed, packed (TwELL)"]
    assert all(row["real"] == 32 and row["nnz"] < 8 for row in made)


@pytest.mark.parametrize("steps", (0, 5, 16, 37))
def test_a_ring_leads_through_all_its_words(steps):
    words, end = chip.ring(16, 128, steps, "cpu")
    at, seen = 0, set()
    for _ in range(steps):
        at = int(words[at // 4])
        seen.add(at)
    assert at == end and len(seen) == min(steps, 16) and int((words != 0).sum()) == 15


def test_without_a_gpu_every_latency_is_left_out(monkeypatch):
    monkeypatch.setattr(chip, "ring", lambda *_: (torch.zeros(4, dtype=torch.int32), 0))
    monkeypatch.setattr(chip, "RATES", {"memory": (4, 1)})
    monkeypatch.setattr(chip.clock, "time_cuda", lambda calls, rounds: {})
    left_out = {}
    assert chip.chip_rows(left_out, "cpu") == [] and len(left_out) == len(chip.LATENCIES) + 1


def test_the_chips_kernels_compile():
    try:
        image = cubin(chip.SOURCE, "chip", "sm_90")
    except StackError as missing:
        pytest.skip(str(missing))
    assert b"chase" in image and b"read" in image

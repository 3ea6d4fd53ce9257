"""The comparison of products: patterns, checks, rows, and where a method begins to win; on this CPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab.bench import comparison
from twell_lab.bench.comparison import DENSITY, NESTED, PIECES, SCATTERED, TWO_FOUR, Method, Shape, patterned
from twell_lab.core import DeviceError
from twell_lab.formats import ELL
from twell_lab.records import Record

SMALL = Shape(64, 128, 32, torch.float32, "cpu", 0.02)


@pytest.mark.parametrize("pattern", PIECES)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_a_pattern_keeps_whole_pieces_equally_many_in_each_band(pattern, sparsity):
    high, wide = PIECES[pattern]
    a = patterned(pattern, 96, 320, sparsity, dtype=torch.bfloat16, device="cpu")
    pieces = (a != 0).view(96 // high, high, 320 // wide, wide).transpose(1, 2).flatten(2)
    assert (pieces.all(-1) == pieces.any(-1)).all()
    stay = max(sparsity < 1, round((1 - sparsity) * (320 // wide)))
    assert (pieces.any(-1).sum(1) == stay).all() and (a[a != 0].abs() >= 0.09).all()


@given(rows=st.integers(1, 20), columns=st.integers(1, 40), share=st.floats(0, 1))
def test_scattered_has_exactly_the_asked_number_in_every_row(rows, columns, share):
    per_row = round(share * columns)
    a = comparison.scattered(rows, columns, per_row, dtype=torch.bfloat16)
    assert a.shape == (rows, columns) and a.dtype == torch.bfloat16 and ((a != 0).sum(1) == per_row).all()


def test_rows_of_every_method_that_runs_here():
    made = comparison.product_rows(SCATTERED, 0.9, SMALL)
    Record.new("comparison", "a test", made)
    timed = [row for row in made if not row["path"].startswith("part: ")]
    wanted = {method.name for method in comparison.METHODS if method.measured(SCATTERED, 0.9, "cpu")}
    assert timed[0]["path"] == "dense eager" and timed[0]["left_out"] == {}
    assert {row["path"] for row in timed[1:]} == wanted
    assert {row["path"] for row in made if row not in timed} == {f"part: {name}, conversion" for name in wanted}
    for row in made:
        assert row["kind"] == "comparison" and row["ms"] > 0 and row["pattern"] == SCATTERED
        assert (row["tokens"], row["d_ff"], row["d_model"], row["nnz"]) == (64, 128, 32, 13)
        assert row["density"] == pytest.approx(13 / 128) and row["workload"] == "scattered, 90.0% zeros"
    assert all(row["wall_ms"] > 0 and row["x_dense"] == row["dense_ms"] / row["ms"] for row in timed)
    assert all(row["error_over_allowed"] <= comparison.WRONG for row in timed[1:])


def test_what_this_device_does_not_have_and_what_is_wrong_is_said_and_not_timed():
    def refuses(a):
        raise DeviceError("no such unit\nand more")

    def uncompiled(a):
        raise TypeError("'NoneType' object is not callable")  # torch's block product where there is no Triton

    methods = [
        Method("missing", refuses, torch.matmul),
        Method("uncompiled", uncompiled, torch.matmul),
        Method("wrong", lambda a: a * 1.5, torch.matmul),
        Method("nan", lambda a: a * math.nan, torch.matmul),
        Method("right", lambda a: a, torch.matmul),
        Method("elsewhere", lambda a: a, torch.matmul, patterns=(TWO_FOUR,)),
        Method("too dense", lambda a: a, torch.matmul, least=0.99),
    ]
    made = comparison.product_rows(SCATTERED, 0.9, SMALL, methods)
    assert [row["path"] for row in made] == ["dense eager", "right", "part: right, conversion"]
    assert made[0]["left_out"].keys() == {"missing", "uncompiled", "wrong", "nan"}
    assert made[0]["left_out"]["missing"] == "DeviceError: no such unit"
    assert made[0]["left_out"]["wrong"].startswith("WrongResult: a row: off by")


def test_two_four_in_blocks_is_multiplied_as_blocks_and_pruned_weights_as_layers():
    made = comparison.product_rows(NESTED, 0.75, Shape(256, 256, 32, torch.float32, "cpu", 0.02))
    bsr = "BSR 32 x 32 (torch)"
    assert [row["path"] for row in made] == ["dense eager", bsr, f"part: {bsr}, conversion"]
    assert made[0]["left_out"] == {} and made[1]["density"] == 0.25
    pruned = [method for method in comparison.METHODS if method.name.startswith("SparseLinear")]
    a, x = patterned(SCATTERED, 32, 64, 0.9, dtype=torch.float32, device="cpu"), torch.randn(5, 64)
    assert [method.name for method in pruned] == ["SparseLinear (dense)", "SparseLinear (csr)"]
    for method in pruned:
        torch.testing.assert_close(method.multiply(method.convert(a), x), x @ a.t())


@pytest.mark.parametrize("name", ["csr_v3", "ell_v3", "coo_v3", "TwELL"])
def test_kernels_of_this_package_give_the_product_in_the_simulator(name):
    """A method that only a GPU has runs here on a matrix of a few values, so that its call is known to fit."""
    (method,) = (method for method in comparison.METHODS if method.name == name)
    a = patterned("blocks 32 x 32", 64, 64, 0.5, dtype=torch.bfloat16, device="cpu")
    b = torch.randn(64, 16).bfloat16()
    assert comparison.off(method.multiply(method.convert(a), b), a, b, a @ b) <= 1


def test_ell_without_any_value_gives_zeros():
    y = comparison.ell_matmul(ELL.from_dense(torch.zeros(3, 5)), torch.randn(5, 2))
    assert torch.equal(y, torch.zeros(3, 2))


def test_formats_of_torch_have_a_row_at_every_density_and_zeros_beside_random_values(monkeypatch):
    monkeypatch.setattr(comparison, "SIZES", {"cpu": (12, 40, 16), "cuda": (12, 40, 16)})
    monkeypatch.setattr(comparison, "DENSITIES", [0.1, 0.5])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clocked = lambda calls, *_, **__: ({name: [1.0, 2.0, 3.0] for name in calls}, {})  # noqa: E731
    monkeypatch.setattr(comparison.rows, "clocked", clocked)
    made = [row for steps in comparison.density_sections().values() for step in steps for row in step()]
    Record.new("density", "a test", made)
    assert {(row["path"], row["nnz"]) for row in made if row["kind"] == DENSITY} == {
        (path, nnz) for path in ("dense", "COO", "CSR", "ELL", "CSR + conversion") for nnz in (4, 20)
    }
    assert all(row["x_dense"] == (1 if row["path"] == "dense" else row["dense_ms"] / row["ms"]) for row in made[:-2])
    assert [(row["kind"], row["workload"]) for row in made[-2:]] == [
        ("matmul_data", "random"),
        ("matmul_data", "zeros"),
    ]
    assert all((row["tokens"], row["d_ff"], row["d_model"]) == (12, 40, 16) for row in made)

"""Products of COO, CSR and ELL with dense matrices: every version in the simulator, torch's on a CPU, and bad input."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.formats import COO, CSR, ELL, TwELL
from twell_lab.ops.spmm import SparseOperand, every_version, spmm

from .cases import FORMATS, check, draw, skewed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
simulated = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@simulated
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    "rows, columns, n, density",
    [
        (9, 70, 264, 0.1),
        (5, 700, 40, 0.4),
        (3, 9, 7, 0.3),
        (300, 3, 16, 0.5),
        (1, 1, 1, 1),
        (4, 20, 8, 0),
        (17, 33, 8, 1),
    ],
)
def test_every_version(rows, columns, n, density, dtype):
    check(draw(rows, columns, density, dtype), n)


@simulated
def test_no_row_is_too_long_for_a_version():
    check(skewed(BF16), 16)


@pytest.mark.parametrize("each", FORMATS)
def test_heavy_rows_are_counted(each):
    """A row is heavy that holds more than 256 entries, and more than four times what the rows hold on average."""
    long = torch.zeros(8, 600)
    for heavy, counts in (
        (0, [256] + 7 * [1]),
        (1, [257] + 7 * [1]),
        (1, [257, 260] + 6 * [0]),
        (0, 8 * [600]),
        (0, [600] + 7 * [100]),  # 4 * 162.5
        (1, [600] + 7 * [70]),
    ):
        long.zero_()
        for row, count in zip(long, counts):
            row[:count] = 1
        left = SparseOperand(each.from_dense(long))
        assert left.heavy == heavy, counts


@simulated
@pytest.mark.parametrize("rows, n", [(0, 8), (3, 0)])
def test_nothing_to_compute(rows, n):
    check(draw(rows, 5, 0.5, BF16), n)


@given(
    st.integers(1, 12), st.integers(1, 80), st.integers(1, 20), st.sampled_from([0, 0.02, 0.3, 1]), st.integers(0, 99)
)
@settings(max_examples=25, deadline=None)
def test_torch_on_a_cpu_computes_the_same(rows, columns, n, density, seed):
    a = draw(rows, columns, density, FP32, seed)
    b = torch.randn(columns, n)
    for each in FORMATS:
        assert torch.allclose(spmm(each.from_dense(a), b), a @ b, atol=1e-4)


@simulated
@pytest.mark.parametrize("each", FORMATS)
def test_what_is_not_finite(each):
    """A zero that is not stored skips what stands in B, a stored value does not."""
    a = torch.tensor([[0.0, 2, 0], [1, 0, 0], [0, 0, float("nan")]]).half()
    b = torch.tensor([[1.0] * 8, [3] * 8, [float("inf")] * 8]).half()
    left = SparseOperand(each.from_dense(a))
    for version in (None, *left.versions(b)):
        assert left(b, version)[:, 0].nan_to_num(nan=-1).tolist() == [6, 1, -1]


@simulated
def test_entries_in_any_order():
    a = draw(9, 70, 0.3, BF16)
    coo, order = COO.from_dense(a), torch.randperm(COO.from_dense(a).nnz)
    mixed = COO(coo.row[order], coo.column[order], coo.value[order], coo.shape)
    b = torch.randn(70, 24).bfloat16()
    for version in (None, 1, 2, 3, 4):
        assert torch.equal(spmm(mixed, b, version), spmm(coo, b, version))


@simulated
def test_slices_and_odd_addresses():
    a, memory = draw(9, 70, 0.3, BF16), torch.randn(70 * 32 + 1).bfloat16()
    left = SparseOperand(CSR.from_dense(a))
    odd, turned = memory[1:].view(70, 32), memory[:-1].view(32, 70).t()
    assert left.versions(odd) == (1, 2) and left.versions(turned.contiguous()) == (1, 2, 3, 4)
    for b in (odd, turned, memory[:-1].view(70, 32)[:, 3:11]):
        for version in (None, 2):
            assert torch.allclose(left(b, version).float(), (a.double() @ b.double()).float(), rtol=0.01, atol=0.05)


@simulated
def test_every_version_by_its_name():
    a, b = draw(4, 6, 0.5, FP32), torch.randn(6, 4)
    calls = every_version(a, b)
    assert list(calls) == [f"{each}_v{i}" for each in ("coo", "csr", "ell") for i in range(1, 5)]
    assert all(torch.allclose(call(), a @ b, atol=1e-5) for call in calls.values())
    assert list(every_version(a, b[:, :3])) == ["coo_v1", "coo_v2", "csr_v1", "csr_v2", "ell_v1", "ell_v2"]
    with pytest.raises(InputError, match=r"b is \[6\]"):
        every_version(a, b[:, 0])


A = draw(4, 6, 0.5, BF16)
B = torch.ones(6, 8, dtype=BF16)


def changed(each, **fields):
    return dataclasses.replace(each.from_dense(A), **fields)


def with_one(tensor, at, new):
    tensor = tensor.clone()
    tensor.view(-1)[at] = new
    return tensor


@pytest.mark.parametrize(
    "a, told",
    [
        (A, "a is a Tensor; a COO, CSR or ELL"),
        (TwELL.from_dense(A), "a is a TwELL"),
        (changed(COO, row=with_one(COO.from_dense(A).row, 3, 4)), "entry of row 4; 0 to 3 are accepted"),
        (changed(COO, column=with_one(COO.from_dense(A).column, 0, -1)), "entry of column -1; 0 to 5 are accepted"),
        (changed(COO, column=COO.from_dense(A).column[1:]), r"columns of a are torch.int32 .* are accepted"),
        (changed(COO, row=COO.from_dense(A).row.float()), "rows of a are torch.float32"),
        (COO(torch.tensor([1, 0, 1]), torch.tensor([2, 0, 2]), torch.ones(3), (4, 6)), "row 1, column 2 twice"),
        (changed(COO, value=COO.from_dense(A).value.double()), "values of a are torch.float64"),
        (changed(COO, shape=(4, 0)), r"shape \[4, 0\]"),
        (changed(CSR, column=with_one(CSR.from_dense(A).column, 0, 6)), "entry of column 6"),
        (changed(CSR, pointer=CSR.from_dense(A).pointer[:-1]), r"pointers of a are torch.int64 \[4\]"),
        (changed(CSR, pointer=CSR.from_dense(A).pointer.flip(0)), "not an ascent from 0"),
        (changed(CSR, column=CSR.from_dense(A).column.flip(0)), "columns that ascend within a row"),
        (changed(ELL, count=with_one(ELL.from_dense(A).count, 0, 99)), "entry of count 99"),
        (changed(ELL, column=ELL.from_dense(A).column + 4), "entry of column"),
        (changed(ELL, column=torch.zeros_like(ELL.from_dense(A).column)), "columns that ascend within a row"),
        (changed(ELL, shape=(5, 6)), r"\[5, slots\] are accepted"),
    ],
)
def test_a_matrix_that_is_not_taken_is_named(a, told):
    with pytest.raises(InputError, match=told):
        SparseOperand(a)


@pytest.mark.parametrize(
    "b, version, told",
    [
        (B[1:], None, r"b is torch.strided \[5, 8\]; a dense tensor \[6, n\]"),
        (B[:, 0], None, r"\[6\]; a dense tensor"),
        (None, None, "b is NoneType"),
        (B[:, :1].expand(6, 2**23), None, "b has 8,388,608 columns; up to 8,388,480"),
        (B.half(), None, "b is torch.float16 on cpu; torch.bfloat16 on cpu"),
        (B.float().requires_grad_().bfloat16(), None, "b needs a gradient"),
        (B, 5, "version is 5; 1 to 4 are accepted"),
        (B[:, 1:], 3, "version is 3; 1 to 2 are accepted for n = 7"),
    ],
)
def test_a_second_operand_that_is_not_taken_is_named(b, version, told):
    with pytest.raises(InputError, match=told):
        spmm(CSR.from_dense(A), b, version)

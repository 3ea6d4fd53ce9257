"""Sparse matrices and weights that are prepared for many products: on a CPU, by torch; and what is refused."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.rows import blocks as block_rows
from tests.ops.rows.spmm import draw, skewed
from twell_lab.core import InputError
from twell_lab.formats import COO, CSR, ELL
from twell_lab.ops.blocks import DTYPES, BlockOperand
from twell_lab.ops.spmm import SparseOperand
from twell_lab.sparsities.blocks import to_bsr

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR)", "ignore:Sparse invariant")
FORMATS = (COO, CSR, ELL)


@given(
    st.integers(0, 12), st.integers(1, 80), st.integers(0, 20), st.sampled_from([0, 0.02, 0.3, 1]), st.integers(0, 99)
)
@settings(max_examples=25, deadline=None)
def test_torch_on_a_cpu_computes_the_same(rows, columns, n, density, seed):
    a, b = draw(rows, columns, density, torch.float32), torch.randn(columns, n)
    for form in FORMATS:
        assert torch.allclose(SparseOperand(form.from_dense(a))(b), a @ b, atol=1e-4)


def test_versions_run_in_the_simulator_and_heavy_rows_are_counted():
    a, b = skewed(torch.bfloat16), torch.randn(1500, 16).bfloat16()
    for form in FORMATS:
        left = SparseOperand(form.from_dense(a))
        assert left.heavy == 4 and left.versions(b) == (1, 2, 3, 4) and left.versions(b[:, 1:]) == (1, 2)
        for version in (2, 4):
            assert torch.allclose(left(b, version).float(), left(b).float(), rtol=0.02, atol=0.05)
    coo, order = COO.from_dense(a), torch.randperm(COO.from_dense(a).nnz)
    mixed = COO(coo.row[order], coo.column[order], coo.value[order], coo.shape)
    assert torch.equal(SparseOperand(mixed)(b, 3), SparseOperand(coo)(b, 3))


def test_what_is_not_stored_is_skipped():
    a = torch.tensor([[0.0, 2, 0], [1, 0, 0], [0, 0, float("nan")]]).half()
    b = torch.tensor([[1.0] * 8, [3] * 8, [float("inf")] * 8]).half()
    for form in FORMATS:
        for version in (None, 1, 2, 3, 4):
            assert SparseOperand(form.from_dense(a))(b, version)[:, 0].nan_to_num(nan=-1).tolist() == [6, 1, -1]


A, B = draw(4, 6, 0.5, torch.bfloat16), torch.ones(6, 8, dtype=torch.bfloat16)


def changed(form, **fields):
    return dataclasses.replace(form.from_dense(A), **fields)


@pytest.mark.parametrize(
    "a, words",
    [
        (A, "a is a Tensor; a COO, CSR or ELL"),
        (changed(COO, row=COO.from_dense(A).row + 3), "outside"),
        (changed(COO, column=COO.from_dense(A).column[1:]), "one for each value"),
        (changed(COO, row=COO.from_dense(A).row.float()), "no integers"),
        (COO(torch.tensor([1, 0, 1]), torch.tensor([2, 0, 2]), torch.ones(3), (4, 6)), "twice"),
        (changed(COO, value=COO.from_dense(A).value.double()), "a.value holds torch.float64"),
        (changed(CSR, pointer=CSR.from_dense(A).pointer.flip(0)), "does not rise"),
        (changed(CSR, column=CSR.from_dense(A).column.flip(0)), "out of order"),
        (changed(ELL, count=ELL.from_dense(A).count + 99), "a.count is not"),
    ],
)
def test_a_matrix_that_is_not_taken_is_named(a, words):
    with pytest.raises(InputError, match=words):
        SparseOperand(a)


@pytest.mark.parametrize(
    "b, version, words",
    [
        (B[1:], None, r"b has shape \[5, 8\]; \[6, 'any'\]"),
        (None, None, "b is a NoneType"),
        (B[:, :1].expand(6, 2**23), None, "b has 8,388,608 columns"),
        (B.half(), None, "b is torch.float16"),
        (B.float().requires_grad_().bfloat16(), None, "needs a gradient"),
        (B, 5, "version is 5"),
        (B[:, 1:], 3, "version is 3; for n = 7"),
    ],
)
def test_a_second_operand_that_is_not_taken_is_named(b, version, words):
    with pytest.raises(InputError, match=words):
        SparseOperand(CSR.from_dense(A))(b, version)


@given(
    size=st.sampled_from(block_rows.SIZES),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    shape=st.sampled_from([(), (6,), (2, 3), (0,)]),
    density=st.sampled_from([0, 0.3, 1]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_blocks_on_a_cpu(size, rows, columns, shape, density, dtype, biased):
    w = block_rows.draw(*size, rows, columns, dtype, density)
    x, bias = torch.randn(*shape, w.shape[1]).to(dtype), torch.randn(len(w)).to(dtype) if biased else None
    y = BlockOperand(to_bsr(w, size))(x, bias)
    exact = torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    assert y.dtype == dtype and torch.allclose(y.double(), exact, rtol=0.01, atol=0.02)


def test_what_blocks_refuse():
    w = block_rows.draw(16, 32, 3, 2, torch.float16, 0.5)
    weight, x = BlockOperand(to_bsr(w, (16, 32))), torch.ones(2, 64).half()
    for arguments, words in (
        ((x[:, 1:],), r"x is \[2, 63\]"),
        ((x.float(),), "x is torch.float32"),
        ((x, torch.ones(47).half()), r"bias has shape \[47\]"),
        ((x, None, 2), "version 2, on cpu"),
        ((x.clone().requires_grad_(),), "without a gradient"),
    ):
        with pytest.raises(InputError, match=words):
            weight(*arguments)
    indices = torch.tensor([0, 2, 2]), torch.tensor([0, 0])
    twice = torch.sparse_bsr_tensor(*indices, torch.ones(2, 16, 16).half(), (32, 32), check_invariants=False)
    for wrong, words in (
        (w, "a torch.sparse_bsr matrix"),
        (to_bsr(w.float(), 16), "of torch.float32"),
        (twice, "twice at one place"),
    ):
        with pytest.raises(InputError, match=words):
            BlockOperand(wrong)

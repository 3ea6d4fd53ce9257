"""Products of sparse formats beside the dense product: their results are right, and each has its row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab.bench import density
from twell_lab.core import InputError
from twell_lab.formats import ELL


@given(rows=st.integers(1, 20), columns=st.integers(1, 40), share=st.floats(0, 1))
def test_scattered_has_exactly_the_asked_number_in_every_row(rows, columns, share):
    per_row = round(share * columns)
    a = density.scattered(rows, columns, per_row, dtype=torch.bfloat16)
    assert a.shape == (rows, columns) and a.dtype == torch.bfloat16
    assert ((a != 0).sum(1) == per_row).all()


def test_scattered_refuses_more_than_there_is_room_for():
    with pytest.raises(InputError, match="per_row is 5; 0 to 4"):
        density.scattered(2, 4, 5)


@pytest.mark.parametrize("per_row", [0, 1, 7, 50])
def test_every_way_of_multiplying_agrees_with_float64(per_row):
    a, b = density.scattered(12, 50, per_row), torch.randn(50, 30)
    a[3] = 0  # rows of different lengths: ELL pads this one
    exact = a.double() @ b.double()
    ways = density.multipliers(a, b)
    assert set(ways) == {"dense", "COO", "CSR", "ELL"}
    for name, call in ways.items():
        assert torch.allclose(call().double(), exact, atol=1e-4), name


def test_ell_without_any_value_gives_zeros():
    assert torch.equal(density.ell_matmul(ELL.from_dense(torch.zeros(3, 5)), torch.randn(5, 2)), torch.zeros(3, 2))


def test_density_table_holds_every_path_at_every_density():
    rows = density.against_density(40, 16, 12, [0.1, 0.5], "cpu", torch.float32, seconds=0.0)
    assert {(row["path"], row["nnz"]) for row in rows} == {
        (path, nnz) for path in ("dense", "COO", "CSR", "ELL", "CSR + conversion") for nnz in (4, 20)
    }
    assert all(row["x_dense"] == pytest.approx(row["dense_ms"] / row["ms"]) for row in rows)
    assert all(row["x_dense"] == 1 for row in rows if row["path"] == "dense")

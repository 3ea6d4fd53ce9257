"""The element-wise middle of a dense training step, in the simulator, against torch bit by bit and against autograd."""

import pytest
import torch

from tests.ops.train_dense.cases import autograd, check_gradients, check_hidden, draw
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.ops import train_dense

needs_simulator = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@needs_simulator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "rows, d_ff, version", [(1, 1, 1), (9, 37, None), (9, 300, 1), (9, 8, 2), (17, 264, 2), (3, 2056, None)]
)
def test_as_torch_gives_it(rows, d_ff, version, gated, dtype):
    for odd in (False, True):
        g, u, dh, dl1 = draw(rows, d_ff, dtype, gated=gated, odd=odd)
        check_hidden(g, u, version)
        for slope in (None, dl1):
            check_gradients(g, u, dh, slope, version)


@needs_simulator
@pytest.mark.parametrize("gated", [True, False])
def test_as_autograd_derives_it(gated):
    g, u, dh, dl1 = draw(5, 50, torch.float32, gated=gated)
    g[:, ::7] = 0
    for slope in (None, dl1):
        expected = autograd(g, u, dh, slope)
        _, dg, du = train_dense.dense_gradients(g, u, dh.clone(), slope)
        torch.testing.assert_close(dg.double(), expected[0])
        assert gated is False or torch.testing.assert_close(du.double(), expected[1]) is None


@needs_simulator
def test_rows_anywhere_in_memory():
    """Rows of whole vectors at an address that is not aligned: the scalar version is chosen."""
    g, u, dh, dl1 = draw(6, 64, torch.bfloat16)
    shifted = torch.empty(6 * 64 + 1, dtype=g.dtype)[1:].view(6, 64)
    shifted.copy_(g)
    check_hidden(shifted, u, None)
    check_gradients(shifted, u, dh, dl1, None)
    with pytest.raises(InputError, match="version is 2; 1, and 2 where"):
        train_dense.dense_hidden(shifted, u, 2)


def test_no_rows():
    g, u, dh, dl1 = draw(0, 16, torch.float16)
    h, l1, kept = train_dense.dense_hidden(g, u)
    assert h.shape == (0, 16) and l1.shape == kept.shape == (0,)
    assert [t.shape for t in train_dense.dense_gradients(g, u, dh, dl1)] == [(0, 16)] * 3


def test_what_is_refused():
    g, u, dh, dl1 = draw(4, 16, torch.bfloat16)
    hidden, gradients = train_dense.dense_hidden, train_dense.dense_gradients
    for call, says in [
        (lambda: hidden(g[0], None), r"\[16\]"),
        (lambda: hidden(g.double(), None), "float64"),
        (lambda: hidden(g, u.half()), "float16"),
        (lambda: hidden(g, u[:2]), r"\[2, 16\]"),
        (lambda: hidden(g.t(), None), "strides"),
        (lambda: gradients(g, u, dh.float(), None), "float32"),
        (lambda: gradients(g, u, dh, dl1.double()), "dl1 is torch.float64"),
        (lambda: gradients(g, u, dh, dl1[:3]), r"\[3\]"),
        (lambda: hidden(g, u, 3), "version is 3"),
    ]:
        with pytest.raises(InputError, match=says):
            call()

"""The element-wise middle of a dense training step on the GPU: torch's own bits, at real sizes and odd ones."""

import pytest
import torch

from tests.ops.train_dense.cases import check_gradients, check_hidden, draw
from twell_lab.ops import train_dense

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows, d_ff", [(1, 1), (300, 1001), (1003, 5632), (64, 20000)])
def test_as_torch_gives_it(rows, d_ff, gated, dtype):
    for odd in (False, True):
        g, u, dh, dl1 = draw(rows, d_ff, dtype, gated=gated, odd=odd, device="cuda")
        for version in (1, None):
            check_hidden(g, u, version)
            for slope in (None, dl1):
                check_gradients(g, u, dh, slope, version)


@pytest.mark.parametrize("d_ff", [5632, 5631])
def test_the_same_bits_every_time_and_in_a_graph(d_ff):
    g, u, dh, dl1 = draw(2048, d_ff, torch.bfloat16, device="cuda")
    first = train_dense.dense_hidden(g, u), train_dense.dense_gradients(g, u, dh.clone(), dl1)
    given = dh.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward = train_dense.dense_hidden(g, u)
        backward = train_dense.dense_gradients(g, u, given, dl1)
    for _ in range(3):
        given.copy_(dh)
        graph.replay()
        assert all(torch.equal(a, b) for one, two in zip(first, (forward, backward)) for a, b in zip(one, two))

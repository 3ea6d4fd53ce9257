"""The kernels behind a dense gate, and the layers that take them, on a GPU."""

import copy

import pytest
import torch
from tests.ops.listed.cases import HEAVY, Case

from twell_lab.ops import accuracy, decode, dispatch, infer, listed
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("d_model, d_ff", [(2048, 5632), (264, 1504), (8, 16384), (4104, 648), (16384, 1024)])
def test_rows_with_few_and_many_kept_values(d_model, d_ff, gated, dtype):
    Case.draw(HEAVY, d_model, d_ff, gated, True, dtype, "cuda").check()


@pytest.mark.parametrize("tokens, heavy", [(65, 1), (256, 0), (256, 9), (256, 256), (511, 264), (700, 3), (2047, 30)])
def test_any_number_of_tokens_and_of_heavy_rows(tokens, heavy):
    case = Case.draw([700] * heavy + [20] * (tokens - heavy), 512, 1408, biases=True, device="cuda")
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).cuda()
    case = case._replace(x=case.x[order], gate=case.gate[order])
    case.x[::7, 5] = torch.inf
    case.check((1, 2))


@pytest.mark.parametrize("gated", [True, False])
def test_the_same_bits_a_hundred_times(gated):
    case = Case.draw(HEAVY * 30, 1024, 2048, gated, device="cuda")
    first = case.run()
    assert all(torch.equal(first, case.run()) for _ in range(100))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("hot", [0, 256])
def test_layers_of_some_hundred_tokens(gated, hot):
    """From one token beyond the decode kernels' on to one less than the packing GEMM's: launches recorded, replayed, and
    in a graph whose inputs change; with heavy rows."""
    layer = (GatedFeedForward if gated else PlainFeedForward)(512, 1536).cuda().bfloat16().requires_grad_(False)
    wide, down = copy.deepcopy(layer).double(), layer.down_proj.weight
    weights = (layer.gate_proj.weight if gated else None, layer.up_proj.weight, down)
    how = {"path": "hot_cold" if hot else "twell", "hot": hot, "down_t": down.t().contiguous()}
    for tokens in (decode.MOST_TOKENS + 1, 300, dispatch.LEAST_PACKED - 1):
        x = torch.randn(tokens, 512, device="cuda").bfloat16()

        def call(x):
            return infer(x, *weights, **how)

        for turn in range(3):
            x = torch.randn(tokens, 512, device="cuda").bfloat16() * (1 + turn)
            y, dense, exact = call(x), layer(x), wide(x.double())
            assert accuracy.worst_row(y, dense, exact)[0] <= 1
            assert torch.equal(y, call(x.view(1, tokens, 512))[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = call(x)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(inside, call(x))


def test_dispatch_takes_them():
    weight = torch.zeros(64, 32, device="cuda").half()
    weights = (weight, weight, weight.t(), weight, None, None, None)
    chosen = lambda tokens, given=weights: type(  # noqa: E731
        dispatch._chosen(torch.zeros(tokens, 32, device="cuda").half(), given, "twell", 0, 256, 32, dispatch.RELU)
    )
    assert chosen(65) is chosen(2047) is dispatch._Listed
    assert chosen(64) is not dispatch._Listed and chosen(listed.MOST_TOKENS + 1) is not dispatch._Listed
    odd = torch.zeros(60, 32, device="cuda").half()
    assert chosen(65, (odd, odd, odd.t(), odd, None, None, None)) is dispatch._Portable

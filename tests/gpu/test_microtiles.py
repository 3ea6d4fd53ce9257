"""Micro-tiles and experts on a GPU: the kernels beside plain indexing and float64, and nothing that waits."""

import pytest
import torch

from tests.ops.microtiles import cases
from twell_lab.cuda.macros import MICROTILE_ROWS
from twell_lab.ops import accuracy, microtiles
from twell_lab.sparsities.experts import WAYS, ExpertsLayer, routed_by_firing, takes_grouped
from twell_lab.sparsities.microtiles import add_padding, find_microtiles, product, remove_padding, unpadded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DTYPES = [torch.bfloat16, torch.float16]
tensor_cores = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0"
)


@pytest.fixture
def waiting_fails():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def drawn(rows, width, dtype, share=0.3):
    a = cases.draw(rows, width, dtype, share)
    return a.nan_to_num(1.0).cuda()


def assert_as_good(c, a, b, allowed=1.0):
    assert accuracy.worst_row(c, a @ b, a.double() @ b.double())[0] <= allowed


@pytest.mark.parametrize("height", MICROTILE_ROWS)
@pytest.mark.parametrize("rows, width", [(1, 8), (37, 1048), (300, 520), (130, 4096), (64, 77), (5, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_found(dtype, rows, width, height):
    a = cases.draw(rows, width, dtype).cuda()
    for version in (1, 2)[: 1 + (width % 8 == 0)]:
        cases.check_found(a, height, version)
    tiles = find_microtiles(a, height)
    torch.use_deterministic_algorithms(False)  # with which torch writes another NaN than it is given
    assert tiles == find_microtiles(a.cpu(), height)
    assert torch.equal(tiles.to_dense().nan_to_num(7), a.nan_to_num(7))


@tensor_cores
@pytest.mark.parametrize("height", MICROTILE_ROWS)
@pytest.mark.parametrize(
    "rows, width, n", [(1, 8, 8), (37, 1048, 264), (300, 520, 1000), (513, 2048, 256), (64, 77, 9)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_the_dense_one(dtype, rows, width, n, height):
    a, b = drawn(rows, width, dtype), torch.randn(width, n, device="cuda").to(dtype)
    tiles = find_microtiles(a, height)
    made = product(tiles, b)
    assert_as_good(made, a, b)
    assert torch.equal(made, product(tiles, b))
    if n % 8 == 0:
        for version in (1, 2):
            again = microtiles.product(tiles.counts, tiles.columns, tiles.values, b, rows, version)
            assert torch.equal(again, made)


@tensor_cores
@pytest.mark.parametrize("height", MICROTILE_ROWS)
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_whole_numbers_are_exact_at_any_density(share, height):
    a = drawn(500, 1000, torch.bfloat16, share).sign()
    b = torch.randint(-4, 5, (1000, 520), device="cuda").bfloat16()
    assert torch.equal(product(find_microtiles(a, height), b), (a.double() @ b.double()).bfloat16())


@tensor_cores
@pytest.mark.parametrize("height", MICROTILE_ROWS)
def test_values_that_are_not_finite_and_stripes_of_zeros(height):
    a = torch.zeros(4 * height, 96, device="cuda", dtype=torch.float16)
    a[height, 3], a[height + 1, 5], a[height + 2, 5] = torch.nan, torch.inf, -torch.inf
    b = torch.randn(96, 64, device="cuda").half()
    c, dense = product(find_microtiles(a, height), b), a @ b
    assert torch.equal(c.nan_to_num(7, 8, 9), dense.nan_to_num(7, 8, 9)) and not c[2 * height :].any()
    b[50] = torch.inf  # that no stripe meets: what is skipped is not multiplied
    assert not product(find_microtiles(a, height), b)[:height].any()


@tensor_cores
def test_a_large_product():
    a = torch.randn(4096, 4096, device="cuda").bfloat16()
    a *= (torch.rand(128, 4096, device="cuda") < 0.1).repeat_interleave(32, 0)
    b = torch.randn(4096, 4096, device="cuda").bfloat16()
    tiles = find_microtiles(a)
    assert 0.09 < tiles.occupied < 0.11
    assert_as_good(product(tiles, b), a, b)


@tensor_cores
def test_slices_odd_addresses_and_the_form_of_a_layer():
    h, down = drawn(100, 512, torch.bfloat16), torch.randn(256, 512, device="cuda").bfloat16()
    tiles = find_microtiles(h)
    for down_t in (
        down.t(),
        down.t().contiguous(),
        torch.cat([down.new_zeros(1), down.t().reshape(-1)])[1:].view(512, 256),
    ):
        assert torch.equal(product(tiles, down_t), product(tiles, down.t().contiguous()))
    assert_as_good(product(tiles, down.t()), h, down.t())
    assert find_microtiles(torch.cat([h, h], 1)[:, 512:]) == tiles
    shifted = torch.cat([h.new_zeros(1), h.reshape(-1)])[1:].view(100, 512)
    assert find_microtiles(shifted) == tiles


@tensor_cores
def test_other_dtypes_and_heights_are_gathered_by_torch():
    for dtype, height in ((torch.float32, 32), (torch.float64, 64), (torch.bfloat16, 16), (torch.float16, 100)):
        a, b = drawn(150, 96, dtype), torch.randn(96, 40, device="cuda").to(dtype)
        # Both are torch's products, of other shapes: as exact on average, not in each row.
        assert_as_good(product(find_microtiles(a, height), b), a, b, 2.0)


@tensor_cores
def test_nothing_waits_and_graphs_hold_it(waiting_fails):
    a, b = drawn(200, 512, torch.bfloat16), torch.randn(512, 264, device="cuda").bfloat16()
    wanted = product(find_microtiles(a), b)
    waiting_fails()
    made = product(find_microtiles(a), b)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(made, wanted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = product(find_microtiles(a), b)
    a.copy_(drawn(200, 512, torch.bfloat16, 0.9))
    graph.replay()
    assert torch.equal(held, product(find_microtiles(a), b)) and not torch.equal(held, wanted)


@tensor_cores
def test_on_another_stream():
    a, b = drawn(200, 512, torch.bfloat16), torch.randn(512, 264, device="cuda").bfloat16()
    wanted, stream = product(find_microtiles(a), b), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = product(find_microtiles(a), b)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(made, wanted)


def test_padding_goes_and_comes_back(waiting_fails):
    x = torch.randn(4, 100, 64, device="cuda")
    real = torch.arange(100, device="cuda") < torch.tensor([[100], [3], [0], [57]], device="cuda")
    rows, padding = remove_padding(x, real)
    waiting_fails()
    back = add_padding(rows, padding)
    torch.cuda.set_sync_debug_mode("default")
    assert len(rows) == 160 and torch.equal(back, x * real[..., None])
    layer = torch.nn.Linear(64, 96).cuda()
    torch.testing.assert_close(unpadded(layer, x, real)[real], layer(x)[real], rtol=1e-4, atol=1e-5)


# Experts


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("experts, top_k, tokens", [(8, 2, 300), (64, 2, 100), (8, 1, 1), (4, 4, 33)])
def test_all_ways_give_the_same(dtype, experts, top_k, tokens):
    torch.manual_seed(0)
    layer = ExpertsLayer(128, 256, experts, top_k, dtype=dtype, device="cuda")
    x = torch.randn(tokens, 128, device="cuda").to(dtype)
    chosen, weights = layer.route(x)
    wide = ExpertsLayer(128, 256, experts, top_k, dtype=torch.float64, device="cuda", way="loop")
    wide.load_state_dict(layer.state_dict())
    exact = wide.experts(x.double(), chosen, weights)
    for layer.experts.way in WAYS:
        y = layer.experts(x, chosen, weights)
        assert (y.double() - exact).norm() <= 4 * max(torch.finfo(dtype).eps, 2**-11) * exact.norm(), layer.experts.way
        assert torch.equal(y, layer.experts(x, chosen, weights))


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_empty_experts_all_tokens_to_one_and_nobodys(way):
    torch.manual_seed(0)
    layer = ExpertsLayer(64, 128, 8, dtype=torch.bfloat16, device="cuda", way=way)
    x, weights = torch.randn(50, 64, device="cuda").bfloat16(), torch.ones(50, 1, device="cuda")
    one = torch.full((50, 1), 5, device="cuda")
    gate, up = (x @ layer.experts.gate_up_proj[5].t()).chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate) * up) @ layer.experts.down_proj[5].t()
    torch.testing.assert_close(layer.experts(x, one, weights), wanted, rtol=0.03, atol=0.03)
    one[::2] = 8
    y = layer.experts(x, one, weights)
    assert not y[::2].any()
    torch.testing.assert_close(y[1::2], wanted[1::2], rtol=0.03, atol=0.03)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10), reason="torch has no kernel"
)
@torch.no_grad()
def test_the_grouped_way_does_not_wait(waiting_fails):
    layer = ExpertsLayer(128, 256, 8, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(100, 128, device="cuda").bfloat16()
    if not takes_grouped(x, layer.experts.gate_up_proj):
        pytest.skip("this torch has no grouped_mm")
    wanted = layer(x)
    waiting_fails()
    made = layer(x)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(made, wanted)


def test_gradients_of_the_grouped_way_are_those_of_the_loop():
    torch.manual_seed(0)
    layer = ExpertsLayer(64, 128, 8, dtype=torch.bfloat16, device="cuda")
    x, found = torch.randn(200, 64, device="cuda").bfloat16().requires_grad_(), []
    for layer.experts.way in WAYS:
        found.append(torch.autograd.grad(layer(x).float().square().sum(), [x, *layer.parameters()]))
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert (a.float() - b.float()).norm() <= 0.05 * b.float().norm()


def test_routing_by_firing():
    whole = lambda *shape: torch.randint(-3, 4, shape, device="cuda").float()  # noqa: E731
    x, gate, up, down = whole(9, 6), whole(12, 6), whole(12, 6), whole(6, 12)
    wanted = torch.nn.functional.linear((x @ gate.t()).relu() * (x @ up.t()), down)
    assert all(torch.equal(routed_by_firing(x, gate, up, down, 4, grain).y, wanted) for grain in (1, 3, 8))

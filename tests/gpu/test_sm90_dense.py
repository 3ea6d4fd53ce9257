"""gate_up, down_sums and finish_lost on Hopper against float64, with what they must not write poisoned."""

import pytest
import torch
from torch.nn.functional import linear

from tests.simulator.pooled_cases import Pooled, gate_of
from twell_lab.core import InputError
from twell_lab.cuda import sources
from twell_lab.formats import packed_and_pool
from twell_lab.ops import accuracy
from twell_lab.ops import hopper_dense as dense

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the sm90 kernels need a GPU of compute capability 9.0 (Hopper)",
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16
ULP = {BF16: 2.0**-7, FP16: 2.0**-10}


def layer(rows, d_model, d_ff, dtype=BF16, gated=True, biased=False, seed=0):
    """x, gate, up, gate_bias, up_bias, down, down_bias, start."""
    g = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    x, down = normal(rows, d_model), normal(d_model, d_ff) / d_ff**0.5
    gate, up = (normal(d_ff, d_model) / d_model**0.5 for _ in range(2))
    biases = [normal(d_ff) / 2, normal(d_ff) / 2, normal(d_model)] if biased else [None] * 3
    made = [x, gate if gated else None, up, biases[0] if gated else None, biases[1], down, biases[2]]
    return [None if t is None else t.to(dtype) for t in made] + [normal(rows, d_model)]


def hidden_of(x, gate, up, gate_bias, up_bias):
    """float64, the gate rounded as torch's linear rounds it."""
    wide = lambda t: None if t is None else t.double()  # noqa: E731
    u = linear(x.double(), up.double(), wide(up_bias))
    if gate is None:
        return torch.relu(u)
    return torch.relu(linear(x.double(), gate.double(), wide(gate_bias)).to(x.dtype).double()) * u


def close(y, exact):
    """Equal where not finite; elsewhere two roundings off at most (the gate's may go the other way), and rarely."""
    exact = exact.to(y.dtype).double()
    finite, ulp = exact.isfinite(), ULP[y.dtype]
    assert torch.equal(y[~finite].double().nan_to_num(7.0), exact[~finite].nan_to_num(7.0))
    y, exact = y[finite].double(), exact[finite]
    scale = exact.pow(2).mean().sqrt()
    assert ((y - exact).abs() <= 2.05 * ulp * exact.abs() + 0.3 * ulp * scale).all()
    assert (y - exact).norm() <= ulp / 3 * exact.norm()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 128, 300, 4097])
def test_gate_up(rows, biased, gated, dtype):
    for d_model, d_ff in [(8, 8), (64, 256), (72, 1000), (768, 264), (2048, 5632), (4096, 512)]:
        made = layer(rows, d_model, d_ff, dtype, gated, biased, seed=rows + d_ff)[:5]
        h = dense.gate_up(*made)
        close(h, hidden_of(*made))
        assert torch.equal(h, dense.gate_up(*made))


@pytest.mark.parametrize("gated", [True, False])
def test_values_that_are_not_finite_go_where_torch_sends_them(gated):
    x, gate, up, *_ = layer(300, 136, 1000, gated=gated)
    x[3, 5], x[7, 6], x[299, 7] = torch.nan, torch.inf, -torch.inf
    up[10, 5], up[999, 4] = torch.inf, torch.nan
    close(dense.gate_up(x, gate, up), hidden_of(x, gate, up, None, None))


def test_rows_of_larger_weights_and_a_wider_x():
    x, gate, up, *_ = layer(300, 512, 1024)
    h = dense.gate_up(x[:, 256:], gate[512:, 256:], up[512:, 256:])
    close(h, hidden_of(x[:, 256:], gate[512:, 256:], up[512:, 256:], None, None))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", [1, 128, 300, 4097, 20000])
def test_down_sums(rows, dtype):
    """Sums that are not rounded: float32's error alone, and the same bits each time. h may be part of a wider matrix."""
    for d_ff, d_model in [(8, 8), (256, 2048), (264, 72), (1000, 1000), (512, 4096), (5632, 768)]:
        g = torch.Generator("cuda").manual_seed(rows + d_ff)
        normal = lambda *shape: torch.randn(*shape, generator=g, device="cuda").to(dtype)  # noqa: E731
        h, down_t = normal(rows, d_ff + 64)[:, 64:], normal(d_ff + 8, d_model)[:d_ff]
        sums = dense.down_sums(h, down_t)
        exact, size = h.double() @ down_t.double(), h.double().abs() @ down_t.double().abs()
        assert sums.dtype == torch.float32 and sums.shape == (rows, d_model)
        assert ((sums - exact).abs() <= 2.0**-20 * size).all()
        assert torch.equal(sums, dense.down_sums(h.contiguous(), down_t))


def test_down_sums_of_values_that_are_not_finite():
    h, down_t = torch.randn(300, 264, device="cuda").to(BF16), torch.randn(264, 136, device="cuda").to(BF16)
    h[3, 5], h[7, 6], down_t[9, 4] = torch.nan, torch.inf, -torch.inf
    sums, exact = dense.down_sums(h, down_t), h.double() @ down_t.double()
    assert torch.equal(sums.isnan(), exact.isnan()) and torch.equal(sums.isfinite(), exact.isfinite())


def losing(rows, tokens, seed):
    """A list of lost rows as the readers leave it: their number, then them in any order, then anything."""
    picked = torch.randperm(tokens, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")[:rows]
    lost = torch.full((1 + tokens,), 2**30, dtype=torch.int32, device="cuda")
    lost[0], lost[1 : 1 + rows] = rows, picked.int()
    return lost, picked


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, rows",
    [
        (1, 0),
        (1, 1),
        (300, 1),
        (300, 300),
        (4097, 0),
        (4097, 129),
        (20000, dense.CHUNK),
        (20000, dense.CHUNK + 1),
        (20000, 20000),
    ],
)
def test_finish_lost_writes_the_lost_rows_alone(tokens, rows, gated, dtype):
    for d_model, d_ff, hot, full in [(64, 264, 0, False), (768, 1256, 256, True), (1024, 768, 512, True)]:
        x, gate, up, gate_bias, up_bias, down, down_bias, start = layer(
            tokens, d_model, d_ff, dtype, gated, full, seed=tokens
        )
        cold = [None if t is None else t[hot:] for t in (gate, up, gate_bias, up_bias)]
        down, down_t, start = down[:, hot:], down.t().contiguous()[hot:], start if full else None
        lost, picked = losing(rows, tokens, seed=rows)
        lost_x = torch.full_like(x, torch.nan)
        lost_x[:rows] = x[picked]
        y = torch.full_like(x, 77.0)
        dense.finish_lost(lost, lost_x, *cold, down_t, down_bias, start, y)
        others = torch.ones(tokens, dtype=torch.bool, device="cuda")
        others[picked] = False
        assert (y[others] == 77.0).all()
        if rows:
            h = dense.gate_up(x[picked], *cold).double()
            exact = linear(h, down.double(), None if down_bias is None else down_bias.double())
            close(y[picked], exact if start is None else exact + start[picked])


@pytest.mark.parametrize("rows", [1, 70, 200, 600])
def test_few_lost_rows_share_the_gpu_and_the_order_of_the_slots_does_not_matter(rows):
    x, gate, up, _, _, down, down_bias, start = layer(600, 2048, 5632, biased=True)
    lost, picked = losing(rows, 600, seed=rows)
    made, down_t = [], down.t().contiguous()
    for order in (
        torch.arange(rows, device="cuda"),
        torch.randperm(rows, device="cuda"),
        torch.randperm(rows, device="cuda"),
    ):
        lost[1 : 1 + rows] = picked[order].int()
        lost_x, y = torch.full_like(x, torch.nan), torch.full_like(x, 77.0)
        lost_x[:rows] = x[picked[order]]
        dense.finish_lost(lost, lost_x, gate, up, None, None, down_t, down_bias, start, y)
        made.append(y)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    h = dense.gate_up(x[picked], gate, up).double()
    close(made[0][picked], linear(h, down.double(), down_bias.double()) + start[picked])


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 24, 25])
def test_few_rows_of_a_packed_gate_are_taken_apart(rows, gated, dtype):
    """From their kept values, which here are not those of the gate's weights: so it is seen which way was taken. More
    rows, or one that the pool could not hold, are computed densely."""
    for d_model, d_ff in [(2048, 5632), (264, 1256), (4096, 520), (64, 9000)]:
        gate_values = gate_of(300, d_ff, dtype, 0.05)
        picked = torch.randperm(300, generator=torch.Generator().manual_seed(rows))[:rows]
        gate_values[picked] = gate_of(300, d_ff, dtype, 0.15, seed=1)[picked]
        made = Pooled.draw(gate_values, d_model, biases=True, start=True).to("cuda")
        packed, pool, lost_to_pool = packed_and_pool(made.gate)
        picked = picked[~lost_to_pool[picked.cuda()].cpu()].cuda()
        n, other = len(picked), torch.randn(d_ff, d_model, device="cuda").to(dtype) / d_model**0.5
        up = made.up if gated else other
        results = []
        for order in (torch.arange(n), torch.arange(n).flip(0), torch.arange(n)):
            lost = torch.full((301,), 2**30, dtype=torch.int32, device="cuda")
            lost[0], lost[1 : 1 + n] = n, picked[order.cuda()].int()
            lost_x, y = torch.full_like(made.x, torch.nan), torch.full_like(made.x, 77.0)
            lost_x[:n] = made.x[picked[order.cuda()]]
            biases = None, made.up_bias if gated else None
            layer_of = (other if gated else None, up, *biases, made.down_t, made.down_bias, made.start)
            dense.finish_lost(lost, lost_x, *layer_of, y, packed, pool)
            results.append(y)
        assert all(torch.equal(y, results[0]) for y in results)
        others = torch.ones(300, dtype=torch.bool, device="cuda")
        others[picked] = False
        assert (results[0][others] == 77.0).all()
        if n and n <= sources.number("few_rows.cuh", "FEW_ROWS"):
            exact, beside = (t[picked] for t in made.exact_and_dense("gated" if gated else "down"))
            assert accuracy.worst_row(results[0][picked], beside, exact)[0] <= 1.0
            lost[1] = ~lost[1]
            dense.finish_lost(lost, lost_x, *layer_of, y, packed, pool)
        if n:
            h = dense.gate_up(made.x[picked], *layer_of[:4]).double()
            close(y[picked], linear(h, made.down_t.double().t(), made.down_bias.double()) + made.start[picked])


def test_both_run_inside_a_graph():
    x, gate, up, _, _, down, _, _ = layer(600, 256, 512)
    lost, _ = losing(100, 600, seed=1)
    y, down_t = torch.full_like(x, 77.0), down.t().contiguous()
    dense.finish_lost(lost, x, gate, up, None, None, down_t, None, None, y)
    graph, later = torch.cuda.CUDAGraph(), torch.full_like(x, 77.0)
    with torch.cuda.graph(graph):
        h = dense.gate_up(x, gate, up)
        dense.finish_lost(lost, x, gate, up, None, None, down_t, None, None, later)
    graph.replay()
    assert torch.equal(later, y) and torch.equal(h, dense.gate_up(x, gate, up))
    lost[0] = 0
    later.fill_(3.0)
    graph.replay()
    assert (later == 3.0).all()


def test_no_rows():
    x, gate, up, _, _, down, _, _ = layer(1, 64, 256)
    assert dense.gate_up(x[:0], gate, up).shape == (0, 256)
    assert dense.down_sums(x[:0], gate.t().contiguous()).shape == (0, 256)
    lost = torch.zeros(1, dtype=torch.int32, device="cuda")
    dense.finish_lost(lost, x[:0], gate, up, None, None, down.t().contiguous(), None, None, x[:0])


def test_what_is_not_taken_is_refused():
    x, gate, up, _, _, down, _, start = layer(16, 64, 256)
    lost, _ = losing(1, 16, seed=0)
    assert dense.takes(x, gate, up, down.t().contiguous()) and not dense.takes(x.float(), up.float())
    assert not dense.takes(x, up[:, 1:]) and not dense.takes(x, up[:250]) and not dense.takes(x, up.cpu())
    for wrong in [(x.float(), gate, up), (x, gate[:128], up), (x, None, up[:, :32]), (x[:, 4:60], None, up[:, 4:60])]:
        with pytest.raises(InputError, match="accepted are x"):
            dense.gate_up(*wrong)
    h, down_t = dense.gate_up(x, gate, up), down.t().contiguous()
    for wrong in [(h.float(), down_t), (h, down_t.to(FP16)), (h[:, :128], down_t), (h, down), (h[0], down_t)]:
        with pytest.raises(InputError, match="accepted are h"):
            dense.down_sums(*wrong)
    with pytest.raises(InputError, match="up_bias"):
        dense.gate_up(x, gate, up, None, up[0])
    right = {
        "lost": lost,
        "lost_x": x,
        "gate": gate,
        "up": up,
        "gate_bias": None,
        "up_bias": None,
        "down_t": down.t().contiguous(),
        "down_bias": None,
        "start": start,
        "y": x.clone(),
    }
    for name, wrong in [
        ("lost", lost.long()),
        ("lost", lost[1:]),
        ("start", start.to(BF16)),
        ("y", x[:8]),
        ("down_t", down),
        ("down_t", down.t()),
    ]:
        with pytest.raises(InputError, match=name):
            dense.finish_lost(**{**right, name: wrong})

"""Training a layer on a GPU: the sparse kernels run, and y, L1 and every gradient are right, whatever the pattern."""

import copy
import threading

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from twell_lab import ops
from twell_lab.layers import terms as penalty
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import differentiable, train_lost
from twell_lab.ops.reference import GatedFeedForward

from .drawn import tensors
from .watching import watched_launches

pytestmark = pytest.mark.gpu
NAMES = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
SPARSE = {
    "survivor",
    "weighted_rows",
    "hidden_gradient",
    "input_gradient",
    "weight_gradients",
}  # beginnings of kernel names


def dense(x, gate, up, down, gate_bias, up_bias, down_bias):
    first = torch.relu(linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias))
    h = first if gate is None else first * linear(x, up, up_bias)
    return linear(h, down, down_bias), h.abs().sum(1, dtype=torch.float32)


def exact(x, gate, up, down, gate_bias, up_bias, down_bias, dy, dl1):
    """y, l1 and the gradients in float64, from the gate that torch rounds."""
    g = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias).double()
    x, gate, up, down, up_bias, down_bias, dy, dl1 = (
        None if t is None else t.double() for t in (x, gate, up, down, up_bias, down_bias, dy, dl1)
    )
    keep = g > 0
    g = torch.where(keep, g, 0.0)
    u = None if gate is None else linear(x, up, up_bias)
    h = g if u is None else g * u
    dh = dy @ down + dl1[:, None] * h.sign()
    dg = torch.where(keep, dh if u is None else dh * u, 0.0)
    du = None if u is None else dh * g
    dx = dg @ up if u is None else dg @ gate + du @ up
    weights = (None, dg.t() @ x) if u is None else (dg.t() @ x, du.t() @ x)
    biases = (None, dg.sum(0)) if u is None else (dg.sum(0), du.sum(0))
    return [linear(h, down, down_bias), h.abs().sum(1), dx, *weights, dy.t() @ h, *biases, dy.sum(0)]


def step(function, made, dy, dl1):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in made]
    y, l1, *_ = function(*leaves)
    asked = [t for t in leaves if t is not None]
    given = iter(torch.autograd.grad([y, l1], asked, [dy, dl1]))
    return [y.detach(), l1.detach(), *(None if t is None else next(given) for t in leaves)]


def upstream(made, seed=3):
    g = torch.Generator("cuda").manual_seed(seed)
    x = made[0]
    return torch.randn(x.shape, generator=g, device="cuda").to(x.dtype), torch.rand(len(x), generator=g, device="cuda")


def assert_right(found, made, dy, dl1):
    """The norm of each error is at most twice that of torch's dense layer, plus half an ulp of what is there: of a
    handful of values torch's may be exact by luck. `twell-lab record training` holds the large layers to twice
    alone."""
    right, reached = exact(*made, dy, dl1), step(dense, made, dy, dl1)
    ulp = torch.finfo(made[0].dtype).eps / 2
    for name, a, b, e in zip(("y", "l1", *NAMES), found, reached, right):
        if a is None:
            assert b is None
            continue
        off, allowed = (a.double() - e).norm(), 2 * (b.double() - e).norm() + ulp * e.norm()
        assert off <= allowed, f"{name}: {float(off):.4g} of {float(e.norm()):.4g}, {float(allowed):.4g} allowed"


@pytest.fixture
def ran(monkeypatch):
    """The names of the kernels that were launched."""
    return watched_launches(monkeypatch)


def all_ran(names):
    return all(any(name.startswith(each) for name in names) for each in SPARSE)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tokens, d_model, d_ff", [(1, 64, 256), (7, 8, 8), (300, 256, 1000), (2048, 768, 3072), (513, 4096, 4352)]
)
def test_every_gradient(gated, biased, dtype, tokens, d_model, d_ff, ran):
    made = tensors(tokens, d_model, d_ff, gated, dtype, biased, rate=1.0 if d_ff < 300 else 2.3)
    dy, dl1 = upstream(made)
    assert_right(step(differentiable.train_ffn, made, dy, dl1), made, dy, dl1)
    assert all_ran(ran)


@pytest.mark.parametrize("gated", [True, False])
def test_at_the_size_of_the_tables(gated, ran):
    made = tensors(16384, 2048, 5632, gated, rate=2.57)
    dy, dl1 = upstream(made)
    found = step(differentiable.train_ffn, made, dy, dl1)
    assert_right(found, made, dy, dl1)
    assert all_ran(ran)
    for a, b in zip(found, step(differentiable.train_ffn, made, dy, dl1)):
        assert a is None or torch.equal(a, b)  # the same bits


@pytest.mark.parametrize("tokens, d_model, d_ff", [(300, 256, 1000), (2048, 768, 3072)])
def test_a_squared_relu_is_a_gate_that_is_up_and_gets_both_gradients(tokens, d_model, d_ff, ran):
    made = tensors(tokens, d_model, d_ff, False, torch.bfloat16, False, rate=2.3)
    dy, dl1 = upstream(made)

    def squared(function):
        return lambda x, _, up, down, *biases: function(x, up, up, down, *biases)

    found, reached = (step(squared(each), made, dy, dl1) for each in (differentiable.train_ffn, dense))
    y, l1, dx, of_gate, of_up, *rest = exact(made[0], made[2], made[2], *made[3:], dy, dl1)
    ulp = torch.finfo(torch.bfloat16).eps / 2
    for name, a, b, e in zip(("y", "l1", *NAMES), found, reached, [y, l1, dx, None, of_gate + of_up, *rest]):
        if a is not None:
            off, allowed = (a.double() - e).norm(), 2 * (b.double() - e).norm() + ulp * e.norm()
            assert off <= allowed, f"{name}: {float(off):.4g} of {float(e.norm()):.4g}, {float(allowed):.4g} allowed"
    assert all_ran(ran)


@pytest.mark.parametrize("share, many", [(0.2, 40), (0.2, 200), (1.0, 256)])
@pytest.mark.parametrize("gated", [True, False])
def test_overflowing_rows_lose_nothing(share, many, gated, ran):
    made = tensors(640, 512, 1024, gated, biased=True)
    x, first = made[0], made[1] if gated else made[2]
    x[:, 1] = 0
    x[:: round(1 / share), 1] = 8.0
    first[256 : 256 + many, 1] = 4.0
    dy, dl1 = upstream(made)
    assert_right(step(differentiable.train_ffn, made, dy, dl1), made, dy, dl1)
    assert all_ran(ran)
    lost = int(torch.ops.twell_lab.train_forward(*made)[-1][0])
    assert lost > 0 or many == 40  # 9 values past the words of a tile still have room in the pool


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("many", [1, train_lost.FEW_HEAVY, 97])
def test_few_heavy_rows_are_shared_and_many_lost(many, gated, ran):
    made = tensors(16 * 97, 512, 5632, gated, biased=True)
    made[0][: 16 * many : 16, 0] = 0.35  # a fifth of the neurons fires, which fits into the pool
    dy, dl1 = upstream(made)
    found = step(differentiable.train_ffn, made, dy, dl1)
    assert_right(found, made, dy, dl1)
    assert all_ran(ran)
    lost = torch.ops.twell_lab.train_forward(*made)[-1].tolist()
    heavy = [many, *range(0, 16 * many, 16)]
    if many <= train_lost.FEW_HEAVY:
        assert lost[0] == 0 and lost[: -2 - many : -1] == heavy
    else:
        assert lost[-1] == 0 and lost[: 1 + many] == heavy
    for a, b in zip(found, step(differentiable.train_ffn, made, dy, dl1)):
        assert a is None or torch.equal(a, b)  # the same bits


@pytest.mark.parametrize("compiled", [False, True])
def test_a_term_says_how_many_tokens_found_no_room(compiled):
    x, gate, up, down, *_ = made = tensors(640, 512, 1024, True)
    x[:, 1] = 0
    x[::5, 1] = 8.0
    gate[256:456, 1] = 4.0
    net = torch.nn.Sequential(GatedFeedForward(512, 1024)).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for weight, given in zip(net.parameters(), (gate, up, down), strict=True):
            weight.copy_(given)
    net = sparsify(net, "twell")
    call = torch.compile(net) if compiled else net
    shares = {}
    for path in ("twell", "dense"):
        net[0].learn(path)
        with penalty.layer_terms(net) as terms:
            call(x)
        shares[path] = terms[0].lost
    lost = int(torch.ops.twell_lab.train_forward(*made)[-1][0])
    assert 0 < lost <= 128 and float(shares["twell"]) == pytest.approx(lost / 640) and shares["dense"] is None


@pytest.mark.parametrize("rate", [-9.0, 0.0, 9.0])
def test_everything_half_and_nothing_fires(rate, ran):
    made = tensors(300, 256, 1000, rate=rate)
    dy, dl1 = upstream(made)
    assert_right(step(differentiable.train_ffn, made, dy, dl1), made, dy, dl1)
    assert all_ran(ran)


def test_the_sparse_path_keeps_nothing_as_wide_as_the_layer():
    made = tensors(2048, 768, 3072)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in made]
    weights, kept = {t.shape for t in leaves[1:] if t is not None}, []
    weights |= {shape[::-1] for shape in weights}  # down is kept transposed
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.shape, t.nbytes)) or t, lambda t: t):
        differentiable.train_ffn(*leaves)
    wide = 2048 * 3072 * 2  # one hidden tensor of 16 bits
    assert kept and sum(size for shape, size in kept if shape not in weights and shape != made[0].shape) < wide / 2


@pytest.mark.parametrize("gated", [True, False])
def test_opcheck(gated):
    """But not what compares outputs: of the lists only what is in use is written."""
    made = [None if t is None else t.requires_grad_() for t in tensors(300, 256, 1000, gated)]
    torch.library.opcheck(
        torch.ops.twell_lab.train_forward.default,
        tuple(made),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
def test_dense_path(dtype, gated):
    made = tensors(1000, 256, 1000, gated, dtype, biased=True, rate=0.3)
    dy, dl1 = upstream(made)
    assert_right(step(lambda *a: differentiable.train_ffn(*a, path="dense"), made, dy, dl1), made, dy, dl1)


def test_what_the_kernels_do_not_take_is_right_too(ran):
    for sizes in ((33, 100, 1001, True, torch.bfloat16), (33, 128, 1000, True, torch.float32)):
        made = tensors(*sizes, biased=True)
        dy, dl1 = upstream(made)
        assert_right(step(differentiable.train_ffn, made, dy, dl1), made, dy, dl1)
    assert not any(name.startswith("survivor") for name in ran)


def test_a_row_that_is_not_finite_spoils_its_own_output_alone():
    made = tensors(64, 256, 1000)
    made[0][5, 3], made[0][9, 0] = torch.inf, torch.nan
    y, l1, kept = differentiable.train_ffn(*made)
    bad = torch.tensor([5, 9], device="cuda")
    assert y[bad].isnan().all() and l1[bad].isnan().all()
    rest = torch.ones(64, dtype=torch.bool, device="cuda").index_fill(0, bad, False)
    assert y[rest].isfinite().all() and l1[rest].isfinite().all()


def test_kept_counts_every_row():
    made = tensors(640, 512, 1024)
    made[0][::5, 1], made[1][256:456, 1] = 8.0, 4.0
    g = linear(made[0], made[1])
    kept = differentiable.train_ffn(*made)[2]
    assert ((kept - (g > 0).sum(1)).abs() <= 1).all()


def test_public_operators_and_sparse_ffn_take_the_sparse_kernels(ran):
    x, gate, up, down, *_ = tensors(300, 256, 1000)
    layer = GatedFeedForward(256, 1000).to("cuda", torch.bfloat16)
    for p, w in zip(layer.parameters(), (gate, up, down)):
        p.data.copy_(w)
    sparse = SparseFFN.from_module(layer)
    sparse(x).sum().backward()
    assert all_ran(ran)
    ran.clear()
    leaves = [t.requires_grad_() for t in (x, gate, up, down)]
    ops.gated_ffn(*leaves).sum().backward()
    assert all_ran(ran)
    for a, b in zip(layer.parameters(), leaves[1:]):
        assert torch.equal(a.grad, b.grad)


def small(dtype=torch.float32):
    torch.manual_seed(0)
    net = LanguageModel(ModelConfig(vocabulary=64, d_model=256, layers=2, heads=4, d_ff=1024, context=64)).to(
        "cuda", dtype
    )
    return net, torch.randint(0, 64, (4, 64), device="cuda")


def loss_of(net, tokens, call=None):
    with penalty.layer_terms(net) as terms:
        scores = (net if call is None else call)(tokens)
    return scores.float().square().mean() + 1e-3 * sum(term.l1 for term in terms)


def near(sparse, dense, allowed=0.03):
    for (name, a), (_, b) in zip(sparse.named_parameters(), dense.named_parameters()):
        assert (a.grad - b.grad).float().norm() <= allowed * b.grad.float().norm() + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("path", ["dense", "twell"])
def test_a_model_under_autocast_compiled_and_accumulated(dtype, compiled, path, ran):
    net, tokens = small(dtype)
    twin = sparsify(copy.deepcopy(net), "twell")
    for found in feed_forwards(twin):
        found.module.learn(path)
    call = torch.compile(twin) if compiled else None
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            loss_of(net, tokens).backward()
            loss_of(twin, tokens, call).backward()
    near(twin, net)
    assert all_ran(ran) == (path == "twell")


def test_gradient_checkpointing(ran):
    net, tokens = small(torch.bfloat16)
    loss_of(net, tokens).backward()
    twin = sparsify(copy.deepcopy(net), "twell")
    twin.zero_grad()
    again = copy.deepcopy(twin)
    for found in feed_forwards(again):
        layer = found.module
        layer.forward = lambda x, run=layer.forward: checkpoint(run, x, use_reentrant=False)
    loss_of(twin, tokens).backward()
    loss_of(again, tokens).backward()
    for a, b in zip(again.parameters(), twin.parameters()):
        assert torch.equal(a.grad, b.grad)
    near(again, net)
    assert all_ran(ran)


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_steps_are_followed(fused, ran):
    net, tokens = small(torch.bfloat16)
    twin = sparsify(copy.deepcopy(net), "twell")
    for each in (net, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3, fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(each, tokens).backward()
            optimizer.step()
    with torch.no_grad():
        a, b = twin(tokens).float(), net(tokens).float()
        assert (a - b).norm() <= 0.05 * b.norm()
        fresh = sparsify(copy.deepcopy(twin), "twell")
        assert torch.equal(fresh(tokens), twin(tokens))  # no stale copy of a weight
    assert all_ran(ran)


def test_side_stream_and_deterministic_algorithms():
    made = tensors(300, 256, 1000)
    dy, dl1 = upstream(made)
    expected = step(differentiable.train_ffn, made, dy, dl1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.use_deterministic_algorithms(True)
    try:
        with torch.cuda.stream(stream):
            found = step(differentiable.train_ffn, made, dy, dl1)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.cuda.current_stream().wait_stream(stream)
    for a, b in zip(found, expected):
        assert a is None or torch.equal(a, b)


def test_a_step_inside_a_cuda_graph():
    made = tensors(300, 256, 1000)
    dy, dl1 = upstream(made)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in made]

    def run():
        y, l1, _ = differentiable.train_ffn(*leaves)
        return torch.autograd.grad([y, l1], [t for t in leaves if t is not None], [dy, dl1])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        leaves[0].copy_(tensors(300, 256, 1000, seed=9)[0])
    graph.replay()
    for a, b in zip(found, run()):
        assert torch.equal(a, b)


def test_nothing_waits_for_the_gpu():
    made = tensors(300, 256, 1000)
    dy, dl1 = upstream(made)
    step(differentiable.train_ffn, made, dy, dl1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(differentiable.train_ffn, made, dy, dl1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_thread_that_has_asked_the_gpu_for_nothing_yet():
    """Its context is not current: autograd's threads are such, and a user's. Memory comes from torch's cache."""
    made = tensors(64, 256, 1000)
    with torch.no_grad():
        expected = differentiable.train_ffn(*made)[0], ops.infer(*made), ops.infer(made[0][:1], *made[1:])
        found = []
        thread = threading.Thread(
            target=lambda: found.extend(
                (differentiable.train_ffn(*made)[0], ops.infer(*made), ops.infer(made[0][:1], *made[1:]))
            )
        )
        with torch.inference_mode(False):
            thread.start()
            thread.join()
    assert len(found) == 3 and all(torch.equal(a, b) for a, b in zip(found, expected))

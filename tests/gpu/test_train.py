"""Training a layer on a GPU: the sparse kernels run, and y, L1 and every gradient are right, whatever the pattern."""

import copy
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.ops import dense
from tests.ops.dense import exact_gradients, gradients
from twell_lab.cuda.launch import lie
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.layers.terms import layer_terms
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import train_lost
from twell_lab.ops.train import PATHS, counts, takes, train, train_ffn
from twell_lab.ops.train_rows import reference

from .drawn import on_another_stream, tensors, unwaiting

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("y", "l1", "x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def upstream(made, seed=3):
    g = torch.Generator("cuda").manual_seed(seed)
    x = made[0]
    return torch.randn(x.shape, generator=g, device="cuda").to(x.dtype), torch.rand(len(x), generator=g, device="cuda")


def assert_right(made, path="twell", again=False):
    """The norm of each error is at most twice that of torch's dense layer, plus half an ulp of what is there: of a
    handful of values torch's may be exact by luck. again: a second step gives the same bits."""
    dy, dl1 = upstream(made)
    found, reached = gradients(train_ffn, made, dy, dl1, path=path), gradients(dense.step, made, dy, dl1)
    right = exact_gradients(made, dy, dl1, rounded=dense.first(*made))
    ulp = torch.finfo(made[0].dtype).eps / 2
    for name, a, b, e in zip(NAMES, found, reached, right):
        assert (a is None) == (b is None)
        if a is not None:
            off, allowed = (a.double() - e).norm(), 2 * (b.double() - e).norm() + ulp * e.norm()
            assert off <= allowed, f"{name}: {float(off):.4g} of {float(e.norm()):.4g}, {float(allowed):.4g} allowed"
    if again:
        for a, b in zip(found, gradients(train_ffn, made, dy, dl1, path=path)):
            assert a is None or torch.equal(a, b)


def is_sparse(made) -> bool:
    return counts(train(*made, path="twell")[2], len(made[0]))[1] is not None


def lost_of(made):
    """The list of lost rows: how many, then which; from the end, those that are heavy."""
    facts, tokens = torch.ops.twell_lab.train(*made, "twell")[2], len(made[0])
    first = lie(4 * tokens)[1] // 4
    return facts[first : first + tokens + 2].tolist()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(PATHS),
    tokens=st.integers(0, 600),
    d_model=st.sampled_from([8, 64, 256, 100]),
    d_ff=st.integers(1, 300).map(lambda n: 8 * n) | st.just(1001),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    gated=st.booleans(),
    biased=st.booleans(),
    rate=st.sampled_from([-9.0, 0.0, 1.0, 2.3, 9.0]),
    odd=st.sampled_from(["", "turned", "shifted", "strided"]),
)
def test_every_gradient(path, tokens, d_model, d_ff, dtype, gated, biased, rate, odd):
    made = tensors(tokens, d_model, d_ff, gated, dtype, biased, rate)
    if odd == "turned":
        made[3] = made[3].t().contiguous().t()
    elif odd:  # not on a boundary of 16 bytes, or with gaps between the rows
        for i in (0, 2, 3):
            t, apart = made[i], int(odd == "strided")
            made[i] = (
                t.new_zeros(t.shape[0] + 1, t.shape[1] + apart)
                .view(-1)[1:]
                .as_strided(t.shape, (t.shape[1] + apart, 1))
            )
            made[i].copy_(t)
    assert_right(made, path)
    runs = takes(made[0].device, dtype, tokens, d_model, d_ff)
    assert is_sparse(made) == runs == (tokens > 0 and not (dtype == FP32 or d_model % 8 or d_ff % 8))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, d_model, d_ff", [(1, 64, 256), (7, 8, 8), (2048, 768, 3072), (513, 4096, 4352), (16384, 2048, 5632)]
)
def test_every_class_of_shapes(tokens, d_model, d_ff, gated):
    made = tensors(tokens, d_model, d_ff, gated, biased=True, rate=1.0 if d_ff < 300 else 2.57)
    assert_right(made, again=True)
    assert is_sparse(made)


@pytest.mark.parametrize("share, many", [(0.2, 40), (0.2, 200), (1.0, 256)])
@pytest.mark.parametrize("gated", [True, False])
def test_overflowing_rows_lose_nothing(share, many, gated):
    made = tensors(640, 512, 1024, gated, biased=True)
    x, first = made[0], made[1] if gated else made[2]
    x[:, 1] = 0
    x[:: round(1 / share), 1] = 8.0
    first[256 : 256 + many, 1] = 4.0
    assert_right(made)
    assert lost_of(made)[0] > 0 or many == 40  # 9 values past the words of a tile still have room in the pool


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("many", [1, train_lost.FEW_HEAVY, 97])
def test_few_heavy_rows_are_shared_and_many_lost(many, gated):
    made = tensors(16 * 97, 512, 5632, gated, biased=True)
    made[0][: 16 * many : 16, 0] = 0.35  # a fifth of the neurons fires, which fits into the pool
    assert_right(made, again=True)
    lost, heavy = lost_of(made), [many, *range(0, 16 * many, 16)]
    if many <= train_lost.FEW_HEAVY:
        assert lost[0] == 0 and lost[: -2 - many : -1] == heavy
    else:
        assert lost[-1] == 0 and lost[: 1 + many] == heavy


def test_a_row_that_is_not_finite_spoils_its_own_output_alone():
    made = tensors(64, 256, 1000, biased=True)
    made[0][5, 3], made[0][9, 0] = torch.inf, torch.nan
    dy, dl1 = upstream(made)
    found = gradients(train_ffn, made, dy, dl1)
    x, gate, up, down, *biases = (t.double() for t in made)
    right = reference(x, gate, up, down.t(), *biases, dy.double(), dl1.double(), BF16)
    bad = torch.zeros(64, dtype=torch.bool, device="cuda").index_fill(0, torch.tensor([5, 9], device="cuda"), True)
    for got, wanted in ((found[0], right[0]), (found[1], right[1]), (found[2], right[3])):
        assert torch.equal(got.isnan().reshape(64, -1).any(1), bad)
        torch.testing.assert_close(got[~bad].double(), wanted[~bad], rtol=0.05, atol=0.05)
    for got, wanted in zip(found[3:6], (right[4], right[5], right[6].t())):
        assert (got.double() - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("gated", [True, False])
def test_the_operator_keeps_torch_s_rules(gated):
    """But not what compares outputs: of the lists only what is in use is written."""
    made = [None if t is None else t.requires_grad_() for t in tensors(300, 256, 1000, gated)]
    for turned in (False, True):
        made[3] = made[3].detach().t().contiguous().t().requires_grad_() if turned else made[3]
        asked = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(torch.ops.twell_lab.train.default, (*made, "twell"), test_utils=asked)
    compiled = torch.compile(train_ffn, fullgraph=True)
    dy, dl1 = upstream(made)
    for a, b in zip(gradients(compiled, made, dy, dl1), gradients(train_ffn, made, dy, dl1)):
        assert a is None or torch.equal(a, b)


def test_nothing_as_wide_as_the_layer_is_kept_and_what_is_may_move():
    made = tensors(2048, 768, 3072)
    made[3] = made[3].t().contiguous().t()
    dy, dl1 = upstream(made)
    expected, kept = gradients(train_ffn, made, dy, dl1), []

    def away(t):  # as offloading does, which forgets strides
        kept.append((t.shape, t.nbytes))
        return t.cpu().contiguous()

    with torch.autograd.graph.saved_tensors_hooks(away, lambda t: t.cuda()):
        found = gradients(train_ffn, made, dy, dl1)
    assert all(a is None or torch.equal(a, b) for a, b in zip(found, expected))
    shapes = {made[0].shape, *(t.shape for t in made[1:4])}
    assert sum(size for shape, size in kept if shape not in shapes) < 2048 * 3072  # half of a hidden tensor


@pytest.mark.parametrize("path", PATHS)
def test_second_derivatives_and_checkpoints(path):
    made = [None if t is None else t.requires_grad_() for t in tensors(40, 64, 256, dtype=FP32, rate=0.5)]
    asked = [t for t in made if t is not None]

    def second(function):
        first = torch.autograd.grad(sum(t.square().sum() for t in function(*made)[:2]), asked, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), asked)

    for a, b in zip(second(lambda *t: train_ffn(*t, path=path)), second(dense.step)):
        assert (a - b).norm() <= 1e-3 * b.norm()
    made = tensors(300, 256, 1000)
    dy, dl1 = upstream(made)
    again = lambda *t: checkpoint(lambda *u: train_ffn(*u, path=path), *t, use_reentrant=False)  # noqa: E731
    for a, b in zip(gradients(again, made, dy, dl1), gradients(train_ffn, made, dy, dl1, path=path)):
        assert a is None or torch.equal(a, b)


def nets(dtype):
    torch.manual_seed(0)
    net = LanguageModel(ModelConfig(vocabulary=64, d_model=256, layers=2, heads=4, d_ff=1024, context=64))
    net = net.to("cuda", dtype)
    twin = copy.deepcopy(net)
    for layer in twin.layers:
        layer.mlp = SparseFFN.from_module(layer.mlp)
    return net, twin, torch.randint(0, 64, (4, 64), device="cuda")


def loss_of(net, tokens, call=None):
    with layer_terms(net) as terms:
        scores = (net if call is None else call)(tokens)
    return scores.float().square().mean() + 1e-3 * sum(term.l1 for term in terms)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_model_under_autocast_compiled_and_accumulated(dtype, compiled, path):
    net, twin, tokens = nets(dtype)
    for layer in twin.layers:
        layer.mlp.learn(path)
    call = torch.compile(twin) if compiled else None
    with torch.autocast("cuda", BF16, cache_enabled=False):
        for _ in range(2):
            loss_of(net, tokens).backward()
            loss_of(twin, tokens, call).backward()
    for (name, a), (_, b) in zip(twin.named_parameters(), net.named_parameters()):
        assert (a.grad - b.grad).float().norm() <= 0.03 * b.grad.float().norm() + 1e-6, name


@pytest.mark.parametrize("shape", [(256,), (1, 1, 256), (2, 512, 256)])  # the last: as many tokens as neurons
def test_a_prepared_step_follows_what_changes(shape):
    net, twin, _ = nets(BF16)
    x, layers = torch.randn(shape, device="cuda", dtype=BF16), (twin.layers[0].mlp, net.layers[0].mlp)
    for change in ("nothing", "nothing", "frozen", "replaced"):
        results = []
        for layer in layers:
            layer.zero_grad()
            if change == "frozen":
                layer.up_proj.weight.requires_grad_(False)
            elif change == "replaced":
                layer.up_proj.weight = torch.nn.Parameter(2 * layer.up_proj.weight.detach())
            given = x.clone().requires_grad_()
            y = layer(given)
            y.float().square().sum().backward()
            results.append([y.detach(), given.grad, *(weight.grad for weight in layer.parameters())])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            assert a is None or a.shape == b.shape and (a - b).float().norm() <= 0.03 * b.float().norm() + 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_steps_are_followed(fused):
    net, twin, tokens = nets(BF16)
    for model in (net, twin):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            optimizer.step()
    with torch.no_grad():
        a, b = twin(tokens).float(), net(tokens).float()
    assert (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_term_says_how_many_tokens_were_lost(compiled):
    x, gate, up, down, *_ = made = tensors(640, 512, 1024)
    x[:, 1] = 0
    x[::5, 1] = 8.0
    gate[256:456, 1] = 4.0
    _, twin, _ = nets(BF16)
    layer = twin.layers[0].mlp
    for part, weight in ((layer.gate, gate), (layer.up, up), (layer.down, down)):
        part.weight = torch.nn.Parameter(weight)
    call, shares = torch.compile(layer) if compiled else layer, {}
    for path in PATHS:
        layer.learn(path)
        with layer_terms(layer) as terms:
            call(x)
        shares[path] = terms[0].lost
    lost = lost_of(made)[0]
    assert 0 < lost <= 128 and float(shares["twell"]) == pytest.approx(lost / 640) and shares["dense"] is None


def test_side_streams_graphs_and_threads_compute_the_same_and_nothing_waits():
    made = tensors(300, 256, 1000)
    dy, dl1 = upstream(made)
    call = lambda: gradients(train_ffn, made, dy, dl1)  # noqa: E731
    expected = call()
    results = [unwaiting(call), on_another_stream(call)]
    thread = threading.Thread(target=lambda: results.append(call()))  # its context is not current
    thread.start()
    thread.join()
    x = made[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(train_ffn, [x, *made[1:]], dy, dl1)
    x.copy_(made[0].flip(0))
    graph.replay()
    x.copy_(made[0])
    graph.replay()
    results.append(captured)
    for found in results:
        assert all(a is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))

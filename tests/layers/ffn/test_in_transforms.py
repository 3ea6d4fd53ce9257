"""A layer inside what else torch does with a module: torch.func, forward-mode gradients, export, gradients of
gradients, threads."""

import copy
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, linearize, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from twell_lab import ops
from twell_lab.core import InputError
from twell_lab.layers.choice import Candidate, Choice, LayerPlan
from twell_lab.layers.paths import Path
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.layers.terms import layer_terms
from twell_lab.models.swap import sparsify
from twell_lab.ops import copies
from twell_lab.ops.differentiable import train_ffn
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

D_MODEL, D_FF = 16, 300
CHOICES = {"twell": None, "hot and cold": Choice("hot_cold", 256), "dense": Choice("dense")}


@pytest.fixture(params=[GatedFeedForward, PlainFeedForward], ids=["gated", "plain"])
def dense(request):
    torch.manual_seed(0)
    return request.param(D_MODEL, D_FF)


@pytest.fixture(params=CHOICES)
def sparse(request, dense):
    return SparseFFN.from_module(copy.deepcopy(dense), plan=CHOICES[request.param])


@pytest.fixture
def x():
    return torch.randn(6, D_MODEL, generator=torch.Generator().manual_seed(1))


def loss(module, weights, x):
    return functional_call(module, weights, (x,)).square().sum()


def dual(module, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def ensemble(module, x):
    members = [copy.deepcopy(module) for _ in range(3)]
    return vmap(lambda weights, buffers: functional_call(module, (weights, buffers), (x,)))(
        *stack_module_state(members)
    )


def per_sample_gradients(module, x):
    return vmap(grad(lambda weights, row: loss(module, weights, row)), (None, 0))(dict(module.named_parameters()), x)


WAYS = {
    "vmap": lambda m, x: vmap(m)(x),
    "compiled vmap": lambda m, x: torch.compile(vmap(m), backend="eager", fullgraph=True)(x),
    "grad": lambda m, x: grad(lambda weights: loss(m, weights, x))(dict(m.named_parameters())),
    "per-sample gradients": per_sample_gradients,
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),)),
    "linearize": lambda m, x: linearize(m, x)[1](x),
    "hessian": lambda m, x: hessian(lambda row: m(row).sum())(x[0]),
    "dual numbers": dual,
    "ensemble": ensemble,
    "export": lambda m, x: torch.export.export(m, (x,)).module()(x.roll(1, 0)),
    "export, strict": lambda m, x: torch.export.export(m, (x,), strict=True).module()(x.roll(1, 0)),
    "export, any number of tokens": lambda m, x: torch.export.export(
        m, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},)
    ).module()(x[:4]),
    "trace": lambda m, x: torch.jit.trace(m, (x,))(x[:2]),
    "make_fx": lambda m, x: make_fx(m)(x)(x.roll(1, 0)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wanted", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("way", WAYS)
def test_a_transform_gives_what_it_gives_of_the_dense_layer(way, wanted, sparse, dense, x):
    torch._dynamo.reset()
    with torch.set_grad_enabled(wanted):
        found, expected = WAYS[way](sparse, x), WAYS[way](dense, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", ["gated", "plain", "train"])
def test_the_functions_themselves(function, x):
    gate, up, down = torch.randn(40, D_MODEL), torch.randn(40, D_MODEL), torch.randn(D_MODEL, 40)
    call = {
        "gated": lambda x: ops.gated_ffn(x, gate, up, down),
        "plain": lambda x: ops.plain_ffn(x, up, down),
        "train": lambda x: train_ffn(x, gate, up, down)[0],
    }[function]
    expected = {"plain": lambda x: (x @ up.t()).relu() @ down.t()}.get(
        function, lambda x: ((x @ gate.t()).relu() * (x @ up.t())) @ down.t()
    )
    torch.testing.assert_close(vmap(call)(x), expected(x), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(jvp(call, (x,), (x,)), jvp(expected, (x,), (x,)), rtol=1e-4, atol=1e-3)


def test_what_no_transform_can_follow_says_so(x):
    gate, down = torch.randn(6, 40), torch.randn(D_MODEL, 40)
    packed = ops.pack(gate)
    for call in (
        lambda row: ops.pack(row[None]).packed,
        lambda row: ops.packed_down(packed, down) + row,
        lambda row: ops.packed_gated(x, packed, torch.randn(40, D_MODEL), down) + row,
        lambda row: ops.infer(row, None, torch.randn(40, D_MODEL), down),
    ):
        with pytest.raises(InputError, match="inside a transform"):
            vmap(call, randomness="different")(x)


# ---- gradients of gradients ----


def penalty(module, x, terms):
    """The gradients of a penalty on the input's gradient, as in WGAN-GP."""
    x = x.clone().requires_grad_()
    if terms:
        with layer_terms(nn.ModuleList([module])) as told:
            y = module(x)
        value = y.square().sum() + sum(term.l1 for term in told)
    else:
        value = module(x).square().sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), [x, *module.parameters()])


@pytest.mark.parametrize("terms", [[False], [True, False]], ids=["alone", "with and after layer_terms"])
def test_second_derivatives(terms, sparse, dense, x):
    for each in terms:
        torch.testing.assert_close(penalty(sparse, x, each), penalty(dense, x, each), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("terms", [False, True], ids=["alone", "after layer_terms"])
def test_second_derivatives_where_weights_are_used_twice(terms, sparse, dense, x):
    for module in (sparse, dense):
        model = nn.ModuleList([module])
        if terms:
            with layer_terms(model):
                module(x)
    found, expected = (penalty(nn.Sequential(module, module), x, False) for module in (sparse, dense))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * max(e.abs().max().item() for e in expected))


def test_gradients_with_a_graph_where_inputs_depend_on_each_other(x):
    weight = torch.randn(40, D_MODEL, requires_grad=True)
    for call, plain in (
        (lambda w: train_ffn(x, None, w, w.t())[0], lambda w: (x @ w.t()).relu() @ w),
        (lambda w: train_ffn(x, w, w, w.t())[0], lambda w: ((x @ w.t()).relu() * (x @ w.t())) @ w),
    ):
        for graph in (False, True):
            found, expected = (
                torch.autograd.grad(f(weight).square().sum(), weight, create_graph=graph)[0] for f in (call, plain)
            )
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_many_upstream_gradients_at_once(sparse, dense, x):
    with layer_terms(nn.ModuleList([sparse])):
        sparse(x)
    found, expected = (torch.autograd.functional.jacobian(m, x[0], vectorize=True) for m in (sparse, dense))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- another default device ----


@pytest.mark.parametrize("choice", CHOICES)
def test_made_and_called_under_another_default_device(choice, dense, x):
    dense.requires_grad_(False)
    with torch.device("meta"):
        sparse = SparseFFN.from_module(copy.deepcopy(dense), plan=CHOICES[choice])
        found = [sparse(x), sparse(x[:1]), sparse.requires_grad_(True)(x)]
    for y, rows in zip(found, (x, x[:1], x)):
        assert y.device.type == "cpu"
        torch.testing.assert_close(y, dense(rows), rtol=1e-4, atol=1e-4, check_stride=False)
    sparse = sparse.requires_grad_(False).bfloat16()
    with torch.device("meta"):
        y = sparse(x.bfloat16())
    torch.testing.assert_close(y.float(), dense(x), rtol=0.05, atol=0.05)


# ---- threads ----


def test_threads_while_a_layer_makes_up_its_mind():
    """Of many threads one decides; the layer changes its path while the others are in a forward."""
    for turn in range(15):
        torch.manual_seed(turn)
        dense = GatedFeedForward(64, 512).requires_grad_(False)
        dense.gate_proj.bias = nn.Parameter(
            torch.full((512,), -3.0 * (turn % 3)), requires_grad=False
        )  # dense, and sparse
        (layer,) = sparsify(nn.ModuleList([copy.deepcopy(dense)]), "auto")
        x = torch.randn(40, 64)
        expected, errors, barrier = dense(x), [], threading.Barrier(8)

        def work():
            barrier.wait()
            try:
                while layer.status()["plan"] == "watching" and not errors:
                    torch.testing.assert_close(layer(x), expected, rtol=1e-3, atol=1e-3)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and layer.status()["plan"] == "planned"


def test_a_plan_that_comes_during_a_forward(monkeypatch):
    dense = GatedFeedForward(D_MODEL, D_FF).requires_grad_(False)
    layer, x, made = SparseFFN.from_module(dense, plan=Choice("twell")), torch.randn(5, D_MODEL), copies.refresh

    def meanwhile(*arguments, **named):
        made(*arguments, **named)
        layer.follow(Choice("dense"))  # as another thread would

    monkeypatch.setattr(copies, "refresh", meanwhile)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-4)
    assert layer.plan == Choice("dense")


PLANS = [None, Choice("hot_cold", 256), Choice("twell")]


@pytest.mark.parametrize("before", PLANS[:2], ids=str)
@pytest.mark.parametrize("after", [Choice("dense"), *PLANS], ids=str)
def test_a_plan_that_comes_before_a_forward_looks_for_its_copies(before, after, monkeypatch):
    """Such a forward makes copies of its own, which are gone with it."""
    dense = GatedFeedForward(D_MODEL, D_FF).requires_grad_(False)
    layer, x, held = SparseFFN.from_module(dense, plan=before), torch.randn(5, D_MODEL), Path._held

    def meanwhile(*arguments):
        monkeypatch.setattr(Path, "_held", held)
        layer.follow(after)  # as another thread would
        return held(*arguments)

    monkeypatch.setattr(Path, "_held", meanwhile)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-4)
    assert layer.plan == after and Path._held is held
    expected = SparseFFN.from_module(dense, plan=after)
    assert {*dict(layer.named_buffers())} == {*dict(expected.named_buffers())}
    assert layer.extra_bytes == expected.extra_bytes


def test_threads_while_a_layer_follows_one_plan_after_another():
    """No forward fills copies by one order of the neurons while another one reads them by the next."""
    dense = GatedFeedForward(64, 2000).requires_grad_(False)
    plans = []
    for seed in range(3):
        counts = torch.randperm(2000, generator=torch.Generator().manual_seed(seed)).tolist()
        only = Candidate(1, "hot_cold", 256, 1.0, None, True, "a test's")
        plans.append(LayerPlan("", 64, 2000, True, 5000, tuple(counts), (only,)))
    layer, x = SparseFFN.from_module(dense, plan=plans[0]), torch.randn(7, 64)
    expected, errors, done = dense(x), [], threading.Event()

    def work():
        try:
            while not done.is_set():
                torch.testing.assert_close(layer(x), expected, rtol=1e-3, atol=1e-3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for turn in range(60):
            layer.follow((*plans, None, Choice("dense"))[turn % 5])
            time.sleep(0.005)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert not errors and layer.extra_bytes == 0 and not [*layer.named_buffers()]

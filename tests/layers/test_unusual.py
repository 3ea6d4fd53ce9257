"""Principle 2: whatever is unusual calls the projections as modules, and so equals the dense module."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacfwd, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

import twell_lab as tl
from tests.layers import drawn

PLANS = {"twell": tl.Choice("twell"), "hot_cold": tl.Choice("hot_cold", 256), "dense": tl.Choice("dense")}


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class LoRA(nn.Module):
    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.of, self.a = of, nn.Linear(of.in_features, 2, bias=False)
        self.b = nn.Linear(2, of.out_features, bias=False)
        nn.init.constant_(self.a.weight, 0.1)
        nn.init.constant_(self.b.weight, 0.2)

    def forward(self, x):
        return self.of(x) + self.b(self.a(x))


def given_a_forward(layer):
    own = layer.down_proj
    own.forward = lambda x: nn.functional.linear(x, own.weight) - 1


CHANGES = {
    "LoRA": lambda layer: setattr(layer, "up_proj", LoRA(layer.up_proj)),
    "parametrized": lambda layer: parametrize.register_parametrization(layer.down_proj, "weight", Halved()),
    "hooked": lambda layer: layer.up_proj.register_forward_hook(lambda module, args, y: y + 1),
    "hooked before": lambda layer: layer.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "replaced": lambda layer: setattr(layer, "gate_proj", nn.Linear(16, 300)),
    "given a forward": given_a_forward,
}
X = drawn.rows(4)


def by_dual(layer):
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(X, torch.ones_like(X)))
        return torch.cat(torch.autograd.forward_ad.unpack_dual(y))


def in_half(layer):
    with torch.inference_mode():
        return copy.deepcopy(layer).bfloat16()(X.bfloat16()).float()


def doubled(learns: bool, **how):
    def call(layer):
        layer = copy.deepcopy(layer).double()
        with torch.set_grad_enabled(learns):
            return torch.compile(layer, backend="eager", **how)(X.double())

    return call


def faked(layer):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = tuple(layer(mode.from_tensor(X)).shape)
    return torch.zeros(shape)


CALLS = {
    "vmap": lambda layer: vmap(layer)(X),
    "vmap of one row": lambda layer: vmap(lambda row: layer(row))(X),
    "jvp": lambda layer: torch.cat(jvp(layer, (X,), (torch.ones_like(X),))),
    "jacfwd": lambda layer: jacfwd(lambda x: layer(x).sum(0))(X),
    "grad": lambda layer: torch.func.grad(lambda x: layer(x).square().sum())(X),
    "hessian": lambda layer: hessian(lambda x: layer(x).square().sum())(X[:1]),
    "functional_call": lambda layer: functional_call(
        layer, {name: p * 2 for name, p in layer.named_parameters()}, (X,)
    ),
    "jit.trace": lambda layer: torch.jit.trace(layer, X, check_trace=False)(X),
    "make_fx": lambda layer: make_fx(layer)(X)(X),
    "export": lambda layer: torch.export.export(layer, (X,)).module()(X),
    "forward AD": by_dual,
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda layer: layer(X).float()),
    "inference tensors": torch.inference_mode()(lambda layer: copy.deepcopy(layer)(X.clone())),
    "half in inference mode": in_half,
    "double": doubled(False, disable=True),
    "double, learning": doubled(True, disable=True),
    "double, compiled": doubled(False, fullgraph=True),
    "double, compiled, learning": doubled(True, fullgraph=True),
    "fake tensors": faked,
    "meta": lambda layer: torch.zeros(tuple(copy.deepcopy(layer).to("meta")(X.to("meta")).shape)),
    "three dimensions": lambda layer: layer(X.view(2, 2, -1)),
    "one dimension": lambda layer: layer(X[0]),
    "deepcopy": lambda layer: copy.deepcopy(layer)(X),
}


@pytest.mark.parametrize("path", PLANS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_an_unusual_call_equals_dense(call, path):
    dense = drawn.layer()
    sparse = tl.SparseFFN.from_module(copy.deepcopy(dense), plan=PLANS[path])
    low = call in ("autocast", "half in inference mode")
    wanted = CALLS[call](dense)
    torch.testing.assert_close(CALLS[call](sparse), wanted, rtol=0.05 if low else 1e-4, atol=0.05 if low else 1e-5)


@pytest.mark.parametrize("path", PLANS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("learns", (False, True))
def test_a_projection_that_was_changed_after_the_swap_is_called(change, path, learns):
    dense = drawn.layer()
    sparse = tl.SparseFFN.from_module(copy.deepcopy(dense), plan=PLANS[path])
    results = []
    for layer in (dense, sparse):
        torch.manual_seed(0)  # some draw new weights
        CHANGES[change](layer)
        x = X.clone().requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            y = layer(x)
        if learns:
            y.square().sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    if path != "dense":
        assert sparse.runs().startswith("dense: ")

"""What a layer computes is asked beside its formula: what differs is said, what is the same in another way passes, and
being asked changes nothing."""

import functools
import random
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from twell_lab.core import InputError
from twell_lab.layers.probe import check_all, difference
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

D_MODEL, D_FF = 16, 64


class Gated(GatedFeedForward):
    """A gated layer whose parts are put together by `rule(layer, x)`."""

    def __init__(self, rule, **parts):
        super().__init__(D_MODEL, D_FF)
        self.rule = rule
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.rule(self, x)


def hidden(layer, x):
    return layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x)


def top(x, most=5):
    """The largest few of each row, as Gemma3n keeps them."""
    return F.relu(x - x.topk(most, dim=-1).values[..., -1:])


OTHERS = {
    "its output scaled": lambda layer, x: 3 * layer.down_proj(hidden(layer, x)),
    "a little": lambda layer, x: 1.0001 * layer.down_proj(hidden(layer, x)),
    "its gate scaled": lambda layer, x: layer.down_proj(layer.act_fn(0.9 * layer.gate_proj(x)) * layer.up_proj(x)),
    "a norm between": lambda layer, x: layer.down_proj(F.rms_norm(hidden(layer, x), (D_FF,))),
    "top entries alone": lambda layer, x: layer.down_proj(top(layer.gate_proj(x)) * layer.up_proj(x)),
    "a residual inside": lambda layer, x: x + layer.down_proj(hidden(layer, x)),
    "a clamp at large values": lambda layer, x: layer.down_proj(
        layer.act_fn(layer.gate_proj(x)).clamp(max=50) * layer.up_proj(x)
    ),
    "a threshold at small values": lambda layer, x: layer.down_proj(
        F.threshold(layer.gate_proj(x), 1e-3, 0.0) * layer.up_proj(x)
    ),
    "dropout between": lambda layer, x: layer.down_proj(F.dropout(hidden(layer, x), 0.1, layer.training)),
    "another way in evaluation": lambda layer, x: layer.down_proj(hidden(layer, x)) * (1 if layer.training else 2),
    "another way in training": lambda layer, x: layer.down_proj(hidden(layer, x)) * (2 if layer.training else 1),
    "the token before": lambda layer, x: layer.down_proj(hidden(layer, (x + x.roll(1, -2)) / 2)),
    "another type": lambda layer, x: layer.down_proj(hidden(layer, x)).double(),
    "a tuple": lambda layer, x: (layer.down_proj(hidden(layer, x)), None),
    "an error": lambda layer, x: layer.down_proj(hidden(layer, x) @ x),
    "in place": lambda layer, x: layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x.mul_(2))),
}


SAME = {
    "products the other way round": lambda layer, x: layer.down_proj(
        layer.up_proj(x) * layer.act_fn(layer.gate_proj(x))
    ),
    "in float32": lambda layer, x: layer.down_proj(
        (layer.act_fn(layer.gate_proj(x).float()) * layer.up_proj(x).float()).to(x.dtype)
    ),
    "rows one by one": lambda layer, x: torch.stack([layer.down_proj(hidden(layer, row)) for row in x]),
    "dropout of nothing": lambda layer, x: layer.down_proj(F.dropout(hidden(layer, x), 0.0, layer.training)),
    "tokens without a batch": lambda layer, x: layer.down_proj(hidden(layer, x)) if x.dim() == 2 else x[99],
    "a batch of tokens": lambda layer, x: layer.down_proj(hidden(layer, x)) if x.dim() == 3 else x[99],
}


def twice_where(single):
    return lambda layer, x: layer.down_proj(hidden(layer, x)) * (2 if single(x) else 1)


ALONE = {
    "a batch of one": twice_where(lambda x: x.shape[0] == 1),
    "one row": twice_where(lambda x: x.shape[:-1].numel() == 1),
    "one row without a batch": twice_where(lambda x: x.shape == (1, D_MODEL)),
}


def stored(on, name, value):
    """A rule that sets something on a part of the layer."""

    def rule(layer, x):
        setattr(layer.get_submodule(on), name, value(x))
        return layer.down_proj(hidden(layer, x))

    return rule


LEAVES = {
    "sets last_hidden": stored("", "last_hidden", lambda x: x),
    "sets rows": stored("", "rows", len),
    "sets up_proj.given": stored("up_proj", "given", lambda x: x),
    "sets act_fn.seen": stored("act_fn", "seen", lambda x: None),
    "sets weights": stored("", "weights", lambda x: nn.Parameter(x.detach())),
    "sets part": stored("", "part", lambda x: nn.Identity()),
}


class Tenfold(torch.autograd.Function):
    """Returns its input, with ten times the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 10 * g


GRADIENTS = {
    "a gate without a gradient": lambda layer, x: layer.down_proj(
        layer.act_fn(layer.gate_proj(x)).detach() * layer.up_proj(x)
    ),
    "another gradient of x": lambda layer, x: layer.down_proj(hidden(layer, Tenfold.apply(x))),
    "another output with gradients": lambda layer, x: (
        layer.down_proj(hidden(layer, x)) * (3 if torch.is_grad_enabled() else 1)
    ),
    "in evaluation mode alone": lambda layer, x: layer.down_proj(hidden(layer, x if layer.training else x.detach())),
    "no gradient at all": torch.no_grad()(lambda layer, x: layer.down_proj(hidden(layer, x))),
    "a bias without a gradient": lambda layer, x: F.linear(
        hidden(layer, x), layer.down_proj.weight, layer.down_proj.bias.detach()
    ),
}


def biased(rule):
    torch.manual_seed(0)
    layer = Gated(rule)
    layer.down_proj.bias = nn.Parameter(torch.randn(D_MODEL))
    return layer


FORMULA = r"does not compute down\(act\(gate\(x\)\) \* up\(x\)\): in \w+ mode .* off|returns|OutOf|Error|writes"
SAID = {name: (rule, FORMULA) for name, rule in OTHERS.items()} | {name: (rule, name) for name, rule in LEAVES.items()}
SAID |= {name: (rule, "for one row alone is 100% off") for name, rule in ALONE.items()}
SAID |= {
    name: (rule, "(the gradient of|its output with gradients|its output) .*off") for name, rule in GRADIENTS.items()
}


@pytest.mark.parametrize("rule, said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_computes_something_else_is_said(rule, said, dtype):
    if rule is OTHERS["a little"]:
        dtype = torch.float32  # it rounds to the same bits in 16
    layer = biased(rule).to(dtype)
    before = [(p, p._version, p.requires_grad) for p in layer.parameters()]
    reason = difference(layer)
    assert reason is not None
    assert re.search(said, reason), reason
    assert [(p, p._version, p.requires_grad) for p in layer.parameters()] == before
    assert all(p.grad is None for p in layer.parameters())
    with pytest.raises(InputError, match=r"odd \(Gated\) .*"):
        check_all([("same", GatedFeedForward(D_MODEL, D_FF)), ("odd", layer)])


@pytest.mark.parametrize("rule", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_computes_the_same_in_another_way_passes(rule, dtype):
    assert difference(biased(SAME[rule]).to(dtype)) is None


def raises_for_one_row(layer, x):
    if x.shape[:-1].numel() == 1:
        raise ValueError("a batch of one")
    return layer.down_proj(hidden(layer, x))


def cannot_be_trained(layer, x):
    """relu needs its output for its gradient, and the output is written over."""
    return layer.down_proj(layer.act_fn(layer.gate_proj(x)).mul_(layer.up_proj(x)))


class Remembers(Gated):
    @functools.cached_property
    def width(self):
        return self.up_proj.in_features


@pytest.mark.parametrize(
    "layer",
    [
        biased(raises_for_one_row),
        biased(cannot_be_trained),
        Remembers(lambda layer, x: layer.down_proj(hidden(layer, x.reshape(*x.shape[:-1], layer.width)))),
        PlainFeedForward(D_MODEL, D_FF, "relu2"),
    ],
    ids=["raises for one row", "cannot be trained", "remembers", "squared"],
)
def test_what_is_no_difference(layer):
    assert difference(layer) is None


def replaced(layer, part):
    given = part.forward
    part.forward = lambda x: 3 * given(x)
    return layer


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
@pytest.mark.parametrize("place", ["", "up_proj", "down_proj"])
def test_a_changed_layer_of_the_librarys_own_is_asked(kind, place):
    layer = kind(D_MODEL, D_FF)
    assert difference(layer) is None and difference(replaced(layer, layer.get_submodule(place))) is not None


def double(layer, x):
    return layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.act_fn(layer.up_proj(x)))


def test_two_relus_are_the_formula_of_both():
    assert difference(biased(double)) is not None and difference(biased(double), both=True) is None


def few_fire(layer):
    """No more than three neurons: to keep the largest few keeps all that fire."""
    nn.init.zeros_(layer.gate_proj.weight[3:])


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: nn.init.zeros_(layer.down_proj.weight),
        lambda layer: nn.init.zeros_(layer.gate_proj.weight),
        lambda layer: nn.init.constant_(layer.up_proj.weight, float("nan")),
        few_fire,
        lambda layer: layer.to("meta"),
        lambda layer: layer.requires_grad_(False),
    ],
    ids=["zero output", "silent gate", "NaN", "few fire", "meta", "frozen"],
)
def test_its_own_weights_do_not_matter(change):
    right, wrong = (Gated(rules) for rules in (SAME["products the other way round"], OTHERS["top entries alone"]))
    with torch.no_grad():
        change(right), change(wrong)
    assert difference(right) is None and difference(wrong) is not None


def test_modes_of_torch_around_it_do_not_matter():
    right, wrong = (biased(rules) for rules in (SAME["products the other way round"], OTHERS["a little"]))
    for context in (
        torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode(),
        torch.no_grad(),
        torch.device("meta"),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        with context:
            assert difference(right) is None and "0.01% off" in difference(wrong)
    with torch.inference_mode():
        assert difference(biased(SAME["products the other way round"])) is None


class Busy(nn.Module):
    """A decoder layer whose own state changes whenever it runs: counters, running means, random numbers."""

    def __init__(self, between=0.0, after=0.1):
        super().__init__()
        self.fc1, self.fc2, self.activation_fn = nn.Linear(D_MODEL, D_FF), nn.Linear(D_FF, D_MODEL), nn.ReLU()
        self.norm, self.drop = nn.BatchNorm1d(D_MODEL), nn.Dropout(after)
        self.between, self.calls, self.last, self.cache = between, 0, None, torch.zeros(3)

    def forward(self, x, mask):
        self.calls += 1
        self.cache += 1
        self.last = x
        self.noise = random.random()
        y = self.norm(x.flatten(0, -2)).reshape(x.shape)
        y = F.dropout(self.activation_fn(self.fc1(y)), self.between, self.training)
        return x + self.drop(self.fc2(y))


class Ruled(Busy):
    """A block that computes rule(block, x); `inner` is what usually enters its first projection."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, x, mask):
        return self.rule(self, x)


def inner(x):
    return F.layer_norm(x, (D_MODEL,))


def up(block, x):
    return block.activation_fn(block.fc1(x))


BLOCKS = {
    "busy": (Busy(), None),
    "calls forward": (Ruled(lambda b, x: x + b.fc2.forward(b.activation_fn(b.fc1.forward(inner(x))))), None),
    "dropout between": (Busy(between=0.1), "in training mode .* off"),
    "listens": (
        Ruled(lambda b, x: b.fc2(b.activation_fn(h := b.fc1(x))) + h.mean(-1, keepdim=True)),
        "does not compute|SizeError|raised",
    ),
    "clamps": (Ruled(lambda b, x: x + b.fc2(up(b, inner(x)).clamp(max=100))), "does not compute"),
    "twice": (Ruled(lambda b, x: b.fc2(up(b, b.fc2(up(b, x))))), None),
    "cut": (Ruled(lambda b, x: x + b.fc2(up(b, inner(x)).detach())), r"the gradient of fc[12]\.weight"),
}


@pytest.mark.parametrize("block, said", BLOCKS.values(), ids=BLOCKS)
def test_a_block_is_asked_as_a_whole(block, said):
    reason = difference(block)
    assert reason is None if said is None else re.search(said, reason), reason


def state_of(module):
    tensors = {name: (t.clone(), t._version, t.requires_grad) for name, t in module.state_dict(keep_vars=True).items()}
    own = [[str(value) for value in vars(part).values()] for part in module.modules()]
    return tensors, own, torch.get_rng_state(), random.getstate()


def assert_same(one, other):
    (tensors, own, rng, python), (tensors_b, own_b, rng_b, python_b) = one, other
    assert own == own_b and torch.equal(rng, rng_b) and python == python_b
    for name, (t, *rest) in tensors.items():
        assert torch.equal(t, tensors_b[name][0]) and rest == list(tensors_b[name][1:]), name


@pytest.mark.parametrize("rule", [None, "in place", "an error", "dropout between"])
def test_a_layer_is_left_as_it_was(rule):
    torch.manual_seed(0)
    layer = Busy() if rule is None else Gated(OTHERS[rule], extra=nn.Dropout(0.5))
    layer.train()
    next(iter(layer.children())).eval()  # of two minds
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    next(layer.parameters()).requires_grad_(False)
    calls = []
    for part in layer.modules():
        part.register_forward_hook(lambda *_: calls.append(1))
    before, grads = state_of(layer), [p.grad for p in layer.parameters()]
    assert (difference(layer) is None) == (rule is None) and not calls
    assert_same(state_of(layer), before)
    assert all(a is b and (b == 1).all() for a, b in zip([p.grad for p in layer.parameters()], grads, strict=True))

"""A layer is swapped only if it computes what its parts say: what is refused, what is taken, and that being asked
changes nothing."""

import copy
import functools
import random

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from twell_lab.layers.anatomy import feed_forwards

from twell_lab.core import InputError
from twell_lab.layers import probe
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import cpu
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


def quantised(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (x / scale).round() * scale


class OtherReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(x) ** 2


OTHERS = {
    "its output scaled": lambda layer, x: 3 * layer.down_proj(hidden(layer, x)),
    "a little": lambda layer, x: 1.0001 * layer.down_proj(hidden(layer, x)),
    "its gate scaled": lambda layer, x: layer.down_proj(layer.act_fn(0.9 * layer.gate_proj(x)) * layer.up_proj(x)),
    "a norm between": lambda layer, x: layer.down_proj(F.rms_norm(hidden(layer, x), (D_FF,))),
    "a norm before": lambda layer, x: layer.down_proj(hidden(layer, F.rms_norm(x, (D_MODEL,)))),
    "top entries alone": lambda layer, x: layer.down_proj(top(layer.gate_proj(x)) * layer.up_proj(x)),
    "two ReLUs, scaled": lambda layer, x: (
        2 * layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.act_fn(layer.up_proj(x)))
    ),
    "a residual inside": lambda layer, x: x + layer.down_proj(hidden(layer, x)),
    "a clamp at large values": lambda layer, x: layer.down_proj(
        layer.act_fn(layer.gate_proj(x)).clamp(max=50) * layer.up_proj(x)
    ),
    "a threshold at small values": lambda layer, x: layer.down_proj(
        F.threshold(layer.gate_proj(x), 1e-3, 0.0) * layer.up_proj(x)
    ),
    "swapped parts": lambda layer, x: layer.down_proj(layer.act_fn(layer.up_proj(x)) * layer.gate_proj(x)),
    "dropout between": lambda layer, x: layer.down_proj(F.dropout(hidden(layer, x), 0.1, layer.training)),
    "dropout afterwards": lambda layer, x: F.dropout(layer.down_proj(hidden(layer, x)), 0.1, layer.training),
    "another way in evaluation": lambda layer, x: layer.down_proj(hidden(layer, x)) * (1 if layer.training else 2),
    "another way in training": lambda layer, x: layer.down_proj(hidden(layer, x)) * (2 if layer.training else 1),
    "the token before": lambda layer, x: layer.down_proj(hidden(layer, (x + x.roll(1, -2)) / 2)),
    "rounded inputs": lambda layer, x: layer.down_proj(hidden(layer, quantised(x))),
    "another type": lambda layer, x: layer.down_proj(hidden(layer, x)).double(),
    "a tuple": lambda layer, x: (layer.down_proj(hidden(layer, x)), None),
    "an error": lambda layer, x: layer.down_proj(hidden(layer, x) @ x),
    "in place": lambda layer, x: layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x.mul_(2))),
}


@pytest.mark.parametrize("rule", OTHERS)
def test_what_computes_something_else_is_refused_by_name_and_left_alone(rule):
    torch.manual_seed(0)
    layer = Gated(OTHERS[rule])
    model = nn.ModuleDict({"first": GatedFeedForward(D_MODEL, D_FF), "odd": layer})
    with pytest.raises(InputError, match=r"odd \(Gated\).*accepted"):
        sparsify(model)
    assert model["odd"] is layer and not any(isinstance(each, SparseFFN) for each in model.modules())
    with pytest.raises(InputError, match="Gated"):
        SparseFFN.from_module(layer)
    sparsify(model, only=lambda name, module: name != "odd")
    assert isinstance(model["first"], SparseFFN) and model["odd"] is layer


def test_the_difference_and_the_mode_are_named():
    with pytest.raises(
        InputError, match=r"Gated does not compute down\(act\(gate\(x\)\) \* up\(x\)\): in evaluation mode .* 200% off"
    ):
        SparseFFN.from_module(Gated(OTHERS["its output scaled"]))
    with pytest.raises(InputError, match="in training mode .* off"):
        SparseFFN.from_module(Gated(OTHERS["dropout between"]).eval())
    with pytest.raises(InputError, match="TypeError.*takes x alone"):
        SparseFFN.from_module(
            type("TwoInputs", (GatedFeedForward,), {"forward": lambda self, x, other: x})(D_MODEL, D_FF)
        )


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


@pytest.mark.parametrize("rule", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_computes_the_same_in_another_way_is_taken(rule, dtype):
    torch.manual_seed(0)
    layer = Gated(SAME[rule]).to(dtype)
    assert isinstance(SparseFFN.from_module(layer), SparseFFN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_too_small_for_16_bits_is_seen_all_the_same(dtype):
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"(1|1\.0\d)% off"):
        SparseFFN.from_module(Gated(lambda layer, x: layer.down_proj(hidden(layer, x) * 1.01)).to(dtype))


def test_a_relu_of_ones_own_is_none():
    layer = Gated(lambda layer, x: layer.down_proj(hidden(layer, x)), act_fn=OtherReLU())
    for function in (SparseFFN.from_module, sparsify):
        with pytest.raises(InputError, match="OtherReLU"):
            function(layer)
    layer.act_fn = nn.ReLU()
    layer.act_fn.forward = torch.tanh
    with pytest.raises(InputError, match="ReLU"):
        SparseFFN.from_module(layer)
    layer.act_fn = type("Renamed", (nn.ReLU,), {})()
    assert isinstance(SparseFFN.from_module(layer), SparseFFN)


@pytest.mark.parametrize(
    "part",
    [nn.RMSNorm(D_FF), nn.LayerNorm(D_FF), nn.BatchNorm1d(D_FF, affine=False), nn.Parameter(torch.ones(1))],
    ids=lambda part: type(part).__name__,
)
def test_parameters_and_buffers_that_would_vanish_are_named(part):
    layer = Gated(
        lambda layer, x: layer.down_proj(hidden(layer, x)), extra=part
    )  # even where nothing is done with them
    with pytest.raises(InputError, match="does not carry: extra"):
        SparseFFN.from_module(layer)


def test_widths_that_no_sparse_layer_has_are_named():
    layer = PlainFeedForward(D_MODEL, D_FF)
    layer.down_proj = nn.Linear(D_FF, 2 * D_MODEL)
    with pytest.raises(InputError, match=r"down_proj \[32, 64\].*accepted"):
        SparseFFN.from_module(layer)


# ---- weights that could not show a difference ----


def zero_output(layer):
    nn.init.zeros_(layer.down_proj.weight)


def silent_gate(layer):
    nn.init.zeros_(layer.gate_proj.weight)


def not_a_number(layer):
    nn.init.constant_(layer.up_proj.weight, float("nan"))


def few_fire(layer):
    """No more than three neurons: to keep the largest few keeps all that fire."""
    nn.init.zeros_(layer.gate_proj.weight[3:])


def on_meta(layer):
    layer.to("meta")


@pytest.mark.parametrize(
    "prepare", [zero_output, silent_gate, few_fire, not_a_number, on_meta], ids=lambda function: function.__name__
)
def test_other_weights_stand_in_for_those_that_tell_nothing(prepare):
    rule = "top entries alone" if prepare is few_fire else "its output scaled"
    right, wrong = Gated(SAME["products the other way round"]), Gated(OTHERS[rule])
    for layer in (right, wrong):
        with torch.no_grad():
            prepare(layer)
    held = [(p, p._version, p.requires_grad) for p in right.parameters()]
    probe.check("", right)
    assert [(p, p._version, p.requires_grad) for p in right.parameters()] == held
    with pytest.raises(InputError, match="% off"):
        probe.check("", wrong)


def test_inside_fake_tensor_mode():
    with FakeTensorMode():
        probe.check("", Gated(SAME["products the other way round"]))
        with pytest.raises(InputError, match="200% off"):
            probe.check("", Gated(OTHERS["its output scaled"]))


@pytest.mark.parametrize(
    "parametrized",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
    ids=lambda function: function.__name__,
)
def test_parametrized_projections_are_carried(parametrized):
    torch.manual_seed(0)
    layer = GatedFeedForward(D_MODEL, D_FF)
    for part in (layer.gate_proj, layer.up_proj, layer.down_proj):
        parametrized(part)
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    probe.check("", layer)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in layer.named_buffers())
    x = torch.randn(3, D_MODEL)
    sparse = SparseFFN.from_module(layer)
    with torch.no_grad():
        torch.testing.assert_close(sparse.eval()(x), layer.eval()(x), rtol=1e-4, atol=1e-5)


# ---- being asked changes nothing ----


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


def state_of(module):
    held = {
        name: (t.clone(), t._version, t.requires_grad)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    own = {
        name: {
            k: v.tolist() if isinstance(v, torch.Tensor) else v
            for k, v in vars(each).items()
            if not isinstance(v, dict)
        }
        for name, each in module.named_modules()
    }
    return held, own, torch.get_rng_state(), random.getstate()


def assert_same(a, b):
    for (held, own, rng, python), (held_b, own_b, rng_b, python_b) in [(a, b)]:
        assert own == own_b and torch.equal(rng, rng_b) and python == python_b
        for name, (t, *rest) in held.items():
            assert torch.equal(t, held_b[name][0]) and rest == list(held_b[name][1:]), name


@pytest.mark.parametrize("rule", [None, *OTHERS])
def test_a_layer_is_left_as_it_was(rule):
    torch.manual_seed(0)
    layer = Busy() if rule is None else Gated(OTHERS[rule], extra=nn.Dropout(0.5))
    layer.train()
    next(iter(layer.children())).eval()  # of two minds
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    next(layer.parameters()).requires_grad_(False)
    before, grads = state_of(layer), [p.grad for p in layer.parameters()]
    calls, seen = [], []
    handles = [
        nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1)),
        nn.modules.module.register_module_forward_pre_hook(lambda *_: calls.append(1)),
    ]
    try:
        probe.check("", layer)
    except InputError as error:
        seen.append(error)
    finally:
        for handle in handles:
            handle.remove()
    assert bool(seen) == (rule is not None) and not calls
    assert_same(state_of(layer), before)
    assert all(a is b and (b == 1).all() for a, b in zip([p.grad for p in layer.parameters()], grads, strict=True))


def test_inside_autocast_inference_mode_and_another_default_device():
    layer = Gated(SAME["products the other way round"])
    with torch.autocast("cpu", torch.bfloat16):
        probe.check("", layer)
        with pytest.raises(InputError, match=r"0.01% off"):
            probe.check("", Gated(OTHERS["a little"]))
    with torch.inference_mode():
        probe.check("", Gated(SAME["products the other way round"]))
    with torch.device("meta"):
        probe.check("", layer)
        with pytest.raises(InputError, match="200% off"):
            probe.check("", Gated(OTHERS["its output scaled"]))


# ---- decoder layers that hold the parts themselves ----


def test_a_decoder_layer_is_asked_as_a_whole():
    torch.manual_seed(0)
    layer = Busy().eval()
    x = torch.randn(2, 5, D_MODEL)
    expected = layer(x, None).detach()
    sparsify(layer)
    torch.testing.assert_close(layer(x, None).detach(), expected)
    densify(layer)
    with pytest.raises(InputError, match="in training mode .* off"):
        sparsify(Busy(between=0.1))


def test_a_decoder_layer_may_call_the_forward_of_a_part():
    class Direct(Busy):
        def forward(self, x, mask):
            return x + self.fc2.forward(self.activation_fn(self.fc1.forward(F.layer_norm(x, (D_MODEL,)))))

    torch.manual_seed(0)
    layer, x = Direct().eval(), torch.randn(2, 5, D_MODEL)
    expected = layer(x, None).detach()
    torch.testing.assert_close(sparsify(layer, "twell")(x, None).detach(), expected)


class Listening(Busy):
    """A layer that itself reads what lies between its projections."""

    def forward(self, x, mask):
        up = self.fc1(x)
        return self.fc2(self.activation_fn(up)) + up.mean(-1, keepdim=True)


class Clamping(Busy):
    def forward(self, x, mask):
        return x + self.fc2(self.activation_fn(self.fc1(F.layer_norm(x, (D_MODEL,)))).clamp(max=100))


class Twice(Busy):
    def forward(self, x, mask):
        return self.fc2(self.activation_fn(self.fc1(self.fc2(self.activation_fn(self.fc1(x))))))


class Mixing(Busy):
    def forward(self, x, mask):
        return self.fc2(self.activation_fn(self.fc1(x).roll(1, -1)))


@pytest.mark.parametrize("kind", [Listening, Clamping, Twice, Mixing])
def test_a_decoder_layer_that_does_more_between_its_parts_is_refused(kind):
    torch.manual_seed(0)
    layer = kind()
    for function in (sparsify, SparseFFN.from_module):
        with pytest.raises(InputError, match=kind.__name__):
            function(layer)
    assert isinstance(layer.activation_fn, nn.ReLU) and "forward" not in vars(layer.fc1)


def test_a_decoder_layer_that_cannot_be_run_alone_is_refused_with_its_error():
    class Crossed(Busy):
        def forward(self, x, other):
            return super().forward(x, None) + other[0]

    with pytest.raises(InputError, match="Crossed could not be asked.*TypeError"):
        sparsify(Crossed())


def test_a_sparse_layer_inside_a_decoder_layer_goes_on_following_its_weights(monkeypatch):
    monkeypatch.setattr(cpu, "_pays", lambda gate, entries: True)  # small layers would never look at their copy

    class Both(Busy):
        def __init__(self):
            super().__init__()
            self.mlp = GatedFeedForward(D_MODEL, D_FF)

        def forward(self, x, mask):
            return super().forward(x, mask) + self.mlp(x)

    torch.manual_seed(0)
    layer = Both().eval()
    x = torch.randn(2, 5, D_MODEL)
    with torch.no_grad():
        sparsify(layer, only=lambda name, module: name == "mlp")
        layer.mlp.down_proj.weight.mul_(2)  # what the copy inside the sparse layer has not followed yet
        expected = densify(copy.deepcopy(layer))(x, None)
        probe.check("", layer)
        torch.testing.assert_close(layer(x, None), expected)


# ---- whole models ----


def test_each_layer_is_asked_for_itself_and_nothing_is_changed_before_all_are():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocabulary=50, d_model=D_MODEL, layers=4, heads=2, d_ff=D_FF, context=12))
    for at, rule in ((1, "its output scaled"), (3, "top entries alone")):
        odd = Gated(OTHERS[rule])
        odd.load_state_dict(model.layers[at].mlp.state_dict())
        model.layers[at].mlp = odd
    with pytest.raises(InputError, match=r"layers\.1\.mlp \(Gated\).*200% off.*layers\.3\.mlp \(Gated\)"):
        sparsify(model)
    assert not any(isinstance(each, SparseFFN) for each in model.modules())
    tokens = torch.randint(50, (2, 9))
    expected = model(tokens)
    asked = []
    sparsify(model, only=lambda name, module: asked.append(name) or not isinstance(module, Gated))
    assert {f"layers.{at}.mlp" for at in range(4)} <= set(asked)
    assert [isinstance(layer.mlp, SparseFFN) for layer in model.layers] == [True, False, True, False]
    torch.testing.assert_close(model(tokens), expected)
    sparse = [layer.name for layer in feed_forwards(model, only=lambda name, module: isinstance(module, SparseFFN))]
    assert sparse == ["layers.0.mlp", "layers.2.mlp"]
    with pytest.raises(InputError, match="`only` leaves none of the 4"):
        sparsify(model, only=lambda name, module: False)


# ---- gradients ----


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
    "another gradient of the output": lambda layer, x: Tenfold.apply(layer.down_proj(hidden(layer, x))),
    "another output with gradients": lambda layer, x: (
        layer.down_proj(hidden(layer, x)) * (3 if torch.is_grad_enabled() else 1)
    ),
    "in training mode alone": lambda layer, x: layer.down_proj(
        hidden(layer, Tenfold.apply(x) if layer.training else x)
    ),
    "in evaluation mode alone": lambda layer, x: layer.down_proj(hidden(layer, x if layer.training else x.detach())),
    "no gradient at all": torch.no_grad()(lambda layer, x: layer.down_proj(hidden(layer, x))),
    "a bias without a gradient": lambda layer, x: F.linear(
        hidden(layer, x), layer.down_proj.weight, layer.down_proj.bias.detach()
    ),
}


def biased(layer):
    layer.down_proj.bias = nn.Parameter(torch.randn(D_MODEL))
    return layer


@pytest.mark.parametrize("rule", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_gradients_are_refused_and_nothing_of_them_stays(rule, dtype):
    torch.manual_seed(0)
    layer = biased(Gated(GRADIENTS[rule])).to(dtype)
    before = [(p, p._version, p.requires_grad) for p in layer.parameters()]
    with pytest.raises(
        InputError, match=r"odd \(Gated\) does not compute .*(the gradient of|its output with gradients).* off"
    ):
        sparsify(nn.ModuleDict({"odd": layer}))
    assert [(p, p._version, p.requires_grad) for p in layer.parameters()] == before
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("rule", ["a gate without a gradient", "another gradient of x"])
def test_gradients_are_compared_wherever_the_layer_is(rule):
    right, wrong = (biased(Gated(each)) for each in (SAME["products the other way round"], GRADIENTS[rule]))
    for layer in (right, wrong):
        layer.requires_grad_(False)
    with torch.inference_mode():
        inference = [biased(Gated(each)) for each in (right.rule, wrong.rule)]
        probe.check("", right)
        with pytest.raises(InputError, match="the gradient of"):
            probe.check("", wrong)
    with torch.device("meta"), pytest.raises(InputError, match="the gradient of"):
        probe.check("", wrong)
    for good, bad in ((right, wrong), inference, (copy.deepcopy(right).to("meta"), copy.deepcopy(wrong).to("meta"))):
        probe.check("", good)
        with pytest.raises(InputError, match="the gradient of"):
            probe.check("", bad)
    assert not any(p.requires_grad for p in right.parameters())


def test_a_layer_that_cannot_be_trained_has_no_gradients_to_differ():
    """relu needs its output for its gradient, and the output is written over."""
    layer = Gated(lambda layer, x: layer.down_proj(layer.act_fn(layer.gate_proj(x)).mul_(layer.up_proj(x))))
    with pytest.raises(RuntimeError, match="inplace"):
        layer(torch.randn(3, D_MODEL)).sum().backward()
    assert isinstance(SparseFFN.from_module(layer), SparseFFN)


@pytest.mark.parametrize(
    "parametrized", [parametrizations.weight_norm, parametrizations.orthogonal], ids=lambda f: f.__name__
)
def test_gradients_of_what_a_weight_is_made_of(parametrized):
    for rule, fits in ((SAME["products the other way round"], True), (GRADIENTS["a gate without a gradient"], False)):
        layer = Gated(rule)
        parametrized(layer.gate_proj)
        if fits:
            probe.check("", layer)
        else:
            with pytest.raises(InputError, match=r"the gradient of gate_proj\.parametrizations"):
                probe.check("", layer)


def test_gradients_inside_a_decoder_layer():
    class Cut(Busy):
        def forward(self, x, mask):
            return x + self.fc2(self.activation_fn(self.fc1(F.layer_norm(x, (D_MODEL,)))).detach())

    for layer in (Cut(), Cut().requires_grad_(False)):
        with pytest.raises(InputError, match=r"Cut does not compute .* the gradient of fc[12]\.weight"):
            sparsify(layer)
    sparsify(Busy())


# ---- what a forward leaves behind, and single rows ----


@pytest.mark.parametrize("rule", [None, "in place"])
def test_numpys_random_state_stays(rule):
    def draws(layer, x):
        numpy.random.rand()
        return OTHERS[rule](layer, x) if rule else layer.down_proj(hidden(layer, x))

    numpy.random.seed(3)
    expected = numpy.random.rand(2).tolist()
    numpy.random.seed(3)
    try:
        probe.check("", Gated(draws))
    except InputError:
        assert rule
    assert numpy.random.rand(2).tolist() == expected


def stored(on, name, value):
    def rule(layer, x):
        setattr(layer.get_submodule(on), name, value(x))
        return layer.down_proj(hidden(layer, x))

    return rule


@pytest.mark.parametrize(
    "on, name, value",
    [
        ("", "last_hidden", lambda x: x),
        ("", "kept", lambda x: x),
        ("", "rows", len),
        ("up_proj", "given", lambda x: x),
        ("act_fn", "seen", lambda x: None),
        ("", "weights", lambda x: nn.Parameter(x.detach())),
        ("", "part", lambda x: nn.Identity()),
    ],
)
def test_a_forward_that_keeps_something_on_the_module_is_refused_by_its_name(on, name, value):
    layer = Gated(stored(on, name, value))
    layer.kept = None
    before = {at: set(vars(each)) for at, each in layer.named_modules()}
    with pytest.raises(InputError, match=rf"odd \(Gated\) sets {on}\.?{name} in its forward"):
        sparsify(nn.ModuleDict({"odd": layer}))
    assert {at: set(vars(each)) for at, each in layer.named_modules()} == before and layer.kept is None


def test_what_is_only_remembered_is_no_loss():
    class Remembers(Gated):
        @functools.cached_property
        def width(self):
            return self.up_proj.in_features

    layer = Remembers(lambda layer, x: layer.down_proj(hidden(layer, x.reshape(*x.shape[:-1], layer.width))))
    assert isinstance(SparseFFN.from_module(layer), SparseFFN) and "width" not in vars(layer)


def test_a_forward_that_writes_to_its_input_is_refused():
    def rule(layer, x):
        y = layer.down_proj(hidden(layer, x))
        x.add_(1)
        return y

    with pytest.raises(InputError, match=r"odd \(Gated\) writes to its input"):
        sparsify(nn.ModuleDict({"odd": Gated(rule)}))


@pytest.mark.parametrize(
    "single", [lambda x: x.shape[0] == 1, lambda x: x.shape[:-1].numel() == 1, lambda x: x.shape == (1, D_MODEL)]
)
def test_another_way_for_one_row_is_refused(single):
    with pytest.raises(InputError, match="for one row alone is 100% off"):
        SparseFFN.from_module(Gated(lambda layer, x: layer.down_proj(hidden(layer, x)) * (2 if single(x) else 1)))


def test_a_layer_that_raises_for_one_row_is_taken():
    def rule(layer, x):
        if x.shape[:-1].numel() == 1:
            raise ValueError("a batch of one")
        return layer.down_proj(hidden(layer, x))

    assert isinstance(SparseFFN.from_module(Gated(rule)), SparseFFN)


def test_gradients_are_not_asked_of_a_layer_that_is_not_to_learn(monkeypatch):
    """And its values are, as ever."""

    class Detached(Gated):
        def forward(self, x):
            return super().forward(x).detach() + 0 * x

    layer = Detached(SAME["products the other way round"])
    with pytest.raises(InputError, match="gradient"):
        probe.check("", layer)
    assert not probe.check("", layer, learns=False)
    assert probe.check_all([("", layer)], learns=False) == set()
    with pytest.raises(InputError):
        probe.check("", Gated(OTHERS["its output scaled"]), learns=False)

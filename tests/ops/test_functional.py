"""The functional face beside references: ffn, pack, packed_down and packed_gated; what they refuse; autograd, autocast,
the simulator, torch.compile; and what an Activation keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.nn import functional as F
from torch.nn.functional import linear

import twell_lab as tl
from tests.ops.dense import first, step
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.formats import TwELL
from twell_lab.ops import accuracy, cpu, dispatch
from twell_lab.ops.activation import RELU, Activation
from twell_lab.ops.functional import packed_down, packed_gated

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PATHS = {"dense": 0, "twell": 0, "hot_cold": 256}
nan, inf = torch.nan, torch.inf


def draw(tokens=5, d_model=12, d_ff=300, gated=True, biases=True, dtype=torch.float32, seed=0) -> dict:
    """The arguments of `ffn` for a layer that fires now and then."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (tokens, d_model), "gate": (d_ff, d_model), "up": (d_ff, d_model), "down": (d_model, d_ff)}
    shapes |= {"gate_bias": (d_ff,), "up_bias": (d_ff,), "down_bias": (d_model,)} if biases else {}
    drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {name: t for name, t in drawn.items() if gated or not name.startswith("gate")}


def ffn(layer: dict, **how) -> torch.Tensor:
    return tl.ffn(**layer, **how)


def dense(**layer):
    """The layer by torch's operations."""
    names = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    return step(*map(layer.get, names))[0]


def check(y: torch.Tensor, layer: dict, given: torch.Tensor | None = None) -> None:
    """Promise 1. given: the gate before its ReLU, where y was made from that."""
    verdict = accuracy.Exact(**{"gate": None, **layer}, first=given).judge(y, dense(**layer))
    assert y.dtype == layer["x"].dtype and verdict.ratio <= 1.0, verdict


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.sampled_from([0, 1, 7, 20]), st.integers(1, 40), st.sampled_from([257, 300, 700])),
    gated=st.booleans(),
    biases=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from([*PATHS]),
    spoilt=st.sampled_from([None, nan, inf]),
    entries=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_path_keeps_the_promise(sizes, gated, biases, dtype, path, spoilt, entries, seed):
    layer = draw(*sizes, gated, biases, dtype, seed)
    if spoilt is not None and sizes[0]:
        layer["x"][-1, 0] = spoilt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_ENTRY_COST", 0.0 if entries else inf)
        check(ffn(layer, path=path, hot=PATHS[path]), layer)


@settings(max_examples=40)
@given(
    tokens=st.sampled_from([0, 1, 9]),
    dtype=st.sampled_from(DTYPES),
    biases=st.booleans(),
    tile=st.integers(1, 300),
    words=st.integers(2, 9),
    seed=st.integers(0, 99),
)
def test_packed_operations_compute_with_what_was_packed(tokens, dtype, biases, tile, words, seed):
    layer = draw(tokens, biases=biases, dtype=dtype, seed=seed) | ({"gate_bias": None} if biases else {})
    gate = first(**layer)
    packed = tl.pack(gate, tile, min(words, tile + 1))
    assert torch.equal(packed.to_dense(), torch.relu(gate))
    ups = layer["up"], layer["down"], layer.get("up_bias"), layer.get("down_bias")
    check(packed_gated(layer["x"], packed, *ups), layer, given=gate)
    plain = {"x": layer["x"], "up": layer["gate"], "down": layer["down"], "down_bias": layer.get("down_bias")}
    check(packed_down(packed, ups[1], ups[3]), plain, given=gate)


def test_values_of_either_sign_count_as_they_are():
    layer = draw(biases=False)
    values = torch.randn(5, 300) * (torch.rand(5, 300) < 0.1)
    packed = TwELL.from_dense(values)
    torch.testing.assert_close(packed_down(packed, layer["down"]), values @ layer["down"].t())
    wanted = (values * (layer["x"] @ layer["up"].t())) @ layer["down"].t()
    torch.testing.assert_close(packed_gated(layer["x"], packed, layer["up"], layer["down"]), wanted)


@pytest.mark.skipif(not simulator.available(), reason="the simulator needs a C++ compiler")
def test_the_simulator_runs_the_portable_kernels():
    layer = draw(3, 16, 300)
    layer["down"] = layer["down"].t().contiguous().t()
    names = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    with torch.no_grad():
        check(dispatch.portable(*(layer[name] for name in names)), layer)


# ---- what is refused

WRONG = {
    "no tensor": (lambda t: t.tolist(), "is a list"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), "is a nested tensor"),
    "sparse": (lambda t: t.to_sparse(), "is a sparse_coo tensor"),
    "meta": (lambda t: t.to("meta"), "is a meta tensor"),
    "float64": (lambda t: t.double(), "holds torch.float64"),
    "whole numbers": (lambda t: t.int(), "holds torch.int32"),
    "another dtype": (lambda t: t.half(), "one dtype for all|is torch.float16 but|is torch.float32 but"),
    "a wider shape": (lambda t: torch.cat([t, t], -1), "has shape|rows of"),
    "another dimension": (lambda t: t[None, None], "has shape|rows of"),
    "a number": (lambda t: t.sum(), "has shape"),
}


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("wrong, says", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias"))
def test_bad_tensors_are_named(name, wrong, says):
    layer = draw()
    if (name, says) == ("x", "has shape|rows of") and wrong is WRONG["another dimension"][0]:
        assert ffn(layer | {"x": wrong(layer["x"])}).shape == (1, 1, 5, 12)  # any number of dimensions is an x
        return
    with pytest.raises(InputError, match=says):
        ffn(layer | {name: wrong(layer[name])})
    if name in ("x", "up", "down", "up_bias", "down_bias"):
        packed = tl.pack(first(**layer))
        given = {**{n: layer[n] for n in ("x", "up", "down", "up_bias", "down_bias")}, name: wrong(layer[name])}
        with pytest.raises(InputError, match=says):
            packed_gated(packed=packed, **given)
        if name.startswith("down"):
            with pytest.raises(InputError, match=says):
                packed_down(packed, given["down"], given["down_bias"])


@pytest.mark.parametrize(
    "how, says",
    [
        (dict(path="hot"), "path is 'hot'; 'dense', 'twell', 'hot_cold' are accepted"),
        (dict(hot=256), "hot is 256 on path 'twell'"),
        (dict(path="hot_cold"), "hot is 0 of 300"),
        (dict(path="hot_cold", hot=512), "hot is 512 of 300"),
        (dict(tile=0), "tile is 0"),
        (dict(words=1), "words is 1"),
        (dict(acts="silu"), "acts is a str; an Activation is accepted"),
        (dict(acts=Activation("mish", 0.1)), "activation is 'mish'"),
        (dict(acts=Activation("above", -0.5)), "threshold is -0.5"),
        (dict(acts=Activation("relu", 0.5)), "threshold is 0.5 for a relu"),
        (dict(acts=Activation("gelu")), "threshold is 0 for gelu"),
        (dict(acts=Activation("silu", 0.5, True)), "both is True for silu"),
    ],
    ids=str,
)
def test_bad_options_are_named(how, says):
    with pytest.raises(InputError, match=says), torch.no_grad():
        ffn(draw(), **how)


def test_sizes_of_nothing_and_what_is_no_packed_gate():
    with pytest.raises(InputError, match="d_model is 0"):
        tl.ffn(torch.ones(2, 0), torch.ones(3, 0), torch.ones(0, 3))
    with pytest.raises(InputError, match="both is True for relu"):
        tl.ffn(**draw(gated=False), acts=Activation(both=True))
    for gate in (torch.ones(5), torch.ones(5, 0), torch.ones(2, 3, device="meta"), torch.ones(2, 3).double()):
        with pytest.raises(InputError, match="the matrix has shape|is a meta tensor|float64"):
            tl.pack(gate)
    for call in (lambda t: packed_down(t, t), lambda t: packed_gated(t, t, t, t)):
        with pytest.raises(InputError, match="packed is a Tensor; a TwELL"):
            call(torch.ones(2, 2))


@pytest.mark.parametrize("name", ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"))
def test_weights_that_are_not_finite_are_named_on_a_cpu(name):
    layer = draw()
    layer[name].view(-1)[3] = nan
    with pytest.raises(InputError, match=f"^{name} holds a value that is not finite"):
        ffn(layer)


# ---- as guests in torch


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("wanted", (None, "x", "up"))
def test_gradients_are_the_dense_ones(path, gated, wanted):
    grads = []
    for function in (dense, lambda **layer: ffn(layer, path=path, hot=PATHS[path])):
        layer = {name: t.requires_grad_(wanted in (None, name)) for name, t in draw(gated=gated).items()}
        function(**layer).square().sum().backward()
        grads.append([t.grad for t in layer.values()])
    for grad, exact in zip(*grads, strict=True):
        assert (grad is None) == (exact is None)
        if grad is not None:
            torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("packed_call", (packed_down, packed_gated))
def test_packed_operations_have_no_gradient(packed_call):
    layer = draw(biases=False)
    packed = tl.pack(first(**layer))
    down = layer["down"].requires_grad_()
    y = packed_down(packed, down) if packed_call is packed_down else packed_gated(layer["x"], packed, layer["up"], down)
    assert not y.requires_grad


@pytest.mark.parametrize("to", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("learns", (False, True))
def test_autocast_casts_as_linear_does(to, learns):
    layer = {name: t.requires_grad_(learns) for name, t in draw().items()}
    with torch.autocast("cpu", to):
        y = ffn(layer)
        assert y.dtype == dense(**layer).dtype == to
    assert torch.equal(y, ffn({name: t.to(to) for name, t in layer.items()}))
    if learns:
        y.float().sum().backward()
        assert {t.grad.dtype for t in layer.values()} == {torch.float32}


def test_inference_mode_vmap_and_leading_dimensions():
    layer = draw(6)
    expected = ffn(layer)
    with torch.inference_mode():
        assert torch.equal(ffn(layer), expected)
    x = layer.pop("x").view(2, 3, 12)
    assert torch.equal(tl.ffn(x, **layer).view(6, 12), expected)
    turned = tl.ffn(x.transpose(0, 1), **layer).transpose(0, 1).reshape(6, 12)
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-3)  # float32, added in another order
    torch.testing.assert_close(torch.func.vmap(lambda one: tl.ffn(one, **layer))(x).view(6, 12), expected)


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("tokens", (0, 4))
def test_the_operator_and_compiled_code(gated, tokens):
    layer = {"gate": None, "gate_bias": None} | draw(tokens, gated=gated)
    order = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    opcheck(torch.ops.twell_lab.infer.default, (*(layer[name] for name in order), "twell", 0, 256, 32))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: 2 * ffn(layer | {"x": x}) + 1, fullgraph=True, backend="aot_eager")
    for x in (layer["x"], layer["x"].t().contiguous().t()):
        torch.testing.assert_close(compiled(x), 2 * ffn(layer) + 1)


# ---- activations

CURVES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CURVES)
def test_a_curve_keeps_what_is_large_of_either_sign(kind, dtype):
    acts, x = Activation(kind, 0.1), torch.linspace(-6, 6, 97).to(dtype)
    value = CURVES[kind](x)
    wanted = value.masked_fill(value.abs() < 0.1, 0)
    assert torch.equal(acts.keeps(x), value.abs() >= 0.1) and (value[acts.keeps(x)] < 0).any()
    assert torch.equal(acts.applied(x), wanted) and torch.equal(acts.dense(x), wanted)
    layer = draw(dtype=dtype)
    hidden = acts.dense(first(**layer)) * linear(layer["x"], layer["up"], layer["up_bias"])
    wanted = linear(hidden, layer["down"], layer["down_bias"])
    torch.testing.assert_close(ffn(layer, acts=acts), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


def test_what_is_not_finite():
    x = torch.tensor([-inf, inf, nan])
    for acts in (RELU, Activation("above", 0.5), *(Activation(kind, 0.5) for kind in CURVES)):
        silent, large, none = acts.applied(x)
        assert acts.keeps(x).tolist() == [False, True, True]
        assert silent == 0 and not large.isfinite() and none.isnan()  # a CPU's gelu of infinity is NaN
        assert acts.dense(x)[0].isnan() == acts.falls_back


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("threshold", (0.0, 1e-8, 0.001, 0.3, 0.5003))
def test_every_value_of_16_bits_above_a_threshold_is_itself_and_all_others_plus_zero(threshold, dtype):
    """As torch compares a tensor with a number, the threshold counts as it is rounded."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    acts, number = Activation("above", threshold), ~every.isnan()
    wanted = torch.where(every > torch.tensor(threshold).to(dtype), every, torch.zeros_like(every))
    assert torch.equal(acts.applied(every)[number].view(torch.int16), wanted[number].view(torch.int16))
    assert torch.equal(acts.applied(every).isnan(), ~number)

"""What the operators refuse, and that the message names the value."""

import dataclasses

import pytest
import torch

from twell_lab import ops
from twell_lab.core import InputError, TwellError

NAMES = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias", "down_t")
# (gated, name) of every argument of both operators.
ARGUMENTS = [(True, name) for name in NAMES] + [(False, name) for name in NAMES if not name.startswith("gate")]


def complete(draw, gated):
    """Every argument of a layer by name, d_model 12 and d_ff 40."""
    layer = draw(4, 12, 40, gated=gated, biases="gud")
    return {**layer.weights, "x": layer.x, "down_t": layer.down.t().contiguous()}


def call(arguments):
    arguments = dict(arguments)
    function = ops.gated_ffn if "gate" in arguments else ops.plain_ffn
    return function(arguments.pop("x"), **arguments)


@pytest.mark.parametrize("gated, name", ARGUMENTS)
def test_another_dtype(gated, name, draw):
    arguments = complete(draw, gated)
    for dtype in (torch.float64, torch.int32, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(InputError, match=f"{name} is {dtype}; bfloat16, float16 and float32 are accepted"):
            call({**arguments, name: arguments[name].to(dtype)})
    others = "gate|up" if name == "x" else name
    with pytest.raises(InputError, match=f"({others}) is torch.*but the input is torch.*one dtype"):
        call({**arguments, name: arguments[name].half()})


@pytest.mark.parametrize("gated, name", ARGUMENTS)
def test_what_is_no_tensor_or_on_no_known_device(gated, name, draw):
    arguments = complete(draw, gated)
    with pytest.raises(InputError, match=f"{name} is a list; a torch.Tensor"):
        call({**arguments, name: arguments[name].tolist()})
    with pytest.raises(InputError, match=f"{name} is on meta; cpu and cuda"):
        call({**arguments, name: arguments[name].to("meta")})
    with pytest.raises(InputError, match=f"{name} has layout torch.sparse_coo"):
        call({**arguments, name: arguments[name].to_sparse()})
    if name in ("x", "gate", "up", "down"):
        with pytest.raises(InputError, match=f"{name} is a NoneType"):
            call({**arguments, name: None})


@pytest.mark.parametrize("gated, name", ARGUMENTS)
def test_another_shape(gated, name, draw):
    arguments = complete(draw, gated)
    t = arguments[name]
    # Which of two tensors is the wrong one cannot be known: the message names one that does not fit the others.
    named = {"x": "gate|up|x|d_model", "up": "gate|up|d_model"}.get(name, name)
    fewer = [t[:, :0]] if name == "x" else [t[:0], t[0]]  # any number of rows of x is an x
    for other in (t[..., :-1], t[..., None], t.sum(), *fewer):
        with pytest.raises(InputError, match=rf"({named}) (has shape|is) "):
            call({**arguments, name: other.contiguous()})


def test_a_transpose_that_is_not_contiguous(gated, draw):
    arguments = complete(draw, gated)
    with pytest.raises(InputError, match="down_t has strides"):
        call({**arguments, "down_t": arguments["down"].t()})


def test_no_columns_and_no_neurons(gated, draw):
    for tokens, d_model, d_ff in ((3, 0, 5), (3, 5, 0), (0, 0, 0)):
        weights = dict(up=torch.zeros(d_ff, d_model), down=torch.zeros(d_model, d_ff))
        if gated:
            weights["gate"] = weights["up"]
        with pytest.raises(InputError, match=f"d_model is {d_model} and d_ff {d_ff}"):
            call({"x": torch.zeros(tokens, d_model), **weights})


@pytest.mark.parametrize(
    "geometry",
    [dict(tile=0), dict(tile=65_537), dict(words=1), dict(tile=4, words=6), dict(tile=2.5), dict(words="32")],
    ids=str,
)
def test_a_geometry_the_format_has_not(gated, geometry, draw):
    with pytest.raises(InputError, match="tile is|words is"):
        call({**complete(draw, gated), **geometry})
    with pytest.raises(InputError, match="tile is|words is"):
        ops.pack(torch.ones(2, 10), **geometry)


@pytest.mark.parametrize(
    "gate, told",
    [
        (torch.ones(5), "gate has shape .5."),
        (torch.ones(2, 3, 4), "gate has shape .2, 3, 4."),
        (torch.ones(5, 0), "gate is .5, 0."),
        (torch.ones(2, 3, dtype=torch.float64), "gate is torch.float64"),
        (torch.ones(2, 3, dtype=torch.int32), "gate is torch.int32"),
        (torch.ones(2, 3, device="meta"), "gate is on meta"),
        (torch.ones(2, 3).to_sparse(), "gate has layout"),
        (None, "gate is a NoneType"),
    ],
    ids=["vector", "3 dimensions", "no columns", "float64", "int32", "meta", "sparse", "None"],
)
def test_what_pack_refuses(gate, told):
    with pytest.raises(InputError, match=told):
        ops.pack(gate)


def packed_arguments(draw):
    layer = draw(4, 12, 40, biases="ud")
    packed = ops.pack(layer.pattern())
    return (
        layer,
        packed,
        dict(
            x=layer.x,
            packed=packed,
            up=layer.up,
            down=layer.down,
            up_bias=layer.up_bias,
            down_bias=layer.down_bias,
            down_t=layer.down.t().contiguous(),
        ),
    )


@pytest.mark.parametrize("name", ["x", "up", "down", "up_bias", "down_bias", "down_t"])
def test_packed_operators_refuse_what_does_not_belong_to_the_packed(name, draw):
    layer, packed, arguments = packed_arguments(draw)
    t = arguments[name]
    for changed, told in (
        (t.bfloat16(), f"{name} is torch.bfloat16 but the input is torch.float32"),
        (t.to("meta"), f"{name} is on meta"),
        (t.tolist(), f"{name} is a list"),
        (t[:-1].contiguous(), f"({name}|down_t) has shape"),
    ):
        with pytest.raises(InputError, match=told):
            ops.packed_gated(**{**arguments, name: changed})
        if name in ("down", "down_t", "down_bias"):
            down = {**dict(down=layer.down, bias=layer.down_bias), name.replace("down_bias", "bias"): changed}
            with pytest.raises(InputError, match=told.replace("down_bias", "bias").replace("(down|", "(down|bias|")):
                ops.packed_down(packed, **down)
    if name in ("x", "up", "down"):
        with pytest.raises(InputError, match=f"{name} is a NoneType"):
            ops.packed_gated(**{**arguments, name: None})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_words_are_not_read_as_other_values(dtype, draw):
    # Both dtypes fit the same words: without the check, the bits would be taken for the other's.
    layer, _, _ = packed_arguments(draw)
    packed = ops.pack(layer.pattern().to(dtype))
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    for wrong in (other, torch.float32):
        with pytest.raises(InputError, match=f"down is {wrong} but the input is {dtype}"):
            ops.packed_down(packed, layer.down.to(wrong))
        with pytest.raises(InputError, match=f"x is {wrong} but the input is {dtype}"):
            ops.packed_gated(layer.x.to(wrong), packed, layer.up.to(dtype), layer.down.to(dtype))


def test_what_is_no_packed_matrix(draw):
    layer, packed, arguments = packed_arguments(draw)
    for wrong in (layer.pattern(), packed.packed, None, dataclasses.astuple(packed)):
        with pytest.raises(InputError, match=f"packed is a {type(wrong).__name__}"):
            ops.packed_down(wrong, layer.down)
        with pytest.raises(InputError, match=f"packed is a {type(wrong).__name__}"):
            ops.packed_gated(**{**arguments, "packed": wrong})


def test_a_packed_matrix_of_another_width_or_height(draw):
    layer, _, arguments = packed_arguments(draw)
    with pytest.raises(InputError, match="down has shape"):
        ops.packed_down(ops.pack(torch.ones(4, 39)), layer.down)
    with pytest.raises(InputError, match="x has shape"):
        ops.packed_gated(**{**arguments, "packed": ops.pack(torch.ones(3, 40))})


def test_the_errors_are_what_callers_expect():
    with pytest.raises(ValueError):
        ops.pack(None)
    assert issubclass(InputError, TwellError)

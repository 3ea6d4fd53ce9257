"""The operators as guests in torch: autograd, torch.compile, autocast, inference mode, opcheck."""

import shutil

import numpy
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import twell_lab as tl
from twell_lab import ops
from twell_lab.core import InputError
from twell_lab.ops import accuracy, copies


def operator(layer):
    """(the torch operator of the layer, its arguments in order)."""
    down_t = layer.down.detach().t().contiguous()
    if layer.gate is None:
        arguments = layer.x, layer.up, layer.down, down_t, layer.up_bias, layer.down_bias, 16, 4
        return torch.ops.twell_lab.plain_ffn.default, arguments
    weights = layer.gate, layer.up, layer.down, down_t
    return torch.ops.twell_lab.gated_ffn.default, (
        layer.x,
        *weights,
        layer.gate_bias,
        layer.up_bias,
        layer.down_bias,
        16,
        4,
    )


def leaves(layer, only=None):
    """The layer with gradients wanted for every tensor, or only for the named ones."""
    return layer.replace(
        **{
            name: t.clone().requires_grad_(only is None or name in only)
            for name, t in vars(layer).items()
            if t is not None
        }
    )


def gradients(layer, function, dy):
    function(layer).backward(dy)
    return {name: t.grad for name, t in vars(layer).items() if t is not None and t.grad is not None}


# ---- autograd ----


@pytest.mark.parametrize("biases", ["", "gud"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_gradients_are_as_exact_as_the_dense_layers(path, gated, dtype, biases, tokens, draw):
    layer = draw(tokens, 12, 40, gated=gated, dtype=dtype, biases=biases)
    layer.x[0, 1:4] = 0
    dy = torch.randn(tokens, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    sparse = gradients(leaves(layer), lambda one: one.sparse(), dy)
    dense = gradients(leaves(layer), lambda one: one.dense(), dy)
    wide = layer.replace(**{name: t.double() for name, t in vars(layer).items() if t is not None})
    exact = gradients(leaves(wide), lambda one: one.dense(), dy.double())
    assert sparse.keys() == dense.keys() == exact.keys() and len(exact) == 1 + len(layer.weights)
    for name, gradient in sparse.items():
        assert gradient.dtype == dtype and gradient.shape == exact[name].shape
        # As one row: a gradient's rows sum different numbers of terms, and some of them none.
        one = [g.reshape(1, -1) for g in (gradient, dense[name], exact[name])]
        assert accuracy.worst_row(*one)[0] <= 1.0, name


@pytest.mark.parametrize("only", ["x", "up", "down", "gate", "up_bias", "down_bias"])
def test_gradients_only_where_they_are_wanted(path, only, draw):
    layer = draw(biases="gud")
    dy = torch.ones(5, 12)
    sparse = gradients(leaves(layer, [only]), lambda one: one.sparse(), dy)
    dense = gradients(leaves(layer, [only]), lambda one: one.dense(), dy)
    assert sparse.keys() == {only}
    assert torch.allclose(sparse[only], dense[only], rtol=1e-4, atol=1e-4)


def test_a_gate_of_zero_has_no_slope(path, gated, draw):
    layer = leaves(draw(3, gated=gated))
    with torch.no_grad():
        layer.x[1] = 0
    gradients(layer, lambda one: one.sparse(), torch.ones(3, 12))
    assert not layer.x.grad[1].any() and layer.x.grad[[0, 2]].any(dim=1).all()


def test_no_tokens_have_gradients_of_zero(path, gated, draw):
    layer = leaves(draw(0, gated=gated, biases="gud"))
    layer.sparse().sum().backward()
    assert layer.x.grad.shape == (0, 12)
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in layer.weights.values())


def test_gradients_through_leading_dimensions_and_strides(path, gated, draw):
    layer = draw(6, gated=gated)
    x = layer.x.view(2, 3, 12).transpose(0, 1).detach().requires_grad_()
    layer.replace(x=x).sparse().sum().backward()
    flat = layer.x.clone().requires_grad_()
    layer.replace(x=flat).sparse().sum().backward()
    assert torch.allclose(x.grad.transpose(0, 1).reshape(6, 12), flat.grad, rtol=1e-5, atol=1e-5)


def test_second_derivatives(gated, draw):
    layer = draw(3, gated=gated, biases="gud")

    def twice(function):
        one = leaves(layer)
        (dx,) = torch.autograd.grad(function(one).square().sum(), one.x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [one.x, one.up, one.down])

    for sparse, dense in zip(twice(lambda one: one.sparse()), twice(lambda one: one.dense())):
        assert torch.allclose(sparse, dense, rtol=1e-3, atol=1e-3 * dense.abs().max().item())


def test_a_given_transpose_gets_no_gradient(draw):
    layer = leaves(draw())
    down_t = layer.down.detach().t().contiguous().requires_grad_()
    layer.sparse(down_t=down_t).sum().backward()
    assert down_t.grad is None and layer.down.grad is not None


def test_packed_operators_refuse_to_be_differentiated(draw):
    layer = draw()
    packed, up, down = ops.pack(layer.pattern()), layer.up.requires_grad_(), layer.down.requires_grad_()
    for y in (ops.packed_gated(layer.x, packed, up, down), ops.packed_down(packed, down)):
        with pytest.raises(InputError, match="no gradient"):
            y.sum().backward()


# ---- torch.library ----


@pytest.mark.parametrize("wanted", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("biases", ["", "gud"])
def test_opcheck_of_the_layers(gated, dtype, biases, wanted, draw):
    layer = draw(5, gated=gated, dtype=dtype, biases=biases)
    opcheck(*operator(leaves(layer) if wanted else layer))


def test_opcheck_of_the_layers_with_columns_in_rows(gated, draw):
    """y is contiguous whatever strides x has, and its fake implementation says so too."""
    layer = draw(5, gated=gated)
    layer.x = layer.x.t().contiguous().t()
    opcheck(*operator(layer))


@pytest.mark.parametrize("path", ["dense", "twell"])
@pytest.mark.parametrize("learned", [False, True])
def test_compiled_with_columns_in_rows(path, learned, draw):
    layer = draw(5, gated=True)
    x, weights = layer.x.t().contiguous().t(), (layer.gate, layer.up, layer.down)

    def call(x):
        return tl.train_ffn(x, *weights, path=path)[0] if learned else ops.infer(x, *weights, path=path)

    torch._dynamo.reset()
    with torch.set_grad_enabled(learned):
        weights[0].requires_grad_(learned)
        torch.testing.assert_close(torch.compile(call, fullgraph=True)(x), call(x))


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_opcheck_of_the_packing(dtype, tokens, draw):
    layer = draw(tokens, dtype=dtype)
    gate = layer.pattern()
    packed = ops.pack(gate, 16, 4)
    opcheck(torch.ops.twell_lab.pack.default, (gate, 16, 4))
    tail, down_t = (packed.tail_pointer, packed.tail_column, packed.tail_value), layer.down.t().contiguous()
    opcheck(torch.ops.twell_lab.packed_down.default, (packed.packed, *tail, down_t, None, 16))
    opcheck(torch.ops.twell_lab.packed_gated.default, (layer.x, packed.packed, *tail, layer.up, down_t, None, None, 16))


@pytest.mark.parametrize("how", [copies.TRANSPOSED, copies.ROWS, copies.ROWS_OF_TRANSPOSE])
@pytest.mark.parametrize("changing", [False, True])
def test_opcheck_of_the_refreshed_copies(how, changing):
    weight, order = torch.randn(5, 5), torch.tensor([2, 0, 1, 4, 3])
    opcheck(
        torch.ops.twell_lab.refresh_copies.default,
        ([weight], [torch.randn(5, 5)], [how], order, [torch.randn(3)], "w beside", changing, False),
    )


def transposed(weight, copy, **beside):
    copies.refresh({"down": weight}, [copy], [copies.TRANSPOSED], beside=beside)


def frozen(t):
    return nn.Parameter(t, requires_grad=False)


def test_a_refreshed_copy_follows_version_and_place():
    weight, down_t = frozen(torch.randn(3, 5)), torch.full((5, 3), torch.nan)
    transposed(weight, down_t)
    assert torch.equal(down_t, weight.t())
    down_t[0, 0] = 7
    transposed(weight, down_t)
    assert down_t[0, 0] == 7  # nothing changed, so nothing was copied
    weight[0, 0] = 8
    transposed(weight, down_t)
    assert torch.equal(down_t, weight.t())
    other = frozen(weight + 1)
    transposed(other, down_t)
    assert torch.equal(down_t, other.t())
    copies.forget(down_t)
    down_t.zero_()
    transposed(other, down_t)
    assert torch.equal(down_t, other.t())


def test_another_weight_at_the_same_address_is_told_apart():
    buffer, down_t = bytearray(4 * 4 * 4), torch.empty(4, 4)
    for value in range(3):  # three storages over one piece of memory, each at version 0
        numpy.frombuffer(buffer, dtype=numpy.float32)[:] = value
        weight = frozen(torch.frombuffer(buffer, dtype=torch.float32).view(4, 4))
        transposed(weight, down_t)
        assert (down_t == value).all()


def test_other_strides_over_the_same_memory_are_told_apart():
    weight, down_t = frozen(torch.randn(4, 4)), torch.empty(4, 4)
    for _ in range(2):
        transposed(weight, down_t)
        assert torch.equal(down_t, weight.t())
        weight.data = weight.data.t()


def test_what_is_not_finite_is_named_outside_of_training():
    down, up, down_t = frozen(torch.ones(3, 5)), frozen(torch.ones(5, 3)), torch.empty(5, 3)
    transposed(down, down_t, up=up)
    up[4, 1] = torch.inf
    for _ in range(2):
        with pytest.raises(InputError, match=r"up has 1 values that are not finite, the first at \[4, 1\]: inf"):
            transposed(down, down_t, up=up)
    up[4, 1], down[2, 2] = 1, torch.nan
    with pytest.raises(InputError, match=r"down has 1 values that are not finite, the first at \[2, 2\]: nan"):
        transposed(down, down_t, up=up)
    transposed(down.requires_grad_(), down_t, up=up)  # in training the loss and LayerTerms.finite tell
    assert down_t[2, 2].isnan()
    with pytest.raises(InputError, match="down has 1 values"), torch.no_grad():
        transposed(down, down_t, up=up)  # though the copy is up to date


# ---- torch.compile ----


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(layer, backend):
    names = list(layer.weights)

    def function(x, *weights):
        return 2 * layer.replace(x=x, **dict(zip(names, weights))).sparse() + 1

    run = torch.compile(function, fullgraph=True, backend=backend)
    return lambda x: run(x, *layer.weights.values())


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_forward_and_backward_for_any_number_of_tokens(path, gated, draw):
    layer = leaves(draw(4, gated=gated, biases="gud"))
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(layer, counter)
    for tokens in (4, 9, 2, 57):
        one = draw(tokens, gated=gated, seed=tokens)
        x, same = one.x.clone().requires_grad_(), one.x.clone().requires_grad_()
        y = run(x)
        y.square().sum().backward()
        plain = 2 * layer.replace(x=same).sparse() + 1
        plain.square().sum().backward()
        assert torch.equal(y, plain) and torch.allclose(x.grad, same.grad, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2  # one graph for the first size, one for any other


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(draw):
    layer = leaves(draw(4, biases="gud"))
    x, same = draw(4).x.requires_grad_(), draw(4).x.requires_grad_()
    try:
        y = compiled(layer, "inductor")(x)
    except torch._inductor.exc.CppCompileError as error:
        pytest.skip(f"inductor's C++ compiler does not work here: {str(error).splitlines()[0]}")
    y.square().sum().backward()
    plain = 2 * layer.replace(x=same).sparse() + 1
    plain.square().sum().backward()
    assert torch.allclose(y, plain, rtol=1e-5, atol=1e-5)
    assert torch.allclose(x.grad, same.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_bad_input_is_refused_while_compiling_too(draw):
    layer = draw()
    run = compiled(layer, "eager")
    with pytest.raises(Exception, match="x is torch.float64|the input is torch.float64"):
        run(layer.x.double())


# ---- modes ----


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast_casts_like_linear(path, gated, to, draw):
    layer = draw(5, gated=gated, biases="gud")
    cast = layer.replace(**{name: t.to(to) for name, t in vars(layer).items() if t is not None})
    with torch.autocast("cpu", to):
        y = layer.sparse()
        assert y.dtype == layer.dense().dtype == to
    assert torch.equal(y, cast.sparse())


def test_gradients_under_autocast_reach_the_float32_weights(path, gated, draw):
    layer = leaves(draw(5, gated=gated, biases="gud"))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer.sparse()
    y.float().sum().backward()
    for name, t in {"x": layer.x, **layer.weights}.items():
        assert t.grad is not None and t.grad.dtype == torch.float32, name


def test_packed_operators_keep_their_dtype_under_autocast(path, draw):
    layer = draw(5)
    packed = ops.pack(layer.pattern())
    expected = ops.packed_gated(layer.x, packed, layer.up, layer.down), ops.packed_down(packed, layer.down)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.packed_gated(layer.x, packed, layer.up, layer.down), ops.packed_down(packed, layer.down)
    for one, other in zip(found, expected):
        assert one.dtype == torch.float32 and torch.equal(one, other)


def test_inference_mode(path, gated, draw):
    layer = draw(5, gated=gated, biases="gud")
    expected = layer.sparse()
    with torch.inference_mode():
        inside = layer.sparse()
        also = layer.replace(x=layer.x.clone()).sparse()
    assert inside.is_inference() and torch.equal(inside, expected) and torch.equal(also, expected)
    with torch.no_grad():
        assert not leaves(layer).sparse().requires_grad


def test_deterministic_algorithms_are_what_runs_anyway(path, gated, draw):
    layer = leaves(draw(5, gated=gated))
    expected = layer.sparse()
    torch.use_deterministic_algorithms(True)
    try:
        y = layer.sparse()
        y.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(y, expected)

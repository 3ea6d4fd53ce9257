"""The training operator on the CPU: gradients of y and of L1, on both paths, inside torch."""

import pytest
import torch
from torch.library import opcheck
from torch.nn.functional import linear

from twell_lab.core import InputError
from twell_lab.ops import train

TOKENS, D_MODEL, D_FF = 5, 6, 11


def layer(gated=True, biased=True, dtype=torch.float64, seed=0):
    """[x, gate, up, down, gate_bias, up_bias, down_bias], leaves; None where there is none."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    x, gate, up, down = draw(TOKENS, D_MODEL), draw(D_FF, D_MODEL), draw(D_FF, D_MODEL), draw(D_MODEL, D_FF)
    biases = [draw(D_FF), draw(D_FF), draw(D_MODEL)] if biased else [None] * 3
    if not gated:
        gate, biases[0] = None, None
    return [x, gate, up, down, *biases]


def dense(x, gate, up, down, gate_bias, up_bias, down_bias):
    first = torch.relu(linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias))
    h = first if gate is None else first * linear(x, up, up_bias)
    return linear(h, down, down_bias), h.abs().sum(-1), (h != 0).sum(-1)


def leaves_of(made):
    return [t for t in made if t is not None]


def gradients(function, made, weight):
    """Gradients of a loss to which y and each token's L1 contribute with different weights."""
    y, l1, kept = function(*made)
    loss = (y * torch.arange(1, y.numel() + 1).view_as(y).to(y) / y.numel()).sum() + weight * (
        l1 * torch.arange(1, l1.numel() + 1)
    ).sum()
    return torch.autograd.grad(loss, leaves_of(made)), kept


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("operator", ["twell", "dense"])
def test_gradcheck(gated, biased, operator):
    made = layer(gated, biased)

    def outputs(*leaves):
        given = iter(leaves)
        return torch.ops.twell_lab.train(*(None if t is None else next(given) for t in made), operator)[:2]

    assert torch.autograd.gradcheck(outputs, tuple(leaves_of(made)))


@pytest.mark.parametrize("path", train.PATHS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_as_torch_differentiates_the_dense_layer(path, gated, weight):
    made = layer(gated, dtype=torch.float32)
    found, kept = gradients(lambda *a: train.train_ffn(*a, path=path), made, weight)
    expected, fired = gradients(dense, made, weight)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert torch.equal(kept, fired.int())


@pytest.mark.parametrize("path", train.PATHS)
def test_only_one_of_the_outputs_used(path):
    made = layer(dtype=torch.float32)
    for pick in (lambda y, l1: y.sum(), lambda y, l1: l1.sum()):
        found = torch.autograd.grad(
            pick(*train.train_ffn(*made, path=path)[:2]), leaves_of(made), allow_unused=True
        )
        expected = torch.autograd.grad(pick(*dense(*made)[:2]), leaves_of(made), allow_unused=True)
        for a, b in zip(found, expected):
            zero = torch.zeros(())
            torch.testing.assert_close(
                zero if a is None else a,
                torch.zeros_like(a) if b is None and a is not None else zero if b is None else b,
                rtol=1e-4,
                atol=1e-4,
            )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_opcheck(gated, biased):
    opcheck(torch.ops.twell_lab.train.default, (*layer(gated, biased, torch.float32), "twell"))
    opcheck(torch.ops.twell_lab.train.default, (*layer(gated, biased, torch.float32), "dense"))


@pytest.mark.parametrize("path", train.PATHS)
def test_compiled_whole(path):
    made = layer(dtype=torch.float32)
    compiled = torch.compile(lambda *a: train.train_ffn(*a, path=path), fullgraph=True)
    found, _ = gradients(compiled, made, 0.3)
    for a, b in zip(found, gradients(dense, made, 0.3)[0]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", train.PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(path, dtype):
    made = layer(biased=False, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y, l1, _ = train.train_ffn(*made, path=path)
    assert y.dtype == torch.bfloat16 and l1.dtype == torch.float32
    (y.float().sum() + l1.sum()).backward()
    exact = layer(biased=False)
    (lambda y, l1, _: y.sum() + l1.sum())(*dense(*exact)).backward()
    for a, b in zip(leaves_of(made), leaves_of(exact)):
        assert a.grad.dtype == dtype
        assert (a.grad - b.grad).norm() <= 0.05 * b.grad.norm()


def test_leading_dimensions():
    x, *weights = layer(dtype=torch.float32)
    y, l1, kept = train.train_ffn(x.view(1, TOKENS, D_MODEL), *weights)
    assert y.shape == (1, TOKENS, D_MODEL) and l1.shape == kept.shape == (1, TOKENS)
    assert l1.dtype == torch.float32 and kept.dtype == torch.int32 and not kept.requires_grad


def test_nothing_fires_and_nan_as_torch():
    x, gate, up, down, *_ = layer(biased=False, dtype=torch.float32)
    y, l1, kept = train.train_ffn(x, torch.zeros_like(gate).requires_grad_(), up, down)
    assert not y.any() and not l1.any() and not kept.any()
    bad = x.detach().clone()
    bad[2, 1] = torch.nan
    y = train.train_ffn(bad, gate, up, down)[0]
    assert torch.equal(y.isnan().any(1), torch.tensor([False, False, True, False, False]))


def test_wrong_arguments_are_named():
    x, gate, up, down, *_ = layer(dtype=torch.float32)
    with pytest.raises(InputError, match="path is 'sparse'; 'dense', 'twell' are accepted"):
        train.train_ffn(x, gate, up, down, path="sparse")
    with pytest.raises(InputError, match="down has shape"):
        train.train_ffn(x, gate, up, down[:, 1:])
    with pytest.raises(InputError, match="one dtype"):
        train.train_ffn(x, gate.bfloat16(), up, down)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_what_the_dense_layer_gives(value):
    g = torch.Generator().manual_seed(0)
    x, gate, up, down = (torch.randn(*shape, generator=g) for shape in ((4, 8), (30, 8), (30, 8), (8, 30)))
    x[1, 3] = value
    for path in train.PATHS:
        y, l1, _ = train.train_ffn(x, gate, up, down, path=path)
        assert y[1].isnan().all() and l1[1].isnan() and y[[0, 2, 3]].isfinite().all() and l1[[0, 2, 3]].isfinite().all()

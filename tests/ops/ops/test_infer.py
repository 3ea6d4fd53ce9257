"""ops.infer: the three paths compute one function, refuse what does not fit, and work inside torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab import formats, ops
from twell_lab.core import InputError
from twell_lab.ops import accuracy, reference

PATHS = [("dense", 0), ("twell", 0), ("hot_cold", 256), ("hot_cold", 512)]


def layer(seed, tokens=9, d_model=64, d_ff=640, dtype=torch.float32, gated=True, biased=False, shift=1.0):
    """Random x and weights: (x, gate, up, down, gate_bias, up_bias, down_bias). shift makes neurons fire less."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    x, gate, up, down = (
        normal(tokens, d_model),
        normal(d_ff, d_model) / 8,
        normal(d_ff, d_model) / 8,
        normal(d_model, d_ff) / 8,
    )
    biases = [normal(d_ff) - shift, normal(d_ff) - (0 if gated else shift), normal(d_model)] if biased else [None] * 3
    if not gated:
        gate, biases[0] = None, None
    return [None if t is None else t.to(dtype) for t in (x, gate, up, down, *biases)]


def exact(x, gate, up, down, gate_bias, up_bias, down_bias):
    """In float64, from the same rounded input of the ReLU on."""
    first = torch.nn.functional.linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias).double()
    wide = lambda t: None if t is None else t.double()  # noqa: E731
    if gate is None:
        return torch.nn.functional.linear(reference.relu(first), wide(down), wide(down_bias))
    return reference.gated(x.double(), first, *map(wide, (up, down, up_bias, down_bias)))


def dense(x, gate, up, down, gate_bias, up_bias, down_bias):
    linear = torch.nn.functional.linear
    if gate is None:
        return linear(torch.relu(linear(x, up, up_bias)), down, down_bias)
    return linear(torch.relu(linear(x, gate, gate_bias)) * linear(x, up, up_bias), down, down_bias)


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 20), biased=st.booleans())
def test_every_path_keeps_the_promise(path, hot, dtype, gated, seed, tokens, biased):
    tensors = layer(seed, tokens, dtype=dtype, gated=gated, biased=biased)
    y = ops.infer(*tensors, path=path, hot=hot)
    ratio, row = accuracy.worst_row(y, dense(*tensors), exact(*tensors))
    assert ratio <= 1.0, (ratio, row)


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_give_what_dense_gives(path, hot, bad):
    tensors = layer(3)
    tensors[0][4, 7] = bad
    y, want = ops.infer(*tensors, path=path, hot=hot), dense(*tensors)
    assert torch.equal(y.isnan(), want.isnan()) and y[4].isnan().all() and y[5].isfinite().all()


def test_stats_count_the_packed_neurons():
    tensors = layer(5)
    stats = torch.tensor([10, 20, 0, 0])
    ops.infer(*tensors, path="twell", stats=stats)
    fired = formats.fires(tensors[0] @ tensors[1].t())
    assert stats.tolist() == [19, 20 + int(fired.sum()), 0, 0]
    ops.infer(*tensors, path="hot_cold", hot=256, stats=stats)
    assert stats.tolist() == [28, 20 + int(fired.sum()) + int(fired[:, 256:].sum()), 0, 0]


@pytest.mark.parametrize("path, hot", PATHS)
def test_inside_torch(path, hot):
    tensors = layer(7)
    stats = torch.zeros(4, dtype=torch.int64)
    plain = ops.infer(*tensors, path=path, hot=hot)
    with torch.inference_mode():
        assert torch.equal(ops.infer(*tensors, path=path, hot=hot), plain)
    compiled = torch.compile(
        lambda *t: ops.infer(*t, path=path, hot=hot, stats=stats) + 1, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(*tensors), plain + 1)
    assert int(stats[0]) == (9 if path != "dense" else 0)
    unseen = torch.compile(
        lambda *t: ops.infer(*t, path=path, hot=hot) + 1, fullgraph=True
    )  # inductor, nothing counted
    torch.testing.assert_close(unseen(*tensors), plain + 1)
    with torch.autocast("cpu", torch.bfloat16):
        cast = ops.infer(*tensors, path=path, hot=hot)
    assert cast.dtype == torch.bfloat16
    assert torch.equal(ops.infer(tensors[0].view(3, 3, 64), *tensors[1:], path=path, hot=hot).view(9, 64), plain)
    assert ops.infer(tensors[0][:0], *tensors[1:], path=path, hot=hot).shape == (0, 64)


@pytest.mark.parametrize("path, hot", PATHS)
def test_opcheck(path, hot):
    x, gate, up, down, *biases = layer(7)
    weights, how = (x, gate, up, down, down.t().contiguous(), *biases), (path, hot, 256, 32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.twell_lab.infer.default, (*weights, *how), test_utils=tests)
    counted = (*weights, torch.zeros(4, dtype=torch.int64), *how)
    torch.library.opcheck(torch.ops.twell_lab.infer_counted.default, counted, test_utils=tests)


def test_refusals():
    tensors = layer(1)
    for bad, words in [
        (dict(path="warm"), "path is 'warm'"),
        (dict(path="twell", hot=256), "hot is 256 on path 'twell'"),
        (dict(path="hot_cold", hot="256"), "hot is '256'"),
        (dict(path="hot_cold"), "hot is 0 of 640"),
        (dict(path="hot_cold", hot=100), "hot is 100"),
        (dict(path="hot_cold", hot=768), "hot is 768 of 640"),
        (dict(stats=torch.zeros(4)), "stats is torch.float32"),
        (dict(stats=torch.zeros(4, 2, dtype=torch.int64)[:, 0]), r"stats has strides \(2,\)"),
        (dict(stats=torch.zeros(3, dtype=torch.int64)), r"\[3\]"),
        (dict(stats=3), "stats is int"),
    ]:
        with pytest.raises(InputError, match=words):
            ops.infer(*tensors, **bad)
    tensors[2].requires_grad_()
    with pytest.raises(InputError, match="no gradient"):
        ops.infer(*tensors)
    with torch.no_grad():
        ops.infer(*tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cold_fires", [1, 256])
def test_hot_and_cold_parts_that_cancel_are_rounded_together(dtype, cold_fires):
    """Each part alone overflows float16, and if one were rounded, its rounding error would remain."""
    up, down = torch.zeros(512, 1), torch.zeros(1, 512)
    up[0], down[0, 0] = 256.0, -512.0
    up[256 : 256 + cold_fires], down[0, 256 : 256 + cold_fires] = 256.0, 512.0 / cold_fires
    x, bias = torch.ones(3, 1), torch.tensor([0.3125])
    made = [None if t is None else t.to(dtype) for t in (x, None, up, down, None, None, bias)]
    y = ops.infer(*made, path="hot_cold", hot=256)
    assert torch.equal(y, torch.full_like(y, 0.3125))

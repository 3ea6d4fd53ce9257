"""ops.infer on a GPU: every path, at the shapes of the course's tables, with patterns made to break it, inside
torch."""

import threading

import pytest
import torch
from torch.nn.functional import linear

from twell_lab import formats, ops
from twell_lab.ops import accuracy, reference

from .drawn import tensors

pytestmark = pytest.mark.gpu
PATHS = [("dense", 0), ("twell", 0), ("hot_cold", 256)]
SHAPES = [
    (2048, 5632, True),
    (768, 3072, True),
    (1024, 4096, False),
    (2048, 8192, False),
    (3584, 18944, True),
    (4096, 14336, True),
    (5120, 13824, True),
]


def dense_of(x, gate, up, down, gate_bias, up_bias, down_bias):
    first = torch.relu(linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias))
    return linear(first if gate is None else first * linear(x, up, up_bias), down, down_bias)


def exact_of(x, gate, up, down, gate_bias, up_bias, down_bias):
    """float64 from the gate that torch rounds."""
    wide = lambda t: None if t is None else t.double()  # noqa: E731
    first = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias).double()
    if gate is None:
        return linear(reference.relu(first), wide(down), wide(down_bias))
    return reference.gated(x.double(), first, *map(wide, (up, down, up_bias, down_bias)))


@torch.no_grad()
def keeps(made, path, hot, rows=200, down_t=True):
    """Whether `rows` rows, the first and last among them, keep the promise, and two runs give the same bits."""
    y = ops.infer(*made, path=path, hot=hot, down_t=made[3].t().contiguous())
    assert torch.equal(
        y.view(torch.int16) if y.element_size() == 2 else y.view(torch.int32),
        ops.infer(*made, path=path, hot=hot).view(torch.int16 if y.element_size() == 2 else torch.int32),
    )
    picked = torch.linspace(0, len(y) - 1, min(rows, len(y)), device="cuda").long()
    dense = dense_of(*made)
    ratio, row = accuracy.worst_row(y[picked], dense[picked], exact_of(made[0][picked], *made[1:]))
    assert ratio <= 1.0, (ratio, int(picked[row]))
    finite = dense.isfinite().all(1)
    assert torch.equal(y.isfinite().all(1), finite)  # and every row is about right
    off = (y[finite].float() - dense[finite].float()).norm(dim=1) / dense[finite].float().norm(dim=1).clamp(min=1.0)
    assert off.max() < 0.05
    return y


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("d_model, d_ff, gated", SHAPES)
@pytest.mark.parametrize("tokens", [1, 64, 600, 2100])
def test_shapes(d_model, d_ff, gated, tokens, path, hot):
    keeps(tensors(tokens, d_model, d_ff, gated), path, hot)


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 65, 300, 1100, 2049])
def test_dtypes_biases_and_token_counts(tokens, biased, gated, dtype, path, hot):
    keeps(tensors(tokens, dtype=dtype, gated=gated, biased=biased, seed=tokens), path, hot)


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("d_model, d_ff", [(64, 264), (200, 777), (100, 300), (8, 513)])
@pytest.mark.parametrize("tokens", [5, 700, 2050])
def test_widths_that_some_kernels_do_not_take(d_model, d_ff, tokens, path, hot):
    keeps(tensors(tokens, d_model, d_ff), path, hot)


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [40, 1000, 2100])
def test_overflow(tokens, gated, path, hot):
    """Tiles of 32, 40, 64 and 256, groups of 16 rows that exceed the pool, rows that fire everything or nothing."""
    made = tensors(tokens, gated=gated, d_ff=1536)
    x, first = made[0], made[2 if made[1] is None else 1]
    for feature, (start, many) in enumerate([(0, 32), (300, 40), (512, 64), (1280, 256)], start=1):
        x[:, feature] = 0
        x[feature :: 2 * feature + 5, feature] = 16.0
        first[start : start + many, feature] = 1.0
    x[16:32, 2] = 16.0  # 16 x 9 or more beyond the 31 of a tile: the pool holds 64
    x[3], x[4] = 0, 0
    x[3, 0], x[4, 0] = -8.0, 8.0  # everything fires; nothing does
    counts = ops.pack(linear(x, first)).counts
    assert int(counts[3].sum()) == 1536 and int(counts[4].sum()) == 0 and int((counts > 31).sum()) > 20
    y = keeps(made, path, hot, rows=tokens)
    alone = [torch.cat([x[17:18]] * tokens), *made[1:]]  # what other rows overflow is no business of a row
    if path == "dense" or tokens <= 64:
        assert (ops.infer(*alone, path=path, hot=hot)[0].float() - y[17].float()).norm() <= 0.01 * y[17].float().norm()


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [20, 800, 2060])
def test_rows_that_are_not_finite(tokens, gated, path, hot):
    made = tensors(tokens, gated=gated)
    for row, value in [(0, torch.nan), (7, torch.inf), (15, -torch.inf), (tokens - 1, torch.nan)]:
        made[0][row, 3] = value
    keeps(made, path, hot, rows=tokens)


@pytest.mark.parametrize("path, hot", PATHS[1:])
def test_stats(path, hot):
    for tokens in (30, 700, 2100):
        made = tensors(tokens)
        stats = torch.tensor([5, 5, 5, 5], device="cuda")
        made[0][1, 0] = -8.0  # fires everything: recomputed, where there is a pool
        ops.infer(*made, path=path, hot=hot, stats=stats)
        kept = int(formats.fires(linear(made[0], made[1]))[:, hot:].sum())
        seen, entries, pooled, lost = (stats - 5).tolist()
        if tokens == 2100 or tokens == 30 and not hot:  # others are not counted: it would cost launches
            assert seen == tokens and abs(entries - kept) <= 3 and 0 <= lost <= 1 and 0 <= pooled <= 16


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("tokens", [8, 2100])
def test_nothing_waits_graphs_and_streams(tokens, path, hot):
    made = tensors(tokens, 256, 1024)
    made[0][2, 0] = -8.0
    down_t, stats = made[3].t().contiguous(), torch.zeros(4, dtype=torch.int64, device="cuda")
    call = lambda x: ops.infer(x, *made[1:], path=path, hot=hot, down_t=down_t, stats=stats)  # noqa: E731
    expected = call(made[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(made[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        y = call(made[0] + 0)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(y, expected)
    x = made[0].clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = call(x)
    for seed in (5, 6):
        x.copy_(tensors(tokens, 256, 1024, seed=seed)[0])
        graph.replay()
        assert torch.equal(y, call(x))


@pytest.mark.parametrize("path, hot", PATHS)
def test_inside_compile_autocast_and_deterministic_mode(path, hot):
    made = tensors(2100, 256, 1024)
    stats = torch.zeros(4, dtype=torch.int64, device="cuda")
    expected = ops.infer(*made, path=path, hot=hot)
    compiled = torch.compile(lambda *t: ops.infer(*t, path=path, hot=hot, stats=stats) * 2, fullgraph=True)
    assert torch.equal(compiled(*made), expected * 2)
    with torch.inference_mode():
        assert torch.equal(ops.infer(*made, path=path, hot=hot), expected)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(ops.infer(*made, path=path, hot=hot), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    wide = [None if t is None else t.float() for t in made]
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(ops.infer(*wide, path=path, hot=hot), expected)


def test_two_layers_in_two_threads():
    made = [tensors(2100, seed=1), tensors(2500, 512, 2048, seed=2)]
    expected = [ops.infer(*m) for m in made]
    torch.cuda.synchronize()
    wrong = []

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(ops.infer(*made[i]), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_from_the_first():
    for tokens in (4, 2100):
        made = tensors(tokens)
        there = [None if t is None else t.to("cuda:1") for t in made]
        assert torch.equal(ops.infer(*there).cpu(), ops.infer(*made).cpu())


def test_more_tokens_than_one_pass():
    """Beyond 32,768 tokens a call is cut in pieces, rows of the last one included."""
    made = tensors(32768 + 700, 64, 512)
    keeps(made, "twell", 0)
    keeps(made, "hot_cold", 256)


@pytest.mark.parametrize("path, hot", PATHS)
@pytest.mark.parametrize("tokens", [5, 300, 2100])
def test_biases_and_transposes_that_lie_anywhere(tokens, path, hot):
    """Strided biases, and what starts off a 16-byte boundary: the same bits as from copies that do not."""
    made = tensors(tokens, biased=True)
    expected = ops.infer(*made, path=path, hot=hot)
    strided = [torch.stack([b, b + 1], 1)[:, 0] for b in made[4:6]]
    odd = torch.cat([made[6][:1], made[6]])[1:]
    down_t = (
        torch.empty(made[3].numel() + 1, dtype=made[3].dtype, device="cuda")[1:]
        .view(made[3].t().shape)
        .copy_(made[3].t())
    )
    assert torch.equal(ops.infer(*made[:4], *strided, odd, down_t=down_t, path=path, hot=hot), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [3, 300, 600])
@pytest.mark.parametrize("cold_fires", [1, 256])
def test_hot_and_cold_parts_that_cancel_are_rounded_together(cold_fires, tokens, dtype):
    """Each part alone is past the end of float16, and a rounded one would leave its rounding."""
    up, down = torch.zeros(512, 64), torch.zeros(64, 512)
    up[0, 0], down[:, 0] = 256.0, -512.0
    up[256 : 256 + cold_fires, 0], down[:, 256 : 256 + cold_fires] = 256.0, 512.0 / cold_fires
    x, bias = torch.ones(tokens, 64), torch.full((64,), 0.3125)
    made = [None if t is None else t.to("cuda", dtype) for t in (x, None, up, down, None, None, bias)]
    y = ops.infer(*made, path="hot_cold", hot=256)
    assert torch.equal(y, torch.full_like(y, 0.3125))

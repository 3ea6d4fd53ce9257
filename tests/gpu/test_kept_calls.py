"""Calls that were prepared: after weights were replaced, moved, cast, changed or resized, from threads, on streams, in
graphs, for any number of tokens, and beyond what is kept. Each beside a call that nothing was prepared for."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from twell_lab import ops
from twell_lab.ops import differentiable, dispatch
from twell_lab.ops.kept import Kept

from .drawn import tensors
from .test_infer import keeps

pytestmark = pytest.mark.gpu
D_MODEL, D_FF = 512, 2048
WAYS = [
    (path, hot, tokens) for path, hot in (("twell", 0), ("hot_cold", 512), ("dense", 0)) for tokens in (1, 200, 3000)
]
WAYS += [("twell", 0, 40), ("twell", 0, 17_000), ("hot_cold", 512, 17_000)]  # lost rows in two chunks
WAYS += [("twell", 0, 70_000)]  # three passes


@pytest.fixture(autouse=True)
def nothing_kept():
    dispatch.calls.clear()
    yield
    dispatch.calls.clear()


def drawn(tokens, seed=0, **more):
    return tensors(tokens, D_MODEL, D_FF, biased=True, seed=seed, **more)


@torch.no_grad()
def infer(made, path, hot, **more):
    return ops.infer(*made, path=path, hot=hot, down_t=made[3].t().contiguous(), **more)


def anew(made, path, hot):
    """The result of a call that nothing was prepared for."""
    kept, dispatch.calls = dispatch.calls, Kept()
    try:
        return infer([None if t is None else t.clone() for t in made], path, hot)
    finally:
        dispatch.calls = kept


def same(y, z):
    return torch.equal(y.view(torch.int16), z.view(torch.int16))


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_again_and_again_and_right(path, hot, tokens, gated):
    made = drawn(tokens, gated=gated)
    down_t = made[3].t().contiguous()
    first = ops.infer(*made, path=path, hot=hot, down_t=down_t)
    for _ in range(3):
        assert same(ops.infer(*made, path=path, hot=hot, down_t=down_t), first)
    deep = ops.infer(made[0].view(1, tokens, 1, -1), *made[1:], path=path, hot=hot, down_t=down_t)
    assert same(deep.view(first.shape), first) and same(first, anew(made, path, hot))
    keeps(made, path, hot)


@torch.no_grad()
@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_after_weights_were_replaced_moved_cast_and_changed(path, hot, tokens):
    made = drawn(tokens)
    down_t = made[3].t().contiguous()
    call = lambda: ops.infer(*made, path=path, hot=hot, down_t=down_t)  # noqa: E731
    call(), call()
    for at in range(1, 7):  # replaced by another, the old one gone: its memory may be the new one's
        made[at] = made[at] * 0.5
        down_t = made[3].t().contiguous()
        assert same(call(), anew(made, path, hot)), at
    for at in range(1, 7):  # changed in place
        made[at].mul_(-1.5)
        down_t.copy_(made[3].t())
        assert same(call(), anew(made, path, hot)), at
    for at in range(1, 7):  # the tensor stays, its memory is another
        made[at].data = made[at].clone()
        assert same(call(), anew(made, path, hot)), at
    made = [t.cpu() for t in made]  # moved away and back
    made = [t.cuda() for t in made]
    down_t = down_t.cpu().cuda()
    assert same(call(), anew(made, path, hot))
    made, down_t = [t.half() for t in made], down_t.half()
    assert same(call(), anew(made, path, hot)) and call().dtype == torch.float16


@torch.no_grad()
@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_after_a_storage_was_resized(path, hot, tokens):
    """As sharded training does with the weights it gathers: freed, and later somewhere else."""
    made = drawn(tokens)
    expected = infer(made, path, hot)
    for _ in range(3):
        for t in made[1:4]:
            kept, size = t.clone(), t.untyped_storage().nbytes()
            t.untyped_storage().resize_(0)
            between = torch.full_like(kept, torch.nan)  # lies where t lay
            t.untyped_storage().resize_(size)
            t.copy_(kept)
            del between
        assert same(infer(made, path, hot), expected)


@torch.no_grad()
def test_memory_that_another_layer_used():
    """Of one size in bytes: d_ff halved and d_model doubled, then the other type."""
    for turn in range(4):
        for d_model, d_ff, dtype in (
            (256, 4096, torch.bfloat16),
            (512, 2048, torch.bfloat16),
            (512, 2048, torch.float16),
        ):
            for tokens in (5, 300, 2300):
                made = tensors(tokens, d_model, d_ff, dtype=dtype, seed=turn)
                assert same(infer(made, "twell", 0), anew(made, "twell", 0))
                del made


@torch.no_grad()
@pytest.mark.parametrize("path, hot", [("twell", 0), ("hot_cold", 512)])
def test_any_number_of_tokens_in_any_order(path, hot):
    counts = [*range(1, 70), 128, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049, 4223, 4224, 4225, 5000]
    counts += random.Random(0).sample(range(70, 5000), 40)
    made = drawn(5000)
    down_t = made[3].t().contiguous()
    whole = made[0]
    expected = {n: anew([whole[:n], *made[1:]], path, hot) for n in counts}
    for seed in range(3):
        random.Random(seed).shuffle(counts)
        for n in counts:
            y = ops.infer(whole[:n], *made[1:], path=path, hot=hot, down_t=down_t)
            assert same(y, expected[n]), n


@torch.no_grad()
def test_more_calls_than_are_kept(monkeypatch):
    monkeypatch.setattr(dispatch, "calls", Kept(4))
    layers = [drawn(64, seed=seed) for seed in range(6)]
    downs = [made[3].t().contiguous() for made in layers]
    expected = {(i, n): anew([made[0][:n], *made[1:]], "twell", 0) for i, made in enumerate(layers) for n in (1, 9, 64)}
    for turn in range(60):
        i, n = random.Random(turn).choice([*expected])
        made = layers[i]
        assert same(ops.infer(made[0][:n], *made[1:], down_t=downs[i]), expected[i, n])
        assert len(dispatch.calls) <= 4


@torch.no_grad()
@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_threads_and_streams_in_one_layer(path, hot, tokens):
    made = drawn(tokens)
    down_t = made[3].t().contiguous()
    inputs = [drawn(tokens, seed=seed)[0] for seed in range(4)]
    expected = [anew([x, *made[1:]], path, hot) for x in inputs]
    torch.cuda.synchronize()
    together = threading.Barrier(4)

    @torch.no_grad()
    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            together.wait()
            for _ in range(30):
                assert same(ops.infer(inputs[i], *made[1:], path=path, hot=hot, down_t=down_t), expected[i])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


@torch.no_grad()
@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_the_first_call_may_come_from_a_new_thread(path, hot, tokens):
    """Which has no context of the driver yet."""
    made = drawn(tokens)
    down_t = made[3].t().contiguous()
    torch.cuda.synchronize()
    call = lambda: ops.infer(*made, path=path, hot=hot, down_t=down_t)  # noqa: E731
    with ThreadPoolExecutor(1) as others:
        y = others.submit(torch.no_grad()(call)).result()
    assert same(y, anew(made, path, hot))


@torch.no_grad()
@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_a_graph_replayed_after_other_calls_were_prepared(path, hot, tokens):
    made = drawn(tokens)
    down_t = made[3].t().contiguous()
    call = lambda x: ops.infer(x, *made[1:], path=path, hot=hot, down_t=down_t)  # noqa: E731
    x = made[0].clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = call(x)
    for seed, others in enumerate(((1, 17, 300), (64, 2048, 2500), (7, 5000))):
        for n in others:
            other = drawn(n, seed=9)
            infer(other, path, hot)
            call(other[0])
        x.copy_(drawn(tokens, seed=20 + seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert same(y, anew([x, *made[1:]], path, hot))


@torch.no_grad()
def test_heavy_rows_find_room_in_the_one_piece_of_memory():
    """Rows that the pool loses, where h of the lost rows lies over the packed words: all of them, some, none."""
    for tokens in (2048, 4300, 17_000):
        for rate in (-3.0, 0.0, 2.3):
            made = tensors(tokens, D_MODEL, D_FF, biased=True, rate=rate)
            stats = torch.zeros(4, dtype=torch.int64, device="cuda")
            down_t = made[3].t().contiguous()
            first = ops.infer(*made, down_t=down_t, stats=stats)
            assert same(first, ops.infer(*made, down_t=down_t, stats=stats))
            assert stats[0] == 2 * tokens
            keeps(made, "twell", 0)


def training_step(made, path):
    x, *weights = (None if t is None else t.detach().requires_grad_() for t in made)
    y, l1, _ = differentiable.train_ffn(x, *weights, path=path)
    asked = [x, *(w for w in weights if w is not None)]
    return [y, *torch.autograd.grad([y.float().square().sum() + l1.sum()], asked)]


@pytest.mark.parametrize("path", ["twell", "dense"])
@pytest.mark.parametrize("gated", [True, False])
def test_training_steps_again_and_after_changes(path, gated):
    for tokens in (700, 2300, 700, 33):
        made = drawn(tokens, gated=gated)
        first = training_step(made, path)
        for _ in range(2):
            assert all(same(a, b) for a, b in zip(training_step(made, path), first))
        with torch.no_grad():
            made[2].mul_(0.5)
            made[3] = made[3] * 2
        alike = training_step([None if t is None else t.clone() for t in made], path)
        assert all(same(a, b) for a, b in zip(training_step(made, path), alike))


@pytest.mark.parametrize("gated", [True, False])
def test_training_steps_with_more_dimensions(gated):
    """Rows, and batches of sequences, whose forwards come before any of the backward passes."""
    made, path = drawn(600, gated=gated), "twell"
    rows = training_step(made, path)
    batch = [made[0].view(3, 200, D_MODEL), *made[1:]]
    for _ in range(3):
        y, dx, *others = training_step(batch, path)
        assert y.shape == dx.shape == batch[0].shape
        assert all(same(a, b) for a, b in zip([y.flatten(0, 1), dx.flatten(0, 1), *others], rows))
    differentiable._checked.clear()
    x = batch[0].detach().requires_grad_()
    first, second, third = (differentiable.train_ffn(x, *made[1:], path=path)[0] for _ in range(3))
    grads = [torch.autograd.grad(y.float().sum(), x)[0] for y in (third, second, first)]
    assert same(third, y) and all(same(grads[0], other) for other in grads[1:])
    again = differentiable.train_ffn(x, *made[1:], path=path)[0]
    (once,) = torch.autograd.grad(again.float().square().sum(), x, create_graph=True)  # by torch's operations
    assert torch.autograd.grad(once.float().sum(), x)[0].shape == x.shape


def test_training_in_threads_of_their_own():
    layers = [drawn(600, seed=seed) for seed in range(3)]
    expected = [training_step(made, "twell") for made in layers]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                found = training_step(layers[i], "twell")
                torch.cuda.current_stream().synchronize()
                wrong.extend(i for a, b in zip(found, expected[i]) if not same(a, b))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

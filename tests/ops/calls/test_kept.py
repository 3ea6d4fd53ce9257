"""Repeated calls without a GPU: what is launched, with which arguments, and when a call is checked and chosen anew.

Tensors pretend to be on a GPU; a driver that runs nothing remembers the launches."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.ops.calls.pretended import pretend, pretending
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.ops import ampere, checks, dispatch, inference
from twell_lab.ops.kept import Kept

D_MODEL, D_FF = 128, 1024


@pytest.fixture
def driver(monkeypatch):
    with pretending(monkeypatch) as made, torch.no_grad():
        yield made


class Layer:
    def __init__(self, gated=True, biases=True, dtype=torch.bfloat16, d_ff=D_FF):
        new = lambda *shape: pretend(torch.randn(*shape).to(dtype))  # noqa: E731
        self.gate = new(d_ff, D_MODEL) if gated else None
        self.up, self.down = new(d_ff, D_MODEL), new(D_MODEL, d_ff)
        self.down_t = self.down.t().contiguous()
        self.gate_bias = new(d_ff) if gated and biases else None
        self.up_bias, self.down_bias = (new(d_ff), new(D_MODEL)) if biases else (None, None)
        self.stats = pretend(torch.zeros(4, dtype=torch.int64))

    def call(self, x, path="twell", hot=0):
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        how = {"down_t": self.down_t, "stats": self.stats, "path": path, "hot": hot}
        return inference.infer(x, self.gate, self.up, self.down, *biases, **how)


def x_of(*tokens, dtype=torch.bfloat16):
    return pretend(torch.randn(*tokens, D_MODEL).to(dtype))


def launches_of(driver, call):
    driver.launches.clear()
    kept = call()
    return list(driver.launches), kept


def lasting(launches, tensors):
    """The launches, with 'elsewhere' for each address that is none of these tensors'."""
    known = {t.data_ptr() for t in tensors if t is not None}

    def told(value, size):
        if isinstance(value, tuple):
            return tuple(told(each, 8) for each in value)
        if isinstance(value, bytes):
            address, rest = int.from_bytes(value[:8], "little"), value[8:]
            return ("map", address if address in known else "elsewhere", rest)
        return "elsewhere" if size == 8 and value > 1 << 20 and value not in known else value

    return [
        (each.name, each.grid, each.shared, [told(v, len(b)) for v, (_, b) in zip(each.values(), each.arguments)])
        for each in launches
    ]


WAYS = [("twell", 0, 1), ("twell", 0, 40), ("twell", 0, 200), ("twell", 0, 2500), ("twell", 0, 17_000)]
WAYS += [
    ("twell", 0, 70_000),
    ("hot_cold", 256, 100),
    ("hot_cold", 256, 700),
    ("hot_cold", 512, 5000),
    ("dense", 0, 10),
    ("dense", 0, 300),
]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_a_call_that_was_seen_before_launches_the_same(driver, path, hot, tokens, gated):
    layer, x = Layer(gated), x_of(tokens)
    weights = [layer.gate, layer.up, layer.down_t, layer.gate_bias, layer.up_bias, layer.down_bias]
    first, y = launches_of(driver, lambda: layer.call(x, path, hot))
    again, z = launches_of(driver, lambda: layer.call(x, path, hot))
    assert y.shape == z.shape == x.shape
    assert lasting(first, [x, *weights]) == lasting(again, [x, *weights])
    assert path == "dense" or first
    other = x_of(tokens)
    moved, _ = launches_of(driver, lambda: layer.call(other, path, hot))
    assert lasting(moved, [other, *weights]) == [
        (name, grid, shared, [swapped(v, x, other) for v in values])
        for name, grid, shared, values in lasting(first, [x, *weights])
    ]
    deep = other.view(1, tokens, 1, D_MODEL)
    assert layer.call(deep, path, hot).shape == deep.shape
    assert len([call for call in dispatch.calls._kept.values() if call.checked]) == 1


@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_the_first_call_may_come_from_a_new_thread(driver, path, hot, tokens):
    """Which has no context of the driver yet: a server answers each of its callers in one."""
    layer, x = Layer(), x_of(tokens)
    with ThreadPoolExecutor(1) as others:
        first, y = others.submit(
            torch.no_grad()(lambda: launches_of(driver, lambda: layer.call(x, path, hot)))
        ).result()
    again, z = launches_of(driver, lambda: layer.call(x, path, hot))
    weights = [layer.gate, layer.up, layer.down_t, layer.gate_bias, layer.up_bias, layer.down_bias]
    assert y.shape == z.shape and lasting(first, [x, *weights]) == lasting(again, [x, *weights])


def swapped(value, x, other):
    if isinstance(value, tuple) and value[0] == "map":
        return ("map", swapped(value[1], x, other), value[2])
    return other.data_ptr() if value == x.data_ptr() else value


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 2048, 4100, 4300, 8200])
def test_one_piece_of_memory_serves_as_pieces_of_their_own_do(driver, gated, tokens):
    """A replay, compared with the call that was recorded, in which each buffer was a tensor of its own."""
    layer, x = Layer(gated), x_of(tokens)
    kept = [x, layer.gate, layer.up, layer.down, layer.down_t, layer.gate_bias, layer.up_bias, layer.down_bias]
    driver.allocated.clear()
    apart, _ = launches_of(driver, lambda: layer.call(x))
    own = dict(driver.allocated)
    driver.allocated.clear()
    replayed, y = launches_of(driver, lambda: layer.call(x))
    ((begin, size),) = [each for each in driver.allocated if each[0] != y.data_ptr()]
    assert lasting(replayed, kept) == lasting(apart, kept)
    places, uses = {}, {}  # of a tensor of its own: where its place in the one piece is, and the launches that get it
    for number, (one, other) in enumerate(zip(replayed, apart)):
        for here, there in zip(flat(one.values()), flat(other.values())):
            if there in own:
                assert places.setdefault(there, here) == here
                uses.setdefault(there, []).append(number)
    between = [at for at, here in places.items() if here != y.data_ptr()]
    assert len(between) >= (2 if tokens == 1 else 7 if not gated or tokens < 4224 else 9)
    assert all(begin <= places[at] and places[at] + own[at] <= begin + size for at in between)
    for i, one in enumerate(between):
        for other in between[i + 1 :]:
            if places[one] < places[other] + own[other] and places[other] < places[one] + own[one]:
                assert uses[one][-1] < uses[other][0] or uses[other][-1] < uses[one][0]


def flat(values):
    """Every number, and the address in every map."""
    for value in values:
        yield from value if isinstance(value, tuple) else [value]
        if isinstance(value, bytes):
            yield int.from_bytes(value[:8], "little")


def changed(layer):
    """Names, and what is done to a weight of the layer."""
    yield "replaced", lambda: setattr(layer, "up", pretend(layer.up.clone()))
    yield "moved", lambda: setattr(layer.up, "data", layer.up.data.clone())
    yield "bias gone", lambda: setattr(layer, "up_bias", None)
    yield "transposed again", lambda: setattr(layer, "down_t", pretend(layer.down_t.clone()))


@pytest.mark.parametrize("tokens", [3, 100, 2500])
def test_a_weight_that_lies_elsewhere_is_found_there(driver, tokens):
    layer, x, before = Layer(), x_of(tokens), []
    for name, change in changed(layer):
        layer.call(x)
        before += [layer.up.data, layer.down_t]  # alive, so that the new one cannot lie there
        known = len(dispatch.calls)
        change()
        seen, _ = launches_of(driver, lambda: layer.call(x))
        now = {0 if t is None else t.data_ptr() for t in (layer.up, layer.up_bias, layer.down_t)}
        given = {v for each in seen for v in each.values() if isinstance(v, int)}
        assert now <= given | {0}, name
        assert len(dispatch.calls) == known + 1, name


def test_what_a_weight_holds_is_read_anew_without_looking_again(driver):
    layer, x = Layer(), x_of(300)
    first, _ = launches_of(driver, lambda: layer.call(x))
    layer.up.mul_(2)
    again, _ = launches_of(driver, lambda: layer.call(x))
    kept = [x, layer.up, layer.down_t, layer.up_bias, layer.down_bias]
    assert len(dispatch.calls) == 1 and lasting(first, kept) == lasting(again, kept)


def test_memory_used_again_for_another_shape_or_type_is_looked_at_anew(driver):
    layer, x = Layer(biases=False), x_of(40)
    layer.call(x)
    for name in ("gate", "up", "down_t"):
        setattr(layer, name, getattr(layer, name)[: D_FF // 2])
    layer.down = pretend(layer.down[:, : D_FF // 2].clone())
    seen, _ = launches_of(driver, lambda: layer.call(x))
    assert seen[0].values()[-2] == D_FF // 2 and len(dispatch.calls) == 2
    for name in ("gate", "up", "down", "down_t"):
        setattr(layer, name, getattr(layer, name).view(torch.float16))
    seen, _ = launches_of(driver, lambda: layer.call(x.view(torch.float16)))
    assert ("VALUE_FP16", True) in seen[0].defines and len(dispatch.calls) == 3


@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_no_weight_is_held_alive(driver, path, hot, tokens):
    layer, x = Layer(), x_of(tokens)
    for _ in range(3):
        layer.call(x, path, hot)
    weights = [weakref.ref(t) for t in (layer.gate, layer.up, layer.down, layer.down_t, layer.up_bias, x)]
    del layer, x
    gc.collect()
    assert [each() for each in weights] == [None] * 6 and len(dispatch.calls) == 1


def test_a_call_that_was_seen_before_is_still_refused_where_it_must_be(driver):
    layer, x = Layer(), x_of(30)
    for _ in range(2):
        layer.call(x)
    with torch.enable_grad():
        layer.up.requires_grad_()
        with pytest.raises(InputError, match="no gradient"):
            layer.call(x)
    layer.up.requires_grad_(False)
    for wrong in (
        pretend(torch.zeros(4)),
        pretend(torch.zeros(3, dtype=torch.int64)),
        torch.zeros(4, dtype=torch.int64),
        pretend(torch.zeros(8, dtype=torch.int64))[::2],
    ):
        layer.stats, kept = wrong, layer.stats
        with pytest.raises(InputError, match="stats is|stats has strides"):
            layer.call(x)
        layer.stats = kept
    with pytest.raises(InputError, match="rows of 64 values"):
        layer.call(pretend(torch.zeros(30, 64, dtype=torch.bfloat16)))
    with pytest.raises(InputError, match="one dtype"):
        layer.call(x.half())
    with pytest.raises(InputError, match="x is a NoneType"):
        layer.call(None)
    with pytest.raises(InputError, match="path is"):
        layer.call(x, "sparse")
    with pytest.raises(InputError, match=r"hot is \[\]"):
        layer.call(x, "hot_cold", [])


def test_an_x_off_its_boundary_is_another_call(driver):
    layer = Layer()
    layer.call(x_of(30))
    shifted = pretend(torch.zeros(30 * D_MODEL + 1, dtype=torch.bfloat16))[1:].view(30, D_MODEL)
    seen, _ = launches_of(driver, lambda: layer.call(shifted))
    assert [each.name for each in seen] == ["pack_v4", "gated_v1"] and len(dispatch.calls) == 2


@pytest.mark.parametrize("path, hot, tokens", WAYS)
def test_a_prepared_call_launches_what_infer_does_and_checks_nothing(driver, monkeypatch, path, hot, tokens):
    layer, x = Layer(), x_of(tokens)
    biases = (layer.gate_bias, layer.up_bias, layer.down_bias)
    weights = (layer.gate, layer.up, layer.down, *biases, layer.down_t)
    prepared = lambda x, stats=layer.stats: inference.prepared(x, weights, {}, stats, path, hot, 256, 32)  # noqa: E731
    assert prepared(x) is None  # nobody made such a call before
    layer.call(x, path, hot)
    seen = lasting(launches_of(driver, lambda: layer.call(x, path, hot))[0], [x, *weights])
    shifted = pretend(torch.zeros(tokens * D_MODEL + 1, dtype=torch.bfloat16))[1:].view(tokens, D_MODEL)
    assert all(prepared(other) is None for other in (x_of(tokens + 1), shifted, x.t(), x.half()))
    assert prepared(x, None) is None
    run = prepared(x)
    monkeypatch.setattr(dispatch, "key_of", None)
    monkeypatch.setattr(checks, "layer", None)
    again, y = launches_of(driver, lambda: run(x, weights))
    assert lasting(again, [x, *weights]) == seen
    deep = x.view(1, tokens, 1, D_MODEL)
    again, y = launches_of(driver, lambda: run(deep, weights))
    assert lasting(again, [x, *weights]) == seen and y.shape == deep.shape


def test_so_many_calls_are_kept_and_no_more(driver, monkeypatch):
    monkeypatch.setattr(dispatch, "calls", Kept(3))
    layer = Layer()
    for tokens in [*range(1, 9), 1, 8, 2]:
        seen, _ = launches_of(driver, lambda tokens=tokens: layer.call(x_of(tokens)))
        assert seen[0].values()[-3:-1] == [tokens, D_FF] and seen[1].grid[1] == tokens
        assert len(dispatch.calls) <= 3


def test_the_least_recently_used_entry_is_dropped():
    kept = Kept(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c"), len(kept)) == (1, None, 3, 2)


# ---- every launch goes through the checks of the launcher ----


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_every_kernel_that_a_gpu_runs_is_met_here(driver):
    for gated in (True, False):
        layer = Layer(gated)
        for path, hot, tokens in WAYS:
            layer.call(x_of(tokens), path, hot)
    ampere.gate_pack(x_of(300), layer.up)
    assert len({(kernel.file, kernel.name) for kernel in driver.kernels}) == 13

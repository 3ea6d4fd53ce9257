"""Random and hostile layers on every path that this machine has, compared with float64: `layers`.

Each layer is drawn from a seed and its number alone, so that a layer that fails can be made again without the others.
There are widths that no vector divides, heavy rows, bursts that overflow tiles and the pool, rows with NaN and
infinity, views with odd strides, values near the ends of their dtype, and integers, of which every sum is exact. Every
path computes the layer twice, which must give the same bits; on a GPU the second call often runs on a side stream with
an input that comes late, and memory that torch allocates is often filled with NaN before. Results are judged by
accuracy.Exact; gradients may have twice the dense layer's error. `twell-lab record attack` runs this for minutes;
tests/nightly/attack runs some of it, and shows that it notices a layer that is wrong."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..core import TwellError
from ..cuda import launch
from ..formats.twell import TILE, WORDS
from ..layers.choice import Choice, one_of_each
from ..layers.parts import NAMES as WEIGHTS
from ..layers.parts import Weights
from ..layers.paths.twell import STEP
from ..layers.sparse_ffn import SparseFFN
from ..ops import accuracy, decode, dispatch, functional, gate_pack, train
from ..ops.reference import GatedFeedForward, PlainFeedForward
from .rows import dense_hidden, exact_gradients, first_projection, gradient_sums

_EMPTIED = 16  # of so many layers one is the last that leaves its memory to the next
MOST_FAILURES = 10  # an attack ends after so many: more of them teach nothing
_SLEEP = 300_000  # cycles by which an input is late on a side stream: a fifth of a millisecond
_GEOMETRIES = ((TILE, WORDS), (TILE, WORDS), (64, 17), (32, 33), (100, 5), (8, 3), (7, 2), (300, 40), (1, 2))
_CPU_WIDTHS = (1, 2, 3, 5, 7, 8, 12, 16, 24, 33, 64, 100, 128, 200, 257)
# The kernels are compiled for each width that 8 divides; a kernel for any width takes the others.
_GPU_WIDTHS = (64, 264, 768, 2048, 1, 7, 100, 333)
NAMES = ("x", *WEIGHTS[:6])


class Broken(TwellError, AssertionError):
    """An attack found something wrong. The message has a line for each failure, with the seed and number that make the
    layer again."""


class Interrupted(KeyboardInterrupt):
    """An attack was interrupted that had found nothing wrong. counts: what it did until then, in whole layers."""

    def __init__(self, counts: Counts) -> None:
        super().__init__(f"stopped after {counts.layers} layers")
        self.counts = counts


@dataclass
class Counts:
    """What an attack did. layers: how many were checked; cases: results that were checked; rows: rows of these;
    excused, overflowed, rounded: rows that kept the bound only for that reason (accuracy.Verdict); worst: the largest
    error over what is allowed; by: how many cases of each category; kernels: those that ran on a GPU; failures: what
    was wrong, a line each."""

    layers: int = 0
    cases: int = 0
    rows: int = 0
    excused: int = 0
    overflowed: int = 0
    rounded: int = 0
    worst: float = 0.0
    by: Counter = field(default_factory=Counter)
    kernels: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def add(self, rows: int, categories: list[str], verdict: accuracy.Verdict | None = None) -> None:
        """Count one result of so many rows."""
        self.cases += 1
        self.rows += rows
        self.by.update(categories)
        if verdict is not None:
            self.excused += verdict.excused
            self.overflowed += verdict.overflowed
            self.rounded += verdict.rounded
            self.worst = max(self.worst, verdict.ratio)

    def plus(self, other: Counts) -> Counts:
        """Return what this part of an attack and another one did."""
        names = ("layers", "cases", "rows", "excused", "overflowed", "rounded", "by", "failures")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Counts(**sums, worst=max(self.worst, other.worst), kernels=self.kernels | other.kernels)

    def row(self) -> dict:
        """As a row of a record."""
        return {
            "layers": self.layers,
            "cases": self.cases,
            "rows": self.rows,
            "excused_rows": self.excused,
            "overflowed_rows": self.overflowed,
            "rounded_rows": self.rounded,
            "worst_ratio": round(self.worst, 4),
            "by": dict(sorted(self.by.items())),
        }


_Parts = Generator[Counts, None, None]


@dataclass
class Layer:
    """One drawn layer. tensors: in the order of NAMES, None for what is not there (without a gate, a plain layer);
    traits: what makes it hostile; tile, words: the geometry in which its gate is packed."""

    tensors: list[Tensor | None]
    traits: list[str]
    tile: int
    words: int

    @property
    def x(self) -> Tensor:
        return self.tensors[0]

    @property
    def weights(self) -> Weights:
        return Weights(*self.tensors[1:])

    @property
    def d_ff(self) -> int:
        return self.tensors[2].shape[0]

    def say(self) -> str:
        """The layer in a few words, for the message of a failure."""
        kind = "plain" if self.weights.gate is None else "gated"
        shape = f"{self.x.shape[0]} tokens, d_model {self.x.shape[1]}, d_ff {self.d_ff}"
        biases = "".join(letter for letter, b in zip("gud", self.tensors[4:]) if b is not None)
        return (
            f"{str(self.x.dtype)[6:]}, {kind}, {shape}, biases {biases or 'none'}, "
            f"tile {self.tile} x {self.words}, {', '.join(self.traits) or 'nothing special'}"
        )


# ---- drawing ----


def draw(seed: int, number: int, device: str = "cpu") -> Layer:
    """Layer `number` of an attack: the same for the same seed, number and kind of device."""
    r = random.Random(f"layers {seed} {number}")
    g = torch.Generator(device).manual_seed(r.getrandbits(62))
    cuda = device.startswith("cuda")
    dtype = r.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    gated, traits = r.random() < 0.7, []
    d_model, d_ff, tokens = _sizes(r, cuda)
    normal = lambda *shape: torch.randn(*shape, generator=g, device=device)  # noqa: E731
    x, first = normal(tokens, d_model), normal(d_ff, d_model) / d_model**0.5
    up, down = normal(d_ff, d_model) / d_model**0.5, normal(d_model, d_ff) / 4
    rate = r.choice((2.6, 2.6, 2.3, 1.6, 1.0, 0.3, 0.0, -1.0, -9.0, 9.0))
    x[:, 0], first[:, 0] = 1.0, -rate
    biases = [normal(n) / 4 if r.random() < 0.4 else None for n in (d_ff, d_ff, d_model)]

    def chance(name: str, share: float) -> bool:
        hit = r.random() < share
        traits.extend([name] * hit)
        return hit

    some = lambda n, most: sorted(r.sample(range(n), min(n, r.randint(1, most))))  # noqa: E731
    if d_model > 1 and chance("heavy rows", 0.3):
        x[:, 1] = 0
        x[some(tokens, 4), 1] = 8.0
        first[: r.choice((d_ff, min(d_ff, 1500), min(d_ff, 300))), 1] = 4.0
    if d_model > 2 and chance("bursts", 0.3):  # up to 300 neighbours fire: more than a tile's words or the pool hold
        x[:, 2] = 0
        start, many = r.randrange(d_ff), r.choice((32, 40, 64, 300))
        begin = r.randrange(tokens)
        x[begin : begin + r.choice((1, 8, 20)), 2] = 16.0
        first[start : start + many, 2] = 1.0
    if chance("integers", 0.1):  # every product and sum is exact, and many gates are zero
        x, first, up, down = (
            torch.randint(-1, 2, t.shape, generator=g, device=device).float() for t in (x, first, up, down)
        )
        biases = [None if b is None else b.sign() for b in biases]
    if chance("zeros", 0.1):
        x[some(tokens, 3)], first[some(d_ff, 3)] = 0.0, -0.0
    if chance("opposites", 0.1):  # gates that are nearly zero: a neuron's inputs cancel
        half = d_model // 2
        x[:, half : 2 * half], first[:, half : 2 * half] = x[:, :half], -first[:, :half] * (1 + 1e-3 * normal(d_ff, 1))
    scale = r.choice(
        (0, 0, 0, 0, 0, 0, -8, 5) if dtype == torch.float16 else (0, 0, 0, 0, 0, 0, -20, -60, -110, -126, 20, 30)
    )
    if scale and chance(f"scaled by 2^{scale}", 1.0):
        place = r.randrange(3)  # what is scaled: 0 the input, 1 the down projection, 2 gate and up
        x, first, up, down = (
            t * 2.0**scale if place == each else t for t, each in zip((x, first, up, down), (0, 2, 2, 1))
        )
        biases = [b if b is None or place == 1 else b * 2.0**scale for b in biases]
    if chance("rows that are not finite", 0.15):
        for row in some(tokens, 3):
            x[row, r.randrange(d_model)] = r.choice((torch.nan, torch.inf, -torch.inf))
    kinds = (x, first if gated else None, up if gated else first, down, biases[0] if gated else None, *biases[1:])
    tensors = [None if t is None else t.to(dtype) for t in kinds]
    if chance("strided", 0.25):
        tensors = [t if t is None or r.random() < 0.4 else _strided(t, r) for t in tensors]
    tile, words = r.choice(_GEOMETRIES) if r.random() < 0.3 else (TILE, WORDS)
    return Layer(tensors, traits, tile, words)


def _sizes(r: random.Random, cuda: bool) -> tuple[int, int, int]:
    """d_model, d_ff, tokens."""
    if not cuda:
        d_ff = r.choice(
            (r.randint(1, 40), r.randint(1, 700), 8 * r.randint(1, 90), 256 * r.randint(1, 3) + r.randint(-1, 1))
        )
        return r.choice(_CPU_WIDTHS), d_ff, r.choice((1, 1, r.randint(2, 9), r.randint(2, 70), r.randint(2, 200)))
    d_model = r.choice(_GPU_WIDTHS)
    d_ff = r.choice(
        (
            r.randint(1, 300),
            8 * r.randint(1, 300),
            r.randint(300, 3000),
            256 * r.randint(1, 22) + r.randint(-1, 1),
            5632,
        )
    )
    tokens = r.choice(
        (1, 1, r.randint(2, 16), r.randint(17, 64), r.randint(65, 600), r.randint(300, 2047), r.randint(2048, 4500))
    )
    return d_model, d_ff, tokens


def _strided(t: Tensor, r: random.Random) -> Tensor:
    """The same values in a view that is not contiguous, or does not start on 16 bytes."""
    way = r.randrange(4)
    if way == 0 and t.dim() == 2:
        return t.t().contiguous().t()
    if way == 1:
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)
        wide[..., ::2] = t
        return wide[..., ::2]
    if way == 2 and t.dim() == 2:
        wide = t.new_full((t.shape[0], t.shape[1] + 3), torch.nan)
        wide[:, 1:-2] = t
        return wide[:, 1:-2]
    flat = t.new_full((t.numel() + 1,), torch.nan)
    flat[1:] = t.reshape(-1)
    return flat[1:].view(t.shape)


# ---- the paths ----


def _first(x, gate, up, down, gate_bias, up_bias, down_bias) -> Tensor:
    return linear(x, *first_projection(gate, up, gate_bias, up_bias))


def dense(*tensors: Tensor | None) -> Tensor:
    """The result of torch's dense layer, in the tensors' own dtype. tensors: in the order of NAMES."""
    return _dense_step(*tensors)[0]


def _operator(layer: Layer, x: Tensor) -> Tensor:
    return _ffn(layer, x, tile=layer.tile, words=layer.words)


def _ffn(layer: Layer, x: Tensor, **how) -> Tensor:
    w = layer.weights
    biases = {"gate_bias": w.gate_bias, "up_bias": w.up_bias, "down_bias": w.down_bias}
    return functional.ffn(x, w.up, w.down, w.gate, **biases, **how)


def _infer(choice: Choice) -> Callable[[Layer, Tensor], Tensor]:
    return lambda layer, x: _ffn(layer, x, path=choice.path, hot=choice.hot)


def _packed(layer: Layer, x: Tensor) -> Tensor:
    w, packed = layer.weights, functional.pack(_first(x, *layer.tensors[1:]), layer.tile, layer.words)
    if w.gate is None:
        return functional.packed_down(packed, w.down, w.down_bias)
    return functional.packed_gated(x, packed, w.up, w.down, w.up_bias, w.down_bias)


def _module(layer: Layer) -> nn.Module:
    """A dense module that holds these same tensors."""
    w = layer.weights
    with torch.device("meta"):
        module = (PlainFeedForward if w.gate is None else GatedFeedForward)(1, 1)
    for name, weight, bias in zip(("gate_proj", "up_proj", "down_proj"), w[:3], w[3:6]):
        if weight is not None:
            projection = getattr(module, name)
            projection.weight = nn.Parameter(weight, requires_grad=False)
            projection.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return module


def _swapped(choice: Choice | None) -> Callable[[Layer, Tensor], Tensor]:
    return lambda layer, x: SparseFFN(_module(layer), plan=choice, tile=layer.tile, words=layer.words, probed=False)(x)


def _trained(path: str) -> Callable[[Layer, Tensor], Tensor]:
    return lambda layer, x: train.train_ffn(x, *layer.tensors[1:], path=path)[0]


def paths_of(layer: Layer) -> dict[str, Callable[[Layer, Tensor], Tensor]]:
    """Every way of computing this layer on its device: name -> function of the layer and its x."""
    choices = one_of_each(layer.d_ff, STEP * max(1, (layer.d_ff // STEP) // 2))
    found = {"operator": _operator, "packed": _packed, "module": _swapped(None)}
    found |= {f"infer, {choice.path}": _infer(choice) for choice in choices}
    found |= {f"module, {choice.path}": _swapped(choice) for choice in choices}
    found |= {f"trained, {path}": _trained(path) for path in train.PATHS}
    return found | (_gpu_paths(layer) if layer.x.is_cuda else {})


def _gpu_paths(layer: Layer) -> dict[str, Callable[[Layer, Tensor], Tensor]]:
    """The kernels called directly, also where dispatch would not pick them for this size."""
    gate, up, down, *biases = (t if t is None else t.contiguous() for t in layer.tensors[1:])
    turned, first = down.t().contiguous().t(), up if gate is None else gate
    weights, geometry = (gate, up, turned, *biases), (layer.tile, layer.words)
    found = {"portable": lambda layer, x: dispatch.portable(x.contiguous(), *weights, *geometry)}
    able = torch.cuda.get_device_capability(layer.x.device)
    x = launch.layout(layer.x.contiguous())
    of_up, of_first = launch.layout(up), launch.layout(first)
    for version in decode.VERSIONS if decode.takes(able, x, of_up) else ():
        found[f"decode v{version}"] = lambda layer, x, version=version: launch.run(
            decode.decode, x.contiguous(), gate, up, turned.t(), *biases, version
        )
    hots = [0] + [256 * ((layer.d_ff // 256 + 1) // 2)] * (layer.d_ff > 512 and not layer.d_ff % 8)
    packers = {
        "sm80": (gate_pack.gate_pack_sm80, gate_pack.takes_sm80),
        "sm90": (gate_pack.gate_pack_sm90, gate_pack.takes_sm90),
    }
    if gate_pack.takes_sm90(able, x, of_up):  # its GEMMs compute rows that the pool cannot hold
        for name, (packs, takes) in packers.items():
            for hot in hots if takes(able, x, of_first) else ():
                found[f"{name}{', hot/cold' * bool(hot)}"] = lambda layer, x, packs=packs, hot=hot: dispatch.sm90(
                    x.contiguous(), *weights, hot, packs
                )
    return found


# ---- checking ----


def layers(
    seed: int = 0,
    *,
    cases: int | None = None,
    seconds: float | None = None,
    number: int | None = None,
    device: str = "cpu",
    change: Callable[[str, Tensor], Tensor] = lambda path, y: y,
    processes: int = 1,
) -> Counts:
    """Attack layers on `device`, until `cases` were drawn or `seconds` have passed; or only the one of this `number`.

    Each layer is computed on every path. change: a function of a path's name and result, applied before the result is
    judged, for tests of the attack itself; with one process alone. processes: how many draw and check, each so-manyth
    layer; their use of the device overlaps. Raises Broken with all failures, at the end, after MOST_FAILURES or where
    it is interrupted; Interrupted where it is interrupted without any, once a layer is whole."""
    numbers = range(cases if cases is not None else 2**31 if seconds is not None else 0)
    if processes == 1 or number is not None:
        numbers = numbers if number is None else range(number, number + 1)
        parts = _attacked(seed, numbers, seconds, device, change)
    else:
        parts = _beside(processes, seed, numbers, seconds, device)
    counts, interrupted = Counts(), False
    try:
        with closing(parts):
            for part in parts:
                counts = counts.plus(part)
                if part.layers and len(counts.failures) >= MOST_FAILURES:
                    break
    except KeyboardInterrupt:
        if not counts.layers and not counts.failures:
            raise
        interrupted = True
    if counts.failures:
        raise Broken("\n".join([f"{len(counts.failures)} failures in {counts.layers} layers:", *counts.failures]))
    if interrupted:
        raise Interrupted(counts)
    return counts


def _beside(processes: int, seed: int, numbers: range, seconds: float | None, device: str) -> _Parts:
    """What `_attacked` yields in each of several processes, which end with this generator."""
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # to start it lets signals through again that are held back
    workers: dict[Connection, multiprocessing.process.BaseProcess] = {}
    try:
        for i in range(processes):
            with _held_back():
                reader, writer = context.Pipe(duplex=False)
                worker = context.Process(target=_part, args=(writer, seed, numbers[i::processes], seconds, device))
                worker.start()
                workers[reader] = worker
                writer.close()
        while workers:
            for reader in wait([*workers]):
                try:
                    found = reader.recv()
                except EOFError:
                    workers[reader].join()
                    if status := workers.pop(reader).exitcode:
                        raise RuntimeError(f"a process of the attack ended with exit status {status}") from None
                    continue
                if isinstance(found, Exception):
                    raise found
                yield found
    finally:
        with _held_back():
            for worker in workers.values():
                worker.kill()
                worker.join()


@contextmanager
def _held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM come after it. They never come to processes started within it, to which a terminal and
    `timeout` send them, too: whoever started these ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _part(writer: Connection, seed: int, numbers: range, seconds: float | None, device: str) -> None:
    """The part of one of several processes, whose work on the CPU is to keep to one thread. It ends where nobody reads
    what it writes any more."""
    torch.set_num_threads(1)
    with suppress(BrokenPipeError):
        try:
            for found in _attacked(seed, numbers, seconds, device, lambda path, y: y):
                writer.send(found)
        except Exception as error:
            error.add_note(f"in a process of the attack:\n{traceback.format_exc()}")
            writer.send(error)


def _attacked(seed: int, numbers, seconds: float | None, device: str, change) -> _Parts:
    """Attack the layers of these numbers: yields each failure once it is found, and the counts of each whole layer."""
    begin = time.monotonic()
    for done, each in enumerate(numbers):
        if seconds is not None and time.monotonic() - begin > seconds:
            return
        layer, counts = draw(seed, each, device), Counts(layers=1)
        where, what = f"layers, seed {seed}, case {each}, {device}", layer.say()
        try:
            for wrong in _check(layer, random.Random(f"checks {seed} {each}"), counts, change):
                yield Counts(failures=[f"{where}: {wrong} ({what})"])
        except Exception as error:  # the attack goes on, and says which layer it was
            yield Counts(failures=[f"{where}: {type(error).__name__}: {error} ({what})"])
        if device != "cpu" and done % _EMPTIED == 0:  # other processes need memory, too
            torch.cuda.empty_cache()
        counts.kernels |= launch.loaded()
        yield counts


def _check(layer: Layer, r: random.Random, counts: Counts, change) -> Iterator[str]:
    """What is wrong with this layer's results, a sentence each."""
    with torch.no_grad():
        # A path on a GPU may copy strided tensors first, and torch's GEMMs sum the copies in another order: the path is
        # compared with the dense layer of the tensors as given, and with that of the copies.
        anew = [None if t is None else t.contiguous() for t in layer.tensors]
        given = [layer.tensors, anew] if layer.x.is_cuda and "strided" in layer.traits else [layer.tensors]
        exact, beside = accuracy.Exact(*layer.tensors), [(dense(*each), _first(*each)) for each in given]
        from_gate = accuracy.Exact(*layer.tensors, first=beside[0][1])
    for name, run in paths_of(layer).items():
        poisoned = r.random() < 0.5
        # The late input is a copy, and torch's GEMM sums in another order where x does not start on 16 bytes.
        late = layer.x.is_cuda and layer.x.is_contiguous() and layer.x.data_ptr() % 16 == 0 and r.random() < 0.3
        with torch.no_grad(), _poison(layer.x, poisoned):
            y = run(layer, layer.x)
            again = _late(run, layer) if late else run(layer, layer.x)
        judge, changed = (from_gate if name == "packed" else exact).judge, change(name, y)
        verdict = min((judge(changed, *each) for each in beside), key=lambda one: one.ratio)
        how = ["side stream"] * late + ["poisoned memory"] * poisoned
        counts.add(len(y), [name, str(y.dtype)[6:], *layer.traits, *how], verdict)
        if not verdict.ratio <= 1.0:
            yield f"{name}: row {verdict.row} is off by {verdict.ratio:.3g} times what is allowed"
        if not torch.equal(_bits(y), _bits(again)):
            yield f"{name}: the second call gave other bits{', on a side stream' * late}"
    if _differentiable(layer):
        yield from _gradients(layer, exact, r, counts, change)


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


@contextmanager
def _poison(like: Tensor, filled: bool):
    """Fill memory that torch allocates meanwhile with NaN: all of it where `filled`, otherwise (on a GPU) what torch's
    cache of freed memory hands out again."""
    if like.is_cuda:
        held = [
            torch.full((size,), torch.nan, device=like.device)
            for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22, like.numel() // 2 + 1)
        ]
        del held
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if filled:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _late(run, layer: Layer) -> Tensor:
    """The path's result on a side stream, for an input that is NaN until shortly before the call."""
    x, stream = torch.full_like(layer.x, torch.nan), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP)
        x.copy_(layer.x)
        y = run(layer, x)
    torch.cuda.current_stream().wait_stream(stream)
    for t in (x, y):
        t.record_stream(torch.cuda.current_stream())
    return y


# ---- gradients ----


def _differentiable(layer: Layer) -> bool:
    """Return whether its values are finite, and in a range in which no product under- or overflows, as in a
    training."""
    return not any(trait.startswith(("scaled", "rows that")) for trait in layer.traits)


def _gradients(layer: Layer, exact: accuracy.Exact, r: random.Random, counts: Counts, change) -> Iterator[str]:
    """What is wrong with the gradients of both training paths, a sentence each.

    The norm of the error of each gradient, over the whole tensor, may be twice the dense layer's, plus one unit in the
    last place of its largest value, as for results, plus what rounding each of its terms once makes of it (`_noise`): a
    dense gradient of a few values may be exact by luck. Values beyond the dtype's end are infinite. Rows with a
    neuron whose sign rounding decides get an upstream gradient of zero: with the other sign they are another
    function."""
    x, gate, up, down, gate_bias, up_bias, down_bias = layer.tensors
    # Sums are made in float32 at least: its rounding decides the signs of g and of u.
    doubt = exact.doubtful(slice(None), 16 * torch.finfo(torch.float32).eps).any(1)
    if gate is not None:
        other = accuracy.Exact(x, None, up, down, None, up_bias, None)
        doubt |= (other.doubtful(slice(None), 16 * torch.finfo(torch.float32).eps) & exact.keep).any(1)
    g = torch.Generator(x.device).manual_seed(r.getrandbits(62))
    dy = torch.randn(x.shape, generator=g, device=x.device).to(x.dtype)
    dl1 = torch.rand(len(x), generator=g, device=x.device)
    dy[doubt], dl1[doubt] = 0.0, 0.0
    right, reached = exact_gradients(layer.tensors, exact.keep, dy, dl1)[1:], _step(_dense_step, layer.tensors, dy, dl1)
    noise = _noise(layer.tensors, exact.keep, dy, dl1)
    for path in train.PATHS:
        with _poison(x, r.random() < 0.5):
            found = _step(lambda *t: train.train_ffn(*t, path=path), layer.tensors, dy, dl1)
            again = _step(lambda *t: train.train_ffn(*t, path=path), layer.tensors, dy, dl1)
        counts.add(len(x), [f"gradients, {path}", str(x.dtype)[6:]])
        for name, a, b, e, n, second in zip(NAMES, found, reached, right, noise, again):
            if a is None:
                continue
            a = change(f"d{name}, {path}", a)
            off = _off(a, b, e, n)
            if not off <= 1.0:
                yield f"gradient of {name}, {path}: off by {off:.3g} times what is allowed"
            if not torch.equal(_bits(a), _bits(second)):
                yield f"gradient of {name}, {path}: the second call gave other bits"


def _off(ours: Tensor, dense: Tensor, exact: Tensor, noise: Tensor) -> float:
    """The error of a gradient over what is allowed; inf where a value is finite that should not be, or the reverse."""
    kind, most = torch.finfo(ours.dtype), torch.finfo(ours.dtype).max
    end = exact.abs() > most * (1 - 8 * kind.eps)  # what rounds to just beyond the end may round the other way
    at_end = (ours.sign() == exact.sign()) & (ours.abs() > most * (1 - 16 * kind.eps))
    also = ~ours.isfinite() & ~dense.isfinite() & ~end  # the dense layer's sums overflow, too
    if not torch.where(end, at_end, ours.isfinite() | also).all():
        return torch.inf
    looked = ~(end | also)
    largest = torch.where(looked, exact, 0.0).abs().amax().to(ours.dtype)
    ulp = torch.nextafter(largest, torch.full_like(largest, torch.inf)).double() - largest.double()
    held = looked & dense.isfinite()
    allowed = 2 * torch.where(held, dense.double() - exact, 0.0).norm() + ulp + noise + kind.tiny
    return float(torch.where(looked, ours.double() - exact, 0.0).norm() / allowed)


def _dense_step(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y, sum of |h| of each token) of torch's dense layer."""
    x, gate, up, down, gate_bias, up_bias, down_bias = tensors
    h = dense_hidden(x, gate, up, gate_bias, up_bias)
    return linear(h, down, down_bias), h.abs().sum(1, dtype=torch.float32)


def _step(function, tensors, dy: Tensor, dl1: Tensor) -> list[Tensor | None]:
    """The gradients of all tensors, None for those that are not there. function: tensors -> (y, l1, ...)."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    y, l1, *_ = function(*leaves)
    given = iter(torch.autograd.grad([y, l1], [t for t in leaves if t is not None], [dy, dl1]))
    return [None if t is None else next(given) for t in leaves]


def _noise(tensors, keep: Tensor, dy: Tensor, dl1: Tensor) -> list[Tensor | None]:
    """The norm of the error that each gradient would have if every value and every term of every sum were rounded once
    in the tensors' dtype, independently of each other but for what dl1 does. What is computed here are variances, in
    units of eps^2."""
    x, gate, up, down, gate_bias, up_bias, down_bias, dy, dl1 = (
        None if t is None else t.double() for t in (*tensors, dy, dl1)
    )
    terms = lambda x, w, b=None: linear(x.square(), w.square(), None if b is None else b.square())  # noqa: E731
    first = first_projection(gate, up, gate_bias, up_bias)
    g, g_off = torch.where(keep, linear(x, *first), 0.0), torch.where(keep, terms(x, *first), 0.0)
    u, u_off = (
        (torch.ones_like(g), torch.zeros_like(g)) if gate is None else (linear(x, up, up_bias), terms(x, up, up_bias))
    )
    h, h_off = g * u, g_off * u.square() + g.square() * u_off
    dh = torch.where(keep, dy @ down + dl1[:, None] * h.sign(), 0.0)
    dh_off = torch.where(keep, terms(dy, down.t()) + dl1[:, None].square(), 0.0)
    # The first term of each is the rounding of the value itself, its square; the others come from rounded factors.
    dg = (dh * u).square() + dh_off * u.square() + dh.square() * u_off
    du = (dh * g).square() + dh_off * g.square() + dh.square() * g_off
    exact_h, h = h, h.square() + h_off
    squared = (None if t is None else t.square() for t in (x, gate, up, dy))
    made = gradient_sums(*squared, h, dg, du)
    # dl1 is added to values that were rounded: numbers on a grid, which the same number moves off it by the same
    # amount. So a token's neurons are rounded in the same direction, and the errors of a sum over them add up.
    half = dh.abs() * torch.where(keep, exact_h.sign(), 0.0) / 2
    made[0] += (half @ up if gate is None else (half * u) @ gate + (half * g) @ up).square()
    if gate is not None:  # the two halves of the gradient of x are rounded, then added
        made[0] += (torch.where(keep, dh * u, 0.0) @ gate).square() + ((dh * g) @ up).square()
    # Terms of one sign that are added one after the other in float32 cost up to this much more than rounding each.
    one_by_one = 0.15 * max(*x.shape, up.shape[0]) * torch.finfo(torch.float32).eps
    return [None if t is None else (torch.finfo(tensors[0].dtype).eps + one_by_one) * t.sum().sqrt() for t in made]

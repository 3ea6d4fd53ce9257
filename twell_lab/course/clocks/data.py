"""A benchmark rebuilt with its faults, and the clocks that find them: data in, data out, nothing drawn.

Everything runs on a CPU and on a GPU. Times are in milliseconds. A CPU has no queue of work that a call could return
before: there a worker thread stands in for it (`Queue`), which is a simulation and is called so.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from ...bench.comparison import quantile, scattered
from ...core import InputError
from ...formats.classic import CSR
from ...formats.matrix import rows_of
from ...ops.clock import time_bursts, time_cuda
from ..measure.data import Samples, as_fast, median, ms, relative_error

SIZES = {"cpu": (2048, 2048, 256), "cuda": (4096, 4096, 1024)}  # outputs, inputs, tokens of the layer that is timed
SPARSITY = 0.95
Call = Callable[[], object]


# ---- the case ----


@dataclass
class Case:
    """A layer with sparse weights, y = x W^T, and its input.

    weight: W [outputs, inputs], zeros where it was pruned. stored: W as CSR. x: [tokens, inputs]. b: x^T, contiguous,
    for a product written W b. exact: y in float64.
    """

    weight: Tensor
    stored: CSR
    x: Tensor
    b: Tensor
    exact: Tensor


def case(device: str, dtype: torch.dtype, sizes: tuple[int, int, int] | None = None) -> Case:
    """The layer that the tutorial's benchmark is rebuilt with: `SPARSITY` of its weights are zero, anywhere."""
    outputs, inputs, tokens = sizes or SIZES[device]
    weight = scattered(outputs, inputs, round((1 - SPARSITY) * inputs), dtype=dtype, device=device)
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    return Case(weight, CSR.from_dense(weight), x, x.t().contiguous(), linear(x.double(), weight.double()))


def without_multiplying(a: CSR, b: Tensor) -> Tensor:
    """A wrong product on purpose: the sum of each row's stored values, in every column of a result shaped as a @ b.

    Only the width of b is used, never its values. Such a kernel is easily written by mistake, and it is fast.
    """
    sums = torch.zeros(a.shape[0], dtype=b.dtype, device=b.device)
    sums.index_add_(0, rows_of(a.pointer, a.nnz), a.value)
    return sums[:, None].expand(-1, b.shape[1]).contiguous()


def left_behind(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The dense layer as a baseline that was left behind: on the CPU, in float32, where the weight is on a GPU; else in
    float64. It takes x as it is, and brings it to where it works."""
    dtype = torch.float32 if weight.is_cuda else torch.float64
    left = weight.to("cpu", dtype)
    return lambda x: linear(x.to("cpu", dtype), left)


class Claims:
    """The number that a benchmark arrives at, after each repair."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}

    def add(self, step: str, dense_ms: float, sparse_ms: float) -> str:
        """Note how many times as fast as dense the sparse layer is after this step; returns it as a line. A step that
        is already there is replaced."""
        if not (dense_ms > 0 and sparse_ms > 0):
            raise InputError(f"the times are {dense_ms} and {sparse_ms}; milliseconds above zero are accepted")
        self.steps[step] = dense_ms / sparse_ms
        return f"{step}: {times(self.steps[step])}"

    def largest(self) -> tuple[str, float]:
        """The repair that changed the number most, and by which factor (above 1, whatever its direction)."""
        if len(self.steps) < 2:
            raise InputError(f"there are {len(self.steps)} steps; two or more are accepted")
        names, values = list(self.steps), list(self.steps.values())
        factors = [max(a / b, b / a) for a, b in zip(values, values[1:])]
        most = max(factors)
        return names[factors.index(most) + 1], most


def times(value: float) -> str:
    """A ratio as text: 812x, 4.71x, 0.33x."""
    return f"{value:,.0f}x" if value >= 100 else f"{value:.3g}x"


# ---- a queue, and clocks that wait for it or do not ----


class Queue:
    """A queue of calls that are done later: a GPU's stream or, on a CPU, a worker thread in its place.

    `launch(call)` returns at once on both; `synchronize()` waits until all launched calls are done.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._worker = None if device == "cuda" else ThreadPoolExecutor(max_workers=1)
        self._pending: list[Future] = []

    def launch(self, call: Call) -> None:
        if self._worker is None:
            call()
        else:
            self._pending.append(self._worker.submit(call))

    def synchronize(self) -> None:
        if self._worker is None:
            torch.cuda.synchronize()
        while self._pending:
            self._pending.pop().result()

    @property
    def name(self) -> str:
        return "the GPU's queue" if self._worker is None else "simulated queue (a thread)"


def stop_watch(call: Call, queue: Queue) -> tuple[float, float]:
    """Milliseconds until the launch of `call` has returned, and until its work is done."""
    queue.synchronize()
    start = time.perf_counter()
    queue.launch(call)
    returned = time.perf_counter()
    queue.synchronize()
    return 1e3 * (returned - start), 1e3 * (time.perf_counter() - start)


def asked_and_done(call: Call, queue: Queue, rounds: int = 9) -> tuple[float, float]:
    """The medians of `stop_watch` over so many calls, one before them left out."""
    stop_watch(call, queue)
    asked, done = zip(*(stop_watch(call, queue) for _ in range(rounds)))
    return median(list(asked)), median(list(done))


def in_turns(calls: dict[str, Call], queue: Queue, rounds: int = 15, cold: bool = True) -> Samples:
    """Milliseconds of each call, the calls in turn, each waited for; one call of each before them is left out.

    cold: whether something else is read before each call, so that it finds nothing in the caches.
    """
    filler = other_data(queue.device) if cold else None
    samples: Samples = {name: [] for name in calls}
    for call in calls.values():
        stop_watch(call, queue)
    for _ in range(rounds):
        for name, call in calls.items():
            if filler is not None:
                filler.add_(1)
            samples[name].append(stop_watch(call, queue)[1])
    return samples


def other_data(device: str) -> Tensor:
    """More bytes than a cache of this device holds."""
    return torch.empty(2**28 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)


def cached_side(device: str) -> int:
    """A width of square 16-bit weights that two thirds of a GPU's L2 cache hold, so that a product can find them there:
    a power of two, at most the width of the layer that is timed. On a CPU one of its caches holds 1024."""
    if device != "cuda":
        return 1024
    holds = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) * 2 // 3
    return min(SIZES[device][0], 2 ** (math.isqrt(holds // 2).bit_length() - 1)) if holds else 1024


def warm_and_cold(call: Call, device: str, rounds: int = 15) -> Samples:
    """Milliseconds of a call right after another one ("warm"), and after other data has filled the caches ("cold")."""
    queue, filler = Queue(device), other_data(device)
    call()
    samples: Samples = {"warm": [], "cold": []}
    for _ in range(rounds):
        call()
        samples["warm"].append(stop_watch(call, queue)[1])
        filler.add_(1)
        samples["cold"].append(stop_watch(call, queue)[1])
    return samples


@contextmanager
def disturbed(device: str):
    """Meanwhile, a thread of ours keeps the machine busy with products of its own."""
    over = threading.Event()

    def work() -> None:
        side = 4096 if device == "cuda" else 512
        a = torch.ones(side, side, device=device)
        if device != "cuda":
            while not over.is_set():
                a @ a
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            while not over.is_set():
                a @ a
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def same_call_twice(call: Call, device: str, rounds: int = 15) -> dict[str, Samples]:
    """One call timed under two names, "first" and "second", on a machine that gets busy after a third of the calls.

    Returns the samples of two orders: "one after the other" (all of the first, then all of the second) and "in turns".
    """
    queue, found = Queue(device), {}
    orders = {
        "one after the other": ["first"] * rounds + ["second"] * rounds,
        "in turns": ["first", "second"] * rounds,
    }
    stop_watch(call, queue)
    for order, names in orders.items():
        samples: Samples = {"first": [], "second": []}
        for name in names[: quiet(rounds)]:
            samples[name].append(stop_watch(call, queue)[1])
        with disturbed(device):
            for name in names[quiet(rounds) :]:
                samples[name].append(stop_watch(call, queue)[1])
        found[order] = samples
    return found


def quiet(rounds: int) -> int:
    """Return how many of the first calls of `same_call_twice` the machine is left in peace for: a third, an even
    number."""
    return 2 * (rounds // 3)


def ratio(samples: Samples, one: str, other: str) -> float:
    """The median of one over that of the other."""
    return median(samples[one]) / median(samples[other])


def small_calls(call: Call) -> dict | None:
    """The GPU's own time of a call, and the wall time of plain calls, as rows of `measure.recorded_calls` have them:
    {ms, wall_ms, wall_samples, where}. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    timed = {"call": lambda turn: call()}
    _, wall = time_bursts(timed, torch.cuda.synchronize)["call"]
    own = median(time_cuda(timed)["call"])
    return {"ms": own, "wall_ms": median(wall), "wall_samples": wall, "where": "yours, now"}


def calls_sentence(rows: list[dict]) -> str:
    """Return how long the GPU works, with emptied caches, and how long plain calls in a row take, for the fewest tokens
    of each run that is there: of calls, between what the middle half of them lies.

    rows: `measure.recorded_calls`, and `small_calls` with its tokens."""
    lines = []
    for where in dict.fromkeys(row["where"] for row in rows):
        timed = [row for row in rows if row["where"] == where and row.get("wall_ms")]
        if timed:
            row = min(timed, key=lambda row: row["tokens"])
            low, high = (quantile(row["wall_samples"], share) for share in (0.25, 0.75))
            named = f"{row['tokens']:,} token{'s' * (row['tokens'] > 1)}"
            unit = ms(high).split()[1]
            middle = f"{ms(low).removesuffix(f' {unit}')} to {ms(high)}"
            what = f"SparseFFN of {row['d_model']:,} x {row['d_ff']:,}" if "d_ff" in row else "This product"
            lines.append(f"{what}, {named}: the GPU works {ms(row['ms'])}, a call takes {middle}.")
    return "\n".join(lines) or "No plain calls on a GPU are recorded in this checkout."


# ---- what a call really runs ----

# Products of torch, and which of their arguments is the first factor.
_PRODUCTS = {name: 0 for name in ("mm", "bmm", "mv", "dot", "linear", "matmul", "_sparse_mm", "_int_mm", "_scaled_mm")}
_PRODUCTS |= {name: 1 for name in ("addmm", "baddbmm", "addmv", "_sparse_addmm")}


@dataclass
class Product:
    """One product that ran. work: its multiply-adds, as if every value were multiplied; dense: whether both factors
    were dense tensors; terms: dtype and device of the first factor."""

    name: str
    work: int
    dense: bool
    terms: str


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.products: list[Product] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.names.append(name)
        if name in _PRODUCTS:
            first, second = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
            dense = first.layout == second.layout == torch.strided
            self.products.append(Product(name, result.numel() * first.shape[-1], dense, terms(first)))
        return result


def terms(x: Tensor) -> str:
    """Return what a tensor is computed in, and where: "float32 on cpu"."""
    return f"{str(x.dtype).removeprefix('torch.')} on {x.device.type}"


def operations(call: Call) -> tuple[list[str], list[Product]]:
    """The names of all operations of torch that a call runs, in order, and its products. Kernels that are not torch's
    are not seen."""
    with torch.inference_mode(False), torch.no_grad(), _Watch() as watch:
        call()
    return watch.names, watch.products


def dense_work(call: Call) -> int:
    """The multiply-adds of those products of a call whose factors are both dense."""
    return sum(product.work for product in operations(call)[1] if product.dense)


# ---- the checklist ----


@dataclass
class Line:
    """One line of a verdict: what was asked, whether it holds, and what was found."""

    asked: str
    holds: bool
    found: str

    def __str__(self) -> str:
        return f"[{'ok' if self.holds else 'NO'}] {self.asked}: {self.found}"


@dataclass
class Verdict:
    """Five lines on a benchmark, and the number that came out here. samples: milliseconds of "dense" and "sparse", in
    turns, waited for, with cold caches. x: how many times as fast as dense."""

    lines: list[Line]
    x: float
    samples: Samples = field(repr=False)

    @property
    def holds(self) -> bool:
        return all(line.holds for line in self.lines)

    @property
    def fails(self) -> str:
        """Return what does not hold, as words: "right, clear", or "nothing"."""
        return ", ".join(line.asked for line in self.lines if not line.holds) or "nothing"

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))


def verdict(
    sparse: Callable[[Tensor], Tensor],
    dense: Callable[[Tensor], Tensor],
    x: Tensor,
    exact: Callable[[Tensor], Tensor],
    *,
    claimed: tuple[float, float] | None = None,
    rounds: int = 15,
) -> Verdict:
    """Judge a benchmark of a sparse layer against a dense one.

    Args:
        sparse, dense: from an input like x to the output, as they were timed.
        x: the input, [tokens, inputs]; its device and dtype are those that both should run on.
        exact: from an input in float64 to the output in float64.
        claimed: the milliseconds of dense and sparse that somebody published for this machine, if they did.
        rounds: calls of each that are timed.

    Returns:
        A `Verdict`, which prints as five lines. right: the result, on random values. sparse: the products that ran are
        not the dense ones. same terms: the dtype and device of both. waited: the claimed times are not those of calls
        that had only been launched. clear: the difference is more than the spread, and is what was claimed.
    """
    if claimed is not None and not (len(claimed) == 2 and min(claimed) > 0):
        raise InputError(f"claimed is {claimed}; the milliseconds of dense and sparse, above zero, are accepted")
    fresh = torch.randn(x.shape, device=x.device).to(x.dtype)
    sparse, dense = torch.no_grad()(sparse), torch.no_grad()(dense)  # in the queue's thread as well
    y, like = sparse(fresh), dense(fresh)
    want = exact(fresh.double())
    error = relative_error(y.to(want.device), want) if y.shape == want.shape else float("inf")
    off = f"{error:.0%}" if error >= 0.01 else f"{error:.1g}"
    right = Line("right", error <= (1e-4 if x.dtype.itemsize > 2 else 0.02), f"off by {off} on random values")

    whole, mine = dense_work(lambda: dense(x)), dense_work(lambda: sparse(x))
    share = mine / whole if whole else 0.0
    skips = Line("sparse", share < 0.95, f"{share:.0%} of the dense products ran")

    ran = sorted({product.terms for product in operations(lambda: dense(x))[1]} | {terms(like)})
    mine_ran = sorted({terms(y)})
    same = ran == mine_ran == [terms(x)] and y.shape == like.shape
    equal = Line("same terms", same, f"{', '.join(ran)}, and {', '.join(mine_ran)}")

    samples = in_turns(
        {"dense": lambda: dense(x), "sparse": lambda: sparse(x)}, Queue("cuda" if x.is_cuda else "cpu"), rounds
    )
    here = [median(samples[name]) for name in ("dense", "sparse")]
    waited = Line("waited", True, f"{ms(here[0])} and {ms(here[1])} here")
    if claimed is not None:
        waited.holds = all(said >= value / 2 for said, value in zip(claimed, here))
        waited.found = f"{ms(claimed[1])} claimed, {ms(here[1])} here"

    found = here[0] / here[1]
    clear = Line("clear", apart(samples["dense"], samples["sparse"]), times(found))
    if claimed is not None:
        said = claimed[0] / claimed[1]
        clear.holds &= 2 / 3 <= said / found <= 3 / 2
        clear.found = f"{times(said)} claimed, {times(found)} here"
    return Verdict([right, skips, equal, waited, clear], found, samples)


def apart(one: list[float], other: list[float]) -> bool:
    """Return whether the middle halves of two lists of samples do not overlap."""
    low, high = sorted((one, other), key=median)
    return quantile(low, 0.75) < quantile(high, 0.25)


def three_lines(claims: Claims, found: Verdict, effects: dict[str, str]) -> list[str]:
    """Return what the notebook comes to. effects: by which factor each clock was off, in words, of those that only
    time badly."""
    first, (step, factor) = next(iter(claims.steps.values())), claims.largest()
    said = "faster" if found.x > 1 else "slower"
    if not apart(found.samples["dense"], found.samples["sparse"]):
        said = "no clear difference"
    return [
        f"Claimed {times(first)}, repaired {as_fast(found.samples, 'sparse', 'dense')}: {said}.",
        f'"{step}" changed it most, by {times(factor)}.',
        f"Honest mistakes: {', '.join(f'{name} {factor}' for name, factor in effects.items())}.",
    ]

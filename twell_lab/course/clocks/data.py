"""A benchmark rebuilt with its faults, and the clocks that find them. Everything runs on a CPU and on a GPU. Times are
in milliseconds. A CPU has no queue of work: a worker thread stands in for it (`Queue`), a simulation, and called so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...bench.comparison import quantile
from ..measure.data import Samples, median, ms, relative_error

Call = Callable[[], object]


# ---- a queue, and clocks that wait for it or do not ----


class Queue:
    """A queue of calls that are done later: a GPU's stream or, on a CPU, a worker thread in its place. `launch` returns
    at once on both; `synchronize` waits until all launched calls are done."""

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


def in_turns(calls: dict[str, Call], queue: Queue, rounds: int = 15) -> Samples:
    """Milliseconds of each call, in turn, each waited for and with cold caches, after one of each that is left out."""
    filler, samples = other_data(queue.device), {name: [] for name in calls}
    for call in calls.values():
        stop_watch(call, queue)
    for _ in range(rounds):
        for name, call in calls.items():
            filler.add_(1)
            samples[name].append(stop_watch(call, queue)[1])
    return samples


def other_data(device: str) -> Tensor:
    """More bytes than a cache of this device holds."""
    return torch.empty(2**28 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)


@contextmanager
def disturbed(device: str):
    """Meanwhile, a thread of ours keeps the machine busy with products of its own."""
    over = threading.Event()

    def work() -> None:
        side = 4096 if device == "cuda" else 512
        a = torch.ones(side, side, device=device)
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            while not over.is_set():
                a @ a
                if device == "cuda":
                    torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def same_call_twice(call: Call, device: str, rounds: int = 15) -> dict[str, Samples]:
    """Samples of one call timed under two names, "first" and "second", "one after the other" and "in turns", on a
    machine that gets busy after `quiet` of the calls."""
    queue, found = Queue(device), {}
    orders = {"one after the other": ["first"] * rounds + ["second"] * rounds, "in turns": ["first", "second"] * rounds}
    stop_watch(call, queue)
    for order, names in orders.items():
        samples = found[order] = {"first": [], "second": []}
        for name in names[: quiet(rounds)]:
            samples[name].append(stop_watch(call, queue)[1])
        with disturbed(device):
            for name in names[quiet(rounds) :]:
                samples[name].append(stop_watch(call, queue)[1])
    return found


def quiet(rounds: int) -> int:
    """Return how many of the first calls of `same_call_twice` find the machine idle: a third, an even number."""
    return 2 * (rounds // 3)


def ratio(samples: Samples, one: str, other: str) -> float:
    """The median of one over that of the other."""
    return median(samples[one]) / median(samples[other])


# ---- what a call really runs ----

# Products of torch, and which of their arguments is the first factor.
_PRODUCTS = {name: 0 for name in ("mm", "bmm", "mv", "dot", "linear", "matmul", "_sparse_mm", "_int_mm", "_scaled_mm")}
_PRODUCTS |= {name: 1 for name in ("addmm", "baddbmm", "addmv", "_sparse_addmm")}


class Product(NamedTuple):
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


def verdict(
    sparse: Callable[[Tensor], Tensor],
    dense: Callable[[Tensor], Tensor],
    x: Tensor,
    exact: Callable[[Tensor], Tensor],
    *,
    claimed: tuple[float, float] | None = None,
    rounds: int = 15,
) -> dict[str, tuple[bool, str]]:
    """Judge a benchmark of a sparse layer against a dense one: what was asked -> (whether it holds, what was found).

    right: the result, on random values. sparse: the products that ran are not the dense ones. same terms: the dtype and
    device of both. waited: the claimed times are not those of calls that had only been launched. clear: the difference
    is more than the spread, and is what was claimed.

    sparse, dense: from an input like x, [tokens, inputs], to the output, as they were timed. exact: the same in
    float64. claimed: the milliseconds of dense and sparse that somebody published for this machine."""
    fresh = torch.randn(x.shape, device=x.device).to(x.dtype)
    sparse, dense = torch.no_grad()(sparse), torch.no_grad()(dense)  # in the queue's thread as well
    y, like, want = sparse(fresh), dense(fresh), exact(fresh.double())
    error = relative_error(y.to(want.device), want) if y.shape == want.shape else float("inf")

    whole, mine = dense_work(lambda: dense(x)), dense_work(lambda: sparse(x))
    share = mine / whole if whole else 0.0
    ran = sorted({product.terms for product in operations(lambda: dense(x))[1]} | {terms(like)})
    same = ran == [terms(y)] == [terms(x)] and y.shape == like.shape

    queue = Queue("cuda" if x.is_cuda else "cpu")
    samples = in_turns({"dense": lambda: dense(x), "sparse": lambda: sparse(x)}, queue, rounds)
    here = [median(samples[name]) for name in ("dense", "sparse")]
    times = here[0] / here[1]
    lines = {
        "right": (error <= (1e-4 if x.dtype.itemsize > 2 else 0.02), f"off by {error:.1%} on random values"),
        "sparse": (share < 0.95, f"{share:.0%} of the dense products ran"),
        "same terms": (same, f"{', '.join(ran)}, and {terms(y)}"),
        "waited": (True, f"{ms(here[0])} and {ms(here[1])} here"),
        "clear": (apart(samples["dense"], samples["sparse"]), f"{times:,.3g}x"),
    }
    if claimed is not None:
        said = claimed[0] / claimed[1]
        waited = all(one >= value / 2 for one, value in zip(claimed, here))
        lines["waited"] = waited, f"{ms(claimed[1])} claimed, {ms(here[1])} here"
        clear = lines["clear"][0] and 2 / 3 <= said / times <= 3 / 2
        lines["clear"] = clear, f"{said:,.3g}x claimed, {times:,.3g}x here"
    return lines


def apart(one: list[float], other: list[float]) -> bool:
    """Return whether the middle halves of two lists of samples do not overlap."""
    low, high = sorted((one, other), key=median)
    return quantile(low, 0.75) < quantile(high, 0.25)

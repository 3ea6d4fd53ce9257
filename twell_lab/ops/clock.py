"""How layers are measured: drawn workloads, a check in float64 before any clock starts, and the clocks.

Calls take turns, so that whatever else the machine does slows all of them alike, with inputs that rotate. On a GPU the
L2 cache is emptied before each call, which then is timed by device events (`time_cuda`: the GPU's own work) or as its
caller waits for it (`time_calls`); `graphed` makes a call a CUDA graph. On a CPU: wall time."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .. import core
from ..core import DeviceError, InputError, TwellError
from ..formats.twell import VALUE_DTYPES
from . import accuracy
from .reference import GatedFeedForward, PlainFeedForward

GRAPH_TOKENS = 256  # up to so many tokens a layer takes about as long as its launches: graph replays are timed too
ROTATED = 3  # how many inputs take turns in a timing
Name = TypeVar("Name", bound=Hashable)  # of a call that is timed
Timed = Callable[[int], object]  # given the number of its turn
Calls = dict[Name, Timed]
Samples = dict[Name, list[float]]  # milliseconds
Bursts = dict[Name, tuple[list[float], list[float]]]


class WrongResult(TwellError, ArithmeticError):
    """A benchmark's result did not agree with float64: nothing was timed."""


# ---- the workload ----


def firing_rates(d_ff: int, nnz: float, kind: str = "lognormal", *, seed: int = 0) -> Tensor:
    """Return the probability with which each neuron fires, float64 [d_ff]; their sum is nnz.

    kind "lognormal": 30% of the neurons never fire, and the others' rates are lognormal with sigma 1.5 (roughly as in
    trained models), none above 0.95. "uniform": every neuron fires equally often. Raises InputError for anything else,
    and for an nnz above 0.6 d_ff."""
    if isinstance(nnz, bool) or not isinstance(nnz, (int, float)) or not 0 <= nnz <= 0.6 * d_ff:
        raise InputError(f"nnz is {nnz}; 0 to {0.6 * d_ff:g} (0.6 d_ff) can be drawn")
    if kind == "uniform":
        return torch.full((d_ff,), nnz / d_ff, dtype=torch.float64)
    if kind != "lognormal":
        raise InputError(f"workload is {kind!r}; 'lognormal' and 'uniform' are accepted")
    generator = torch.Generator().manual_seed(seed)
    rate = torch.randn(d_ff, generator=generator, dtype=torch.float64).mul(1.5).exp()
    rate[torch.randperm(d_ff, generator=generator)[: round(0.3 * d_ff)]] = 0
    for _ in range(100):  # clamping lowers the sum: scale again until it is reached
        rate = (rate * (nnz / rate.sum().clamp(min=1e-30))).clamp(max=0.95)
    return rate


def workload(tokens: int, d_model: int, d_ff: int, nnz: float, kind: str, dtype, device, *, seed: int = 0):
    """Draw a workload: (a dense gated layer, a list of `ROTATED` inputs [tokens, d_model]), on which about nnz neurons
    fire at a token, at the rates of `firing_rates`. Raises InputError for a size, nnz, kind or dtype that is not
    accepted, or more than fits the device's memory."""
    for name, size, least in (("tokens", tokens, 1), ("d_model", d_model, 8), ("d_ff", d_ff, 1)):
        if type(size) is not int or not least <= size < 2**63:
            raise InputError(f"{name} is {size!r:.80}; a whole number from {least} to 2**63 - 1 is accepted")
    if dtype not in VALUE_DTYPES:
        raise InputError(f"dtype is {dtype!r}; torch.bfloat16, float16 and float32 are accepted")
    device = torch.device(device)
    there = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else core.memory()
    # Of the layer, of what goes through it, and of the rates, which are drawn on the host.
    needed = dtype.itemsize * (3 * d_model * d_ff + tokens * (ROTATED * d_model + d_ff)) + 16 * d_ff
    if there is not None and needed > there:
        has = f"{needed / 2**30:,.1f} GiB of memory at least, and {device.type} has {there / 2**30:,.1f}"
        raise InputError(f"tokens {tokens}, d_model {d_model} and d_ff {d_ff}: {has}; smaller sizes are accepted")
    rates = firing_rates(d_ff, nnz, kind, seed=seed)
    return drawn(rates, tokens, d_model, dtype, device, shrink=max(nnz, 1.0) ** 0.5, seed=seed)


def drawn(rates: Tensor, tokens: int, d_model: int, dtype, device, *, shrink: float, gated: bool = True, seed: int = 0):
    """Draw a layer and inputs as `workload` does, for given firing rates [d_ff]. gated: whether the layer has a gate.
    shrink: what the down projection is divided by.

    The first component of every input is a constant, and the gate's weights for it set each neuron's threshold. The
    rest of the product is standard normal: so neurons fire independently, each at its own rate, through a real GEMM."""
    d_ff = rates.numel()
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)
    kind = GatedFeedForward if gated else PlainFeedForward
    layer = kind(d_model, d_ff).requires_grad_(False).to_empty(device=device)
    constant = d_model**0.5
    threshold = -torch.special.ndtri(rates.clamp(1e-30, 1 - 1e-7)).to(device, torch.float32)
    pattern = normal(d_ff, d_model)
    if d_model > 1:  # rows of length exactly 1, or a narrow layer would miss its rates
        pattern /= pattern[:, 1:].norm(dim=1, keepdim=True)
    pattern[:, 0] = -threshold.clamp(max=12.0) / constant
    (layer.gate_proj if gated else layer.up_proj).weight.data = pattern
    if gated:
        layer.up_proj.weight.data = normal(d_ff, d_model) / d_model**0.5
    layer.down_proj.weight.data = normal(d_model, d_ff) / shrink
    inputs = [normal(tokens, d_model) for _ in range(ROTATED)]
    for x in inputs:
        x[:, 0] = constant
    return layer.to(dtype), [x.to(dtype) for x in inputs]


# ---- correctness, before any clock starts ----


def check(dense: nn.Module, layer, x: Tensor, *, call: Callable | None = None) -> float:
    """Compare a layer with float64 on 64 rows spread over x; returns the worst ratio of error to what is allowed.

    layer: what has gate, up and down projections (gate None: a plain layer). call: what computes its result, by default
    the layer itself. Raises WrongResult, naming the row, if the promise of twell_lab.ops.accuracy is broken, and if the
    dense module, whose error the promise allows for, computes something else than the layer's weights say."""
    picked = torch.linspace(0, x.shape[0] - 1, min(64, x.shape[0]), device=x.device).long()
    y, reached = (layer if call is None else call)(x)[picked], dense(x)[picked]
    gate, up, down = layer.gate, layer.up, layer.down
    first = gate or up
    biases = (None if gate is None else gate.bias, up.bias, down.bias)
    exact = accuracy.Exact(x[picked], None if gate is None else gate.weight, up.weight, down.weight, *biases)
    finite = exact.y.isfinite() & reached.isfinite()
    off = torch.where(finite, reached - exact.y, 0).norm() / torch.where(finite, exact.y, 0).norm().clamp(min=1e-30)
    if off > 0.05:  # 16-bit values make a few thousandths
        raise WrongResult(f"the dense {type(dense).__name__} is off by {float(off):.3g} of its norm: nothing was timed")
    verdict = exact.judge(y, reached, linear(x, first.weight, first.bias)[picked])
    if not verdict.ratio <= 1.0:
        row = int(picked[verdict.row])
        raise WrongResult(f"row {row} is off by {verdict.ratio:.3g} times what is allowed: nothing was timed")
    return verdict.ratio


# ---- clocks ----


def quartiles(samples: list[float]) -> tuple[float, float]:
    """Return (median, distance between the quartiles) of the samples."""
    values = torch.tensor(samples, dtype=torch.float64)
    low, middle, high = torch.quantile(values, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return middle, high - low


def time_cpu(calls: Calls[Name], seconds: float) -> Samples[Name]:
    """Return milliseconds of each call, for the named calls in turn, until `seconds` have passed, and twice at least.

    A turn is twenty calls, one after the other, as of a layer that is used again and again, whose weights stay in the
    cache as far as they fit."""
    for call in calls.values():
        call(0), call(1)
    samples: Samples[Name] = {name: [] for name in calls}
    end, turn = time.perf_counter() + seconds, 0
    while turn < 40 or time.perf_counter() < end:
        for name, call in calls.items():
            samples[name] += [_wall(call, turn + i) for i in range(20)]
        turn += 20
    return samples


def _wall(call: Timed, turn: int) -> float:
    start = time.perf_counter()
    call(turn)
    return 1e3 * (time.perf_counter() - start)


def _events(call: Timed, turn: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Call between two events of the current stream, and return these."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(turn)
    end.record()
    return start, end


_READ = 0.3  # milliseconds, about the least that a GPU takes to read a gigabyte: what an H100 and an A100 are taken for
_MOST_READS = 100  # before a call: what the host needs longer for is a call that waits for the device


def time_cuda(calls: Calls[Name], rounds: int = 30) -> Samples[Name]:
    """Return milliseconds of GPU time of each call, by device events, for the named calls in turn, `rounds` times.

    Before each call a gigabyte is read, as often as its host needs time to prepare it, going by the last warm call (and
    by one read that is timed first, on a GPU that is slow to read). So the L2 cache holds nothing that the call needs,
    its launches have been prepared, and these are times of the device, not of the host."""
    flush = torch.zeros(2**28, dtype=torch.float32, device="cuda")
    flush.sum()
    start, end = _events(lambda turn: flush.sum(), 0)
    torch.cuda.synchronize()
    read = start.elapsed_time(end)
    read = read if read > 2 * _READ else _READ  # a T4 takes some 3.5 ms
    reads = {}
    for name, call in calls.items():
        host = [_wall(call, turn) for turn in range(ROTATED)][-1]
        reads[name] = min(_MOST_READS, 1 + int(host / read))
        torch.cuda.synchronize()  # or the next would wait in a full queue, and seem to take the host longer
    events: dict[Name, list] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            for _ in range(reads[name]):
                flush.sum()
            events[name].append(_events(call, turn))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def time_calls(calls: Calls[Name], device: torch.device, *, seconds=0.1, beside: int = 0) -> Samples[Name]:
    """Return milliseconds of each plain call, until the device has finished it, for the named calls in turn.

    On a GPU by device events, after the L2 cache was emptied and the GPU has nothing left to do: so it is the host's
    time or the device's, whichever is longer, as a call among others in a model takes. seconds: about how long to go
    on, for 5 to 40 turns. beside: on a CPU, how many bytes of other weights come through the caches between two calls;
    up to 64 MiB are."""
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        others = torch.zeros((2**30 if on_gpu else min(beside, 2**26)) // 8, dtype=torch.int64, device=device)

        def milliseconds(call: Timed, turn: int) -> float:
            others.sum()
            if not on_gpu:
                return _wall(call, turn)
            torch.cuda.synchronize()
            start, end = _events(call, turn)
            end.synchronize()
            return start.elapsed_time(end)

        for call in calls.values():
            for turn in range(ROTATED):
                call(turn)
        samples: Samples[Name] = {name: [] for name in calls}
        end, turn = time.perf_counter() + seconds, 0
        while turn < 5 or turn < 40 and time.perf_counter() < end:
            for name, call in calls.items():
                samples[name].append(milliseconds(call, turn))
            turn += 1
    return samples


def time_bursts(calls: Calls[Name], wait: Callable, *, rounds=5, count=10, warm: int | None = None) -> Bursts[Name]:
    """Return two lists of milliseconds a call, for each named call in turn: of a burst of `count` plain calls, until
    the last one returned, and until the device had finished all of them.

    wait: returns once the device has finished, as torch.cuda.synchronize does. rounds: bursts of each call. warm: how
    many calls come before a burst and are not timed; None: as many as it has."""
    samples: Bursts[Name] = {name: ([], []) for name in calls}
    for _, name in itertools.product(range(rounds), calls):
        for turn in range(count if warm is None else warm):  # or it would meet the caches as another call left them
            calls[name](turn)
        wait()
        start = time.perf_counter()
        for turn in range(count):
            calls[name](turn)
        returned = time.perf_counter()
        wait()
        for taken, moment in zip(samples[name], (returned, time.perf_counter())):
            taken.append(1e3 * (moment - start) / count)
    return samples


def graphed(call: Timed, inputs: int = ROTATED) -> Timed:
    """Return the call as CUDA graphs, one for each of so many inputs, so that a replay costs a single launch."""
    graphs = []
    for turn in range(inputs):
        call(turn)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(turn)
        graphs.append(graph)
    return lambda turn: graphs[turn % len(graphs)].replay()


def dtype_for(device: str | torch.device) -> torch.dtype:
    """Return the fastest dtype: bfloat16 on a GPU that has it, float16 on an older GPU, float32 on a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def device_name(device: torch.device) -> str:
    """Return what records and plans call a device: the GPU's own name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_bytes(call: Timed) -> int:
    """Return the most bytes that one call holds on the GPU beyond what was there before it."""
    gc.collect()  # or what is freed within the call would count for it
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def present_device(name: str | torch.device | None) -> torch.device:
    """Return the device called `name`, by default a GPU where there is one; DeviceError where it is not there."""
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    try:
        found = torch.device(there[-1] if name is None else name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError):  # torch without CUDA asserts
        found = None
    if found is None or found.type not in there:
        raise DeviceError(f"device is {str(name)!r}; accepted here: {', '.join(there)}")
    return found

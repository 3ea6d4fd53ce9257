"""The runner of all benchmarks. `steps` lists the steps of a record along its axes. `admit` makes the calls that a step
compares, each of which is checked before any clock starts. `measured` times them in turn, and makes rows of records of
the samples (see twell_lab.records).

A row's `ms` is the device's time. `wall_ms` is the time of a plain call as a program sees it: the wall time of a burst
of calls that is waited for at its end, divided by the calls. `host_us` is the part of it until the last call returned.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..core import InputError
from ..formats import twell
from ..layers.find import feed_forwards
from ..ops import clock as clocks

DENSE, COMPILED = "dense eager", "dense compiled"  # the paths that every other path is compared with
BURSTS = 5  # samples of the wall time of a call
BURST_MS = 5.0  # about how long the calls of a burst take, if one call is not longer
LARGE = 2**14  # for more tokens only one input is captured: the graphs of several would not fit into the memory
# Calls of a burst at most. The driver's queue holds about a thousand launches, and the host waits once it is full.
MOST = 50

Call = Callable[[int], object]  # takes the number of its turn
Calls = dict[str, Call]
Entry = tuple[Call, dict]  # a call that was checked, and what its rows say
Step = Callable[[], list[dict]]
Sections = dict[str, list[Step]]  # of a record: steps, each of which returns rows
Samples = dict[str, list[float]]  # milliseconds of the device, by the name of the call
Bursts = dict[str, tuple[list[float], list[float]]]  # milliseconds a call, of the host and on the wall


# ---- what rows say ----


def about(kind: str, like: Tensor, workload: str, **sizes) -> dict:
    """Return what all rows of a comparison say: device and dtype of a tensor, the workload's name, and sizes."""
    where = {"device": clocks.device_name(like.device), "dtype": str(like.dtype).removeprefix("torch.")}
    return {"kind": kind, **where, **sizes, "workload": workload}


def sizes_of(config: Any) -> dict:
    """Return the sizes of a model's layers by the names that rows have, of a ModelConfig or a TrainConfig."""
    return {name: getattr(config, name) for name in ("d_model", "d_ff", "gated", "layers")}


def of_layer(kind: str, x: Tensor, d_ff: int, workload: str) -> dict:
    """Return what all rows of a comparison of layers, or of products, say; x: [tokens, d_model]."""
    return about(kind, x, workload, tokens=x.shape[0], d_model=x.shape[1], d_ff=d_ff)


@torch.no_grad()
def describe(kind: str, inputs: list[Tensor], first: Tensor, label: str, bias: Tensor | None = None) -> dict:
    """Return what `of_layer` does, with the neurons that fire at a token on average. inputs: [tokens, d_model] each.
    first, bias: weight [d_ff, d_model] and bias [d_ff] of the projection that decides which neurons fire."""
    fired = [twell.fires(linear(x, first, bias)).sum(1).double().mean() for x in inputs]
    return of_layer(kind, inputs[0], len(first), label) | {"nnz": round(float(sum(fired) / len(fired)), 2)}


def table(
    shared: dict,
    samples: Samples,
    facts: dict[str, dict] | None = None,
    bursts: Bursts | None = None,
    base: str | None = DENSE,
) -> list[dict]:
    """Return a row for each path: the median and spread of its samples, in milliseconds, and how many times as fast
    that is as the dense layer and as the compiled one. A path that was run in another way, as "twell (graph)", is
    compared with the dense layer that was run in the same way.

    shared: what all rows say. facts: what else the rows of a path say, in whatever way it was run. bursts: times of
    plain calls, for the paths that have them, whose rows get `wall_ms`, `wall_spread`, `wall_samples`, `dense_wall_ms`
    and `host_us`. base: the path that others are compared with; None: they are not."""
    medians, lines = {path: clocks.quartiles(values)[0] for path, values in samples.items()}, []
    for path, values in samples.items():
        name = path.partition(" (graph")[0]
        beside = base and base + path[len(name) :]
        dense = medians[beside] if beside else None
        ms, spread = clocks.quartiles(values)
        line = {**shared, "path": path, "ms": ms, "spread": spread, "dense_ms": dense, "x_dense": dense and dense / ms}
        if beside == base and COMPILED in medians:
            line["x_compiled"] = medians[COMPILED] / ms
        line |= (facts or {}).get(name, {})
        if bursts and path in bursts:
            host, wall = bursts[path]
            line["wall_ms"], line["wall_spread"] = clocks.quartiles(wall)
            if beside:
                line["dense_wall_ms"] = clocks.quartiles(bursts[beside][1])[0]
            line |= {"host_us": 1e3 * clocks.quartiles(host)[0], "wall_samples": _short(wall)}
        lines.append(line | {"samples": _short(values)})
    return lines


def _short(samples: list[float]) -> list[float]:
    return [round(sample, 6) for sample in samples]


# ---- the clocks ----


def steps(function: Callable[..., list[dict]], *axes: Iterable) -> list[Step]:
    """Return a step of a record for each combination of the values of these axes, the last of which changes first."""
    return [functools.partial(function, *values) for values in itertools.product(*axes)]


def over(call: Callable[[Any], object], inputs: Sequence) -> Call:
    """Return the call as the clocks take it: the inputs in turn."""
    return lambda turn: call(inputs[turn % len(inputs)])


def clocked(
    calls: Calls,
    device: torch.device,
    seconds: float = 2.0,
    *,
    tokens: int = clocks.GRAPH_TOKENS + 1,
    graphs: bool = False,
    compiled: bool = False,
    rounds: int | None = None,
    most: int = MOST,
) -> tuple[Samples, Bursts]:
    """Time the calls in turn: by device events (clocks.time_cuda) and in bursts of plain calls, and for few tokens also
    "NAME (graph)", the call replayed as a CUDA graph, for all calls but the compiled ones.

    A CPU has one clock: there for about so many seconds, thirty times at most and five at least, or twice where a turn
    takes longer than that. tokens: what a call computes; by default too many for graphs. graphs: replay graphs for many
    tokens too. compiled: of compiled calls too. rounds: samples of each call on the device, and bursts; by default what
    the clocks take, and BURSTS. most: calls of a burst at most."""
    if device.type == "cpu":
        start = time.perf_counter()
        for call in calls.values():
            call(0)
        turn = time.perf_counter() - start
        warm = turn < seconds
        count = min(30, max(5 if warm else 2, round(seconds / ((1 + warm) * turn))))
        bursts = clocks.time_bursts(calls, drain, rounds=count, count=1, warm=warm)
        return {name: wall for name, (_, wall) in bursts.items()}, bursts
    samples, bursts = _clock_gpu(calls, rounds, most)
    if graphs or tokens <= clocks.GRAPH_TOKENS:
        capture = clocks.graphed if tokens <= LARGE else functools.partial(clocks.graphed, inputs=1)
        captured = {f"{name} (graph)": capture(calls[name]) for name in calls if compiled or "compiled" not in name}
        replayed, waited = _clock_gpu(captured, rounds, MOST)
        samples, bursts = samples | replayed, bursts | waited
    return samples, bursts


def _clock_gpu(calls: Calls, rounds: int | None, most: int) -> tuple[Samples, Bursts]:
    samples = clocks.time_cuda(calls) if rounds is None else clocks.time_cuda(calls, rounds=rounds)
    count = min(most, max(1, round(BURST_MS / max(clocks.quartiles(taken)[0] for taken in samples.values()))))
    return samples, clocks.time_bursts(calls, drain, rounds=rounds or BURSTS, count=count)


def measured(
    shared: dict,
    calls: Calls,
    facts: dict[str, dict] | None = None,
    seconds: float = 2.0,
    *,
    base: str | None = DENSE,
    **how,
) -> list[dict]:
    """Return the rows of `table` of these calls, timed as `clocked` does on the device that `shared` names; on a GPU
    with the peak memory of a plain call."""
    device = torch.device("cpu" if shared["device"] == "CPU" else "cuda")
    samples, bursts = clocked(calls, device, seconds, **how)
    made = table(shared, samples, facts, bursts, base)
    for row in made if device.type == "cuda" else ():
        if (call := calls.get(row["path"])) is not None:
            row["peak_bytes"] = clocks.peak_bytes(call)
    return made


def need(holds: object, what: str, accepted: str) -> None:
    """Raise InputError, of what it is and what is accepted, unless something holds."""
    if not holds:
        raise InputError(f"{what}; accepted: {accepted}")


def check_seconds(seconds: float | None) -> None:
    """Raise InputError for what is no time to measure for."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    fits = seconds is None or number and 0 <= seconds < 2**31
    need(fits, f"seconds is {seconds!r:.80}", "a finite number from 0 up")


def drain() -> None:
    """Wait until the GPU has finished; a CPU has when a call returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- checking ----


def hold(what: str, error: float, allowed: float = 1.0) -> float:
    """Return how far off a result is, rounded. WrongResult where that is more than is allowed, or no number."""
    if not error <= allowed:
        raise clocks.WrongResult(f"{what}: off by {error:.4g}, where {allowed:.4g} is allowed: nothing was timed")
    return round(error, 4)


def admit(
    ways: dict[str, Callable[[], Entry]], left_out: dict[str, str], label: str = "", must: Container[str] = ()
) -> tuple[Calls, dict[str, dict]]:
    """Return the calls that `ways` make, and what the rows of each say, by path. A way checks its call first. Where it
    raises anything but a lack of memory, it is not timed, and `left_out` says why, at the path behind the label. must:
    paths that are not left out: what they raise is raised."""
    calls, facts = Calls(), dict[str, dict]()
    for path, way in ways.items():
        try:
            calls[path], facts[path] = way()
        except Exception as error:  # others' code, and compilers behind torch, raise their own kinds
            if path in must or isinstance(error, torch.OutOfMemoryError):
                raise
            left_out[f"{label}{path}"] = f"{type(error).__name__}: {first_line(error)}"
    return calls, facts


def first_line(error: Exception) -> str:
    """Return how an error's message begins."""
    return str(error).strip().partition("\n")[0][:200]


@torch.no_grad()
def check(layer: nn.Module, call: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> float:
    """Check `call` before it is timed; returns the worst ratio of error to what is allowed.

    64 rows of each input are compared with float64 (clocks.check), and all rows of the first one with those of `layer`,
    the dense feed-forward layer that `call` is to compute. Raises clocks.WrongResult where the ratio is above 1, or a
    row differs from the dense layer's by more than 5% of its norm."""
    found = feed_forwards(layer)[0]
    worst = max(clocks.check(layer, found, x, call=call) for x in inputs)
    y, dense = call(inputs[0]).float(), layer(inputs[0]).float()
    off = (y - dense).norm(dim=1) / dense.norm(dim=1).clamp(min=1e-3)
    off = off[dense.isfinite().all(1)]
    hold("a row, beside the dense layer's", float(off.max()) if len(off) else 0.0, 0.05)
    return worst


@torch.no_grad()
def compare(
    kind: str,
    layer: nn.Module,
    rivals: dict[str, Callable[[Tensor], Tensor]],
    inputs: list[Tensor],
    label: str,
    facts: dict[str, dict] | None = None,
    **how,
) -> list[dict]:
    """Check each rival of a dense feed-forward layer, then time all beside it; return their rows, which have this kind,
    and for the dense layer the path DENSE.

    rivals: what computes the same as the layer, by path. inputs: [tokens, d_model] each. label: the name of the
    workload. facts: what else the rows of a path say. how: as for `measured`. WrongResult as by `check`."""
    found = feed_forwards(layer)[0]
    errors = {path: round(check(layer, call, inputs), 4) for path, call in rivals.items()}
    facts = {path: {"error_over_allowed": error, **(facts or {}).get(path, {})} for path, error in errors.items()}
    shared = describe(kind, inputs, found.pattern.weight, label, found.pattern.bias) | {"gated": found.gate is not None}
    calls = {path: over(call, inputs) for path, call in {DENSE: layer, **rivals}.items()}
    with torch.cuda.device(inputs[0].device) if inputs[0].is_cuda else nullcontext():
        return measured(shared, calls, facts, tokens=len(inputs[0]), **how)

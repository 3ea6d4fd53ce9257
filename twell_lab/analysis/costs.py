"""What a feed-forward layer should cost on each path: counted bytes and operations over rates measured on the device.

The counts, for T tokens, values of `b` bytes, and e entries (kept values) a token; a gated layer's entry costs two rows
of d_model values (up, down), a plain one's one (down):
  dense      three GEMMs (plain: two) of 2 T d_model d_ff operations, and relu and multiply over T d_ff values
  twell      the gate's GEMM, writing packed words; e T entries' rows from the L2 cache; x in, y out
  hot_cold   twell over the cold neurons, and over the hot ones gate, up and down GEMMs and a float32 sum, out and in
A GEMM takes as long as its operations at the matmul rate or its weights and values from memory, whichever is longer;
for few tokens it is the latter. Rows come from memory once, whatever T is (those of the neurons that fire at all), and
again where they do not fit the cache. Each launch adds its own time. Rows that fire so much that the packed form
gives up are computed densely once more.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..core.errors import InputError
from ..formats.twell import TILE, WORDS
from ..layers.choice import Choice
from ..ops import inference, measure
from .profile import LayerProfile

_WORD_BYTES = 4
_ROUNDS = 10  # of each timing on a GPU; planning times many small things, and a median of ten is steady there
_CACHE_USED = 0.8  # share of the L2 cache that the most used rows are taken to keep


@dataclass(frozen=True)
class Rates:
    """What a device reaches with values of one dtype, measured here by `measure_rates`.

    bandwidth: bytes a second from and to memory (a copy). l2: bytes a second at which the sparse part reads the rows of
    up and down (what more entries add to its time). matmul: operations a second (a large torch.mm). launch: seconds
    that one more launch (on a CPU: operation) takes. cache: bytes of the GPU's L2 cache, 0 where none is modelled.
    fused_from: tokens from which the kernels pack inside the gate GEMM and multiply inside the up GEMM, None where they
    do not."""

    device: str
    dtype: str
    bandwidth: float
    l2: float
    matmul: float
    launch: float
    cache: int = 0
    fused_from: int | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "l2", "matmul"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)!r}; a rate above 0 is accepted")
        if not 0 <= self.launch < math.inf:
            raise InputError(f"launch is {self.launch!r}; seconds from 0 up are accepted")

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Firing:
    """How a layer fires, as the predictions need it.

    frequency: float64 [d_ff], the share of tokens at which each neuron fires, descending. totals: float64 [d_ff + 1],
    the share of tokens with so many firing. overflowing, excess: of the layer in its own order, the share of tokens
    with a tile beyond its slots, and the entries beyond them, a token."""

    d_model: int
    gated: bool
    frequency: Tensor
    totals: Tensor
    overflowing: float = 0.0
    excess: float = 0.0

    @classmethod
    def of(cls, layer: LayerProfile) -> Firing:
        """The firing a profile counted; InputError where it saw no token."""
        if not layer.tokens:
            raise InputError(f"the profile of layer {layer.name!r} saw no token; at least one is needed for a plan")
        beyond = (torch.arange(layer.tile_histogram.numel(), device="cpu") - (layer.words - 1)).clamp(min=0)
        excess = (layer.tile_histogram * beyond).sum().item() / layer.tokens
        frequency = (layer.neuron_counts.double() / layer.tokens).sort(descending=True).values
        totals = layer.nnz_histogram.double() / layer.tokens
        return cls(layer.d_model, layer.gated, frequency, totals, layer.overflow_rows, excess)

    @property
    def d_ff(self) -> int:
        return self.frequency.numel()

    def lost(self, hot: int) -> float:
        """About what share of the tokens will be computed densely after all, `hot` neurons not being packed.

        Those that fill tiles on average, however evenly their neurons lie. In the layer's own order (hot 0) also those
        whose overflow exceeds the pool that 16 rows share, were it all in one tile."""
        packed = self.frequency[hot:].sum() / self.frequency.sum().clamp(min=1e-30)
        a_tile = torch.arange(self.totals.numel(), device="cpu") * packed / math.ceil((self.d_ff - hot) / TILE)
        lost = self.totals[a_tile > WORDS - 1].sum().item()
        if hot or not self.excess:
            return lost
        return max(lost, self.overflowing * max(0.0, 1 - 64 / (16 * self.excess)))


def predict(choice: Choice, firing: Firing, rates: Rates, tokens: int, itemsize: int) -> dict[str, float]:
    """Microseconds of one call with `tokens` tokens, by what they go to: gemm, rows, memory, launches, lost, and
    total."""
    choice.check(firing.d_ff)
    d_model, d_ff, hot = firing.d_model, firing.d_ff, choice.hot
    fused = rates.fused_from is not None and tokens >= rates.fused_from
    ends = 2 * tokens * d_model * itemsize  # x in, y out

    def gemm(n: int, k: int, count: float = 1.0) -> float:
        moved = (n * k + tokens * (n + k)) * itemsize
        return count * max(2 * tokens * n * k / rates.matmul, moved / rates.bandwidth)

    hidden = tokens * d_ff * itemsize
    gemms = 3 if firing.gated else 2
    elementwise = 0 if fused else (5 if firing.gated else 2) * hidden
    dense = gemm(d_ff, d_model, gemms) + elementwise / rates.bandwidth
    if choice.path == "dense":
        launches = 2 if fused else 5 if firing.gated else 3
        parts = {
            "gemm": gemm(d_ff, d_model, gemms),
            "rows": 0.0,
            "memory": elementwise / rates.bandwidth,
            "launches": launches * rates.launch,
            "lost": 0.0,
        }
        return _microseconds(parts)
    cold = firing.frequency[hot:]
    row = (2 if firing.gated else 1) * d_model * itemsize
    tiles = math.ceil((d_ff - hot) / TILE)
    packed = tokens * tiles * (WORDS * _WORD_BYTES + 32)  # written whole, read as far as it is used
    moved = ends + packed + (0 if fused or tokens <= 64 else 2 * tokens * (d_ff - hot) * itemsize)
    gemm_time = gemm(d_ff - hot, d_model)
    if hot:
        gemm_time += gemm(hot, d_model, gemms)
        moved += 2 * tokens * hot * itemsize + 2 * tokens * d_model * 4
    lost = firing.lost(hot) if tokens > 64 else 0.0  # the kernels for few tokens take any number of entries
    chunks = 2 * math.ceil(tokens / 8192) if fused else 0
    launches = (2 if fused or tokens <= 64 else 3) + chunks + (0 if not hot else 2 if fused else 5)
    parts = {
        "gemm": gemm_time,
        "rows": _rows_time(cold, tokens, row, rates),
        "memory": moved / rates.bandwidth,
        "launches": launches * rates.launch,
        "lost": lost * dense,
    }
    return _microseconds(parts)


def compiling_saves(firing: Firing, rates: Rates, tokens: int, itemsize: int) -> float:
    """Microseconds by which torch.compile should shorten the dense path: relu and multiply in one pass over their
    values."""
    if not firing.gated or (rates.fused_from is not None and tokens >= rates.fused_from):
        return 0.0
    return 1e6 * (2 * tokens * firing.d_ff * itemsize / rates.bandwidth + rates.launch)


def _rows_time(frequency: Tensor, tokens: int, row: int, rates: Rates) -> float:
    """Seconds in which the packed neurons' rows are read: all that fire once from memory, each entry from the cache."""
    touched = (1 - (1 - frequency).clamp(min=0) ** tokens).sum().item() * row
    read = tokens * frequency.sum().item() * row
    missed = 0.0
    if rates.cache and touched > rates.cache * _CACHE_USED:
        kept = int(rates.cache * _CACHE_USED / row)
        missed = tokens * frequency[kept:].sum().item() * row
    # With few tokens nearly every entry is the first to ask for its row: memory then hides the cache, not both in turn.
    return max(min(touched, read) / rates.bandwidth, (read - missed) / rates.l2 + missed / rates.bandwidth)


def _microseconds(parts: dict[str, float]) -> dict[str, float]:
    parts = {name: 1e6 * seconds for name, seconds in parts.items()}
    return {**parts, "total": sum(parts.values())}


# ---- what the device reaches ----


@torch.no_grad()
def measure_rates(device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Rates:
    """Measure a device with a few small calls (under a second, kernels compiled). dtype: bfloat16 on a GPU, else
    float32."""
    device = measure.present_device(device)
    large = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if large else torch.float32)
    itemsize = dtype.itemsize
    source = torch.ones(2**28 if large else 2**25, dtype=torch.uint8, device=device)
    target, tiny = torch.empty_like(source), torch.zeros(8, 8, dtype=dtype, device=device)
    n, k = (8192, 2048) if large else (512, 512)
    a, b = torch.ones(n, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    calls = {
        "copy": lambda turn: target.copy_(source),
        "mm": lambda turn: torch.mm(a, b),
        "few": lambda turn: _repeat(tiny, 10),
        "many": lambda turn: _repeat(tiny, 50),
    }
    shape = (4096, 2048, 4096) if large else (32, 512, 2048)
    counts = (16, 80) if large else (2, 12)
    for nnz in counts:
        calls[f"nnz {nnz}"] = _sparse_call(shape, nnz, dtype, device)
    took = clock(calls, device, seconds=0.4)
    entries = shape[0] * (counts[1] - counts[0])
    added = took[f"nnz {counts[1]}"] - took[f"nnz {counts[0]}"]
    bandwidth = 2 * source.numel() / took["copy"]
    rows = entries * 2 * shape[1] * itemsize
    properties = torch.cuda.get_device_properties(device) if large else None
    return Rates(
        device=properties.name if large else "CPU",
        dtype=str(dtype).removeprefix("torch."),
        bandwidth=bandwidth,
        l2=rows / max(added, rows / (1000 * bandwidth)),
        matmul=2 * n * n * k / took["mm"],
        launch=max(0.0, (took["many"] - took["few"]) / 40),
        cache=getattr(properties, "L2_cache_size", 0),
        fused_from=_fused_from(device, dtype),
    )


def _fused_from(device: torch.device, dtype: torch.dtype) -> int | None:
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return 512 if hopper and dtype != torch.float32 else None


def _repeat(tiny: Tensor, times: int) -> None:
    """So many operations, each too small to take any time but that of its launch."""
    for _ in range(times):
        tiny = torch.mm(tiny, tiny)


def _sparse_call(shape: tuple, nnz: int, dtype: torch.dtype, device: torch.device):
    """One call of the twell path on a drawn layer, every neuron firing equally often."""
    layer, inputs = measure.workload(*shape, nnz, "uniform", dtype, device)
    weights = (layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight)
    down_t = weights[2].t().contiguous()
    return lambda turn: inference.infer(inputs[turn % len(inputs)], *weights, down_t=down_t, path="twell")


def clock(calls: dict, device: torch.device, seconds: float = 0.15) -> dict[str, float]:
    """Median seconds of each call: on a GPU by bench.time_cuda; on a CPU in turns, for about `seconds` in all.

    On a CPU a call is timed as it comes, warm, at least three times: bench.time_cpu takes forty calls or more, which
    would be minutes for the large token counts of a plan.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            samples = measure.time_cuda(calls, _ROUNDS)
        return {name: measure.quartiles(values)[0] / 1e3 for name, values in samples.items()}
    samples = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    end, turn = time.perf_counter() + seconds, 0
    while turn < 3 or (turn < 50 and time.perf_counter() < end):
        for name, call in calls.items():
            start = time.perf_counter()
            call(turn)
            samples[name].append(time.perf_counter() - start)
        turn += 1
    return {name: measure.quartiles(values)[0] for name, values in samples.items()}

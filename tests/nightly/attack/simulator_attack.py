"""Random gates and layers through the kernels in the simulator: packing bit for bit, layers to the promise."""

from __future__ import annotations

from collections import Counter
from random import Random

import torch

from tests.ops.rows.drawn import gate_of
from tests.simulator import cases, pooled_cases
from twell_lab import simulator

# Some of the widths that the simulator's own tests compile the kernels for.
WIDTHS = {torch.bfloat16: 264, torch.float16: 8, torch.float32: 100}
POOLED_WIDTH = 264
WATCHED = 0.02  # the share of launches of which every memory access is watched: those take many times as long


def check(r: Random, counts: Counter) -> None:
    """One launch of one version of one kernel."""
    dtype = r.choice(tuple(WIDTHS))
    kernel = r.choice(("pack", "pack", "gated", "down", "pooled"))
    watch = "faults" if r.random() < WATCHED else None
    counts.update([kernel, str(dtype)[6:], *["watched"] * bool(watch)])
    with simulator.watching(watch, cores=1):
        {"pack": _pack, "pooled": _pooled}.get(kernel, lambda *a: _layer(kernel, *a))(r, dtype)
    counts["checked"] += 1


def _gate(r: Random, dtype, patterns, most: int):
    tile, words = r.choice(cases.GEOMETRIES)
    columns = r.choice((r.randint(1, most), max(1, tile * r.randint(1, max(1, most // tile)) + r.randint(-1, 1))))
    gate = gate_of(r.choice(patterns), r.randint(1, 5), columns, dtype, tile, words, r.getrandbits(40))
    return gate, tile, words


def _pack(r: Random, dtype) -> None:
    gate, tile, words = _gate(r, dtype, cases.PATTERNS, 700)
    vector = 16 // gate.element_size()
    both = gate.shape[1] % vector == 0 and tile % vector == 0
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # what is allocated is poisoned, which check_pack looks for
    try:
        cases.check_pack(gate, tile, words, r.choice((1, 2, 3, 4) if both else (1, 2)))
    finally:
        torch.use_deterministic_algorithms(deterministic)


def _layer(kernel: str, r: Random, dtype) -> None:
    gate, tile, words = _gate(r, dtype, cases.FINITE, 400)
    biases, spoilt = r.choice(("", "u", "d", "ud")), r.choice(("", "", "n", "i", "ni"))
    layer = cases.Layer.draw(gate, WIDTHS[dtype], tile, words, biases, spoilt, r.getrandbits(30))
    source = r.choice(layer.sources)
    version = r.choice(cases.versions(kernel, dtype, WIDTHS[dtype]))
    if kernel == "gated":
        ratio = layer.gated_error(layer.gated(version, *source))
    else:
        ratio = layer.plain_error(layer.plain(version, *source))
    assert ratio <= 1.0, f"{kernel} v{version}: off by {ratio:.3g} times what is allowed"


def _pooled(r: Random, dtype) -> None:
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    columns = r.choice((r.randint(1, 60), r.randint(200, 600)))
    gate = gate_of(r.choice((0.01, 0.1, 0.3)), r.randint(1, 40), columns, dtype, seed=r.getrandbits(30))
    for _ in range(r.randrange(4)):
        row, first, many = r.randrange(gate.shape[0]), r.randrange(gate.shape[1]), r.choice((31, 32, 40, 63, 256))
        gate[row : row + r.choice((1, 16)), first : first + many] = 1.0
    name, version = r.choice((("gated", 5), ("gated", 6), ("gated", 7), ("down", 4), ("down", 5)))
    layer = pooled_cases.Pooled.draw(gate, POOLED_WIDTH, r.random() < 0.5, r.random() < 0.5, r.getrandbits(30))
    for _ in range(r.randrange(3)):
        layer.x[r.randrange(len(gate)), r.randrange(POOLED_WIDTH)] = r.choice((torch.nan, torch.inf, -torch.inf))
    layer.check(name, version)

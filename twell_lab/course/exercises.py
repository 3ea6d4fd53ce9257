"""Checks of the course's exercises: `check(name, answer)` says at once whether an answer is right.

Each check calls the reader's function on fresh random input and compares with the library, so an answer that fits only
one example fails; where zeros are to be skipped, operations are counted too. The tests run the folded answers of the
notebooks against these checks.
"""

from __future__ import annotations

import random
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from ..formats import matrix
from ..formats.classic import COO, CSR
from ..formats.twell import TwELL
from ..ops import functional, reference
from ..sparsities import magnitude, padding, two_four
from . import progress
from .backward import checks as backward
from .capstone import checks as capstone
from .capstone import data as capstone_data
from .choosing import checks as choosing
from .choosing import data as choosing_data
from .clocks import checks as clocks
from .clocks import data as clocks_data
from .conversion import checks as conversion
from .first_kernels import checks as first_kernels
from .measure import checks as start
from .measure import zeros_checks
from .own_model import checks as own_model
from .packing import checks as packing
from .puzzles.cases import PUZZLES
from .puzzles.data import judge
from .roofline.data import pool_table
from .sparsity_map import checks as sparsity_map
from .sparsity_map import data as sparsity_map_data
from .speedups.data import amdahl, crossing, layer_needed, share_from
from .training import checks as training
from .training import data as training_data
from .verdicts import NotYet, by_hand, close, near, same, same_list, skipping, written

RIGHT = "Right"
_refusals: Counter[str] = Counter()  # in this session, by exercise
_shown: Counter[str] = Counter()  # hints


def check(name: str, answer: object) -> None:
    """Print whether an answer is right and, if not, an input for which it is wrong. A wrong answer never raises.

    name: of the exercise. answer: the reader's function or prediction, or the path of the reader's kernel file. A right
    answer is remembered (`progress`). From the second refusal on, a line names the hints. Raises KeyError for an
    unknown name.
    """
    _must_exist(name)
    try:
        theirs = THEIRS.get(name, ())
        said = CHECKS[name](by_hand(answer, theirs) if theirs and callable(answer) else answer)
    except NotYet as reason:
        print(f"Not yet: {reason}")
    except Exception as error:  # whatever the reader's function raises is part of the answer
        print(f"Not yet: your function raised {type(error).__name__}: {error}")
    else:
        print(f"{RIGHT}: {said}")
        progress.remember(name)
        return
    if _refusals[name]:  # the first one came before the reader wrote anything, or says enough
        print(f'For a hint: exercises.hint("{name}")')
    _refusals[name] += 1


def hint(name: str) -> None:
    """Print the first hint of an exercise; called once more, the second, which says more. KeyError for an unknown
    name."""
    _must_exist(name)
    number = min(_shown[name] + 1, 2)
    print(f"Hint {number} of 2: {hints()[name][number - 1]}")
    _shown[name] = number


@cache
def hints() -> dict[str, list[str]]:
    """Return the two hints of each exercise, from hints.toml."""
    return tomllib.loads(Path(__file__).with_name("hints.toml").read_text(encoding="utf-8"))


def _must_exist(name: str) -> None:
    if name not in CHECKS:
        raise KeyError(f"no exercise is called {name!r}; there are {', '.join(CHECKS)}")


def _weights_read(answer) -> str:
    for nnz, d_model in ((29, 2048), (0, 2048), (911, 2048), (7, 40)):
        same(answer(nnz, d_model), 2 * nnz * d_model, f"weights_read(nnz={nnz}, d_model={d_model})")
    return "a row of up and a column of down for each neuron that fires, and nothing for the silent ones."


def _one_token(answer) -> str:
    for trial in range(3):
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        x, gate, up = (torch.randn(*shape, generator=generator) for shape in ((24,), (60, 24), (60, 24)))
        down = torch.randn(24, 60, generator=generator)
        gate = gate - 0.3 * x  # most gates below zero
        gate[7] = 0  # and one at zero, which is silent
        exact = reference.gated_ffn(*(t.double() for t in (x[None], gate, up, down)))[0]
        silent = gate @ x <= 0
        if trial:  # a silent neuron's weights must not be touched: here they are not numbers
            up[silent], down[:, silent] = torch.nan, torch.nan
        asked = "one_token" + " with NaN in the silent neurons' weights" * bool(trial)
        firing = int((~silent).sum())
        most = 2 * 24 * (60 + 3 * firing)  # the gate of who fires may be computed again
        needs = f"the whole gate once, and up and down of the {firing} neurons that fire"
        close(skipping(answer, (x, gate, up, down), most, asked, needs), exact, asked)
    return "the same output, and no silent neuron's weights were read."


def _csr_bytes(answer) -> str:
    for _ in range(4):
        rows, columns, share = int(torch.randint(1, 50, ())), int(torch.randint(1, 90, ())), float(torch.rand(()))
        for dtype in (torch.float32, torch.bfloat16):
            form = CSR.from_dense((torch.rand(rows, columns) < share).to(dtype))
            size = form.value.element_size()
            same(
                answer(rows, form.nnz, size), form.nbytes, f"csr_bytes(rows={rows}, nnz={form.nnz}, value_bytes={size})"
            )
    return "8 bytes a row boundary, 4 a column number, and the value itself."


def _csr_times_dense(answer) -> str:
    for share in (0.3, 0.05, 0.0):
        a = torch.randn(12, 30) * (torch.rand(12, 30) < share)
        a[4] = 0  # an empty row in the middle
        b = torch.randn(30, 9)
        exact = a.double() @ b.double()
        asked, csr = f"csr_times_dense at {share:.0%} density", CSR.from_dense(a)
        close(skipping(answer, (csr, b), 2 * csr.nnz * 9, asked), exact, asked)
    return "it agrees with float64 on random matrices, empty rows included."


def _same_words(got: list, want: list[int], said: str) -> None:
    """NotYet for the first word that is not this one, or for too many or too few. said: the tile."""
    if len(got) != len(want):
        raise NotYet(f"{said}: {len(want)} hold something, the count and what has a slot; yours are {len(got)}.")
    if got[0] != want[0]:
        raise NotYet(f"{said}: word 0 should be the count of all that fire, {want[0]}; yours is {got[0]!r}.")
    for place, (mine, word) in enumerate(zip(got, want, strict=True)):
        if mine != word:
            value = f"should be 0x{word:08x}, value 0x{word >> 16:04x} of column {word & 0xFFFF}"
            raise NotYet(
                f"{said}: word {place} {value}; yours is {hex(mine) if isinstance(mine, int) else repr(mine)}."
            )


def _pack_tile(answer) -> str:
    for width, words, share in ((8, 4, 0.3), (40, 9, 0.1), (40, 9, 0.6), (16, 4, 0.0), (16, 17, 1.0)):
        gate = (torch.rand(width) + 0.01) * torch.where(torch.rand(width) < share, 1.0, -1.0)
        gate = gate.to(torch.bfloat16)
        gate[1] = -0.0
        if share == 0.6:
            gate[0] = torch.nan
            gate[2] = -gate[0]  # a NaN with its sign bit set: its 16 bits are a negative int16
        stored = TwELL.from_gate(gate[None], width, words).packed[0, 0].tolist()
        want = [word % 2**32 for word in stored[: min(stored[0], words - 1) + 1]]
        _same_words(
            list(written(answer(gate, words))), want, f"of {width} columns {want[0]} fire, with {words} words a tile"
        )
    return "the true count, then value and column of what fits, with NaN kept and -0 left out."


def _fewest_words(answer) -> str:
    for tile, most, share in ((256, 150, 0.125), (32, 32, 0.0), (64, 9, 0.25), (16, 1, 1.0)):
        counts = torch.randint(0, most + 1, (48, 5))
        if tile == 256:  # as many rows as may overflow are by far the fullest: what lies between is no count of a row
            counts[torch.randperm(48)[:6], 0] = 200
        want = next(words for words in range(2, tile + 2) if (counts >= words).any(1).double().mean() <= share)
        same(
            answer(counts, share),
            want,
            f"fewest_words for 48 rows of 5 tiles, fullest tile {int(counts.max())}, share {share},",
        )
    return "one word for the count, and slots for the fullest tile of all rows but the allowed few."


def _pool_starts(answer) -> str:
    cases = [[0] * 16, [31] * 16, [32] * 16, [40, 20, 40, 100, 33], [256, 32], [95, 31, 32], [31, 95, 0, 32]]
    cases += [torch.randint(0, 60, (16,)).tolist() for _ in range(3)]
    for counts in cases:
        want = [None if row["lost"] else row["start"] for row in pool_table(counts)]
        same_list(answer(counts), want, f"pool_starts({counts})")
    return "each row after the earlier ones, and those that do not fit are lost, though their place stays taken."


def _plain_backward(answer) -> str:
    for tokens, d_model, d_ff in ((9, 8, 20), (1, 4, 6), (30, 16, 12)):
        x, dy = torch.randn(tokens, d_model), torch.randn(tokens, d_model)
        up, down = torch.randn(d_ff, d_model) - 0.3, torch.randn(d_model, d_ff)
        x = x.abs()  # so that many neurons fire for no token
        leaves = [t.double().requires_grad_() for t in (x, up, down)]
        with torch.enable_grad():
            y = torch.relu(leaves[0] @ leaves[1].T) @ leaves[2].T
        exact = torch.autograd.grad(y, leaves, dy.double())
        fired = (leaves[0] @ leaves[1].T > 0).detach()
        silent = ~fired.any(0)
        up[silent], down[:, silent] = torch.nan, torch.nan
        # h, dh and three gradients, of neurons that fire at all, and a mask or two.
        most = 5 * 2 * tokens * d_model * int((~silent).sum()) + 4 * tokens * d_ff
        got = written(skipping(answer, (x, up, down, dy, fired), most, "plain_backward"))
        for name, mine, each in zip(("dx", "dup", "ddown"), got, exact, strict=True):
            close(mine, each, f"{name} for {tokens} tokens, {int(silent.sum())} of {d_ff} neurons silent")
    return "all three gradients, and no weight of a neuron that never fired was read."


def _amdahl(answer) -> str:
    for share, times in ((0.5, 2.0), (0.3, 1e9), (0.0, 3.0), (1.0, 3.0), (random.random(), 1 + 3 * random.random())):
        near(answer(share, times), amdahl(share, times), f"amdahl({share:.3g}, {times:.3g})")
    return "what is not in the layers takes as long as before."


def _layer_needed(answer) -> str:
    for share, wanted in ((0.5, 1.25), (0.8, 2.0), (0.3, 2.0), (0.5, 2.0), (0.5 + random.random() / 2, 1.3)):
        near(answer(share, wanted), layer_needed(share, wanted), f"layer_needed({share:.3g}, {wanted:.3g})")
    return "and None where layers that take no time at all would not be enough."


def _share_from(answer) -> str:
    for share, layer in ((0.3, 2.0), (1.0, 1.5), (random.random(), 2.5), (0.4, 0.5)):
        model = amdahl(share, layer)
        near(answer(layer, model), share_from(layer, model), f"share_from({layer:.3g}, {model:.4g})")
    return "the law read backwards, also for layers that became slower."


def _crossing(answer) -> str:
    cases = [
        [(8, 2.5), (29, 1.8), (60, 1.2), (120, 0.8)],
        [(1, 2.0), (2, 1.5)],
        [(1, 0.5), (2, 0.4)],
        [(1, 1.0), (3, 0.5)],
    ]
    for _ in range(3):
        nnzs = sorted(random.sample(range(1, 400), 6))
        cases.append([(nnz, 3 - 2.6 * i / 5 + random.random() / 9) for i, nnz in enumerate(nnzs)])
    for points in cases:
        shown = ", ".join(f"({x}, {y:.2f})" for x, y in points)
        near(answer(list(points)), crossing(points), f"crossing([{shown}])")
    return "on the straight line between the two points around it, and None where there are no such two."


def _plain_call(answer) -> str:
    cases = [((3.0, 1.0), (1.5, 1.2)), ((3.0, 1.0), (0.5, 2.0)), ((0.1, 0.2), (0.1, 0.4)), ((1.0, 2.0), (3.0, 1.0))]
    cases += [tuple((random.uniform(0.1, 4), random.uniform(0.1, 4)) for _ in range(2)) for _ in range(4)]
    for dense, ours in cases:
        asked = "plain_call(({:.3g}, {:.3g}), ({:.3g}, {:.3g}))".format(*dense, *ours)
        near(answer(dense, ours), max(dense) / max(ours), asked)
    return "a GPU that waits for its host is no faster with fewer weights to read."


def _energy_saved(answer) -> str:
    cases = [((600, 10.0, 1024), (500, 8.0, 1024)), ((400, 2.0, 1), (400, 2.0, 2)), ((300, 1.0, 16), (420, 1.0, 16))]
    for _ in range(4):
        cases.append(tuple((random.randint(100, 700), random.uniform(1, 9), random.randint(1, 64)) for _ in range(2)))
    for dense, ours in cases:
        joules = [watts * ms / tokens for watts, ms, tokens in (dense, ours)]
        asked = "energy_saved(({}, {:.3g}, {}), ({}, {:.3g}, {}))".format(*dense, *ours)
        near(answer(dense, ours), 1 - joules[1] / joules[0], asked)
    return "power times time, by token; it is negative where ours takes more."


CHECKS: dict[str, Callable] = {
    "weights_read": _weights_read,
    "one_token": _one_token,
    "csr_bytes": _csr_bytes,
    "csr_times_dense": _csr_times_dense,
    "pack_tile": _pack_tile,
    "fewest_words": _fewest_words,
    "pool_starts": _pool_starts,
    "plain_backward": _plain_backward,
    "amdahl": _amdahl,
    "plain_call": _plain_call,
    "layer_needed": _layer_needed,
    "share_from": _share_from,
    "crossing": _crossing,
    "energy_saved": _energy_saved,
    **training.CHECKS,
    **start.CHECKS,
    **packing.CHECKS,
    **first_kernels.CHECKS,
    **backward.CHECKS,
    **sparsity_map.CHECKS,
    **capstone.CHECKS,
    **choosing.CHECKS,
    **zeros_checks.CHECKS,
    **clocks.CHECKS,
    **conversion.CHECKS,
    **own_model.CHECKS,
}
CHECKS |= {name: partial(judge, name) for name in PUZZLES}

# What the library has for an exercise already: while the reader's function runs, it refuses to work.
THEIRS: dict[str, tuple[Callable, ...]] = {
    "to_coo": (COO.from_dense,),
    "row_pointers": (matrix.row_pointers,),
    "ran": (clocks_data.operations,),
    "pays_after": (sparsity_map_data.pays_after,),
    "keep_largest": (magnitude.largest,),
    "two_four": (two_four.two_four_mask,),
    "firing_share": (training_data.firing_share,),
    "pack_tile": (TwELL.from_gate, TwELL.from_dense, functional.pack),
    "pool_starts": (pool_table,),
    "occupied": (choosing_data.occupied,),
    "without_padding": (padding.unpadded, padding.remove_padding, padding.add_padding),
    "hot_neurons": (choosing_data.hot_neurons,),
    "token_bytes": (choosing_data.token_bytes,),
    "least_us": (capstone_data.least_us,),
    "amdahl": (amdahl,),
    "layer_needed": (layer_needed,),
    "share_from": (share_from,),
    "crossing": (crossing,),
}

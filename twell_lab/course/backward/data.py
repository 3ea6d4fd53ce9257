"""The backward pass of a sparse layer, as notebook 11 computes it: which values it needs and keeps, rows that do not
fit, lists by token and by neuron, memory by tensor, and the least time of a training step.

Data in, data out, nothing drawn. A layer is y = h Wd^T with h = g * u, g = relu(x Wg^T), u = x Wu^T. dy is the gradient
of the loss in y, and `coefficient` * sum |h| is added to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ...core import InputError
from ...ops import survivors
from ..roofline.data import VALUE, Rates

NAMES = ("dx", "dgate", "dup", "ddown")
ROWS_A_VALUE = 7  # rows of d_model values that a training step reads for each kept value; see `parts`


# ---- a layer small enough to draw ----


@dataclass(frozen=True)
class Case:
    """A gated layer, its input, and the gradient that comes back from above: all float64.

    x, dy: [tokens, d_model]; gate, up: [d_ff, d_model]; down: [d_model, d_ff].
    """

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    dy: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate, self.up, self.down


def drawn(tokens: int = 24, d_model: int = 16, d_ff: int = 40, seed: int = 0) -> Case:
    """A random layer in which few neurons fire, two of them never; every eighth token makes many fire."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, d_model, generator=generator, dtype=torch.float64) for _ in range(2))
    gate, up = (torch.randn(d_ff, d_model, generator=generator, dtype=torch.float64) / 4 for _ in range(2))
    down = torch.randn(d_model, d_ff, generator=generator, dtype=torch.float64) / 6
    x[:, 0], gate[:, 0] = 1.2, -1.0  # a dimension that silences everybody, as a bias would,
    x[3::8, 0] = 0.2  # less so at some tokens,
    gate[[d_ff // 3, d_ff // 2], 0] = -9.0  # and altogether in two neurons
    return Case(x, gate, up, down, dy)


def full(values: dict[str, Tensor], fired: Tensor) -> list[str]:
    """The names of the matrices that are not zero everywhere where the gate was silent. fired: bool, of their shape."""
    return [name for name, value in values.items() if value[~fired].any()]


def exact(case: Case, coefficient: float) -> dict[str, Tensor]:
    """The gradients by torch's autograd through the dense layer: NAMES -> tensor."""
    leaves = [t.clone().requires_grad_() for t in (case.x, *case.weights)]
    x, gate, up, down = leaves
    with torch.enable_grad():
        h = (x @ gate.T).relu() * (x @ up.T)
        loss = (h @ down.T * case.dy).sum() + coefficient * h.abs().sum()
        return dict(zip(NAMES, torch.autograd.grad(loss, leaves), strict=True))


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest |got - want| / |want| of these gradients."""
    return max(float((got[name] - each).norm() / each.norm().clamp(min=1e-300)) for name, each in want.items())


# ---- rows that do not fit ----


def rooms(counts: list[int], capacity: int) -> tuple[list[tuple[int, int]], list[int]]:
    """(spans, lost rows) of rows that are stored one after the other among `capacity` entries.

    A span is a row's (start, count), or (-1, 0) if the row is lost. From the first row that would end beyond the
    capacity, every row is lost.
    """
    spans, lost, at = [], [], 0
    for row, count in enumerate(counts):
        at += count
        spans.append((at - count, count) if at <= capacity else (-1, 0))
        if at > capacity:
            lost.append(row)
    return spans, lost


def hybrid(case: Case, coefficient: float, capacity: int) -> tuple[dict[str, Tensor], list[int]]:
    """(gradients, lost rows) with room for `capacity` kept values: stored rows from these, lost rows densely."""
    fired = case.x @ case.gate.T > 0
    _, lost = rooms(fired.sum(1).tolist(), capacity)
    stays = torch.ones(len(case.x), dtype=torch.bool)
    stays[lost] = False
    got = kept_gradients(case, coefficient, fired & stays[:, None])
    dense = exact(Case(case.x[lost], *case.weights, case.dy[lost]), coefficient)
    got["dx"][lost] = dense["dx"]
    for name in NAMES[1:]:
        got[name] += dense[name]
    return got, lost


def kept_gradients(case: Case, coefficient: float, kept: Tensor) -> dict[str, Tensor]:
    """The gradients from the kept values alone. kept: bool [tokens, d_ff], whole rows of what fired."""
    x, dy, (gate, up, down) = case.x, case.dy, case.weights
    t, n = kept.nonzero(as_tuple=True)
    g, u = (x[t] * gate[n]).sum(1), (x[t] * up[n]).sum(1)
    h = g * u
    dh = (dy[t] * down.T[n]).sum(1) + coefficient * h.sign()
    dg, du = (dh * u)[:, None], (dh * g)[:, None]
    return {
        "dx": torch.zeros_like(x).index_add_(0, t, dg * gate[n] + du * up[n]),
        "dgate": torch.zeros_like(gate).index_add_(0, n, dg * x[t]),
        "dup": torch.zeros_like(up).index_add_(0, n, du * x[t]),
        "ddown": torch.zeros_like(down.T).index_add_(0, n, h[:, None] * dy[t]).T.contiguous(),
    }


def rows_read(counts: list[int], lost: list[int], d_ff: int) -> tuple[int, int]:
    """(for stored rows, for lost ones): rows of d_model values that a training step reads one by one.

    A stored row reads ROWS_A_VALUE for each kept value. A lost one also reads all of the gate, forward and backward,
    since its pattern was not kept.
    """
    stored = sum(ROWS_A_VALUE * count for row, count in enumerate(counts) if row not in set(lost))
    return stored, sum(2 * d_ff + ROWS_A_VALUE * counts[row] for row in lost)


def capacity_sweep(case: Case, coefficient: float, capacities: list[int]) -> list[dict]:
    """For each capacity: capacity, bytes, lost, stored_rows, lost_rows, error, counts.

    lost: the rows that do not fit. stored_rows, lost_rows: as `rows_read` has them. error: of the gradients, see
    `worst`. counts: kept values of each token.
    """
    counts = (case.x @ case.gate.T > 0).sum(1).tolist()
    want, found = exact(case, coefficient), []
    for capacity in capacities:
        if capacity < 0:
            raise InputError(f"a capacity is {capacity!r}; 0 or more is accepted")
        got, lost = hybrid(case, coefficient, capacity)
        stored, dense = rows_read(counts, lost, len(case.gate))
        found.append(
            {
                "capacity": capacity,
                "bytes": 8 * capacity,
                "lost": lost,
                "stored_rows": stored,
                "lost_rows": dense,
                "error": worst(got, want),
                "counts": counts,
            }
        )
    return found


# ---- lists of rows, lists of neurons ----


def by_row(kept: Tensor) -> list[list[int]]:
    """The neurons of each token, ascending. kept: bool [tokens, d_ff]."""
    return [row.nonzero()[:, 0].tolist() for row in kept]


def by_neuron(kept: Tensor) -> list[list[int]]:
    """The tokens of each neuron, ascending."""
    return by_row(kept.T)


def different_sums(values: Tensor, orders: int = 200, shuffle: bool = True, seed: int = 0) -> int:
    """Return how many different results come of adding these numbers one by one in float32, `orders` times.

    Each time in another random order or, without shuffle, in the given one.
    """
    random = np.random.default_rng(seed)
    numbers = values.numpy().astype(np.float32)
    each = (random.permutation(numbers) if shuffle else numbers for _ in range(orders))
    return len({np.cumsum(order, dtype=np.float32)[-1].tobytes() for order in each})


# ---- memory by tensor ----


def dense_saved(tokens: int, d_model: int, d_ff: int, value: int = VALUE) -> dict[str, int]:
    """Bytes that torch's autograd keeps of a gated layer from forward to backward, without the weights.

    value: bytes of one value.
    """
    wide = value * tokens * d_ff
    return {"x": value * tokens * d_model, "relu(gate)": wide, "up": wide, "h": wide}


def sparse_saved(tokens: int, d_model: int, d_ff: int, value: int = VALUE) -> dict[str, int]:
    """Bytes that the sparse path keeps from forward to backward.

    The size of its lists depends on the shape alone, not on how many entries are used. down_t is down transposed, so
    that what a neuron adds to y is a row of it.
    """
    entries = survivors.capacity_for(tokens, d_ff)
    return {
        "x": value * tokens * d_model,
        "down_t": value * d_ff * d_model,
        "words": 4 * entries,
        "ups": 4 * entries,
        "spans": 8 * tokens,
        "kept": 4 * tokens,
        "lost": 4 * (tokens + 2),
    }


@contextmanager
def saved_tensors(module: nn.Module) -> Iterator[list[dict]]:
    """A context in which what autograd saves is listed: shape, dtype, bytes. Tensors that share memory count once.

    The module's parameters are left out, since they are in memory anyway.
    """
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: list[dict] = []
    alive: list[Tensor] = []  # holds them, so that no memory is freed and used again while they are counted

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and storage.nbytes():
            known.add(storage.data_ptr())
            alive.append(tensor)
            found.append(
                {
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "bytes": storage.nbytes(),
                }
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found
    alive.clear()


# ---- the least time of a step ----

# (part, direction, the arrays of which each kept value reads a row)
READS = (
    ("u", "forward", ("up",)),
    ("y", "forward", ("down",)),
    ("dh", "backward", ("down",)),
    ("dx", "backward", ("gate", "up")),
    ("weight gradients", "backward", ("x", "dy")),
)


def parts(tokens: int = 16384, d_model: int = 2048, d_ff: int = 5632, nnz: float = 29) -> list[dict]:
    """The parts of a sparse training step: part, direction, operations (on tensor cores), l2, memory (bytes), reads.

    l2 counts a row of d_model values each time that a kept value reads it; memory counts every array once.
    """
    x, weights, row, kept = VALUE * tokens * d_model, VALUE * d_ff * d_model, VALUE * d_model, tokens * nnz
    found = [
        {
            "part": "gate, packed",
            "direction": "forward",
            "operations": 2 * tokens * d_model * d_ff,
            "l2": 0,
            "memory": x + weights,
            "reads": "",
        }
    ]
    for part, direction, rows in READS:
        found.append(
            {
                "part": part,
                "direction": direction,
                "operations": 0,
                "l2": len(rows) * kept * row,
                "memory": x * (part != "u") + 3 * weights * (part == "weight gradients"),
                "reads": ", ".join(f"{name}[{'token' if name in ('x', 'dy') else 'neuron'}]" for name in rows),
            }
        )
    return found


def floors(found: list[dict], reached: Rates) -> list[dict]:
    """`parts` with the least time of each in ms at these rates, and what limits it."""
    timed = []
    for part in found:
        times = {
            "tensor cores": part["operations"] / reached.tensor,
            "L2 cache": part["l2"] / reached.l2,
            "memory": part["memory"] / reached.memory,
        }
        limit = max(times, key=times.__getitem__)
        timed.append({**part, "ms": 1e3 * times[limit], "limit": limit})
    return timed


def dense_floor(reached: Rates, tokens: int = 16384, d_model: int = 2048, d_ff: int = 5632) -> float:
    """Least ms of the dense step: nine products, three forward and six backward, on the tensor cores."""
    return 1e3 * 9 * 2 * tokens * d_model * d_ff / reached.tensor

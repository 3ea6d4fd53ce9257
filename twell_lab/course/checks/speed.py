"""Checks of the exercises of notebooks 00 to 02 and 13: skipped neurons, sparse formats, clocks, and a model's speedup.
None of them looks at a real clock."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from ...formats import matrix
from ...formats.classic import COO, CSR, ELL
from ...ops import reference
from ..clocks import data as clocks
from ..speedups.data import amdahl
from ..verdicts import NotYet, alike, close, exercise, formula, number, skipping, written

# ---- notebook 00 ----


@formula(
    "a row of up and a column of down for each neuron that fires, and nothing for the silent ones.",
    [(29, 2048), (0, 2048), (911, 2048), (7, 40)],
)
def weights_read(nnz: int, d_model: int) -> int:
    return 2 * nnz * d_model


@exercise("the same output, and no silent neuron's weights were read.")
def one_token(answer) -> None:
    for trial in range(3):
        x, gate, up, down = (torch.randn(shape) for shape in ((24,), (60, 24), (60, 24), (24, 60)))
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


@exercise("a neuron may be skipped only if it fires for none of the tokens. More tokens, fewer such neurons.")
def several_tokens(answer) -> None:
    for tokens in (1, 2, 5):
        drawn = torch.Generator().manual_seed(tokens)  # so that the same fault is told in the same words
        shapes = ((60, 24), (60, 24), (24, 60), (tokens, 24))
        gate, up, down, x = (torch.randn(shape, generator=drawn) for shape in shapes)
        gate = gate - 0.3 * x.mean(0)  # most gates below zero
        exact = reference.gated_ffn(*(t.double() for t in (x, gate, up, down)))
        fires = (x @ gate.T > 0).any(0)
        up[~fires], down[:, ~fires] = torch.nan, torch.nan
        # The whole gate, up and down of who fires for anybody, and a few products of as many values as neurons.
        most = 2 * tokens * (24 * (60 + 2 * int(fires.sum())) + 4 * 60)
        asked = f"several_tokens for {tokens} token(s)"
        close(skipping(answer, (x, gate, up, down), most, asked), exact, asked)


@exercise("the gate is a third, and of the other two thirds 5% stay: 1 / (1/3 + 0.05 * 2/3) = 2.73.")
def at_most(answer) -> None:
    number(answer, 1 / (1 / 3 + 0.05 * 2 / 3), "with 5% of the neurons firing, the most that can be gained")


ACTIVATIONS = {
    "relu": torch.relu,
    "silu": functional.silu,  # zero at 0, and where the gate is so negative that nothing is left
    "relu squared": lambda gate: gate.relu() ** 2,
    "hardswish": functional.hardswish,  # exactly zero below -3
    "leaky relu": functional.leaky_relu,
    "elu": functional.elu,
    "relu6": functional.relu6,
    "softshrink": functional.softshrink,  # zero from -0.5 to 0.5
    "softplus": functional.softplus,
    "relu of g + 0.5": lambda gate: (gate + 0.5).relu(),  # zero up to -0.5 alone
    "hardshrink at 1.5": lambda gate: functional.hardshrink(gate, 1.5),  # and here from -1.5 alone
}


@exercise("ReLU and its kin give exact zeros; SiLU, GELU and others only small values, so leaving those out is lossy.")
def may_be_skipped(answer) -> None:
    gate = torch.cat([torch.linspace(-100, -20, 200), torch.linspace(-20, 0, 4001)])
    for name, activation in ACTIVATIONS.items():
        values = activation(gate)
        got = written(answer(lambda given, run=activation: run(given)))
        if got != bool((values == 0).all()):
            at = gate[values.abs().argmax()]
            makes = f"{activation(at):.3g} of {at:.4g}" if values.any() else "0 of all that is not positive"
            raise NotYet(f"may_be_skipped gave {got!r} for {name}, which makes {makes}.")


@exercise("the outputs are compared: what the hidden values lose says little of it.")
def cut_error(answer) -> None:
    for d_model, d_ff, threshold in ((24, 60, 0.5), (24, 60, 0.0), (8, 300, 1.2), (24, 60, -0.5), (24, 60, 9.0)):
        gate, up, down = torch.randn(d_ff), torch.randn(d_ff), torch.randn(d_model, d_ff)
        gate[::4] = max(threshold, 0.0)  # some at the threshold, which are not above it
        exact = down.double() @ (gate.relu() * up).double()
        cut = down.double() @ (gate.relu() * up * (gate > threshold)).double()
        want, got = float((cut - exact).norm() / exact.norm()), written(answer(gate, up, down, threshold))
        only_silent = ", where a cut takes silent neurons alone," * (threshold < 0)
        if not abs(float(got) - want) <= 1e-4:
            raise NotYet(
                f"cut_error of {d_ff} neurons at {threshold}{only_silent} should be {want:.4g}; yours gave {got!r}."
            )


# ---- notebook 01 ----


def _matrix(rows: int, columns: int, share: float) -> torch.Tensor:
    """Random values, an empty row in the middle, and a value that is not zero in the first one."""
    made = torch.randn(rows, columns) * (torch.rand(rows, columns) < share)
    made[rows // 2], made[0, -1] = 0, 1.5
    return made


@exercise("a row, a column and a value for each that is not zero, row after row.", COO.from_dense)
def to_coo(answer) -> None:
    for rows, columns, share in ((3, 4, 0.4), (6, 5, 0.1), (5, 7, 1.0)):
        whole = (4 * _matrix(rows, columns, share)).round() / 4 + 0.0  # few digits, and no signs, in a message
        whole[rows // 2, 0] = -0.0  # a zero, too
        own = COO.from_dense(whole)
        got = written(answer(whole.clone()))
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise NotYet(f"to_coo should give three lists; yours gave a {type(got).__name__}.")
        for name, mine, kind in zip(("rows", "columns", "values"), got, (int, int, float), strict=True):
            if not isinstance(mine, list):
                raise NotYet(f"{name} should be a list; yours is a {type(mine).__name__}.")
            if (off := next((one for one in mine if type(one) is not kind), None)) is not None:
                raise NotYet(f"{name} should hold numbers of kind {kind.__name__}; yours has {off!r:.60}.")
        alike(got, [own.row, own.column, own.value], f"to_coo(torch.tensor({whole.tolist()}))")


@formula(
    "row i owns what lies from pointer i up to pointer i + 1, and an empty row has two that are equal.",
    lambda: [
        *[([0, 2, 2, 2], 3), ([], 4), ([3, 3], 5), ([0, 0, 1], 2)],
        *[(sorted(random.choices(range(9), k=random.randint(1, 20))), 9) for _ in range(3)],
    ],
    matrix.row_pointers,
)
def row_pointers(rows: list[int], count: int) -> list[int]:
    return matrix.row_pointers(torch.tensor(rows, dtype=torch.long).bincount(minlength=count)).tolist()


@formula(
    "8 bytes a row boundary, 4 a column number, and the value itself.",
    lambda: [(random.randint(1, 50), random.randint(0, 4000), size) for size in (4, 2) * 4],
)
def csr_bytes(rows: int, nnz: int, value_bytes: int) -> int:
    return 8 * (rows + 1) + nnz * (4 + value_bytes)


@exercise("it agrees with float64 on random matrices, empty rows included.")
def csr_times_dense(answer) -> None:
    for share in (0.3, 0.05, 0.0):
        a = torch.randn(12, 30) * (torch.rand(12, 30) < share)
        a[4] = 0  # an empty row in the middle
        b = torch.randn(30, 9)
        asked, csr = f"csr_times_dense at {share:.0%} density", CSR.from_dense(a)
        close(skipping(answer, (csr, b), 2 * csr.nnz * 9, asked), a.double() @ b.double(), asked)


@formula(
    "with 16-bit values an index is twice as large as its value: CSR pays only below a third.",
    [(256, 2048, 4), (1, 10, 2), (4096, 4096, 2), (7, 100, 4)],
)
def csr_pays(rows: int, columns: int, value_bytes: int) -> float:
    return (rows * columns * value_bytes - 8 * (rows + 1)) / (rows * columns * (4 + value_bytes))


@formula(
    "every row takes as many slots as the fullest, used or not.",
    lambda: [
        (counts, size)
        for counts in ([20] * 8, [20, 0, 3], [0, 0], [1, 2, 300], random.choices(range(40), k=9))
        for size in (4, 2)
    ],
)
def ell_bytes(counts: list[int], value_bytes: int) -> int:
    filled = torch.arange(300) < torch.tensor(counts)[:, None]
    return ELL.from_dense(filled.to({4: torch.float32, 2: torch.bfloat16}[value_bytes])).nbytes


@exercise("a row of b for each slot that is used, and what the others hold is never trusted.")
def ell_times_dense(answer) -> None:
    for share in (0.3, 0.05, 0.0):
        whole, b = _matrix(12, 30, share), torch.randn(30, 9)
        ell = ELL.from_dense(whole)
        unused = torch.arange(ell.slots) >= ell.count[:, None]
        ell.column[unused], ell.value[unused] = len(b), torch.nan  # what a slot holds that is not used means nothing
        asked = f"ell_times_dense at {share:.0%} density"
        close(skipping(answer, (ell, b), 2 * 12 * ell.slots * 9, asked), whole.double() @ b.double(), asked)


@formula(
    "the slower each multiplication, the fewer of them you can afford; and a conversion can eat all of it.",
    [(10.0, 4.0, 0.0), (10.0, 4.0, 2.0), (1.0, 100.0, 0.0), (5.0, 20.0, 9.0), (3.0, 0.5, 0.0)],
)
def break_even_density(dense_ms: float, slower: float, conversion_ms: float) -> float:
    return min(1.0, max(0.0, 1 - conversion_ms / dense_ms) / slower)


# ---- notebook 02 ----


class _Machine:
    """A made-up queue and clock: a launch takes 1 ms, its work comes later, and takes slower(calls) times as long once
    so many calls were launched."""

    def __init__(self, pending: float = 0.0, slower: Callable[[int], float] = lambda calls: 1.0) -> None:
        self.time, self.slower, self.calls = 100.0, slower, 0
        self.ready = self.time + pending  # when all that was launched is done

    def launch(self, call) -> None:
        self.time += 0.001
        self.ready = max(self.ready, self.time) + call() * self.slower(self.calls)
        self.calls += 1

    def synchronize(self) -> None:
        self.time = max(self.time, self.ready)

    def timed(self, call) -> float:
        """Milliseconds of a call."""
        self.synchronize()
        start = self.time
        self.launch(call)
        self.synchronize()
        return 1000 * (self.time - start)


@exercise("the queue is empty when the clock starts, and again when it stops.")
def timed_call(answer) -> None:
    for pending, work in ((0.0, 0.05), (0.3, 0.05), (0.0, 2.0), (random.random(), random.random())):
        machine = _Machine(pending)
        got = written(answer(lambda work=work: work, machine, lambda machine=machine: machine.time))
        if not machine.calls:
            raise NotYet("timed_call launched nothing: queue.launch(call) puts the call into the queue.")
        busy = f", with {1000 * pending:.3g} ms of other work still in the queue" * bool(pending)
        alike(got, 1000 * (work + 0.001), f"timed_call of {1000 * work:.4g} ms of work and 1 ms of launching{busy}")


def _one_wrong(a, b):
    y = a @ b
    y[-1, -1] = torch.nan
    return y


def without_multiplying(a: CSR, b: torch.Tensor) -> torch.Tensor:
    """A wrong product on purpose, shaped as a @ b, which never reads the values of b: the sum of each row's stored
    values, in every column. Such a kernel is easily written by mistake, and it is fast."""
    sums = b.new_zeros(a.shape[0]).index_add_(0, matrix.rows_of(a.pointer, a.nnz), a.value)
    return sums[:, None].expand(-1, b.shape[1]).contiguous()


PRODUCTS = {  # by its name, and whether it is right
    "a @ b": (lambda a, b: a @ b, True),
    "a @ b, summed in another order": (lambda a, b: (b.T.contiguous() @ a.T.contiguous()).T, True),
    "a product that is half a percent too large": (lambda a, b: 1.005 * (a @ b), True),
    "a product with noise of half a percent": (lambda a, b: a @ (b + 0.005 * b * torch.randn_like(b)), True),
    "a product that never reads b": (lambda a, b: without_multiplying(CSR.from_dense(a), b), False),
    "a product of the magnitudes": (lambda a, b: a.abs() @ b.abs(), False),
    "a product that is 2% too large": (lambda a, b: 1.02 * (a @ b), False),
    "a product with one NaN": (_one_wrong, False),
    "zeros": (lambda a, b: torch.zeros(a.shape[0], b.shape[1]), False),
}


@exercise("random values, higher precision, and NaN does not pass.")
def agrees(answer) -> None:
    for name, (product, right) in PRODUCTS.items():
        alike(bool(written(answer(product))), right, f"agrees for {name}")


class _Masked(nn.Module):
    def forward(self, x):
        return functional.linear(x, (torch.ones(5, 6, dtype=torch.float64) * torch.eye(5, 6)).float())


@exercise("every operation that torch ran, whatever the layer is called.", clocks.operations)
def ran(answer) -> None:
    plain = nn.Linear(6, 5, bias=False)
    for layer in (plain, nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), _Masked()):
        layer.requires_grad_(False)
        x = torch.randn(3, 6)
        want = clocks.operations(lambda layer=layer, x=x: layer(x))[0]
        with torch.no_grad():
            got = [str(name).removeprefix("aten.").split(".")[0] for name in written(answer(layer, x))]
        alike(got, want, f"ran for {type(layer).__name__}, x of {list(x.shape)},")


@exercise("same place, same precision, same work.")
def differences(answer) -> None:
    for device, dtype, shape in itertools.product(("cpu", "meta"), (torch.float32, torch.float64), ((4, 6), (6, 4))):
        one, other = torch.empty(4, 6), torch.empty(shape, dtype=dtype, device=device)
        names = ["device"] * (device != "cpu") + ["dtype"] * (dtype != torch.float32) + ["shape"] * (shape != (4, 6))
        asked = f"differences of {clocks.terms(one)} [4, 6] and {clocks.terms(other)} {list(shape)}"
        alike(sorted(written(answer(one, other))), names, asked)


TIMED = [  # new and old samples
    ([1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.1, 1.9, 2.0, 2.2]),
    ([1.0, 1.1, 0.9, 1.0, 1.05], [0.5, 0.6, 0.55, 0.5, 0.6]),
    ([1.0, 1.1, 0.9, 1.0, 9.0], [2.0, 2.1, 1.9, 2.0, 2.2]),  # one slow sample
    ([1.0, 1.1, 0.9, 5.0, 5.0], [2.0, 2.1, 1.9, 2.0, 2.2]),  # too many
    ([1.0, 1.4, 0.6, 1.0, 1.6], [1.2, 1.0, 0.8, 1.4, 1.6]),
    ([1.0, 1.0, 1.0, 1.5, 1.6], [1.2, 1.4, 1.8, 1.9, 2.0]),
    ([1.0, 1.0, 1.0, 1.4, 1.6], [1.2, 1.4, 1.8, 1.9, 2.0]),  # equal is not below
    ([1.9, 2.0, 2.1, 2.0, 2.0], [2.2, 2.3, 0.1, 2.2, 2.4]),  # the best sample says nothing
]


@formula(
    "one slow sample changes nothing, and a difference within the spread is none.",
    # Twenty orders of each: what looks at the middle of an unsorted list is right in many of them.
    lambda: [(random.sample(new, 5), random.sample(old, 5)) for new, old in TIMED * 20],
)
def clearly_faster(new: list[float], old: list[float]) -> bool:
    return sorted(new)[3] < sorted(old)[1]


@exercise("whatever the machine does meanwhile, it does to both.")
def times_in_turns(answer) -> None:
    for rounds in (8, 20):
        drift = lambda calls, rounds=rounds: 1 + 1.5 * calls / rounds  # noqa: E731
        for slower in (drift, lambda calls: 1.0, lambda calls, drift=drift: 1 / drift(calls)):
            calls = {"dense": lambda: 0.02, "sparse": lambda: 0.01}
            got = written(answer(calls, rounds, functools.partial(_Machine.timed, _Machine(slower=slower))))
            if not isinstance(got, dict) or set(got) != set(calls):
                raise NotYet(f"times_in_turns should give a dictionary with the names {', '.join(calls)}.")
            for name, samples in got.items():
                alike(len(samples), rounds, f"the number of samples of {name} for {rounds} rounds")
            found = clocks.ratio(got, "dense", "sparse")
            if not 1.6 < found < 2.2:
                raise NotYet(
                    f"on a machine whose speed drifts, dense takes {found:.2g} times as long as sparse by your "
                    "samples; it takes about twice as long."
                )


# ---- notebook 13 ----

formula(
    "what is not in the layers takes as long as before.",
    lambda: [(0.5, 2.0), (0.3, 1e9), (0.0, 3.0), (1.0, 3.0), (random.random(), 1 + 3 * random.random())],
)(amdahl)


@formula(
    "and None where layers that take no time at all would not be enough.",
    lambda: [(0.5, 1.25), (0.8, 2.0), (0.3, 2.0), (0.5, 2.0), (0.5 + random.random() / 2, 1.3)],
)
def layer_needed(share: float, wanted: float) -> float | None:
    left = 1 / wanted - (1 - share)
    return share / left if left > 0 else None


@formula(
    "the law read backwards, also for layers that became slower.",
    lambda: [
        (layer, amdahl(share, layer)) for share, layer in ((0.3, 2.0), (1.0, 1.5), (random.random(), 2.5), (0.4, 0.5))
    ],
)
def share_from(layer: float, model: float) -> float:
    return (1 - 1 / model) / (1 - 1 / layer)


def _falling() -> list[tuple]:
    lists = [[(8, 2.5), (29, 1.8), (60, 1.2), (120, 0.8)], [(1, 2.0), (2, 1.5)], [(1, 0.5), (2, 0.4)]]
    lists.append([(1, 1.0), (3, 0.5)])
    for _ in range(3):
        nnzs = sorted(random.sample(range(1, 400), 6))
        lists.append([(nnz, 3 - 2.6 * i / 5 + random.random() / 9) for i, nnz in enumerate(nnzs)])
    return [(points,) for points in lists]


@formula("on the straight line between the two points around it, and None where there are no such two.", _falling)
def crossing(points: list[tuple[float, float]]) -> float | None:
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        if y >= 1 > next_y:
            return x + (next_x - x) * (y - 1) / (y - next_y)
    return None


@formula(
    "a GPU that waits for its host is no faster with fewer weights to read.",
    lambda: [
        *[((3.0, 1.0), (1.5, 1.2)), ((3.0, 1.0), (0.5, 2.0)), ((0.1, 0.2), (0.1, 0.4)), ((1.0, 2.0), (3.0, 1.0))],
        *[tuple((random.uniform(0.1, 4), random.uniform(0.1, 4)) for _ in range(2)) for _ in range(4)],
    ],
)
def plain_call(dense: tuple[float, float], ours: tuple[float, float]) -> float:
    return max(dense) / max(ours)


@formula(
    "power times time, by token; it is negative where ours takes more.",
    lambda: [
        *[((600, 10.0, 1024), (500, 8.0, 1024)), ((400, 2.0, 1), (400, 2.0, 2)), ((300, 1.0, 16), (420, 1.0, 16))],
        *[
            tuple((random.randint(100, 700), random.uniform(1, 9), random.randint(1, 64)) for _ in range(2))
            for _ in range(4)
        ],
    ],
)
def energy_saved(dense: tuple[float, float, int], ours: tuple[float, float, int]) -> float:
    joules = [watts * ms / tokens for watts, ms, tokens in (dense, ours)]
    return 1 - joules[1] / joules[0]

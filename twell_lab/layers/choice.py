"""What a layer does at each number of tokens: a Choice of path, and the LayerPlan that makes it, with what was
weighed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core import InputError
from ..records import record
from .paths import PATHS
from .paths.hot_cold import STEP, hot_first


@dataclass(frozen=True)
class Choice:
    """A path through a layer, by its name in PATHS; on one that splits, with the `hot` most used neurons dense.

    Raises InputError for an unknown path, and for a number of hot neurons that it does not take."""

    path: str = "twell"
    hot: int = 0

    def __post_init__(self) -> None:
        if self.path not in [*PATHS] and self.path not in PATHS.names():  # lists: it need not be hashable
            raise InputError(f"path is {self.path!r:.80}; {', '.join(map(repr, PATHS.names()))} are accepted")
        if isinstance(self.hot, bool) or not isinstance(self.hot, int) or self.hot < 0 or self.hot % STEP:
            raise InputError(f"hot is {self.hot!r}; a multiple of {STEP} is accepted")
        if (splits := PATHS[self.path].splits) != (self.hot > 0):
            accepted = f"a multiple of {STEP} above 0" if splits else "0"
            raise InputError(f"hot is {self.hot} on path {self.path!r}; {accepted} is accepted")

    def check(self, d_ff: int) -> None:
        """InputError if a layer of d_ff neurons cannot be split in this way."""
        if not PATHS[self.path].accepts(d_ff, self.hot):
            accepted = f"a multiple of {STEP} below {d_ff}" if d_ff > STEP else f"a layer of more than {STEP} neurons"
            raise InputError(f"hot is {self.hot} of {d_ff} neurons; {accepted} is accepted")

    def __str__(self) -> str:
        name = f"{self.path} {self.hot}" if self.hot else self.path
        return name if PATHS[self.path].exact else f"{name} ({LOSSY})"


LOSSY = "lossy"  # what a path that is not exact is called wherever it is printed
DENSE = Choice("dense")  # what every other choice is compared with

# In compiled code, as shares of dense's host time in eager code.
# One layer among others: what is left of that time, and what calling a sparse layer's operator adds to its own. Each
# further layer in stacks of 1 and 9, with a residual each, at 1 to 1,024 tokens, on an H100 with torch 2.11,
# 2026-11-23, not recorded: 0.49 to 0.65, and 0.02 to 0.18.
_COMPILED, _OPERATOR = 0.65, 0.15
# A layer alone, where torch's wrapper comes to both: what dense then takes, and what a sparse layer's operator adds to
# its own; gated, and plain. inference-20261126T022258Z.json (medians; tests/layers/ffn/test_compiled.py).
ALONE = {True: (1.45, 0.97), False: (1.9, 1.6)}
_DEVICE_COMPILED = 0.92  # what is left there of dense's device time, whose activation and product torch fuses
_CLOCK = 1.03  # by how much two times may differ that count as the same


def one_of_each(d_ff: int, hot: int) -> list[Choice]:
    """A choice of every path that takes a layer of d_ff neurons; a path that splits them has `hot` hot ones."""
    sizes = {path: hot if path.splits else 0 for path in PATHS.values()}
    return [Choice(path.name, size) for path, size in sizes.items() if path.accepts(d_ff, size)]


@dataclass(frozen=True)
class Candidate:
    """A choice that was weighed for up to `tokens` tokens at once; times in microseconds, None where not timed.

    measured_us: by the plan's clock; host_us: until the call returns; device_us: the GPU's work. before_us: the layer
    as it was before it was swapped, timed beside the choice by the plan's clock. timed_on: the layer that was timed,
    this one or one like it (twell_lab.analysis.trials)."""

    tokens: int
    path: str
    hot: int
    predicted_us: float
    measured_us: float | None
    chosen: bool
    why: str
    host_us: float | None = None
    device_us: float | None = None
    before_us: float | None = None
    timed_on: str | None = None

    @property
    def choice(self) -> Choice:
        return Choice(self.path, self.hot)


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer.

    profiled: at how many tokens its neurons were watched; neuron_counts: at how many of them each of the d_ff neurons
    fired. candidates: what was weighed; of each class of token counts exactly one is chosen. A class is named by its
    largest count: classes 1, 64 and 2048 hold 1, 2 to 64, and 65 to 2048 tokens, and the last one all beyond.
    """

    name: str
    d_model: int
    d_ff: int
    gated: bool
    profiled: int
    neuron_counts: tuple[int, ...] = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.neuron_counts) != self.d_ff:
            raise InputError(
                f"{len(self.neuron_counts)} neuron_counts for layer {self.name!r}; {self.d_ff} are accepted"
            )
        classes = [each.tokens for each in self.candidates]
        chosen = [each.tokens for each in self.candidates if each.chosen]
        if not chosen or sorted(chosen) != sorted(set(classes)):
            raise InputError(
                f"layer {self.name!r} has chosen candidates for tokens {chosen} of {sorted(set(classes))}; "
                "one for each is accepted"
            )
        for each in self.candidates:
            each.choice.check(self.d_ff)

    @classmethod
    def forced(cls, layer, choice: Choice) -> LayerPlan:
        """A plan of one choice for every token count, for comparing paths. layer: the LayerProfile or LayerPlan that
        says how often the neurons fire."""
        profiled = layer.profiled if isinstance(layer, LayerPlan) else layer.tokens
        counts = tuple(torch.as_tensor(layer.neuron_counts).tolist())
        only = Candidate(1, choice.path, choice.hot, 0.0, None, True, "forced")
        return cls(layer.name, layer.d_model, layer.d_ff, layer.gated, profiled, counts, (only,))

    @property
    def choices(self) -> dict[int, Choice]:
        """Class of token counts -> what is done there, classes ascending."""
        found = {each.tokens: each.choice for each in self.candidates if each.chosen}
        return dict(sorted(found.items()))

    def choice(self, tokens: int) -> Choice:
        """What is done with this many tokens at once."""
        return next((each for most, each in self.choices.items() if tokens <= most), [*self.choices.values()][-1])

    def pays_compiled(self, tokens: int) -> bool:
        """Whether what is done in this class of token counts is worth it in compiled code, too, which takes less of the
        host's time for a dense layer, and more for a sparse one: among other layers, and for a layer alone. Where no
        host time is known, it is."""
        of_class = [each for each in self.candidates if each.tokens == tokens]
        chosen = next(each for each in of_class if each.chosen)
        dense = next((each for each in of_class if each.choice == DENSE), chosen)
        if dense.host_us is None or chosen.host_us is None:
            return True
        device = dense.device_us or 0.0
        among = chosen.host_us + _OPERATOR * dense.host_us
        if among > max(_COMPILED * dense.host_us, device):
            return False
        left, added = ALONE[self.gated]
        alone = chosen.host_us + added * dense.host_us
        return alone <= _CLOCK * max(left * dense.host_us, _DEVICE_COMPILED * device)

    @property
    def nnz(self) -> float:
        """Neurons firing at a token, on average over the profile."""
        return self.packed_nnz(Choice())

    def packed_nnz(self, choice: Choice) -> float:
        """How many firing neurons of a token the packed part of a choice is expected to hold: none, all, or the cold
        ones. NaN where no token was profiled."""
        if not PATHS[choice.path].packs:
            return 0.0
        rest = sorted(self.neuron_counts, reverse=True)[choice.hot :]
        return sum(rest) / self.profiled if self.profiled else math.nan

    def order(self, hot: int) -> Tensor:
        """The neurons, int64 [d_ff], the `hot` most used ones first; see hot_first."""
        return hot_first(torch.tensor(self.neuron_counts, dtype=torch.int64, device="cpu"), hot)

    def table(self) -> list[dict]:
        """One row a candidate: its fields by name."""
        return [dict(vars(each)) for each in self.candidates]

    def __str__(self) -> str:
        rows = [{**row, "chosen": "*" if row["chosen"] else ""} for row in self.table()]
        columns = {name: name.replace("_", " ") for name in rows[0]}
        kind = "gated" if self.gated else "plain"
        head = f"{self.name or 'layer'}: {kind}, d_model {self.d_model}, d_ff {self.d_ff}, mean nnz {self.nnz:.1f}"
        return f"{head}\n{record.table(rows, columns)}"

"""What a layer does at each number of tokens: a Choice of path, and the LayerPlan with one for each class of counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core import InputError
from .paths import PATHS, STEP, hot_first


@dataclass(frozen=True)
class Choice:
    """A path through a layer, by its name in PATHS; on one that splits, with the `hot` most used neurons dense. Raises
    InputError for an unknown path, and for a number of hot neurons that it does not take."""

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
        """Raise InputError if a layer of d_ff neurons cannot be split in this way."""
        if self.hot not in PATHS[self.path].sizes(d_ff):
            accepted = f"a multiple of {STEP} below {d_ff}" if d_ff > STEP else f"a layer of more than {STEP} neurons"
            raise InputError(f"hot is {self.hot} of {d_ff} neurons; {accepted} is accepted")

    def __str__(self) -> str:
        return self.path + f" {self.hot}" * (self.hot > 0) + f" ({LOSSY})" * (not PATHS[self.path].exact)


LOSSY = "lossy"  # what a path that is not exact is called wherever it is printed
DENSE = Choice("dense")  # what every other choice is compared with
MARGIN = 1.02  # how many times as fast as torch's dense layer a path has to be, timed


def one_of_each(d_ff: int, hot: int) -> list[Choice]:
    """List a choice of every path that takes a layer of d_ff neurons; a path that splits them has `hot` hot ones."""
    sizes = {path: hot if path.splits else 0 for path in PATHS.values()}
    return [Choice(path.name, size) for path, size in sizes.items() if size in path.sizes(d_ff)]


@dataclass(frozen=True)
class Candidate:
    """A choice that was weighed for up to `tokens` tokens at once; times in microseconds, None where not timed.
    dense_us: of the layer as torch computes it, timed beside. timed_on: the layer that was timed, or one like it."""

    tokens: int
    path: str
    hot: int
    predicted_us: float
    measured_us: float | None
    chosen: bool
    why: str
    dense_us: float | None = None
    timed_on: str | None = None

    choice = property(lambda self: Choice(self.path, self.hot), doc="The path, with its hot neurons.")


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer.

    profiled: at how many tokens its neurons were watched; neuron_counts: at how many of them each of the d_ff neurons
    fired. candidates: what was weighed; of each class of token counts exactly one is chosen, else InputError. A class
    is named by its largest count: classes 1, 64 and 2048 hold 1, 2 to 64, and 65 to 2048 tokens, and the last one all
    beyond."""

    name: str
    d_model: int
    d_ff: int
    gated: bool
    profiled: int
    neuron_counts: tuple[int, ...] = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)

    def __post_init__(self) -> None:
        many, classes = len(self.neuron_counts), sorted({row.tokens for row in self.candidates})
        if many != self.d_ff:
            raise InputError(f"{many} neuron_counts for layer {self.name!r}; {self.d_ff} are accepted")
        chosen = [row.tokens for row in self.candidates if row.chosen]
        if not chosen or sorted(chosen) != classes:
            said = f"layer {self.name!r} has chosen candidates for tokens {chosen} of {classes}"
            raise InputError(f"{said}; one for each is accepted")
        for row in self.candidates:
            row.choice.check(self.d_ff)

    @classmethod
    def forced(cls, layer, choice: Choice) -> LayerPlan:
        """Make a plan of one choice for every token count. layer: a LayerProfile or LayerPlan with neuron_counts."""
        profiled = layer.profiled if isinstance(layer, LayerPlan) else layer.tokens
        counts = tuple(torch.as_tensor(layer.neuron_counts).tolist())
        only = Candidate(1, choice.path, choice.hot, 0.0, None, True, "forced")
        return cls(layer.name, layer.d_model, layer.d_ff, layer.gated, profiled, counts, (only,))

    @property
    def choices(self) -> dict[int, Choice]:
        """Class of token counts -> what is done there, classes ascending."""
        return dict(sorted((row.tokens, row.choice) for row in self.candidates if row.chosen))

    def choice(self, tokens: int) -> Choice:
        """Return what is done with this many tokens at once."""
        return next((choice for most, choice in self.choices.items() if tokens <= most), [*self.choices.values()][-1])

    @property
    def unchanged(self) -> bool:
        """Return whether the layer can stay as the model has it: dense everywhere, and no faster by our dense path."""
        rows = [row for row in self.candidates if row.chosen]
        gains = any(row.measured_us * MARGIN <= row.dense_us for row in rows if row.measured_us and row.dense_us)
        return not gains and all(row.choice == DENSE for row in rows)

    def order(self, hot: int) -> Tensor:
        """Return the neurons, int64 [d_ff], the `hot` most used ones first; see hot_first."""
        return hot_first(torch.tensor(self.neuron_counts, dtype=torch.int64, device="cpu"), hot)

    @property
    def nnz(self) -> float:
        """Neurons firing at a token, on average over the profile; NaN where no token was profiled."""
        return sum(self.neuron_counts) / self.profiled if self.profiled else math.nan

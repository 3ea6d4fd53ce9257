"""What zeroes small values inside a feed-forward layer that was not trained to have zeros. The layer then computes
something else than it was trained to: each of these modules says so where it is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from torch import Tensor, nn

from ..core import InputError

INPUT, HIDDEN = "input", "hidden"  # the places of a layer where inputs are zeroed: before gate and up, and before down


def zeroed(values: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the values [..., n] with those below the threshold in magnitude exactly zero; NaN stays. threshold: of all
    of them, or [n], of each place its own."""
    own = isinstance(threshold, Tensor)
    return values.masked_fill(values.abs() < threshold, 0) if own or threshold else values


class Lossy(nn.Module):
    """Sets values below `threshold` in magnitude to zero; 0 leaves all as they are. InputError for another number than
    a finite one from 0 up."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < inf:
            raise InputError(f"threshold is {threshold!r:.80}; a finite number from 0 up is accepted")
        self.threshold = float(threshold)

    def extra_repr(self) -> str:
        return f"lossy: |value| < {self.threshold:.4g} becomes 0"


class ThresholdedActivation(Lossy):
    """An activation, a module or a function, whose small values are zero: what CATS (Lee et al., arXiv 2404.08763) puts
    behind the gate. A neuron below the threshold is silent: its up value and its row of down count for nothing."""

    def __init__(self, activation: Callable[[Tensor], Tensor], threshold: float) -> None:
        super().__init__(threshold)
        self._of = [activation]  # in a list: it is not a child

    activation = property(lambda self: self._of[0], doc="The activation without the threshold.")

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if getattr(self.activation, "inplace", False) else x  # who watches layers calls this once more
        return zeroed(self.activation(x), self.threshold)

    def extra_repr(self) -> str:
        name = getattr(self.activation, "__name__", type(self.activation).__name__)
        return f"{name}, {super().extra_repr()}"


class ThresholdedInput(Lossy):
    """Zeroes the small inputs of projections, before each of their forwards: TEAL (Liu et al., arXiv 2408.14690).
    A child of their layer without parameters, so that names and states stay what they were.

    scale: what magnitudes are multiplied by before they are compared, a number or a tensor [inputs]: WINA's norms of
    the weight's columns (Chen et al., arXiv 2505.19427). bound: the threshold over it, for the magnitudes alone."""

    bound: float | Tensor

    def __init__(self, threshold: float, scale: float | Tensor = 1.0) -> None:
        super().__init__(threshold)
        if isinstance(scale, Tensor):
            self.register_buffer("bound", self.threshold / scale, persistent=False)
        else:
            self.bound = self.threshold / scale

    def before(self, projection: nn.Module, args: tuple) -> tuple:
        """The forward pre-hook of the projections."""
        return zeroed(args[0], self.bound), *args[1:]

    def extra_repr(self) -> str:
        return super().extra_repr() + ", where a value counts times its column's norm" * isinstance(self.bound, Tensor)

    def put_on(self, layer: nn.Module, place: str, projections: Iterable[nn.Module]) -> None:
        """Zero the inputs of these projections of a layer from now on. place: what to call these inputs."""
        layer.add_module(f"lossy_{place}", self)
        for projection in projections:
            projection.register_forward_pre_hook(self.before)

    @classmethod
    def of(cls, layer: nn.Module) -> dict[str, ThresholdedInput]:
        """Return those that are children of this layer, by their names there."""
        return {name: part for name, part in layer._modules.items() if isinstance(part, cls)}

    @classmethod
    def take_off(cls, layer: nn.Module) -> None:
        """Leave the inputs of the projections of this layer as they are."""
        own = cls.of(layer)
        for part in layer.modules() if own else ():
            for key, hook in [*part._forward_pre_hooks.items()]:
                if getattr(hook, "__self__", None) in own.values():
                    del part._forward_pre_hooks[key]
        for name in own:
            del layer._modules[name]


class Cut(NamedTuple):
    """The thresholds on a layer's inputs, and on its hidden values, which are those of `down`: numbers, or, with WINA,
    tensors with one for each column of the weights."""

    input: float | Tensor
    hidden: float | Tensor

    by_column = property(lambda self: isinstance(self.input, Tensor))

    def __str__(self) -> str:
        least = ["its column's threshold" if isinstance(bound, Tensor) else f"{bound:.4g}" for bound in self]
        return f"lossy: |input| < {least[0]} and |hidden| < {least[1]} become 0"


def cut_of(layer: nn.Module) -> Cut | None:
    """Return the thresholds that ThresholdedInputs of this layer stand for; None where it has none."""
    own = ThresholdedInput.of(layer)
    at = [own.get(f"lossy_{place}") for place in (INPUT, HIDDEN)]
    return Cut(*(0.0 if part is None else part.bound for part in at)) if own else None


def lossy_parts(model: nn.Module) -> list[tuple[str, Lossy]]:
    """Every Lossy of a model, by the name of its place."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Lossy)]

"""What a feed-forward layer is: which modules have the parts of one.

Recognised by the names of their parts (more families are added to LAYOUTS):
  gate_proj, up_proj, down_proj, act_fn   gated: transformers Llama with hidden_act="relu", this course's model
  up_proj, down_proj, act_fn              plain: this course's model
  fc1, fc2, activation_fn                 plain: transformers OPT, where the parts sit in the decoder layer itself

A name is a hint only: other models scale, clamp, normalise or drop between the same parts. So each layer is asked what
it computes before it is swapped (twell_lab.layers.probe)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.errors import InputError
from ..ops.reference import SquaredReLU


class Layout(NamedTuple):
    """The attribute names of a layer's parts; gate is None in plain layers."""

    gate: str | None
    up: str
    down: str
    activation: str

    @property
    def projections(self) -> list[str]:
        return [name for name in self[:3] if name]

    def parts(self, module: nn.Module) -> list:
        """Gate (or None), up, down and the activation of a module that has them."""
        return [getattr(module, name) if name else None for name in self]

    def carried(self, module: nn.Module) -> set[int]:
        """The ids of the modules that go into a sparse layer as they are: the projections, and all within them."""
        return {id(each) for name in self.projections for each in getattr(module, name).modules()}


# The first layout whose names are all there is taken.
LAYOUTS = (
    Layout("gate_proj", "up_proj", "down_proj", "act_fn"),
    Layout(None, "up_proj", "down_proj", "act_fn"),
    Layout(None, "fc1", "fc2", "activation_fn"),
)
IN_BLOCK = LAYOUTS[2]  # the parts sit in the decoder layer, beside its attention
ACCEPTED = "accepted: gate_proj, up_proj, down_proj, or up_proj, down_proj, or fc1, fc2, each a plain torch.nn.Linear,"

Only = Callable[[str, nn.Module], bool]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward layer found in a model. gate is None for plain layers."""

    name: str
    module: nn.Module
    gate: nn.Linear | None
    up: nn.Linear
    down: nn.Linear

    @property
    def pattern(self) -> nn.Linear:
        """The projection whose positive outputs are the neurons that fire."""
        return self.up if self.gate is None else self.gate


class StandIn:
    """A module that took the place of a feed-forward layer, and describes that layer itself."""

    @property
    def registered(self) -> bool:
        """Whether the projections are this module's own."""
        raise NotImplementedError

    def views(self) -> list[Tensor]:
        """Tensors of its own on the memory of the layer's weights."""
        raise NotImplementedError

    def feed_forward(self, name: str) -> FeedForward:
        """The layer; name: where the module was found."""
        raise NotImplementedError


def is_relu(activation) -> bool:
    if isinstance(activation, nn.ReLU):  # not a subclass that computes something else, as squared ReLUs do
        return type(activation).forward is nn.ReLU.forward and "forward" not in vars(activation)
    return any(activation is each for each in (torch.relu, nn.functional.relu))


def is_linear(module) -> bool:
    """Whether the module computes x W^T + b, so that its weight and bias say all about it.

    A subclass of nn.Linear with a forward of its own (an adapter, a quantised layer) need not.
    """
    if not isinstance(module, nn.Linear):
        return False
    replaced = vars(module).get("forward")
    return type(module).forward is nn.Linear.forward and (replaced is None or isinstance(replaced, HandOn))


class HandOn:
    """The forward of a projection in a decoder layer whose activation does all the work: it returns its input.

    Raises InputError where a part was replaced since: another activation would get what the projection gets.
    """

    def __init__(self, block: nn.Module, layout: Layout) -> None:
        self.block, self.parts = block, [(seat, getattr(block, seat)) for seat in layout if seat]

    def __call__(self, x: Tensor) -> Tensor:
        for seat, part in self.parts:
            if getattr(self.block, seat) is not part:
                raise InputError(
                    f"{seat} of a swapped {type(self.block).__name__} was replaced; accepted: twell_lab.densify first"
                )
        return x


def named_parts(module: nn.Module) -> Layout | None:
    """The first layout whose names are all there, whatever they stand for."""
    if "_orig_mod" in vars(module).get("_modules", ()):  # torch.compile's wrapper answers to the names of what it wraps
        return None
    for layout in LAYOUTS:
        if all(getattr(module, name, None) is not None for name in layout if name):
            return layout
    return None


def layout_of(module: nn.Module) -> Layout | None:
    """The first layout whose names are all there, whatever the activation; None if a projection is no plain Linear."""
    layout = named_parts(module)
    return layout if layout and all(is_linear(getattr(module, name)) for name in layout.projections) else None


def title(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def selected(only: Only | None, name: str, module: nn.Module) -> bool:
    """Whether the filter takes the layer; InputError for one that cannot be called."""
    if only is not None and not callable(only):
        raise InputError(
            f"only is {only!r:.80}; a function of a layer's name and module is accepted, or None for all layers"
        )
    return only is None or bool(only(name, module))


def raise_all(reasons: list[str]) -> None:
    """One InputError for all of them, should there be any; the first four are quoted."""
    if reasons:
        more = f"; and {len(reasons) - 4} more" if len(reasons) > 4 else ""
        raise InputError("; ".join(reasons[:4]) + more)


def _describe(name: str, module: nn.Module, fires: Callable[[object], bool] = is_relu) -> FeedForward | None:
    """The module as a feed-forward layer, if it is one with an activation for which fires(activation) is true."""
    if isinstance(module, StandIn):
        return module.feed_forward(name)
    layout = layout_of(module)
    if layout is None or not fires(getattr(module, layout.activation)):
        return None
    return FeedForward(name, module, *layout.parts(module)[:3])


def feed_forwards(model: nn.Module, *, only: Only | None = None) -> list[FeedForward]:
    """Every ReLU feed-forward layer of the model, dense or already sparse, in the order of its modules.

    Found by the names of their parts (twell_lab.layers.anatomy), which do not say what is computed between them:
    `sparsify` and `SparseFFN` ask that of every dense layer, this function of none. only: layers for which only(name,
    module) is true. Raises InputError if there is none, naming the activations that were found instead."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    found = [f for name, module in model.named_modules() if (f := _describe(name, module))]
    if not found:
        kinds = {type(getattr(m, lay.activation)).__name__ for m in model.modules() if (lay := layout_of(m))}
        seen = (
            f"its feed-forward layers use {', '.join(sorted(kinds))}"
            if kinds
            else "none of its modules has the known parts"
        )
        raise InputError(f"no ReLU feed-forward layer in {type(model).__name__}: {seen}; {ACCEPTED} and a ReLU")
    chosen = [f for f in found if selected(only, f.name, f.module)]
    if not chosen:
        raise InputError(
            f"`only` leaves none of the {len(found)} feed-forward layers of {type(model).__name__}, the first of which "
            f"is {found[0].name!r}; accepted: one that is true for some"
        )
    return chosen


def firing_layers(model: nn.Module, *, only: Only | None = None) -> list[FeedForward]:
    """Every feed-forward layer whose pattern comes from a ReLU or a SquaredReLU, in the order of the modules.

    Like feed_forwards, which leaves the squared ones out since no sparse path computes them. Raises InputError
    if there is neither. only: as there.
    """
    fires = lambda activation: is_relu(activation) or isinstance(activation, SquaredReLU)  # noqa: E731
    layers = [layer for name, module in model.named_modules() if (layer := _describe(name, module, fires))]
    found = [layer for layer in layers if selected(only, layer.name, layer.module)]
    return found or feed_forwards(model, only=only)  # which says what it found instead

"""The parts of a feed-forward layer, however its family stores them: projections with weight [out, in] and bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .families import FAMILIES, Family
from .lossy import Cut, zeroed

# Classes of transformers that compute x W^T + b in another way than nn.Linear; Conv1D stores W^T.
_CONV1D, _FALCON = "transformers.pytorch_utils.Conv1D", "transformers.models.falcon.modeling_falcon.FalconLinear"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(eq=False)
class Part:
    """A projection that a module, its owner, stores as a half (0 or 1) of its rows, as its transpose, or as one of
    several weights, with this index. names: what the module calls weight and bias. Both are views, made anew when they
    are read. A hook goes on the module, which is what the model calls."""

    owner: nn.Module
    half: int | None = None
    transposed: bool = False
    names: tuple[str, str | None] = ("weight", "bias")
    index: int | None = None

    weight = property(lambda self: self.share(getattr(self.owner, self.names[0]), self.transposed))
    bias = property(lambda self: self.share(getattr(self.owner, self.names[1])) if self.names[1] else None)

    def share(self, stored: Tensor | None, transposed: bool = False) -> Tensor | None:
        """Return this projection's share of a tensor that the module stores, its weight, bias or a gradient of them."""
        if stored is None:
            return None
        stored = stored if self.index is None else stored[self.index]
        stored = stored.t() if transposed else stored
        rows = stored.shape[0] // 2
        return stored if self.half is None else stored.narrow(0, self.half * rows, rows)

    def register_forward_pre_hook(self, hook):
        return self.owner.register_forward_pre_hook(hook)

    def register_forward_hook(self, hook):
        def of_half(module, args, output):  # to look on, not to change
            hook(module, args, output if self.half is None else output.chunk(2, dim=-1)[self.half])

        return self.owner.register_forward_hook(of_half)


Projection: TypeAlias = nn.Linear | Part


def owner_of(part: Projection) -> nn.Module:
    return part.owner if isinstance(part, Part) else part


def stored_by(part: Projection) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Return the parameters that the module of a projection has for its weight and its bias."""
    own, (weight, bias) = owner_of(part)._parameters, getattr(part, "names", ("weight", "bias"))
    return own.get(weight), own.get(bias or "")


def gradient_of(part: Projection) -> Tensor | None:
    """Return the gradient of a projection's weight [out, in]; None where nothing has reached it."""
    stored = stored_by(part)[0]
    gradient = None if stored is None else stored.grad
    return part.share(gradient, part.transposed) if isinstance(part, Part) else gradient


class Weights(NamedTuple):
    """A layer's weights and biases, in the order in which the operators take them: gate and up [d_ff, d_model], down
    [d_model, d_ff], biases [d_ff], [d_ff], [d_model]. gate is None for a plain layer, and up for a squared ReLU."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def of(cls, gate: Projection | None, up: Projection, down: Projection) -> Weights:
        weight, bias = up.weight, up.bias
        first = (weight, bias) if gate is up else (None, None) if gate is None else (gate.weight, gate.bias)
        return cls(first[0], weight, down.weight, first[1], bias, down.bias)

    def named(self) -> dict[str, Tensor]:
        """Return those that are there, by name."""
        return {name: t for name, t in self._asdict().items() if t is not None}


class FeedForward(NamedTuple):
    """One feed-forward layer, by its name in the model, and where its parts are.

    gate: None in plain layers; find.layer_of puts up there where a plain layer's ReLU is squared, since that is
    relu(u) * u, and leaves `acts` to activations with a threshold, and to layers with a `cut`. both: whether up is
    known to go through the activation as well. cut: the thresholds on its inputs and hidden values (TEAL); then all
    that is kept of the latter fires. drop: a dropout before the down projection."""

    name: str
    module: nn.Module
    gate: Projection | None
    up: Projection
    down: Projection
    acts: Callable[[Tensor], Tensor] | None = None
    both: bool = False
    cut: Cut | None = None
    family: Family | None = None
    drop: nn.Module | None = None

    @property
    def pattern(self) -> Projection:
        """The projection whose positive outputs are the neurons that fire; with `acts`, those that it keeps."""
        return self.up if self.gate is None else self.gate

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that hold the projections, each once."""
        return list({id(m): m for m in map(owner_of, filter(None, self[2:5]))}.values())


def hidden_of(layer: FeedForward, x: Tensor, thresholds: Mapping[str, float | Tensor] | None = None) -> Tensor:
    """Return what enters the down projection of a layer, [..., d_ff], for x [..., d_model]. thresholds: for "input",
    "activation" and "hidden", below which magnitude values there become zero; None: those that are on it."""
    cut = thresholds if thresholds is not None else {} if layer.cut is None else layer.cut._asdict()
    acts, first, x = layer.acts or torch.relu, layer.pattern, zeroed(x, cut.get("input", 0.0))
    hidden = zeroed(acts(linear(x, first.weight, first.bias)), cut.get("activation", 0.0))
    if layer.gate is not None:
        beside = linear(x, layer.up.weight, layer.up.bias)
        hidden = hidden * (acts(beside) if layer.both else beside)
    return zeroed(hidden, cut.get("hidden", 0.0))


def formula(layer: FeedForward, x: Tensor, seen: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return what a layer gives for x [..., d_model]; seen(hidden values [..., d_ff]) returns them."""
    hidden = hidden_of(layer, x)
    hidden = hidden if layer.drop is None else layer.drop(hidden)
    return linear(hidden if seen is None else seen(hidden), layer.down.weight, layer.down.bias)


def part_at(module: nn.Module, place: str) -> object:
    """Return what is at this place in the module, such as "output.dense"; None if there is nothing."""
    for name in place.split("."):
        module = getattr(module, name, None)
    return module


def put(module: nn.Module, place: str, part: object) -> None:
    """Set what is at this place in the module: a module, or a function."""
    above, _, name = place.rpartition(".")
    block = module.get_submodule(above)
    if not isinstance(part, nn.Module):
        block._modules.pop(name, None)  # torch would not have a function in a module's place
    setattr(block, name, part)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile's wrapper holds, whose layers have their own names; any other as it is."""
    while "_orig_mod" in vars(model).get("_modules", ()):
        model = model._modules["_orig_mod"]
    return model


def named_family(module: nn.Module) -> Family | None:
    """Return the first family whose parts are all there, whatever they are."""
    if uncompiled(module) is not module:  # torch.compile's wrapper answers to the names of what it wraps
        return None
    return next((of for of in FAMILIES if all(part_at(module, place) is not None for place in of.places)), None)


def class_of(module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_projection(module) -> bool:
    """Return whether the module's class computes x W^T + b, so that weight and bias say all about it."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain or class_of(module) in (_CONV1D, _FALCON)


def parts_of(module: nn.Module) -> FeedForward | None:
    """Return the parts of a module, whatever its activation; None without a family, or with other projections."""
    if (own := getattr(module, "own_parts", None)) is not None:
        return own()
    family = named_family(module)
    if family is None or not all(is_projection(part_at(module, place)) for place in family.projections):
        return None

    def part(place: str, half: int) -> Projection:
        owner, fused = part_at(module, place), place == family.gate == family.up
        transposed = class_of(owner) == _CONV1D
        return Part(owner, half if fused else None, transposed) if fused or transposed else owner

    gate, drop = part(family.gate, 0) if family.gate else None, family.dropout and part_at(module, family.dropout)
    parts = gate, part(family.up, 1), part(family.down, 0), part_at(module, family.activation)
    return FeedForward("", module, *parts, family=family, drop=drop if isinstance(drop, nn.Dropout) else None)


class Over:
    """A forward that stands over the one that a module has, and calls that where it has nothing else to do."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.before = module, vars(module).get("forward")
        module.forward = self

    def beneath(self, *args, **kwargs):
        """Return what the module computes without this."""
        return (self.before or MethodType(type(self.module).forward, self.module))(*args, **kwargs)

    @classmethod
    def take_off(cls, module: nn.Module) -> None:
        """Give the module back the forward that it had, also where accelerate put a hook over this since."""
        for name in ("forward", "_old_forward"):
            over = vars(module).get(name)
            if not isinstance(over, cls):
                continue
            if over.before is None and name == "forward":
                del module.forward
            else:
                setattr(module, name, over.before or MethodType(type(module).forward, module))

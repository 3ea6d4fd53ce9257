"""What a feed-forward layer is: which modules have the parts of one.

Recognised by where their parts are, which each family of models says in its file (twell_lab.layers.families). That is a
hint only: other models scale, clamp, normalise or drop between the same parts. So each layer is asked what it computes
before it is swapped (twell_lab.layers.probe)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from ..core import InputError
from ..ops.reference import SquaredReLU
from .experts import Expert, experts_of
from .families import Family, accepted, known
from .lossy import HIDDEN, INPUT, Cut, ThresholdedActivation, cut_of
from .parts import is_projection, part_at, uncompiled

Only = Callable[[str, nn.Module], bool]
Fires = Callable[[Family, object], bool]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward layer found in a model. gate is None for plain layers; it is up where a plain layer's ReLU is
    squared, since relu(u) * u is that. acts: the activation, where it is none of these but one with a threshold, or
    where there is a `cut`. both: whether up is known to go through the ReLU as well, as a sparse layer's is. cut: the
    thresholds on its inputs and hidden values, if it has them (TEAL); then all that is kept of the latter fires."""

    name: str
    module: nn.Module
    gate: nn.Linear | None
    up: nn.Linear
    down: nn.Linear
    acts: Callable[[Tensor], Tensor] | None = None
    both: bool = False
    cut: Cut | None = None

    @property
    def pattern(self) -> nn.Linear:
        """The projection whose positive outputs are the neurons that fire; with `acts`, those that it keeps."""
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


def is_squared(activation) -> bool:
    """Whether the activation is a squared ReLU: this project's, or that of transformers ("relu2")."""
    kind = type(activation)
    known = isinstance(activation, SquaredReLU) and kind.forward is SquaredReLU.forward
    named = f"{kind.__module__}.{kind.__qualname__}" == "transformers.activations.ReLUSquaredActivation"
    return (known or named) and "forward" not in vars(activation)


def is_threshold(activation) -> bool:
    """Whether the activation keeps what lies above a threshold from 0 up as it is, and nothing else: FATReLU
    (ProSparse, arXiv 2402.13516; MiniCPM-S), by the name of its class and by what it gives; or torch.nn.Threshold. Also
    whether it is an activation with a threshold of ours, which keeps negative values too (layers.lossy)."""
    if isinstance(activation, ThresholdedActivation):
        return True
    bound = getattr(activation, "threshold", None)
    if not isinstance(activation, nn.Module) or isinstance(bound, bool) or not isinstance(bound, (int, float)):
        return False
    if "FATReLU" not in type(activation).__name__ and not isinstance(activation, nn.Threshold) or not 0 <= bound < inf:
        return False
    with torch.no_grad():
        around = torch.tensor([-2.0, -1.0, -0.5, 0.5, 0.99, 1.01, 2.0, 100.0], device="cpu") * (bound or 1.0)
        try:
            found = activation(around)
        except Exception:
            return False
        return isinstance(found, torch.Tensor) and torch.equal(found, torch.where(around > bound, around, 0.0))


def computes(family: Family, activation) -> bool:
    """Whether a sparse layer computes this activation: ReLU, in plain layers its square, relu(u) * u, and one with a
    threshold, which kernels compute if they know it (twell_lab.layers.activations)."""
    return is_relu(activation) or family.gate is None and is_squared(activation) or is_threshold(activation)


def cut_in(family: Family, module: nn.Module) -> Cut | None:
    """The thresholds on the inputs of a layer of this family, where a sparse layer can stand in its place: inside a
    block, as in OPT, the projections stay with their hooks."""
    return None if family.inside else cut_of(module)


def cut_places(family: Family, module: nn.Module) -> dict[str, list[nn.Module]]:
    """The modules that store a layer's projections, by the place of what enters them."""
    owners = family.owners(module)
    down = owners.pop(family.down)
    return {INPUT: [*owners.values()], HIDDEN: [down]}


def is_usual(activation, cut: Cut | None = None) -> bool:
    """Whether the activation need not be kept beside a layer's projections: it is a ReLU or its square, or, without
    a `cut`, whatever has no threshold."""
    return is_relu(activation) or is_squared(activation) or not cut and not is_threshold(activation)


def parts_of(family: Family, module: nn.Module) -> list:
    """Gate, up and down as a sparse layer reads them: gate is None in plain layers, up in those with a squared ReLU."""
    gate, up, down, activation = family.parts(module)
    return [up if gate is None and is_squared(activation) else gate, up, down]


def named_parts(module: nn.Module) -> Family | None:
    """The first family whose parts are all there, whatever they stand for."""
    if uncompiled(module) is not module:  # torch.compile's wrapper answers to the names of what it wraps
        return None
    for family in known():
        if all(part_at(module, seat) is not None for seat in family.seats):
            return family
    return None


def family_of(module: nn.Module) -> Family | None:
    """The first family whose parts are all there, whatever the activation; None if a projection is none that is known,
    or holds gate and up in an odd number of rows."""
    if isinstance(module, Expert):
        return module.family
    family = named_parts(module)
    if family is None or not all(map(is_projection, family.owners(module).values())):
        return None
    return None if family.fused and family.owners(module)[family.up].out_features % 2 else family


def title(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def replaced(model: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Put new modules in every seat of the old ones; the model itself may be such a seat. Returns the model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() skips a child's second seat
            if child in made:
                setattr(parent, name, made[child])
    return made.get(model, model)


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


def _describe(name: str, module: nn.Module, fires: Fires = computes) -> FeedForward | None:
    """The module as a feed-forward layer, if it is one for which fires(family, activation) is true."""
    if isinstance(module, StandIn):
        return module.feed_forward(name)
    family = family_of(module)
    cut = None if family is None else cut_in(family, module)
    if family is None or not (cut or fires(family, family.acts(module))):
        return None
    acts = family.acts(module)
    gate, up, down = parts_of(family, module)
    return FeedForward(name, module, gate, up, down, None if is_usual(acts, cut) else acts, cut=cut)


def _layers(model: nn.Module, fires: Fires = computes) -> Iterator[FeedForward]:
    """Those of all modules; each of a module's routed experts is one, in their order."""
    routed: set[str] = set()
    for name, module in uncompiled(model).named_modules():
        if name and name.rpartition(".")[0] in routed:
            continue
        if experts := experts_of(module):
            routed.add(name)
            each = {f"{name}.{n}".lstrip("."): module._modules.get(str(n), expert) for n, expert in enumerate(experts)}
        else:
            each = {name: module}
        yield from (found for place, one in each.items() if (found := _describe(place, one, fires)))


def check_model(model) -> None:
    """InputError for anything but a module."""
    if not isinstance(model, nn.Module):
        hint = f"; accepted: a model, such as tl.load({model!r:.200})" if isinstance(model, str) else ""
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}{hint}")


def feed_forwards(model: nn.Module, *, only: Only | None = None) -> list[FeedForward]:
    """Every ReLU feed-forward layer of the model, dense or already sparse, in the order of its modules.

    Found by the names of their parts (twell_lab.layers.families), which do not say what is computed between them:
    `sparsify` and `SparseFFN` ask that of every dense layer, this function of none. only: layers for which only(name,
    module) is true. Raises InputError if there is none, naming the activations that were found instead."""
    check_model(model)
    found = [*_layers(model)]
    if not found:
        raise InputError(f"no ReLU feed-forward layer in {type(model).__name__}: {seen(model)}; {accepted()}")
    chosen = [f for f in found if selected(only, f.name, f.module)]
    if not chosen:
        raise InputError(
            f"`only` leaves none of the {len(found)} feed-forward layers of {type(model).__name__}, the first of which "
            f"is {found[0].name!r}; accepted: one that is true for some"
        )
    return chosen


def seen(model: nn.Module) -> str:
    """What a model without a ReLU feed-forward layer has instead, and what to do about it."""
    own = {kind_of(family.acts(m)) for m in model.modules() if (family := family_of(m))}
    kinds = own | {kind_of(each.acts) for m in model.modules() for each in experts_of(m)[:1]}
    if not kinds:
        for name, module in uncompiled(model).named_modules():
            family = named_parts(module)
            for seat, part in family.owners(module).items() if family else ():
                if not is_projection(part):
                    kind = f"{type(part).__module__}.{type(part).__qualname__}"
                    return f"{title(name, module)} has the parts of one, but {seat} is a {kind}: quantised or adapted"
        return "none of its modules has the parts of a known one"
    if any(cut_of(module) for module in model.modules()):
        return (
            f"its feed-forward layers use {', '.join(sorted(kinds))}, have thresholds on their inputs, and stay dense: "
            "their projections are not a module of their own; thresholds on what the activation gives, "
            "twell_lab.thresholds(..., method='cats'), are accepted"
        )
    smooth = "" if any("relu" in kind.lower() for kind in kinds) else ", hardly ever exactly zero (density about 100%)"
    lossy = (
        "; twell_lab.thresholds takes the model as it is and sets small values to zero, which costs loss" if own else ""
    )
    return (
        f"its feed-forward layers use {', '.join(sorted(kinds))}{smooth}; twell_lab.relufy puts a ReLU in the place of "
        f"SiLU, GELU and the like, after which the model has to be trained further{lossy}"
    )


def kind_of(activation) -> str:
    """What to call an activation, a module or a function."""
    return getattr(activation, "__name__", type(activation).__name__)


def firing_layers(model: nn.Module, *, only: Only | None = None) -> list[FeedForward]:
    """Every feed-forward layer whose pattern comes from a ReLU or a squared ReLU, in the order of the modules.

    Like feed_forwards, which leaves out the gated squared ones, since no sparse path computes them. Raises InputError
    if there is neither. only: as there.
    """
    check_model(model)

    def fires(family: Family, activation) -> bool:
        return computes(family, activation) or is_squared(activation)

    found = [layer for layer in _layers(model, fires) if selected(only, layer.name, layer.module)]
    return found or feed_forwards(model, only=only)  # which says what it found instead

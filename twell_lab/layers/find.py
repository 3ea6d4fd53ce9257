"""Which modules of a model are feed-forward layers, by where their parts are (layers.families), and why one that looks
like it stays dense. Each is asked what it computes before it is swapped (layers.probe)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from ..core import InputError
from ..formats.twell import VALUE_DTYPES
from .activations import computes, is_relu, is_squared, is_threshold, kernel_activation, kernel_inputs, kind_of
from .experts import Expert, Routed, experts_of
from .families import accepted
from .lossy import HIDDEN, INPUT, Cut, ThresholdedInput, cut_of
from .parts import HOOKS, FeedForward, class_of, is_projection, named_family, owner_of, part_at, parts_of, uncompiled
from .probe import difference, raise_all, title, whole_of, wrong_ones

Only = Callable[[str, nn.Module], bool]


class StandIn:
    """A module that took the place of a feed-forward layer, and describes that itself: feed_forward(name)."""


def layer_of(name: str, module: nn.Module, fires: Callable[[object, bool], bool] = computes) -> FeedForward | None:
    """Return the module as a feed-forward layer, if it has the parts of one and fires(activation, gated) is true."""
    if isinstance(module, StandIn):
        return module.feed_forward(name)
    if (parts := parts_of(module)) is None:
        return None
    cut, acts = _cut_in(parts), parts.acts
    if not cut and not fires(acts, parts.gate is not None):
        return None
    squared = parts.gate is None and is_squared(acts)
    unusual = is_threshold(acts) or cut and not squared and not is_relu(acts)
    gate = parts.up if squared else parts.gate
    return parts._replace(name=name, gate=gate, acts=acts if unusual else None, cut=cut)


def _cut_in(parts: FeedForward) -> Cut | None:
    return None if parts.family.inside else cut_of(parts.module)  # a block calls its projections, with their hooks


def cut_places(parts: FeedForward) -> dict[str, list[nn.Module]]:
    """Return the modules that store a layer's projections, by the place of what enters them."""
    down = owner_of(parts.down)
    return {INPUT: [owner for owner in parts.owners if owner is not down], HIDDEN: [down]}


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by name, routed experts in the place of the module that holds them."""
    routed: set[str] = set()
    for name, module in uncompiled(model).named_modules():
        if name and name.rpartition(".")[0] in routed:
            continue
        if experts := experts_of(module):
            routed.add(name)
            for number, expert in enumerate(experts):
                yield f"{name}.{number}".lstrip("."), module._modules.get(str(number)) or expert
        else:
            yield name, module


def feed_forwards(model: nn.Module, *, only: Only | None = None) -> list[FeedForward]:
    """Return every ReLU feed-forward layer of the model, dense or already sparse, by the names of their parts: what is
    computed between them is not asked. only: layers for which only(name, module) is true. InputError if there is none,
    naming what is there instead."""
    return _all_of(model, only, computes)


def firing_layers(model: nn.Module, *, only: Only | None = None) -> list[FeedForward]:
    """Return what `feed_forwards` does, and gated layers of a squared ReLU, which no sparse path computes."""
    return _all_of(model, only, lambda acts, gated: computes(acts, gated) or is_squared(acts))


def _all_of(model: nn.Module, only: Only | None, fires: Callable[[object, bool], bool]) -> list[FeedForward]:
    check_model(model)
    layers = [layer for place in candidates(model) if (layer := layer_of(*place, fires))]
    if not layers:
        raise InputError(f"no ReLU feed-forward layer in {type(model).__name__}: {other_layers(model)}; {accepted()}")
    chosen = [layer for layer in layers if selected(only, layer.name, layer.module)]
    if not chosen:
        raise InputError(f"`only` leaves none of the {len(layers)} feed-forward layers; one or more is accepted")
    return chosen


def survey(model: nn.Module, *, only: Only | None = None) -> tuple[list[FeedForward], dict[str, str]]:
    """Return the layers that can be sparse, swapped ones among them, and by name why each other module with the parts
    of one stays dense; of a module of routed experts that is said once."""
    layers: list[FeedForward] = []
    reasons: dict[str, str] = {}
    asked: dict[nn.Module, tuple[str | None, bool]] = {}
    for name, module in candidates(model):
        swapped = isinstance(module, StandIn)
        family = None if swapped else named_family(module)
        if not (family or swapped or isinstance(module, Expert)) or not selected(only, name, module):
            continue
        place, whole = whole_of(name, module)
        if whole not in asked:
            alone = not name and module is not model or name.rpartition(".")[2] == "_orig_mod"
            if family and not family.inside and alone:
                asked[whole] = "is compiled by itself, and would go on as it is; accepted: swap first", False
            else:
                asked[whole] = (None, False) if swapped else examine(module)
        reason, both = asked[whole]
        if reason is not None:
            reasons[place] = reason
        elif (layer := layer_of(name, module)) is not None:
            layers.append(layer._replace(both=layer.both or both))
    return layers, reasons


def sound(layers: list[FeedForward]) -> list[FeedForward]:
    """Return those of these layers that compute what their parts say (probe). InputError where none does."""
    wrong = wrong_ones((layer.name, layer.module) for layer in layers if not isinstance(layer.module, StandIn))
    chosen = [layer for layer in layers if whole_of("", layer.module)[1] not in wrong]
    if not chosen:
        raise_all([*wrong.values()])
    return chosen


def only_dense(found: FeedForward) -> str:
    """Return why no kernel computes a layer of these parts: "" where one does."""
    if kernel_activation(found) or kernel_inputs(found):
        return ""
    acts = found.acts or nn.functional.relu
    return f"its activation ({kind_of(getattr(acts, 'activation', acts))} with a threshold) has no other path"


def examine(module: nn.Module) -> tuple[str | None, bool]:
    """Return why a module stays dense, None if it can be swapped; and whether up goes through its ReLU as well
    (Bamboo's and TurboSparse's dReLU)."""
    if (reason := _unreadable(module)) is not None:
        return reason, False
    parts, whole = parts_of(module), whole_of("", module)[1]
    reason = difference(whole)
    may = reason and whole is module and parts.gate is not None and is_relu(parts.acts)
    return (None, True) if may and difference(module, True) is None else (reason, False)


def _unreadable(module: nn.Module) -> str | None:
    """Return what can be said of a module without running it."""
    parts, family = parts_of(module), named_family(module)
    for place in family.projections if family else ():
        part = part_at(module, place)
        if not is_projection(part) or part._parameters.get("weight") is None:
            return (
                f"{place} is a {class_of(part)}; accepted: a plain torch.nn.Linear, neither quantised nor parametrized "
                "nor adapted (merge adapters first)"
            )
        if (reason := _called(part, () if family.inside else ThresholdedInput)) is not None:
            return f"{place} {reason}"
    if parts is None:
        return f"is no feed-forward layer known here; {accepted()}"
    if not _cut_in(parts) and not computes(parts.acts, parts.gate is not None):
        return (
            f"uses {kind_of(parts.acts)}; a ReLU is accepted, in plain layers also its square (twell_lab.relufy puts "
            "one there, and the model has to be trained further; twell_lab.thresholds sets small values to zero)"
        )
    tensors = [p for owner in parts.owners for p in owner._parameters.values() if p is not None]
    kinds = sorted({f"{t.dtype} on {t.device} ({type(t).__name__})" for t in tensors})
    if {type(t) for t in tensors} != {nn.Parameter} or len(kinds) > 1 or tensors[0].dtype not in VALUE_DTYPES:
        return (
            f"has weights of {', '.join(kinds)}; accepted: plain parameters, not sharded, all of bfloat16, float16 or "
            "float32 and on one device"
        )
    up, gate, down = (tuple(part.weight.shape) for part in (parts.up, parts.gate or parts.up, parts.down))
    if gate != up or down != up[::-1]:
        return f"has weights of shapes {up}, {gate} and {down}; accepted: up and gate [d_ff, d_model], down turned"
    if isinstance(module, Expert):
        return None if isinstance(vars(module.of).get("forward"), Routed) else _called(module.of, object)
    if parts.family.inside and up[0] == up[1]:
        return "is as wide inside as outside, so that what its parts hand on could not be told apart"
    for place in _above(parts.family.places) | {parts.family.activation} if parts.family.inside else ():
        if isinstance(part := part_at(module, place), nn.Module) and (reason := _called(part)) is not None:
            return f"{place} {reason}"
    if not parts.family.inside and type(module).get_extra_state is not nn.Module.get_extra_state:
        return "keeps extra state (get_extra_state) that would vanish from the state_dict; accepted: a layer without"
    return _moved(module)


def _called(part: nn.Module, allowed: type | tuple = ()) -> str | None:
    """Return why a module has to be called; None if nothing is on it but hooks that are methods of what is allowed."""
    on = [hook for kind in HOOKS for hook in vars(part)[kind].values()]
    if any(not isinstance(getattr(hook, "__self__", None), allowed) for hook in on):
        return "has hooks, so that it has to be called"
    own = vars(part).get("_old_forward" if "_hf_hook" in vars(part) else "forward")
    if own is not None and getattr(own, "__func__", None) is not type(part).forward:
        return "has had its forward replaced, so that it has to be called"
    return _moved(part)


def _moved(part: nn.Module) -> str | None:
    """Return what accelerate's hook on a module does besides moving its input to where its weights are (device_map)."""
    hook, forward = vars(part).get("_hf_hook"), vars(part).get("forward")
    moves = class_of(hook) == "accelerate.hooks.AlignDevicesHook"
    outermost = getattr(getattr(forward, "func", None), "__module__", "") == "accelerate.hooks"
    if hook is None or moves and outermost and not hook.no_grad and not hook.offload:
        return None
    return f"has a hook of accelerate's ({type(hook).__name__}) that does more than move its input, as offloading does"


def _above(places: tuple[str, ...]) -> set[str]:
    return {place.rpartition(".")[0] for place in places} - {""}


def marks_of(module: nn.Module) -> list[tuple]:
    """Return what `is_plain` looks at: each part of a dense module, what holds it, and how it is called."""
    family = named_family(module)
    marks: list[tuple] = []
    for place in (*family.places, *_above(family.places)) if family else ():
        above, _, name = place.rpartition(".")
        part, holder = part_at(module, place), part_at(module, above) if above else module
        if isinstance(part, nn.Module):
            own = vars(part)
            before, *others = [{}] * 4 if isinstance(part, StandIn) else [own[kind] for kind in HOOKS]
            marks.append((holder._modules, name, part, type(part), own.get("forward"), before, len(before), *others))
    return marks


def is_plain(layer) -> bool:
    """Return whether the parts of a SparseFFN are what they were when it was made (`layer.marks`): the same modules of
    the same classes, without a new hook or forward. Takes about a microsecond."""
    for holder, name, part, kind, forward, before, many, after, backward, before_backward in layer.marks:
        if holder.get(name) is not part or type(part) is not kind or part.__dict__.get("forward") is not forward:
            return False
        if after or backward or before_backward or len(before) != many:
            return False
    return True


def check_model(model) -> None:
    """Raise InputError for anything but a module."""
    if not isinstance(model, nn.Module):
        hint = f"; accepted: a model, such as tl.load({model!r:.200})" if isinstance(model, str) else ""
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}{hint}")


def selected(only: Only | None, name: str, module: nn.Module) -> bool:
    """Return whether the filter takes the layer; InputError for one that cannot be called."""
    if only is not None and not callable(only):
        raise InputError(
            f"only is {only!r:.80}; a function of a layer's name and module is accepted, or None for all layers"
        )
    return only is None or bool(only(name, module))


def replaced(model: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Put new modules in every place of the old ones, of which the model itself may be one. Returns the model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() skips a child's second place
            if child in made:
                setattr(parent, name, made[child])
    return made.get(model, model)


def other_layers(model: nn.Module) -> str:
    """Return what a model without a ReLU feed-forward layer has instead, and what to do about it."""
    for name, module in candidates(model):
        if isinstance(module, Expert) or named_family(module) is not None:
            return f"{title(name, module)} {_unreadable(module)}"
    return "none of its modules has the parts of a known one"

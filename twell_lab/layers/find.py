"""Which modules of a model are feed-forward layers, and why one that looks like it stays dense.

Recognised by where their parts are, which the table of twell_lab.layers.families says. That is a hint only: other
models scale, clamp, normalise or drop between the same parts. So each layer is asked what it computes before it is
swapped (twell_lab.layers.probe)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from ..core import InputError
from ..formats.twell import VALUE_DTYPES
from .activations import computes, is_relu, is_squared, is_usual, kernel_activation, kernel_inputs, kind_of
from .experts import Expert, Routed, experts_of
from .families import accepted
from .lossy import HIDDEN, INPUT, Cut, ThresholdedActivation, ThresholdedInput, cut_of
from .parts import HOOKS, Parts, Projection, is_projection, named_family, owner_of, part_at, parts_of, uncompiled

Only = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward layer found in a model. gate is None for plain layers; it is up where a plain layer's ReLU is
    squared, since relu(u) * u is that. acts: the activation, where it is none of these but one with a threshold, or
    where there is a `cut`. both: whether up is known to go through the ReLU as well, as a sparse layer's is. cut: the
    thresholds on its inputs and hidden values, if it has them (TEAL); then all that is kept of the latter fires."""

    name: str
    module: nn.Module
    gate: Projection | None
    up: Projection
    down: Projection
    acts: Callable[[Tensor], Tensor] | None = None
    both: bool = False
    cut: Cut | None = None

    @property
    def pattern(self) -> Projection:
        """The projection whose positive outputs are the neurons that fire; with `acts`, those that it keeps."""
        return self.up if self.gate is None else self.gate


class StandIn(ABC):
    """A module that took the place of a feed-forward layer, and describes that layer itself."""

    @abstractmethod
    def feed_forward(self, name: str) -> FeedForward:
        """Return the layer; name: where the module was found."""


def layer_of(name: str, module: nn.Module, fires: Callable[[object, bool], bool] = computes) -> FeedForward | None:
    """The module as a feed-forward layer, if it has the parts of one and fires(activation, gated) is true."""
    if isinstance(module, StandIn):
        return module.feed_forward(name)
    parts = parts_of(module)
    if parts is None:
        return None
    cut, acts = cut_in(parts, module), parts.acts
    if not cut and not fires(acts, parts.gate is not None):
        return None
    gate = parts.up if parts.gate is None and is_squared(acts) else parts.gate
    acts = None if is_usual(acts, parts.gate is not None, cut) else acts
    return FeedForward(name, module, gate, parts.up, parts.down, acts, cut=cut)


def cut_in(parts: Parts, module: nn.Module) -> Cut | None:
    """The thresholds on the inputs of a layer, where a sparse layer can stand in its place: inside a block, as in OPT,
    the projections stay with their hooks."""
    return None if parts.family.inside else cut_of(module)


def cut_places(parts: Parts) -> dict[str, list[nn.Module]]:
    """The modules that store a layer's projections, by the place of what enters them."""
    down = owner_of(parts.down)
    return {INPUT: [owner for owner in parts.owners if owner is not down], HIDDEN: [down]}


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, by name, and each of a module's routed experts in the place of that, in their order."""
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
    """Every ReLU feed-forward layer of the model, dense or already sparse, in the order of its modules.

    Found by the names of their parts (twell_lab.layers.families), which do not say what is computed between them:
    `sparsify` and `SparseFFN` ask that of every dense layer, this function of none. only: layers for which only(name,
    module) is true. Raises InputError if there is none, naming the activations that were found instead."""
    return _chosen(model, only, computes)


def firing_layers(model: nn.Module, *, only: Only | None = None) -> list[FeedForward]:
    """Every feed-forward layer whose pattern comes from a ReLU or a squared ReLU, in the order of the modules.

    Like feed_forwards, which leaves out the gated squared ones, since no sparse path computes them. Raises InputError
    if there is neither. only: as there."""
    return _chosen(model, only, lambda acts, gated: computes(acts, gated) or is_squared(acts))


def _chosen(model: nn.Module, only: Only | None, fires: Callable[[object, bool], bool]) -> list[FeedForward]:
    check_model(model)
    layers = [layer for place in candidates(model) if (layer := layer_of(*place, fires))]
    if not layers:
        raise InputError(f"no ReLU feed-forward layer in {type(model).__name__}: {other_layers(model)}; {accepted()}")
    chosen = [layer for layer in layers if selected(only, layer.name, layer.module)]
    if not chosen:
        raise InputError(f"`only` leaves none of the {len(layers)} feed-forward layers; one or more is accepted")
    return chosen


def survey(model: nn.Module, *, only: Only | None = None) -> tuple[list[FeedForward], dict[str, str]]:
    """The layers that can be sparse, swapped ones among them and `both` as it is; and by name why each other module
    with the parts of one stays dense. Of a module of routed experts that is said once."""
    layers: list[FeedForward] = []
    reasons: dict[str, str] = {}
    of_experts: dict[str, tuple[str | None, bool]] = {}
    for name, module in candidates(model):
        if not selected(only, name, module):
            continue
        place = name
        if isinstance(module, Expert):
            place = name.rpartition(".")[0]
            reason, both = of_experts.get(place) or of_experts.setdefault(place, examine(module))
        elif isinstance(module, StandIn):
            reason, both = None, False
        elif (family := named_family(module)) is None:
            continue
        elif not family.inside and (not name and module is not model or name.rpartition(".")[2] == "_orig_mod"):
            reason, both = "is compiled by itself, and would go on as it is; accepted: swap first, compile then", False
        else:
            reason, both = examine(module)
        if reason is not None:
            reasons[place] = reason
        elif (layer := layer_of(name, module)) is not None:
            layers.append(FeedForward(**{**vars(layer), "both": True}) if both else layer)
    return layers, reasons


def sound(layers: list[FeedForward]) -> list[FeedForward]:
    """Those of these layers that compute what their parts say (probe.difference). InputError where none does."""
    from .probe import difference, raise_all, title, whole_of

    modules = dict(whole_of(layer.name, layer.module) for layer in layers if not isinstance(layer.module, StandIn))
    reasons = {name: difference(module) for name, module in modules.items()}
    chosen = [layer for layer in layers if reasons.get(whole_of(layer.name, layer.module)[0]) is None]
    if not chosen:
        raise_all([f"{title(name, modules[name])} {reason}" for name, reason in reasons.items()])
    return chosen


# ---- why a layer stays dense ----


def only_dense(found: FeedForward) -> str:
    """Return why no kernel computes a layer of these parts: "" where one does."""
    acts, gated = found.acts or nn.functional.relu, found.gate is not None
    if kernel_activation(acts, gated, found.both, found.up.weight, found.cut) is not None:
        return ""
    if kernel_inputs(acts, found.both or found.gate is found.up, found.cut) is not None:
        return ""
    lossy = isinstance(acts, ThresholdedActivation)
    kind = f"{kind_of(acts.activation)} with a threshold" if lossy else kind_of(acts)
    return f"its activation ({kind}) has no other path"


def obstacle(module: nn.Module) -> str | None:
    """Return why a module stays dense: it has not the parts of a feed-forward layer that a sparse one can read,
    something on them that it would not call, or computes something else than its parts say. None if it can be
    swapped."""
    return examine(module)[0]


def examine(module: nn.Module) -> tuple[str | None, bool]:
    """The `obstacle` of a module; and whether up goes through its ReLU as well (Bamboo's and TurboSparse's dReLU)."""
    from .probe import difference

    reason = _unreadable(module)
    if reason is not None:
        return reason, False
    parts, asked = parts_of(module), module.of if isinstance(module, Expert) else module
    reason = difference(asked)
    if reason is None or asked is not module or parts is None or parts.gate is None or not is_relu(parts.acts):
        return reason, False
    both = difference(module, True) is None
    return None if both else reason, both


def _unreadable(module: nn.Module) -> str | None:
    """Return what can be said of a module without running it."""
    parts, family = parts_of(module), named_family(module)
    routed = isinstance(module, Expert)
    if not routed:
        if family is None:
            return f"is no feed-forward layer known here; {accepted()}"
        for place in family.projections:
            if (reason := unreadable_part(part_at(module, place))) is not None:
                return f"{place} {reason}"
    if parts is None:
        return f"holds gate and up in an odd number of rows; {accepted()}"
    if not cut_in(parts, module) and not computes(parts.acts, parts.gate is not None):
        return f"uses {kind_of(parts.acts)}; a ReLU is accepted, in plain layers also its square"
    tensors = [p for owner in parts.owners for p in owner.parameters(recurse=False)]
    if any(hasattr(p, "device_mesh") for p in tensors):  # those of experts, which are no module of their own
        return "has sharded weights (DTensor); accepted: a model that is swapped first and sharded then"
    devices = {str(p.device) for p in tensors}
    if len(devices) > 1:
        return f"has its projections on several devices ({', '.join(sorted(devices))}); accepted: all of them on one"
    if len(dtypes := {str(p.dtype) for p in tensors}) > 1:
        return f"has weights of several dtypes ({', '.join(sorted(dtypes))}); accepted: all of them of one"
    if (dtype := parts.up.weight.dtype) not in VALUE_DTYPES:
        return f"has weights of {dtype}; bfloat16, float16 and float32 are accepted"
    shapes = [tuple(part.weight.shape) for part in (parts.up, parts.gate or parts.up, parts.down)]
    if shapes[1] != shapes[0] or shapes[2] != shapes[0][::-1]:
        return (
            f"has weights of other shapes ({', '.join(str(list(shape)) for shape in shapes)}); accepted: up (and gate) "
            "[d_ff, d_model], down [d_model, d_ff]"
        )
    if routed:
        return None if isinstance(vars(module.of).get("forward"), Routed) else _forward_of(module.of)
    if parts.family.inside:
        if shapes[0][0] == shapes[0][1]:
            return "is as wide inside as outside, so that what its parts hand on could not be told apart"
        for place in _above(parts.family.places) | {parts.family.activation}:
            if isinstance(part := part_at(module, place), nn.Module) and (reason := _on(part)) is not None:
                return f"{place} {reason}"
    elif type(module).get_extra_state is not nn.Module.get_extra_state:
        return "keeps extra state (get_extra_state) that would vanish from the state_dict; accepted: a layer without"
    return _beyond_moving(module)


def unreadable_part(part) -> str | None:
    """Return why a sparse layer cannot read the weights of a projection in the place of calling it; None if it can."""
    if any(each.__module__.partition(".")[0] == "peft" for each in type(part).__mro__):
        return f"is an adapter of PEFT's ({type(part).__name__}); accepted: a merged model (model.merge_and_unload())"
    if not is_projection(part):
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        return f"is a {kind}; accepted: a plain torch.nn.Linear, neither quantised nor adapted"
    if "parametrizations" in part._modules:
        return "is parametrized; accepted: torch.nn.utils.parametrize.remove_parametrizations first"
    for name, t in part._parameters.items():
        if hasattr(t, "device_mesh"):
            return (
                f"has a sharded {name} (DTensor); accepted: a model that is swapped first and sharded then, or one "
                "loaded without tp_plan"
            )
        if t is not None and type(t) is not nn.Parameter:
            return f"has a {name} that is a {type(t).__name__}; accepted: a plain torch.nn.Parameter"
    if (reason := _on(part) or _forward_of(part)) is None and part._parameters.get("weight") is None:
        return "has no weight of its own; accepted: a model that is swapped first and sharded then"
    return reason


def _on(part: nn.Module) -> str | None:
    """The first hook on a module, but for those that zero its small inputs."""
    for kind in HOOKS:
        for hook in vars(part)[kind].values():
            if not isinstance(getattr(hook, "__self__", None), ThresholdedInput):
                hook = getattr(hook, "hook", hook) if type(hook).__name__ == "_WrappedHook" else hook
                what, name = kind.strip("_")[:-1].replace("_", " "), getattr(hook, "__qualname__", type(hook).__name__)
                return f"has a {what} ({name}), so the module is called"
    return None


def _forward_of(part: nn.Module) -> str | None:
    """Return why the forward of a projection is another than its class's; one of accelerate's that moves its input is
    none."""
    if (reason := _beyond_moving(part)) is not None:
        return reason
    own = vars(part).get("_old_forward" if "_hf_hook" in vars(part) else "forward")
    usual = own is None or getattr(own, "__func__", None) is type(part).forward and own.__self__ is part
    return None if usual else "has had its forward replaced on the instance, so the module is called"


def _beyond_moving(part: nn.Module) -> str | None:
    """Return what accelerate's hook on a module does besides moving its input to where its weights are (device_map)."""
    hook, forward = vars(part).get("_hf_hook"), vars(part).get("forward")
    if hook is None:
        return None
    kind = f"{type(hook).__module__}.{type(hook).__name__}"
    outermost = type(forward) is partial and forward.func.__module__ == "accelerate.hooks"
    if kind != "accelerate.hooks.AlignDevicesHook" or hook.no_grad or not outermost:
        return f"has a hook of accelerate's ({type(hook).__name__}) that may do more than a device_map's"
    if hook.offload:
        return "has its weights offloaded; accepted: a device_map of devices that hold their weights"
    return None


# ---- whether a layer is still what was swapped ----


def _above(places: tuple[str, ...]) -> set[str]:
    """The places of the modules that hold these, but for the layer itself."""
    return {place.rpartition(".")[0] for place in places} - {""}


def marks_of(module: nn.Module) -> list[tuple]:
    """Return what `is_plain` looks at: each part of a dense module and what holds it, with all that says how it is
    called."""
    family = named_family(module)
    marks: list[tuple] = []
    for place in (*family.places, *_above(family.places)) if family else ():
        above, _, name = place.rpartition(".")
        part, holder = part_at(module, place), part_at(module, above) if above else module
        if not isinstance(part, nn.Module):
            continue
        own = vars(part)
        before, *others = (own[kind] for kind in HOOKS)
        if isinstance(part, StandIn):  # a SparseFFN in the activation's place calls its hooks itself
            before, others = {}, [{}, {}, {}]
        marks.append((holder._modules, name, part, type(part), own.get("forward"), before, len(before), *others))
    return marks


def is_plain(layer) -> bool:
    """Return whether the parts of a SparseFFN are what they were when it was made (`layer.marks`): the same modules of
    the same classes, with no hook and no forward that was not there. Where not, they have to be called. Takes about a
    microsecond."""
    for holder, name, part, kind, forward, before, many, after, backward, before_backward in layer.marks:
        if (
            holder.get(name) is not part
            or type(part) is not kind
            or part.__dict__.get("forward") is not forward
            or after
            or backward
            or before_backward
            or len(before) != many
        ):
            return False
    return True


# ---- models, and what to say of them ----


def check_model(model) -> None:
    """InputError for anything but a module."""
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
    from .probe import title

    own = {kind_of(parts.acts) for m in model.modules() if (parts := parts_of(m))}
    kinds = own | {kind_of(expert.own_parts().acts) for m in model.modules() for expert in experts_of(m)[:1]}
    if not kinds:
        for name, module in uncompiled(model).named_modules():
            if named_family(module) is not None:
                return f"{title(name, module)} has the parts of one, but {_unreadable(module)}"
        return "none of its modules has the parts of a known one"
    uses = f"its feed-forward layers use {', '.join(sorted(kinds))}"
    if any(cut_of(module) for module in model.modules()):
        return f"{uses}, have thresholds on their inputs inside a block, and stay dense; method='cats' is accepted"
    smooth = "" if any("relu" in kind.lower() for kind in kinds) else ", hardly ever exactly zero (density about 100%)"
    lossy = "; twell_lab.thresholds sets small values of the model as it is to zero, which costs loss" if own else ""
    return (
        f"{uses}{smooth}; twell_lab.relufy puts a ReLU in the place of SiLU, GELU and the like, after which the model "
        f"has to be trained further{lossy}"
    )

"""What users and other libraries put on a feed-forward layer: hooks, adapters, forwards of their own. A sparse layer
calls none of its parts, so nothing that is on a part would act: it is refused before a swap, and noticed after one.

Not noticed: hooks for every module (torch.nn.modules.module.register_module_forward_hook and the like), which see a
SparseFFN but not its projections; and attributes that are changed after the swap on the dense module, which is set
aside, or on its activation."""

from __future__ import annotations

from torch import nn

from ..core.errors import InputError
from .anatomy import HOOKS, Only, StandIn, computes, family_of, named_parts, raise_all, selected, title
from .experts import Routed, experts_of
from .parts import HandOn, is_projection, part_at

_STATE_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def check_parts(sparse: nn.Module) -> None:
    """InputError where something was put on a projection of a SparseFFN, or in a part's place, that it would not call.

    Asked by every forward: a few looks into dictionaries, about a microsecond.
    """
    for name, block, leaf, own in sparse._seats:
        part = (sparse if block is None else block)._modules[leaf]
        held = part.__dict__
        hooked = (
            held["_forward_hooks"]
            or held["_forward_pre_hooks"]
            or held["_backward_hooks"]
            or held["_backward_pre_hooks"]
        )
        if hooked or (type(part) is not nn.Linear or "forward" in held) and not is_projection(part):
            reason = on_part(part) or f"is a {type(part).__name__}; accepted: a plain torch.nn.Linear"
            raise InputError(
                f"{name} of a SparseFFN {reason}. Put there after the swap, it would not be called: twell_lab.densify "
                "first"
            )
        if own is not None and own is not part:
            raise InputError(f"{name} of a SparseFFN was replaced; accepted: twell_lab.densify first")
    if sparse.registered and (sparse._seat in sparse._modules or sparse._seat in sparse.__dict__):
        raise InputError(
            f"{sparse._seat} was set on a SparseFFN, which computes a ReLU; accepted: twell_lab.densify first"
        )


def obstacle(module: nn.Module) -> str | None:
    """Why a module with the parts of a feed-forward layer cannot be swapped, even if its own code is the formula: a
    library or the user put something on it or on a part of it that a SparseFFN would never call. None if there is
    nothing."""
    family = named_parts(module)
    if family is None:
        return None
    parts = {seat: part for seat in family.seats if isinstance(part := part_at(module, seat), nn.Module)}
    if not family.inside:  # a block stays, with all that is on it
        carried = family.carried(module) if family_of(module) else set()
        within = {name: each for name, each in module.named_modules() if id(each) not in carried}
        parts = {"": module, **parts, **within}
    for seat, part in parts.items():
        if reason := on_part(part, whole=seat in ("", family.activation)):
            return f"{seat} {reason}".strip()
    return None


def on_part(part: nn.Module, whole: bool = False) -> str | None:
    """What is on this module that would be lost; whole: the module itself goes, with what it does when it is saved and
    loaded."""
    own = vars(part)
    if "_hf_hook" in own:
        return (
            f"has a hook of accelerate's ({type(own['_hf_hook']).__name__}), as device_map and dispatch_model put "
            "there; accepted: a model loaded without device_map, or accelerate.hooks.remove_hook_from_submodules("
            "model) first"
        )
    if any(each.__module__.partition(".")[0] == "peft" for each in type(part).__mro__):
        return f"is an adapter of PEFT's ({type(part).__name__}); accepted: a merged model (model.merge_and_unload())"
    if "_is_hooked" in own or "_hf_tp_plan" in own:
        return "is split over processes by transformers' tensor parallelism; accepted: a model loaded without tp_plan"
    if any(hasattr(each, "device_mesh") for each in part._parameters.values()):
        return "has sharded weights (DTensor); accepted: a model that is swapped first and sharded then"
    for kind in (*HOOKS, *(_STATE_HOOKS if whole else ())):
        for hook in own.get(kind, {}).values():
            return _hooked(kind.strip("_").removesuffix("s").replace("_", " "), hook)
    if not whole and "forward" in own and not isinstance(own["forward"], HandOn):
        return (
            "has had its forward replaced on the instance; accepted: projections that are each a plain torch.nn.Linear"
        )
    if whole and type(part).get_extra_state is not nn.Module.get_extra_state:
        return "keeps extra state (get_extra_state) that would vanish from the state_dict; accepted: a layer without"
    return None


def _hooked(kind: str, hook) -> str:
    """What to say of this hook and what to do about it."""
    hook = getattr(hook, "hook", hook) if type(hook).__name__ == "_WrappedHook" else hook
    named = getattr(hook, "__qualname__", type(hook).__name__)
    where = f"{getattr(hook, '__module__', '')}.{named}"
    if where.startswith(("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")):
        function = "weight_norm" if "weight_norm" in where else "spectral_norm"
        return (
            f"recomputes its weight in a {kind} ({named}); accepted: torch.nn.utils.parametrizations.{function}, or "
            f"torch.nn.utils.remove_{function} first"
        )
    if where.startswith("torch.nn.utils.prune"):
        return f"recomputes its weight in a {kind} ({named}); accepted: torch.nn.utils.prune.remove first"
    if "fsdp" in where.lower():
        return f"has a {kind} of FSDP's ({named}); accepted: a model that is swapped first and sharded then"
    return (
        f"has a {kind} ({named}) that a sparse layer would never call; accepted: remove it, swap, and put it on the "
        "SparseFFN"
    )


def refuse_obstacles(model: nn.Module, only: Only | None) -> None:
    """InputError naming every layer that has the parts of a ReLU feed-forward layer, and an `obstacle`."""
    reasons = []
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if experts := experts_of(module):
            if computes(experts[0].family, experts[0].acts) and any(
                selected(only, f"{name}.{n}", each) for n, each in enumerate(experts)
            ):
                reason = on_part(module) if not isinstance(vars(module).get("forward"), Routed) else None
                if reason is None and isinstance(experts[0].acts, nn.Module):
                    reason = on_part(experts[0].acts, whole=True)
                if reason is not None:
                    reasons.append(f"{title(name, module)}: {reason}")
            continue
        family = None if isinstance(module, StandIn) else named_parts(module)
        if family is None or not computes(family, family.acts(module)) or not selected(only, name, module):
            continue
        reason = obstacle(module)
        if not family.inside and name.rpartition(".")[2] == "_orig_mod":
            reason = (
                "is compiled by itself, and torch.compile would go on with the dense layer; accepted: swap first, "
                "compile then"
            )
        if reason is not None:
            reasons.append(f"{title(name, module)}: {reason}")
    raise_all(reasons)


def hand_over(sparse: nn.Module, dense: nn.Module) -> None:
    """Set on the dense module what was set on the SparseFFN since it was made."""
    for kind, table in vars(sparse).items():
        if kind.startswith(("_forward_", "_backward_")) and table:
            # The same table, if the dense module has none: the handles that take hooks off again know it.
            dense.__dict__[kind] = table if not vars(dense).get(kind) else type(table)({**vars(dense)[kind], **table})
    if sparse._is_full_backward_hook is not None:
        dense._is_full_backward_hook = sparse._is_full_backward_hook
    dense._non_persistent_buffers_set |= sparse._non_persistent_buffers_set - sparse._born
    for name in sparse._names if sparse.registered else ():
        dense._modules[name] = sparse._modules[name]  # another one, should it have been replaced
    tables = [(getattr(sparse, kind), getattr(dense, kind)) for kind in ("_parameters", "_buffers", "_modules")]
    for of, to in [(vars(sparse), vars(dense)), *tables]:
        for name, each in of.items():
            if name not in sparse._born and not name.startswith("_") and not hasattr(type(sparse), name):
                to[name] = each

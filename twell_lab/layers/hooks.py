"""What users and other libraries put on a feed-forward layer: hooks, adapters, forwards of their own. A sparse layer
calls none of its parts, so nothing that is on a part would act: it is refused before a swap, and noticed after one.

Not noticed: hooks for every module (torch.nn.modules.module.register_module_forward_hook and the like), which see a
SparseFFN but not its projections; attributes that are changed after the swap on the dense module, which is set aside,
or on its activation; and, inside a block such as OPT's, what an adapter that has gone again wrote to `weight.data`, as
PEFT's merging does (SparseFFN.refresh)."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from ..core import InputError
from .anatomy import HOOKS, Only, StandIn, computes, cut_in, family_of, named_parts, raise_all, selected, title
from .experts import Routed, experts_of
from .lossy import ThresholdedInput
from .parts import HandOn, dispatched, is_projection, own_forward, part_at, uncompiled
from .shards import BY_COLUMNS, BY_ROWS, split_of

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
        forward = held.get("forward")
        if hooked or type(part) is not nn.Linear or forward is not sparse._forwards.get(name):
            cuts = sparse.formula["cut"] is not None
            reason = on_part(part, cuts=cuts) if hooked else _uncalled(part, sparse.splits)
            if reason is not None:
                raise InputError(
                    f"{name} of a SparseFFN {reason}. Put there after the swap, it would not be called: "
                    "twell_lab.densify first"
                )
            if not torch.compiler.is_compiling():
                sparse._forwards[name] = forward
        if own is not None and own is not part:
            raise InputError(f"{name} of a SparseFFN was replaced; accepted: twell_lab.densify first")
    if sparse.registered and (sparse._seat in sparse._modules or sparse._seat in sparse.__dict__):
        raise InputError(
            f"{sparse._seat} was set on a SparseFFN, which computes a ReLU; accepted: twell_lab.densify first"
        )


def _uncalled(part: nn.Module, splits: bool) -> str | None:
    """What a projection of a SparseFFN is, or has, that a sparse layer does not call. splits: whether the layer is one
    that is split over processes."""
    if not is_projection(part):
        return on_part(part) or f"is a {type(part).__name__}; accepted: a plain torch.nn.Linear"
    if (split_of(part) is not None) is not splits:
        return f"is {'no longer' if splits else 'now'} split over processes"
    return on_part(part) if "_hf_hook" in vars(part) else None


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
        if reason := on_part(part, whole=seat in ("", family.activation), cuts=not family.inside):
            return f"{seat} {reason}".strip()
    owners = family.owners(module)
    splits = {seat: split_of(owner) for seat, owner in owners.items()}
    if any(splits.values()):
        wanted = {seat: BY_COLUMNS if seat == family.down else BY_ROWS for seat in owners}
        if family.inside or {seat: split and split.by for seat, split in splits.items()} != wanted:
            return (
                "is split over processes by transformers' tensor parallelism, and not each projection so that a "
                "process computes its own neurons; accepted: all of them, or a model loaded without tp_plan"
            )
    devices = {str(t.device) for part in owners.values() for t in part.parameters()}
    if len(devices) > 1:
        return f"has its projections on several devices ({', '.join(sorted(devices))}); accepted: all of them on one"
    return None


def on_part(part: nn.Module, whole: bool = False, cuts: bool = False) -> str | None:
    """What is on this module that would be lost; whole: the module itself goes, with what it does when it is saved and
    loaded. cuts: whether thresholds on its input are none of that."""
    own = vars(part)
    if "_hf_hook" in own and (reason := _beyond_moving(part, whole)) is not None:
        return reason
    if any(each.__module__.partition(".")[0] == "peft" for each in type(part).__mro__):
        return f"is an adapter of PEFT's ({type(part).__name__}); accepted: a merged model (model.merge_and_unload())"
    split = split_of(part)
    # Some releases of transformers mark every module of such a model, also those that they put nothing on.
    marked = "_is_hooked" in own and (own_forward(part) is not None or any(own.get(kind) for kind in HOOKS))
    if split is None and (marked or "_hf_tp_plan" in own):
        return (
            "is split over processes by transformers' tensor parallelism in a way that is not known here; accepted: "
            "'colwise' before the activation and 'rowwise' after it, of transformers 5.17 to 5.23, or a model loaded "
            "without tp_plan"
        )
    if split is None and any(hasattr(each, "device_mesh") for each in part._parameters.values()):
        return "has sharded weights (DTensor); accepted: a model that is swapped first and sharded then"
    for kind in (*HOOKS, *(_STATE_HOOKS if whole else ())):
        for hook in own.get(kind, {}).values():
            if cuts and isinstance(getattr(hook, "__self__", None), ThresholdedInput):
                continue
            return _hooked(kind.strip("_").removesuffix("s").replace("_", " "), hook)
    if not whole and split is None and not isinstance(own_forward(part), (type(None), HandOn)):
        return (
            "has had its forward replaced on the instance; accepted: projections that are each a plain torch.nn.Linear"
        )
    if whole and type(part).get_extra_state is not nn.Module.get_extra_state:
        return "keeps extra state (get_extra_state) that would vanish from the state_dict; accepted: a layer without"
    return None


def _beyond_moving(part: nn.Module, whole: bool) -> str | None:
    """What accelerate's hook on this module does besides moving its input to where its weights are, as a device_map
    over several devices has it."""
    hook = vars(part)["_hf_hook"]
    kind = type(hook)
    undo = "accelerate.hooks.remove_hook_from_submodules(model) first"
    if f"{kind.__module__}.{kind.__name__}" != "accelerate.hooks.AlignDevicesHook" or hook.no_grad:
        return (
            f"has a hook of accelerate's ({kind.__name__}) that may do more than a device_map's; accepted: "
            f"AlignDevicesHook without offloading, or {undo}"
        )
    if hook.offload:
        return (
            f"has its weights offloaded by accelerate's {kind.__name__}, and a SparseFFN reads them where they are; "
            "accepted: a device_map of devices that hold their weights, without 'cpu' beside GPUs and without 'disk'"
        )
    if not dispatched(part):
        return f"has a forward over a hook of accelerate's ({kind.__name__}); accepted: {undo}"
    if hook.io_same_device and not whole:
        return f"hands its result back to its input's device ({kind.__name__}); accepted: {undo}"
    return None


def move_inputs(sparse: nn.Module) -> None:
    """Have the inputs of a SparseFFN moved to its weights, where accelerate does so for the dense layer, or inside a
    block for its up projection."""
    source = sparse.source
    for part in (source if sparse.registered else None, *sparse._family.owners(source).values()):
        if part is not None and "_hf_hook" in vars(part):
            _carry_hook(part, sparse)
            return


def _carry_hook(part: nn.Module, to: nn.Module) -> None:
    """Have the inputs of a module moved as those of another are."""
    hook = vars(part)["_hf_hook"]
    if _beyond_moving(part, whole=True) is None:
        kept = {name: getattr(hook, name) for name in ("execution_device", "io_same_device", "skip_keys")}
        import_module("accelerate.hooks").add_hook_to_module(to, type(hook)(**kept))


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
    inner = uncompiled(model) if isinstance(model, nn.Module) else None
    for name, module in () if inner is None else inner.named_modules():
        if experts := experts_of(module):
            if computes(experts[0].family, experts[0].acts) and any(
                selected(only, f"{name}.{n}", each) for n, each in enumerate(experts)
            ):
                reason = on_part(module) if not isinstance(own_forward(module), Routed) else None
                if reason is None and isinstance(experts[0].acts, nn.Module):
                    reason = on_part(experts[0].acts, whole=True)
                if reason is not None:
                    reasons.append(f"{title(name, module)}: {reason}")
            continue
        family = None if isinstance(module, StandIn) else named_parts(module)
        if family is None or not selected(only, name, module):
            continue
        if not computes(family, family.acts(module)) and not cut_in(family, module):
            continue
        reason = obstacle(module)
        if not family.inside and (name.rpartition(".")[2] == "_orig_mod" or not name and module is not model):
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
    if sparse.registered and "_hf_hook" in vars(sparse) and "_hf_hook" not in vars(dense):
        _carry_hook(sparse, dense)
    elif sparse.registered and "_hf_hook" in vars(dense) and "_hf_hook" not in vars(sparse):
        import_module("accelerate.hooks").remove_hook_from_module(dense)
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

"""sparsify and densify: a model's ReLU feed-forward layers swapped for SparseFFNs in place, and back."""

from __future__ import annotations

from torch import nn

from ..analysis.auto import Shared, Watch
from ..analysis.plan import Plan, check_fits
from ..core.errors import InputError
from ..formats.twell import TILE, WORDS, check_geometry
from ..layers import hooks, probe
from ..layers.anatomy import IN_BLOCK, HandOn, Only, feed_forwards, layout_of
from ..layers.sparse_ffn import SparseFFN


def sparsify(
    model: nn.Module, plan: Plan | str | None = None, *, tile: int = TILE, words: int = WORDS, only: Only | None = None
) -> nn.Module:
    """Swap every ReLU feed-forward layer of the model for a SparseFFN, in place; returns the model.

    plan: what each layer is to do. None: pack what fires, always; layers that are sparse already stay as they are. A
    Plan (twell_lab.plan): its paths, for the layers of its names and shapes; those it leaves dense become SparseFFNs
    too, on the dense path and without extra memory (`Plan.dense_layers` names them). "auto": without a profile, each
    layer counts who fires in the first inputs it sees without gradients, 4,096 tokens or eight batches, and then
    decides by itself, timing the best candidates on the next input; that forward takes a second or so a layer. Not
    inside torch.compile or a CUDA graph: run a few batches before either. Layers that are sparse already follow the new
    plan. only: swap the layers for which only(name, module) is true; the others stay as they are, and need not fit.

    Parameters stay the same objects under the same names; `densify` takes it back. Raises InputError, with nothing
    changed, if the model has no ReLU feed-forward layer, for a plan of another model, and where a layer cannot be
    swapped: each layer is run on a few rows beside the formula first (probe.check), and looked over for hooks and
    adapters; the message names those that differ, by how much, and what to do. Hooks belong on the SparseFFNs
    afterwards, in the place of the layers. Each layer is asked once, on random rows, for its output and its gradients;
    probe.check says what that cannot show. What is changed later on a decoder layer, such as the p of a dropout between
    its parts, or on a dense module that was set aside, is not noticed."""
    if plan is not None and plan != "auto" and not isinstance(plan, Plan):
        raise InputError(f"plan is {plan!r:.80}; a Plan, 'auto' or None is accepted")
    check_geometry(tile, words)
    hooks.refuse_obstacles(model, only)
    layers = feed_forwards(model, only=only)
    if isinstance(plan, Plan):
        check_fits(layers, plan.layers, "plan")
    probe.check_all((found.name, found.module) for found in layers if not isinstance(found.module, SparseFFN))
    shared = Shared()
    for found in layers:
        source = found.module
        followed = plan.layer(found.name) if isinstance(plan, Plan) else None
        if isinstance(source, SparseFFN):
            sparse = source
            if plan is not None:
                sparse.follow(followed)
        elif layout_of(source) != IN_BLOCK:
            sparse = SparseFFN(source, plan=followed, tile=tile, words=words, _check=False)
            model = _replace(model, source, sparse)
        else:
            # OPT's decoder layer calls fc1, the activation and fc2 itself, so there is no module to swap: the
            # activation's seat does all the work and the projections on either side of it hand their input on.
            sparse = SparseFFN(source, plan=followed, tile=tile, words=words, _registered=False, _check=False)
            sparse._activation = [source.activation_fn]
            source.activation_fn = sparse
            source.fc1.forward = source.fc2.forward = HandOn(source, IN_BLOCK)
        if plan == "auto":
            sparse.watch(Watch(shared, found.name))
    return model


def densify(model: nn.Module) -> nn.Module:
    """Undo sparsify, in place; returns the model. A model without a SparseFFN is left as it is.

    What was set on a SparseFFN goes to the dense layer: its forward and backward hooks, whose handles go on to work,
    public attributes, parameters, buffers and modules, projections that replaced others among them. Inside OPT they go
    to the activation. Hooks on a state_dict do not."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(vars(module).get("forward"), HandOn):
            del module.forward
    for sparse in [m for m in model.modules() if isinstance(m, SparseFFN)]:
        (source,) = sparse._source
        if sparse._borrowed is None:
            hooks.hand_over(sparse, source)
            source.train(sparse.training)
            model = _replace(model, sparse, source)
        else:
            (source.activation_fn,) = sparse._activation
            if isinstance(source.activation_fn, nn.Module):
                hooks.hand_over(sparse, source.activation_fn)
                source.activation_fn.train(sparse.training)
    return model


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` in every seat of the model that holds `old`; the model itself may be that seat."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() skips a child's second seat
            if child is old:
                setattr(parent, name, new)
    return new if model is old else model

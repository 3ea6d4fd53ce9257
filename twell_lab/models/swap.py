"""sparsify and densify: a model's ReLU feed-forward layers swapped for SparseFFNs in place, and back."""

from __future__ import annotations

import os

import torch
from torch import nn

from ..analysis.plan import Plan
from ..core import InputError, TwellError
from ..formats.twell import TILE, VALUE_DTYPES, WORDS, check_geometry
from ..layers import hooks, probe
from ..layers.activations import kept, known
from ..layers.anatomy import FeedForward, Only, check_model, cut_places, family_of, feed_forwards, replaced
from ..layers.choice import DENSE, Choice
from ..layers.experts import Expert, Routed
from ..layers.layout import Holders
from ..layers.lossy import ThresholdedInput, put_on
from ..layers.parts import HandOn, own_forward, set_forward
from ..layers.paths import PATHS
from ..layers.sparse_ffn import FOR_CUT, ONLY_CUT, SparseFFN
from ..layers.weights import Weights
from ..ops import copies


def sparsify(
    model: nn.Module,
    plan: Plan | Choice | str | os.PathLike,
    *,
    tile: int = TILE,
    words: int = WORDS,
    only: Only | None = None,
) -> nn.Module:
    """Swap every ReLU feed-forward layer of the model for a SparseFFN that does as told, in place; returns the model.

    Args:
        model: any module in which `feed_forwards` finds layers.
        plan: a Plan (`twell_lab.plan`), or the name of a file that holds one, or of a folder that `twell-lab sparsify`
            wrote: its paths. Or the name of a path, or a Choice: this path for every layer and number of tokens, be it
            faster or not.
        tile, words: the TwELL geometry of layers that become sparse.
        only: swap the layers for which only(name, module) is true; the others stay as they are, and need not fit.

    Raises:
        InputError: with nothing changed, if the model has no ReLU feed-forward layer, for a plan of another model,
            device or dtype, for weights of another dtype than bfloat16, float16 and float32, for a word that is neither
            a path nor a file, for a path that does not take a layer's weights (on a device without it a DeviceError),
            and where layers cannot be swapped: the message names those that differ from the formula, by how much, and
            what to do.
        RecordError: for a file that holds no plan, or not all of one.
    """
    plan = _read(plan)
    check_geometry(tile, words)
    hooks.refuse_obstacles(model, only)
    layers = feed_forwards(model, only=only)
    if isinstance(plan, Plan):
        plan.check_model(layers)
    else:
        for found in layers:
            plan.check(found.up.weight.shape[0])
    _check_weights(plan, layers)
    dense = ((found.name, found.module) for found in layers if not isinstance(found.module, SparseFFN))
    both = probe.check_all(dense, both=True)
    alone = {found.name for found in layers if _alone(found, both)}
    how = {"tile": tile, "words": words, "_check": False, "_finite": False, "_turns": True, "_reorders": True}
    how["_holders"] = Holders(layers)
    for found in layers:
        source, followed = found.module, plan.layer(found.name) if isinstance(plan, Plan) else plan
        followed = DENSE if found.name in alone else followed
        if isinstance(source, SparseFFN):
            source.follow(followed)
            continue
        sparse = SparseFFN(source, plan=followed, _both=id(source) in both, **how)
        if isinstance(source, Expert):
            source.of.add_module(found.name.rpartition(".")[2], sparse)
            set_forward(source.of, Routed(source.of))
        elif sparse.registered:
            ThresholdedInput.unhook(source, family_of(source).owners(source).values())
            model = replaced(model, {source: sparse})
        else:
            # The block calls the up projection, the activation and the down projection itself, so there is no module to
            # swap: the activation's seat does all the work and the projections on either side of it hand their input
            # on.
            sparse.take_seat()
    return model


def _alone(found: FeedForward, both: set[int]) -> bool:
    """Whether the dense path is the only one that computes this layer. both: ids of modules with a ReLU on up, too."""
    module = found.module
    if isinstance(module, SparseFFN):
        return module.dense_alone
    acts, two = found.acts or torch.relu, id(module) in both
    squared = found.gate is found.up
    return (
        known(acts, found.gate is not None, two, cut=found.cut) is None
        and kept(acts, two or squared, found.cut) is None
    )


def _check_weights(plan: Plan | Choice, layers: list[FeedForward]) -> None:
    """Raise a TwellError where a path that a layer is told does not take its weights, and where those of a layer that
    is to be swapped are of a dtype that no path has, or not finite."""
    for found in layers:
        weights = Weights.of(found.gate, found.up, found.down)
        if not isinstance(found.module, SparseFFN) and (dtype := found.up.weight.dtype) not in VALUE_DTYPES:
            raise InputError(f"{found.name}: the weights are {dtype}; bfloat16, float16 and float32 are accepted")
        told = plan.layer(found.name).choices.values() if isinstance(plan, Plan) else [plan]
        for name in {each.path for each in told if isinstance(each, Choice)}:
            if name in FOR_CUT and found.cut is None:
                raise InputError(f"path {name!r} {ONLY_CUT}; {found.name!r} is none")
            if name not in (DENSE.path, *FOR_CUT) and found.cut is not None:
                accepted = ", ".join(map(repr, [DENSE.path, *FOR_CUT]))
                raise InputError(f"path {name!r} does not compute {found.name!r} ({found.cut}); accepted: {accepted}")
            try:
                PATHS[name].fitted(weights)
            except TwellError as error:
                raise type(error)(f"path {name!r}, layer {found.name!r}: {error}") from None
        if not isinstance(found.module, SparseFFN):
            try:
                copies.check_finite(weights.named())
            except InputError as error:
                raise InputError(f"{found.name}: {error}") from None


def _read(plan) -> Plan | Choice:
    """What `sparsify` was told: a file is read, and the name of a path is a Choice. InputError for anything else."""
    if isinstance(plan, (Plan, Choice)):
        return plan
    if isinstance(plan, os.PathLike):
        return Plan.load(plan)
    whole = [name for name in PATHS.names() if name not in PATHS or not PATHS[name].splits]
    if isinstance(plan, str):
        if plan in whole:
            return Choice(plan)
        if os.path.exists(plan):
            return Plan.load(plan)
    splits = isinstance(plan, str) and plan in PATHS.names()
    why = f", which needs a number of hot neurons: tl.Choice({plan!r}, 256)" if splits else ""
    raise InputError(
        f"plan is {plan!r:.200}{why}; accepted: a Plan or the name of a file that holds one, "
        f"{', '.join(map(repr, whole))} or a Choice"
    )


def densify(model: nn.Module) -> nn.Module:
    """Undo sparsify, in place; returns the model. A model without a SparseFFN is left as it is.

    What was set on a SparseFFN goes to the dense layer, or inside OPT to the activation: forward and backward hooks,
    whose handles go on to work; public attributes, parameters, buffers and modules, also projections that replaced
    others. Hooks on a state_dict do not. Weights that the layers turned get the plain layout again, and reordered
    neurons their own order; InputError, with nothing changed, where reordered weights were changed since."""
    check_model(model)
    for sparse in [m for m in model.modules() if isinstance(m, SparseFFN)]:
        sparse.layout.check(sparse)
    for module in [each for each in model.modules() if isinstance(own_forward(each), Routed)]:
        set_forward(module, None)
        for name, sparse in [(name, each) for name, each in module._modules.items() if isinstance(each, SparseFFN)]:
            sparse.turn_back()
            del module._modules[name]
    layers = [m for m in model.modules() if isinstance(m, SparseFFN)]
    for module in model.modules():  # also those of a block whose SparseFFN was replaced
        if isinstance(own_forward(module), HandOn):
            set_forward(module, None)
    for sparse in layers:
        source = sparse.source
        sparse.turn_back()
        if sparse.registered:
            hooks.hand_over(sparse, source)
            if ThresholdedInput.of(source):
                put_on(source, cut_places(family_of(source), source))
            source.train(sparse.training)
            model = replaced(model, {sparse: source})
        else:
            activation = sparse.leave_seat()
            if isinstance(activation, nn.Module):
                hooks.hand_over(sparse, activation)
                activation.train(sparse.training)
    return model

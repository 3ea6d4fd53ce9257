"""sparsify and densify: a model's ReLU feed-forward layers swapped for SparseFFNs in place, and back."""

from __future__ import annotations

import math
import os

import torch
from torch import nn

from ..analysis.auto import Shared, Watch
from ..analysis.plan import Plan, rates_of
from ..analysis.room import SHARE, Room, check_share
from ..analysis.trials import beside
from ..core import InputError, TwellError
from ..formats.twell import TILE, VALUE_DTYPES, WORDS, check_geometry
from ..layers import hooks, probe
from ..layers.activations import kept, known
from ..layers.anatomy import FeedForward, Only, check_model, cut_places, family_of, feed_forwards, replaced
from ..layers.choice import DENSE, Choice, LayerPlan
from ..layers.experts import Expert, Routed
from ..layers.layout import Holders
from ..layers.lossy import ThresholdedInput, put_on
from ..layers.parts import HandOn, own_forward, set_forward
from ..layers.paths import PATHS
from ..layers.sparse_ffn import FOR_CUT, ONLY_CUT, SparseFFN
from ..layers.weights import Weights
from ..ops import copies, turned

AUTO = "auto"


def sparsify(
    model: nn.Module,
    plan: Plan | Choice | str | os.PathLike | None = None,
    *,
    tile: int = TILE,
    words: int = WORDS,
    only: Only | None = None,
    memory: float | None = None,
    reorder: bool = False,
) -> nn.Module:
    """Swap every ReLU feed-forward layer of the model for a SparseFFN, in place; returns the model.

    Without a plan no layer is slower than it was, as far as clocks tell: each stays dense while it counts who fires in
    the first inputs that it sees without gradients (4,096 tokens, or eight batches of 128 together), and then decides
    by itself. It times the best candidates on the next input, unless a layer like it was timed before; that forward
    takes up to a second or so a layer. Inside torch.compile and CUDA graphs nothing is counted: run a few batches
    before either. `twell_lab.report` says what each layer does and why.

    On a GPU a model in evaluation mode needs no memory for copies of `down` on the TwELL path: the layers turn it,
    which changes its strides (see SparseFFN). The hot/cold path reads all weights with the hot neurons first. With
    `reorder` the layers' own weights are put in that order, in new memory; otherwise they are copied, as far as
    `memory` allows. CUDA graphs of the model that were captured before have to be captured anew, as after `Module.to`,
    and no other thread may be in a forward meanwhile.

    Reordered parameters hold an equivalent layer. `state_dict`, what is saved, loaded and `densify` have the original
    order, and so have `train` and forwards that need gradients of weights. After any other change of reordered
    parameters the layer raises an InputError, nothing lost, as far as torch tells of it (layers.layout says when it
    does not); so `densify` before merging an adapter or averaging weights. Layers whose weights are tied, sharded,
    parametrized or have gradients, and OPT's, are not reordered but copied within `memory`.

    Each routed expert of a model is a layer, named by its number. Without a plan they stay dense for good, since the
    model computes all experts together faster than one after the other, which is what another path has it do.

    A layer whose activation has a threshold (FATReLU; SiLU or GELU with one, as twell_lab.thresholds puts there), and
    one that has a ReLU on up as well (dReLU), is computed by kernels like any other, but dense where gradients are
    needed. One with a threshold on another function stays dense whatever it is told. One with thresholds on its inputs
    (TEAL) takes the path "kept_inputs" for few tokens and no other, with a ReLU, SiLU or GELU. That reads gate, up and
    down by their columns, so all three are turned.

    A model may lie on several devices (a device_map, accelerate's dispatch_model) if each layer lies on one: what moves
    the input of a dense layer moves that of the SparseFFN. Layers whose weights are offloaded are refused. Of a model
    that transformers' tensor parallelism split over processes (tp_plan="auto") each process has to swap the same
    layers, and decides for its own neurons, which is what its profile, plan and report are of. Where gradients are
    needed, such a layer computes as it did, densely.

    Parameters stay the same objects under the same names; `densify` takes it back. Hooks belong on the SparseFFNs
    afterwards, in the place of the layers. Each dense layer is run on a few random rows beside the formula before
    anything is swapped (probe.check, which says what that cannot show), and looked over for hooks and adapters. What is
    changed later on a decoder layer, such as the p of a dropout between its parts, or on a dense module that was set
    aside, is not noticed.

    Args:
        model: any module in which `feed_forwards` finds layers.
        plan: what each layer is to do, instead.
            A Plan (`twell_lab.plan`), or the name of a file that holds one, or of a folder that `twell-lab sparsify`
            wrote: its paths. Layers that it leaves dense become SparseFFNs too, on the dense path and without extra
            memory (`Plan.dense_layers` names them).
            The name of a path, or a Choice: this path for every layer and number of tokens, be it faster or not. Beside
            "twell" and "dense" there are those that `twell_lab.plan` knows as `paths`, which take layers whose weights
            fit, and lossy ones, which say so where they are printed.
            "auto": as without a plan, but layers that are sparse already begin anew; None leaves those as they are.
        tile, words: the TwELL geometry of layers that become sparse.
        only: swap the layers for which only(name, module) is true; the others stay as they are, and need not fit.
        memory: the share of the bytes of the model's parameters that copies of weights may take while the model
            infers, counters of a few bytes aside. Layers that find no room do the next best without
            (twell_lab.analysis.room), and `twell_lab.report` says so. Of a Plan, those that gain most a byte get the
            room first; of layers that decide by themselves, those that decide first, and for its trials each holds
            copies for a moment. None: for plans what the plan was made for, or else 0.02 where weights can be moved (on
            a GPU) and any share elsewhere; for a path by name any share.
        reorder: whether the neurons of layers that take the hot/cold path may be put in another order.

    Raises:
        InputError: with nothing changed, if the model has no ReLU feed-forward layer, for a plan of another model,
            device, dtype or release, for weights of another dtype than bfloat16, float16 and float32, for a word that
            is neither a path nor a file, for a path that does not take a layer's weights (on a device without it a
            DeviceError), for a path by name whose copies exceed `memory`, and where layers cannot be swapped: the
            message names those that differ from the formula, by how much, and what to do.
        RecordError: for a file that holds no plan, or not all of one.
    """
    plan = _read(plan)
    check_geometry(tile, words)
    check_share(memory, reorder)
    hooks.refuse_obstacles(model, only)
    layers = feed_forwards(model, only=only)
    if isinstance(plan, Plan):
        plan.check_model(layers)
    elif isinstance(plan, Choice):
        for found in layers:
            plan.check(found.up.weight.shape[0])
    _check_weights(plan, layers)
    dense = ((found.name, found.module) for found in layers if not isinstance(found.module, SparseFFN))
    both = probe.check_all(dense, both=True)
    alone = {found.name for found in layers if _alone(found, both)}
    room = _room(model, plan, layers, memory, reorder)
    shared = Shared(room, beside(model, layers[0].up.weight))
    follows = _followed(plan, [found for found in layers if found.name not in alone], room)
    how = {"tile": tile, "words": words, "_check": False, "_finite": False, "_turns": True, "_reorders": reorder}
    how["_holders"] = Holders(layers) if reorder else None
    for found in layers:
        source, followed = found.module, follows.get(found.name, DENSE)
        if isinstance(source, SparseFFN):
            if plan is None:
                continue
            sparse = source
            sparse.layout.reorders = reorder
            sparse.follow(followed)
        else:
            sparse = SparseFFN(source, plan=followed, _both=id(source) in both, **how)
            if isinstance(source, Expert):
                source.of.add_module(found.name.rpartition(".")[2], sparse)
                set_forward(source.of, Routed(source.of))
                continue
            if sparse.registered:
                ThresholdedInput.unhook(source, family_of(source).owners(source).values())
                model = replaced(model, {source: sparse})
            else:
                # The block calls the up projection, the activation and the down projection itself, so there is no
                # module to swap: the activation's seat does all the work and the projections on either side of it hand
                # their input on.
                sparse.take_seat()
        if (plan is None or plan == AUTO) and found.name not in alone and not isinstance(sparse.source, Expert):
            sparse.watch(Watch(shared, found.name))
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


def _check_weights(plan: Plan | Choice | str | None, layers: list[FeedForward]) -> None:
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


def _room(model: nn.Module, plan, layers: list[FeedForward], memory: float | None, reorder: bool) -> Room:
    """The room that the layers have for copies, less what those hold that stay as they are."""
    if memory is None:
        given = plan.memory if isinstance(plan, Plan) else math.inf if isinstance(plan, Choice) else None
        moved = layers[0].up.weight.device.type in turned.DEVICES
        memory = given if given is not None else SHARE if moved else math.inf
    told = () if plan is None else {found.module for found in layers}
    others = [each for each in model.modules() if isinstance(each, SparseFFN) and each not in told]
    return Room(model, memory, reorder, sum(each.extra_bytes for each in others))


def _followed(plan, layers: list[FeedForward], room: Room) -> dict[str, LayerPlan | Choice]:
    """What each layer is to do, by its name. InputError for a path by name for which there is no room."""
    if isinstance(plan, Plan):
        plans = room.fit_all([(found, plan.layer(found.name)) for found in layers], rates_of(plan))
        return {found.name: each for found, each in zip(layers, plans)}
    if isinstance(plan, Choice):
        need = sum(room.need(found)[plan.path] for found in layers) if room.left < math.inf else 0
        if need > room.left:
            raise InputError(
                f"{plan} for every layer needs {need:,} bytes of copies, and memory={room.memory:g} leaves "
                f"{int(room.left):,}; more, or a Plan, is accepted"
            )
    return {found.name: plan if isinstance(plan, Choice) else DENSE for found in layers}


def _read(plan) -> Plan | Choice | str | None:
    """What `sparsify` was told: a file is read, and the name of a path is a Choice. InputError for anything else."""
    if plan is None or isinstance(plan, (Plan, Choice)):
        return plan
    if isinstance(plan, os.PathLike):
        return Plan.load(plan)
    whole = [name for name in PATHS.names() if name not in PATHS or not PATHS[name].splits]
    if isinstance(plan, str):
        if plan == AUTO:
            return plan
        if plan in whole:
            return Choice(plan)
        if os.path.exists(plan):
            return Plan.load(plan)
    splits = isinstance(plan, str) and plan in PATHS.names()
    why = f", which needs a number of hot neurons: tl.Choice({plan!r}, 256)" if splits else ""
    raise InputError(
        f"plan is {plan!r:.200}{why}; accepted: a Plan or the name of a file that holds one, "
        f"{', '.join(map(repr, [AUTO, *whole]))}, a Choice, or None"
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

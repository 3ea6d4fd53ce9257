"""sparsify and densify: a model's ReLU feed-forward layers swapped for SparseFFNs in place, and back; and report, which
says what they do, why, and what that was worth."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import records
from ..analysis.planner import COLUMNS, Plan, chosen
from ..analysis.planner import plan as plan_layers
from ..analysis.profile import count
from ..core import InputError, TwellError
from ..formats import TILE, WORDS, check_geometry
from ..layers.choice import DENSE, Choice, LayerPlan
from ..layers.experts import Expert, Routed
from ..layers.find import FeedForward, Only, check_model, feed_forwards, only_dense, replaced, survey
from ..layers.lossy import Lossy, ThresholdedInput
from ..layers.parts import Weights, uncompiled
from ..layers.paths import PATHS
from ..layers.skipping import skip, stop_skipping
from ..layers.sparse_ffn import FOR_CUT, SparseFFN
from ..ops.functional import check_finite

PLANNED = "twell_lab_plan"  # the attribute of a model that has the plans, by name, of layers that stayed dense
WAYS = (
    "tl.sparsify(model, batches), which profiles, plans and swaps; tl.sparsify(model, plan) with a tl.plan(...) or the "
    "name of its file; tl.sparsify(model, 'twell') or another path's name; tl.sparsify(model, tl.Choice(...))"
)

_UNKNOWN = ("tokens", "nnz", "us", "dense_us", "x_dense", "how")


def sparsify(
    model: nn.Module,
    how: Plan | Choice | str | os.PathLike | Any = None,
    *,
    tile: int = TILE,
    words: int = WORDS,
    only: Only | None = None,
    tokens: Sequence[int] | None = None,
    calls: str = "eager",
) -> nn.Module:
    """Swap the ReLU feed-forward layers of a model for SparseFFNs, in place; returns the model.

    Given batches, it profiles the model on them, plans each layer (it times the best paths beside dense), swaps, and
    prints four lines: what fires, which paths are taken, what that should gain, and what stayed dense and why.

    Weights are rewritten once, in place, without changing the function (layers.storage); parameters stay the same
    objects with the same shapes and names. CUDA graphs that were captured before have to be captured anew, and with the
    hot/cold path, which puts the neurons in order, optimizers, averages and masks made before no longer fit. A model in
    training mode is not rewritten: it trains sparsely, and infers densely until it is swapped anew in evaluation mode.
    `densify` takes all back. A layer that cannot be sparse stays dense, and `twell_lab.report` says why. Each routed
    expert is a layer, named by its number.

    Args:
        model: any module in which `feed_forwards` finds layers.
        how: batches as `twell_lab.profile` takes them; a Plan, or the name of a file that holds one; the name of a path
            or a Choice: this path for every layer and number of tokens, be it faster or not.
        tile, words: the TwELL geometry of layers that become sparse.
        only: swap the layers for which only(name, module) is true.
        tokens, calls: given batches, the token counts to plan for, and the way of calling, as in `twell_lab.plan`.

    InputError without `how`, for a model without ReLU feed-forward layers, for a plan of another model, and for a path
    that does not compute a layer; RecordError for a file that holds no plan."""
    check_model(model)
    check_geometry(tile, words)
    told = _read(how)
    geometry = {"tile": tile, "words": words}
    if told is None:
        return _planned(model, how, only, tokens, calls, geometry)
    layers, _ = find_layers(model, only)
    if isinstance(told, Plan):
        names = {layer.name for layer in layers} | {layer.name for layer in told.layers}  # others need no plan
        told.check_model([layer for layer in feed_forwards(model, only=only) if layer.name in names])
    return _swap(model, layers, told, geometry)


def _swap(model: nn.Module, layers: list[FeedForward], told: Plan | Choice, geometry: dict[str, int]) -> nn.Module:
    """Have these layers do as they are told: all of them, or none with an error that names the one it is about.

    Where the plan takes torch's own dense layer for every number of tokens, that stays in its place, or comes back."""
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    tied = {number for number, many in owners.items() if many > 1}  # of parameters that several modules have
    plans = {found.name: told.layer(found.name) if isinstance(told, Plan) else told for found in layers}
    stays = {name for name, plan in plans.items() if getattr(plan, "unchanged", False)}
    swapped: list[tuple[str, SparseFFN]] = []
    undo: list[Callable[[], object]] = []
    for found in layers:
        source, plan = found.module, plans[found.name]
        try:
            if isinstance(source, SparseFFN):
                undo.append(partial(source.follow, source.plan))
                source.follow(plan)
            elif found.name not in stays:
                sparse = SparseFFN(source, plan=plan, tied=tied, probed=found.both, **geometry)
                swapped.append((found.name, sparse))
                undo.append(sparse.close)
        except TwellError as error:
            for back in reversed(undo):
                back()
            raise type(error)(f"layer {found.name!r}: {error}") from None
    seats = {}
    for name, sparse in swapped:
        if isinstance(sparse.source, Expert):
            experts = sparse.source.of
            experts.add_module(name.rpartition(".")[2], sparse)
            if not isinstance(vars(experts).get("forward"), Routed):
                Routed(experts)
        elif sparse.registered:
            seats[sparse.source] = sparse
        else:
            sparse.take_seat()
    model = replaced(model, seats)
    for found in layers:
        if isinstance(found.module, SparseFFN) and found.name in stays:
            model = _take_out(model, found.module)
    choices = [c for plan in plans.values() for c in ([plan] if isinstance(plan, Choice) else plan.choices.values())]
    if any(choice.path in FOR_CUT for choice in choices):
        for module in model.modules():
            if type(module) is nn.Linear and ThresholdedInput.of(module):
                skip(module)  # or it stays as it is, with the same zeros
    vars(uncompiled(model)).pop(PLANNED, None)
    if stays:
        vars(uncompiled(model))[PLANNED] = {name: plans[name] for name in stays}
    return model


def find_layers(model: nn.Module, only: Only | None = None) -> tuple[list[FeedForward], dict[str, str]]:
    """Return the layers that can be swapped, or are, and by name why each other one stays dense.

    Runs each on a few rows. Raises InputError for a model without ReLU feed-forward layers."""
    feed_forwards(model, only=only)
    layers, reasons = survey(model, only=only)
    able = []
    for found in layers:
        try:
            if not isinstance(found.module, SparseFFN):
                check_finite(Weights.of(found.gate, found.up, found.down).named())
                if why := only_dense(found):
                    raise InputError(why)
            able.append(found)
        except InputError as error:
            reasons[found.name] = str(error)
    return able, reasons


def _planned(model: nn.Module, batches, only, tokens, calls, geometry) -> nn.Module:
    """Profile, plan, swap, and say so. Of several batches every second one is for timing; one alone is for counting."""
    batches = [batches] if isinstance(batches, (Tensor, Mapping)) else list(batches)
    layers, reasons = find_layers(model, only)
    lines = []
    if layers:
        names, more = {layer.name for layer in layers}, {} if tokens is None else {"tokens": tokens}
        found, timed = count(model, layers, batches[::2], **geometry), batches[1::2] or None
        plan = plan_layers(found, model, batches=timed, calls=calls, only=lambda name, module: name in names, **more)
        model = _swap(model, layers, plan, geometry)
        shares = [layer.density for layer in found.layers if layer.tokens]
        span = " to ".join(dict.fromkeys(f"{share:.2%}" for share in (min(shares), max(shares))))
        span += " of a layer's neurons fire for a token"
        lines = [f"fires: {span}, counted on {found.tokens:,} tokens", plan.summary()]
        if moved := sum(isinstance(m, SparseFFN) and m.order is not None for m in model.modules()):
            fit = "optimizers, averages and masks made before no longer fit them"
            lines.append(f"neurons in another order: {moved} layers; {fit}")
    lines += [f"stay dense: {many} layers, {reason}" for reason, many in Counter(reasons.values()).items()]
    print("\n".join(lines))
    return model


def _read(how) -> Plan | Choice | None:
    """Return what `sparsify` was told: a Plan or a Choice; None for batches. InputError for what is neither."""
    if isinstance(how, (Plan, Choice)):
        return how
    if isinstance(how, str) and how in PATHS.names():
        if PATHS[how].splits:
            raise InputError(f"path {how!r} needs a number of hot neurons: tl.Choice({how!r}, 256)")
        return Choice(how)
    if isinstance(how, os.PathLike) or isinstance(how, str) and os.path.exists(how):
        return Plan.load(how)
    if isinstance(how, str):
        paths = ", ".join(PATHS.names())
        raise InputError(f"how is {how!r:.200}, neither a path ({paths}) nor a file; accepted: {WAYS}")
    if not isinstance(how, Iterable):
        what = "sparsify was not told how" if how is None else f"how is {how!r:.200}, no batches"
        raise InputError(f"{what}; accepted: {WAYS}")
    return None


def densify(model: nn.Module) -> nn.Module:
    """Undo sparsify, in place; returns the model. A model without a SparseFFN is left as it is.

    Weights get the plain layout again, and reordered neurons their own order. Hooks, parts and parameters are those
    that the sparse layer had."""
    check_model(model)
    for module in list(model.modules()):
        stop_skipping(module)
        if isinstance(module, SparseFFN):
            model = _take_out(model, module)
    vars(uncompiled(model)).pop(PLANNED, None)
    return model


def _take_out(model: nn.Module, sparse: SparseFFN) -> nn.Module:
    """Put the dense layer in the place of this one."""
    dense = sparse.close()
    if isinstance(dense, Expert):
        others = dense.of._modules
        del others[str(dense.number)]
        if not any(isinstance(other, SparseFFN) for other in others.values()):
            Routed.take_off(dense.of)
        return model
    return replaced(model, {sparse: dense}) if sparse.registered else model


@dataclass(frozen=True)
class Report:
    """What `report` found; printed, it is a table. rows: one a layer and class of token counts, JSON-able."""

    rows: list[dict]

    def __str__(self) -> str:
        rows = [{**row, "layer": row["layer"] or "layer", "choice": row["runs"]} for row in self.rows]
        return records.table(rows, COLUMNS | {"tokens": "tokens up to", "choice": "runs"})


def report(model: nn.Module, *, only: Only | None = None) -> Report:
    """Say for each ReLU feed-forward layer of a model what runs, why, and what it was worth. It times nothing; a layer
    that is not swapped is run on a few rows, to say why it could not be. InputError for a model without such layers.

    A row has the `layer`; its `state` ("not swapped", "planned" or "told"); `tokens`, the largest count of the class,
    None for any count; the `choice` of path; what `runs` of it with the weights as they are: the choice, or "dense: "
    and why (then without times); `nnz`, the neurons firing at a token when they were counted; `us` and `dense_us`, the
    microseconds that so many tokens take, and took before the layer was swapped; `x_dense`, their ratio; `how` they are
    known ("measured", "measured on" a layer like it, "predicted"); and `why`. What is not known is None."""
    rows = []
    _, reasons = find_layers(model, only)
    stayed = getattr(model, PLANNED, {})
    for found in feed_forwards(model, only=only):
        sparse = found.module if isinstance(found.module, SparseFFN) else None
        plan = stayed.get(found.name) if sparse is None else sparse.plan
        if isinstance(plan, LayerPlan):
            state, told = "planned", chosen(plan)
        elif sparse is not None:
            state, told = "told", [{"choice": str(plan), "why": "asked for by name, be it faster or not"}]
        else:
            why = reasons.get(found.name, "sparsify left this layer as it is, or was not called")
            state, told = "not swapped", [{"choice": str(DENSE), "why": why}]
        lossy = f"; {found.acts}" if isinstance(found.acts, Lossy) else f"; {found.cut}" if found.cut else ""
        for row in told:
            row = {**dict.fromkeys(_UNKNOWN), **row, "layer": found.name, "state": state, "runs": row["choice"]}
            row["why"] += lossy
            if sparse is not None:
                row["runs"] = sparse.runs(row["tokens"])
                row["why"] += "; its neurons lie in another order" if sparse.order else ""
            if row["runs"] != row["choice"] and row["runs"].startswith(f"{DENSE}: "):
                row |= dict.fromkeys(("us", "x_dense", "how"))
            rows.append(row)
    return Report(rows)

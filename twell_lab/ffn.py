"""SparseFFN: a ReLU feed-forward layer that skips its silent neurons, in the place of the dense one.

Which modules are feed-forward layers, and whether they compute what a SparseFFN computes, is twell_lab.anatomy's and twell_lab.probe's to say.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from . import checks, copies, dispatch, hooks, ops, probe
from .anatomy import ACCEPTED, IN_BLOCK, FeedForward, HandOn, Only, is_relu, layout_of, selected
from .errors import InputError
from .formats import TILE, WORDS, check_geometry
from .hooks import Guarded
from .inference import STATS
from .learning import Learner
from .permuted import BUFFERS, HotFirst
from .plans import Choice, LayerPlan, Plan, check_fits
from .watching import Shared, Watch, may_watch


def _describe(name: str, module: nn.Module) -> FeedForward | None:
    if isinstance(module, SparseFFN):
        place = name if module._borrowed is None else name.rpartition(".")[0]  # OPT's is named by its layer
        return FeedForward(place, module, module.gate, module.up, module.down)
    layout = layout_of(module)
    if layout is None or not is_relu(getattr(module, layout[3])):
        return None
    gate, up, down, _ = layout
    return FeedForward(name, module, getattr(module, gate) if gate else None, getattr(module, up), getattr(module, down))


def feed_forwards(model: nn.Module, *, only: Only | None = None) -> list[FeedForward]:
    """Every ReLU feed-forward layer of the model, dense or already sparse, in the order of its modules.

    Found by the names of their parts (twell_lab.anatomy), which do not say what is computed between them: `sparsify` and
    `SparseFFN` ask that of every dense layer, this function of none. only: layers for which only(name, module) is true.
    Raises InputError if there is none, naming the activations that were found instead.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    found = [f for name, module in model.named_modules() if (f := _describe(name, module))]
    if not found:
        others = {m for m in model.modules() if (lay := layout_of(m)) and not is_relu(getattr(m, lay[3]))}
        kinds = sorted({type(getattr(m, layout_of(m)[3])).__name__ for m in others})
        seen = f"its feed-forward layers use {', '.join(kinds)}" if kinds else "none of its modules has the known parts"
        raise InputError(f"no ReLU feed-forward layer in {type(model).__name__}: {seen}; {ACCEPTED} and a ReLU")
    chosen = [f for f in found if selected(only, f.name, f.module)]
    if not chosen:
        raise InputError(f"`only` leaves none of the {len(found)} feed-forward layers of {type(model).__name__}, the first of which is "
                         f"{found[0].name!r}; accepted: one that is true for some")  # fmt: skip
    return chosen


class SparseFFN(Guarded, Learner, HotFirst):
    """A ReLU feed-forward layer, gated or plain, that computes only what its firing neurons need.

    Holds the source module's own projections under their own names, so parameters, their shapes and the
    state_dict stay what they were. Without a plan it always packs what fires ("twell"). plan: a LayerPlan picks the path by
    the number of tokens (LayerPlan.choice); a Choice is one path for all, hot/cold then with the neurons as they
    lie. What the paths want in another layout (`down` transposed, the weights with the hot neurons first) is kept in buffers
    outside the state_dict that follow the parameters; only those that some choice needs (`extra_bytes` says what they cost).
    A weight that is not finite is an InputError where no gradient is needed: the dense layer's result would show it (0 * NaN),
    and kernels that skip the silent neuron would not. While a layer is trained its loss does not show it either: ask
    `LayerTerms.finite` (twell_lab.penalty) now and then, as twell_lab.train does. Where a gradient is needed (twell_lab.training), `learn` says whether all neurons are computed or those that fire.

    The source is run on a few rows beside the formula before it is taken (probe.check), and refused with an InputError where
    it computes something else, holds parameters or buffers besides its projections', or has hooks, adapters or replaced forwards
    on it or on a part of it. What is put on a projection later, or in its place, is an InputError of the next forward. Hooks
    belong on the SparseFFN itself, and go with `densify` to the dense layer. Hooks for every module (register_module_forward_hook) see
    the SparseFFN but not its projections, and attributes changed on the dense module or its activation later are not looked at.
    """

    def __init__(
        self,
        source: nn.Module,
        *,
        plan: LayerPlan | Choice | None = None,
        tile: int = TILE,
        words: int = WORDS,
        _registered: bool = True,
        _check: bool = True,
    ):
        super().__init__()
        check_geometry(tile, words)
        if (reason := hooks.obstacle(source)) is not None:
            raise InputError(f"{type(source).__name__}: {reason}")
        layout = layout_of(source)
        if layout is None:
            raise InputError(f"{type(source).__name__} is no feed-forward layer known here; {ACCEPTED} and a ReLU")
        *names, activation = layout
        if not is_relu(getattr(source, activation)):
            raise InputError(
                f"{type(source).__name__} uses {type(getattr(source, activation)).__name__}; a ReLU is accepted"
            )
        if _check:
            probe.check("", source)
        self.tile, self.words = tile, words
        self._names = names
        self._seat = activation
        # In plain lists: neither the source nor, inside OPT, its projections are this module's children.
        self._source = [source]
        self._borrowed = None if _registered else [getattr(source, name) if name else None for name in names]
        for name in names if _registered else ():
            if name:
                setattr(self, name, getattr(source, name))
        self.train(source.training)
        copies.check_finite(self._named(*self._weights_and_biases()))
        self.register_load_state_dict_post_hook(SparseFFN.refresh)
        self.follow(plan)
        self._born = frozenset((*vars(self), *self._parameters, *self._modules, "down_t", "stats", *BUFFERS))

    @classmethod
    def from_module(
        cls, module: nn.Module, *, plan: LayerPlan | Choice | None = None, tile: int = TILE, words: int = WORDS
    ) -> SparseFFN:
        """The sparse twin of a feed-forward module (or OPT decoder layer); the two share their parameters."""
        return cls(module, plan=plan, tile=tile, words=words)

    def _projection(self, index: int) -> nn.Linear | None:
        if self._borrowed is not None:
            return self._borrowed[index]
        return getattr(self, self._names[index]) if self._names[index] else None

    @property
    def gate(self) -> nn.Linear | None:
        return self._projection(0)

    @property
    def up(self) -> nn.Linear:
        return self._projection(1)

    @property
    def down(self) -> nn.Linear:
        return self._projection(2)

    def follow(self, plan: LayerPlan | Choice | None) -> None:
        """Take the paths of another plan from now on, watching ended; the counts of `status` begin anew.

        Raises InputError for a plan of another shape. Not while a captured CUDA graph is in use: it holds the old buffers.
        """
        d_ff, d_model = self.up.weight.shape
        if isinstance(plan, LayerPlan):
            shape = (plan.d_model, plan.d_ff, plan.gated)
            if shape != (d_model, d_ff, self.gate is not None):
                kinds = "d_model {}, d_ff {}, gated {}"
                raise InputError(f"the plan is for {kinds.format(*shape)}; {kinds.format(d_model, d_ff, self.gate is not None)} "
                                 "is accepted")  # fmt: skip
            choices = [*plan.choices.items()]
        elif plan is None or isinstance(plan, Choice):
            choices = [(1, plan or Choice())]
        else:
            raise InputError(f"plan is a {type(plan).__name__}; a LayerPlan, a Choice or None is accepted")
        for _, choice in choices:
            choice.check(d_ff)
        if all(choice == choices[0][1] for _, choice in choices):
            choices = choices[-1:]  # nothing to look up, and nothing for torch.compile to guard
        self._watch: Watch | None = None
        self.plan = plan
        hot = max(choice.hot for _, choice in choices)
        if hot:
            self._hold_order(plan.order(hot) if isinstance(plan, LayerPlan) else torch.arange(d_ff, device="cpu"), self._sources())
        else:
            self._drop_order()
        transposes = any(choice.path == "twell" for _, choice in choices)
        self._hold("down_t", copies.place(copies.TRANSPOSED, self.down.weight) if transposes else None)
        self._renew_stats(choices)
        self._fuses = dispatch.fuses(self.up.weight)
        self._transposes, self._choices = transposes, choices  # last: another thread may be in a forward

    @property
    def extra_bytes(self) -> int:
        """Memory held beyond the dense layer's parameters: every buffer, in bytes."""
        return sum(each.numel() * each.element_size() for each in self._buffers.values())

    def refresh(self, *_) -> None:
        """Have the next forward copy the weights anew.

        For what torch itself does not notice, since it raises no version: a change in place of `down.weight.data` (as
        `p.data += delta`) or of its storage, through a NumPy array or DLPack, or, on a GPU, by another process. A CUDA graph that was
        captured while the copies were up to date reads them as they are: after a change, call the layer once outside of it. What is
        followed without it:
        optimizers, `load_state_dict`, `p.add_` under no_grad, a replaced parameter or `data`, and CPU memory that is shared
        with other processes.
        """
        for each in self._buffers.values():
            copies.forget(each)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d_model] -> [..., d_model]."""
        self._unhooked()
        if self._watch is not None:
            self._see(x)
        weights, biases = self._weights_and_biases()
        if checks.transformed():
            return _dense(x, weights, biases)
        choices = self._choices
        at = self._class_of(x, choices)
        choice = choices[at][1]
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, *weights, *biases)):
            if self._reports or not self._transposes or weights[1].is_cuda or self.learning == "dense":
                return self._learn(x, weights, biases, choice.path)
            call, given = (ops.plain_ffn, 1) if weights[0] is None else (ops.gated_ffn, 0)  # a CPU skips the silent neurons forwards
            down_t = self._down_t(weights, biases)
            return call(x, *weights[given:], *biases[given:], down_t=down_t, tile=self.tile, words=self.words)
        if choice.path == "dense":
            if not torch.compiler.is_compiling():  # a forward that is being compiled sees no addresses, and keeps the last answer
                self._fuses = dispatch.fuses(weights[1])
            fused = self._fuses and isinstance(x, Tensor) and x.shape[:-1].numel() >= dispatch.LEAST_DENSE
            if not fused and (torch.compiler.is_compiling() or not weights[1].is_cuda):
                return _dense(x, weights, biases)  # as torch's own operations, which its compiler fuses
        if choice.path == "hot_cold":
            held = self._hot_first([*weights, *biases[:2]])
            biases = [held.pop("gate_bias"), held.pop("up_bias"), biases[2]]
            weights, down_t = [held["gate"], held["up"], held["down"]], held["down_t"]
        else:
            down_t = self._down_t(weights, biases) if choice.path == "twell" else None
        stats = self._buffers.get("stats")  # once: another thread may have the layer follow another plan meanwhile
        if stats is not None and stats.device != weights[1].device:
            stats = self._renew_stats(choices)
        # On a CPU counting is work of its own, so a layer that nobody planned does without.
        counted = choice.path != "dense" and (self.plan is not None or weights[1].is_cuda)
        stats = stats[at] if counted and stats is not None and stats.shape[0] == len(choices) else None
        how = {"path": choice.path, "hot": choice.hot, "tile": self.tile, "words": self.words}
        return ops.infer(x, *weights, *biases, down_t=down_t, stats=stats, **how)

    @staticmethod
    def _class_of(x, choices: list) -> int:
        """Which of the choices is for this many tokens."""
        last = len(choices) - 1
        if last and isinstance(x, Tensor):
            tokens = x.shape[:-1].numel()
            for at in range(last):
                if tokens <= choices[at][0]:
                    return at
        return last

    def status(self) -> dict:
        """What the layer does and has seen. Waits for the device; a forward never does.

        plan: "none", "watching" (it will decide from what it sees) or "planned"; extra_bytes; classes: for each class of token
        counts tokens (its largest count, None for the last one), path, hot, and of what went through it without gradients:
        rows; mean_nnz, the entries a row that were packed (of the cold neurons, with hot/cold); pooled and lost, the share
        of rows that used the pool for overflow and that were computed densely after all; planned_nnz, what the plan expects of
        mean_nnz, and drift, mean_nnz over it. What is not known is None: dense paths count nothing, nor does a layer
        without a plan on a CPU, nor kernels for small batches that would be held up by it.
        """
        seen = self.stats.tolist() if "stats" in self._buffers else None
        classes = []
        for at, (tokens, choice) in enumerate(self._choices):
            rows, kept, pooled, lost = (0, 0, 0, 0) if seen is None or choice.path == "dense" else seen[at]
            share = lambda count, of=rows: count / of if of else None  # noqa: E731
            planned = self.plan.packed_nnz(choice) if isinstance(self.plan, LayerPlan) and choice.path != "dense" else None
            drift = share(kept) / planned if rows and planned else None
            classes.append({"tokens": tokens if at < len(self._choices) - 1 else None, "path": choice.path, "hot": choice.hot,
                            "rows": rows or None, "mean_nnz": share(kept), "pooled": share(pooled), "lost": share(lost),
                            "planned_nnz": planned, "drift": drift})  # fmt: skip
        plan = "watching" if self._watch is not None else "none" if self.plan is None else "planned"
        return {"plan": plan, "extra_bytes": self.extra_bytes, "classes": classes}

    def extra_repr(self) -> str:
        d_ff, d_model = self.up.weight.shape
        paths = ", ".join(dict.fromkeys(str(choice) for _, choice in self._choices))
        planned = "" if self.plan is None else f", path={paths}"
        return f"d_model={d_model}, d_ff={d_ff}, tile={self.tile}, words={self.words}{planned}"

    def _see(self, x) -> None:
        """Let the watch count this input, where nothing but a plain forward is going on; follow what it decides."""
        if torch.is_grad_enabled() and self.up.weight.requires_grad:
            return
        allowed = may_watch(x)
        if not allowed:
            self._watch = self._watch if allowed is False else None
            return
        watch, self._watch = self._watch, None  # taken away meanwhile: of two threads, one decides
        if watch is None:
            return
        plan = None
        try:
            plan = watch.see(self, x)
        finally:
            if plan is None:  # not yet, or interrupted
                self._watch = watch
        if plan is not None:
            self.follow(plan)

    def _weights_and_biases(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """gate, up and down, each read once: where a weight is parametrized, reading makes a new tensor."""
        projections = (self.gate, self.up, self.down)
        return [None if p is None else p.weight for p in projections], [None if p is None else p.bias for p in projections]

    def _named(self, weights: list[Tensor | None], biases: list[Tensor | None]) -> dict[str, Tensor]:
        names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        return {name: t for name, t in zip(names, (*weights, *biases)) if t is not None}

    def _sources(self) -> list[Tensor | None]:
        weights, biases = self._weights_and_biases()
        return [*weights, *biases[:2]]

    def _down_t(self, weights: list[Tensor | None], biases: list[Tensor | None]) -> Tensor:
        """down transposed, brought up to date; the other weights are looked at with it."""
        beside = self._named(weights, biases)
        weight, copy = beside.pop("down"), self._buffers.get("down_t")
        if not copies.fits(copy, copies.TRANSPOSED, weight):
            copy = copies.place(copies.TRANSPOSED, weight)
            self._hold("down_t", copy)
        copies.refresh({"down": weight}, [copy], [copies.TRANSPOSED], beside=beside, training=self.training)
        return copy

    def _renew_stats(self, choices: list) -> Tensor | None:
        """Counters at zero, int64 [classes, 4] (see inference.STATS); none where every path is dense."""
        stats = None
        if any(choice.path != "dense" for _, choice in choices):
            with torch.inference_mode(False):
                stats = torch.zeros(len(choices), len(STATS), dtype=torch.int64, device=self.up.weight.device)
        self._hold("stats", stats)
        return stats

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if "down_t" in self._buffers and self.down_t.is_inference():  # moved inside inference mode: nothing outside could write
            with torch.inference_mode(False):
                self.down_t = torch.empty_like(self.down_t)
        self.refresh()
        if "order" in self._buffers:
            self._renew_order(self._sources(), anew=True)
        self._renew_stats(self._choices)  # to_empty leaves anything in them
        self._fuses = dispatch.fuses(self.up.weight)
        return self


def _dense(x: Tensor, weights: list[Tensor | None], biases: list[Tensor | None]) -> Tensor:
    """By torch's operations."""
    gate, up, down = weights
    checks.check_tensor("x", x)
    checks.check_weights(x.shape[-1], up.shape[0], gate, up, down, *biases)
    if gate is None:
        hidden = torch.relu(linear(x, up, biases[1]))
    else:
        hidden = torch.relu(linear(x, gate, biases[0])) * linear(x, up, biases[1])
    return linear(hidden, down, biases[2])


def sparsify(
    model: nn.Module, plan: Plan | str | None = None, *, tile: int = TILE, words: int = WORDS, only: Only | None = None
) -> nn.Module:
    """Swap every ReLU feed-forward layer of the model for a SparseFFN, in place; returns the model.

    plan: what each layer is to do. None: pack what fires, always; layers that are sparse already stay as they are.
    A Plan (twell_lab.plan): its paths, for the layers of its names and shapes; those it leaves dense become SparseFFNs too,
    on the dense path and without extra memory (`Plan.dense_layers` names them). "auto": without a profile, each layer
    counts who fires in the first inputs it sees without gradients, 4,096 tokens or eight batches, and then
    decides by itself, timing the best candidates on the next input; that forward takes a second or so a layer. Not inside
    torch.compile or a CUDA graph: run a few batches before either. Layers that are sparse already follow the new plan.
    only: swap the layers for which only(name, module) is true; the others stay as they are, and need not fit.

    Parameters stay the same objects under the same names; `densify` takes it back. Raises InputError, with nothing changed, if
    the model has no ReLU feed-forward layer, for a plan of another model, and where a layer cannot be swapped: each layer is run
    on a few rows beside the formula first (probe.check), and looked over for hooks and adapters; the message names those that
    differ, by how much, and what to do. Hooks belong on the SparseFFNs afterwards, in the place of the layers. Each layer is
    asked once, on random rows, for its output and its gradients; probe.check says what that cannot show. What is changed later on
    a decoder layer, such as the p of a dropout between its parts, or on a dense module that was set aside, is not noticed.
    """
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
        if plan is not None:
            sparse._watch = Watch(shared, found.name) if plan == "auto" else None
    return model


def densify(model: nn.Module) -> nn.Module:
    """Undo sparsify, in place; returns the model. A model without a SparseFFN is left as it is.

    What was set on a SparseFFN goes to the dense layer: its forward and backward hooks, whose handles go on to work, public
    attributes, parameters, buffers and modules, projections that replaced others among them. Inside OPT they go to the
    activation. Hooks on a state_dict do not.
    """
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

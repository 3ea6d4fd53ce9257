"""SparseFFN: a ReLU feed-forward layer that skips its silent neurons, in the place of the dense one.

Which modules are feed-forward layers, and whether they compute what a SparseFFN computes, is twell_lab.layers.anatomy's
and twell_lab.layers.probe's to say."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..core.errors import InputError
from ..formats.twell import TILE, WORDS, check_geometry
from ..ops import checks, copies, dispatch, inference, operators
from ..ops.inference import STATS
from . import hooks, probe
from .anatomy import ACCEPTED, FeedForward, StandIn, is_relu, layout_of
from .choice import Choice, LayerPlan
from .hooks import Guarded
from .hot_first import BUFFERS, HotFirst
from .learner import Learner, may_watch


class SparseFFN(Guarded, Learner, HotFirst, StandIn):
    """A ReLU feed-forward layer, gated or plain, that computes only what its firing neurons need.

    Holds the source module's own projections under their own names, so parameters, their shapes and the state_dict stay
    what they were. Without a plan it always packs what fires ("twell"). plan: a LayerPlan picks the path by the number
    of tokens (LayerPlan.choice); a Choice is one path for all, hot/cold then with the neurons as they lie. What the
    paths want in another layout (`down` transposed, the weights with the hot neurons first) is kept in buffers outside
    the state_dict that follow the parameters; only those that some choice needs (`extra_bytes` says what they cost). A
    weight that is not finite is an InputError where no gradient is needed: the dense layer's result would show it (0 *
    NaN), and kernels that skip the silent neuron would not. While a layer is trained its loss does not show it either:
    ask `LayerTerms.finite` (twell_lab.layers.terms) now and then, as twell_lab.train does. Where a gradient is needed
    (twell_lab.ops.differentiable), `learn` says whether all neurons are computed or those that fire.

    The source is run on a few rows beside the formula before it is taken (probe.check), and refused with an InputError
    where it computes something else, holds parameters or buffers besides its projections', or has hooks, adapters or
    replaced forwards on it or on a part of it. What is put on a projection later, or in its place, is an InputError of
    the next forward. Hooks belong on the SparseFFN itself, and go with `densify` to the dense layer. Hooks for every
    module (register_module_forward_hook) see the SparseFFN but not its projections, and attributes changed on the dense
    module or its activation later are not looked at."""

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

    def feed_forward(self, name: str) -> FeedForward:
        """This layer as `feed_forwards` lists it, found under this name; inside OPT it is named by its layer."""
        place = name if self._borrowed is None else name.rpartition(".")[0]
        return FeedForward(place, self, self.gate, self.up, self.down)

    def follow(self, plan: LayerPlan | Choice | None) -> None:
        """Take the paths of another plan from now on, watching ended; the counts of `status` begin anew.

        Raises InputError for a plan of another shape. Not while a captured CUDA graph is in use: it holds the old
        buffers."""
        d_ff, d_model = self.up.weight.shape
        if isinstance(plan, LayerPlan):
            shape = (plan.d_model, plan.d_ff, plan.gated)
            if shape != (d_model, d_ff, self.gate is not None):
                kinds = "d_model {}, d_ff {}, gated {}"
                raise InputError(
                    f"the plan is for {kinds.format(*shape)}; {kinds.format(d_model, d_ff, self.gate is not None)} "
                    "is accepted"
                )
            choices = [*plan.choices.items()]
        elif plan is None or isinstance(plan, Choice):
            choices = [(1, plan or Choice())]
        else:
            raise InputError(f"plan is a {type(plan).__name__}; a LayerPlan, a Choice or None is accepted")
        for _, choice in choices:
            choice.check(d_ff)
        if all(choice == choices[0][1] for _, choice in choices):
            choices = choices[-1:]  # nothing to look up, and nothing for torch.compile to guard
        self._watch = None  # an analysis.auto.Watch, where the layer plans itself
        self.plan = plan
        hot = max(choice.hot for _, choice in choices)
        if hot:
            self._hold_order(
                plan.order(hot) if isinstance(plan, LayerPlan) else torch.arange(d_ff, device="cpu"), self._sources()
            )
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
        `p.data += delta`) or of its storage, through a NumPy array or DLPack, or, on a GPU, by another process. A CUDA
        graph that was captured while the copies were up to date reads them as they are: after a change, call the layer
        once outside of it. What is followed without it: optimizers, `load_state_dict`, `p.add_` under no_grad, a
        replaced parameter or `data`, and CPU memory that is shared with other processes."""
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
            call, given = (
                (operators.plain_ffn, 1) if weights[0] is None else (operators.gated_ffn, 0)
            )  # a CPU skips the silent neurons forwards
            down_t = self._down_t(weights, biases)
            return call(x, *weights[given:], *biases[given:], down_t=down_t, tile=self.tile, words=self.words)
        if choice.path == "dense":
            if (
                not torch.compiler.is_compiling()
            ):  # a forward that is being compiled sees no addresses, and keeps the last answer
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
        return inference.infer(x, *weights, *biases, down_t=down_t, stats=stats, **how)

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

        plan: "none", "watching" (it will decide from what it sees) or "planned"; extra_bytes; classes: for each class
        of token counts tokens (its largest count, None for the last one), path, hot, and of what went through it
        without gradients: rows; mean_nnz, the entries a row that were packed (of the cold neurons, with hot/cold);
        pooled and lost, the share of rows that used the pool for overflow and that were computed densely after all;
        planned_nnz, what the plan expects of mean_nnz, and drift, mean_nnz over it. What is not known is None: dense
        paths count nothing, nor does a layer without a plan on a CPU, nor kernels for small batches that would be held
        up by it."""
        seen = self.stats.tolist() if "stats" in self._buffers else None
        classes = []
        for at, (tokens, choice) in enumerate(self._choices):
            rows, kept, pooled, lost = (0, 0, 0, 0) if seen is None or choice.path == "dense" else seen[at]
            share = lambda count, of=rows: count / of if of else None  # noqa: E731
            planned = (
                self.plan.packed_nnz(choice) if isinstance(self.plan, LayerPlan) and choice.path != "dense" else None
            )
            drift = share(kept) / planned if rows and planned else None
            classes.append(
                {
                    "tokens": tokens if at < len(self._choices) - 1 else None,
                    "path": choice.path,
                    "hot": choice.hot,
                    "rows": rows or None,
                    "mean_nnz": share(kept),
                    "pooled": share(pooled),
                    "lost": share(lost),
                    "planned_nnz": planned,
                    "drift": drift,
                }
            )
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
        return [None if p is None else p.weight for p in projections], [
            None if p is None else p.bias for p in projections
        ]

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
        if (
            "down_t" in self._buffers and self.down_t.is_inference()
        ):  # moved inside inference mode: nothing outside could write
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

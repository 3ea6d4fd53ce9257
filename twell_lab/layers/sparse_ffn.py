"""SparseFFN: a ReLU feed-forward layer that skips its silent neurons, in the place of the dense one.

Which modules are feed-forward layers is in twell_lab.layers.anatomy, whether one computes what a SparseFFN computes in
twell_lab.layers.probe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..core import InputError
from ..formats.twell import TILE, WORDS, check_geometry
from ..ops import checks, copies, streams, turned
from ..ops.activation import RELU
from ..ops.inference import STATS
from ..ops.kept import place
from . import activations, compiled, hooks, probe, terms
from .again import Again, Known
from .anatomy import FeedForward, StandIn, computes, cut_in, family_of, is_usual, kind_of, parts_of
from .choice import DENSE, Choice, LayerPlan
from .compiled import call as compiled_call  # by its own name: a module would be asked after, too, before each call
from .families import accepted
from .layout import DIMS, Holders, Layout, drop_views
from .lossy import Lossy, ThresholdedInput
from .parts import Cut, HandOn, part_at, put, set_forward
from .paths import PATHS, dense
from .paths.converted import Form
from .paths.dense import by_torch
from .paths.path import Path, held, hold
from .shards import Summed, split_of
from .weights import Weights

FOR_CUT = ("kept_inputs",)  # the paths for layers with thresholds on their inputs
ONLY_CUT = (
    "is for layers with thresholds on their inputs (TEAL) and an activation that its kernel has; others are accepted"
)


class SparseFFN(nn.Module, StandIn):
    """A ReLU feed-forward layer, gated or plain, that computes only what its firing neurons need.

    In place of the ReLU it may have its square in a plain layer, a FATReLU, a SiLU or GELU with a threshold
    (layers.lossy), or a ReLU on gate and up (dReLU). `acts` says which of them kernels compute (layers.activations);
    where it is None the dense path does, and where gradients are needed it does for all but the first two.

    A layer with thresholds on its inputs (TEAL) has its activation as it is, and goes on zeroing them; `kept` says what
    a kernel computes of it that reads the weights of the inputs that are left (ops.kept_inputs), on the paths for such
    layers (Path.cuts). Its projections have no hooks for that meanwhile: `densify` puts them back.

    Holds the source module's own projections under their own names, so parameters, their shapes and the state_dict stay
    what they were. Without a plan it always packs what fires ("twell"). plan: a LayerPlan picks the path by the number
    of tokens (LayerPlan.choice); a Choice is one path for all, hot/cold then with the neurons in the order that they
    have. What the paths want in another layout (`down` transposed, the weights with the hot neurons first) is kept in
    buffers outside the state_dict that follow the parameters; only those that some choice needs (`extra_bytes` says
    what they cost). Where a gradient is needed (twell_lab.ops.train), `learn` says whether all neurons are
    computed or those that fire.

    A layer that `sparsify` put into a model does without a copy of `down` on a GPU: in evaluation mode it turns `down`
    (twell_lab.ops.turned), which stays the same Parameter with the same shape and values and gets the strides of a
    transpose. With `sparsify(reorder=True)` a layer on the hot/cold path also has its neurons in the order of that path
    (twell_lab.layers.layout says what that means for who reads or writes parameters). `train`, the first forward
    in which the weights get gradients and `densify` put the weights back as they were; `eval` and `follow` move them,
    but for `eval` in a layer that was trained since it follows its plan. Saved states have the plain layout and the
    neurons' own order. What shares its memory with another tensor, is parametrized, sharded or a tensor subclass is not
    moved but copied; so is a `down` that was replaced or given other `data`, until the next `eval` or `follow`. FSDP2
    shards a model whose weights were not moved: call `train` before. In compiled code turned weights get gradients as
    they lie, and reordered ones get none. Weights that are moved lie in new memory, as after `Module.to`: CUDA graphs
    that read the layer have to be captured anew, and no other thread may be in a forward of it. A layer that decides by
    itself (`watch`) sees to the latter, except for compiled code: what another thread is reading is copied. A layer
    made by hand moves nothing: its source reads the same weights.

    A weight that is not finite is an InputError where no gradient is needed: the dense layer's result would show it
    (0 * NaN), and kernels that skip the silent neuron would not. While a layer is trained its loss does not show it
    either: ask `LayerTerms.finite` (twell_lab.layers.terms) now and then, as twell_lab.train does.

    The source is run on a few rows beside the formula before it is taken (probe.check), and refused with an InputError
    where it computes something else, holds parameters or buffers besides its projections', or has hooks, adapters or
    replaced forwards on it or on a part of it. If something is put on a projection later, or in its place, the next
    forward raises an InputError; compiled code notices that where the layer is one operator (layers.compiled), but not
    where it is torch's operations. Hooks belong on the SparseFFN itself; `densify` moves them to the dense layer. Hooks
    for every module (register_module_forward_hook) see the SparseFFN but not its projections. Attributes that are
    changed later on the dense module or its activation have no effect."""

    learning: str | None = None  # the path that was given to `learn` last
    # See twell_lab.layers.terms: where to report, also without gradients or not, and whether it was ever asked to.
    _told: list | None = None
    _tells_always = _reports = False
    splits = False

    def __init__(
        self,
        source: nn.Module,
        *,
        plan: LayerPlan | Choice | None = None,
        tile: int = TILE,
        words: int = WORDS,
        _check: bool = True,
        _finite: bool = True,
        _turns: bool = False,
        _reorders: bool = False,
        _holders: Holders | None = None,
        _both: bool = False,
    ):
        super().__init__()
        self.layout = Layout()
        self._views: dict[str, Tensor] = {}  # of weights, where others would be buffers
        self.forms: dict[str, Form] = {}  # by path (layers.paths.converted)
        check_geometry(tile, words)
        if (reason := hooks.obstacle(source)) is not None:
            raise InputError(f"{type(source).__name__}: {reason}")
        family = family_of(source)
        if family is None:
            raise InputError(f"{type(source).__name__} is no feed-forward layer known here; {accepted()}")
        cut = cut_in(family, source)
        if not cut and not computes(family, family.acts(source)):
            raise InputError(
                f"{type(source).__name__} uses {kind_of(family.acts(source))}; a ReLU is accepted, in plain layers "
                "also its square"
            )
        if _check:
            _both = probe.check("", source)
        self.tile, self.words = tile, words
        acts = family.acts(source)
        # The activation as it is now, and whether up goes through it, too: for torch's operations, and as kernels
        # compute it (None: none does).
        self.formula = {"acts": torch.relu if is_usual(acts, cut) else copy.copy(acts), "both": _both, "cut": cut}
        self.acts = activations.known(acts, family.gate is not None, _both, family.parts(source)[1].weight, cut)
        self.kept = activations.kept(acts, _both, cut)
        self._family = family
        self._seat = family.activation
        self._dropout = family.dropout if family.drop(source) else None
        self._names = (*family.projections, *([self._dropout] if self._dropout else []))
        # In plain lists: neither the source nor, inside a block, its projections are this module's children.
        self._source = [source]
        # Gate, up and down: the name under which each is read from this module, where another may be put, or itself.
        self._parts: list[str | nn.Linear | None] = parts_of(family, source)
        if not family.inside:
            for name in self._names:
                setattr(self, name, getattr(source, name))
            for name, zeroes in ThresholdedInput.of(source).items():
                setattr(self, name, zeroes)
            names = {id(owner): seat for seat, owner in family.owners(source).items()}
            self._parts = [part and names.get(id(part), part) for part in self._parts]
        # What hooks.check_parts looks at: a projection's place, the block that holds it (None: this module), its name
        # there, and the projection that has to be there, if it cannot be replaced.
        self._seats: list[tuple[str, nn.Module | None, str, nn.Module | None]] = []
        for seat, owner in family.owners(source).items():
            above, _, leaf = seat.rpartition(".")
            fixed = family.inside or any(isinstance(part, Cut) and part.of is owner for part in self._parts)
            block = part_at(source, above) if above else source
            self._seats.append((seat, block if family.inside else None, leaf, owner if fixed else None))
        self._forwards: dict[str, object] = {}  # that projections were found with, and have nothing in them to call
        # The choices; what the layer is in compiled code (layers.compiled), the same for layers that are alike, so that
        # they share it; the aliases of weights that forwards read while the layer plans itself; whether it was trained
        # here.
        self._choices: list[tuple[int, Choice]] = []
        self.compiled_as = ""
        self._aliases: dict[str, Tensor] = {}
        self._learned = False
        self.train(source.training)
        self.layout = Layout(_turns, _reorders, _holders)
        if _finite:
            copies.check_finite(self._weights().named())
        self.register_load_state_dict_post_hook(SparseFFN._forget)
        self.neurons: list[int] | None = None  # their order on a path that splits, the hot ones first
        self._rows: tuple[Tensor, list[Tensor]] | None = None  # the counters, and each class's row of them
        self.fuses_dense = False  # what the dense path found out last (dispatch.fuses)
        self.follow(plan)
        self.layout.holders = None  # there may be others from now on
        down = family.owners(source).get(family.down)
        self.splits = down is not None and split_of(down) is not None
        if self.splits:
            self.forward = Summed(self, down)
        hooks.move_inputs(self)
        buffers = {"stats", compiled.HANDLE, *(name for path in PATHS.values() for name in path.buffers)}
        self._born = buffers.union(vars(self), self._parameters, self._modules)

    @classmethod
    def from_module(
        cls, module: nn.Module, *, plan: LayerPlan | Choice | None = None, tile: int = TILE, words: int = WORDS
    ) -> SparseFFN:
        """A SparseFFN for a feed-forward module (or an OPT decoder layer); the two share their parameters."""
        return cls(module, plan=plan, tile=tile, words=words)

    def _projection(self, index: int) -> nn.Linear | None:
        part = self._parts[index]
        return self._modules[part] if type(part) is str else part  # getattr asks for more, and is felt on each call

    @property
    def gate(self) -> nn.Linear | None:
        return self._projection(0)

    @property
    def up(self) -> nn.Linear:
        return self._projection(1)

    @property
    def down(self) -> nn.Linear:
        return self._projection(2)

    @property
    def source(self) -> nn.Module:
        """The dense module that this one stands for."""
        return self._source[0]

    @property
    def registered(self) -> bool:
        """Whether the projections are this module's own; inside a block, as in OPT, they stay the block's."""
        return not self._family.inside

    def take_seat(self) -> None:
        """Inside a block: compute what lies between the block's up projection and its down projection, and both."""
        self._activation = [self._family.acts(self.source)]
        put(self.source, self._seat, self)
        for part in self._family.owners(self.source).values():
            set_forward(part, HandOn(self.source, self._family.seats))

    def leave_seat(self) -> object:
        """Put the block's activation back in its seat; returns it."""
        put(self.source, self._seat, self._activation[0])
        return self._activation[0]

    def feed_forward(self, name: str) -> FeedForward:
        """This layer as `feed_forwards` lists it, found under this name; inside a block it is named by the block."""
        place = name if self.registered else name[: -len(self._seat)].rstrip(".")
        acts = None if self.formula["acts"] is torch.relu else self.formula["acts"]
        return FeedForward(place, self, self.gate, self.up, self.down, acts, self.formula["both"], self.formula["cut"])

    def follow(self, plan: LayerPlan | Choice | None) -> None:
        """Take the paths of another plan from now on, watching ended; the counts of `status` begin anew.

        Other threads and streams may be in a forward: they finish it, on buffers that stay in memory until then; but no
        other thread where `down` is turned, or turned back (see the class). And a captured CUDA graph, or a compiled
        layer on another stream, has to be done before: the buffers that it uses are freed here. Raises InputError for a
        plan of another shape."""
        self.layout.check(self)
        d_ff, d_model = self.up.weight.shape
        if plan is not None and not isinstance(plan, (LayerPlan, Choice)):
            raise InputError(f"plan is a {type(plan).__name__}; a LayerPlan, a Choice or None is accepted")
        if plan is None and self.acts is None:
            plan = DENSE
        choices = [*plan.choices.items()] if isinstance(plan, LayerPlan) else [(1, plan or Choice())]
        for path in {PATHS[choice.path] for _, choice in choices if choice != DENSE}:
            if path.cuts and self.kept is None:
                raise InputError(f"path {path.name!r} {ONLY_CUT}")
            if not path.cuts and self.acts is None:
                what = self.formula["cut"] or kind_of(self.formula["acts"])
                others = ", ".join(map(repr, [DENSE.path, *(FOR_CUT if self.kept else ())]))
                raise InputError(f"path {path.name!r} does not compute this layer ({what}); accepted: {others}")
        if isinstance(plan, LayerPlan):
            found, own = (plan.d_model, plan.d_ff, plan.gated), (d_model, d_ff, self.gate is not None)
            if found != own:
                sizes = "d_model {}, d_ff {}, gated {}"
                raise InputError(f"the plan is for {sizes.format(*found)}; {sizes.format(*own)} is accepted")
        for _, choice in choices:
            choice.check(d_ff)
        ways = compiled.ways(plan, choices)
        if all(choice == choices[0][1] for _, choice in choices):
            choices = choices[-1:]  # nothing to look up, and nothing for torch.compile to guard
        for name in {choice.path for _, choice in choices}:
            PATHS[name].fitted(self._weights())
        self.plan, self._learned = plan, False
        hot = max(choice.hot for _, choice in choices)
        if hot:
            self.neurons = plan.order(hot).tolist() if isinstance(plan, LayerPlan) else [*range(d_ff)]
        used = {choice.path for _, choice in choices}
        with torch.no_grad():  # as where it infers: a weight that is stored transposed is read as it is then
            weights = self._weights()
        self._lay_out(used)
        for name in used:
            PATHS[name].prepare(self, weights)
        self._renew_stats(choices)
        self._choices = choices  # not before all is there: another thread may be in a forward
        # What compiled code knows as an operator, or as torch's operations, is a layer with a ReLU.
        compiled.follow(self, ways if self.acts == RELU else [(1, compiled.SEEN)])
        for name in PATHS.used().keys() - used:  # and not after this: such a forward may hold a copy anew (Path.ready)
            PATHS[name].release(self)
        self._watch, self._aliases = None, {}

    def takes(self, path: str) -> bool:
        """Whether the plan sends inputs of some size this way."""
        return any(choice.path == path for _, choice in self._choices)

    @property
    def dense_alone(self) -> bool:
        """Whether no kernel computes this layer, and the dense path is the only one."""
        return self.acts is None and self.kept is None

    def runs(self, tokens: int | None = None) -> str:
        """What the layer, as it is now, computes of so many tokens (None: of the most): its choice, or "dense: " and
        why. A path that has no gradients is named together with the one taken for them. May wait for the device."""
        most = [(each, choice) for each, choice in self._choices[:-1] if tokens is not None and tokens <= each]
        choice = (most or self._choices[-1:])[0][1]
        path, weights = PATHS[choice.path], self._weights()
        if refused := path.refuses(self, weights):
            return f"{DENSE}: {refused}"
        learns = self.learns_by(path)
        trained = any(t is not None and t.requires_grad for t in weights)
        if not trained or path.learns != DENSE.path or learns == path.name:
            return str(choice)
        return f"{choice} without gradients, {learns} with them"

    def always_dense(self) -> bool:
        """Whether the plan takes the dense path whatever the number of tokens."""
        return all(choice.path == DENSE.path for _, choice in self._choices)

    def learn(self, path: str | None) -> None:
        """Which path to take where gradients are needed: "dense" for all neurons, "twell" for those that fire, None for
        "dense" where the plan says so for inputs of that size, and "twell" otherwise. Parameters and gradients stay the
        same. Raises InputError for another path."""
        if path not in (None, *terms.PATHS):
            raise InputError(f"path is {path!r}; {', '.join(map(repr, terms.PATHS))} and None are accepted")
        self.learning = path

    def learns_by(self, planned: Path) -> str:
        """The name of the path that is taken where gradients are needed and the plan says this one."""
        return DENSE.path if self.acts != RELU else self.learning or planned.learns

    def told_or_seen(self) -> bool:
        """Whether somebody wants to know what goes through this layer: by `tell`, or by hooks."""
        return self._told is not None or bool(self._forward_hooks or self._forward_pre_hooks)

    @property
    def parts(self) -> list[nn.Linear | None]:
        """Gate (or None), up and down."""
        return [self.gate, self.up, self.down]

    def watch(self, watch) -> None:
        """Have the layer plan itself: dense, it shows inputs to an analysis.auto.Watch until that returns a plan."""
        self.follow(DENSE)
        self._aliases = self._aliased()
        self.plan, self._deciding, self._watch = None, [watch], watch

    def _aliased(self) -> dict[str, Tensor]:
        """Other tensors that are the weights that may be moved, by their fields of Weights."""
        turns = ("gate", "up", "down") if self.kept else ("down",)
        names = () if not self.layout.turns else DIMS if self.layout.reorders else turns
        found = {name: t for name, t in self._weights().named().items() if name in names}
        with torch.inference_mode(False):
            return {
                name: t.detach()
                for name, t in found.items()
                if type(t) is nn.Parameter and t.device.type in turned.DEVICES
            }

    def views(self) -> list[Tensor]:
        return [*self._aliases.values(), *self._views.values()]

    def train(self, mode: bool = True) -> SparseFFN:
        super().train(mode)
        self._lay_out({choice.path for _, choice in self._choices})
        return self

    @property
    def drops(self) -> bool:
        """Whether a forward may drop hidden activations at random."""
        return self._dropout is not None and self.training

    @property
    def reordered(self) -> bool:
        """Whether the weights lie with their neurons in the order `neurons`."""
        return self.layout.neurons is not None

    def in_own_order(self, values: Tensor) -> Tensor:
        """Values of the neurons, [..., d_ff], computed with the weights as they lie, in the neurons' own order."""
        if self.layout.neurons is None:
            return values
        return torch.empty_like(values).index_copy_(
            -1, torch.tensor(self.layout.neurons, device=values.device), values.detach()
        )

    def _lay_out(self, used: set[str]) -> None:
        """Have the weights lie as the paths in use read them, if the layer infers; otherwise as they were made."""
        infers = not self.training and not self._learned
        order = self.neurons if infers and any(PATHS[name].splits for name in used) else None
        turn = set().union(*(PATHS[name].transposes(False) for name in used)) if infers else set()
        self.layout.settle(self, order, turn)
        if self.layout.seats:
            weights = self._weights()
            for name in used:
                PATHS[name].fit(self, weights)

    def turn_back(self) -> None:
        """Have the weights lie as they were made, turned ones as far as that can be done unseen. Forwards make copies
        then. Raises InputError where reordered ones were changed (twell_lab.layers.layout)."""
        self.layout.restore(self)

    def accept_changes(self) -> None:
        """Go on after weights were changed while their neurons were reordered, and take the new values as being in the
        order that the parameters have. Raises InputError where there are more neurons now, or fewer."""
        self.layout.accept(self)
        self._forget()

    @property
    def extra_bytes(self) -> int:
        """Memory held beyond the dense layer's parameters, in bytes: its buffers, and forms of the weights."""
        return sum(each.nbytes for each in (*self._buffers.values(), *self.forms.values()))

    def refresh(self, *_) -> None:
        """Have the next forward copy the weights anew.

        Call it after a change of which torch raises no version: in place of `down.weight.data` (as `p.data += delta`,
        by which PEFT merges; where an adapter's layer comes into a projection's place and goes, no call is needed, but
        inside a block such as OPT's) or of its storage, through a NumPy array or DLPack, or, on a GPU, by another
        process. Optimizers,
        `load_state_dict`, `p.add_` under no_grad, a replaced parameter or `data`, and CPU memory that is shared with
        other processes are followed without it. A CUDA graph that was captured while the copies were up to date reads
        them as they are: after a change, call the layer once outside of the graph. Reordered weights count as changed
        then, see `accept_changes`."""
        self.layout.doubt()
        self._forget()

    def _forget(self, *_) -> None:
        """Have the copies made anew."""
        self._again = None
        for each in held(self).values():
            copies.forget(each)
        self.forms.clear()
        if self._aliases:
            self._aliases = self._aliased()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d_model] -> [..., d_model]."""
        if self._told is not None and terms.reports(self):
            return self._forward(x)
        if is_dynamo_compiling():
            y = compiled_call(self, x)
        else:
            again = self._again
            y = None if again is None else again.run(x)
        return self._forward(x) if y is None else y

    def calls_all(self) -> bool:
        """Whether there is nothing on its parts that it would not call: asked by compiled code while it is traced, and
        not before each call."""
        try:
            hooks.check_parts(self)
        except InputError:  # which is raised again where torch sees what the layer does
            return False
        return True

    calls_all._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, which takes seconds to import

    def computed(self, x: Tensor, weights: Sequence[Tensor | None]) -> Tensor | None:
        """What eager code computes for x; None where these are not the weights of this layer, as in Weights."""
        again = self._again
        y = None if again is None else again.run(x, weights)
        if y is not None:
            return y
        if any(given is not own for given, own in zip(weights, self._weights())):
            return None
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        """`forward`, with nothing taken for granted."""
        hooks.check_parts(self)
        weights, choices = self._weights() if self._watch is None else self._watched(x), self._choices
        if self.layout.neurons is not None and not torch.compiler.is_compiling():
            self.layout.check(self)
        drop = self._modules[self._dropout] if self.drops else None
        if self.acts is None:
            path = PATHS[choices[self._class_of(x, choices)][1].path]
            if path.cuts and drop is None and not terms.reports(self) and not self._dense_because(x, weights):
                y = path.forward(self, x, weights, 0, None)
                self._remember(x, weights, lambda: path.again(self, x, weights, 0, None))
                return y
            y = self._by_torch(x, weights, drop)
            self._remember(x, weights, lambda: dense.again(**self.formula))
            return y
        if drop is not None and drop.p > 0:
            return self._by_torch(x, weights, drop)
        if checks.transformed() or self._rounded_otherwise(x):
            return by_torch(x, weights, lambda h: terms.report_hidden(self, h), **self.formula)
        at = self._class_of(x, choices)
        choice = choices[at][1]
        path = PATHS[choice.path]
        needed = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, *weights))
        if needed or terms.reports(self):
            if needed and self.layout.turns:
                self._before_learning(weights)
            return terms.learn(self, x, weights, path)
        # On a CPU counting is work of its own, so a layer that nobody planned does without.
        counted = path.packs and (self.plan is not None or weights.up.is_cuda)
        stats = self._counters(at, choices, weights) if counted else None
        y = path.forward(self, x, weights, choice.hot, stats)
        self._remember(x, weights, lambda: path.again(self, x, weights, choice.hot, stats), stats is not None)
        return y

    def _by_torch(self, x: Tensor, weights: Weights, dropout: nn.Dropout | None) -> Tensor:
        """The output for x [..., d_model] by torch's operations, with this dropout before the down projection, as the
        dense layer has it: what is reported is what was not dropped."""

        def seen(hidden: Tensor) -> Tensor:
            return terms.report_hidden(self, hidden if dropout is None else dropout(hidden))

        return by_torch(x, weights, seen, **self.formula)

    @staticmethod
    def _dense_because(x: Tensor, weights: Weights) -> bool:
        """Whether torch's operations have to compute a layer with thresholds on its inputs: where it is traced,
        transformed, needs a gradient, or is computed in another type."""
        if torch.compiler.is_compiling() or checks.transformed() or not isinstance(x, Tensor) or x.dim() == 0:
            return True
        return checks.needs_gradient(x, *weights) or torch.is_autocast_enabled(x.device.type)

    def _rounded_otherwise(self, x: Tensor) -> bool:
        """Whether autocast computes the gate in another type than the layer's, in which its threshold may be rounded to
        another value: then torch's operations ask the activation itself."""
        return self.acts.kind == "above" and isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)

    def _remember(self, x: Tensor, weights: Weights, made: Callable[[], Known | None], counts: bool = False) -> None:
        """Have `forward` compute inputs like this one as `made` says, while nothing of the layer changes."""
        if self.drops or self._watch is not None or type(x) is not Tensor or not x.numel():
            return
        if torch.compiler.is_compiling() or not checks.plain_eager() or checks.needs_gradient(x, *weights):
            return
        last = self._again
        known = made()
        if known is not None and counts:
            known = known._replace(counters=self._buffers["stats"])
        now = None if known is None else Again.remembered(last, self, x, weights, known)
        if now is not last:
            self._again = now

    def _before_learning(self, weights: Weights) -> None:
        """Have the weights lie as they were made if they get gradients. A layer that is trained keeps them so, also
        while it is evaluated in between, until it follows a plan anew: its training steps may have been captured as a
        graph. Compiled code cannot move weights."""
        if not any(t is not None and t.requires_grad for t in weights):
            return
        if not torch.compiler.is_compiling():
            self._learned |= self.training
            self.turn_back()
        elif self.reordered:
            raise InputError(
                "gradients of weights whose neurons are reordered (reorder=True), in compiled code; accepted: train() "
                "before it, or torch.no_grad"
            )

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

        Returns:
            plan: "none", "watching" (it will decide from what it sees) or "planned"; layout: how the weights lie,
            "plain", "turned" or "reordered", and why not reordered where they should be; extra_bytes; and classes, a
            dictionary for each class of token counts: tokens (its largest count, None for the last class), path, hot,
            and, of the calls without gradients, rows; mean_nnz, the packed entries of a row (with hot/cold those of the
            cold neurons); pooled, the share of rows that used the pool for overflow; lost, the share that was computed
            densely after all; planned_nnz, the mean_nnz that the plan expects; drift, mean_nnz over planned_nnz. What
            is not known is None: dense paths count nothing, nor does a layer without a plan on a CPU, nor kernels for
            small batches, which counting would slow down."""
        seen = self.stats.tolist() if "stats" in self._buffers else None
        classes = []
        for at, (tokens, choice) in enumerate(self._choices):
            packs = PATHS[choice.path].packs
            rows, kept, pooled, lost = seen[at] if seen and packs else (0, 0, 0, 0)
            planned = self.plan.packed_nnz(choice) if packs and isinstance(self.plan, LayerPlan) else None
            classes.append(
                {
                    "tokens": tokens if at < len(self._choices) - 1 else None,
                    "path": choice.path,
                    "hot": choice.hot,
                    "rows": rows or None,
                    "mean_nnz": kept / rows if rows else None,
                    "pooled": pooled / rows if rows else None,
                    "lost": lost / rows if rows else None,
                    "planned_nnz": planned,
                    "drift": kept / rows / planned if rows and planned else None,
                }
            )
        plan = "watching" if self._watch is not None else "none" if self.plan is None else "planned"
        layout = f"{self.layout.state}: {self.layout.why}" if self.layout.why else self.layout.state
        return {"plan": plan, "layout": layout, "extra_bytes": self.extra_bytes, "classes": classes}

    def extra_repr(self) -> str:
        d_ff, d_model = self.up.weight.shape
        paths = ", ".join(dict.fromkeys(str(choice) for _, choice in self._choices))
        planned = "" if self.plan is None else f", path={paths}"
        lossy = f", {self.formula['acts']}" if isinstance(self.formula["acts"], Lossy) else ""
        return f"d_model={d_model}, d_ff={d_ff}, tile={self.tile}, words={self.words}{planned}{lossy}"

    def _see(self, x) -> None:
        """Let the watch count this input, where nothing but a plain forward is going on; follow what it decides."""
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            return  # compiled code keeps what it was traced with
        if torch.is_grad_enabled() and self.up.weight.requires_grad:
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self._watch, self._aliases = None, {}  # the graph will read the buffers that are there now
            return
        if x.dim() == 0 or x.layout != torch.strided or torch.is_autocast_enabled(x.device.type):
            return  # autocast: the plan is for the layer's own dtype
        deciding = self._deciding
        try:
            watch = deciding.pop()  # nobody else has it meanwhile: of several threads, one decides
        except IndexError:
            return
        plan = None
        try:
            plan = watch.see(self, x)
        finally:
            if plan is None:  # not yet, or interrupted
                deciding.append(watch)
        if plan is not None:
            self.follow(plan)

    def _watched(self, x) -> Weights:
        """Let the watch see x. Then the weights, with aliases for those that may be moved while it watches: another
        thread may decide meanwhile, and torch's operations may not read a tensor that is being moved."""
        self._see(x)
        weights, aliases = self._weights(), self._aliases
        if not aliases or torch.compiler.is_compiling():
            return weights
        own = {name: getattr(weights, name) for name in aliases}
        if any(type(t) is not nn.Parameter or torch.is_grad_enabled() and t.requires_grad for t in own.values()):
            return weights
        if any(place(alias) != place(own[name]) for name, alias in aliases.items()):  # they would keep old memory
            self._aliases = {}
            return weights
        for alias in aliases.values():
            streams.enter(alias)
        return weights._replace(**aliases)

    def _weights(self) -> Weights:
        return Weights.of(self.gate, self.up, self.down)

    def _counters(self, at: int, choices: list, weights: Weights) -> Tensor | None:
        """The counters of this class of token counts, see inference.STATS."""
        stats = self._buffers.get("stats")  # once: another thread may have the layer follow another plan meanwhile
        if stats is not None and stats.device != weights.up.device:
            stats = self._renew_stats(choices)
        if stats is None or stats.shape[0] != len(choices):
            return None
        if torch.compiler.is_compiling():
            return stats[at]
        if stats.is_cuda:
            streams.enter(stats)
        rows = self._rows
        if rows is None or rows[0] is not stats:
            rows = self._rows = stats, [*stats.unbind()]
        return rows[1][at]

    def _renew_stats(self, choices: list) -> Tensor | None:
        """Counters at zero, int64 [classes, 4]; none where no path packs."""
        stats = None
        if any(PATHS[choice.path].packs for _, choice in choices):
            with torch.inference_mode(False):
                stats = torch.zeros(len(choices), len(STATS), dtype=torch.int64, device=self.up.weight.device)
            streams.allocated(stats)
        hold(self, {"stats": stats})
        return stats

    def __setattr__(self, name: str, value) -> None:
        vars(self)["_again"] = value if name == "_again" else None
        if name == "_again":
            return
        seated = isinstance(value, nn.Module) and name in vars(self).get("_names", ()) and "_learned" in vars(self)
        # Who puts another projection in the place of one, as adapters do, reads and changes the one that was there.
        if seated and self.reordered:
            self.turn_back()
        super().__setattr__(name, value)
        if seated:  # the one that is put back may have been written to unseen: merging adds to `weight.data`
            self._forget()

    def __getstate__(self) -> dict:
        """For copies and pickles: without views, which would become copies."""
        self.layout.check(self)
        return {**vars(self), "_views": {}, "_aliases": {}, "_again": None, "forms": {}}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.layout.accept(self)  # the weights of a copy are other tensors
        compiled.renew_handle(self)

    def _apply(self, fn, recurse=True):
        if self.reordered:
            self.turn_back()
        drop_views(self)  # `fn` would make copies of views
        super()._apply(fn, recurse)
        if self.acts is not None:  # another type or device may round the threshold
            self.acts = activations.known(**self.formula, gated=self._family.gate is not None, like=self.up.weight)
        self._forget()
        self._lay_out({choice.path for _, choice in self._choices})
        weights = self._weights()
        for name in {choice.path for _, choice in self._choices}:
            PATHS[name].moved(self, weights)
        self._renew_stats(self._choices)  # to_empty leaves anything in them
        compiled.renew_handle(self)
        return self

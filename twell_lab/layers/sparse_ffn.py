"""SparseFFN: a ReLU feed-forward layer that skips its silent neurons, in the place of the dense one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..core import InputError, TwellError
from ..formats import TILE, VALUE_DTYPES, WORDS, check_geometry
from ..ops import checks, functional
from ..ops.checks import plain_eager
from . import storage
from .activations import kernel_activation, kernel_inputs, kind_of
from .choice import DENSE, Choice, LayerPlan
from .experts import Expert
from .find import FeedForward, StandIn, examine, is_plain, layer_of, marks_of
from .lossy import Lossy, cut_of, zeroed
from .parts import Over, Weights, formula, part_at, parts_of, put
from .paths import PATHS
from .terms import learn, of_hidden, prepare

# What nn.Module keeps of a module that a SparseFFN shares with the dense one: both have the same parts and hooks.
_OWN = ("training", "_is_full_backward_hook")
_SHARED = [name for name in vars(nn.Module()) if name not in _OWN and "state_dict" not in name]
FOR_CUT = ("kept_inputs",)  # the paths for layers with thresholds on their inputs
ONLY_CUT = "is for layers with thresholds on their inputs (TEAL) and an activation that its kernel has"
_MOST_PREPARED = 64  # shapes of x whose calls a layer keeps
_grad_enabled, _STRIDED = torch.is_grad_enabled, torch.strided


class SparseFFN(nn.Module, StandIn):
    """A ReLU feed-forward layer, gated or plain, that computes only what its firing neurons need.

    It shares the projections, parameters, buffers and hooks of the dense module, under their own names. Its weights are
    rewritten once, in place, for the paths that the plan takes (layers.storage). A module in training mode is not
    rewritten; `train()` later changes nothing, stays exact and may be slow.

    A forward on plain tensors runs a path: ops.dispatch says which kernels run on which GPU, and what happens where
    a tile overflows. Where gradients are needed, ops.train is what runs. Whatever is unusual calls the dense
    module, with its projections as modules: transforms, traces, forward AD, autocast without gradients, tensor
    subclasses, other dtypes, and a projection that was replaced, hooked, parametrized or adapted after the swap. So
    do activations that no kernel computes (`acts` and `kept` are None), and gradients of all but the ReLU and its
    square.

    source: the dense module, which is run on a few rows beside the formula first. plan: a LayerPlan picks the path by
    the number of tokens; a Choice is one path for all, hot/cold then with the neurons in the order that they have;
    None: "twell" always. tied: ids of parameters that other modules of the model have, too. probed: whether up goes
    through the activation, too, where the probe was already asked. InputError for a module that computes something
    else, or has something on it that would be lost, and for a plan that does not fit."""

    why = ""  # why the weights were not rewritten

    def __init__(
        self,
        source: nn.Module,
        *,
        plan: LayerPlan | Choice | None = None,
        tile: int = TILE,
        words: int = WORDS,
        tied: Collection[int] = (),
        probed: bool | None = None,
    ):
        super().__init__()
        check_geometry(tile, words)
        reason, both = examine(source) if probed is None else (None, probed)
        if reason is not None:
            raise InputError(f"{type(source).__name__} {reason}")
        self.tile, self.words, self._tied = tile, words, frozenset(tied)
        self.parts: FeedForward = layer_of("", source)._replace(both=both)  # no children, as they are in a tuple
        self._owners, self.registered = self.parts.owners, not self.parts.family.inside
        if self.registered:
            vars(self).update({name: vars(source)[name] for name in _SHARED})
        self.seat: tuple[Any, HandOn, HandOn] | None = None  # inside a block: its activation and its projections
        functional.check_finite(self.weights().named())
        self._know_activation()
        self.forms: dict[str, Any] = {}  # by path (layers.paths.Converted)
        self._prepared: dict[tuple, Callable[[Tensor], Tensor]] = {}  # calls on a GPU, by what `_call` says
        self.learning: str | None = None
        self.told: list[tuple] | None = None  # where forwards report (layers.terms)
        self.reports = False
        # The neurons as they lie now, by their places in the dense module; None where they were left as they were.
        self.order: list[int] | None = None
        self.choices: list[tuple[int, Choice]] = []
        self.training = source.training
        self.register_load_state_dict_post_hook(SparseFFN._renew)
        self.marks = marks_of(source)
        self.follow(plan)
        self._saving = [m.register_state_dict_post_hook(storage.save_contiguous) for m in self._owners]

    @classmethod
    def from_module(
        cls, module: nn.Module, *, plan: LayerPlan | Choice | None = None, tile: int = TILE, words: int = WORDS
    ) -> SparseFFN:
        """Return a SparseFFN for a feed-forward module (or an OPT decoder layer); the two share their parameters."""
        return cls(module, plan=plan, tile=tile, words=words)

    source = property(lambda self: self.parts.module, doc="The dense module that this one stands for.")
    gate = property(lambda self: self.parts.gate)
    up = property(lambda self: self.parts.up)
    down = property(lambda self: self.parts.down)

    def weights(self) -> Weights:
        """Return the weights of gate, up and down, as they are now."""
        return Weights.of(*self.parts[2:5])

    def take_seat(self) -> None:
        """Take the place of the activation in a block that calls its projections itself, so that there is no module to
        swap: compute what lies between the block's up projection and its down projection, and both."""
        place = self.parts.family.activation
        acts = part_at(self.source, place)
        put(self.source, place, self)
        self.seat = acts, *(HandOn(m, self, first) for m, first in zip(self._owners, (True, False)))
        self.marks = marks_of(self.source)

    def feed_forward(self, name: str) -> FeedForward:
        """Return this layer as `feed_forwards` lists it, found under this name; inside a block it is named by it."""
        place = name if self.registered else name[: -len(self.parts.family.activation)].rstrip(".")
        return self.parts._replace(name=place, module=self)

    def follow(self, plan: LayerPlan | Choice | None) -> None:
        """Take the paths of a plan, and rewrite the weights for them. InputError for a plan of another shape, and for a
        path that does not compute this layer."""
        d_ff, d_model = self.up.weight.shape
        if plan is None:
            plan = DENSE if self.acts is None else Choice()
        if not isinstance(plan, (LayerPlan, Choice)):
            raise InputError(f"plan is a {type(plan).__name__}; a LayerPlan, a Choice or None is accepted")
        planned, own = isinstance(plan, LayerPlan), (d_model, d_ff, self.gate is not None)
        if planned and (sizes := (plan.d_model, plan.d_ff, plan.gated)) != own:
            said = "d_model {}, d_ff {}, gated {}"
            raise InputError(f"the plan is for {said.format(*sizes)}; {said.format(*own)} is accepted")
        choices = [*plan.choices.items()] if planned else [(1, plan)]
        for choice in {choice for _, choice in choices}:
            choice.check(d_ff)
            self._check_path(choice.path)
        if all(choice == choices[0][1] for _, choice in choices):
            choices = choices[-1:]  # nothing to look up, and nothing for torch.compile to guard
        self.restore()
        self.plan, self.choices = plan, choices
        hot = max(choice.hot for _, choice in choices)
        reads = {name: how for _, choice in choices for name, how in PATHS[choice.path].reads.items()}
        order = plan.order(hot).tolist() if hot and planned else None
        self.why = "the model was in training mode when it was swapped" if self.training else ""
        if reads and not self.training:
            self.why = storage.rewrite(self.parts[2:5], reads, order, self._tied)
            if not self.why:
                self.order = order
            elif order is not None:  # what cannot be put in order can be turned
                storage.rewrite(self.parts[2:5], reads)
        self._renew()

    def _check_path(self, name: str) -> None:
        path = PATHS[name]
        if path.cuts and self.kept is None:
            raise InputError(f"path {name!r} {ONLY_CUT}")
        if not path.cuts and self.acts is None and name != DENSE.path:
            what, others = self.parts.cut or kind_of(self.parts.acts), (DENSE.path, *(FOR_CUT if self.kept else ()))
            accepted = ", ".join(map(repr, others))
            raise InputError(f"path {name!r} does not compute this layer ({what}); accepted: {accepted}")
        try:
            path.fitted(self.weights())
        except TwellError as error:
            raise type(error)(f"path {name!r}: {error}") from None

    def restore(self) -> None:
        """Put the neurons back in the order that they had, and store the weights by rows."""
        if self.order is not None or any(PATHS[c.path].reads for _, c in self.choices):
            storage.restore(self.parts[2:5], self.order)
        self.order = None

    def choice(self, tokens: int) -> Choice:
        """Return what is done with so many tokens."""
        for most, choice in self.choices[:-1]:  # torch.compile of torch 2.6 knows no next(..., default)
            if tokens <= most:
                return choice
        return self.choices[-1][1]

    def runs(self, tokens: int | None = None) -> str:
        """Return what the layer, as it is now, computes of so many tokens (None: of the most): its choice, or "dense: "
        and why."""
        choice = self.choices[-1][1] if tokens is None else self.choice(tokens)
        why = "" if is_plain(self) else "a projection was replaced, hooked or adapted"
        why = why or PATHS[choice.path].refuses(self, self.weights())
        return f"{DENSE}: {why}" if why else str(choice)

    def learn(self, path: str | None) -> None:
        """Choose the path where gradients are needed: "dense" for all neurons, "twell" for those that fire, None for
        what the plan says of so many tokens. Raises InputError for another."""
        if path not in (None, "dense", "twell"):
            raise InputError(f"path is {path!r}; 'dense', 'twell' and None are accepted")
        self.learning = path
        self._prepared.clear()

    def tell(self, told: list[tuple] | None) -> None:
        """Append to `told`, a list of this layer's own, at each forward from now on; None: stop (layers.terms)."""
        self.told = told
        if told is not None and not self.reports:
            self.reports = True
            self._prepared.clear()

    def report(self, h: Tensor) -> Tensor:
        """Report what enters the down projection, h [..., d_ff], where somebody asks; returns it."""
        if self.told is not None:
            self.told.append(of_hidden(h))
        return h

    def forward(self, x: Tensor) -> Tensor:
        """Compute x [..., d_model] -> [..., d_model]."""
        if is_dynamo_compiling():
            return self._traced(x)
        if self._prepared and type(x) is Tensor and plain_eager() and x.is_cuda and x.layout is _STRIDED:
            run = self._prepared.get(self._call(x))
            if run is not None and x.is_contiguous() and is_plain(self):
                return run(x)
        return self._forward(x)

    def _call(self, x: Tensor) -> tuple:
        """Return what a prepared call is for: x of one shape, alignment, type and device, with gradients on or off; and
        each weight where it lies, as it lies."""
        grad = _grad_enabled()
        key = [x.shape, x.data_ptr() & 15, x.dtype, x.get_device(), grad, grad and x.requires_grad, self.told is None]
        for owner in self._owners:
            for t in owner._parameters.values():
                if t is not None:
                    key += id(t), t.data_ptr(), t.shape, t.stride(), t.dtype, grad and t.requires_grad
        return tuple(key)

    def _forward(self, x: Tensor) -> Tensor:
        """`forward`, with nothing taken for granted."""
        if type(x) is not Tensor or not is_plain(self):
            return self.dense(x)
        weights = self.weights()
        if not self._is_usual(x, weights):
            return self.dense(x)
        choice = self.choice(x.shape[:-1].numel())
        path, hot = PATHS[choice.path], choice.hot
        learns = self.told is not None or checks.needs_gradient(x, *weights)
        if not learns and path.name != DENSE.path and path.refuses(self, weights):
            return self.dense(x)
        if x.is_cuda and x.numel() and x.is_contiguous():
            run = prepare(self, x, weights, path) if learns else path.prepare(self, x, weights, hot)
            if run is not None:
                if len(self._prepared) >= _MOST_PREPARED:
                    self._prepared.clear()
                self._prepared[self._call(x)] = run
        return learn(self, x, weights, path) if learns else path.forward(self, x, weights, hot)

    def _is_usual(self, x: Tensor, weights: Weights) -> bool:
        """Return whether this is a plain call on such tensors: inference, or training, there also under autocast."""
        up, place, dtype = weights.up, x.get_device(), x.dtype
        if dtype not in VALUE_DTYPES or x.layout is not _STRIDED or x.dim() == 0 or x.shape[-1] != up.shape[1]:
            return False
        if not (x.is_cuda or x.is_cpu) or up.device != x.device:
            return False
        if checks.plain_eager():
            usual = all(t is None or t.dtype is dtype and t.get_device() == place for t in weights)
        else:
            learns = torch.is_autocast_enabled(x.device.type) and torch.is_grad_enabled()
            usual = learns and not (checks.transformed() or checks.watched(x))
        if usual and self._known_for != (up.dtype, up.device):
            self._know_activation()
        return usual and not self.drops

    # Whether a forward drops hidden activations at random, whatever the rate, and at the rate that it has.
    may_drop = property(lambda self: self.training and self.parts.drop is not None)
    drops = property(lambda self: self.may_drop and self.parts.drop.p > 0)

    def _traced(self, x: Tensor) -> Tensor:
        """Return what torch.compile sees: one operator, or torch's operations, which it fuses."""
        if not self._is_plain() or self.drops or x.dtype not in VALUE_DTYPES:
            return self.dense(x)
        weights = self.weights()
        if self.told is not None or checks.needs_gradient(x, *weights):
            sparse = any(choice.path == "twell" for _, choice in self.choices)
            return learn(self, x, weights, PATHS["twell" if sparse else DENSE.path])
        if not self._is_fit():
            return self.dense(x)
        tokens = x.shape[:-1].numel()
        choice = self.choice(tokens)
        if x.dtype != weights.up.dtype or choice.path not in (*PATHS, *FOR_CUT) or choice == DENSE:
            return self.dense(x)
        if choice.path in FOR_CUT:
            from ..ops.kept_inputs import FEW

            return self.by_kept_inputs(x, weights) if x.is_cuda and 0 < tokens <= FEW else self.dense(x)
        return functional.infer(x, *weights, choice.path, choice.hot, self.tile, self.words, self.acts)

    def by_kept_inputs(self, x: Tensor, weights: Weights) -> Tensor:
        """Compute a layer with thresholds on its inputs as two operators (ops.kept_inputs), without a threshold where
        these differ by column (WINA)."""
        gate, up, down, gate_bias, up_bias, down_bias = weights
        first = (up, None, up_bias, None) if gate is None else (gate, up, gate_bias, up_bias)
        product, kept, cut = torch.ops.twell_lab.kept_inputs, self.kept, self.parts.cut
        h = product(zeroed(x, cut.input) if cut.by_column else x, *first, kept.inputs, kept.kind)
        return product(zeroed(h, cut.hidden) if cut.by_column else h, down, None, down_bias, None, kept.hidden, None)

    def _is_plain(self) -> bool:
        return is_plain(self)

    def _is_fit(self) -> bool:
        """Return whether the weights lie as its paths read them."""
        weights = self.weights()
        same = all(t is None or t.dtype == weights.up.dtype for t in weights)
        return same and not any(PATHS[choice.path].refuses(self, weights) for _, choice in self.choices)

    # Both are asked while code is traced, not before each call.
    _is_plain._dynamo_marked_constant = _is_fit._dynamo_marked_constant = True

    def dense(self, x: Tensor) -> Tensor:
        """Compute the layer by the dense module, whatever is on its parts."""
        if self.seat is not None:
            acts, up, down = self.seat
            if x.shape[-1] != up.d_model:  # the up projection computed
                return self.report(acts(x))
            return down.beneath(self.report(acts(up.beneath(x))))
        if self.registered and self.told is None:
            return self.source.forward(x)
        # Compiled code takes no hooks: there a layer that reports is computed by its formula.
        traced, alone = torch.compiler.is_compiling(), not self.registered or isinstance(self.source, Expert)
        if alone or traced and self._is_plain() and not self.parts.cut:
            return formula(parts_of(self.source)._replace(both=self.parts.both), x, self.report)
        if traced:
            return self.source.forward(x)
        down = part_at(self.source, self.parts.family.down)
        with down.register_forward_pre_hook(lambda module, args: self.report(args[0])):
            return self.source.forward(x)

    def train(self, mode: bool = True) -> SparseFFN:
        super().train(mode)
        self._prepared.clear()
        if self.registered:
            self.source.training = mode
        return self

    def _know_activation(self) -> None:
        """Work out what kernels compute: `acts`, of the activation, and `kept`, with thresholds on the inputs (TEAL).
        Another type or device may round a threshold, and those by column are tensors there."""
        self.parts = self.parts._replace(cut=self.parts.cut and cut_of(self))
        self._known_for = self.up.weight.dtype, self.up.weight.device
        self.acts, self.kept = kernel_activation(self.parts), kernel_inputs(self.parts)

    def _renew(self, *_) -> None:
        """Have other representations of the weights made anew: a state was loaded, or the layer was moved."""
        self.forms.clear()
        self._prepared.clear()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._know_activation()
        self._renew()
        return self

    def __getstate__(self) -> dict:
        return {**vars(self), "forms": {}, "_prepared": {}}

    def extra_repr(self) -> str:
        d_ff, d_model = self.up.weight.shape
        paths = ", ".join(dict.fromkeys(str(choice) for _, choice in self.choices))
        lossy = f", {self.parts.acts}" if isinstance(self.parts.acts, Lossy) else ""
        return f"d_model={d_model}, d_ff={d_ff}, tile={self.tile}, words={self.words}, path={paths}{lossy}"

    def close(self) -> nn.Module:
        """Restore the weights, and return the dense module, which takes the layer's place again."""
        self.restore()
        for handle in self._saving:
            handle.remove()
        if self.seat is not None:
            acts, *projections = self.seat
            if part_at(self.source, self.parts.family.activation) is self:  # nothing else was put there
                put(self.source, self.parts.family.activation, acts)
            for projection in projections:  # one that another module wraps by now computes in any case
                HandOn.take_off(projection.module)
        elif self.registered:
            self.source.training = self.training
        return self.source


class HandOn(Over):
    """The forward of a projection of a block, as in OPT, GPT-2 and BERT, whose SparseFFN does all the work: it hands on
    what it gets, the one before the activation only while all parts are as they were. Who has to compute is told by the
    width of what comes in, [..., d_model] or [..., d_ff]."""

    def __init__(self, projection: nn.Module, sparse: SparseFFN, first: bool) -> None:
        super().__init__(projection)
        self.sparse, self.first, self.d_model = sparse, first, sparse.up.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        hands_on = x.shape[-1] == self.d_model and (not self.first or is_plain(self.sparse))
        return x if hands_on else self.beneath(x)

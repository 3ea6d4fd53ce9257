"""How the weights of a layer lie in memory while it infers: `down` turned (ops.turned), so that its transpose is no
copy; and, where that was asked for, all with their neurons in another order, so that hot/cold needs no copy either.

Turned weights have the same values. Reordered ones make an equivalent layer: rows of gate and up, columns of `down` and
the biases change their places, in new memory. Whoever reads the parameters sees this order. What is saved has the
neurons' own order, and what is loaded is taken to have it: hooks on the projections see to both.

Whoever writes to reordered weights, or replaces one, may mean either order. So the layer refuses to go on until its
weights are loaded or the change is accepted. It notices another Parameter, other `data`, and writes that raise a
version. It does not notice writes into `data` or the storage and steps of fused optimizers, which raise none. Compiled
code and captured CUDA graphs notice nothing."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from ..core import InputError
from ..ops import checks, copies, turned
from .find import FeedForward, StandIn
from .parts import parts_of
from .paths import PATHS
from .paths.path import hold
from .weights import Weights

DIMS = {"gate": 0, "up": 0, "down": 1, "gate_bias": 0, "up_bias": 0}  # by field of Weights: where its neurons are


class Seat:
    """The hooks on a projection whose weights do not lie as they were made.

    name: gate, up or down. neurons: their order, None for their own. dim: the dimension of the weight that counts
    neurons."""

    def __init__(self, part: nn.Linear, name: str, neurons: list[int] | None) -> None:
        self.name, self.neurons, self.dim = name, neurons, DIMS[name]
        self.seen: dict[str, tuple | None] | None = None
        self.loading: list[str] = []
        part.register_state_dict_post_hook(self)
        if neurons is not None:
            part.register_load_state_dict_pre_hook(self.take)
            part.register_load_state_dict_post_hook(self.taken)
            self.accept(part)

    def sits_on(self, part: nn.Linear) -> bool:
        """Whether its hooks are there."""
        return self in part._state_dict_hooks.values()

    def leave(self, part: nn.Linear) -> None:
        """Take the hooks off."""
        for table in (part._state_dict_hooks, part._load_state_dict_pre_hooks, part._load_state_dict_post_hooks):
            for key, hook in [*table.items()]:
                if self in (hook, getattr(getattr(hook, "hook", hook), "__self__", None)):
                    del table[key]

    def counted(self, part: nn.Linear) -> dict[str, Tensor]:
        """The tensors of the projection with an entry for each neuron."""
        names = ("weight",) if self.dim else ("weight", "bias")
        return {name: t for name in names if (t := part._parameters.get(name)) is not None}

    # ---- changes ----

    def accept(self, part: nn.Linear, names: Iterable[str] | None = None) -> None:
        """Take the tensors of these names, by default all, as they are now."""
        now = self.counted(part)
        kept = {} if names is None or self.seen is None else self.seen
        self.seen = {**kept, **{name: _trace(now.get(name)) for name in (now if names is None else names)}}

    def changed(self, part: nn.Linear) -> str | None:
        """The name of a tensor that is not what it was; None if there is none."""
        if self.seen is None:  # a copy of the projection alone
            self.accept(part)
        seen, now = self.seen or {}, self.counted(part)
        return next((name for name in {**seen, **now} if name not in seen or _trace(now.get(name)) != seen[name]), None)

    def check(self, part: nn.Linear) -> None:
        """InputError if a tensor that counts neurons is not what it was."""
        if self.neurons is not None and (name := self.changed(part)) is not None:
            raise InputError(
                f"the {name} of {self.name} was changed or replaced while the neurons of its SparseFFN were reordered "
                "(reorder=True), and nothing says in which order the new values are; accepted: load_state_dict of all "
                "weights, or accept_changes() where they are in the order that the parameters have. Before the next "
                "change: twell_lab.densify"
            )

    # ---- saving and loading ----

    def __call__(self, part: nn.Linear, state: dict, prefix: str, _) -> None:
        """What is saved has the plain layout, as some formats demand, and the neurons in their own order."""
        self.check(part)
        counted = {} if self.neurons is None else self.counted(part)
        for name, parameter in part.named_parameters():
            saved = state.get(prefix + name)
            if name in counted and saved is parameter:
                raise InputError(
                    "state_dict(keep_vars=True) of a layer whose neurons are reordered (reorder=True); accepted: "
                    "without keep_vars, or after twell_lab.densify"
                )
            if name in counted and saved is not None:
                saved = _picked(saved, self.dim, torch.tensor(self.neurons, device="cpu").argsort())
            if type(saved) is Tensor:  # and not the parameter itself, as with keep_vars
                state[prefix + name] = saved.contiguous()

    def take(self, part: nn.Linear, state: dict, prefix: str, *_) -> None:
        """What is loaded gets the order that the neurons have here."""
        own = self.counted(part)
        self.loading = [name for name in own if isinstance(state.get(prefix + name), Tensor)]
        for name in self.loading:
            loaded = state[prefix + name]
            if loaded.shape == own[name].shape:  # of others torch says what is wrong
                state[prefix + name] = _picked(loaded, self.dim, torch.tensor(self.neurons, device="cpu"))

    def taken(self, part: nn.Linear, _) -> None:
        """What was loaded is what there is from now on."""
        self.accept(part, self.loading)

    def __getstate__(self) -> dict:
        return {**vars(self), "seen": None}  # the weights of a copy are other tensors


def _trace(t: Tensor | None) -> tuple | None:
    return None if t is None else (id(t), *copies.trace(t))


def _picked(t: Tensor, dim: int, order: Tensor) -> Tensor:
    return t.detach().index_select(dim, order.to(t.device))


class Layout:
    """How the weights of one SparseFFN lie.

    turns, reorders: whether they may be turned, and then also reordered. holders: as for `obstacle`. neurons: the order
    in which they lie, None for their own. why: what kept them from being reordered the last time that they should have
    been."""

    def __init__(self, turns: bool = False, reorders: bool = False, holders: Holders | None = None) -> None:
        self.turns, self.reorders, self.holders = turns, reorders, holders
        self.neurons: list[int] | None = None
        self.why: str | None = None
        self.seats: dict[str, Seat] = {}  # gate, up, down

    @property
    def state(self) -> str:
        """One word: plain, turned or reordered."""
        return "reordered" if self.neurons is not None else "turned" if self.seats else "plain"

    def settle(self, layer, order: list[int] | None, turn: Collection[str]) -> None:
        """Have the weights lie so, as far as that can be done unseen. order: of the neurons, None for their own. turn:
        which of gate, up and down are to be turned; in a reordered layer `down` always is, and no other. Raises what
        `restore` does."""
        if not self.turns:
            return
        order = order if self.reorders else None
        if self.neurons is not None and self.neurons != order:
            self.restore(layer)
        asks = order is not None and self.neurons is None
        self.why = obstacle(layer.feed_forward(""), self.holders) if asks else None
        if order is not None and self.neurons is None and self.why is None:
            self._reorder(layer, order)
        for name, part in _parts(layer).items():
            if name != "down" and name not in turn and name not in self.seats:
                continue
            seat, weight = self.seats.get(name), part._parameters.get("weight")
            if type(part) is not nn.Linear or weight is None:
                continue
            if self.neurons is not None:
                # It was loaded anew.
                if name == "down" and seat and not turned.is_turned(weight) and seat.changed(part) is None:
                    turned.turn(weight, _own(layer))
                    seat.accept(part)
            elif name not in turn or weight.device.type not in turned.DEVICES:
                self._turn_back(layer, name)
            elif turned.turn(weight, _own(layer)) and (seat is None or not seat.sits_on(part)):
                self.seats[name] = Seat(part, name, None)

    def restore(self, layer) -> None:
        """Have the weights lie as they were made; turned ones as far as that can be done unseen. Raises InputError
        where reordered ones were changed, and while a CUDA graph is captured."""
        parts = _parts(layer)
        if self.neurons is not None:
            self.check(layer)
            if turned.capturing(layer.up.weight):
                raise InputError(
                    "a CUDA graph is being captured of a forward with gradients, or of a change of plan, in a layer "
                    "whose neurons are reordered (reorder=True); accepted: train() before"
                )
            drop_views(layer)
            turned.move(_moved(parts, torch.tensor(self.neurons, device="cpu").argsort(), turn=False))
            for name, seat in self.seats.items():
                seat.leave(parts[name])
            self.neurons, self.seats = None, {}
            return
        for name in [*self.seats]:
            self._turn_back(layer, name)

    def _turn_back(self, layer, name: str) -> None:
        """Have one weight, of those that keep their order, lie as it was made, as far as that can be done unseen."""
        part, seat = _parts(layer).get(name), self.seats.get(name)
        if seat is None or type(part) is not nn.Linear or not seat.sits_on(part):
            return
        drop_views(layer)  # they would be other users of the storage
        if turned.turn_back(part.weight):
            seat.leave(part)
            del self.seats[name]

    def _reorder(self, layer, order: list[int]) -> None:
        parts = _parts(layer)
        drop_views(layer)
        for name, seat in self.seats.items():
            seat.leave(parts[name])
        turned.move(_moved(parts, torch.tensor(order, device="cpu"), turn=True))
        self.seats = {name: Seat(part, name, order) for name, part in parts.items()}
        self.neurons = order

    def check(self, layer) -> None:
        """InputError where reordered weights were changed, as far as that is noticed (see the top of this module)."""
        if self.neurons is not None and not checks.watched(layer.up.weight):
            parts = _parts(layer)
            for name, seat in self.seats.items():
                seat.check(parts[name])

    def doubt(self) -> None:
        """Count reordered weights as changed."""
        for seat in self.seats.values():
            seat.seen = dict.fromkeys(seat.seen or ("weight",))

    def accept(self, layer) -> None:
        """Take reordered weights as they are now, in the order in which they lie. InputError for another number of
        neurons."""
        for name, part in _parts(layer).items() if self.neurons is not None else ():
            if part.weight.shape[DIMS[name]] != len(self.neurons):
                raise InputError(
                    f"{name} has shape {list(part.weight.shape)}; accepted: {len(self.neurons)} neurons, as before"
                )
            if self.seats[name].sits_on(part):
                self.seats[name].accept(part)
            else:
                self.seats[name] = Seat(part, name, self.neurons)


def _parts(layer) -> dict[str, nn.Linear]:
    parts = {"gate": layer.gate, "up": layer.up, "down": layer.down}
    return {name: part for name, part in parts.items() if part is not None}


def _moved(parts: dict[str, nn.Linear], order: Tensor, turn: bool) -> list[tuple[Tensor, Tensor]]:
    """Each tensor that counts neurons, and its values in that order; `down` turned or plain. All of them, before the
    first one moves: there may be no memory for them."""
    found = []
    with torch.inference_mode(False):
        weights = Weights.of(parts.get("gate"), parts["up"], parts["down"]).named()
        for name, dim in DIMS.items():
            if name in weights:
                weight = weights[name]
                there = order.to(weight.device)
                rows = weight.detach().t().index_select(0, there).t() if dim else _picked(weight, 0, there)
                found.append((weight, rows if turn else rows.contiguous()))
    return found


def drop_views(layer) -> None:
    """Have the layer hold no views of `down`."""
    hold(layer, dict.fromkeys([*layer._views, *(path.noted for path in PATHS.values())]))


def _own(module: nn.Module) -> Sequence[Tensor]:
    """Tensors on the weights of a layer that are its own: none of a dense one."""
    return module.views() if isinstance(module, StandIn) else ()


# ---- what can be done with a layer ----


def obstacle(found: FeedForward, holders: Holders | None = None) -> str | None:
    """Why the neurons of a layer, dense or swapped, cannot be reordered unseen; None if they can. holders: of several
    layers, this one among them, if they are known."""
    module, parts = found.module, _parts(found)
    family = None if isinstance(module, StandIn) else family_of(module)
    if not module.registered if isinstance(module, StandIn) else family is not None and family.inside:
        return "its projections stay in the block, which moves and loads them by itself"
    for name, part in parts.items():
        if type(part) is not nn.Linear:
            return f"{name} is a {type(part).__name__}, not a plain torch.nn.Linear"
    weights = Weights.of(found.gate, found.up, found.down).named()
    counted = {name: t for name, t in weights.items() if name in DIMS}
    for name, t in counted.items():
        if t.device.type not in turned.DEVICES:
            return f"it is on {t.device}; weights are moved on {' and '.join(turned.DEVICES)} alone"
        if not t.is_contiguous() and not (name == "down" and turned.is_turned(t)):
            return f"{name} is not contiguous"
        if t.grad is not None:
            return f"{name} has a gradient, in the neurons' own order"
    why = _tie(parts, counted, _own(module), holders or Holders([found]))
    if why is not None and not turned.capturing(found.up.weight):
        gc.collect()  # what nobody reads any more, such as a compiler's notes, may not have gone yet
        why = _tie(parts, counted, _own(module), Holders([found]))
    return why


def _tie(
    parts: dict[str, nn.Linear], counted: dict[str, Tensor], own: Sequence[Tensor], holders: Holders
) -> str | None:
    for name, t in counted.items():
        if not turned.movable(t, own):
            return f"{name} is tied, sharded, or can be changed unseen"
    own_dicts = [part._parameters for part in parts.values()]
    if holders.in_part([*parts.values()], []) or holders.in_part([*counted.values()], own_dicts):
        return "another module has some of its projections or weights, and not all"
    return None


class Holders:
    """Which dictionaries, such as those of modules, hold the projections and weights of some layers.

    Finding out takes a look at every object that Python knows, as long for all layers of a model as for one."""

    def __init__(self, layers: Iterable[FeedForward]) -> None:
        members = []
        for found in layers:
            members += [*_parts(found).values(), *Weights.of(found.gate, found.up, found.down).named().values()]
        self._of: dict[int, list[dict]] = {id(each): [] for each in members}
        for holder in gc.get_referrers(*members):
            if isinstance(holder, dict) and "__builtins__" not in holder:
                for at in self._of.keys() & set(map(id, [*holder.values()])):
                    self._of[at].append(holder)

    def in_part(self, members: list, own: list[dict]) -> bool:
        """Whether a dictionary holds some of these members and not all. own: dictionaries that may."""
        ids = {id(each) for each in members}
        for holder in [holder for each in ids for holder in self._of[each]]:
            some = ids.intersection(map(id, [*holder.values()]))
            if len(some) < len(ids) and not any(holder is each for each in own):
                return True
        return False


def copy_bytes(found: FeedForward, reorders: bool, holders: Holders | None = None) -> dict[str, int]:
    """For each path, the bytes of the copies of weights that a layer, dense or swapped, holds for it where it infers,
    once `sparsify` has swapped it. reorders: whether its neurons may be reordered. holders: as for `obstacle`."""
    with torch.no_grad():  # as where it infers: a weight that is stored transposed is read as it is then
        weights = Weights.of(found.gate, found.up, found.down)
    reordered = reorders and obstacle(found, holders) is None
    own = _own(found.module)
    turns = {"down"} if reordered else set()
    for name, part in _parts(found).items():
        weight = getattr(weights, name)
        if turned.is_turned(weight) or type(part) is nn.Linear and turned.turns(weight, own):
            turns.add(name)
    return {name: path.copy_bytes(weights, turns, reordered) for name, path in PATHS.used().items()}

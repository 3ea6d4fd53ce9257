"""Asking a feed-forward layer what it computes: it is run on a few rows beside the formula of its parts, without
gradients and with them. `check` says what is compared, and what this cannot see."""

from __future__ import annotations

import inspect
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _disable_current_modes

from ..core import InputError
from .anatomy import HOOKS, family_of, is_relu, raise_all, title
from .experts import Expert, experts_of, mixed, stored
from .families import Family
from .parts import Cut, HandOn, put
from .shards import is_sharded, part_of, split_of

SCALES = (0.01, 1.0, 1000.0)  # of the inputs that a layer is asked with: clamps and tops show at one, norms at another
OF_SCALES = [f"inputs of scale {each:g}" for each in SCALES]
ROWS = 4
MODES = ("evaluation", "training")
_GLOBAL_HOOKS = [each for each in vars(torch_modules) if each.startswith(("_global_forward", "_global_backward"))]


def check_all(
    layers: Iterable[tuple[str, nn.Module]],
    both: bool = False,
    learns: bool = True,
    modes: tuple[str, ...] = MODES,
    each: bool = True,
) -> set[int]:
    """`check` each of them by name; one InputError for all that fail. both: take those with two ReLUs as well, and
    return their ids. learns, modes: as for `check`. each: whether layers with the code and the settings of one that
    passed are asked as well, for which only a forward that looks at the values of its weights, or counts its calls,
    would be a reason."""
    reasons: list[str] = []
    two: set[int] = set()
    asked: set[int] = set()
    passed: set[tuple] = set()
    for name, module in layers:
        if isinstance(module, Expert):  # all of them at once
            name, module = name.rpartition(".")[0], module.of
            if id(module) in asked:
                continue
            asked.add(id(module))
        code = () if each else _code(module)
        if code in passed:
            continue
        try:
            if stored(module):
                check_experts(name, module, modes)
            elif check(name, module, both, learns, modes):
                two.add(id(module))
            elif code:
                passed.add(code)
        except InputError as error:
            reasons.append(str(error))
    raise_all(reasons)
    return two


def _code(module: nn.Module) -> tuple:
    """What two modules share only if they run the same code with the same settings on weights of the same kind; ()
    where there are buffers, whose values may matter.

    Objects are told apart by their ids: they must live as long as what is returned."""
    found: list[tuple] = []
    for name, each in module.named_modules():
        if any(t is not None for t in each._buffers.values()):
            return ()
        held = {key: value for key, value in vars(each).items() if key not in _OF_TORCH}
        found.append((name, type(each), *((key, *_setting(value)) for key, value in sorted(held.items()))))
        found += [(key, *_kind(t)) for key, t in each._parameters.items()]
    return tuple(found)


# What says nothing of what a module computes when it is asked: no hook is called, and tensors are looked at apart.
_OF_TORCH = {*HOOKS, "_compiled_call_impl", "_parameters", "_buffers", "_modules", "training"}


def _setting(value: object) -> tuple:
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return type(value), repr(value)
    return (type(value),) if isinstance(value, (dict, set, list)) and not value else (type(value), id(value))


def _kind(t: Tensor | None) -> tuple:
    return () if t is None else (type(t), t.dtype, t.device, tuple(t.shape), t.layout)


def check_experts(name: str, module: nn.Module, modes: tuple[str, ...] = MODES) -> None:
    """`check` for a module of routed experts (twell_lab.layers.experts), which is asked with drawn choices and weights
    of the experts; without gradients alone, since where those are needed it goes on to compute as it did.

    Raises InputError naming the module and its difference."""
    experts = experts_of(module)
    trial = _Trial(title(name, module), module, experts[0].family)
    _trying(trial, lambda: _ask(trial, modes))


def check(name: str, module: nn.Module, both: bool = True, learns: bool = True, modes: tuple[str, ...] = MODES) -> bool:
    """InputError naming the layer and its difference, unless it computes down(act(gate(x)) * up(x)), or
    down(act(up(x))); with `both` also down(relu(gate(x)) * relu(up(x))), of which it returns True.

    It is run as it is (a decoder layer whole) on rows at each of SCALES, in each of `modes` (both, unless the caller
    runs it in one alone), without gradients, in its own dtype on its device, and is left as it was: random state,
    buffers, attributes and modes. No hook sees it. It is asked with its own weights, unless those are on meta, and with
    drawn ones: its own may be zero, not finite, or fire too few neurons to show a difference. Outputs may differ as
    rounding can: row by row, the norm by 2 eps in 16-bit types and 64 in others; a layer in 16 bits that does not give
    the very bits of the formula is asked in float32 once more.

    Then, unless it is told that the layer is not to learn, with gradients, for rows of scale 1, drawn weights and one
    gradient of the output: the output and the gradients of x and of the projections' weights and biases (frozen ones
    too) are the formula's very bits, or within 64 eps of float32 by their norm; where they are not, or in 16 bits, it
    is asked in float64 once more. No .grad is written. A layer that raises with gradients (it cannot be trained, or not
    by torch.autograd.grad) has none to compare, and is taken for its values.

    A module of its own is refused as well if it writes to its input, or sets on itself or on a part a new attribute,
    one that was None, or a tensor: after a swap it would be missing, or old.

    What this cannot see: anything but the rows asked with, which are len(SCALES) * ROWS random ones [3, 4, d_model] or
    [12, d_model], whichever the module takes, and one alone [1, 1, d_model] and [1, d_model]. So a layer that does
    something else for other numbers of tokens, other values, after some calls, or in a second derivative, is taken. A
    list or dictionary that a forward writes to keeps what these runs wrote, and gets nothing from a sparse layer."""
    trial = _Trial(title(name, module), module, family_of(module))

    def ask(trial: _Trial) -> None:
        _ask(trial, modes)
        if learns:
            with torch.inference_mode(False), torch.enable_grad():
                _compare_gradients(trial)

    try:
        _trying(trial, lambda: ask(trial))
    except InputError as error:
        if not both or trial.family is None or trial.family.gate is None or not is_relu(trial.family.acts(module)):
            raise
        try:  # Bamboo's and TurboSparse's dReLU
            _trying(trial, lambda: ask(replace(trial, both=True)))
        except InputError:
            raise error from None
        return True
    return False


def _ask(trial: _Trial, modes: tuple[str, ...]) -> None:
    """Compare what the layer gives without gradients, with its own weights and with drawn ones."""
    if not trial.in_block:
        _check_carried(trial)
    _check_widths(trial)
    for own in (True, False) if _readable(trial.module) else (False,):
        same = _compare(trial if own else trial.drawn(), modes)
        if not same and next(trial.module.parameters()).dtype.itemsize < 4:
            _compare(trial.cast(torch.float32) if own else trial.drawn(torch.float32), modes)


def _trying(trial: _Trial, ask: Callable[[], None]) -> None:
    """Ask; an InputError for whatever the layer raises."""
    try:
        # FakeTensorMode would hide the values, and a user's mode would see ours.
        with _disable_current_modes(), torch.no_grad():
            ask()
    except InputError:
        raise
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise InputError(
            f"{trial.where} could not be asked what it computes: run on a few rows of its width it raised "
            f"{type(error).__name__}: {said:.200}; accepted: a layer that takes x alone, or experts that take x, their "
            "numbers and their weights"
        ) from error


# ---- one layer, in one mode, with one set of weights ----


def _readable(module: nn.Module) -> bool:
    """Whether the layer's own weights hold numbers."""
    return not any(_empty(t) for t in (*module.parameters(), *module.buffers()))


def _empty(t: Tensor) -> bool:
    return t.is_meta or hasattr(t, "fake_mode")


@dataclass(frozen=True)
class _Trial:
    """A layer that is asked in one of MODES, with one set of weights.

    where: what messages call the layer. stand_ins: what takes the place of parameters and buffers meanwhile, by their
    ids; the others keep their values. both: whether the formula has the activation on up as well."""

    where: str
    module: nn.Module
    family: Family
    mode: str = "evaluation"
    stand_ins: dict[int, Tensor] = field(default_factory=dict)
    both: bool = False

    @property
    def in_block(self) -> bool:
        return self.family.inside

    @property
    def parts(self) -> list:
        """Gate or None, up, down, activation; of the first of several experts."""
        return self.family.parts(experts_of(self.module)[0] if self.routed else self.module)

    @property
    def routed(self) -> bool:
        """Whether the module holds routed experts."""
        return stored(self.module) is not None

    def formula(self, x: Tensor) -> Tensor:
        return _formula(self.parts, x, self.family.drop(self.module), self.both)

    def cast(self, dtype: torch.dtype) -> _Trial:
        """This trial with the module's own weights in another type."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        cast = {id(t): t.to(dtype) if t.is_floating_point() else t.clone() for t in tensors}
        return replace(self, stand_ins=cast)

    def drawn(self, dtype: torch.dtype | None = None) -> _Trial:
        """This trial with drawn weights, and the buffers that hold numbers. dtype: another type for all of them."""
        parameters, buffers = [*self.module.parameters()], [*self.module.buffers()]
        # Of a length that is prime: where the numbers are repeated, no two rows of a weight are alike.
        many = min(1_048_573, sum(t.numel() for t in (*parameters, *buffers)))
        made: dict[int, Tensor] = {}
        moved: dict[torch.device, Tensor] = {}
        turned = 0
        for t in (*parameters, *(each for each in buffers if _empty(each))):
            unreal = t.is_meta or t.device.type == "cuda" and not torch.cuda.is_available()
            device = torch.device("cpu") if unreal else t.device
            if device not in moved:
                moved[device] = _numbers(many).to(device)
            values = moved[device].roll(-turned) * (t.shape[-1] ** -0.5 if t.dim() > 1 else 1.0)
            values = values.to(dtype if dtype and t.is_floating_point() else t.dtype)
            turned += len(made) + 1  # other ones for the next
            made[id(t)] = values.repeat(-(-t.numel() // max(1, len(values))))[: t.numel()].reshape(t.shape)
        for t in buffers:
            if dtype and t.is_floating_point() and not _empty(t):
                made[id(t)] = t.to(dtype)
        return replace(self, stand_ins=made)

    def rows(self, scales: tuple[float, ...] = SCALES) -> Tensor:
        """Random rows [scales, ROWS, d_model] in the layer's dtype, on its device; the same each time."""
        with replace(self, mode="evaluation").untouched():  # reading a parametrized weight may change its buffers
            weight = self.parts[1].weight
            shape, generator = (len(scales), ROWS, weight.shape[1]), torch.Generator("cpu").manual_seed(1)
            rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return (rows * torch.tensor(scales, device="cpu")[:, None, None]).to(weight.device, weight.dtype)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Within this context the module is in this mode, on these weights and on copies of its buffers, without hooks;
        afterwards it is as it was."""
        modules = list(self.module.modules())
        tables = [t for each in modules for t in (vars(each), each._parameters, each._buffers, each._modules)]
        before = [(table, dict(table)) for table in tables]
        devices = {t.device for t in (*self.module.parameters(), *self.stand_ins.values())}
        python, numpys = random.getstate(), numpy.random.get_state()
        hooks = {kind: getattr(torch_modules, kind) for kind in _GLOBAL_HOOKS}
        with ExitStack() as stack:
            cuda = [each.index for each in devices if each.type == "cuda" and torch.cuda.is_available()]
            stack.enter_context(torch.random.fork_rng(cuda, enabled=True))
            for kind in {each.type for each in devices} & {"cpu", "cuda"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            try:
                for kind, found in hooks.items():
                    setattr(torch_modules, kind, OrderedDict() if isinstance(found, dict) else found)
                self._stand_in(modules)
                self.module.train(self.mode == "training")
                yield
            finally:
                for table, held in before:
                    table.clear()
                    table.update(held)
                for kind, found in hooks.items():
                    setattr(torch_modules, kind, found)
                random.setstate(python)
                numpy.random.set_state(numpys)

    def _stand_in(self, modules: list[nn.Module]) -> None:
        buffers = {id(t): t for each in modules for t in each._buffers.values() if t is not None}
        buffers = {key: self.stand_ins.get(key, t).clone() for key, t in buffers.items()}
        for each in modules:
            if split_of(each):  # what this process holds is asked as a layer of its own: the others are not
                del each.forward
            for key, t in each._parameters.items():
                if t is not None and (id(t) in self.stand_ins or is_sharded(t)):
                    each._parameters[key] = nn.Parameter(part_of(self.stand_ins.get(id(t), t)), requires_grad=False)
            for key, t in each._buffers.items():
                each._buffers[key] = buffers.get(id(t))
            # No hook is called, nor what Module.compile() made: to compile takes longer than to ask.
            vars(each).update({kind: OrderedDict() for kind in HOOKS}, _compiled_call_impl=None)
            vars(each).update({key: t.clone() for key, t in vars(each).items() if isinstance(t, Tensor)})


@lru_cache(2)
def _numbers(many: int) -> Tensor:
    """So many normal numbers on the CPU, float32; the same each time, and not to be written to."""
    return torch.randn(many, generator=torch.Generator("cpu").manual_seed(2), dtype=torch.float32, device="cpu")


def _formula(parts: list, x: Tensor, drop: nn.Dropout | None = None, both: bool = False) -> Tensor:
    """The output for x [..., d_model] of these parts (_Trial.parts), of which each weight is read once."""
    gate, up, down, activation = parts
    if gate is None:
        hidden = activation(linear(x, up.weight, up.bias))
    else:
        beside = linear(x, up.weight, up.bias)
        hidden = activation(linear(x, gate.weight, gate.bias)) * (activation(beside) if both else beside)
    return linear(hidden if drop is None else drop(hidden), down.weight, down.bias)


# ---- what is looked at before it is run ----


def _check_carried(trial: _Trial) -> None:
    """InputError for parameters and buffers that belong to none of the projections."""
    carried = trial.family.carried(trial.module)
    own = {name for part in trial.parts[:3] if isinstance(part, Cut) and trial.routed for name in part.names}
    lost = [
        f"{at}.{name}" if at else name
        for at, each in trial.module.named_modules()
        if id(each) not in carried
        for name, held in (*each._parameters.items(), *each._buffers.items())
        if held is not None
        and not (each is trial.module and name in own)
        and not (trial.routed and at.partition(".")[0].isdigit())  # what a SparseFFN of an expert holds
    ]
    if lost:
        raise InputError(
            f"{trial.where} has parameters or buffers that a sparse layer does not carry: {', '.join(lost[:5])}; "
            "accepted: those of its projections alone"
        )


def _check_widths(trial: _Trial) -> None:
    """InputError unless the layer returns rows as wide as it takes, and gate and up are of one shape."""
    with trial.untouched():
        gate, up, down = (None if part is None else tuple(part.weight.shape) for part in trial.parts[:3])
    if down != up[::-1] or gate not in (None, up):
        seats = (trial.family.gate, trial.family.up, trial.family.down)
        sizes = [f"{seat} {list(shape)}" for seat, shape in zip(seats, (gate, up, down)) if shape]
        raise InputError(
            f"{trial.where} has weights of other shapes: {', '.join(sizes)}; accepted: up (and gate) [d_ff, d_model], "
            "down [d_model, d_ff]"
        )


# ---- what it gives, beside the formula ----

Answer = tuple[Any, Tensor, list[str]]  # what the layer gives, what the formula gives, what to call each part of them


def _ask_module(trial: _Trial) -> Iterator[Answer]:
    """A module of its own, for rows of every scale and for one row."""

    def beside(x: Tensor) -> tuple[Any, Tensor]:
        found = _run(trial, x)
        with trial.untouched():
            return found, trial.formula(x)

    x = trial.rows()
    yield *_first_taken(beside, (x, x.flatten(0, 1))), OF_SCALES
    one = x[1:2, :1]
    for given in (one, one.flatten(0, 1)) if trial.stand_ins else ():  # one set of weights is enough to try one row
        try:
            found, expected = beside(given)
        except InputError:
            raise
        except Exception:  # wants a batch, or none
            continue
        yield found, expected, ["one row alone"]


def _ask_experts(trial: _Trial) -> Iterator[Answer]:
    """A module of experts, for rows of every scale, each with as many experts as there are, up to four."""
    x = trial.rows().flatten(0, 1)
    many, draw = len(experts_of(trial.module)), torch.Generator("cpu").manual_seed(4)
    chosen = torch.rand(len(x), many, generator=draw, device="cpu").argsort(1)[:, :4].to(x.device)
    weights = torch.rand(chosen.shape, generator=draw, device="cpu").to(x)
    with trial.untouched():
        given = x.clone()
        found = type(trial.module).forward(trial.module, given, chosen, weights)
    if not _identical(given, x):
        raise InputError(f"{trial.where} writes to its input; accepted: a forward that leaves it as it was")
    with trial.untouched():
        experts = experts_of(trial.module)
        expected = mixed(x, chosen, weights, many, lambda number, rows, _: experts[number](rows))
    yield found, expected, OF_SCALES


def _first_taken(ask: Callable, inputs: Iterable[Tensor]):
    """The answer to the first input that raises nothing: layers of experts want [tokens, d_model], most others know a
    batch too."""
    *others, last = inputs
    for x in others:
        try:
            return ask(x)
        except InputError:
            raise
        except Exception:
            continue
    return ask(last)


def _run(trial: _Trial, x: Tensor):
    """What a module of its own returns; InputError if it leaves something behind, on its input or on itself."""
    given = x.clone()
    with trial.untouched():
        # What lies within projections is carried whole.
        within = trial.family.carried(trial.module) - {id(part) for part in trial.family.owners(trial.module).values()}
        modules = [(name, each) for name, each in trial.module.named_modules() if id(each) not in within]
        before = _attributes(modules)
        found = trial.module(given)
        after = _attributes(modules)
    kept = [
        name
        for name, value in after.items()
        if name not in before or value is not before[name] and (before[name] is None or isinstance(value, Tensor))
    ]
    if kept:
        raise InputError(
            f"{trial.where} sets {', '.join(kept[:5])} in its forward, which a sparse layer does not; accepted: a "
            "forward that keeps nothing on the module"
        )
    if not _identical(given, x):
        raise InputError(
            f"{trial.where} writes to its input, which a sparse layer does not; accepted: a forward that leaves it as "
            "it was"
        )
    return found


def _attributes(modules: list[tuple[str, nn.Module]]) -> dict[str, object]:
    """What is set on them, by name; what a cached_property keeps is nobody's loss."""
    return {
        f"{at}.{key}" if at else key: value
        for at, each in modules
        for table in (vars(each), each._parameters, each._buffers, each._modules)
        for key, value in table.items()
        if not isinstance(getattr(type(each), key, None), cached_property)
    }


def _ask_block(trial: _Trial) -> Iterator[Answer]:
    """A decoder layer, which has the parts among others and is run whole: its down projection beside the formula of its
    up projection's input; and what it returns beside what it returns with the formula in the activation's seat, since
    nothing else may read what lies between.

    The up projection is given rows of every scale, whatever norm comes before it."""
    x = trial.rows()
    given: list[Tensor] = []
    made: list[Tensor] = []

    def rows_for(hidden: Tensor) -> Tensor:
        if hidden.numel() != x.numel() or hidden.shape[-1] != x.shape[-1]:
            raise InputError(
                f"{trial.where} gives {trial.family.up} {list(hidden.shape)} where it is given {list(x.shape)}; "
                "accepted: a layer whose feed-forward part takes each of its rows"
            )
        return x.reshape(hidden.shape)

    with trial.untouched():
        up, down = trial.family.owners(trial.module).values()
        by_up, by_down = up.forward, down.forward

        def into_up(hidden: Tensor) -> Tensor:
            given.append(rows_for(hidden))
            return by_up(given[-1])

        def out_of_down(hidden: Tensor) -> Tensor:
            made.append(by_down(hidden))
            return made[-1].clone()  # what follows may write to it

        up.forward, down.forward = into_up, out_of_down
        whole = _tensors(trial.module(x.clone(), *_others(trial, x)))
    if len(given) != 1 or len(made) != 1:
        calls = f"{trial.family.up} {len(given)} times and {trial.family.down} {len(made)} times"
        raise InputError(f"{trial.where} calls {calls} in a forward; accepted: once each")
    with trial.untouched():
        expected = trial.formula(given[0])
    yield made[0], expected, OF_SCALES
    with trial.untouched():
        _put_formula(trial, rows_for)
        by_formula = _tensors(trial.module(x.clone(), *_others(trial, x)))
    for found, expected in zip(by_formula, whole, strict=True):
        yield found, expected, OF_SCALES


def _put_formula(trial: _Trial, rows_for: Callable[[Tensor], Tensor]) -> None:
    """Put the formula, for these rows in the place of those given, in the activation's seat of a decoder layer."""
    parts, stub = trial.parts, nn.Identity()
    stub.forward = lambda hidden: _formula(parts, rows_for(hidden))
    put(trial.module, trial.family.activation, stub)
    up, down = trial.family.owners(trial.module).values()
    up.forward = down.forward = HandOn(trial.module, trial.family.seats)


def _others(trial: _Trial, x: Tensor) -> list[Tensor | None]:
    """What a block's forward needs besides its input x: the residual where it adds one, None for all else."""
    wanted = list(inspect.signature(trial.module.forward).parameters.values())[1:]
    needed = [each for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return [x.detach().clone() if trial.family.residual and not n else None for n in range(len(needed))]


def _tensors(returned) -> list[Tensor]:
    """The floating point tensors with rows, of what a decoder layer returns."""
    returned = returned if isinstance(returned, (tuple, list)) else [returned]
    return [each for each in returned if isinstance(each, Tensor) and each.is_floating_point() and each.dim() > 1]


# ---- how far that is off ----


def _compare(trial: _Trial, modes: tuple[str, ...]) -> bool:
    """Whether the layer gives the very bits of the formula; InputError where rounding does not explain what it gives
    instead."""
    same = True
    for mode in modes:
        asked = replace(trial, mode=mode)
        for found, expected, names in (_ask_experts if trial.routed else _ask_block if trial.in_block else _ask_module)(
            asked
        ):
            _check_kind(asked, found, expected)
            parts = zip(*(t.reshape(len(names), -1, t.shape[-1]) for t in (found, expected)))
            off, name = max(((_off(*pair), name) for pair, name in zip(parts, names)), key=itemgetter(0))
            same &= off == 0
            if off > (2 if expected.dtype.itemsize < 4 else 64) * torch.finfo(expected.dtype).eps:
                raise _refusal(asked, f"its output for {name}", off)
    return same


def _check_kind(trial: _Trial, found, expected: Tensor) -> None:
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise InputError(
            f"{trial.where} returns {what} in {trial.mode} mode; accepted: {expected.dtype} {list(expected.shape)}, as "
            "its formula gives"
        )


def _refusal(trial: _Trial, what: str, off: float) -> InputError:
    hint = " (dropout inside it has to be of p=0)" if trial.mode == "training" else ""
    product = "down(act(up(x)))" if trial.family.gate is None else "down(act(gate(x)) * up(x))"
    share = f"{100 * off:.3g}%"
    if off == float("inf"):
        share = "not finite where the formula's is, or the other way round, and so"
    return InputError(
        f"{trial.where} does not compute {product}: in {trial.mode} mode {what} is {share} off{hint}; accepted: layers "
        "that do, or an `only` that leaves it out"
    )


def _identical(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _off(found: Tensor, expected: Tensor) -> float:
    """The largest relative norm of a row's difference; infinite where other values overflow than in the formula."""
    if _identical(found, expected):
        return 0.0
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(found.isfinite(), finite) or not _identical(found[~finite], expected[~finite]):
        return float("inf")
    difference, norm = (t.where(finite, 0).norm(dim=-1) for t in (found - expected, expected))
    off = torch.where(difference == 0, 0.0, difference / norm)
    return off.nan_to_num(float("inf")).max().item()


def _compare_gradients(trial: _Trial) -> None:
    """InputError unless the layer's output and gradients are the formula's, in evaluation and in training mode.

    In its own dtype, and where that is not conclusive in float64: what is near zero there fires in both or in none."""
    for dtype in (None, torch.float64):
        drawn, differences = trial.drawn(dtype), []
        if _readable(trial.module):  # parametrizations do not take any number: orthogonal rounds some to zero
            made_of = [p for name, p in trial.module.named_parameters() if "parametrizations." in name]
            drawn.stand_ins.update({id(p): p.detach().to(dtype or p.dtype, copy=True) for p in made_of})
        for mode in MODES:
            asked = replace(drawn, mode=mode)
            x = asked.rows((1.0, 1.0, 1.0))
            try:
                x, found = _first_taken(
                    lambda x: (x, _trained(asked, x)), (x,) if trial.in_block else (x, x.flatten(0, 1))
                )
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if dtype is None:  # it has no gradients that could be others; its sparse twin may have
                    continue
                raise
            expected = _trained(asked, x, by_formula=True)
            for name in found:
                _check_kind(asked, found[name], expected[name])
                off = _off(found[name].reshape(1, -1), expected[name].reshape(1, -1))
                differences.append((off, x.dtype, asked, name))
        off, asked_in, asked, name = max(differences, key=itemgetter(0), default=(0.0, None, trial, ""))
        if off == 0 or asked_in.itemsize >= 4 and off <= 64 * torch.finfo(torch.float32).eps:
            return
    raise _refusal(asked, f"{name} with gradients" if name == "its output" else name, off)


@lru_cache
def _wake_backward(device: torch.device) -> None:
    """Let the first thing that torch's thread of backward passes does on this GPU be a copy: at a product it warns
    that the thread has no context yet."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.grad(leaf.clone() * leaf, leaf)


def _trained(trial: _Trial, x: Tensor, by_formula: bool = False) -> dict[str, Any]:
    """The output for x and, by their names, its gradients for one gradient of the output: the layer's own, or its
    formula's."""
    with trial.untouched():  # the stand-ins are the leaves: no parameter of the user's gets a .grad
        seats = trial.family.owners(trial.module).items()
        leaves = {f"{seat}.{name}": p for seat, part in seats for name, p in part.named_parameters()}
        leaves = {"x": x.detach(), **leaves}
        for leaf in leaves.values():
            leaf.requires_grad_()
        given = leaves["x"].clone()  # no leaf: a decoder layer may write to its input
        if trial.in_block:
            if by_formula:
                _put_formula(trial, lambda rows: rows)
            outputs = _tensors(
                trial.module.forward(given, *_others(trial, given))
            )  # not by a __call__ that checkpoints
        else:
            outputs = [trial.formula(given) if by_formula else trial.module(given)]
        generator = torch.Generator("cpu").manual_seed(3)
        following = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        if x.is_cuda:
            _wake_backward(x.device)
        upstream = [
            torch.randn(each.shape, generator=generator, dtype=torch.float32, device="cpu").to(each)
            for each in following
        ]
        wanted = dict(inputs=list(leaves.values()), grad_outputs=upstream, allow_unused=True)
        gradients = torch.autograd.grad(following, **wanted) if following else [None] * len(leaves)
        found = {f"its output {at}" if at else "its output": each for at, each in enumerate(outputs)}
        for (name, leaf), gradient in zip(leaves.items(), gradients):
            found[f"the gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
        return {name: each.detach() if isinstance(each, Tensor) else each for name, each in found.items()}

"""Asking a feed-forward layer what it computes: a copy of it runs on a few rows beside the formula of its parts,
forward and backward. `difference` says what is compared, and what this cannot see."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..core import InputError
from .experts import Expert, experts_of, mixed
from .parts import HOOKS, Parts, formula, part_at, parts_of, put

SCALES = (0.01, 1.0, 1000.0)  # of the inputs: clamps and tops show at one, norms at another
ROWS = 15  # which is no width of a layer, so that a transposition shows
MODES = ("evaluation", "training")


class Other(Exception):
    """What a layer does that its formula does not."""


def difference(module: nn.Module, both: bool = False) -> str | None:
    """Return what keeps a module that has the parts of a feed-forward layer, or routed experts, from being its formula:
    down(act(gate(x)) * up(x)) or down(act(up(x))), with `both` down(act(gate(x)) * act(up(x))). None if nothing does.

    A copy with drawn weights (its own may be zero, or fire too few neurons to show a difference) runs in evaluation and
    in training mode, without gradients and with them, on ROWS rows at each of SCALES, and on one row alone; the module
    is left as it was, and no hook of it is called. Compared are the output, row by row, and the gradients of x and of
    each projection's weights and biases: by their norms, which may be off by 64 eps of float32. They are asked for in
    the weights' own dtype, and where the bits differ in float32 and then in float64. A module that cannot be trained
    has no gradients to compare; routed experts are asked for their output alone.

    A module of its own also has to leave its input as it is, and to set nothing on itself that was not there.

    What this cannot see: anything but the rows asked with. A layer that does something else for other numbers of
    tokens, other values, after some calls, or in a second derivative, passes."""
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            _ask(module, both)
    except Other as error:
        return str(error)
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        return (
            f"could not be asked what it computes: run on a few rows of its width it raised {type(error).__name__}: "
            f"{said:.200}; accepted: a layer that takes x alone, or experts that take x, their numbers and weights"
        )
    return None


def check_all(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """InputError naming each of these modules that has a `difference`, and what it is. Of an expert all those beside it
    are asked, once."""
    modules = dict(whole_of(*layer) for layer in layers)
    raise_all([f"{title(name, m)} {reason}" for name, m in modules.items() if (reason := difference(m)) is not None])


def whole_of(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The module that is asked for this one: of an expert, that of all of them."""
    return (name.rpartition(".")[0], module.of) if isinstance(module, Expert) else (name, module)


def title(name: str, module: nn.Module) -> str:
    """Return what messages call a module."""
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def raise_all(reasons: list[str]) -> None:
    """One InputError for all of them, should there be any; the first four are quoted."""
    if reasons:
        more = f"; and {len(reasons) - 4} more" if len(reasons) > 4 else ""
        raise InputError("; ".join(reasons[:4]) + more)


def _ask(module: nn.Module, both: bool) -> None:
    """Raise Other where the module is not its formula."""
    routed = experts_of(module)
    parts = routed[0].own_parts() if routed else parts_of(module)
    assert parts is not None
    run = _run_experts if routed else _run_block if parts.family.inside else _run_module
    own = parts.up.weight.dtype
    for dtype in dict.fromkeys((own, torch.float32, torch.float64)):
        if dtype.itemsize < own.itemsize:
            continue
        trial = _Trial(module, _drawn(module, dtype), run, both)
        off, what, mode = max(_differences(trial), key=lambda each: each[0])
        if off == 0 or off <= 64 * torch.finfo(torch.float32).eps and dtype.itemsize >= 4:
            return
        if 0.25 < off < float("inf"):  # no rounding
            break
    product = "down(act(up(x)))" if parts.gate is None else "down(act(gate(x)) * up(x))"
    share = f"{100 * off:.3g}%" if off < float("inf") else "not finite where the formula's is, or the other way round,"
    hint = " (dropout inside it has to be of p=0)" if mode == "training" else ""
    raise Other(
        f"does not compute {product}: in {mode} mode {what} is {share} off{hint}; accepted: layers that do, or an "
        "`only` that leaves it out"
    )


# ---- copies of the layer ----


@lru_cache(1)
def _numbers() -> Tensor:
    """Normal numbers, float32, the same each time. So many that it is a prime: where they are repeated, no two rows of
    a weight are alike."""
    return torch.randn(1_048_573, generator=torch.Generator("cpu").manual_seed(2), device="cpu")


def _drawn(module: nn.Module, dtype: torch.dtype) -> dict[int, Tensor]:
    """Return what takes the place of a module's tensors in its copies, by their ids: drawn weights, and its own
    buffers."""
    drawn: dict[int, Tensor] = {}
    numbers, start = _numbers(), 0
    for t in (*module.parameters(), *module.buffers()):
        empty = t.is_meta or hasattr(t, "fake_mode")
        values = t.detach()
        if isinstance(t, nn.Parameter) or empty:
            start = (start + 7919) % (len(numbers) // 2)
            values = numbers[start : start + t.numel()].to("cpu" if empty else t.device)
            if t.numel() > len(values):
                values = values.repeat(-(-t.numel() // len(values)))[: t.numel()]
            values = values.view(t.shape) * (t.shape[-1] ** -0.5 if t.dim() > 1 else 1.0)
        drawn[id(t)] = values.to(dtype if t.is_floating_point() else t.dtype)
    return drawn


@dataclass
class _Trial:
    """A layer that is asked in one dtype. drawn: what stands for its tensors, by their ids. run: gives what a copy of
    it, or its formula, gives for x."""

    module: nn.Module
    drawn: dict[int, Tensor]
    run: Callable[[_Trial, nn.Module, Tensor, bool], list[Any]]
    both: bool

    def copy(self, training: bool = False) -> nn.Module:
        """The module as it is, on fresh copies of its state, without hooks."""
        memo: dict[int, Any] = {}
        for each in self.module.modules():
            memo |= {id(t): nn.Parameter(self.drawn[id(t)], t.is_floating_point()) for t in _tensors(each._parameters)}
            memo |= {id(t): self.drawn[id(t)].clone() for t in _tensors(each._buffers)}
            memo |= {id(t): t.detach().clone() for t in _tensors(vars(each))}  # which may not be copied as they are
            if (config := vars(each).get("config")) is not None:
                memo[id(config)] = config
        twin = copy.deepcopy(self.module, memo)
        for each in twin.modules():
            vars(each).update({kind: OrderedDict() for kind in HOOKS}, _compiled_call_impl=None)
        return twin.train(training)

    @cached_property
    def still(self) -> nn.Module:
        """A copy that is never run itself."""
        return self.copy()

    def parts(self, twin: nn.Module | None = None) -> Parts:
        """The parts of a copy; of the first of several experts."""
        twin = twin or self.still
        parts = experts_of(twin)[0].own_parts() if self.run is _run_experts else parts_of(twin)
        assert parts is not None
        return parts


def _tensors(table: dict) -> list[Tensor]:
    return [t for t in table.values() if isinstance(t, Tensor)]


@contextmanager
def _same_random(device: torch.device) -> Iterator[None]:
    """Within this context random numbers are the same each time, and nothing is cast; then they go on as before."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    python, states = random.getstate(), [each.get_state() for each in generators]
    random.seed(0)
    for each in generators:
        each.manual_seed(0)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        random.setstate(python)
        for each, state in zip(generators, states):
            each.set_state(state)


# ---- what it gives, beside the formula ----


def _differences(trial: _Trial) -> Iterator[tuple[float, str, str]]:
    """How far the layer is off in each thing that is compared, what that is, and in which mode."""
    weight, draw = trial.parts().up.weight, torch.Generator("cpu").manual_seed(1)
    x = torch.randn(len(SCALES), ROWS, weight.shape[1], generator=draw, device="cpu")
    x = (x * torch.tensor(SCALES, device="cpu")[:, None, None]).to(weight.device, weight.dtype)
    rows = x.flatten(0, 1)
    whole = rows if trial.run is _run_experts else x
    if trial.run is _run_module and not _takes(trial, x):  # experts want [tokens, d_model], most others know a batch
        whole = rows
    alone = [one for one in (x[1:2, :1], rows[ROWS : ROWS + 1]) if trial.run is _run_module and _takes(trial, one)]
    for mode in MODES:
        for given, learns in ((whole, False), (whole, True), *((one, False) for one in alone)):
            if learns and (trial.run is _run_experts or not _takes(trial, given, mode == "training", True)):
                continue  # what cannot be trained has no gradients that could be others
            own, wanted = (_results(trial, given, mode == "training", learns, which) for which in (False, True))
            for name, y in wanted.items():
                what = "its output for one row alone" if given is not whole else name
                yield _off(own.get(name), y, mode, "gradient of" not in name), what, mode


def _takes(trial: _Trial, x: Tensor, training: bool = False, learns: bool = False) -> bool:
    """Return whether the layer takes such an input without an error of its own."""
    try:
        _results(trial, x, training, learns, False)
    except (Other, torch.OutOfMemoryError):
        raise
    except Exception:
        return False
    return True


def _results(trial: _Trial, rows: Tensor, training: bool, learns: bool, by_formula: bool) -> dict[str, Any]:
    """The outputs for these rows and, if it learns, the gradients of x and of the projections' tensors, by name."""
    twin = trial.still.train(training) if by_formula and trial.run is not _run_block else trial.copy(training)
    x = rows.clone().requires_grad_(learns)
    with torch.set_grad_enabled(learns), _same_random(x.device):
        given = x * 1  # no leaf: a block may write to it
        outputs = trial.run(trial, twin, given, by_formula)
        if trial.run is not _run_block and not torch.equal(given, x):
            raise Other("writes to its input, which a sparse layer does not; accepted: a forward that leaves it be")
        ending = " with gradients" if learns else ""
        results = {f"its output {at or ''}".strip() + ending: y for at, y in enumerate(outputs)}
        if not learns:
            return results
        family, leaves = trial.parts(twin).family, {"x": x}
        following = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
        for place in family.projections:
            leaves |= {f"{place}.{name}": p for name, p in part_at(twin, place).named_parameters()}
        draw = torch.Generator("cpu").manual_seed(3)
        upstream = [torch.randn(y.shape, generator=draw, device="cpu").to(y) for y in following]
        gradients: Iterable[Tensor | None] = [None] * len(leaves)
        if following:
            gradients = torch.autograd.grad(following, list(leaves.values()), upstream, allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients):
        results[f"the gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: y.detach() if isinstance(y, Tensor) else y for name, y in results.items()}


def _run_module(trial: _Trial, twin: nn.Module, x: Tensor, by_formula: bool) -> list[Any]:
    """Return what a module of its own returns. Other if it leaves something on itself."""
    if by_formula:
        return [formula(trial.parts(twin), x, trial.both)]
    before = _attributes(twin)
    y = twin(x)
    new = [
        name
        for name, value in _attributes(twin).items()
        if name not in before or value is not before[name] and (before[name] is None or isinstance(value, Tensor))
    ]
    if new:
        raise Other(
            f"sets {', '.join(new[:5])} in its forward, which a sparse layer does not; accepted: a forward that keeps "
            "nothing on the module"
        )
    return [y]


def _attributes(twin: nn.Module) -> dict[str, object]:
    """Return what is set on a module and on those within it; what a cached_property keeps is nobody's loss."""
    return {
        f"{at}.{key}".lstrip("."): value
        for at, each in twin.named_modules()
        for table in (vars(each), each._parameters, each._buffers, each._modules)
        for key, value in table.items()
        if not isinstance(getattr(type(each), key, None), cached_property)
    }


def _run_experts(trial: _Trial, twin: nn.Module, x: Tensor, by_formula: bool) -> list[Any]:
    """A module of experts, with drawn choices of up to four of them for each row."""
    many, draw = len(experts_of(twin)), torch.Generator("cpu").manual_seed(4)
    chosen = torch.rand(len(x), many, generator=draw, device="cpu").argsort(1)[:, :4].to(x.device)
    weights = torch.rand(chosen.shape, generator=draw, device="cpu").to(x)
    if by_formula:
        experts = experts_of(twin)
        return [mixed(x, chosen, weights, many, lambda number, rows, _: experts[number](rows))]
    return [type(twin).forward(twin, x, chosen, weights)]


def _run_block(trial: _Trial, twin: nn.Module, x: Tensor, by_formula: bool) -> list[Any]:
    """A block that has the parts among others and is run whole: what comes out of its down projection, and the block,
    since nothing else may read what lies between. Its up projection gets the rows of x, whatever norm comes before it;
    `by_formula` hands them on to the activation, in the place of which the formula stands."""
    family, parts = trial.parts(twin).family, trial.parts(twin)
    up, down = part_at(twin, family.up), part_at(twin, family.down)
    entered: list[Tensor] = []
    left: list[Tensor] = []

    def into_up(hidden: Tensor) -> Tensor:
        if hidden.numel() != x.numel() or hidden.shape[-1] != x.shape[-1]:
            raise Other(
                f"gives {family.up} {list(hidden.shape)} where it is given {list(x.shape)}; accepted: a layer whose "
                "feed-forward part takes each of its rows"
            )
        entered.append(x.reshape(hidden.shape))
        return entered[-1] if by_formula else type(up).forward(up, entered[-1])

    def out_of_down(hidden: Tensor) -> Tensor:
        left.append(hidden if by_formula else type(down).forward(down, hidden))
        return left[-1].clone()  # what follows may write to it

    if by_formula:
        stub = nn.Identity()
        stub.forward = lambda rows: formula(parts, rows, trial.both)
        put(twin, family.activation, stub)
    up.forward, down.forward = into_up, out_of_down
    wanted = list(inspect.signature(twin.forward).parameters.values())[1:]
    needed = [each for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    others = [x.detach().clone() if family.residual and not number else None for number in range(len(needed))]
    returned = twin.forward(x.clone(), *others)  # not by a __call__ that checkpoints
    if len(entered) != 1 or len(left) != 1:
        calls = f"{family.up} {len(entered)} times and {family.down} {len(left)} times"
        raise Other(f"calls {calls} in a forward; accepted: once each")
    returned = returned if isinstance(returned, (tuple, list)) else [returned]
    return left + [t for t in returned if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 1]


def _off(y: Any, wanted: Tensor, mode: str, by_row: bool = True) -> float:
    """The largest relative norm of a row's difference, or that of all; infinite where other values overflow than in the
    formula. Other for anything but a tensor of its shape and dtype."""
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (wanted.shape, wanted.dtype):
        what = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise Other(
            f"returns {what} in {mode} mode; accepted: {wanted.dtype} {list(wanted.shape)}, as its formula gives"
        )
    if torch.allclose(y, wanted, rtol=0.0, atol=0.0, equal_nan=True):
        return 0.0
    y, wanted = y.double(), wanted.double()
    finite = wanted.isfinite()
    rest = ~finite
    if not torch.equal(y.isfinite(), finite) or not torch.allclose(y[rest], wanted[rest], 0.0, 0.0, equal_nan=True):
        return float("inf")
    gap, size = (t.where(finite, 0).norm(dim=-1 if by_row else None) for t in (y - wanted, wanted))
    return torch.where(gap == 0, 0.0, gap / size).nan_to_num(float("inf")).max().item()

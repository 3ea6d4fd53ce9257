"""Asking a feed-forward layer what it computes: a copy of it runs on a few rows beside the formula of its parts,
forward and backward."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..core import InputError
from .experts import Expert, experts_of, mixed
from .parts import HOOKS, FeedForward, formula, parts_of, put

SCALES = (0.01, 1.0, 1000.0)  # of the inputs: clamps and tops show at one, norms at another
ROWS = 15  # which is no width of a layer, so that a transposition shows
EXACT = 64 * torch.finfo(torch.float32).eps  # by how much a norm may be off


class Other(Exception):
    """What a layer does that its formula does not."""


def difference(module: nn.Module, both: bool = False) -> str | None:
    """Return what keeps a module that has the parts of a feed-forward layer, or routed experts, from being its formula:
    down(act(gate(x)) * up(x)) or down(act(up(x))), with `both` down(act(gate(x)) * act(up(x))). None if nothing does.

    A copy with drawn weights (its own may fire too few neurons to show a difference) runs in evaluation and in training
    mode, on ROWS rows at each of SCALES, and on one row alone; no hook is called. Compared are the output, row by row,
    and the gradients of x and of the projections' tensors where there are any, by their norms, which may be off by
    EXACT: in the weights' own dtype, and where the bits differ in float32 and then in float64. Of routed experts it is
    the output alone. A module of its own also has to leave its input as it is, and to set nothing on itself that was
    not there. A layer that does something else for other numbers of tokens, other values, after some calls, or in a
    second derivative, passes."""
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            own = _parts(module).up.weight.dtype
            wider = (dtype for dtype in (torch.float32, torch.float64) if dtype.itemsize > own.itemsize)
            for dtype in (own, *wider):
                off, what = max(_Trial(module, dtype, both).differences())
                if off == 0 or off <= EXACT and dtype.itemsize >= 4:
                    return None
                if 0.25 < off < float("inf"):  # no rounding
                    break
        said = "down(act(up(x)))" if _parts(module).gate is None else "down(act(gate(x)) * up(x))"
        share = f"{100 * off:.3g}%" if off < float("inf") else "not finite where the formula's is, or the other way,"
        raise Other(f"does not compute {said}: {what} is {share} off")
    except Other as error:
        return f"{error}; accepted: a layer that computes its formula and does nothing else, or an `only` without it"
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        return (
            f"could not be asked what it computes: run on a few rows of its width it raised {type(error).__name__}: "
            f"{said:.200}; accepted: a layer that takes x alone, or experts that take x, their numbers and weights"
        )


def wrong_ones(layers: Iterable[tuple[str, nn.Module]]) -> dict[nn.Module, str]:
    """Return which of these modules have a `difference`, and what messages say of each."""
    wholes = {whole: name for name, whole in (whole_of(*layer) for layer in layers)}
    return {m: f"{title(name, m)} {reason}" for m, name in wholes.items() if (reason := difference(m)) is not None}


def check_all(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise InputError naming each of these modules that has a `difference`."""
    raise_all([*wrong_ones(layers).values()])


def whole_of(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return the module that is asked for this one, with its name: of an expert, that of all of them."""
    return (name.rpartition(".")[0], module.of) if isinstance(module, Expert) else (name, module)


def title(name: str, module: nn.Module) -> str:
    """Return what messages call a module."""
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def raise_all(reasons: list[str]) -> None:
    """Raise one InputError for all of them, should there be any; the first four are quoted."""
    if reasons:
        more = f"; and {len(reasons) - 4} more" if len(reasons) > 4 else ""
        raise InputError("; ".join(reasons[:4]) + more)


def _parts(module: nn.Module) -> FeedForward:
    routed = experts_of(module)
    return routed[0].own_parts() if routed else parts_of(module)


class _Trial:
    """A layer that is asked in one dtype: what fresh copies of it give, and what its formula does. Copies have drawn
    weights, and its own buffers' values."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, both: bool) -> None:
        self.module, self.both, self.parts = module, both, _parts(module)
        self.routed, self.inside = bool(experts_of(module)), self.parts.family.inside
        tensors = (*module.parameters(), *module.buffers())
        self.drawn = {id(t): _drawn(t, number, dtype) for number, t in enumerate(tensors)}

    def differences(self) -> Iterator[tuple[float, str]]:
        """Yield how far the layer is off in each thing that is compared, and what that is."""
        d_model, like = self.parts.up.weight.shape[1], self.drawn[id(next(self.parts.owners[0].parameters()))]
        x = (_normal(1, len(SCALES), ROWS, d_model) * torch.tensor(SCALES, device="cpu")[:, None, None]).to(like)
        forms = [x, x.flatten(0, 1), x[1:2, :1], x[1, :1]]  # with and without a batch, and one row alone
        forms = forms[1:2] if self.routed else forms[:1] if self.inside else forms
        scales = SCALES if self.inside else (1.0,)  # whatever norm comes before the parts of a block
        failed, answers = None, 0
        for rows, training, scale in product(forms, (False, True), scales):
            wanted, alone = None, rows.shape[:-1].numel() == 1
            for learns in (False,) if self.routed else (True, False):
                try:
                    own = self.results(rows, training, learns, scale)
                except (Other, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # what cannot be trained has no gradients that could be others
                    failed = failed or error
                    continue
                answers += not alone
                if wanted is None or self.inside:  # elsewhere the formula's outputs have no gradients to wait for
                    wanted = self.results(rows, training, learns, scale, by_formula=True)
                for name, y in wanted.items():
                    output = not name.startswith("the gradient of")
                    if output or learns:
                        mode = f"in {'training' if training else 'evaluation'} mode {name}"
                        mode += " with gradients" * (output and learns) + " for one row alone" * alone
                        yield _off(own.get(name), y, output), mode
        if not answers and failed:
            raise failed

    def results(self, rows: Tensor, training: bool, learns: bool, scale: float, by_formula=False) -> dict[str, Any]:
        """Return the outputs for these rows and, if it learns, the gradients of x and of the projections' tensors, zero
        where there are none, by name."""
        twin, x = self.copy(training, scale), rows.clone().requires_grad_(learns)
        with torch.set_grad_enabled(learns), _same_random(x.device):
            given, before = x * 1, _attributes(twin)  # no leaf: a block may write to it
            outputs = self.outputs(twin, given, by_formula)
            if not (self.inside or by_formula):
                if not torch.equal(given, x):
                    raise Other("writes to its input")
                if left := sorted({name for name, _ in _attributes(twin) - before}):
                    raise Other(f"sets {', '.join(left[:5])} in its forward")
            results = {f"its output {at or ''}".strip(): y for at, y in enumerate(outputs)}
            if learns:
                owners = _parts(twin).owners
                named = [(name, part) for name, part in twin.named_modules() if part in owners]
                leaves = {"x": x} | {
                    f"{place}.{name}": p for place, part in named for name, p in part.named_parameters()
                }
                ends = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
                upstream, gradients = [_normal(3, *y.shape).to(y) for y in ends], map(torch.zeros_like, leaves.values())
                if ends:
                    gradients = torch.autograd.grad(ends, [*leaves.values()], upstream, materialize_grads=True)
                results |= {f"the gradient of {name}": gradient for name, gradient in zip(leaves, gradients)}
        return {name: y.detach() if isinstance(y, Tensor) else y for name, y in results.items()}

    def outputs(self, twin: nn.Module, x: Tensor, by_formula: bool) -> list[Any]:
        """Return what a copy gives for x, or its formula: of experts with drawn choices of up to four of them for each
        row; of a block all that comes out, where the formula stands in the place of the activation, and the projections
        hand on what they get."""
        parts, experts = _parts(twin)._replace(both=self.both), experts_of(twin)
        if experts:
            draw = torch.Generator("cpu").manual_seed(4)
            chosen = torch.rand(len(x), len(experts), generator=draw, device="cpu").argsort(1)[:, :4].to(x.device)
            weights = torch.rand(chosen.shape, generator=draw, device="cpu").to(x)
            if by_formula:
                return [mixed(x, chosen, weights, len(experts), lambda number, rows: experts[number](rows))]
            return [type(twin).forward(twin, x, chosen, weights)]
        if not self.inside:
            return [formula(parts, x) if by_formula else twin(x)]
        if by_formula:
            stub = nn.Identity()
            stub.forward = lambda rows: formula(parts, rows)
            put(twin, parts.family.activation, stub)
            for projection in parts.owners:
                projection.forward = lambda rows: rows
        wanted = list(inspect.signature(twin.forward).parameters.values())[1:]
        others: list[Tensor | None] = [None] * sum(
            one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in wanted
        )
        if parts.family.residual and others:
            others[0] = x.detach().clone()
        returned = twin.forward(x, *others)  # not by a __call__ that checkpoints
        returned = returned if isinstance(returned, (tuple, list)) else [returned]
        return [t for t in returned if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 1]

    def copy(self, training: bool, scale: float) -> nn.Module:
        """Return the module as it is, on fresh copies of its state, without hooks. scale: of its up projection."""
        memo: dict[int, Any] = {}
        for part in self.module.modules():
            memo |= {id(t): nn.Parameter(self.drawn[id(t)], t.is_floating_point()) for t in _tensors(part._parameters)}
            memo |= {id(t): self.drawn[id(t)].clone() for t in _tensors(part._buffers)}
            memo |= {id(t): t.detach().clone() for t in _tensors(vars(part))}  # which may not be copied as they are
            memo |= {id(vars(part)[kind]): OrderedDict() for kind in HOOKS}
            if (config := vars(part).get("config")) is not None:
                memo[id(config)] = config
        twin = copy.deepcopy(self.module, memo)
        for part in twin.modules():
            vars(part)["_compiled_call_impl"] = None
        for p in _parts(twin).owners[0].parameters() if scale != 1 else ():
            p.data = p.data * scale
        return twin.train(training)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def _drawn(t: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    empty, values = t.is_meta or hasattr(t, "fake_mode"), t.detach()
    if isinstance(t, nn.Parameter) or empty:
        device = torch.device("cpu") if empty else t.device
        values = torch.randn(t.shape, generator=torch.Generator(device).manual_seed(number + 5), device=device)
        values *= t.shape[-1] ** -0.5 if t.dim() > 1 else 1.0
    return values.to(dtype if t.is_floating_point() else t.dtype)


@contextmanager
def _same_random(device: torch.device) -> Iterator[None]:
    """Within this context random numbers are the same each time, and nothing is cast; then they go on as before."""
    python, own = random.getstate(), [device.index] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(own), torch.autocast(device.type, enabled=False):
            for generator in [torch.default_generator, *(torch.cuda.default_generators[index] for index in own)]:
                generator.manual_seed(0)
            random.seed(0)
            yield
    finally:
        random.setstate(python)


def _tensors(table: dict) -> list[Tensor]:
    return [t for t in table.values() if isinstance(t, Tensor)]


def _attributes(twin: nn.Module) -> set[tuple[str, object]]:
    """Return what is set on a module and on those within it, such as a penalty that a training reads there: by name,
    and which tensor or whether it is None. What a cached_property keeps is nobody's loss."""
    return {
        (f"{at}.{key}".lstrip("."), id(value) if isinstance(value, Tensor) else value is None)
        for at, part in twin.named_modules()
        for table in (vars(part), part._parameters, part._buffers, part._modules)
        for key, value in table.items()
        if not isinstance(getattr(type(part), key, None), cached_property)
    }


def _off(y: Any, wanted: Tensor, by_row: bool) -> float:
    """Return the largest relative norm of a row's difference, or that of all; infinite where other values overflow."""
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (wanted.shape, wanted.dtype):
        what = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise Other(f"returns {what} where its formula gives {wanted.dtype} {list(wanted.shape)}")
    if torch.equal(y, wanted):  # the rest takes four times as long as all runs of a layer
        return 0.0
    finite, gap, size = wanted.isfinite(), y.double() - wanted.double(), wanted.double()
    if not torch.equal(y.isfinite(), finite):
        return float("inf")
    gap, size = (t.where(finite, 0).norm(dim=-1 if by_row else None) for t in (gap, size))
    return torch.where(gap == 0, 0.0, gap / size).nan_to_num(float("inf")).max().item()

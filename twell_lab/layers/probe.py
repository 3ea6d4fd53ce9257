"""Asking a feed-forward layer what it computes: it is run on a few rows beside the formula of its parts, without
gradients and with them: `check`, which also says what this cannot see."""

from __future__ import annotations

import inspect
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _disable_current_modes

from ..core.errors import InputError
from .anatomy import HOOKS, IN_BLOCK, HandOn, layout_of, raise_all, title

SCALES = (0.01, 1.0, 1000.0)  # of the inputs that a layer is asked with: clamps and tops show at one, norms at another
OF_SCALES = [f"inputs of scale {each:g}" for each in SCALES]
ROWS = 4
_GLOBAL_HOOKS = [each for each in vars(torch_modules) if each.startswith(("_global_forward", "_global_backward"))]


def _uncarried(module: nn.Module, layout: tuple) -> list[str]:
    """Parameters and buffers of a module of its own that belong to none of its projections."""
    if layout == IN_BLOCK:
        return []
    ours = {id(each) for seat in layout[:3] if seat for each in getattr(module, seat).modules()}
    return [
        f"{at}.{name}" if at else name
        for at, each in module.named_modules()
        if id(each) not in ours
        for name, held in (*each._parameters.items(), *each._buffers.items())
        if held is not None
    ]


def check_all(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """`check` each of them by name; one InputError for all that fail."""
    reasons = []
    for name, module in layers:
        try:
            check(name, module)
        except InputError as error:
            reasons.append(str(error))
    raise_all(reasons)


def check(name: str, module: nn.Module) -> None:
    """InputError naming the layer and its difference, unless it computes down(act(gate(x)) * up(x)), or
    down(act(up(x))).

    It is run as it is (a decoder layer whole) on rows at each of SCALES, in evaluation and in training mode, without
    gradients, in its own dtype on its device, and is left as it was: random state, buffers, attributes and modes. No
    hook sees it. It is asked with its own weights, unless those are on meta, and with drawn ones: its own may be zero,
    not finite, or fire too few neurons to show a difference. Outputs may differ as rounding can: row by row, the norm
    by 2 eps in 16-bit types and 64 in others; a layer in 16 bits that does not give the very bits of the formula is
    asked in float32 once more.

    Then with gradients, for rows of scale 1, drawn weights and one gradient of the output: the output and the gradients
    of x and of the projections' weights and biases (frozen ones too) are the formula's very bits, or within 64 eps of
    float32 by their norm; where they are not, or in 16 bits, it is asked in float64 once more. No .grad is written. A
    layer that raises with gradients (it cannot be trained, or not by torch.autograd.grad) has none to compare, and is
    taken for its values.

    A module of its own is refused as well if it writes to its input, or sets on itself or on a part a new attribute,
    one that was None, or a tensor: after a swap it would be missing, or old.

    What this cannot see: anything but the rows asked with, which are len(SCALES) * ROWS random ones [3, 4, d_model] or
    [12, d_model], whichever the module takes, and one alone [1, 1, d_model] and [1, d_model]. So a layer that does
    something else for other numbers of tokens, other values, after some calls, or in a second derivative, is taken. A
    list or dictionary that a forward writes to keeps what these runs wrote, and gets nothing from a sparse layer."""
    layout = layout_of(module)
    where = title(name, module)
    lost = _uncarried(module, layout)
    if lost:
        raise InputError(
            f"{where} has parameters or buffers that a sparse layer does not carry: {', '.join(lost[:5])}; accepted: "
            "those of its projections alone"
        )
    try:
        with (
            _disable_current_modes(),
            torch.no_grad(),
        ):  # FakeTensorMode would hide the values, and a user's mode would see ours
            _check_widths(where, module, layout)
            for own in (True, False) if _readable(module) else (False,):
                same = _compare(where, module, layout, None if own else _drawn(module, None))
                if not same and next(module.parameters()).dtype.itemsize < 4:
                    _compare(where, module, layout, _drawn(module, torch.float32, own=own))
            with torch.inference_mode(False), torch.enable_grad():
                _compare_gradients(where, module, layout)
    except InputError:
        raise
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise InputError(
            f"{where} could not be asked what it computes: run on a few rows of its width it raised "
            f"{type(error).__name__}: {said:.200}; accepted: a layer that takes x alone"
        ) from error


def _check_widths(where: str, module: nn.Module, layout: tuple) -> None:
    """InputError unless the layer returns rows as wide as it takes, and gate and up are of one shape."""
    with _untouched(module, False, None):
        gate, up, down = (tuple(getattr(module, seat).weight.shape) if seat else None for seat in layout[:3])
    if down != up[::-1] or gate not in (None, up):
        sizes = [f"{seat} {list(shape)}" for seat, shape in zip(layout, (gate, up, down)) if seat]
        raise InputError(
            f"{where} has weights of other shapes: {', '.join(sizes)}; accepted: up (and gate) [d_ff, d_model], "
            "down [d_model, d_ff]"
        )


def _rows(module: nn.Module, layout: tuple, drawn: dict[int, Tensor] | None) -> Tensor:
    """Random rows [scales, ROWS, d_model] in the layer's dtype, on its device; the same each time."""
    with _untouched(module, False, drawn):  # a parametrized weight may change its buffers whenever it is read
        weight = getattr(module, layout[1]).weight
        shape, generator = (len(SCALES), ROWS, weight.shape[1]), torch.Generator("cpu").manual_seed(1)
        rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return (rows * torch.tensor(SCALES, device="cpu")[:, None, None]).to(weight.device, weight.dtype)


def _formula(module: nn.Module, layout: tuple, x: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden activations and the output for x [..., d_model], from the projections' weights, each of them read
    once."""
    gate, up, down = (getattr(module, seat) if seat else None for seat in layout[:3])
    activation = getattr(module, layout[3])
    if gate is None:
        hidden = activation(linear(x, up.weight, up.bias))
    else:
        hidden = activation(linear(x, gate.weight, gate.bias)) * linear(x, up.weight, up.bias)
    return hidden, linear(hidden, down.weight, down.bias)


def _readable(module: nn.Module) -> bool:
    """Whether the layer's own weights hold numbers."""
    return not any(t.is_meta or hasattr(t, "fake_mode") for t in (*module.parameters(), *module.buffers()))


def _drawn(module: nn.Module, dtype: torch.dtype | None, own: bool = False) -> dict[int, Tensor]:
    """Stand-ins by the id of each parameter, and of each buffer that holds no numbers here; own: the own values,
    cast."""
    generator, made = torch.Generator("cpu").manual_seed(2), {}
    most = sum(t.numel() for t in (*module.parameters(), *module.buffers()))
    numbers = torch.randn(
        min(1_048_573, most), generator=generator, device="cpu"
    )  # a prime: repeated, they make no two rows alike
    parameters = {id(t) for t in module.parameters()}
    for t in (*module.parameters(), *module.buffers()):
        if own:
            made[id(t)] = t.to(dtype) if t.is_floating_point() else t.clone()
        elif id(t) not in parameters and not t.is_meta and not hasattr(t, "fake_mode"):
            if dtype and t.is_floating_point():
                made[id(t)] = t.to(dtype)
        else:
            device = "cpu" if t.is_meta or t.device.type == "cuda" and not torch.cuda.is_available() else t.device
            values = numbers * (t.shape[-1] ** -0.5 if t.dim() > 1 else 1.0)
            values = values.to(device, dtype if dtype and t.is_floating_point() else t.dtype)
            numbers = numbers.roll(-len(made) - 1)  # other ones for the next
            made[id(t)] = values.repeat(-(-t.numel() // max(1, len(values))))[: t.numel()].reshape(t.shape)
    return made


@contextmanager
def _untouched(module: nn.Module, training: bool, drawn: dict[int, Tensor] | None) -> Iterator[None]:
    """Within: the module in this mode, on copies of its buffers (and on these stand-ins), for itself; afterwards as it
    was."""
    modules = list(module.modules())
    before = [
        (
            each,
            dict(vars(each)),
            [(vars(each)[kind], dict(vars(each)[kind])) for kind in ("_parameters", "_buffers", "_modules")],
        )
        for each in modules
    ]
    drawn = drawn or {}
    devices = {t.device for t in module.parameters()} | {t.device for t in drawn.values()}
    python, numpys = random.getstate(), numpy.random.get_state()
    globally = {kind: getattr(torch_modules, kind) for kind in _GLOBAL_HOOKS}
    with ExitStack() as stack:
        cuda = [each.index for each in devices if each.type == "cuda" and torch.cuda.is_available()]
        stack.enter_context(torch.random.fork_rng(cuda, enabled=True))
        for kind in {each.type for each in devices} & {"cpu", "cuda"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            for kind, found in globally.items():
                setattr(torch_modules, kind, OrderedDict() if isinstance(found, dict) else found)
            copies = {
                id(t): t.clone()
                for each in modules
                for t in each._buffers.values()
                if t is not None and id(t) not in drawn
            }
            for each in modules:
                for key, t in each._parameters.items():
                    if t is not None and id(t) in drawn:
                        each._parameters[key] = nn.Parameter(drawn[id(t)], requires_grad=False)
                for key, t in each._buffers.items():
                    if t is not None:
                        each._buffers[key] = drawn[id(t)].clone() if id(t) in drawn else copies[id(t)]
                # Nobody's hooks are called, and nothing that Module.compile() made: compiling it takes longer than
                # asking.
                vars(each).update({kind: OrderedDict() for kind in HOOKS}, _compiled_call_impl=None)
                vars(each).update(
                    {key: t.clone() for key, t in vars(each).items() if isinstance(t, Tensor)}
                )  # what is no buffer by name
            module.train(training)
            yield
        finally:
            for each, attributes, tables in before:
                for key in vars(each).keys() - attributes.keys():
                    del vars(each)[key]
                vars(each).update(attributes)
                for table, held in tables:
                    table.clear()
                    table.update(held)
            for kind, found in globally.items():
                setattr(torch_modules, kind, found)
            random.setstate(python)
            numpy.random.set_state(numpys)


def _compare(where: str, module: nn.Module, layout: tuple, drawn: dict[int, Tensor] | None) -> bool:
    """Whether the layer gives the very bits of the formula; InputError where rounding does not explain what it gives
    instead."""
    same = True
    for training in (False, True):
        ask = _ask_block if layout == IN_BLOCK else _ask_module
        for found, expected, names in ask(where, module, layout, training, drawn):
            _check_kind(where, found, expected, training)
            if _identical(found, expected):
                continue
            same = False
            off = [_off(a, b) for a, b in zip(*(t.reshape(len(names), -1, t.shape[-1]) for t in (found, expected)))]
            worst = max(range(len(names)), key=off.__getitem__)
            eps = torch.finfo(expected.dtype).eps
            if not off[worst] <= (2 if expected.dtype.itemsize < 4 else 64) * eps:
                raise _other(where, layout, training, f"its output for {names[worst]}", off[worst])
    return same


def _check_kind(where: str, found, expected: Tensor, training: bool) -> None:
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise InputError(
            f"{where} returns {what} in {_mode(training)} mode; accepted: {expected.dtype} {list(expected.shape)}, "
            "as its formula gives"
        )


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _other(where: str, layout: tuple, training: bool, what: str, off: float) -> InputError:
    hint = " (dropout inside it has to be of p=0)" if training else ""
    product = "down(act(up(x)))" if layout[0] is None else "down(act(gate(x)) * up(x))"
    return InputError(
        f"{where} does not compute {product}: in {_mode(training)} mode {what} is {_percent(off)} off{hint}; accepted: "
        "layers that do, or an `only` that leaves it out"
    )


def _percent(off: float) -> str:
    return (
        "not finite where the formula's is, or the other way round, and so"
        if off == float("inf")
        else f"{100 * off:.3g}%"
    )


def _identical(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _off(found: Tensor, expected: Tensor) -> float:
    """The largest relative norm of a row's difference; infinite where other values overflow than in the formula."""
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    if (
        not _identical(found.where(~finite, 0), expected.where(~finite, 0))
        or not found.where(finite, 0).isfinite().all()
    ):
        return float("inf")
    difference, norm = ((t.where(finite, 0)).norm(dim=-1) for t in (found - expected, expected))
    off = torch.where(difference == 0, 0.0, difference / norm)
    return off.nan_to_num(float("inf")).max().item()


def _ask_module(where: str, module: nn.Module, layout: tuple, training: bool, drawn) -> Iterator[tuple]:
    """What a module of its own gives for the rows, what its formula gives, and what to call each part of them."""
    x = _rows(module, layout, drawn)
    one = x[1:2, :1]

    def beside(given: Tensor) -> tuple:
        found = _run(where, module, layout, training, drawn, given)
        with _untouched(module, training, drawn):
            return found, _formula(module, layout, given)[1], OF_SCALES if len(given) > 1 else ["one row alone"]

    yield _first_taken(beside, (x, x.flatten(0, 1)))
    for given in (
        (one, one.flatten(0, 1)) if drawn else ()
    ):  # with one set of weights: it is the number of rows that is tried here
        try:
            answer = beside(given)
        except InputError:
            raise
        except Exception:  # wants a batch, or none
            continue
        yield answer


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


def _run(where: str, module: nn.Module, layout: tuple, training: bool, drawn, x: Tensor):
    """What a module of its own returns; InputError if it leaves something behind, on its input or on itself."""
    given = x.clone()
    with _untouched(module, training, drawn):
        parts = _parts(module, layout)
        before = _attributes(parts)
        found = module(given)
        after = _attributes(parts)
    kept = [
        name
        for name, value in after.items()
        if name not in before or value is not before[name] and (before[name] is None or isinstance(value, Tensor))
    ]
    if kept:
        raise InputError(
            f"{where} sets {', '.join(kept[:5])} in its forward, which a sparse layer does not; accepted: a forward "
            f"that "
            "keeps nothing on the module"
        )
    if not _identical(given, x):
        raise InputError(
            f"{where} writes to its input, which a sparse layer does not; accepted: a forward that leaves it as it was"
        )
    return found


def _parts(module: nn.Module, layout: tuple) -> list[tuple[str, nn.Module]]:
    """The module and those in it by name, without what lies within projections: those are carried whole."""
    projections = [getattr(module, seat) for seat in layout[:3] if seat]
    carried = {id(each) for projection in projections for each in projection.modules()} - {
        id(each) for each in projections
    }
    return [(name, each) for name, each in module.named_modules() if id(each) not in carried]


def _attributes(parts: list[tuple[str, nn.Module]]) -> dict[str, object]:
    """What is set on them, by name; what a cached_property keeps is nobody's loss."""
    return {
        f"{at}.{key}" if at else key: value
        for at, each in parts
        for table in (vars(each), each._parameters, each._buffers, each._modules)
        for key, value in table.items()
        if not isinstance(getattr(type(each), key, None), cached_property)
    }


def _ask_block(where: str, module: nn.Module, layout: tuple, training: bool, drawn) -> Iterator[tuple]:
    """What a decoder layer gives for its up projection's input and from its down projection, beside the formula; and
    what it returns as it is and with the formula in the activation's seat: nothing else may read what lies between.

    The up projection is given rows of every scale, whatever norm comes before it.
    """
    _, up, down, seat = layout
    x = _rows(module, layout, drawn)
    heard: dict[str, list[Tensor]] = {up: [], down: []}

    def rows_for(given: Tensor) -> Tensor:
        if given.numel() != x.numel() or given.shape[-1] != x.shape[-1]:
            raise InputError(
                f"{where} gives {up} {list(given.shape)} where it is given {list(x.shape)}; accepted: "
                "a layer whose feed-forward part takes each of its rows"
            )
        return x.reshape(given.shape)

    def listen() -> None:
        first, last = getattr(module, up), getattr(module, down)

        def into(given: Tensor) -> Tensor:
            heard[up].append(rows_for(given))
            return linear(heard[up][-1], first.weight, first.bias)

        def out(given: Tensor) -> Tensor:
            heard[down].append(linear(given, last.weight, last.bias))
            return heard[down][-1].clone()  # what follows may write to it

        first.forward, last.forward = into, out

    def run(prepare: Callable[[], None]) -> list[Tensor]:
        with _untouched(module, training, drawn):
            prepare()
            return _tensors(module(x.clone(), *_others(module)))

    whole = run(listen)
    if len(heard[up]) != 1 or len(heard[down]) != 1:
        calls = f"{up} {len(heard[up])} times and {down} {len(heard[down])} times"
        raise InputError(f"{where} calls {calls} in a forward; accepted: once each")
    with _untouched(module, training, drawn):
        expected = _formula(module, layout, heard[up][0])[1]
    yield heard[down][0], expected, OF_SCALES
    for pair in zip(run(lambda: _put_formula(module, layout, rows_for)), whole, strict=True):
        yield *pair, OF_SCALES


def _put_formula(module: nn.Module, layout: tuple, rows_for: Callable[[Tensor], Tensor]) -> None:
    """Put the formula, for these rows in the place of those given, in the activation's seat of a decoder layer."""
    own = nn.Module()  # with the parts' names alone, and the activation where the module itself has the stub
    _, up, down, seat = layout
    vars(own).update({each: getattr(module, each) for each in (up, down, seat)})
    stub = nn.Identity()
    stub.forward = lambda given: _formula(own, layout, rows_for(given))[1]
    setattr(module, seat, stub)
    getattr(module, up).forward = getattr(module, down).forward = HandOn(module, layout)


def _others(module: nn.Module) -> list[None]:
    """For what a decoder layer's forward asks besides its input."""
    wanted = list(inspect.signature(module.forward).parameters.values())[1:]
    return [None for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]


def _tensors(returned) -> list[Tensor]:
    """The tensors of what a decoder layer returns that have rows of a width."""
    returned = returned if isinstance(returned, (tuple, list)) else [returned]
    return [each for each in returned if isinstance(each, Tensor) and each.is_floating_point() and each.dim() > 1]


# ---- what its gradients are ----


def _compare_gradients(where: str, module: nn.Module, layout: tuple) -> None:
    """InputError unless the layer's output and gradients are the formula's, in evaluation and in training mode.

    In its own dtype, and where that is not conclusive in float64: what is near zero there fires in both or in none.
    """
    for dtype in (None, torch.float64):
        drawn, worst = _drawn(module, dtype), None
        if _readable(
            module
        ):  # not every number is one that a parametrization can make a weight of: orthogonal rounds some to zero
            made_of = [p for name, p in module.named_parameters() if "parametrizations." in name]
            drawn.update({id(p): p.detach().to(dtype or p.dtype, copy=True) for p in made_of})
        for training in (False, True):

            def trained(x: Tensor) -> tuple:
                return x, _trained(module, layout, training, drawn, x, formula=False)

            x = _rows(module, layout, drawn)
            x = x / torch.tensor(SCALES, dtype=x.dtype, device=x.device)[:, None, None]
            try:
                x, answers = _first_taken(trained, (x,) if layout == IN_BLOCK else (x, x.flatten(0, 1)))
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if dtype is None:  # it has no gradients that could be others; its sparse twin may have
                    continue
                raise
            wanted = _trained(module, layout, training, drawn, x, formula=True)
            for name, found in answers.items():
                expected = wanted[name]
                _check_kind(where, found, expected, training)
                off = 0.0 if _identical(found, expected) else _off(found.reshape(1, -1), expected.reshape(1, -1))
                if worst is None or off > worst[0]:
                    worst = off, training, name
        fits = 64 * torch.finfo(torch.float32).eps
        if (
            worst is None
            or worst[0] == 0
            or worst[0] <= fits
            and (dtype or getattr(module, layout[1]).weight.dtype).itemsize >= 4
        ):
            return
    off, training, name = worst
    raise _other(where, layout, training, f"{name} with gradients" if name == "its output" else name, off)


def _trained(module: nn.Module, layout: tuple, training: bool, drawn, x: Tensor, formula: bool) -> dict[str, Tensor]:
    """The output for x and, by their names, its gradients, for one gradient of the output: the layer's own or its
    formula's."""
    with _untouched(module, training, drawn):  # whose stand-ins are the leaves: nothing of the user's gets a .grad
        leaves = {
            f"{seat}.{name}": p for seat in layout[:3] if seat for name, p in getattr(module, seat).named_parameters()
        }
        leaves = {"x": x.detach(), **leaves}
        for leaf in leaves.values():
            leaf.requires_grad_()
        given = leaves["x"].clone()  # no leaf: a decoder layer may write to its input
        if layout == IN_BLOCK:
            if formula:
                _put_formula(module, layout, lambda rows: rows)
            outputs = _tensors(module.forward(given, *_others(module)))  # not by a __call__ that checkpoints
        else:
            outputs = [_formula(module, layout, given)[1] if formula else module(given)]
        generator = torch.Generator("cpu").manual_seed(3)
        following = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        upstream = [
            torch.randn(each.shape, generator=generator, dtype=torch.float32, device="cpu").to(each)
            for each in following
        ]
        gradients = [None] * len(leaves)
        if following:
            gradients = torch.autograd.grad(following, list(leaves.values()), upstream, allow_unused=True)
        named = {
            f"the gradient of {name}": torch.zeros_like(leaf) if gradient is None else gradient.detach()
            for (name, leaf), gradient in zip(leaves.items(), gradients)
        }
        outputs = [each.detach() if isinstance(each, Tensor) else each for each in outputs]
        return {f"its output{f' {at}' if at else ''}": each for at, each in enumerate(outputs)} | named

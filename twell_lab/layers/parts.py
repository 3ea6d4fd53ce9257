"""The projections of a feed-forward layer, however a family of models stores them: as weight [out, in] and bias."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..core import InputError
from ..ops.kept import place
from .shards import BY_COLUMNS, is_sharded, part_of, split_of

# Classes of transformers that compute x W^T + b in another way than nn.Linear, and Conv1D, which stores W^T.
TRANSPOSED = ("transformers.pytorch_utils.Conv1D",)
LIKE_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear", *TRANSPOSED)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile's wrapper holds, whose layers have their own names; any other as it is."""
    while "_orig_mod" in vars(model).get("_modules", ()):
        model = model._modules["_orig_mod"]
    return model


def is_linear(module) -> bool:
    """Whether the module computes x W^T + b, so that its weight and bias say all about it.

    A subclass of nn.Linear with a forward of its own (an adapter, a quantised layer) need not.
    """
    if not isinstance(module, nn.Linear):
        return False
    return type(module).forward is nn.Linear.forward and _as_its_class(module)


def is_projection(module) -> bool:
    """Whether the module is linear, or of LIKE_LINEAR."""
    return is_linear(module) or _class(module) in LIKE_LINEAR and _as_its_class(module)


def _as_its_class(module: nn.Module) -> bool:
    own = own_forward(module)
    return own is None or isinstance(own, HandOn) or split_of(module) is not None


def dispatched(module: nn.Module) -> bool:
    """Whether a hook of accelerate's is the outermost of what was put on this module: it calls the forward beneath."""
    held = vars(module)
    wrapper = held.get("forward")
    return "_hf_hook" in held and type(wrapper) is partial and wrapper.func.__module__ == "accelerate.hooks"


def own_forward(module: nn.Module) -> object:
    """The forward that was set on this module in the place of its class's, beneath a hook of accelerate's; None if none
    was."""
    found = vars(module).get("_old_forward" if dispatched(module) else "forward")
    usual = getattr(found, "__self__", None) is module and getattr(found, "__func__", None) is type(module).forward
    return None if usual else found


def set_forward(module: nn.Module, forward: object) -> None:
    """Set the module's forward, beneath a hook of accelerate's; None: that of its class."""
    if dispatched(module):
        module._old_forward = forward or MethodType(type(module).forward, module)
    elif forward is not None:
        module.forward = forward
    else:
        del module.forward


def _class(module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def projection(module: nn.Module, half: int | None = None) -> nn.Linear:
    """The projection that this module holds: itself, if it is one and whole, or a Cut. half: the first (0) or the
    second (1) half of its outputs, None for all."""
    if (split := split_of(module)) is not None:
        return Share(module, half, split.by == BY_COLUMNS)
    if half is None and _class(module) not in TRANSPOSED:
        return module
    return Cut(module, half, _class(module) in TRANSPOSED)


def whole(part: nn.Module) -> nn.Module:
    """The module of the model's that a projection is, or is cut out of."""
    return part.of if isinstance(part, Cut) else part


class Cut(nn.Linear):
    """A projection that another module stores: a half of its rows, the transpose of its weight, one of several weights
    of the same shape.

    of: the module. half: 0 or 1, None for all rows. names: what it calls weight and bias. index: which of the weights,
    None where there is one. Weight and bias are views; without gradients they are Parameters that share the module's
    memory and versions, so that copies made of them are kept (ops.copies)."""

    def __init__(
        self,
        of: nn.Module,
        half: int | None,
        transposed: bool,
        names: tuple[str, str | None] = ("weight", "bias"),
        index: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.of, self.half, self.transposed, self.index = of, half, transposed, index
        self.names = names
        self._aliases: dict[str, tuple] = {}
        self.training = of.training

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        found = self._view(self.names[0])
        assert found is not None
        return found

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self._view(self.names[1]) if self.names[1] else None

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[0]

    def _view(self, name: str) -> Tensor | None:
        stored = getattr(self.of, name)
        if stored is None:
            return None
        with_gradients = torch.is_grad_enabled() and stored.requires_grad
        if with_gradients or torch.compiler.is_compiling() or type(stored) is not Parameter or stored.is_meta:
            return self._cut(stored)
        key = (id(stored), place(stored))
        held = self._aliases.get(name)
        if held is None or held[0] != key:
            with torch.inference_mode(False):
                alias = self._cut(stored.detach())
                held = (key, stored, Parameter(alias, requires_grad=False))
            self._aliases[name] = held
        return held[2]

    def _cut(self, stored: Tensor) -> Tensor:
        if self.index is not None:
            stored = stored[self.index]
        if self.transposed and stored.dim() == 2:
            stored = stored.t()
        if self.half is None:
            return stored
        rows = stored.shape[0] // 2
        return stored.narrow(0, self.half * rows, rows)

    def __getstate__(self) -> dict:
        """For copies and pickles: without aliases, which would be copies."""
        return {**vars(self), "_aliases": {}}

    # What is put here is to see what the model computes, so it goes on the module that the model calls.

    def register_forward_pre_hook(self, hook, **how):
        return self.of.register_forward_pre_hook(hook, **how)

    def register_forward_hook(self, hook, **how):
        def of_half(module, args, output):
            if self.half is not None:
                output = output.chunk(2, dim=-1)[self.half]
            hook(module, args, output)  # to see, not to change

        return self.of.register_forward_hook(of_half, **how)


class Share(Cut):
    """What this process holds of a projection that is split over several (twell_lab.layers.shards): its neurons' rows,
    or their columns, whose products are summed over the processes before they get the bias."""

    def __init__(self, of: nn.Module, half: int | None, by_columns: bool) -> None:
        super().__init__(of, half, False, ("weight", None if by_columns else "bias"))

    def _view(self, name: str) -> Tensor | None:
        stored = getattr(self.of, name)
        if stored is None:
            return None
        if not is_sharded(stored):
            raise InputError(
                f"the {name} of a SparseFFN is no longer split over processes; accepted: one that is, or "
                "twell_lab.densify first"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and stored.requires_grad):
            return self._cut(part_of(stored))


class HandOn:
    """The forward of a projection in a block whose activation's seat does all the work: it returns its input.

    seats: the names of the parts in the block. Raises InputError where a part was replaced since: another activation
    would get what the projection gets.
    """

    def __init__(self, block: nn.Module, seats: tuple[str, ...]) -> None:
        self.block, self.parts = block, [(seat, attrgetter(seat)(block)) for seat in seats]

    def __call__(self, x: Tensor) -> Tensor:
        for seat, part in self.parts:
            if attrgetter(seat)(self.block) is not part:
                raise InputError(
                    f"{seat} of a swapped {type(self.block).__name__} was replaced; accepted: twell_lab.densify first"
                )
        return x


def part_at(module: nn.Module, seat: str) -> object:
    """What is at this place in the module, such as "output.dense"; None if there is nothing."""
    found: object = module
    for name in seat.split("."):
        found = getattr(found, name, None)
        if found is None:
            return None
    return found


def put(module: nn.Module, seat: str, part: object) -> None:
    """Set what is at this place in the module: a module, or a function."""
    above, _, name = seat.rpartition(".")
    block = attrgetter(above)(module) if above else module
    if not isinstance(part, nn.Module):
        block._modules.pop(name, None)  # torch would not have a function in a module's place
    setattr(block, name, part)

"""Routed experts, whose weights lie in a few tensors of three dimensions: Mixtral, Qwen-MoE, OLMoE, DeepSeek and others
of transformers. Each is a feed-forward layer. A swap gives their module, which stays where it is, SparseFFNs as
children, "0", "1", ..., and a forward that calls them, `Routed`."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .choice import DENSE
from .families import Family
from .parts import FeedForward, Over, Part, formula, hidden_of

# What the modules call their weights, gate and up in one or up alone; a bias has the name of its weight and "_bias".
FUSED, PLAIN, DOWN, ACTIVATION = "gate_up_proj", "up_proj", "down_proj", "act_fn"


class Expert(nn.Module):
    """One expert of a module of them, as a feed-forward layer: x [tokens, d_model] -> [tokens, d_model]."""

    def __init__(self, of: nn.Module, number: int, transposed: bool) -> None:
        super().__init__()
        self._of, self.number = [of], number  # in a list: the experts are not this module's children
        self.training = of.training
        gated = FUSED in of._parameters
        first = FUSED if gated else PLAIN

        def part(name: str, half: int | None) -> Part:
            bias = f"{name}_bias"
            return _ExpertPart(of, half, transposed, (name, bias if bias in of._parameters else None), number)

        parts = part(FUSED, 0) if gated else None, part(first, 1 if gated else None), part(DOWN, None)
        family = Family("an expert", first, DOWN, ACTIVATION, FUSED if gated else None)
        self._own = FeedForward("", self, *parts, family=family)

    of = property(lambda self: self._of[0], doc="The module of all experts.")

    def own_parts(self) -> FeedForward:
        return self._own._replace(acts=getattr(self.of, ACTIVATION))

    def forward(self, x: Tensor) -> Tensor:
        return formula(self.own_parts(), x)


class _ExpertPart(Part):
    """A projection of one expert. No module calls it, so what is to see its input or output is given what the expert
    computes; meanwhile `given` says which tokens that are, int64 [tokens], and of how many."""

    given: tuple[Tensor, int] | None = None

    def register_forward_hook(self, hook):
        return self._when_called(lambda x: hook(self, (x,), linear(x, self.weight, self.bias)))

    def register_forward_pre_hook(self, hook):
        parts = Expert(self.owner, self.index, self.transposed).own_parts()
        return self._when_called(lambda x: hook(self, (hidden_of(parts, x) if self.names[0] == DOWN else x,)))

    def _when_called(self, look):
        def called(module, args, kwargs) -> None:
            x, chosen, _ = _arguments(module, args, kwargs)
            rows = (chosen == self.index).any(-1).nonzero().flatten()
            if rows.numel():
                self.given = rows, len(x)
                look(x[rows])

        return self.owner.register_forward_pre_hook(called, with_kwargs=True)


def stored(module: nn.Module) -> tuple[int, bool] | None:
    """Return how many experts a module holds, and whether their weights are transposed, [experts, in, out]; None if it
    holds none."""
    own = module._parameters
    halves = 1 if own.get(FUSED) is None else 2
    first, down = own.get(FUSED if halves == 2 else PLAIN), own.get(DOWN)
    if first is None or down is None or first.dim() != 3 or getattr(module, ACTIVATION, None) is None:
        return None
    number, rows, width = first.shape
    shapes = {False: (number, width, rows / halves), True: (number, width / halves, rows)}
    ways = [way for way, shape in shapes.items() if tuple(down.shape) == shape]
    hint = bool(getattr(module, "is_transposed", False))  # where both fit
    return (number, hint if hint in ways else ways[0]) if ways else None


def experts_of(module: nn.Module) -> list[Expert]:
    """Return the experts that a module holds."""
    number, transposed = stored(module) or (0, False)
    return [Expert(module, number, transposed) for number in range(number)]


def _arguments(module: nn.Module, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens [tokens, d_model], and of each its experts and their weights [tokens, top_k]."""
    if kwargs:
        args = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
    return args


def mixed(x: Tensor, chosen: Tensor, weights: Tensor, experts: int, one) -> Tensor:
    """Return the sum of what the chosen experts give for x [tokens, d_model], weighted. Waits for the device.

    chosen: [tokens, top_k]; numbers from `experts` on are nobody's. one(expert, rows of x): what an expert gives;
    called for those that somebody chose."""
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weights.dtype))
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat, minlength=experts)[:experts].tolist()
    for expert, places in enumerate(flat.argsort(stable=True)[: sum(counts)].split(counts)):
        if len(places):
            rows = places // chosen.shape[-1]
            share = weights[rows, places % chosen.shape[-1], None]
            total = total.index_add(0, rows, (one(expert, x[rows]) * share).to(total.dtype))
    return total.to(x.dtype)


class Routed(Over):
    """The forward of a module of experts some of which were swapped: each is given its tokens, one after the other,
    which takes the host's time and waits for the device once. So the module computes as before where that gains
    nothing (every path is dense, or gradients are needed and nobody asked for layer_terms) or cannot be (inputs on
    another device, torch.compile, CUDA graphs)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.experts = experts_of(module)

    def __call__(self, *args, **kwargs):
        if not self._apart(args, kwargs):
            return self.beneath(*args, **kwargs)
        layers = [self.module._modules.get(str(expert.number), expert) for expert in self.experts]
        return mixed(*_arguments(self.module, args, kwargs), len(layers), lambda number, rows: layers[number](rows))

    def _apart(self, args: tuple, kwargs: dict) -> bool:
        tensors = [t for t in (*args, *kwargs.values(), *self.module._parameters.values()) if isinstance(t, Tensor)]
        if torch.compiler.is_compiling() or len({t.device for t in tensors}) > 1:
            return False
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        layers = [layer for name, layer in self.module._modules.items() if name.isdigit()]
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        plans = not learns and any(choice != DENSE for layer in layers for _, choice in layer.choices)
        return plans or any(layer.reports for layer in layers)

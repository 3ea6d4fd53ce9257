"""Layers for the tests of the operators, the same layers by torch, and the two ways in which the CPU computes them."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from twell_lab import ops
from twell_lab.ops import cpu, reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Layer:
    """The tensors of one layer, under the operators' own names; gate is None for a plain layer."""

    x: Tensor
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def draw(cls, tokens=5, d_model=12, d_ff=40, *, gated=True, dtype=torch.float32, biases="", fires=0.5, seed=0):
        """Normal values; each neuron fires with probability `fires`. biases: any of the letters g, u, d."""
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        x = normal(tokens, d_model)
        pattern, up, down = normal(d_ff, d_model), normal(d_ff, d_model), normal(d_model, d_ff)
        # The rest of the threshold's work is done by a constant input, as a bias would.
        x[:, 0] = d_model**0.5
        pattern[:, 0] = torch.special.ndtri(torch.tensor(fires)) if d_model > 1 else 2 * fires - 1
        bias = {"g": normal(d_ff), "u": normal(d_ff), "d": normal(d_model)}
        g, u, d = (bias[name].to(dtype) if name in biases else None for name in "gud")
        x, pattern, up, down = (t.to(dtype) for t in (x, pattern, up, down))
        return cls(x, pattern, up, down, g, u, d) if gated else cls(x, None, pattern, down, None, u, d)

    @property
    def weights(self) -> dict[str, Tensor]:
        """All tensors but x that are not None, by name."""
        return {name: t for name, t in vars(self).items() if name != "x" and t is not None}

    def replace(self, **tensors) -> Layer:
        return Layer(**{**vars(self), **tensors})

    def sparse(self, **options) -> Tensor:
        return (ops.plain_ffn if self.gate is None else ops.gated_ffn)(self.x, **self.weights, **options)

    def dense(self) -> Tensor:
        """What torch's dense layer computes, in the layer's own dtype."""
        hidden = torch.relu(self.pattern())
        if self.gate is not None:
            hidden = hidden * linear(self.x, self.up, self.up_bias)
        return linear(hidden, self.down, self.down_bias)

    def pattern(self) -> Tensor:
        """The input of the ReLU: the result of the gate's GEMM (in a plain layer up's), by torch for both layers."""
        if self.gate is None:
            return linear(self.x, self.up, self.up_bias)
        return linear(self.x, self.gate, self.gate_bias)

    def exact(self) -> Tensor:
        """In float64, from the rounded input of the ReLU on: which neurons fire is the same in both layers."""
        pattern, wide = self.pattern().double(), {n: t.double() for n, t in self.weights.items()}
        if self.gate is None:
            return linear(reference.relu(pattern), wide["down"], wide.get("down_bias"))
        biases = wide.get("up_bias"), wide.get("down_bias")
        return reference.gated(self.x.double(), pattern, wide["up"], wide["down"], *biases)


def taking(path: str):
    """A context in which the CPU layer takes the named path: over the entries, dense, or the one that it chooses."""
    if path == "either":
        return mock.patch.object(cpu, "_pays", cpu._pays)
    return mock.patch.object(cpu, "_pays", lambda gate, entries: path == "entries")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Such small tensors gain nothing from a second thread, and on a busy machine they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def draw():
    return Layer.draw


@pytest.fixture(params=["entries", "dense"])
def path(request):
    """Runs a test once over the entries and once through the CPU's dense path."""
    with taking(request.param):
        yield request.param


@pytest.fixture(params=[True, False], ids=["gated", "plain"])
def gated(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=["bf16", "fp16", "fp32"])
def dtype(request):
    return request.param


@pytest.fixture
def forced():
    """forced(path): the context for that path, for tests that hypothesis repeats within one fixture."""
    return taking

"""Drawn feed-forward layers, dense, whose biases say how often each neuron fires."""

import copy

import torch
from torch import nn

from twell_lab.ops import accuracy

GATED, PLAIN = "gated", "plain"


class Dense(nn.Module):
    """A layer as models have it: down(relu(gate(x)) * up(x)), or down(relu(up(x)))."""

    def __init__(self, d_model: int, d_ff: int, gated: bool = True, bias: bool = True) -> None:
        super().__init__()
        if gated:
            self.gate_proj = nn.Linear(d_model, d_ff, bias=True)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.act_fn = nn.ReLU()

    def forward(self, x):
        if hasattr(self, "gate_proj"):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.act_fn(self.up_proj(x)))


def layer(
    d_model=16, d_ff=300, *, gated=True, bias=True, dtype=torch.float32, density=0.05, seed=0, device="cpu"
) -> Dense:
    """A Dense in evaluation mode whose neurons fire with this density, some of them ten times as often as others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Dense(d_model, d_ff, gated, bias)
        first = made.gate_proj if gated else made.up_proj
        if first.bias is not None:
            rates = torch.logspace(-1, 1, d_ff)[torch.randperm(d_ff)]
            rates = (rates / rates.mean() * density).clamp(max=0.99)
            spread = first.weight.detach().norm(dim=1)
            first.bias.data = torch.special.ndtri(rates) * spread
    return made.to(device, dtype).eval()


def rows(tokens: int, d_model=16, *, dtype=torch.float32, seed=1, device="cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, d_model, generator=generator).to(device, dtype)


def check_close(y: torch.Tensor, dense: nn.Module, x: torch.Tensor) -> None:
    """Promise 1, and that y is finite where the dense layer's result is."""
    with torch.no_grad():
        wanted, usual = copy.deepcopy(dense).double()(x.double()), dense(x)
    y, usual, wanted = (each.reshape(-1, y.shape[-1]) for each in (y, usual, wanted))
    assert y.dtype == x.dtype and torch.equal(y.isfinite().all(1), usual.isfinite().all(1))
    assert accuracy.worst_row(y, usual, wanted)[0] <= 1.0

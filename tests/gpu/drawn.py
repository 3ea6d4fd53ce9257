"""Layers that the GPU tests draw."""

import torch


def tensors(tokens, d_model=256, d_ff=1000, gated=True, dtype=torch.bfloat16, biased=False, rate=2.3, seed=0):
    """x and the weights of a layer whose neurons fire with the probability of a normal variable above `rate`."""
    g = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    x, first = normal(tokens, d_model), normal(d_ff, d_model) / d_model**0.5
    x[:, 0], first[:, 0] = 1.0, -rate
    up, down = normal(d_ff, d_model) / d_model**0.5, normal(d_model, d_ff) / 4
    biases = [normal(d_ff) / 4, normal(d_ff) / 4, normal(d_model)] if biased else [None] * 3
    made = [x, first, up, down, *biases] if gated else [x, None, first, down, None, *biases[1:]]
    return [None if t is None else t.to(dtype) for t in made]

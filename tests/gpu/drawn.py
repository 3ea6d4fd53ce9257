"""Layers that the GPU tests draw, and what is right of them."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from twell_lab.cuda.launch import Bound
from twell_lab.ops import reference
from twell_lab.ops.activation import RELU
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

NAMES = ("gate_proj", "up_proj", "down_proj")


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


def module(x, gate, up, down, *biases) -> nn.Module:
    """A dense layer with these weights, in evaluation mode and without gradients."""
    with torch.device("meta"):
        layer = (PlainFeedForward if gate is None else GatedFeedForward)(*up.shape[::-1])
    for name, weight, bias in zip(NAMES, (gate, up, down), biases):
        if weight is not None:
            part = getattr(layer, name)
            part.weight = nn.Parameter(weight.clone())
            part.bias = None if bias is None else nn.Parameter(bias.clone())
    return layer.eval().requires_grad_(False)


def dense_of(x, gate, up, down, gate_bias, up_bias, down_bias, acts=RELU) -> Tensor:
    """The layer as torch's operations compute it."""
    h = acts.dense(linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias))
    return linear(h if gate is None else h * acts.of_up(linear(x, up, up_bias)), down, down_bias)


def exact_of(x, gate, up, down, gate_bias, up_bias, down_bias, acts=RELU) -> Tensor:
    """The layer in float64, from the gate that torch rounds: who fires is a matter of its last bit."""
    wide = lambda t: None if t is None else t.double()  # noqa: E731
    first = linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias)
    if acts == RELU:
        first = first.double()
        if gate is None:
            return linear(reference.relu(first), wide(down), wide(down_bias))
        return reference.gated(x.double(), first, *map(wide, (up, down, up_bias, down_bias)))
    again = linear(x.double(), *map(wide, (up, up_bias) if gate is None else (gate, gate_bias)))
    h = torch.where(acts.keeps(first), acts.value(again), 0.0)
    return linear(
        h if gate is None else h * acts.of_up(linear(x.double(), wide(up), wide(up_bias))),
        *map(wide, (down, down_bias)),
    )


def unwaiting(call):
    """The result of a call during which waiting for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call):
    """What a graph of a call leaves in its output once it was replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    graph.replay()
    return y


def on_another_stream(call):
    """The result of a call on a stream that waits for this one, and that this one waits for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = call()
    torch.cuda.current_stream().wait_stream(side)
    return result


def launched(monkeypatch) -> list[str]:
    """A list to which the name of each kernel is added when it is launched."""
    names, launch = [], Bound._launch

    def noted(bound, starts):
        names.extend(what.split()[0] for _, what in bound._starts)
        launch(bound, starts)

    monkeypatch.setattr(Bound, "_launch", noted)
    return names

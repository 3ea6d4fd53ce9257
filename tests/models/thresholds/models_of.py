"""Small models with random weights whose feed-forward layers are not sparse, for the tests of thresholds."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.layers.models_of import build
from tests.models.tiny import test_model
from twell_lab.ops.reference import SquaredReLU


def llama(**changes):
    """With weights so small that few gates lie at the least value of a SiLU."""
    model = build("Llama", **{"hidden_act": "silu", **changes})
    for weight in model.parameters():
        weight.data /= 2 if weight.dim() > 1 else 1
    return model


def gpt2():
    return build("GPT-2", act="gelu_new")


def ours(activation: Callable | None = None, **changes):
    """This project's own model, with another activation in its layers."""
    model = test_model.model(**dict(vocabulary=64, d_model=16, heads=2, context=32) | changes)
    for block in model.layers if activation is not None else ():
        del block.mlp.act_fn  # torch would not have a function in a module's place
        block.mlp.act_fn = activation
    return model


MODELS = {
    "Llama": llama,
    "GPT-2": gpt2,
    "OPT": lambda: build("OPT", act="gelu"),
    "Phi-3": lambda: build("Phi-3", act="silu"),
    "ours, SiLU": lambda: ours(nn.SiLU()),
    "ours, SiLU in place": lambda: ours(nn.SiLU(inplace=True)),
    "ours, a function": lambda: ours(F.silu),
    "ours, plain GELU": lambda: ours(nn.GELU(), gated=False),
    "ours, ReLU": ours,
    "ours, squared ReLU": lambda: ours(SquaredReLU()),
}


def tokens(rows: int = 12, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def answer(model) -> torch.Tensor:
    found = model(tokens(3, 9, seed=5))
    return getattr(found, "logits", found)

"""Whole models that need no download: Llamas of given sizes with random weights, whose gates' biases are set so that
each layer fires as sparsely as asked for. Wherever their times are shown, they are called drawn."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from .. import core
from ..analysis.profile import FiringProfile
from ..core import StackError
from ..formats.twell import VALUE_DTYPES
from ..layers.find import feed_forwards
from ..models.tiny import ModelConfig, parameters
from ..ops import clock
from ..training import config as named_sizes
from .rows import need

SEEN = 4096  # tokens that the biases are set on, and that a profile counts: so many, or two windows
NAMES = named_sizes.NAMES  # of the sizes that `sizes_of` knows; the last four are the paper's
# Of 5,632 neurons: the mean nnz of the first layer of the paper's 2B model, of its last one, and over all layers.
_D_FF, _LEAST, _MOST, _MEAN = 5632, 2.0, 109.0, 29.0


def sizes_of(size: str | ModelConfig) -> ModelConfig:
    """Return the sizes of this name, with this project's vocabulary, or these themselves. InputError for another name,
    and for a configuration that a Llama does not have."""
    if isinstance(size, str):
        fields = named_sizes.named(size)
        sizes = {name: fields[name] for name in ("layers", "d_model", "d_ff", "heads", "context")}
        return ModelConfig(**sizes, vocabulary=named_sizes.BPE if "tokenizer" in fields else 256)
    what = f"the configuration has gated={size.gated} and activation={size.activation!r}, and a Llama is drawn"
    need(size.gated and size.activation == "relu", what, "gated=True and 'relu', or a model of these sizes")
    return size


def llama(
    sizes: ModelConfig, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> nn.Module:
    """Return a LlamaForCausalLM with ReLU and random weights. changes: of its LlamaConfig. StackError where
    transformers is missing."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise StackError("a drawn model is one of transformers, which is missing: pip install transformers") from None
    fields = {"hidden_size": sizes.d_model, "intermediate_size": sizes.d_ff, "num_hidden_layers": sizes.layers}
    fields |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), sizes.heads)
    fields |= {"vocab_size": sizes.vocabulary, "max_position_embeddings": sizes.context + 1}
    config = LlamaConfig(**{**fields, "hidden_act": "relu", **changes})
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    # As trained models are: a token says more than the mean of the tokens before it. With transformers' own values that
    # mean grows from layer to layer, and what fires in one sequence says little of another.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    for layer in model.model.layers:
        for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(added.weight, std=config.initializer_range / (2 * sizes.layers) ** 0.5)
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def fire(model: nn.Module, run: Callable[[], object], nnzs: Sequence[float | Tensor]) -> None:
    """Give each gate a bias, layer by layer, while run() calls the model: quantiles of its products, so that
    about so many of its neurons fire at a token, at lognormal rates, or each at its rate [d_ff]."""

    def before(gate: nn.Linear, args: tuple, nnz: float | Tensor, seed: int) -> None:
        products = (args[0].flatten(0, -2) @ gate.weight.t()).float()
        rates = nnz if isinstance(nnz, Tensor) else clock.firing_rates(len(gate.weight), nnz, "lognormal", seed=seed)
        rates = rates.to(products.device)
        place = ((1 - rates) * (len(products) - 1)).round().long().clamp(0, len(products) - 1)
        ordered = products.t().contiguous().sort().values  # along rows in memory: a third of the time
        quantiles = ordered.gather(1, place[:, None])[:, 0]
        off = -torch.where(rates < 1 / len(products), quantiles.abs() * 2 + 1, quantiles).to(gate.weight.dtype)
        gate.bias = nn.Parameter(off, requires_grad=gate.weight.requires_grad)

    with ExitStack() as hooks:
        for i, (layer, nnz) in enumerate(zip(feed_forwards(model), nnzs, strict=True)):
            hook = layer.gate.register_forward_pre_hook(functools.partial(before, nnz=nnz, seed=i))
            hooks.callback(hook.remove)
        run()


def windows_of(context: int) -> int:
    """Return how many windows of this length hold SEEN tokens; two at least."""
    return max(2, -(-SEEN // context))


def rates_like(firing: FiringProfile, layers: int, d_ff: int) -> list[Tensor]:
    """Return rates at which the neurons of so many layers of d_ff neurons fire, float64 [d_ff] each, distributed as
    those of the profiled layer at the same relative depth. Which neuron has which rate is drawn."""
    rates, generator = [], torch.Generator().manual_seed(0)
    for i in range(layers):
        like = firing.layers[round(i * (len(firing.layers) - 1) / max(1, layers - 1))]
        ordered = (like.neuron_counts.double() / max(1, like.tokens)).sort().values
        places = (torch.arange(d_ff, dtype=torch.float64) + 0.5) / d_ff * len(ordered)  # evenly spread
        rates.append(ordered[places.long()][torch.randperm(d_ff, generator=generator)])
    return rates


@torch.no_grad()
def fired(
    sizes: ModelConfig,
    device: torch.device,
    dtype: torch.dtype | None = None,
    firing: FiringProfile | str | os.PathLike | None = None,
) -> nn.Module:
    """Return a drawn model whose layers fire as often as those of the paper, or as those of a profile (or a file with
    one) do. InputError, before anything is built, where this machine's memory is too small for it, a sparse copy and
    one in float32; a GPU says itself what does not fit."""
    dtype = dtype or clock.dtype_for(device)
    need(dtype in VALUE_DTYPES, f"dtype is {dtype!r:.80}", "bfloat16, float16 and float32")
    firing = FiringProfile.load(firing) if isinstance(firing, (str, os.PathLike)) else firing
    kind = type(firing).__name__
    need(isinstance(firing, FiringProfile | None), f"firing is a {kind}", "a FiringProfile or a file's name")
    needed = parameters(sizes) * (2 * dtype.itemsize + (0 if dtype == torch.float32 else 4))
    there = core.memory() or needed
    memory = f"{needed / 2**30:,.1f} GiB of memory, and this machine has {there / 2**30:,.1f}"
    what = f"a model of {parameters(sizes) / 1e9:.2g} billion parameters, twice, takes {memory}"
    need(device.type != "cpu" or needed <= there, what, "smaller sizes")
    if firing is None:  # the share of the neurons rises with the third power of the depth, as in the paper's 2B model
        depths = [i / max(1, sizes.layers - 1) for i in range(sizes.layers)]
        shape = [_LEAST + (_MOST - _LEAST) * depth**3 for depth in depths]
        rates: Sequence[float | Tensor] = [nnz / fmean(shape) * _MEAN / _D_FF * sizes.d_ff for nnz in shape]
    else:
        rates = rates_like(firing, sizes.layers, sizes.d_ff)
    model = llama(sizes, device, dtype)
    tokens = torch.randint(0, sizes.vocabulary, (windows_of(sizes.context), sizes.context), device=device)
    fire(model, functools.partial(model, tokens, use_cache=False, logits_to_keep=1), rates)
    return model

"""Whole models that need no download: Llamas of a given shape with random weights, whose gates' biases are set so that
each layer fires as sparsely as asked for. Wherever their times are shown, they are called drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import core
from ..analysis.profile import FiringProfile
from ..core import InputError, StackError
from ..layers.find import feed_forwards
from ..models.tiny import ModelConfig, parameters
from ..training import presets
from .training import thresholds

SEEN = 4096  # tokens that the biases are set on, and that a profile counts: so many, or two windows


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and of what it is run on. The defaults are the paper's 2B shape, with this project's
    vocabulary (twell_lab.training.presets)."""

    layers: int = 38
    d_model: int = 2048
    d_ff: int = 5632
    heads: int = 32
    vocabulary: int = 32768
    context: int = 2048
    sequences: int = 64
    cached: int = 512  # tokens of each sequence, the new one among them, in a step of decoding
    least: float = 2.0  # mean nnz of the first layer
    most: float = 109.0  # and of the last one
    mean: float = 29.0  # over all layers
    device: str = "cuda"

    @property
    def nnzs(self) -> list[float]:
        """The mean nnz of each layer: it rises from the least to the most with a power of the depth. The power that
        gives the mean over all layers is found by halving an interval."""
        low, high = 0.01, 100.0
        for _ in range(60):
            power = (low + high) / 2
            found = [
                self.least + (self.most - self.least) * (i / max(1, self.layers - 1)) ** power
                for i in range(self.layers)
            ]
            low, high = (power, high) if sum(found) > self.mean * self.layers else (low, power)
        return found


LLAMA = Shape()
NAMES = presets.NAMES  # of the shapes that `shape_of` knows; the last four are the paper's


def shape_of(size: str | ModelConfig, device: str = "cuda") -> Shape:
    """The shape of this name, or with the sizes of this configuration; the same share of its neurons fires as in LLAMA.

    Raises InputError for another name, and for a configuration without gates, which a Llama has."""
    if isinstance(size, str):
        fields = presets.named(size)
        sizes = {name: fields[name] for name in ("layers", "d_model", "d_ff", "heads", "context")}
        sizes["vocabulary"] = presets.BPE if "tokenizer" in fields else presets.BYTES
    else:
        if not size.gated or size.activation != "relu":
            raise InputError(
                f"the configuration has gated={size.gated} and activation={size.activation!r}; a Llama is drawn, so "
                "gated=True and 'relu' are accepted, or a model of these sizes"
            )
        sizes = {name: getattr(size, name) for name in ("layers", "d_model", "d_ff", "heads", "context", "vocabulary")}
    share = sizes["d_ff"] / LLAMA.d_ff
    firing = {name: share * getattr(LLAMA, name) for name in ("least", "most", "mean")}
    if sizes["layers"] == 1:
        firing["least"] = firing["mean"]
    return Shape(**sizes, **firing, device=device)


def check_room(shape: Shape, dtype: torch.dtype, copies: int) -> None:
    """InputError, before anything is built, where so many models of this dtype and one in float32 are more than the
    device has."""
    sizes = ("vocabulary", "d_model", "layers", "heads", "d_ff", "context")
    count = parameters(ModelConfig(**{name: getattr(shape, name) for name in sizes}))
    device = torch.device(shape.device)
    on_gpu = device.type == "cuda"
    there = torch.cuda.get_device_properties(device).total_memory if on_gpu else core.memory()
    needed = count * (copies * dtype.itemsize + (0 if dtype == torch.float32 else 4))
    if there is not None and needed > there:
        raise InputError(
            f"a model of {count / 1e9:.2g} billion parameters, {copies} times, takes {needed / 2**30:,.1f} GiB of "
            f"memory, and {device.type} has {there / 2**30:,.1f}; smaller sizes are accepted"
        )


def llama(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A LlamaForCausalLM with ReLU and biases in its feed-forward layers, random weights.

    Raises:
        StackError: where transformers is missing.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise StackError(
            "this benchmark times a model of transformers, which is missing: pip install transformers"
        ) from None
    config = LlamaConfig(
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context + 1,
        hidden_act="relu",
        mlp_bias=True,
    )
    torch.manual_seed(0)
    with torch.device(shape.device):
        model = LlamaForCausalLM(config)
    # As trained models are: a token says more than the mean of the tokens before it. With transformers' own values that
    # mean, which is nearly the same for all tokens of a sequence, grows from layer to layer, and what fires in one
    # sequence says little of another.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    for layer in model.model.layers:
        for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(added.weight, std=config.initializer_range / (2 * shape.layers) ** 0.5)
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def fire(model: nn.Module, tokens: Tensor, nnzs: Sequence[float | Tensor]) -> None:
    """Set the biases of each gate so that about so many of its neurons fire at a token, or each at its rate [d_ff],
    layer by layer."""

    def before(gate: nn.Linear, args: tuple, nnz: float | Tensor, seed: int) -> None:
        products = (args[0].flatten(0, -2) @ gate.weight.t()).float()
        gate.bias.copy_(-thresholds(products, nnz, seed=seed))

    hooks = [
        found.gate.register_forward_pre_hook(functools.partial(before, nnz=nnz, seed=i))
        for i, (found, nnz) in enumerate(zip(feed_forwards(model), nnzs, strict=True))
    ]
    try:
        model(tokens, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()


def windows_of(context: int) -> int:
    """Return how many windows of this length hold SEEN tokens; two at least."""
    return max(2, -(-SEEN // context))


def rates_like(firing: FiringProfile, layers: int, d_ff: int) -> list[Tensor]:
    """Rates at which the neurons of so many layers of d_ff neurons fire, float64 [d_ff] each, distributed as those of
    the profiled layer at the same relative depth. Which neuron has which rate is drawn."""
    found, generator = [], torch.Generator().manual_seed(0)
    for i in range(layers):
        like = firing.layers[round(i * (len(firing.layers) - 1) / max(1, layers - 1))]
        ordered = (like.neuron_counts.double() / max(1, like.tokens)).sort().values
        # What d_ff evenly spread shares of the profiled neurons do.
        places = (torch.arange(d_ff, dtype=torch.float64) + 0.5) / d_ff * len(ordered)
        found.append(ordered[places.long()][torch.randperm(d_ff, generator=generator)])
    return found


@torch.no_grad()
def fired(
    shape: Shape,
    dtype: torch.dtype = torch.bfloat16,
    firing: FiringProfile | None = None,
    mask: Callable[[Tensor], Tensor] | None = None,
) -> nn.Module:
    """A drawn model whose layers fire as the shape says, or as those of the profile do. mask: from the weight of a
    feed-forward projection to what of it is kept, bool; the others become zero before it is seen to what fires."""
    model = llama(shape, dtype)
    for found in feed_forwards(model) if mask is not None else ():
        for part in (found.gate, found.up, found.down):
            part.weight.mul_(mask(part.weight))
    tokens = torch.randint(0, shape.vocabulary, (windows_of(shape.context), shape.context), device=shape.device)
    fire(model, tokens, shape.nnzs if firing is None else rates_like(firing, shape.layers, shape.d_ff))
    return model

"""A small decoder-only language model with ReLU feed-forward layers: what the course trains and takes apart.

The shape is the usual one (Llama's): RMSNorm before each part, causal attention with rotary positions, and a
feed-forward layer that is either gated, `down(relu(gate(x)) * up(x))`, or plain, `down(relu(up(x)))`; in both
the ReLU may be a squared one. The feed-forward modules carry the attribute names of transformers' LlamaMLP: what
takes one takes the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import machine
from ..core.errors import InputError, TwellError
from ..core.files import parse_json, read, read_json, write_atomically
from ..ops.reference import ACTIVATIONS, GatedFeedForward, PlainFeedForward

FORMAT = 1  # of the saved form; raised when an older reader would misread it
LARGEST = 2**31 - 1  # of each size: products of two are still what a tensor can hold
_LAYER_BYTES = 16_384  # a layer's modules, beside its weights


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a LanguageModel.

    Attributes:
        vocabulary: how many token numbers there are.
        d_model, layers, heads, d_ff: as in TrainConfig.
        context: the most tokens of an input.
        gated: gated feed-forward layers, or plain ones.
        activation: "relu", or "relu2", its square (SquaredReLU).

    Raises:
        InputError: naming a size that is no whole number from 1 up, or does not go with another.
    """

    vocabulary: int = 256
    d_model: int = 128
    layers: int = 4
    heads: int = 4
    d_ff: int = 512
    context: int = 128
    gated: bool = True
    activation: str = "relu"

    def __post_init__(self) -> None:
        for name in ("vocabulary", "d_model", "layers", "heads", "d_ff", "context"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
                raise InputError(f"{name} is {value!r}; accepted: a whole number from 1 up to {LARGEST}")
        if not isinstance(self.gated, bool):
            raise InputError(f"gated is {self.gated!r}; accepted: True or False")
        if self.activation not in tuple(ACTIVATIONS):
            raise InputError(f"activation is {self.activation!r}; accepted: {', '.join(map(repr, ACTIVATIONS))}")
        if self.d_model % (2 * self.heads):
            raise InputError(
                f"d_model is {self.d_model} with heads {self.heads}; accepted: a multiple of "
                f"{2 * self.heads}, since rotary positions turn pairs within each head"
            )


def parameters(model: ModelConfig) -> int:
    """How many weights a LanguageModel of these sizes has, counted from its formulas."""
    feed_forward = (3 if model.gated else 2) * model.d_model * model.d_ff
    layer = 4 * model.d_model**2 + feed_forward + 2 * model.d_model  # attention, feed-forward, two norms
    return model.layers * layer + 2 * model.vocabulary * model.d_model + model.d_model


def check_fits(config: ModelConfig) -> None:
    """InputError where such a model would be more than this machine's memory, before anything of it is built."""
    # rotary positions: angles, sines, cosines, and what one of them is made of
    tables = 4 * config.context * (config.d_model // config.heads // 2)
    weights = 0 if torch.get_default_device().type == "meta" else 4 * (parameters(config) + tables)
    needed, there = weights + _LAYER_BYTES * config.layers, machine.memory()
    if there is not None and needed > there:
        sizes = ", ".join(f"{each.name} {getattr(config, each.name)}" for each in fields(config) if each.type == "int")
        raise InputError(
            f"a model of {sizes} takes {needed / 2**30:,.1f} GiB of memory, and this machine has "
            f"{there / 2**30:,.1f}; accepted: smaller sizes"
        )


class Attention(nn.Module):
    """Causal self-attention: [batch, context, d_model] -> the same shape."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv_proj(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, width of a head]
        mixed = F.scaled_dot_product_attention(
            rotate(query, cosine, sine), rotate(key, cosine, sine), value, is_causal=True
        )
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864): turn each pair (i, i + half) by an angle that grows
    with the position, so that a query meets a key through their distance alone. x is [..., context, width],
    the tables are [context, width / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to the stream it reads: [batch, context, d_model]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.attention = Attention(config.d_model, config.heads)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        kind = GatedFeedForward if config.gated else PlainFeedForward
        self.mlp = kind(config.d_model, config.d_ff, config.activation)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Token numbers in, scores of the next token out: int64 [batch, context] -> [batch, context, vocabulary].

    Weights start as normal numbers, drawn from torch's global CPU generator: of deviation 1 in the embedding,
    1 / sqrt(inputs) elsewhere, and sqrt(2 * layers) times less where a part adds to the stream (as in GPT-2).
    InputError for sizes that do not fit into this machine's memory.
    """

    def __init__(self, config: ModelConfig) -> None:
        check_fits(config)
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        half = config.d_model // config.heads // 2
        angles = torch.arange(config.context)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        nn.init.normal_(self.embedding.weight)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                shrink = (2 * config.layers) ** -0.5 if name.endswith(("out_proj", "down_proj")) else 1.0
                nn.init.normal_(module.weight, std=shrink * module.in_features**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.config.context:
            raise InputError(
                f"tokens have shape {list(tokens.shape)}; accepted: [batch, context] with a "
                f"context of 1 to {self.config.context}"
            )
        cosine, sine = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.head(self.norm(x))

    def save(self, folder: str | os.PathLike) -> Path:
        """Write model.safetensors and config.json into `folder` (made if need be), each whole or not at all.

        Raises InputError where the folder can't be written.
        """
        folder = Path(folder)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        fields = asdict(self.config)
        if fields["activation"] == "relu":  # what a file without the field means: readers from before it take this too
            del fields["activation"]
        described = {"format": FORMAT, **fields}
        try:
            write_atomically(
                folder / "model.safetensors",
                safetensors.torch.save(weights, {"sha256": fingerprint(weights, described)}),
            )
            write_atomically(folder / "config.json", json.dumps(described, indent=2) + "\n")
        except TwellError as error:
            raise InputError(f"cannot save the model in {str(folder)!r}: {error}") from None
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike) -> LanguageModel:
        """The model that `save` wrote, on the CPU, in training mode.

        Raises InputError for a folder without one, an unknown format, weights of other names or shapes, and files that
        changed since they were written."""
        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                stopped = sorted(folder.glob("checkpoint-*/model.safetensors"))
                hint = f"; a run was stopped there, whose model is in {str(stopped[-1].parent)!r}" if stopped else ""
                raise InputError(f"there is no model in {str(folder)!r}: no {name}{hint}")
        try:
            said = read_json(folder / "config.json", "model")
            content = read(folder / "model.safetensors")
            weights = safetensors.torch.load(content)
            header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
            noted = header.get("__metadata__", {}).get("sha256")  # not in a file from before there was one
            found = fingerprint(weights, said)
            if not isinstance(said, dict) or type(said.get("format")) is not int or said.pop("format") != FORMAT:
                raise InputError(f"config.json in {str(folder)!r} is not of format {FORMAT}, the one read")
            if unknown := sorted(said.keys() - {each.name for each in fields(ModelConfig)}):
                raise InputError(f"config.json in {str(folder)!r} has {unknown[0]!r}, which this release does not know")
            config = ModelConfig(**said)
            held = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
            # On meta nothing is built yet. Of layers without weights one is enough: it is named as missing.
            with torch.device("meta"):
                wanted = cls(replace(config, layers=min(config.layers, held + 1))).state_dict()
            check_shapes(f"the weights in {str(folder)!r}", weights, {name: t.shape for name, t in wanted.items()})
            if wrong := sorted(name for name, weight in weights.items() if not weight.dtype.is_floating_point):
                raise InputError(
                    f"{wrong[0]} is {weights[wrong[0]].dtype} in the weights in {str(folder)!r}; accepted: "
                    "floating-point weights"
                )
            if noted not in (None, found):
                raise InputError(
                    f"config.json or model.safetensors in {str(folder)!r} was altered after it was written: the "
                    f"model's SHA-256 is {found}, and {noted} is noted in it; accepted: both files of one model"
                )
            model = cls(config)
            model.load_state_dict(weights)
        except InputError:
            raise
        except Exception as error:  # each library raises its own kind
            raise InputError(f"no model can be loaded from {str(folder)!r}: {error}") from error
        return model


def fingerprint(weights: dict[str, Tensor], config: object) -> str:
    """A SHA-256 of a model: of what its config.json holds, and the name, dtype, shape and bytes of every weight (on the
    CPU)."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_shapes(what: str, found: dict[str, Tensor], wanted: dict[str, tuple]) -> None:
    """InputError naming the first tensor among those found that is missing, unknown, or of another shape."""
    for name in sorted(found.keys() ^ wanted.keys()):
        raise InputError(
            f"{what} {'lack' if name in wanted else 'have an unknown'} {name!r}; accepted: the tensors of this model"
        )
    for name, shape in wanted.items():
        if tuple(found[name].shape) != tuple(shape):
            raise InputError(
                f"{name} has shape {list(found[name].shape)} in {what}, and {list(shape)} in this model; accepted: "
                "weights of this model"
            )

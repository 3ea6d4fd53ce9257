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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import InputError, StackError

if TYPE_CHECKING:
    from .ffn import FeedForward

FORMAT = 1  # of the saved form; raised when an older reader would misread it


class SquaredReLU(nn.Module):
    """relu(x)^2, element by element (So et al., "Primer", arXiv 2109.08668): the same neurons fire, more steeply.

    The sparse layers (twell_lab.ffn) compute ReLU alone: `sparsify` and `SparseFFN` refuse a layer with this one.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


ACTIVATIONS = {"relu": nn.ReLU, "relu2": SquaredReLU}


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a LanguageModel; `context` bounds the length of an input. InputError names a wrong one.

    gated: gated feed-forward layers, or plain ones. activation: "relu", or "relu2", its square (SquaredReLU).
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
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; accepted: a whole number from 1 up")
        if not isinstance(self.gated, bool):
            raise InputError(f"gated is {self.gated!r}; accepted: True or False")
        if self.activation not in tuple(ACTIVATIONS):
            raise InputError(f"activation is {self.activation!r}; accepted: {', '.join(map(repr, ACTIVATIONS))}")
        if self.d_model % (2 * self.heads):
            raise InputError(f"d_model is {self.d_model} with heads {self.heads}; accepted: a multiple of "
                             f"{2 * self.heads}, since rotary positions turn pairs within each head")


class GatedFeedForward(nn.Module):
    """down(relu(gate(x)) * up(x)): [..., d_model] -> [..., d_model]. activation: a key of ACTIVATIONS."""

    def __init__(self, d_model: int, d_ff: int, activation: str = "relu") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)
        self.act_fn = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PlainFeedForward(nn.Module):
    """down(relu(up(x))): [..., d_model] -> [..., d_model]. activation: a key of ACTIVATIONS."""

    def __init__(self, d_model: int, d_ff: int, activation: str = "relu") -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)
        self.act_fn = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


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
            rotate(query, cosine, sine), rotate(key, cosine, sine), value, is_causal=True)
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
    """

    def __init__(self, config: ModelConfig) -> None:
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
            raise InputError(f"tokens have shape {list(tokens.shape)}; accepted: [batch, context] with a "
                             f"context of 1 to {self.config.context}")
        cosine, sine = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.head(self.norm(x))

    def save(self, folder: str | os.PathLike) -> Path:
        """Write model.safetensors and config.json into `folder` (made if need be), each whole or not at all.

        Raises StackError without the safetensors package, InputError where the folder can't be written.
        """
        safetensors = _safetensors()
        folder = Path(folder)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        fields = asdict(self.config)
        if fields["activation"] == "relu":  # what a file without the field means: readers from before it take this too
            del fields["activation"]
        described = {"format": FORMAT, **fields}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in (("model.safetensors", safetensors.save(weights, {"sha256": fingerprint(weights, described)})),
                                  ("config.json", (json.dumps(described, indent=2) + "\n").encode())):
                part = folder / f"{name}.part"
                part.write_bytes(content)
                part.replace(folder / name)
        except OSError as error:
            raise InputError(f"cannot save the model in {str(folder)!r}: {error}") from None
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike) -> LanguageModel:
        """The model that `save` wrote, on the CPU, in training mode.

        Raises InputError for a folder without one, an unknown format, weights of other names or shapes, and files that changed
        since they were written.
        """
        safetensors = _safetensors()
        folder = Path(folder)
        try:
            fields = json.loads((folder / "config.json").read_text())
            content = (folder / "model.safetensors").read_bytes()
            weights = safetensors.load(content)
            header = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])
            noted = header.get("__metadata__", {}).get("sha256")  # not in a file from before there was one
            found = fingerprint(weights, fields)
            if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
                raise InputError(f"config.json in {str(folder)!r} is not of format {FORMAT}, the one read")
            config = ModelConfig(**fields)
            held = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
            with torch.device("meta"):  # nothing is built that is not there
                wanted = cls(replace(config, layers=min(config.layers, held + 1))).state_dict()
            check_shapes(f"the weights in {str(folder)!r}", weights, {name: t.shape for name, t in wanted.items()})
            if noted not in (None, found):
                raise InputError(f"config.json or model.safetensors in {str(folder)!r} was altered after it was written: the model's "
                                 f"SHA-256 is {found}, and {noted} is noted in it; accepted: both files of one model")
            model = cls(config)
            model.load_state_dict(weights)
        except InputError:
            raise
        except FileNotFoundError as error:
            stopped = sorted(folder.glob("checkpoint-*/model.safetensors"))
            hint = f"; a run was stopped there, whose model is in {str(stopped[-1].parent)!r}" if stopped else ""
            raise InputError(f"there is no model in {str(folder)!r}: no {Path(error.filename).name}{hint}") from None
        except Exception as error:  # each library raises its own kind
            raise InputError(f"no model can be loaded from {str(folder)!r}: {error}") from error
        return model


def firing_layers(model: nn.Module) -> list[FeedForward]:
    """Every feed-forward layer whose pattern comes from a ReLU or a SquaredReLU, in the order of the modules.

    Like ffn.feed_forwards, which leaves the squared ones out since no sparse path computes them. Raises InputError
    if there is neither.
    """
    from .ffn import FeedForward, _describe, _layout, feed_forwards

    found = []
    for name, module in model.named_modules():
        layer, layout = _describe(name, module), _layout(module)
        if layer is None and layout and isinstance(getattr(module, layout[3]), SquaredReLU):
            gate, up, down = (getattr(module, part) if part else None for part in layout[:3])
            layer = FeedForward(name, module, gate, up, down)
        if layer is not None:
            found.append(layer)
    return found or feed_forwards(model)  # which says what it found instead


def fingerprint(weights: dict[str, Tensor], config: object) -> str:
    """A SHA-256 of a model: of what its config.json holds, and the name, dtype, shape and bytes of every weight (on the CPU)."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_shapes(what: str, found: dict[str, Tensor], wanted: dict[str, tuple]) -> None:
    """InputError naming the first tensor among those found that is missing, unknown, or of another shape."""
    for name in sorted(found.keys() ^ wanted.keys()):
        raise InputError(f"{what} {'lack' if name in wanted else 'have an unknown'} {name!r}; accepted: the tensors of this model")
    for name, shape in wanted.items():
        if tuple(found[name].shape) != tuple(shape):
            raise InputError(f"{name} has shape {list(found[name].shape)} in {what}, and {list(shape)} in this model; accepted: "
                             "weights of this model")


def _safetensors():
    """safetensors.torch, imported late: training alone does not need it."""
    try:
        import safetensors.torch
    except ImportError:
        raise StackError("saving and loading models needs safetensors: pip install safetensors") from None
    return safetensors.torch

"""A small decoder-only language model with ReLU feed-forward layers: what the course trains and takes apart.

The shape is the usual one (Llama's): RMSNorm before each part, causal attention with rotary positions, and a
feed-forward layer that is either gated, `down(relu(gate(x)) * up(x))`, or plain, `down(relu(up(x)))`; in both the ReLU
may be a squared one. Its modules have the names that they have in transformers' LlamaMLP.

It is saved in a form of its own, or, with gated layers, as a LlamaForCausalLM, which computes the same. Ours keeps
query, key and value in one matrix, in this order, and has other names; that is all that differs. A model that reads
bytes gets a byte-level BPE without merges, whose token numbers are the values of the bytes. Byte 0, which no text has
that a model of ours is trained on, is the special token EDGE there: lm-eval asks for one that begins a text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import core
from ..core import InputError, TwellError, read_json, write_atomically
from ..layers.lossy import lossy_parts
from ..ops.reference import ACTIVATIONS, GatedFeedForward, PlainFeedForward

FORMAT = 1  # of the saved form; raised when an older reader would misread it
SIZES = ("vocabulary", "d_model", "layers", "heads", "d_ff", "context")
LARGEST = 2**31 - 1  # of each size: products of two are still what a tensor can hold
EPS, THETA = 1e-6, 10000.0  # of the norms, and the base of the rotary positions, in all of our models
EDGE = "<|byte 0|>"
_SIZES = {
    "vocabulary": "vocab_size",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "context": "max_position_embeddings",
    "activation": "hidden_act",
}
# Parts of the names of weights that Llama calls otherwise.
_NAMES = {
    "embedding.": "model.embed_tokens.",
    "head.": "lm_head.",
    "attention_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "attention.out_proj.": "self_attn.o_proj.",
    "attention.qkv_proj.": "self_attn.{}_proj.",
}


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a LanguageModel: vocabulary, how many token numbers there are; d_model, layers, heads, d_ff;
    context, the most tokens of an input; gated feed-forward layers, or plain ones; activation, "relu" or "relu2".

    InputError for a size that is no whole number from 1 up, or does not go with another."""

    vocabulary: int = 256
    d_model: int = 128
    layers: int = 4
    heads: int = 4
    d_ff: int = 512
    context: int = 128
    gated: bool = True
    activation: str = "relu"

    def __post_init__(self) -> None:
        for name in SIZES:
            check_whole(name, getattr(self, name), 1)
        if not isinstance(self.gated, bool):
            raise InputError(f"gated is {self.gated!r}; accepted: True or False")
        if self.activation not in tuple(ACTIVATIONS):
            raise InputError(f"activation is {self.activation!r}; accepted: {', '.join(map(repr, ACTIVATIONS))}")
        if self.d_model % (2 * self.heads):
            raise InputError(
                f"d_model is {self.d_model} with heads {self.heads}; accepted: a multiple of {2 * self.heads}, since "
                "rotary positions turn pairs within each head"
            )


def parameters(model: ModelConfig) -> int:
    """Return how many weights a LanguageModel of these sizes has, counted from its formulas."""
    feed_forward = (3 if model.gated else 2) * model.d_model * model.d_ff
    layer = 4 * model.d_model**2 + feed_forward + 2 * model.d_model  # attention, feed-forward, two norms
    return model.layers * layer + 2 * model.vocabulary * model.d_model + model.d_model


def check_fits(config: ModelConfig) -> None:
    """Raise InputError where such a model needs more than this machine's memory, before anything of it is built."""
    tables = 4 * config.context * (config.d_model // config.heads // 2)  # cosines, sines, and what they are made of
    weights = 0 if torch.get_default_device().type == "meta" else 4 * (parameters(config) + tables)
    needed, there = weights + 16_384 * config.layers, core.memory()  # of modules, beside their weights
    if there is not None and needed > there:
        raise InputError(
            f"a model of {', '.join(f'{name} {getattr(config, name)}' for name in SIZES)} takes "
            f"{needed / 2**30:,.1f} GiB of memory, and this machine has {there / 2**30:,.1f}; accepted: smaller sizes"
        )


class Attention(nn.Module):
    """Causal self-attention: [batch, context, d_model] -> the same shape."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, cosine: Tensor, sine: Tensor, keys: Keys | None = None, layer=0, mask: Tensor | None = None
    ) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv_proj(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, width of a head]
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        if keys is not None:
            key, value = keys.update(key, value, layer)
        causal = mask is None and (keys is None or length > 1)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Keys:
    """The keys and values of all layers, [batch, heads, room, width] each, in memory of a fixed size. transformers'
    models take them as their cache, too."""

    is_compileable, is_initialized = False, True  # whether transformers may compile for it; and whether it holds some

    def __init__(self, room: int, layers: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self.room, self.layers = room, list(layers)
        self.places, self.end = torch.empty(0), 0

    def take(self, places: Tensor, end: int) -> None:
        """Put what comes next at these places, int64 [tokens] on the device, and give models what lies before `end`."""
        self.places, self.end = places, end

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values of new tokens, and return those of that layer up to `end`."""
        if layer == len(self.layers):
            one, other = (t.new_zeros(*t.shape[:2], self.room, t.shape[3]) for t in (keys, values))
            self.layers.append((one, other))
        for room, new in zip(self.layers[layer], (keys, values)):
            room.index_copy_(2, self.places, new)
        there, those = self.layers[layer]
        return there[:, :, : self.end], those[:, :, : self.end]

    def get_seq_length(self, *_: Any) -> int:
        return self.room - 1


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (i, i + half) by an angle that grows with the position (rotary positions, arXiv 2104.09864), so
    that a query meets a key through their distance alone. x: [..., context, width]; tables: [context, width / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to the stream it reads: [batch, context, d_model]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=EPS)
        self.attention = Attention(config.d_model, config.heads)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=EPS)
        kind = GatedFeedForward if config.gated else PlainFeedForward
        self.mlp = kind(config.d_model, config.d_ff, config.activation)

    def forward(self, x: Tensor, *places: Any) -> Tensor:
        """Return the stream behind this layer. places: what Attention takes beside it."""
        x = x + self.attention(self.attention_norm(x), *places)
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
        self.norm = nn.RMSNorm(config.d_model, eps=EPS)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        self._turn_positions()
        nn.init.normal_(self.embedding.weight)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                shrink = (2 * config.layers) ** -0.5 if name.endswith(("out_proj", "down_proj")) else 1.0
                nn.init.normal_(module.weight, std=shrink * module.in_features**-0.5)

    def _turn_positions(self) -> None:
        """Make the tables of `rotate`, [context, width of a head / 2]."""
        half = self.config.d_model // self.config.heads // 2
        angles = torch.arange(self.config.context)[:, None] * THETA ** (-torch.arange(half) / half)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.config.context:
            raise InputError(
                f"tokens have shape {list(tokens.shape)}; accepted: [batch, context] with a "
                f"context of 1 to {self.config.context}"
            )
        return self.head(self.read(tokens, slice(tokens.shape[1])))

    def read(
        self, tokens: Tensor, places: slice | Tensor, keys: Keys | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return what the head takes at each of these tokens [batch, n] at n places of the context. keys: of earlier
        tokens, which take those of these. mask: which of them a token attends to; by default the earlier ones."""
        cosine, sine = self.cosine[places], self.sine[places]
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, cosine, sine, *(() if keys is None else (keys, number, mask)))
        return self.norm(x)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write model.safetensors and config.json into `folder`, which is made where it is missing; return the folder.

        Raises InputError where the folder can't be written, and for a model with thresholds on it."""
        return self._write(folder, {"format": FORMAT, **asdict(self.config)})

    def save_pretrained(self, folder: str | os.PathLike, tokenizer: str | None = None) -> Path:
        """Write the model into `folder` as a LlamaForCausalLM with its tokenizer, which transformers and tl.load read;
        return the folder.

        tokenizer: what the tokenizer.json of a model that reads a BPE holds; None for a model that reads bytes.
        InputError for plain feed-forward layers, which Llama lacks, and as `save`."""
        config = _llama_config(asdict(self.config), self.head.weight.dtype)
        return self._write(folder, config, _to_llama, _tokenizer_files(tokenizer, self.config.context))

    def _write(self, folder: str | os.PathLike, config: dict, named: Callable = dict, files: Mapping = {}) -> Path:
        """Write the weights, under the names that `named` gives them, and files, every one whole or not at all."""
        if lossy_parts(self):
            raise InputError(
                "the model has thresholds on it, which its file does not hold; accepted: one without "
                "(Thresholds.remove), and Thresholds.save beside it"
            )
        weights = named({name: value.detach().cpu() for name, value in self.state_dict().items()})
        data = safetensors.torch.save({name: t.contiguous() for name, t in weights.items()}, {"format": "pt"})
        content = {**files, "model.safetensors": data, "config.json": json.dumps(config, indent=2) + "\n"}
        try:
            for name, written in content.items():
                write_atomically(Path(folder) / name, written)
        except TwellError as error:
            raise InputError(f"cannot save the model in {os.fspath(folder)!r}: {error}") from None
        return Path(folder)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> LanguageModel:
        """Return the model that `save` wrote, on the CPU, in training mode.

        Raises InputError for a folder without one, an unknown format, and weights of other names, shapes or types."""
        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                hint = "; a run was killed there: resume it" if (folder / "training.pt").is_file() else ""
                raise InputError(f"there is no model in {str(folder)!r}: no {name}{hint}")
        try:
            entries = read_json(folder / "config.json", "model")
            if not isinstance(entries, dict) or entries.get("format") != FORMAT:
                raise InputError(
                    f"config.json is {entries!r:.200}; accepted: format {FORMAT}, as LanguageModel.save writes it "
                    "(tl.load reads models of transformers, too)"
                )
            del entries["format"]
            config, weights = ModelConfig(**entries), safetensors.torch.load_file(folder / "model.safetensors")
            if wrong := [name for name, weight in weights.items() if not weight.dtype.is_floating_point]:
                raise InputError(f"{wrong[0]} is {weights[wrong[0]].dtype}; accepted: floating-point weights")
            check_fits(config)
            with torch.device("meta"):
                model = cls(config)
            model.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
        except Exception as error:  # safetensors, json and torch raise their own kinds
            reason = " ".join(str(error).split())
            raise InputError(f"no model can be loaded from {str(folder)!r}: {reason:.400}") from error
        model._turn_positions()
        return model


def check_whole(name: str, value: object, least: int, most: int = LARGEST) -> None:
    """Raise InputError for anything but a whole number in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(f"{name} is {value!r}; accepted: a whole number from {least} up to {most}")


def _llama_config(sizes: dict, dtype: torch.dtype) -> dict:
    """Return the config.json of a LlamaForCausalLM. sizes: the fields of a ModelConfig. InputError for plain layers."""
    if not sizes["gated"]:
        raise InputError("gated is False; accepted: a model with gated layers, since Llama has no plain ones")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: sizes[ours] for ours, theirs in _SIZES.items()},
        "num_key_value_heads": sizes["heads"],
        "head_dim": sizes["d_model"] // sizes["heads"],
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _to_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a LanguageModel under Llama's names."""
    theirs = {}
    for name, weight in weights.items():
        name = f"model.{name}" if name.startswith(("layers.", "norm.")) else name
        for ours, its in _NAMES.items():
            if name.startswith(ours) or f".{ours}" in name:
                name = name.replace(ours, its)
        parts = zip("qkv", weight.chunk(3)) if "{}" in name else [("", weight)]
        theirs |= {name.format(which): part for which, part in parts}
    return theirs


def _tokenizer_files(tokenizer: str | None, context: int) -> dict[str, str]:
    """Return the tokenizer's files by name. tokenizer: what a tokenizer.json holds; None for a model of bytes."""
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    about |= {"clean_up_tokenization_spaces": False}
    if tokenizer is None:
        about |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), EDGE)
    content = bytes_tokenizer() if tokenizer is None else tokenizer
    return {"tokenizer.json": content, "tokenizer_config.json": json.dumps(about, indent=2) + "\n"}


def alphabet() -> list[str]:
    """Return the character by which byte-level tokenizers since GPT-2 write each byte: Latin-1's for the printable
    ones, and for the others, in order, the characters from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def bytes_tokenizer() -> str:
    """Return a tokenizer.json whose tokens are bytes: a byte-level BPE without merges. A token's number is the value of
    its byte; 0 is EDGE."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character if byte else EDGE: byte for byte, character in enumerate(alphabet())}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    fields = {"version": "1.0", "truncation": None, "padding": None}
    fields |= {"added_tokens": [{"id": 0, "content": EDGE, **plain, "special": True}], "normalizer": None}
    fields |= {"pre_tokenizer": level, "post_processor": None, "decoder": level}
    fields |= {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    return json.dumps(fields, indent=1) + "\n"

"""The course's small model as a LlamaForCausalLM: a folder that transformers, and what is built on it, reads.

The two compute the same. Ours keeps query, key and value in one matrix, in this order, and has other names; that is all
that differs. Llama's feed-forward layer is gated, so a model with plain layers has no such form. A model that reads
bytes gets a byte-level BPE without merges, whose token numbers are the values of the bytes. Byte 0, which no text has
that a model of ours is trained on, is the special token EDGE there: lm-eval asks for one that begins a text.
"""

from __future__ import annotations

import json
import re

import torch
from torch import Tensor

from ..core import InputError

KIND = "llama"  # what config.json says in model_type
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
_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.out_proj": "self_attn.o_proj",
    **{f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_OURS = {theirs: ours for ours, theirs in _NAMES.items()}
_ATTENTION = "model.layers.{}.self_attn.{}_proj.weight"


def config_of(sizes: dict, dtype: torch.dtype) -> dict:
    """Return the config.json of a LlamaForCausalLM. sizes: the fields of a ModelConfig. InputError for plain layers."""
    if not sizes["gated"]:
        raise InputError("gated is False; accepted: a model with gated layers, since Llama has no plain ones")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": KIND,
        **{theirs: sizes[ours] for ours, theirs in _SIZES.items()},
        "num_key_value_heads": sizes["heads"],
        "head_dim": sizes["d_model"] // sizes["heads"],
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def sizes_of(config: dict) -> dict:
    """Return the fields of a ModelConfig that a LlamaForCausalLM's config.json stands for. InputError naming the first
    entry that no model of ours has; an entry that is not there counts as what transformers takes for it."""
    missing = [name for name in _SIZES.values() if name not in config]
    if missing:
        raise InputError(f"config.json of a Llama lacks {', '.join(missing)}")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise InputError(f"rope_parameters is {rope!r:.80} in config.json of a Llama; accepted: an object")
    for name, value, accepted in (
        ("architectures", config.get("architectures") or ["LlamaForCausalLM"], ["LlamaForCausalLM"]),
        ("num_key_value_heads", config.get("num_key_value_heads") or heads, heads),
        ("head_dim times num_attention_heads", _product(config.get("head_dim"), heads, width), width),
        ("rms_norm_eps", config.get("rms_norm_eps", EPS), EPS),
        ("rope_theta", rope.get("rope_theta", config.get("rope_theta", THETA)), THETA),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("attention_bias", config.get("attention_bias", False), False),
        ("mlp_bias", config.get("mlp_bias", False), False),
        ("tie_word_embeddings", config.get("tie_word_embeddings", False), False),
    ):
        if value != accepted:
            raise InputError(f"{name} is {value!r:.80} in config.json of a Llama; accepted: {accepted!r:.80}")
    return {ours: config[theirs] for ours, theirs in _SIZES.items()} | {"gated": True}


def _product(width, heads, otherwise):
    return width * heads if type(width) is int and type(heads) is int else otherwise if width is None else width


def to_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a LanguageModel under Llama's names."""
    theirs = {}
    for name, weight in weights.items():
        layer, part = _parts(name, r"layers\.")
        if part == "attention.qkv_proj":
            theirs |= {_ATTENTION.format(layer, which): t for which, t in zip("qkv", weight.chunk(3), strict=True)}
        else:
            theirs[("" if layer is None else f"model.layers.{layer}.") + _NAMES[part] + ".weight"] = weight
    return theirs


def from_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that `to_llama` renamed under their own names."""
    ours = {}
    for name, weight in weights.items():
        layer, part = _parts(name, r"model\.layers\.")
        if part == "self_attn.q_proj":
            whole = torch.cat([weights[_ATTENTION.format(layer, which)] for which in "qkv"])
            ours[f"layers.{layer}.attention.qkv_proj.weight"] = whole
        elif part not in ("self_attn.k_proj", "self_attn.v_proj"):
            ours[("" if layer is None else f"layers.{layer}.") + _OURS[part] + ".weight"] = weight
    return ours


def _parts(name: str, before: str) -> tuple[str | None, str]:
    """Return the number of the layer that a weight is in, if it is in one, and the name of the module in it."""
    match = re.fullmatch(rf"(?:{before}(\d+)\.)?(.+)\.weight", name)
    assert match is not None, name  # names were checked before
    return match[1], match[2]


def tokenizer_files(tokenizer: str | None, vocabulary: int, context: int) -> dict[str, str]:
    """Return the tokenizer's files by name.

    tokenizer: what the tokenizer.json of the tokenizers library holds; None: for a model that reads bytes. InputError
    where it is no such thing, or has token numbers that a model of this vocabulary lacks."""
    content = bytes_tokenizer() if tokenizer is None else tokenizer
    try:
        fields = json.loads(content)
        numbers = [*fields["model"]["vocab"].values(), *(token["id"] for token in fields.get("added_tokens") or ())]
        most = 1 + max(numbers)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"tokenizer is no JSON of the tokenizers library with a vocabulary by token ({type(error).__name__}: "
            f"{error}); accepted: what its tokenizer.json holds, or None for bytes"
        ) from None
    if most > vocabulary or tokenizer is None and most < vocabulary:
        read = "bytes are read" if tokenizer is None else "the tokenizer is given"
        raise InputError(
            f"the model has a vocabulary of {vocabulary}, and {read}, with {most} token numbers; accepted: the "
            "tokenizer that the model was trained with"
        )
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **(dict.fromkeys(("bos_token", "eos_token", "pad_token"), EDGE) if tokenizer is None else {}),
    }
    return {"tokenizer.json": content, "tokenizer_config.json": json.dumps(about, indent=2) + "\n"}


def bytes_tokenizer() -> str:
    """Return a tokenizer.json whose tokens are bytes: a byte-level BPE without merges. A token's number is the value of
    its byte; 0 is EDGE."""
    # How byte-level tokenizers write a byte: as Latin-1 if that is printable, otherwise as a character from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    written = {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {chr(written[byte]) if byte else EDGE: byte for byte in range(256)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": EDGE, **plain, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return json.dumps(fields, indent=1) + "\n"

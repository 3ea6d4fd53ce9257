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
# What config.json says of all of our models, beside their sizes.
_FIXED = ("architectures", "num_key_value_heads", "head_dim", "rms_norm_eps")
_FIXED += ("attention_bias", "mlp_bias", "tie_word_embeddings")
_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.out_proj": "self_attn.o_proj",
    **{f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_QKV = tuple(f"self_attn.{which}_proj" for which in "qkv")
_PLACE = re.compile(r"(?:(?:model\.)?layers\.(\d+)\.)?(.+)\.weight")  # the number of a weight's layer, and the module


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
    if missing := [name for name in _SIZES.values() if name not in config]:
        raise InputError(f"config.json of a Llama lacks {', '.join(missing)}")
    sizes = {ours: config[theirs] for ours, theirs in _SIZES.items()} | {"gated": True}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = {"rope_type": "default", "rope_theta": THETA}
    accepted = {name: config_of(sizes, torch.float32)[name] for name in _FIXED} | {"rope_parameters": plain}
    entries = {name: value for name, value in config.items() if value is not None}
    entries["rope_parameters"] = plain | {"rope_theta": config.get("rope_theta", THETA)} | rope
    for name, value in accepted.items():
        if entries.get(name, value) != value:
            raise InputError(f"{name} is {entries[name]!r:.80} in config.json of a Llama; accepted: {value!r:.80}")
    return sizes


def to_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a LanguageModel under Llama's names."""
    theirs = {}
    for name, weight in weights.items():
        layer, part = _PLACE.fullmatch(name).groups()
        prefix = f"model.layers.{layer}." if layer else ""
        if part == "attention.qkv_proj":
            theirs |= {f"{prefix}{its}.weight": t for its, t in zip(_QKV, weight.chunk(3), strict=True)}
        else:
            theirs[f"{prefix}{_NAMES[part]}.weight"] = weight
    return theirs


def from_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that `to_llama` renamed under their own names; others stay as they are."""
    ours, names = {}, {theirs: own for own, theirs in _NAMES.items()}
    for name, weight in weights.items():
        layer, part = _PLACE.fullmatch(name).groups() if _PLACE.fullmatch(name) else (None, name)
        prefix = f"layers.{layer}." if layer else ""
        if part == _QKV[0]:
            whole = [weights[name.replace(part, its)] for its in _QKV]
            ours[f"{prefix}attention.qkv_proj.weight"] = torch.cat(whole)
        elif part not in _QKV:
            ours[f"{prefix}{names[part]}.weight" if part in names else name] = weight
    return ours


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
        raise InputError(f"tokenizer is no tokenizer.json with a vocabulary by token ({error!r:.200})") from None
    if most > vocabulary or tokenizer is None and most < vocabulary:
        raise InputError(
            f"the model has a vocabulary of {vocabulary}, and the tokenizer {most} token numbers; accepted: the one of "
            "its training, or None for bytes"
        )
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **(dict.fromkeys(("bos_token", "eos_token", "pad_token"), EDGE) if tokenizer is None else {}),
    }
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

"""The course's small model as a LlamaForCausalLM: a folder that transformers, and what is built on it, reads.

The two compute the same. Ours keeps query, key and value in one matrix, in this order, and has other names; that is all
that differs. Llama's feed-forward layer is gated, so a model with plain layers has no such form. A model that reads
bytes gets a byte-level BPE without merges, whose token numbers are the values of the bytes. Byte 0, which no text has
that a model of ours is trained on, is the special token EDGE there: lm-eval asks for one that begins a text."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from ..core import InputError

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


def config_of(sizes: dict, dtype: torch.dtype) -> dict:
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


def to_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
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


def tokenizer_files(tokenizer: str | None, context: int) -> dict[str, str]:
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

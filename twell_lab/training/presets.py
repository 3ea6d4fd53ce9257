"""Sizes to train at, by name: from a million weights on a CPU to the shapes of the paper's models.

The paper's (arXiv 2603.23198, appendix B, and its published code): d_model 2048, d_ff 5632 (8192 without a gate), 32
heads, 8 to 38 layers; 512 sequences of 2048 tokens a step; AdamW, learning rate 1e-3 after 600 steps of warm-up, weight
decay 0.1, clip 1.0; L1 2e-5. Four things differ here: the learning rate falls to a tenth instead of 0, rotary positions
turn by the usual base of 10,000 instead of 100,000, head and embedding are two matrices instead of one, and the
tokenizer is a BPE of 32,768 entries trained on the text, instead of one of 49,152.

The smaller configurations are this project's. Their L1 is a place to begin, between values that were tried: at d_model
768 and d_ff 2048, after 1000 steps, 3e-4 left 103 neurons firing at a token and 1e-3 left 28. Other texts and lengths
of training need another L1."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import get_type_hints

from .. import records
from ..core import InputError, optional, read_file
from ..models.tiny import ModelConfig, parameters
from .config import TrainConfig

BYTES, BPE = 256, 32_768  # vocabularies: of bytes, and of the tokenizer that is trained on the text

_FIELDS = "layers d_model d_ff heads context batch accumulate steps lr warmup l1 eval_every".split()
_ON_GPU = {"dtype": "bfloat16"}
_COMPILED = {"dtype": "bfloat16", "compile": True}
_WITH_BPE = {**_COMPILED, "tokenizer": f"bpe:{BPE}"}

# name: (what the configuration is for, the values of _FIELDS, more fields of TrainConfig)
_NAMED = {
    "1M": ("a CPU: twell-lab train as it is, with an L1", (4, 128, 512, 4, 64, 8, 1, 900, 2e-3, 50, 2e-3, 150), {}),
    "5M": ("a small checkpoint (9.9 MB in bf16)", (6, 256, 704, 4, 256, 32, 1, 2000, 2e-3, 100, 1e-3, 500), {}),
    "20M": ("one GPU", (6, 512, 1408, 8, 512, 32, 1, 4000, 1e-3, 200, 3e-4, 500), _ON_GPU),
    "60M": ("one GPU; worth a sweep of L1", (8, 768, 2048, 12, 512, 64, 1, 5000, 1e-3, 300, 3e-4, 500), _COMPILED),
    "150M": ("one GPU, with a BPE", (14, 768, 2048, 12, 1024, 128, 4, 10_000, 1e-3, 600, 1e-4, 500), _WITH_BPE),
} | {
    name: (
        f"the paper's shape; {billions} billion tokens",
        (layers, 2048, 5632, 32, 2048, 512, 64, billions * 1000, 1e-3, 600, 2e-5, 1000),
        _WITH_BPE,
    )
    for name, layers, billions in (("0.5B", 8, 10), ("1B", 18, 20), ("1.5B", 28, 30), ("2B", 38, 40))
}

NAMES = tuple(_NAMED)


def named(name: str) -> dict:
    """Return the fields of TrainConfig that make this configuration: `TrainConfig(**named("60M"), text=...)`, in a new
    dict. InputError for a name that is not in NAMES."""
    if name not in NAMES:
        raise InputError(f"there is no configuration {name!r}; accepted: {', '.join(NAMES)}, or a file of YAML or JSON")
    _, values, more = _NAMED[name]
    return {**dict(zip(_FIELDS, values, strict=True)), "weight_decay": 0.1, "clip": 1.0, **more}


def of(name: str) -> dict:
    """Return the fields of TrainConfig of a configuration of this name (`named`), or that a YAML or JSON file holds.

    In a file, names may have the dashes of the command's options. InputError for a name that is neither, and for a file
    that can't be read, or has an entry that is no field; StackError for YAML without PyYAML."""
    if name in NAMES or not os.path.isfile(name):
        return named(name)
    parse = json.loads if name.endswith(".json") else optional("yaml", "a configuration in YAML", "pyyaml").safe_load
    try:
        entries = parse(read_file(name, 2**20).decode())
    except Exception as error:  # of PyYAML: errors of its own kind
        reason = " ".join(str(error).split())
        raise InputError(f"cannot read the configuration {name!r}: {reason}") from None
    if not isinstance(entries, dict):
        raise InputError(f"the configuration {name!r} holds a {type(entries).__name__}; accepted: `name: value` lines")
    kinds, values = get_type_hints(TrainConfig), {}
    for key, value in entries.items():
        field = "from_" if key == "from" else str(key).replace("-", "_")
        if field not in kinds:
            raise InputError(f"{key!r} in {name!r} is no option; accepted: {', '.join(kinds)}")
        if kinds[field] is float and isinstance(value, str):  # YAML takes 1e-3, without a point, for a string
            with suppress(ValueError):
                value = float(value)
        values[field] = value
    return values


def rows() -> list[dict]:
    """Return one dict a configuration, ready for JSON: name, sizes, vocabulary, parameters, tokens a step and in all,
    L1, and what it is for ("purpose")."""
    listed = []
    for name, (purpose, _, more) in _NAMED.items():
        fields = named(name)
        sizes = {key: fields[key] for key in ("d_model", "d_ff", "layers", "heads", "context")}
        sizes["vocabulary"] = BPE if "tokenizer" in more else BYTES
        step = fields["batch"] * fields["context"]
        counted = {"tokens_a_step": step, "tokens": step * fields["steps"], "l1": fields["l1"], "purpose": purpose}
        listed.append({"name": name, **sizes, "parameters": parameters(ModelConfig(**sizes)), **counted})
    return listed


def table() -> str:
    """Return the configurations as lines of text, for --config list."""
    columns = {"name": "name", "parameters": "weights", "layers": "layers", "d_model": "d_model", "d_ff": "d_ff"}
    return records.table(rows(), {**columns, "tokens": "tokens", "l1": "L1", "purpose": "for"})

"""Sizes to train at, by name: from a million weights on a CPU to the shapes of the paper's models.

The paper's (arXiv 2603.23198, appendix B, and the configurations of its published code): d_model 2048, d_ff 5632 (8192
without a gate), 32 heads, 8, 18, 28 and 38 layers for 0.5B, 1B, 1.5B and 2B; 512 sequences of 2048 tokens a step, about
a million tokens; AdamW, learning rate 1e-3 after 600 steps of warm-up, weight decay 0.1, clip 1.0; L1 2e-5, which it
recommends; about 10, 20, 30 and 40 billion tokens. Four things differ here: the learning rate falls to a tenth instead
of 0, rotary positions turn by the usual base of 10,000 instead of 100,000, head and embedding are two matrices instead
of one, and the tokenizer is a BPE of 32,768 entries trained on the text, instead of one of 49,152. So many tokens are
prepared on disk first (twell_lab.training.text.prepared); a text held in memory has at most 1 GiB, some 0.2 billion
tokens.

The smaller configurations are this project's. Of these, 1M was measured (see the comment at TOUR in
twell_lab/training/loop.py). The L1 of the others lies between values that were tried, as a place to begin: at d_model
768 and d_ff 2048, after 1000 steps, 3e-4 left 103 neurons firing at a token and 1e-3 left 28. Other texts and lengths
of training need another L1.
"""

from __future__ import annotations

from ..core import InputError
from ..models.tiny import ModelConfig, parameters

BYTES, BPE = 256, 32_768  # vocabularies: of bytes, and of the tokenizer that is trained on the text


def _paper(layers: int, billions: int) -> dict:
    return {
        "d_model": 2048,
        "d_ff": 5632,
        "layers": layers,
        "heads": 32,
        "context": 2048,
        "batch": 512,
        "accumulate": 64,
        "steps": billions * 1000,
        "lr": 1e-3,
        "warmup": 600,
        "weight_decay": 0.1,
        "clip": 1.0,
        "l1": 2e-5,
        "tokenizer": f"bpe:{BPE}",
        "dtype": "bfloat16",
        "compile": True,
        "eval_every": 1000,
    }


def _small(d_model: int, d_ff: int, layers: int, heads: int, **more) -> dict:
    return {
        "d_model": d_model,
        "d_ff": d_ff,
        "layers": layers,
        "heads": heads,
        "weight_decay": 0.1,
        "clip": 1.0,
        **more,
    }


# name: (fields of TrainConfig, what the configuration is for)
_NAMED = {
    "1M": (
        _small(128, 512, 4, 4, context=64, batch=8, steps=900, lr=2e-3, warmup=50, l1=2e-3),
        "a CPU: twell-lab train as it is, with an L1",
    ),
    "5M": (
        _small(256, 704, 6, 4, context=256, batch=32, steps=2000, lr=2e-3, warmup=100, l1=1e-3, eval_every=500),
        "a small checkpoint (9.9 MB in bf16)",
    ),
    "20M": (
        _small(
            512,
            1408,
            6,
            8,
            context=512,
            batch=32,
            steps=4000,
            lr=1e-3,
            warmup=200,
            l1=3e-4,
            dtype="bfloat16",
            eval_every=500,
        ),
        "one GPU",
    ),
    "60M": (
        _small(
            768,
            2048,
            8,
            12,
            context=512,
            batch=64,
            steps=5000,
            lr=1e-3,
            warmup=300,
            l1=3e-4,
            dtype="bfloat16",
            compile=True,
            eval_every=500,
        ),
        "one GPU; the smallest worth a sweep of L1",
    ),
    "150M": (
        _small(
            768,
            2048,
            14,
            12,
            context=1024,
            batch=128,
            accumulate=4,
            steps=10_000,
            lr=1e-3,
            warmup=600,
            l1=1e-4,
            tokenizer=f"bpe:{BPE}",
            dtype="bfloat16",
            compile=True,
            eval_every=500,
        ),
        "one GPU, with a BPE",
    ),
    "0.5B": (_paper(8, 10), "the paper's shape; 10 billion tokens"),
    "1B": (_paper(18, 20), "the paper's shape; 20 billion tokens"),
    "1.5B": (_paper(28, 30), "the paper's shape; 30 billion tokens"),
    "2B": (_paper(38, 40), "the paper's shape; 40 billion tokens"),
}

NAMES = tuple(_NAMED)


def named(name: str) -> dict:
    """The fields of TrainConfig that make this configuration: `TrainConfig(**named("60M"), text=...)`.

    Each call gives a new dict, which may be changed. InputError for a name that is not in NAMES.
    """
    if not isinstance(name, str) or name not in _NAMED:
        raise InputError(f"there is no configuration {name!r}; accepted: {', '.join(NAMES)}")
    return dict(_NAMED[name][0])


def rows() -> list[dict]:
    """One dict a configuration, ready for JSON: name, sizes, vocabulary, parameters, tokens a step and in all, L1, and
    what it is for ("purpose")."""
    made = []
    for name, (fields, purpose) in _NAMED.items():
        sizes = {key: fields[key] for key in ("d_model", "d_ff", "layers", "heads", "context")}
        vocabulary = BPE if "tokenizer" in fields else BYTES
        step = fields["batch"] * fields["context"]
        made.append(
            {
                "name": name,
                **sizes,
                "vocabulary": vocabulary,
                "parameters": parameters(ModelConfig(vocabulary=vocabulary, **sizes)),
                "tokens_a_step": step,
                "tokens": step * fields["steps"],
                "l1": fields["l1"],
                "purpose": purpose,
            }
        )
    return made


def table() -> str:
    """The configurations as lines of text, for --help."""
    lines = [f"{'name':5} {'weights':>8} {'layers':>6} {'d_model':>7} {'d_ff':>5} {'tokens':>7} {'L1':>6}  for"]
    lines += [
        f"{row['name']:5} {_short(row['parameters']):>8} {row['layers']:>6} {row['d_model']:>7} {row['d_ff']:>5} "
        f"{_short(row['tokens']):>7} {row['l1']:>6.0e}  {row['purpose']}"
        for row in rows()
    ]
    return "\n".join(lines)


def _short(count: int) -> str:
    """1,114,240 as "1.1M"."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count / 1000:.3g}k"

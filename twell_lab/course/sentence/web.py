"""The same picture in a plain web page, without a kernel: some sentences, read when the page is made."""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .data import ACROSS, CUTS, SENTENCE, SIZE, Sentence, ms, of, percent, read, said, shipped, size, times, view

SENTENCES = (SENTENCE, "'Then you must never tell him,' she said, and shut the door.")


@cache
def fragment() -> str:
    """Return a part of an HTML page with a style and a script of its own, that asks nobody for anything: the shipped
    models with SENTENCES; times are those of the machine that makes the page, and of records."""
    rows, models = times("cuda" if torch.cuda.is_available() else "cpu"), shipped()
    data = {
        "cuts": [percent(cut) for cut in CUTS],
        "models": [*models],
        "across": ACROSS,
        "size": "{:,} x {:,}".format(*SIZE),
        "sentences": [_sentence(read(models, text), rows) for text in SENTENCES],
    }
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    return page.replace("DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _sentence(sentence: Sentence, rows: list) -> dict:
    """Return a sentence as the script takes it: of each model its sizes, who fires (bits of [cuts, tokens, neurons],
    compressed), its losses, and what each cut does."""
    models = []
    for name, done in sentence.models.items():
        views = [view(sentence, rows, name, cut) for cut in CUTS]
        bits = base64.b64encode(zlib.compress(np.packbits(done.kept).tobytes(), 9)).decode()
        sizes = {"layers": done.kept.shape[2], "d_ff": done.kept.shape[3]}
        models.append({**sizes, "bits": bits, "loss": done.loss, "cuts": [_cut(shown) for shown in views]})
    return {"text": views[0]["sentence"], "tokens": views[0]["tokens"], "models": models}


def _cut(view: dict) -> dict:
    """Return one view for the script; bars: names, what is needed of dense, and the share of it, or None."""
    bars = [("weights that this model reads", view["bytes"], view["dense_bytes"], size)]
    made = "the machine that made this page"
    bars += [(where.replace("here, now", made), took, dense, ms) for where, took, dense in view["times"]]
    shown = [[name, of(*row), None if row[0] is None else row[0] / row[1]] for name, *row in bars]
    return {"said": said(view), "bars": shown} | {name: view[name] for name in ("text", "fires", "whole")}

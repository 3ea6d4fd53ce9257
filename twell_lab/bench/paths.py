"""Every path of a feed-forward layer in a whole model, lossy ones with their error: the small trained model that ships,
where they have a loss as well, and the drawn Llama of the paper's 2B shape."""

from __future__ import annotations

import functools

from .. import core
from ..models.tiny import LanguageModel
from ..ops.clock import dtype_for, present_device
from ..training.text import source
from . import rows
from .models import Bench

LOSSY = ("int8", "fp8", "twell_int8", "predicted", "experts")


def sections(
    left_out: dict[str, str],
    size: str = "2B",
    tokens: tuple[int, ...] = (2048, 16 * 2048),
    sequences: int = 64,
    **how,
) -> rows.Sections:
    """Return the steps of the record: for each model decoding and forwards. size, tokens: of the drawn model and its
    forwards. sequences: of the other one's longest. how: as for `bench.model`."""
    both = {"plan": "twell", "batches": (1, 16), "graphs": True, "left_out": left_out, "paths": LOSSY, **how}

    @functools.cache
    def small() -> Bench:
        device = present_device(both.get("device"))
        model = LanguageModel.load(core.data_dir() / "checkpoints" / "small").to(device, dtype_for(device)).eval()
        text, context = source.standard_library().split()[1].tokens, model.config.context
        return Bench(
            model, text=text, tokens=(context, sequences * context), cached=64, about="trained small model", **both
        )

    drawn = functools.cache(lambda: Bench(size, tokens=tokens, **both | {"paths": ("hot_cold", *both["paths"])}))

    def all_rows(bench: Bench) -> list[dict]:
        return [row for kind, count, head in bench.works if head for row in bench.rows(kind, count)]

    return {"trained small model": [lambda: all_rows(small())], "drawn Llama": [lambda: all_rows(drawn())]}

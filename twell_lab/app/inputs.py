"""The model and the text that a command is given: ours, or one of transformers. Imports torch only when it reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import InputError


def opened(name: str | Path) -> tuple[Path, Any, bool]:
    """Return a model's folder, the model on the CPU as `tl.load` gives it, and whether it is one of this project's."""
    from ..models import published
    from ..models.tiny import LanguageModel

    folder = published.folder_of(name)
    model = published.load(folder)
    return folder, model, isinstance(model, LanguageModel)


def model_and_windows(options, count: int | None = None, *, tokens: int = 0) -> tuple[Any, Any, Any, Callable]:
    """Return the model that the options ask for, on the CPU, as tl.load gives it; the text, or its held-out part;
    windows of it as int64 [count, context], spread evenly: so many, or without a count as many as hold so many
    `tokens`; and what spells a token.

    Only the held-out part is taken of the text that the model was trained on, of the default text and of a prepared
    text. A model of transformers reads the text with its own tokenizer, in windows of 512 tokens at most; ours with the
    one that training saved in its folder, or as bytes."""
    from ..models import published
    from ..training import checkpoint
    from ..training.text.source import is_prepared, load_any, spread_windows
    from ..training.text.tokenizer import tokenizer_of

    folder, model, own = opened(options.model)
    text = load_any(options.text, tokenizer=tokenizer_of(folder, model.config.vocabulary) if own else None)
    trained_on = checkpoint.load(folder)["text"].get("sha256") if own and checkpoint.exists(folder) else None
    seen = options.text is None or is_prepared(options.text) or text.sha256 == trained_on
    part = text.split()[1] if seen else text
    if own:
        context, unit, ids = model.config.context, part.tokenizer.unit, part.tokens
    else:
        tokenizer, longest = published.tokenizer_of(folder), getattr(model.config, "max_position_embeddings", None)
        context, unit = min(512, longest or 512), "tokens"
        # A token is rarely longer than eight bytes; the beginning of a longer text does.
        bytes_read = 8 * ((count or -(-tokens // context)) + 1) * context
        start = part.tokenizer.decode(part.tokens[:bytes_read]).decode("utf-8", "replace")
        ids = tokenizer(start, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) <= context:
        raise InputError(f"{part.name} has {len(ids)} {unit}; windows of {context} need at least {context + 1}")
    if not own and (largest := int(ids.max())) >= (known := model.get_input_embeddings().weight.shape[0]):
        raise InputError(f"the tokenizer in {str(folder)!r} made token {largest}; the model has {known} of them")
    windows = spread_windows(ids, count or -(-tokens // context), context)[:, :-1]

    def spell(token: int) -> str:
        if own:
            return repr(part.tokenizer.decode(windows.new_tensor([token])).decode("utf-8", "backslashreplace"))
        return repr(tokenizer.decode([token]))

    return model, part, windows, spell


def placed(options) -> tuple[Any, Any]:
    """Return the device and the dtype that the options ask for."""
    import torch

    from ..ops.clock import dtype_for, present_device

    device = present_device(options.device)
    return device, getattr(torch, options.dtype) if options.dtype else dtype_for(device)

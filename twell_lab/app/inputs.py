"""The model and the text that a command is given: ours, or one of transformers. Imports torch only when it reads."""

from __future__ import annotations

from typing import Any

from ..core import InputError, StackError


def model_and_windows(options, count: int | None = None, *, tokens: int = 0):
    """The model that the options ask for, on the CPU; the text; windows of its tokens (`_windows`): so many, or without
    a count as many as hold so many `tokens`; and what spells a token. The model is the one that tl.load gives, whose
    layers have the same names. One of transformers reads the text with its own tokenizer."""
    from ..models import published
    from ..models.tiny import LanguageModel

    folder = published.folder_of(options.model)
    if (folder / "config.json").is_file() and "format" not in published.configuration(folder):
        try:
            return _theirs(options, folder, count, tokens)
        except StackError:
            if not (model := _exported(folder)):
                raise
    else:
        model = LanguageModel.load(folder).eval()
    part, windows = _windows(options, count or -(-tokens // model.config.context), model.config)

    def spell(token: int) -> str:
        written = part.tokenizer.decode(windows.new_tensor([token]))
        try:
            return repr(written.decode())
        except UnicodeDecodeError:
            return repr(written)

    return model, part, windows, spell


def _exported(folder) -> Any:
    """The model in a Llama's folder that `twell-lab export` wrote, which is read without transformers, too; None for
    another one."""
    from ..models.tiny import LanguageModel

    try:
        return LanguageModel.load(folder)
    except InputError:
        return None


def _theirs(options, folder, count: int | None, tokens: int):
    """As `model_and_windows`, of a folder that transformers reads; windows of 512 tokens at most."""
    from ..models import published
    from ..training.text.load import load_any
    from ..training.text.prepared import PreparedText
    from ..training.text.source import spread_windows

    model: Any = published.load(folder)
    tokenizer = published.tokenizer_of(folder)
    text = load_any(options.text)
    part = text.split()[1] if options.text is None or isinstance(text, PreparedText) else text
    context = min(
        512, getattr(model.config, "max_position_embeddings", None) or 512
    )  # under whatever name it is stored
    count = count or -(-tokens // context)
    # A token is rarely longer than eight bytes; of a longer text the beginning would do, but not the tokenizer's time.
    start = part.tokenizer.decode(part.tokens[: 8 * (count + 1) * context]).decode("utf-8", "replace")
    ids = tokenizer(start, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) <= context:
        raise InputError(f"{part.name} has {len(ids)} tokens; windows of {context} need at least {context + 1}")
    if (largest := int(ids.max())) >= (known := model.get_input_embeddings().weight.shape[0]):
        raise InputError(f"the tokenizer in {str(folder)!r} made token {largest}; the model has {known} of them")
    return model, part, spread_windows(ids, count, context)[:, :-1], lambda token: repr(tokenizer.decode([token]))


def _windows(options, count: int, config):
    """The text that the options ask for, and windows of its tokens.

    The text is read with the tokenizer that training saved in the model's folder, or else as bytes. Only the held-out
    part is taken of the text that the model was trained on, of the default text and of a prepared text.

    Args:
        options: with `model`, the model's folder, and `text`.
        count: the number of windows.
        config: the model's, for its vocabulary and its context.

    Returns:
        (the text or its held-out part, windows as int64 [count, context], spread evenly over it)
    """
    from ..training.checkpoint import text_of
    from ..training.text.load import load_any, tokenizer_of
    from ..training.text.prepared import PreparedText
    from ..training.text.source import spread_windows

    text = load_any(options.text, tokenizer=tokenizer_of(options.model, config.vocabulary))
    seen = options.text is None or isinstance(text, PreparedText) or text.sha256 == text_of(options.model).get("sha256")
    part = text.split()[1] if seen else text
    if len(part.tokens) <= config.context:
        raise InputError(
            f"{part.name} has {len(part.tokens)} {part.tokenizer.unit}; the model reads windows of "
            f"{config.context}, so at least {config.context + 1} are needed"
        )
    return part, spread_windows(part.tokens, count, config.context)[:, :-1]

"""`generate`: the loop that decodes, with its whole step as one CUDA graph.

A step of decoding reads every weight once and computes little, so on a GPU it is bound by memory. Called by Python, its
hundreds of small kernels wait for the host instead. Here keys and values lie in memory of a fixed size, and masks and
positions are made on the device: so the model, the choice of the token and the bookkeeping can be compiled and captured
together. The host replays the graph, and reads each token while the next one is computed. Method: gpt-fast (PyTorch,
2023), for four models; here for every model a step of which runs without waiting for the host. That is tried before a
capture is, because a capture that fails may cost the process its CUDA context."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..core import InputError
from ..layers.skipping import joining
from .tiny import Keys, LanguageModel, check_whole

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

_ON = "cuda"  # the kind of device whose steps are captured
_PIECE = 4096  # tokens of a prompt that are read at once
_CAPTURED, _FEW = 128, 512  # tokens of a sequence that a graph reads at once; so many in all it reads, filled up
_ROUNDED = 256  # the room for keys and values is a multiple of it, so that a graph serves several lengths
_WORTH = 16  # from so many steps on, compiling and capturing are tried
_LARGE = 2**28  # bytes of weights, which take a GPU a tenth of a millisecond or more to read
_FULL, _SLIDING = "full_attention", "sliding_attention"  # the kinds of layers whose keys and values fit here
# What changes scores within a step, in transformers' order, each with the attribute that says how much.
_WARPERS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p"}
_BROKEN = "the model's scores are not numbers; accepted: a model whose weights are finite"
_LENGTH, _END = "MaxLengthCriteria", "EosTokenCriteria"  # what the loop stops for by itself
_SEEDS = 2**63
_LEAST = 1e-6  # of temperatures: below it the most likely token is drawn anyway, and float32 holds no quotients
# What a step is made for.
_SETTINGS = ("training", "threshold", "_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
# What transformers prepares for a forward and the loop makes by itself.
_PREPARED = {"attention_mask", "position_ids", "use_cache", "past_key_values", "cache", "cache_position"}
_PREPARED |= {"logits_to_keep"}

Draw = tuple[float, int, float]  # temperature, top_k and top_p; without them: temperature 0, the most likely token


class Options(TypedDict, total=False):
    """Name the options of `generate`. In its signature, transformers would take them out of what it prepares."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: str | Sequence[str] | None
    tokenizer: Any
    seed: int | None
    streamer: BaseStreamer | None
    attention_mask: Tensor | None


@torch.no_grad()
def generate(model: nn.Module, input_ids: Tensor, **options: Unpack[Options]) -> Tensor:
    """Continue prompts with a model of transformers or a LanguageModel of this project, dense or swapped.

    On a GPU the step of decoding is compiled and captured as one CUDA graph, which is kept for the next call. On a CPU,
    and for a model whose step can't be captured, the model's own `generate` says the same; a warning says why, once.

    Args:
        input_ids: int64 [batch, tokens], or [tokens].
        max_new_tokens: how many tokens to add at most [20].
        temperature: 0 takes the most likely token; above, one is drawn from softmax(scores / temperature) [0].
        top_k: draw from the so many most likely tokens alone.
        top_p: draw from the fewest most likely tokens that have this probability together.
        stop: a text, or several, after which a sequence ends; needs the tokenizer. A sequence also ends after an end
            token of the model's generation configuration.
        tokenizer: one of transformers, for `stop`.
        seed: of the draw; None draws others on every call. A captured step draws other tokens than a plain one.
        streamer: one of transformers, such as TextStreamer. It is given the prompt, and each token once it is there.
        attention_mask: [batch, tokens], 0 where a prompt is padded on its left.

    Returns prompts and new tokens, int64 [batch, tokens + new], filled up where a sequence ended before the others.
    transformers takes the function, too, and then prepares everything: model.generate(ids, custom_generate=tl.generate,
    max_new_tokens=100); it does not hand on a streamer, a tokenizer or a seed, which this function takes by itself.
    Raises InputError for wrong arguments, and where scores are not numbers."""
    if "logits_processor" in options:
        return _decode(model, input_ids, **dict(options))
    if unknown := options.keys() - Options.__annotations__.keys():
        raise InputError(f"generate got {sorted(unknown)[0]!r}; accepted: {', '.join(Options.__annotations__)}")
    asked: dict = dict.fromkeys(Options.__annotations__) | {"max_new_tokens": 20, "temperature": 0.0} | options
    _check(model, input_ids, asked)
    ids, device = torch.atleast_2d(input_ids), next(model.parameters()).device
    ids = ids if device.type == "meta" else ids.to(device)  # accelerate keeps weights elsewhere then
    mask, streamer, temperature = asked["attention_mask"], asked["streamer"], asked["temperature"]
    asked["attention_mask"] = None if mask is None else torch.atleast_2d(mask).to(ids.device)
    draw = temperature if temperature > _LEAST else 0.0, asked["top_k"] or 0, asked["top_p"] or 1.0
    if streamer:
        streamer.put(ids.cpu())
    if isinstance(model, LanguageModel) or not asked["max_new_tokens"]:
        ids = _of_ours(model, ids, draw, asked)
        if streamer:
            streamer.end()
    else:
        ids = _of_theirs(model, ids, draw, asked)
    return ids.reshape(*input_ids.shape[:-1], -1)


def _check(model: Any, ids: Tensor, asked: dict) -> None:
    ours = isinstance(model, LanguageModel)
    if not ours and not (isinstance(model, nn.Module) and getattr(model, "can_generate", bool)()):
        raise InputError(
            f"model is a {type(model).__name__}; accepted: a model of transformers that generates text, or a "
            "LanguageModel of this project, as tl.load gives both"
        )
    config = model.config if ours else model.config.get_text_config()
    vocabulary = config.vocabulary if ours else config.vocab_size
    longest = None if ours else getattr(config, "max_position_embeddings", None)
    tokens, temperature, top_k, top_p, stop, tokenizer, seed, streamer, mask = asked.values()
    what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
    if not what.startswith("torch.int64") or ids.dim() not in (1, 2) or not ids.numel():
        raise InputError(f"prompt is {what}; accepted: int64 [length] or [batch, length], at least one token")
    if wrong := [n for n in (ids.min().item(), ids.max().item()) if not 0 <= n < vocabulary]:
        raise InputError(f"prompt has the token {wrong[0]}; accepted: token numbers from 0 to {vocabulary - 1}")
    check_whole("max_new_tokens", tokens, 0)
    check_whole("top_k", 1 if top_k is None else top_k, 1)
    check_whole("seed", seed or 0, 0, _SEEDS - 1)
    if type(temperature) not in (int, float) or not 0 <= temperature < torch.inf:
        raise InputError(f"temperature is {temperature!r}; accepted: a finite number from 0 up")
    if top_p is not None and not (isinstance(top_p, (int, float)) and 0 < top_p <= 1):
        raise InputError(f"top_p is {top_p!r}; accepted: a number above 0 and up to 1")
    stops = stop if isinstance(stop, (list, tuple)) else [stop]
    if stop is not None and not (stops and all(isinstance(text, str) and text for text in stops)):
        raise InputError(f"stop is {stop!r:.80}; accepted: a text, or several, none of which is empty")
    if stop is not None and not hasattr(tokenizer, "get_vocab"):
        raise InputError(f"stop is {stop!r:.80} with the tokenizer {tokenizer!r:.80}; accepted: with the model's")
    if streamer is not None and (isinstance(streamer, type) or not hasattr(streamer, "put")):
        raise InputError(
            f"streamer is {streamer!r:.80}; accepted: a streamer of transformers, such as TextStreamer(...)"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        shapes = f"{list(getattr(mask, 'shape', [type(mask)]))}, for prompts of shape {list(ids.shape)}"
        raise InputError(f"attention_mask is {shapes}; accepted: of their shape")
    if mask is not None and not (mask[..., -1].all() and (mask[..., 1:] >= mask[..., :-1]).all()):
        raise InputError("attention_mask has zeros behind ones; accepted: with zeros on the left alone")
    if ours and (stop is not None or mask is not None):
        raise InputError("stop or attention_mask is given with a LanguageModel; accepted: a model of transformers")
    if 0 < (longest or 0) < ids.shape[-1] + tokens:  # -1 is no bound
        asked = f"max_new_tokens is {tokens} after a prompt of {ids.shape[-1]}"
        raise InputError(f"{asked}; the model reads up to {longest} together")


def _of_ours(model: Any, ids: Tensor, draw: Draw, asked: dict) -> Tensor:
    """Decode; beyond the context, read on from a multiple of half of it, the first at which what follows fits."""
    left, seed = asked["max_new_tokens"], asked["seed"]
    while left:
        context = model.config.context
        half = (context + 1) // 2
        first = max(0, -(-(ids.shape[1] - context) // half) * half)  # the first token that is read
        tokens = min(left, context + 1 - len(ids[0, first:]))
        more = _loop(model, ids[:, first:], tokens, draw, seed, asked["streamer"])
        ids, left = torch.cat([ids[:, :first], more], 1), left - tokens
        seed = None if seed is None else (seed + 1) % _SEEDS
    return ids


def _of_theirs(model: Any, ids: Tensor, draw: Draw, asked: dict) -> Tensor:
    from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

    own, draws = model.generation_config, draw[0] > 0
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    config = GenerationConfig(
        max_new_tokens=asked["max_new_tokens"],
        do_sample=draws,
        pad_token_id=(ends[0] or 0) if own.pad_token_id is None else own.pad_token_id,
        **{"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False},
        **(dict(zip(_WARPERS.values(), draw)) if draws else {}),
    )
    stops = [] if asked["stop"] is None else [StopStringCriteria(asked["tokenizer"], asked["stop"])]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if asked["attention_mask"] is None else asked["attention_mask"],
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(stops),
        custom_generate=partial(_decode, streamer=asked["streamer"], seed=asked["seed"]),
    )


def _decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    streamer: BaseStreamer | None = None,
    seed: int | None = None,
    synced_gpus: bool = False,
    **prepared: Any,
) -> Tensor:
    """Decode as transformers asks for it, with all that its `generate` has prepared."""
    mode = generation_config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise InputError(f"the generation configuration asks for {mode.value}; accepted: greedy search and sampling")
    warpers = {type(one).__name__: one for one in logits_processor}
    places = range(input_ids.shape[1], stopping_criteria.max_length)
    if why := _why_plain(model, generation_config, [*warpers], places, prepared):
        _say_once(type(model), "decodes step by step", why)
        with torch.random.fork_rng([input_ids.device] if input_ids.is_cuda else [], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            more = {"generation_config": generation_config, "synced_gpus": synced_gpus, "streamer": streamer}
            checked = type(logits_processor)([_check_scores, *logits_processor])
            return model._sample(input_ids, checked, stopping_criteria, **more, **prepared)
    # Read off the processors and criteria: those that somebody passes take the place of the configuration's.
    draw = 0.0, 0, 1.0
    if generation_config.do_sample:
        usual = zip(_WARPERS.items(), (1.0, 0, 1.0))
        draw = tuple(getattr(warpers.get(kind), name, plain) for (kind, name), plain in usual)
    ends = [one.eos_token_id.flatten().tolist() for one in stopping_criteria if type(one).__name__ == _END]
    filler, mask = generation_config._pad_token_tensor, prepared.get("attention_mask")
    how = {"ends": tuple(*ends[-1:]), "filler": 0 if filler is None else int(filler), "mask": mask}
    how["criteria"] = [one for one in stopping_criteria if type(one).__name__ not in (_LENGTH, _END)]
    text = _loop(model, input_ids, max(1, len(places)), draw, seed, streamer, **how)
    if streamer:
        streamer.end()
    return text


def _check_scores(ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores, as transformers asks before it takes a token."""
    if scores.isnan().any():
        raise InputError(_BROKEN)
    return scores


def _why_plain(model: Any, asked: Any, processors: list[str], places: range, prepared: dict) -> str:
    """Return why transformers' own loop is taken, or nothing.

    asked: the generation configuration. processors: the kinds of what changes scores. places: of the new tokens."""
    config, takes = model.config.get_text_config(), inspect.signature(model.forward).parameters
    parts = [*model.modules()]  # asked before each first token, so without torch's slower ways to go through a model
    devices = {t.device for m in parts for t in m._parameters.values() if t is not None}
    masks = (t for m in parts for t in m._buffers.values() if t is not None and t.dtype == torch.bool)
    prepares = model.prepare_inputs_for_generation
    moved = {"cpu", "disk"} & {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    past = prepared.get("past_key_values", prepared.get("cache"))
    given = [name for name, value in prepared.items() if name not in _PREPARED and value is not None]
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {_FULL, _SLIDING})
    changes = getattr(config, "original_max_position_embeddings", None)
    reasons = {
        "it is not on one GPU": {d.type for d in devices} != {_ON} or len(devices) > 1 or moved and _ON == "cuda",
        "it has an encoder": getattr(model.config, "is_encoder_decoder", False),
        "it takes no positions of tokens": "position_ids" not in takes or getattr(config, "alibi", False),
        "it keeps no keys and values": not {"cache", "past_key_values"} & takes.keys(),
        "its layers look at images": getattr(config, "cross_attention_layers", None),
        # By how many keys there are, as GPT-Neo's.
        "its layers have masks of their own": any(mask.dim() == 4 for mask in masks),
        # As a BERT's that is no decoder; other parts, such as one that sees pictures, have configurations of their own.
        "its tokens attend to later ones": any(
            not getattr(m, "is_causal", True) and getattr(m, "config", config) is config for m in parts
        ),
        # As PEFT's prompt tuning.
        "another module prepares its inputs": getattr(prepares, "__self__", model) is not model,
        f"it has layers of {strange[:1]}": strange,
        f"its attention is {config._attn_implementation!r}": config._attn_implementation not in ("sdpa", "eager"),
        f"scores pass through {', '.join(processors)}": processors != [name for name in _WARPERS if name in processors],
        f"its forward is given {given[:1]}": given,
        "it is given keys and values": past is not None
        and (past.get_seq_length() or hasattr(past, "_is_user_defined")),
        "more than its tokens is asked for": asked.return_dict_in_generate,
        "it may keep no keys and values": not prepared.get("use_cache", True),
        # As Phi-3, where positions change their scale.
        f"it reads all anew at token {(changes or 0) + 1}": changes in places,
    }
    return next((why for why, holds in reasons.items() if holds), "")


@cache
def _say_once(model: type, what: str, why: str) -> None:
    reason = why.partition("\n")[0]
    warnings.warn(f"generate: {model.__name__} {what}: {reason:.200}", stacklevel=4)


def _loop(
    model: Any,
    ids: Tensor,
    tokens: int,
    draw: Draw,
    seed: int | None,
    streamer: BaseStreamer | None,
    *,
    mask: Tensor | None = None,
    ends: tuple[int, ...] = (),
    filler: int = 0,
    criteria: Sequence[Any] = (),
) -> Tensor:
    """Return prompts and new tokens, up to where all sequences have ended.

    mask: of the prompts. ends: tokens behind which there is only `filler`. criteria: of transformers, asked after each
    token, for which the loop has to wait; without them it reads a token while the next one is computed."""
    (batch, length), late = ids.shape, 0 if criteria else 1
    generator = torch.Generator(ids.device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    text = pad(ids, (0, tokens), value=filler)
    room = -(-text.shape[1] // _ROUNDED) * _ROUNDED
    # Tensors made in inference mode stay such, and autocast decides of what type keys and values are.
    cast = torch.is_autocast_enabled(ids.device.type) and torch.get_autocast_dtype(ids.device.type)
    mode = torch.is_inference_mode_enabled(), cast
    form = (batch, room, (draw[0] > 0, draw[1] > 0 or draw[2] < 1), ends, filler, (_state(model), *mode))
    step = _steps.pop(model, None)  # while it is in use, another thread makes its own
    # Another form's goes before the next one is made, since its memory is needed.
    step = step if step is not None and step.form == form else None
    if step is None:
        keys = Keys(room)
        step = Step(form, read_prompt(model, ids, mask, keys), keys)
        step.load(length, draw, mask)
    else:
        step.load(length, draw, mask)
        step.read(model, ids, mask)
    step.keys.take(step.place, room)
    sent: list[tuple[Tensor, Any]] = []
    over = torch.zeros(batch, dtype=torch.bool)
    for number in range(tokens + late):
        if number < tokens:
            if step.noise is not None:
                step.noise.exponential_(generator=generator)
            step.choose(step.scores) if number == 0 else step.advance(model, step, tokens - number >= _WORTH)
            text[:, length + number] = step.token
            sent.append(_send(step.token))
        if number < late:
            continue
        done = number + 1 - late
        token, arrived = sent.pop(0)
        if arrived is not None:
            arrived.synchronize()
        over |= torch.isin(token, torch.tensor(ends, dtype=token.dtype))
        if streamer:
            streamer.put(token)
        for criterion in criteria:
            step.finished |= criterion(text[:, : length + done], None)
            over |= step.finished.cpu()
        if over.all():
            break
    if step.broken:
        raise InputError(_BROKEN)
    _steps[model] = step
    return text[:, : length + done]


def _send(token: Tensor) -> tuple[Tensor, Any]:
    """Send tokens [batch] to the host; return where they will be, and the event that says when."""
    if not token.is_cuda:
        return token.clone(), None
    landing = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
    landing.copy_(token, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return landing, arrived


def _state(model: nn.Module) -> int:
    """Return a number that changes when a module of the model, its hooks, its path, its threshold, whether an adapter
    of PEFT is on, or where a weight lies does."""
    parts: list[Any] = []
    for m in model.modules():
        own = vars(m)
        parts += id(m), *own["_forward_hooks"], *own["_forward_pre_hooks"], *own.get("choices", ())
        parts += [str(own[name]) for name in _SETTINGS if name in own]
        tensors = (t for t in (*own["_parameters"].values(), *own["_buffers"].values()) if t is not None)
        parts += [(t.data_ptr() or id(t), t.dtype, t.stride()) for t in tensors]
    return hash(tuple(parts))


def read_prompt(model: Any, ids: Tensor, mask: Tensor | None, keys: Keys) -> Tensor:
    """Read prompts [batch, tokens] in pieces; return the scores of the next token [batch, vocabulary], and leave the
    keys and values of each layer in `keys`. mask: as of `generate`, or None for prompts of one length."""
    end, slots = ids.shape[1], torch.arange(keys.room, device=ids.device)
    if isinstance(model, LanguageModel):
        keys.take(slots[:end], end)
        return model.head(model.read(ids, slots[:end], keys)[:, -1])
    takes = inspect.signature(model.forward).parameters
    more: dict = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    more |= {"use_cache": True, cache_name(model): _cache(keys)}
    positions = (torch.ones_like(ids) if mask is None else mask.long()).cumsum(1).sub(1).clamp(min=0)
    for begin in range(0, end, _PIECE):
        piece = slice(begin, min(end, begin + _PIECE))
        keys.take(slots[piece], piece.stop)
        part = None if mask is None else mask[:, : piece.stop]
        scores = model(ids[:, piece], attention_mask=part, position_ids=positions[:, piece], **more).logits[:, -1]
    return scores


def _cache(keys: Keys) -> Any:
    """Return a cache of transformers that grows, and whose layers lie in `keys`."""
    from transformers.cache_utils import Cache, DynamicLayer

    class Layer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.is_initialized, number = True, grows.layers.index(self)
            self.keys, self.values = keys.update(key_states, value_states, number)
            return self.keys, self.values

    grows = Cache(layer_class_to_replicate=Layer)
    return grows


def cache_name(model: nn.Module) -> str:
    """Return what a model calls the keys and values of earlier tokens: transformers 5.24 gave that another name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Step:
    """The step of decoding of one form: all that it reads and writes lies on the device, where it is.

    form: batch, room for keys and values, kind of the rule, end tokens, filler, state of the model."""

    def __init__(self, form: tuple, scores: Tensor, keys: Keys) -> None:
        self.form = form
        batch, room, (draws, _), ends, filler, _ = form
        new, wide = partial(torch.zeros, device=scores.device), scores.shape
        self.place, self.position = new(1, dtype=torch.int64), new(batch, 1, dtype=torch.int64)
        self.real = new(batch, room, dtype=torch.bool)  # which slots hold no padding
        self.slots = torch.arange(room, device=scores.device)
        self.token, self.finished = new(batch, dtype=torch.int64), new(batch, dtype=torch.bool)
        self.ends, self.filler = torch.tensor(ends, dtype=torch.int64, device=scores.device), filler
        self.noise = new(wide) if draws else None
        self.numbers = new(3)  # temperature, top_k, top_p
        self.ranks = torch.arange(wide[1], device=scores.device)
        self.broken = new((), dtype=torch.bool)
        self.keys, self.scores = keys, scores.clone()
        self.advance = Replayed(_step, "decodes step by step", compiled=True)
        # Of a piece of the prompts: its tokens, the slots that they take, and the number of the last one.
        self.piece, self.places = new(batch, _CAPTURED, dtype=torch.int64), self.slots[:_CAPTURED].clone()
        self.last = new(1, dtype=torch.int64)
        self.read_piece = Replayed(_read, "reads prompts without a graph")

    def load(self, length: int, draw: Draw, mask: Tensor | None) -> None:
        """Begin anew behind a prompt of so many tokens."""
        self.place.fill_(length)
        self.real.fill_(True)
        self.position.fill_(length)
        if mask is not None:
            self.real[:, :length] = mask.bool()
            self.position.copy_(mask.sum(1, keepdim=True))
        self.finished.zero_()
        self.broken.zero_()
        temperature, top_k, top_p = draw
        self.numbers.copy_(torch.tensor([temperature, top_k or len(self.ranks), top_p]))

    def read(self, model: Any, ids: Tensor, mask: Tensor | None) -> None:
        """Read prompts that were loaded, up to the scores behind them. Where they are short a GPU waits for the host:
        so a graph reads them, in pieces. The last piece is filled up; what it leaves behind a prompt, steps replace."""
        takes = {"logits_to_keep"} if isinstance(model, LanguageModel) else inspect.signature(model.forward).parameters
        begins = range(0, ids.shape[1], _CAPTURED)
        few = ids.device.type == _ON and len(begins) * self.piece.numel() <= _FEW and "logits_to_keep" in takes
        if not few or self.read_piece.failed:
            self.scores.copy_(read_prompt(model, ids, mask, self.keys))
            return
        self.keys.take(self.places, self.keys.room)
        for begin in begins:
            tokens = ids[:, begin : begin + _CAPTURED]
            self.piece[:, : tokens.shape[1]] = tokens
            self.places.copy_(self.slots[begin : begin + _CAPTURED])
            self.last.fill_(tokens.shape[1] - 1)
            self.read_piece(model, self)

    def masks(self, config: Any, dtype: torch.dtype, places: Tensor) -> Any:
        """Return what a model takes as attention_mask of tokens in these slots, [batch, 1, tokens, room]: a mask; or,
        for layers of two kinds, one for each."""
        own = places[:, None]
        # Padding attends to itself: without anything it would become NaN.
        there = self.real[:, None] & (self.slots <= own) | (self.slots == own)
        window = getattr(config, "sliding_window", None)
        kinds = sorted(set(getattr(config, "layer_types", None) or [_SLIDING if window else _FULL]))
        near = there & (self.slots > own - window) if _SLIDING in kinds else there
        masks = {kind: (near if kind == _SLIDING else there)[:, None] for kind in kinds}
        if getattr(config, "_attn_implementation", "sdpa") == "eager":
            least = torch.finfo(dtype).min
            masks = {kind: torch.zeros_like(m, dtype=dtype).masked_fill(~m, least) for kind, m in masks.items()}
        return masks if len(masks) > 1 else masks[kinds[0]]

    def choose(self, scores: Tensor) -> None:
        """Choose the next tokens from scores [batch, vocabulary]."""
        draws, filters = self.form[2]
        temperature, top_k, top_p = self.numbers
        scores = scores.float()
        self.broken |= scores.isnan().any()
        if not draws:
            token = scores.argmax(1)
        elif not filters:
            token = ((scores / temperature).softmax(1) / self.noise).argmax(1)
        else:
            scores, numbers = (scores / temperature).sort(1, descending=True)
            chances = scores.masked_fill(self.ranks >= top_k, -torch.inf).softmax(1)
            chances = chances.masked_fill(chances.cumsum(1) - chances >= top_p, 0.0)
            token = numbers.gather(1, (chances / self.noise).argmax(1, keepdim=True))[:, 0]
        token = token.masked_fill(self.finished, self.filler)
        self.token.copy_(token)
        self.finished |= (token[:, None] == self.ends).any(1)


class Replayed:
    """A call of a model and a step: a few times as it is, which shows whether it waits for the GPU, then captured, and
    from then on replayed. It does not keep the step, which has to go at once when it is forgotten: a cycle would keep
    its memory. without: what a model does that cannot be captured, for a warning."""

    def __init__(self, call: Callable[[Any, Step], None], without: str, *, compiled: bool = False) -> None:
        self.call, self.without, self.failed = call, without, False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream: torch.cuda.Stream | None = None
        self.ahead = [Replayed._compile] * compiled + [Replayed._try, Replayed._capture]

    def __call__(self, model: Any, step: Step, worth: bool = True) -> None:
        """Make the call. worth: whether enough others follow for it to be compiled and captured."""
        if self.graph is not None:
            self.graph.replay()
        elif self.ahead and worth and step.token.is_cuda:
            self.ahead.pop(0)(self, model, step)
        else:
            self.call(model, step)

    def _compile(self, model: Any, step: Step) -> None:
        # Products with one token are then compiled, too, as sums: those of one input, such as queries, keys and values,
        # in one kernel, which on an H200 made steps 1.1 to 1.2 times as fast. But it takes half a minute, in which a
        # small model is done.
        large = sum(t.nbytes for t in model.parameters()) >= _LARGE
        options = {"coordinate_descent_tuning": large and len(step.token) == 1, "post_grad_custom_pre_pass": joining()}
        plain, self.call = self.call, torch.compile(self.call, fullgraph=True, options=options)
        try:
            with torch._dynamo.config.patch(recompile_limit=64):  # models, batches and ways to choose
                self.call(model, step)
        except Exception as error:  # of many kinds; nothing was computed
            _say_once(type(model), "decodes uncompiled, as its step cannot be compiled", str(error))
            self.call = plain
            self.call(model, step)

    def _try(self, model: Any, step: Step) -> None:
        moved = [step.place, step.position, step.token, step.finished]
        before = [t.clone() for t in moved]
        try:
            with torch.cuda.stream(self._beside()), _no_waiting():
                self.call(model, step)
        except RuntimeError as error:
            self._fail(model, "as that waits for the GPU", error)
            torch.cuda.current_stream().wait_stream(self.stream)
            for t, value in zip(moved, before):
                t.copy_(value)
            self.call(model, step)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _capture(self, model: Any, step: Step) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._beside(), capture_error_mode="thread_local"):
                self.call(model, step)
        except RuntimeError as error:  # as of too little memory
            self._fail(model, "as it cannot be captured", error)
            self.call(model, step)
        else:
            self.graph = graph
            graph.replay()

    def _fail(self, model: Any, why: str, error: Exception) -> None:
        self.ahead.clear()
        self.failed = True
        _say_once(type(model), f"{self.without}, {why}", str(error))

    def _beside(self) -> torch.cuda.Stream:
        """Return the stream of captures, after the work of the current one."""
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        return self.stream


def _step(model: Any, step: Step) -> None:
    """Compute the scores behind the last token, and choose the next one. Nothing here waits for the device."""
    scores = _scores(model, step, step.token[:, None], step.place, step.position)
    step.place += 1
    step.position += 1
    step.choose(scores[:, -1])


def _read(model: Any, step: Step) -> None:
    """Read a piece of the prompts, up to the scores behind its last token. What fills it up is at the last position, so
    that models that have a table of them find it there."""
    positions = (step.real.cumsum(1) - 1)[:, step.places].minimum(step.position - 1).clamp(min=0)
    step.scores.copy_(_scores(model, step, step.piece, step.places, positions, step.last)[:, 0])


def _scores(
    model: Any, step: Step, ids: Tensor, places: Tensor, positions: Tensor, last: Tensor | None = None
) -> Tensor:
    """Return the scores behind tokens [batch, tokens] in these slots [tokens]. last: the numbers of some of them."""
    if isinstance(model, LanguageModel):
        x = model.read(ids, positions[0], step.keys, step.masks(None, torch.float32, places))
        return model.head(x if last is None else x[:, last])
    masks = step.masks(model.config.get_text_config(), model.dtype, places)
    more = {} if last is None else {"logits_to_keep": last}
    more |= {"attention_mask": masks, "position_ids": positions, "use_cache": True, cache_name(model): step.keys}
    return model(ids, **more).logits


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Within it an operation that waits for the GPU raises a RuntimeError."""
    with _one_at_a_time:  # the mode is the process's: two threads could leave it on
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


_steps: WeakKeyDictionary[nn.Module, Step] = WeakKeyDictionary()
_one_at_a_time = threading.Lock()


def forget(model: nn.Module) -> None:
    """Free what is kept for the next generation of a model: its step's graph, with room for keys and values."""
    _steps.pop(model, None)

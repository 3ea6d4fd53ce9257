"""`generate`: the loop that decodes, with its whole step as one CUDA graph.

A step of decoding reads every weight once and computes little, so on a GPU it is bound by memory. Called by Python, its
hundreds of small kernels wait for the host instead. Here keys and values lie in memory of a fixed size, and masks and
positions are made on the device: so the model, the choice of the token and the bookkeeping can be compiled and captured
together. The host replays the graph, and reads each token while the next one is computed. Method: gpt-fast (PyTorch,
2023), for four models; here for every model a step of which runs without waiting for the host. That is tried before a
capture is, because a capture that fails may cost the process its CUDA context."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..core import InputError
from .tiny import LanguageModel, check_generation

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

_ON = "cuda"  # the kind of device whose steps are captured
_PIECE = 4096  # tokens of a prompt that are read at once
_ROUNDED = 256  # the room for keys and values is a multiple of it, so that a graph serves several lengths
_WORTH = 16  # from so many steps on, compiling and capturing are tried
_RECOMPILED = 64  # models, batches and ways to choose that torch.compile keeps the step for
_FULL, _SLIDING = "full_attention", "sliding_attention"  # the kinds of layers whose keys and values fit here
_PENALTY = "RepetitionPenaltyLogitsProcessor"
_WARPERS = (_PENALTY, "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")  # what a step does, too
_BROKEN = "the model's scores are not numbers; accepted: a model whose weights are finite"
_LENGTH, _END = "MaxLengthCriteria", "EosTokenCriteria"  # what the loop stops for by itself
_SETTINGS = ("training", "threshold", "_disable_adapters", "_active_adapter", "scaling")  # what a step is made for
_PREPARED = (
    "attention_mask",
    "position_ids",
    "use_cache",
    "past_key_values",
    "cache",
    "cache_position",
    "logits_to_keep",
)


class Options(TypedDict, total=False):
    """Name the options of `generate`."""

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
    prepared: dict[str, Any] = {**options}
    if "logits_processor" in prepared:
        return _decode(model, input_ids, **prepared)
    if unknown := options.keys() - Options.__annotations__.keys():
        raise InputError(f"generate got {sorted(unknown)[0]!r}; accepted: {', '.join(Options.__annotations__)}")
    given = dict.fromkeys(Options.__annotations__) | {"max_new_tokens": 20, "temperature": 0.0} | prepared
    ours, draw = isinstance(model, LanguageModel), {name: given[name] for name in ("temperature", "top_k", "seed")}
    vocabulary = _vocabulary(model)
    check_generation(input_ids, given["max_new_tokens"], draw["temperature"], draw["top_k"], draw["seed"], vocabulary)
    _check(given, input_ids)
    ids = torch.atleast_2d(input_ids)
    ids = ids if _device(model).type == "meta" else ids.to(_device(model))  # accelerate keeps weights elsewhere then
    if streamer := given["streamer"]:
        streamer.put(ids.cpu())
    text = _of_ours(model, ids, given, draw) if ours else _of_theirs(model, ids, given)
    return text.reshape(*input_ids.shape[:-1], -1)


def _check(given: dict, ids: Tensor) -> None:
    top_p, stop, mask = given["top_p"], given["stop"], given["attention_mask"]
    if top_p is not None and not (isinstance(top_p, (int, float)) and 0 < top_p <= 1):
        raise InputError(f"top_p is {top_p!r}; accepted: a number above 0 and up to 1")
    if stop is not None and given["tokenizer"] is None:
        raise InputError(f"stop is {stop!r:.80} without a tokenizer; accepted: with the model's")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape or not mask[..., -1].all()):
        shape = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"attention_mask is {shape}, for prompts of shape {list(ids.shape)}; accepted: of their shape, and with "
            "zeros on the left alone"
        )


def _vocabulary(model: Any) -> int:
    """Return how many token numbers there are."""
    if isinstance(model, LanguageModel):
        return model.config.vocabulary
    if not isinstance(model, nn.Module) or not getattr(model, "can_generate", bool)():
        raise InputError(
            f"model is a {type(model).__name__}; accepted: a model of transformers that generates text, or a "
            "LanguageModel of this project, as tl.load gives both"
        )
    return model.config.get_text_config().vocab_size


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


# ---- the two kinds of models


def _of_ours(model: LanguageModel, ids: Tensor, given: dict, draw: dict) -> Tensor:
    for name in ("stop", "attention_mask"):
        if given[name] is not None:
            raise InputError(f"{name} is given with a LanguageModel; accepted: with a model of transformers")
    tokens, streamer, context = given["max_new_tokens"], given["streamer"], model.config.context
    if ids.shape[1] + tokens <= context:
        rule = _Rule(given["temperature"], given["top_k"] or 0, given["top_p"] or 1.0)
        return _loop(model, ids, tokens, rule, given["seed"], streamer)
    if given["top_p"] is not None:
        raise InputError(f"top_p is given for a text beyond the context of {context}; accepted: within it")
    if ids.device.type == _ON:
        _say_once(model, f"prompt and text are longer than its context of {context}")
    new = model.generate(ids, tokens, **draw)
    for token in new.t() if streamer else ():
        streamer.put(token.cpu())
    if streamer:
        streamer.end()
    return torch.cat([ids, new], 1)


def _of_theirs(model: Any, ids: Tensor, given: dict) -> Tensor:
    from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

    tokens, temperature = given["max_new_tokens"], given["temperature"]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest and ids.shape[1] + tokens > longest:
        raise InputError(
            f"max_new_tokens is {tokens} after a prompt of {ids.shape[1]}; the model reads up to {longest} together"
        )
    if not tokens:
        if given["streamer"]:
            given["streamer"].end()
        return ids
    own = model.generation_config
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    how = {"temperature": temperature, "top_k": given["top_k"] or 0, "top_p": given["top_p"] or 1.0}
    config = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=temperature > 0,
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=False,
        pad_token_id=(ends[0] or 0) if own.pad_token_id is None else own.pad_token_id,
        **(how if temperature else {}),
    )
    stop = given["stop"]
    criteria = [] if stop is None else [StopStringCriteria(given["tokenizer"], stop)]
    mask = torch.ones_like(ids) if given["attention_mask"] is None else torch.atleast_2d(given["attention_mask"])
    return model.generate(
        ids,
        attention_mask=mask.to(ids.device),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(criteria),
        custom_generate=partial(_decode, streamer=given["streamer"], seed=given["seed"]),
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
    named = {type(one).__name__: one for one in logits_processor}
    others = [name for name in named if name not in _WARPERS]
    if len(named) < len(logits_processor) or [*named] != [name for name in _WARPERS if name in named]:
        others = others or [*named]  # in another order, or twice, as somebody may pass them
    why = _why_plain(model) or _why_plain_call(generation_config, others, prepared)
    changes = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
    if not why and changes and input_ids.shape[1] <= changes < stopping_criteria.max_length:
        why = f"it reads all anew at token {changes + 1}"  # as Phi-3, where positions change their scale
    if why:
        _say_once(model, why)
        devices = [input_ids.device] if input_ids.is_cuda else []
        with torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            more = {"generation_config": generation_config, "synced_gpus": synced_gpus, "streamer": streamer}
            checked = type(logits_processor)([_check_scores, *logits_processor])
            return model._sample(input_ids, checked, stopping_criteria, **more, **prepared)
    # Read off the processors and criteria: those that somebody passes take the place of the configuration's.
    draws = generation_config.do_sample
    penalty, *warpers = (named.get(name) for name in _WARPERS)
    how = zip(warpers, ("temperature", "top_k", "top_p"), (1.0 if draws else 0.0, 0, 1.0))
    rule = _Rule(*(getattr(one, name) if draws and one else other for one, name, other in how))
    repeated = None
    if penalty:  # which knows what of the prompt counts
        rule = rule._replace(penalty=penalty.penalty)
        repeated = penalty(input_ids, input_ids.new_ones(len(input_ids), _vocabulary(model), dtype=torch.float32)) != 1
    stops = {type(one).__name__: one for one in stopping_criteria}
    filler = generation_config._pad_token_tensor
    return _loop(
        model,
        input_ids,
        max(1, stopping_criteria.max_length - input_ids.shape[1]),
        rule,
        seed,
        streamer,
        prepared.get("attention_mask"),
        repeated,
        ends=tuple(stops[_END].eos_token_id.reshape(-1).tolist()) if _END in stops else (),
        filler=0 if filler is None else int(filler),
        criteria=[one for one in stopping_criteria if type(one).__name__ not in (_LENGTH, _END)],
    )


def _check_scores(ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores, as transformers asks before it takes a token."""
    if scores.isnan().any():
        raise InputError(_BROKEN)
    return scores


# ---- where the step cannot be captured


def _why_plain(model: Any) -> str:
    """Return why the model's own loop is taken whatever is asked for, or nothing."""
    moved = {"cpu", "disk"} & {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if _device(model).type != _ON or len({t.device for t in model.parameters()}) > 1 or moved and _ON == "cuda":
        return "it is not all on one GPU"
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder"
    takes = inspect.signature(model.forward).parameters
    if "position_ids" not in takes or getattr(config, "alibi", False):
        return "it takes no positions of tokens"
    if not {"cache", "past_key_values"} & takes.keys():
        return "it keeps no keys and values"
    if any(buffer.dim() == 4 and buffer.dtype == torch.bool for buffer in model.buffers()):
        return "its layers have masks of their own"  # by how many keys there are, as GPT-Neo's
    if getattr(model.prepare_inputs_for_generation, "__self__", model) is not model:
        return "another module prepares its inputs"  # as PEFT's prompt tuning
    if strange := set(getattr(config, "layer_types", None) or ()) - {_FULL, _SLIDING}:
        return f"it has layers of {sorted(strange)[0]!r}"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {config._attn_implementation!r}"
    return ""


def _why_plain_call(config: Any, processors: list[str], prepared: dict) -> str:
    """Return why transformers' loop is taken for what this call asks for, or nothing."""
    past = prepared.get("past_key_values", prepared.get("cache"))
    if processors:
        return f"scores pass through a {processors[0]}"
    if more := [name for name, value in prepared.items() if name not in _PREPARED and value is not None]:
        return f"its forward is given {more[0]!r}"
    if past is not None and (past.get_seq_length() or getattr(past, "_is_user_defined", False)):
        return "it is given keys and values"
    if config.return_dict_in_generate or not prepared.get("use_cache", True):
        return "more than its tokens is asked for, or it may keep no keys and values"
    return ""


def _say_once(model: Any, why: str, what: str = "decodes step by step") -> None:
    key = type(model).__name__, what, why
    if key not in _said:
        _said.add(key)
        warnings.warn(f"generate: {key[0]} {what}, as {why}", stacklevel=4)


def _first_line(error: Exception) -> str:
    return f"{str(error).partition(chr(10))[0]:.200}"


_said: set[tuple[str, str, str]] = set()


# ---- the loop


class _Rule(NamedTuple):
    """Say by which rule a token is chosen from scores; temperature 0: the most likely one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Return whether it draws, leaves out unlikely tokens, and makes tokens that were there less likely."""
        return self.temperature > 0, self.top_k > 0 or self.top_p < 1, self.penalty != 1


def _loop(
    model: Any,
    ids: Tensor,
    tokens: int,
    rule: _Rule,
    seed: int | None,
    streamer: BaseStreamer | None,
    mask: Tensor | None = None,
    repeated: Tensor | None = None,
    ends: tuple[int, ...] = (),
    filler: int = 0,
    criteria: Sequence[Any] = (),
) -> Tensor:
    """Return prompts and new tokens, up to where all sequences have ended. criteria: of transformers, asked after each
    token, for which the loop has to wait; without them it reads a token while the next one is computed."""
    (batch, length), late, done = ids.shape, 0 if criteria else 1, 0
    generator = torch.Generator(ids.device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    text = pad(ids, (0, tokens), value=filler)
    room = -(-text.shape[1] // _ROUNDED) * _ROUNDED
    form = (batch, room, rule.kind, ends, filler, _state(model))
    step = _steps.pop(model, None)  # while it is in use, another thread makes its own
    if step is not None and step.form != form:
        step = None  # before the next one is made, since its memory is needed
    keys = Keys(room) if step is None else step.keys
    scores = read_prompt(model, ids, mask, keys)
    step = step or Step(form, scores, keys)
    step.load(length, mask, rule, repeated)
    sent: list[tuple[Tensor, Any]] = []
    over = torch.zeros(batch, dtype=torch.bool)
    for number in range(tokens + late):
        if number < tokens:
            if step.noise is not None:
                step.noise.exponential_(generator=generator)
            step.choose(scores) if number == 0 else step.advance(model, tokens - number)
            text[:, length + number] = step.token
            sent.append(_send(step.token))
        if number < late:
            continue
        done += 1
        token, arrived = sent.pop(0)
        if arrived is not None:
            arrived.synchronize()
        over |= torch.isin(token, torch.tensor(ends, dtype=token.dtype))
        if streamer is not None:
            streamer.put(token)
        for criterion in criteria:
            step.finished |= criterion(text[:, : length + done], None)
            over |= step.finished.cpu()
        if over.all():
            break
    if step.broken:
        raise InputError(_BROKEN)
    if streamer is not None:
        streamer.end()
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
    modules = [
        (
            id(m),
            *m._forward_hooks,
            *m._forward_pre_hooks,
            *getattr(m, "choices", ()),
            *(str(vars(m).get(name)) for name in _SETTINGS),
        )
        for m in model.modules()
    ]
    weights = [(t.data_ptr(), t.dtype, t.stride()) for t in (*model.parameters(), *model.buffers())]
    return hash((*modules, *weights))


def read_prompt(model: Any, ids: Tensor, mask: Tensor | None, keys: Keys) -> Tensor:
    """Read prompts [batch, tokens] in pieces; return the scores of the next token [batch, vocabulary], and leave the
    keys and values of each layer in `keys`. mask: as of `generate`, or None for prompts of one length."""
    end, slots = ids.shape[1], torch.arange(keys.room, device=ids.device)
    if isinstance(model, LanguageModel):
        keys.take(slots[:end], end)
        return model.head(model.read(ids, slots[:end], keys.parts(len(model.layers), None))[:, -1])
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
            self.is_initialized, number = True, cache.layers.index(self)
            self.keys, self.values = keys.update(key_states, value_states, number)
            return self.keys, self.values

    cache = Cache(layer_class_to_replicate=Layer)
    return cache


def cache_name(model: nn.Module) -> str:
    """Return what a model calls the keys and values of earlier tokens: transformers 5.24 gave that another name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


# ---- the step


class Keys:
    """The keys and values of all layers, [batch, heads, room, width] each, in memory of a fixed size: what a step gives
    models as their cache."""

    is_compileable, is_initialized = False, True  # whether transformers may compile for it; and whether it holds some
    mask: Tensor | None = None

    def __init__(self, room: int, layers: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self.room, self.layers = room, list(layers)
        self.places, self.end = torch.empty(0), 0

    def take(self, places: Tensor, end: int) -> None:
        """Put what comes next at these places, int64 [tokens] on the device, and give models what lies before `end`."""
        self.places, self.end = places, end

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values of new tokens, and return those of that layer up to `end`."""
        if layer == len(self.layers):
            one, other = (t.new_zeros(*t.shape[:2], self.room, t.shape[3]) for t in (keys, values))
            self.layers.append((one, other))
        for room, new in zip(self.layers[layer], (keys, values)):
            room.index_copy_(2, self.places, new)
        there, those = self.layers[layer]
        return there[:, :, : self.end], those[:, :, : self.end]

    def parts(self, layers: int, mask: Tensor | None) -> list[OfLayer]:
        """Return each layer's part, for a LanguageModel."""
        return [OfLayer(self, layer, mask) for layer in range(layers)]

    def get_seq_length(self, *_: Any) -> int:
        return self.room - 1


class OfLayer:
    """One layer's part of Keys, as a LanguageModel takes it."""

    def __init__(self, keys: Keys, layer: int, mask: Tensor | None) -> None:
        self.keys, self.layer, self.mask = keys, layer, mask

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return self.keys.update(key, value, self.layer)


class Step:
    """The step of decoding of one form: all that it reads and writes lies on the device, where it is.

    form: batch, room for keys and values, kind of the rule, end tokens, filler, state of the model."""

    def __init__(self, form: tuple, scores: Tensor, keys: Keys) -> None:
        self.form = form
        batch, room, (draws, _, penalised), ends, filler, _ = form
        new, wide = partial(torch.zeros, device=scores.device), scores.shape
        self.place, self.position = new(1, dtype=torch.int64), new(batch, 1, dtype=torch.int64)
        self.real = new(batch, room, dtype=torch.bool)  # which slots hold no padding
        self.slots = torch.arange(room, device=scores.device)
        self.token, self.finished = new(batch, dtype=torch.int64), new(batch, dtype=torch.bool)
        self.ends, self.filler = torch.tensor(ends, dtype=torch.int64, device=scores.device), filler
        self.noise = new(wide) if draws else None
        self.repeated = new(wide, dtype=torch.bool) if penalised else None
        self.numbers = new(4)  # temperature, top_k, top_p, penalty
        self.ranks = torch.arange(wide[1], device=scores.device)
        self.broken = new((), dtype=torch.bool)
        self.keys = keys
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream: torch.cuda.Stream | None = None
        self.call: Callable[..., None] = _step
        self.ahead = [Step._compile, Step._try, Step._capture]

    def load(self, length: int, mask: Tensor | None, rule: _Rule, repeated: Tensor | None = None) -> None:
        """Begin anew behind a prompt of so many tokens. repeated: the tokens that count as such, bool [batch,
        vocabulary]."""
        self.keys.take(self.place, self.keys.room)
        self.place.fill_(length)
        self.real.fill_(True)
        if mask is None:
            self.position.fill_(length)
        else:
            self.real[:, :length] = mask.bool()
            self.position.copy_(mask.sum(1, keepdim=True))
        self.finished.zero_()
        self.broken.zero_()
        self.numbers.copy_(torch.tensor([rule.temperature, rule.top_k or len(self.ranks), rule.top_p, rule.penalty]))
        if self.repeated is not None:
            self.repeated.copy_(repeated)

    def advance(self, model: Any, left: int) -> None:
        """Take a step: the first one is compiled, the second one shows whether it waits for the GPU, the third one is
        captured, and then the graph is replayed. left: how many steps there are."""
        if self.graph is not None:
            self.graph.replay()
        elif self.ahead and left >= _WORTH and self.token.is_cuda:
            self.ahead.pop(0)(self, model)
        else:
            self.call(model, self)

    def _compile(self, model: Any) -> None:
        self.call = torch.compile(_step, fullgraph=True)
        try:
            with torch._dynamo.config.patch(recompile_limit=_RECOMPILED):
                self.call(model, self)
        except Exception as error:  # of many kinds; nothing was computed
            _say_once(model, f"its step cannot be compiled: {_first_line(error)}", "decodes uncompiled")
            self.call = _step
            self.call(model, self)

    def _try(self, model: Any) -> None:
        moved = [self.place, self.position, self.token, self.finished]
        moved += [] if self.repeated is None else [self.repeated]
        before = [t.clone() for t in moved]
        try:
            with torch.cuda.stream(self._beside()), _no_waiting():
                self.call(model, self)
        except RuntimeError as error:
            self.ahead.clear()
            _say_once(model, f"a step waits for the GPU: {_first_line(error)}")
            torch.cuda.current_stream().wait_stream(self.stream)
            for t, value in zip(moved, before):
                t.copy_(value)
            self.call(model, self)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _capture(self, model: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._beside(), capture_error_mode="thread_local"):
                self.call(model, self)
        except RuntimeError as error:  # as of too little memory
            _say_once(model, f"its step cannot be captured: {_first_line(error)}")
            self.call(model, self)
        else:
            self.graph = graph
            graph.replay()

    def _beside(self) -> torch.cuda.Stream:
        """Return the stream of captures, after the work of the current one."""
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        return self.stream

    def masks(self, config: Any, dtype: torch.dtype) -> Any:
        """Return what a model takes as attention_mask, [batch, 1, 1, room]: a mask; or, for layers of two kinds, one
        for each."""
        there = self.real & (self.slots <= self.place)
        window = getattr(config, "sliding_window", None)
        kinds = sorted(set(getattr(config, "layer_types", None) or [_SLIDING if window else _FULL]))
        ways = {_FULL: there}
        if _SLIDING in kinds:
            ways[_SLIDING] = there & (self.slots > self.place - window)
        masks = {kind: ways[kind][:, None, None] for kind in kinds}
        if getattr(config, "_attn_implementation", "sdpa") == "eager":
            least = torch.finfo(dtype).min
            masks = {kind: torch.zeros_like(m, dtype=dtype).masked_fill(~m, least) for kind, m in masks.items()}
        return masks if len(masks) > 1 else masks[kinds[0]]

    def choose(self, scores: Tensor) -> None:
        """Choose the next tokens from scores [batch, vocabulary]."""
        draws, filters, penalised = self.form[2]
        temperature, top_k, top_p, penalty = self.numbers
        scores = scores.float()
        self.broken |= scores.isnan().any()
        if penalised:
            scores = torch.where(self.repeated, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
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
        if self.repeated is not None:
            self.repeated.scatter_(1, token[:, None], True)


def _step(model: Any, step: Step) -> None:
    """Compute the scores behind the last token, and choose the next one. Nothing here waits for the device."""
    ids = step.token[:, None]
    if isinstance(model, LanguageModel):
        pasts = step.keys.parts(len(model.layers), step.masks(None, torch.float32))
        scores = model.head(model.read(ids, step.place, pasts)[:, -1])
    else:
        masks = step.masks(model.config.get_text_config(), model.dtype)
        earlier = {"attention_mask": masks, "position_ids": step.position, cache_name(model): step.keys}
        scores = model(ids, use_cache=True, **earlier).logits[:, -1]
    step.place += 1
    step.position += 1
    step.choose(scores)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Within it an operation that waits for the GPU raises a RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


_steps: WeakKeyDictionary[nn.Module, Step] = WeakKeyDictionary()


def forget(model: nn.Module) -> None:
    """Free what is kept for the next generation of a model: its step's graph, with room for keys and values."""
    _steps.pop(model, None)

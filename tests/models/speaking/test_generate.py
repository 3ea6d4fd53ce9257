"""`tl.generate`: the tokens of each model's own `generate`, by the loop that is captured on a GPU, here uncaptured."""

import copy
import gc
import threading
import warnings
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import twell_lab as tl
from tests.models.speaking import decoders
from tests.models.tiny import test_model
from twell_lab.core import InputError
from twell_lab.models import generate as module
from twell_lab.models.generate import Step

IDS, MASK = decoders.prompts()
FAMILIES = (
    "Llama",
    "GPT-2",
    "Mistral",
    "Gemma 3",
    "Mixtral",
    "OPT",
    "Bloom",
    "BERT, no decoder",
)  # all others are asked nightly
GRAPHS = ("Gemma 3", "Mixtral")  # masks of two kinds, and routing


@pytest.fixture
def loop(monkeypatch):
    """Have models that are not on a GPU take the loop of those that are, and read prompts in pieces of four tokens."""
    monkeypatch.setattr(module, "_ON", "cpu")
    monkeypatch.setattr(module, "_CAPTURED", 4)


def own(model, ids=IDS, mask=MASK, tokens=20, **how):
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **{"do_sample": False, **how})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_what_its_own_generate_says(loop, name):
    model = decoders.build(name)
    wanted = own(model)
    assert len(wanted[:, IDS.shape[1] :].unique()) > 2
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):  # the second one reads in pieces, the last of which is filled up
            assert torch.equal(tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK), wanted)
        assert torch.equal(tl.generate(model, IDS[0], max_new_tokens=20), own(model, IDS[:1], None)[0])
    plain = [str(one.message) for one in said if "decodes step by step" in str(one.message)]
    assert bool(plain) == (name in decoders.PLAIN), plain


def test_a_filled_up_piece_asks_for_no_position_that_a_model_lacks(loop):
    model = decoders.build("GPT-2", n_positions=10)
    first, second = (tl.generate(model, IDS, max_new_tokens=1, attention_mask=MASK) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(first, own(model, tokens=1))


@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_of_a_family_is_one_graph_to_the_compiler(loop, name):
    """What waits for the device breaks the graph, as it would break a capture."""
    model = decoders.build(name)
    tl.generate(model, IDS, max_new_tokens=4, attention_mask=MASK)
    step = module._steps[model]
    kept = copy.deepcopy((step.place, step.token))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module._step, fullgraph=True, backend="eager")(model, step)
    assert step.place == kept[0] + 1


def test_swapped_layers_say_the_same_and_a_changed_model_gets_a_new_step(loop):
    model = decoders.build("Llama", hidden_act="relu").requires_grad_(False)
    wanted = tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK)
    first = module._steps[model]
    tl.generate(model, IDS, max_new_tokens=9, attention_mask=MASK)
    assert module._steps[model] is first
    tl.sparsify(model, "twell")
    assert torch.equal(tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK), wanted)
    assert module._steps[model] is not first
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone(), requires_grad=False)
    assert torch.equal(tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK), own(model))


def test_what_is_kept_for_a_model_goes_at_once(loop):
    model = decoders.build("Llama")
    gc.disable()  # it does not see the memory of a GPU
    try:
        for forget in (module.forget, lambda model: tl.generate(model, IDS[:1], max_new_tokens=2)):
            tl.generate(model, IDS, max_new_tokens=2, attention_mask=MASK)
            step = weakref.ref(module._steps[model])
            forget(model)
            assert step() is None
    finally:
        gc.enable()


def test_calls_in_inference_mode_and_under_autocast_follow_others(loop):
    model = decoders.build("Llama")
    wanted = own(model)
    cast = [partial(torch.autocast, "cpu", dtype) for dtype in (torch.bfloat16, torch.float16)]
    for mode in (torch.inference_mode, torch.no_grad, *cast, torch.no_grad):
        with mode():
            said = tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK)
    assert torch.equal(said, wanted)


def test_transformers_takes_it_with_all_that_it_prepares(loop):
    model = decoders.build("Qwen2")
    assert torch.equal(own(model, custom_generate=tl.generate), own(model))
    for how, kind in (({"no_repeat_ngram_size": 2}, "NoRepeatNGram"), ({"repetition_penalty": 1.7}, "Repetition")):
        with pytest.warns(UserWarning, match=kind):
            assert torch.equal(own(model, custom_generate=tl.generate, **how), own(model, **how))
    with pytest.raises(InputError, match="beam"):
        model.generate(IDS, custom_generate=tl.generate, num_beams=2)


def test_what_somebody_passes_takes_the_place_of_the_configurations(loop):
    transformers = pytest.importorskip("transformers")
    model, said = decoders.build("Llama"), own(decoders.build("Llama"))
    cold, end = transformers.TemperatureLogitsWarper(1e-4), int(said[0, IDS.shape[1] + 5])
    asked = [
        dict(do_sample=True, top_k=0, logits_processor=transformers.LogitsProcessorList([cold])),
        dict(stopping_criteria=transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(12)])),
        dict(stopping_criteria=transformers.StoppingCriteriaList([transformers.EosTokenCriteria(end)])),
    ]
    for how in asked:
        assert torch.equal(own(model, **how), own(model, custom_generate=tl.generate, **how)), how
    given = transformers.DynamicCache()
    assert torch.equal(own(model, custom_generate=tl.generate, past_key_values=given), said)
    assert given.get_seq_length() == said.shape[1] - 1  # a cache of the caller's is filled


def test_a_models_configuration_changes_neither_what_is_returned_nor_its_shape(loop):
    model = decoders.build("Llama")
    wanted = own(model)
    for name, value in dict(return_dict_in_generate=True, output_scores=True, num_return_sequences=2).items():
        setattr(model.generation_config, name, value)
    assert torch.equal(tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK), wanted)
    model.generation_config = decoders.build("Llama").generation_config
    alone = tl.generate(model, IDS[1], max_new_tokens=20, attention_mask=MASK[1])
    assert torch.equal(alone, own(model, IDS[1:2], MASK[1:2])[0])


def test_layers_with_masks_of_their_own_and_positions_that_change_are_left_to_transformers(loop):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=97, hidden_size=32, num_layers=4, num_heads=4, intermediate_size=48, window_size=6)
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 2]], pad_token_id=0)
    torch.manual_seed(1)
    neo = transformers.GPTNeoForCausalLM(config).eval()
    for weight in neo.parameters():
        weight.data.mul_(8 if weight.dim() > 1 else 1)
    scales = dict(rope_type="longrope", rope_theta=100.0, short_factor=[1.0] * 4, long_factor=[3.0] * 4, factor=8.0)
    rope = scales | dict(original_max_position_embeddings=16)
    phi = decoders.build("Phi-3", rope_parameters=rope, original_max_position_embeddings=16, sliding_window=None)
    for model in (neo, phi):
        assert torch.equal(tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK), own(model))


def test_a_model_whose_weights_accelerate_keeps_elsewhere_speaks():
    accelerate, model = pytest.importorskip("accelerate"), decoders.build("Llama")
    wanted = own(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK), wanted)


def test_a_sequence_ends_at_an_end_token_and_is_filled_up(loop):
    model = decoders.build("Llama")
    said = own(model)[:, IDS.shape[1] :]
    model.generation_config.eos_token_id = [int(said[0, 3]), int(said[1, 7])]
    wanted = own(model)
    assert torch.equal(tl.generate(model, IDS, max_new_tokens=20, attention_mask=MASK), wanted)
    model.generation_config.eos_token_id = int(said[0, 3])
    alone = tl.generate(model, IDS[0], max_new_tokens=20)
    assert torch.equal(alone, own(model, IDS[:1], None)[0])
    assert len(alone) == IDS.shape[1] + 1 + said[0].tolist().index(said[0, 3])


class Letters:
    def __init__(self, most=99):
        self.parts, self.ended, self.most = [], False, most

    def put(self, tokens):
        if len(self.parts) == self.most:
            raise ConnectionError("the reader went away")
        self.parts += [tokens.reshape(-1)]

    def end(self):
        self.ended = True


@pytest.mark.parametrize("make", [lambda: decoders.build("Llama"), lambda: tiny()], ids=["Llama", "ours"])
@pytest.mark.parametrize("captured", [True, False])
def test_a_streamer_is_given_each_token_and_may_go_away(request, make, captured):
    if captured:
        request.getfixturevalue("loop")
    model, streamer = make(), Letters()
    said = tl.generate(model, IDS[0], max_new_tokens=7, streamer=streamer)
    assert torch.equal(torch.cat(streamer.parts), said) and len(streamer.parts) == 8 and streamer.ended
    with pytest.raises(ConnectionError):
        tl.generate(model, IDS[0], max_new_tokens=7, streamer=Letters(most=3))
    assert torch.equal(tl.generate(model, IDS[0], max_new_tokens=7), said)


tiny = partial(test_model.model, vocabulary=decoders.VOCABULARY, d_model=32, heads=2, d_ff=48, context=64)


def test_a_model_of_ours_says_the_same(loop):
    model = tiny()
    wanted = tl.generate(model, IDS, max_new_tokens=70)  # beyond its context of 64
    assert torch.equal(wanted, decoders.read_anew(model, IDS, 70))
    assert torch.equal(tl.generate(model, IDS, temperature=5.0, top_k=1), wanted[:, :29])
    assert torch.equal(tl.generate(model, IDS, temperature=1e-300), wanted[:, :29])
    tl.sparsify(model.requires_grad_(False), "twell")
    assert torch.equal(tl.generate(model, IDS, max_new_tokens=70), wanted)
    drawn = [tl.generate(model, IDS, max_new_tokens=70, temperature=1.0, seed=seed) for seed in (3, 3, 4, None)]
    assert torch.equal(drawn[0], drawn[1]) and len({str(one) for one in drawn}) == 3


@settings(deadline=None, max_examples=30)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 30),
    tokens=st.integers(0, 30),
    context=st.integers(1, 13),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_kept_changes_no_token(batch, length, tokens, context, gated, seed):
    prompt = torch.randint(decoders.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
    model = tiny(context=context, gated=gated).double()
    said = tl.generate(model, prompt, max_new_tokens=tokens)
    assert said.dtype == torch.int64 and torch.equal(said, decoders.read_anew(model, prompt, tokens))
    assert torch.equal(tl.generate(model, prompt[0], max_new_tokens=tokens), said[0])


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8}])
def test_tokens_are_drawn_as_often_as_transformers_would(how):
    """Scores of five tokens, drawn 20,000 times at temperature 2, beside what its warpers leave."""
    transformers = pytest.importorskip("transformers")
    many, scores = 20_000, torch.tensor([[0.0, 1.0, -0.7, 3.0, 2.0]])
    step = Step((many, 8, (True, bool(how)), (), 0, 0), scores.expand(many, -1), module.Keys(8))
    step.load(1, (2.0, how.get("top_k", 0), how.get("top_p", 1.0)), None)
    step.noise.exponential_(generator=torch.Generator().manual_seed(0))
    step.choose(scores.expand(many, -1))
    left = scores / 2.0
    for name, kind in (("top_k", transformers.TopKLogitsWarper), ("top_p", transformers.TopPLogitsWarper)):
        left = kind(how[name])(None, left) if name in how else left
    torch.testing.assert_close(step.token.bincount(minlength=5) / many, left.softmax(1)[0], atol=0.015, rtol=0)


def test_a_seed_repeats_the_draw_and_leaves_torchs_generator_alone(loop):
    model, before = decoders.build("Llama"), torch.get_rng_state()
    drawn = [tl.generate(model, IDS, temperature=1.5, top_k=9, seed=seed) for seed in (5, 5, 6)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(before, torch.get_rng_state())


def test_a_stop_text_may_straddle_tokens(loop):
    tokenizer = decoders.of_bytes()
    model = decoders.build("Llama", vocab_size=len(tokenizer))
    model.lm_head.weight.data[:32], model.lm_head.weight.data[127:] = 0, 0  # printable characters alone are likely
    said = own(model, IDS[:1], None)[0]
    texts = [tokenizer.decode(said[: end + 1]) for end in range(len(said))]
    straddling = texts[15][-3:]
    there = tl.generate(model, IDS[0], max_new_tokens=20, stop=["no such text", straddling], tokenizer=tokenizer)
    ends = next(end for end in range(IDS.shape[1], 29) if straddling in texts[end])
    assert torch.equal(there, said[: ends + 1]) and IDS.shape[1] < ends <= 15


def test_two_generations_at_once_do_not_meet(loop):
    model = decoders.build("Llama")
    prompts = IDS.clamp(min=3)
    wanted, said = [own(model, ids[None], None)[0] for ids in prompts], [None] * 3

    def speak(row):
        for _ in range(3):
            said[row] = tl.generate(model, prompts[row], max_new_tokens=20)

    threads = [threading.Thread(target=speak, args=(row,)) for row in range(3)]
    [one.start() for one in threads], [one.join() for one in threads]
    assert all(torch.equal(a, b) for a, b in zip(said, wanted))


LONG = torch.zeros(1, 120, dtype=torch.int64)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (dict(max_new_tokens=-1), "-1"),
        (dict(temperature=torch.nan), "temperature is nan"),
        (dict(input_ids=[1, 2]), "list"),
        (dict(input_ids=torch.zeros(0, 3, dtype=torch.int64)), r"\[0, 3\]"),
        (dict(input_ids=-IDS), "the token -"),
        (dict(top_k=0), "top_k is 0"),
        (dict(top_p=1.5), "top_p is 1.5"),
        (dict(seed=-1), "seed is -1"),
        (dict(stop="a"), "the tokenizer None"),
        (dict(stop="a", tokenizer="gpt2"), "the tokenizer 'gpt2'"),
        *((dict(stop=stop), "none of which is empty") for stop in ("", [], [3], 3)),
        (dict(streamer=print), "streamer is .*TextStreamer"),
        (dict(attention_mask=MASK[:, :3]), r"\[3, 3\]"),
        (dict(attention_mask=MASK.flip(1)), "on the left"),
        (dict(attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor(4), 0)), "on the left"),
        (dict(tokens=4), "'tokens'; accepted: .*max_new_tokens"),
        (dict(input_ids=IDS.float()), "float32"),
        (dict(input_ids=IDS * 9), "token numbers from 0 to 96"),
        (dict(input_ids=LONG), "reads up to 128 together"),
        (dict(model=torch.nn.Linear(2, 2)), "Linear"),
        (dict(model=None), "NoneType"),
    ],
)
def test_wrong_arguments_are_named(how, words):
    model = how.pop("model", 0)
    ids = how.pop("input_ids", IDS)
    with pytest.raises(InputError, match=words):
        tl.generate(decoders.build("Llama") if model == 0 else model, ids, **how)


def test_nothing_is_added_where_nothing_is_asked_for(loop):
    for model in (decoders.build("Llama"), tiny()):
        streamer = Letters()
        assert torch.equal(tl.generate(model, IDS[0], max_new_tokens=0, streamer=streamer), IDS[0]) and streamer.ended


@pytest.mark.parametrize("captured", [True, False])
def test_scores_that_are_not_numbers_say_so(request, captured):
    if captured:
        request.getfixturevalue("loop")
    for model in (decoders.build("Llama"), tiny()):
        next(model.parameters()).data.fill_(torch.nan)
        with pytest.raises(InputError, match="not numbers"):
            tl.generate(model, IDS[0], max_new_tokens=3)


def test_on_a_cpu_it_says_once_that_nothing_is_captured():
    model = decoders.build("Llama")
    module._say_once.cache_clear()
    with pytest.warns(UserWarning, match="on one GPU"):
        assert torch.equal(tl.generate(model, IDS, max_new_tokens=5, attention_mask=MASK), own(model, tokens=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tl.generate(model, IDS, max_new_tokens=5)

"""`tl.generate` on a GPU: the step is captured, and says what each model's own `generate` says."""

import copy
import gc
import warnings

import pytest
import torch

import twell_lab as tl
from tests.models.speaking import decoders
from tests.models.speaking.test_generate import own, tiny
from twell_lab.models import generate as module

TOKENS = 60  # two plain steps, a compiled one, and replays
MAY_RUN_PLAIN = (*decoders.PLAIN, "Mixtral")  # whose grouped products of float32 wait for the GPU


@pytest.fixture(autouse=True)
def anew():
    module._say_once.cache_clear()
    torch._dynamo.reset()
    yield
    gc.collect()


def prompts(gpu):
    return [t.to(gpu) for t in decoders.prompts()]


@pytest.mark.parametrize("name", decoders.FAMILIES)
def test_a_family_is_captured_and_says_the_same(gpu, name):
    model, (ids, mask) = decoders.build(name).to(gpu), prompts(gpu)
    wanted = own(model, ids, mask, TOKENS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):  # steps are captured in the first one; reading is tried, captured and replayed in the others
            assert torch.equal(tl.generate(model, ids, max_new_tokens=TOKENS, attention_mask=mask), wanted)
    plain = [str(one.message) for one in said if "decodes step by step" in str(one.message)]
    if name not in MAY_RUN_PLAIN:
        step = module._steps[model]
        assert not plain and step.advance.graph is not None, plain
        assert step.read_piece.graph is not None or name == "Falcon"  # which asks the GPU about the mask of a prompt


@pytest.mark.parametrize("act, share, batch", (("relu", 1.0, 2), ("silu", 0.8, 2), ("silu", 0.8, 1)))
def test_swapped_layers_are_captured_in_16_bits(gpu, act, share, batch):
    """Each token is the most likely one, by the dense model, or as good as that: 16 bits round scores. With a SiLU the
    inputs of all projections have thresholds, over which rounding moves some."""
    model = decoders.build("Llama", hidden_act=act, hidden_size=64, intermediate_size=512).to(gpu, torch.bfloat16)
    model.requires_grad_(False)
    ids, mask = (t[:batch] for t in prompts(gpu))
    if act == "silu":
        tl.thresholds(model, [ids], 0.5, method="teal", attention=True).apply(model)
    dense = copy.deepcopy(model)
    tl.sparsify(model, "twell" if act == "relu" else "kept_inputs")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "generate: ")  # such as that it decodes uncompiled
        text = tl.generate(model, ids, max_new_tokens=TOKENS, attention_mask=mask)
    assert module._steps[model].advance.graph is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        assert torch.equal(tl.generate(model, ids, max_new_tokens=TOKENS, attention_mask=mask), text)
    joined = "kept_inputs_v3_each" in {event.name for event in profiled.events()}
    assert joined == (act == "silu" and batch == 1)
    mask = torch.nn.functional.pad(mask, (0, TOKENS), value=1)
    scores = dense(text, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits.float()
    scores, chosen = scores[:, ids.shape[1] - 1 : -1], text[:, ids.shape[1] :, None]
    behind = scores.amax(2) - scores.gather(2, chosen)[:, :, 0]
    ended = (chosen[:, :, 0] == decoders.END).cumsum(1) > 0
    assert (behind <= scores.std(2) / 16)[~ended].float().mean() >= share


def test_a_model_of_ours_draws_and_streams_alike(gpu):
    model, (ids, _) = tiny(context=128).to(gpu), prompts(gpu)
    wanted = decoders.read_anew(model, ids, TOKENS)
    for _ in range(2):
        assert torch.equal(tl.generate(model, ids, max_new_tokens=TOKENS), wanted)
    assert module._steps[model].advance.graph is not None
    how = dict(max_new_tokens=TOKENS, temperature=1.0, top_k=20, top_p=0.9, seed=3)
    drawn = [tl.generate(model, ids, **how) for _ in range(3)]  # captured in the first, replayed in the others
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2])


def test_the_graph_goes_with_the_model_and_with_its_weights(gpu):
    model, (ids, mask) = decoders.build("Llama").to(gpu), prompts(gpu)
    tl.generate(model, ids, max_new_tokens=TOKENS, attention_mask=mask)
    first = module._steps[model]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
    wanted = own(model, ids, mask, TOKENS)
    assert torch.equal(tl.generate(model, ids, max_new_tokens=TOKENS, attention_mask=mask), wanted)
    assert module._steps[model] is not first
    del first, model
    gc.collect()
    assert not len(module._steps)

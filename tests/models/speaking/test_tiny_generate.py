"""Text from the small model: the same tokens with and without keys and values kept, the draw, and wrong arguments."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab.core import InputError
from twell_lab.models import tiny
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig


def model(**changes):
    torch.manual_seed(0)
    sizes = dict(vocabulary=50, d_model=24, layers=2, heads=3, d_ff=40, context=12)
    return LanguageModel(ModelConfig(**{**sizes, **changes})).double().eval()


def recomputed(model, prompt, tokens):
    """The most likely tokens, with all that the model sees read anew for each."""
    every, context = prompt, model.config.context
    for _ in range(tokens):
        begin = 0
        while every.shape[1] - begin > context:
            begin += (context + 1) // 2
        with torch.no_grad():
            every = torch.cat([every, model(every[:, begin:])[:, -1:].argmax(-1)], 1)
    return every[:, prompt.shape[1] :]


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 30),
    tokens=st.integers(0, 30),
    context=st.integers(1, 13),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_kept_changes_no_token(batch, length, tokens, context, gated, seed):
    prompt = torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))
    speaker = model(context=context, gated=gated)
    said = speaker.generate(prompt, tokens)
    assert said.dtype == torch.int64 and torch.equal(said, recomputed(speaker, prompt, tokens))
    assert torch.equal(speaker.generate(prompt[0], tokens), said[0])


def test_only_the_new_token_is_read_while_the_context_has_room(monkeypatch):
    speaker, read = model(), []
    kept = LanguageModel.read
    monkeypatch.setattr(
        LanguageModel, "read", lambda self, fresh, *rest: read.append(fresh.shape[1]) or kept(self, fresh, *rest)
    )
    speaker.generate(torch.zeros(1, 4, dtype=torch.int64), 17)
    assert read == [4, *[1] * 8, 7, *[1] * 5, 7, 1]


def test_sparse_layers_say_the_same():
    prompt = torch.randint(50, (1, 5))
    speaker = model().float()
    said = speaker.generate(prompt, 20)
    assert torch.equal(sparsify(speaker, "twell").generate(prompt, 20), said)


def test_a_seed_repeats_the_draw_and_leaves_torchs_generator_alone():
    speaker, prompt = model(), torch.tensor([[1], [1]])
    before = torch.get_rng_state()
    said = speaker.generate(prompt, 40, temperature=1.0, seed=3)
    assert torch.equal(said, speaker.generate(prompt, 40, temperature=1.0, seed=3))
    assert not torch.equal(said, speaker.generate(prompt, 40, temperature=1.0, seed=4))
    assert not torch.equal(*(speaker.generate(prompt, 40, temperature=1.0) for _ in range(2)))
    assert not torch.equal(said[0], said[1]) and torch.equal(before, torch.get_rng_state())


def test_the_most_likely_token_is_what_a_draw_from_one_or_at_no_temperature_gives():
    speaker, prompt = model(), torch.tensor([7, 8])
    said = speaker.generate(prompt, 20)
    assert torch.equal(said, speaker.generate(prompt, 20, temperature=5.0, top_k=1))
    assert torch.equal(said, speaker.generate(prompt, 20, temperature=1e-300, top_k=99))


def test_tokens_are_drawn_as_often_as_softmax_says():
    scores = torch.tensor([[0.0, 1.0, -math.log(2), 3.0, 2.0]]).expand(20_000, -1)
    draw = lambda top_k: tiny.pick(scores, 2.0, top_k, torch.Generator().manual_seed(0)).bincount(minlength=5) / 20_000
    torch.testing.assert_close(draw(None), (scores[0] / 2).softmax(0), atol=0.015, rtol=0)
    likely = torch.tensor([-math.inf, 0.5, -math.inf, 1.5, 1.0]).softmax(0)
    torch.testing.assert_close(draw(3), likely, atol=0.015, rtol=0)
    ties = tiny.pick(torch.zeros(1000, 5), 1.0, 2, torch.Generator().manual_seed(0))
    assert len(ties.unique()) == 2


@pytest.mark.parametrize(
    "wrong, named",
    [
        (dict(prompt=torch.tensor([1.0])), "torch.float32"),
        (dict(prompt=torch.zeros(0, 3, dtype=torch.int64)), "[0, 3]"),
        (dict(prompt=torch.tensor(1)), "[]"),
        (dict(prompt=[1, 2]), "list"),
        (dict(prompt=torch.tensor([3, 50])), "50"),
        (dict(prompt=torch.tensor([-1, 50])), "-1"),
        (dict(tokens=-1), "-1"),
        (dict(tokens=True), "True"),
        (dict(temperature=-0.5), "-0.5"),
        (dict(temperature=math.nan), "nan"),
        (dict(temperature="hot"), "hot"),
        (dict(top_k=0), "0"),
        (dict(top_k=2.0), "2.0"),
        (dict(seed=2**63), str(2**63)),
    ],
)
def test_wrong_arguments_are_named(wrong, named):
    with pytest.raises(InputError) as raised:
        model().generate(**{"prompt": torch.tensor([1]), "tokens": 1, **wrong})
    assert (
        f"{next(iter(wrong))} " in str(raised.value) and named in str(raised.value) and "accepted" in str(raised.value)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_not_finite_says_nothing(temperature):
    broken = model()
    broken.head.weight.data[3, 0] = math.nan
    with pytest.raises(InputError, match="finite"):
        broken.generate(torch.tensor([1]), 3, temperature=temperature)

"""A model of the reader's, ours or of transformers, is read as it is; sentences say what made-up rows hold."""

import pytest
import torch

import twell_lab as tl
from twell_lab.core import InputError
from twell_lab.course import own_model

SAID = "def "


@pytest.fixture(scope="module")
def small():
    return own_model.read("small")


@pytest.fixture(scope="module")
def text():
    return own_model.some_text()


@pytest.fixture(scope="module")
def halves(small, text):
    return own_model.windows(small, text, count=8)


def test_a_shipped_model_says_what_it_is_and_goes_on_as_it_generates(small):
    assert small.shipped and small.fires and small.context == 128 and "1,115,264 parameters" in str(small)
    prompt = small.encode(SAID)
    expected = tl.generate(small.model, prompt, max_new_tokens=20)[len(prompt) :]
    assert own_model.go_on(small, small.model, SAID, 20) == small.decode(expected)


def test_a_folder_of_transformers_says_the_same(small, tmp_path):
    pytest.importorskip("transformers")
    small.model.save_pretrained(tmp_path)
    theirs = own_model.read(tmp_path)
    assert theirs.name == tmp_path.name and not theirs.shipped and theirs.fires and theirs.context == small.context
    assert "LlamaForCausalLM" in str(theirs)
    assert torch.equal(theirs.encode("a text"), small.encode("a text"))
    ids = small.encode(SAID)[None]
    assert torch.allclose(own_model.logits(theirs.model, ids), own_model.logits(small.model, ids), atol=1e-4)
    assert own_model.go_on(theirs, theirs.model, SAID, 20) == own_model.go_on(small, small.model, SAID, 20)


def test_the_text_is_prose_and_its_windows_do_not_meet(text, small, halves):
    assert len(text) > 20_000 and not set(text) - {*map(chr, range(32, 127)), "\n"}
    first, second = halves
    assert first.shape == second.shape == (4, 128)
    assert not {tuple(each) for each in first.tolist()} & {tuple(each) for each in second.tolist()}
    with pytest.raises(InputError, match="four windows of 128"):
        own_model.windows(small, text[:500])

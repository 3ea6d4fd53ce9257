"""What the sliders of a sentence show is what the library gives there, and what records hold."""

import base64
import copy
import json
import math
import re
import shutil
import zlib

import numpy as np
import pytest
import torch

import twell_lab as tl
from tests.course import recorded_rows as made
from twell_lab.core import InputError
from twell_lab.course import sentence
from twell_lab.course.sentence import data, web
from twell_lab.layers.lossy import ThresholdedActivation
from twell_lab.models.tiny import LanguageModel, ModelConfig

TEXT = "A line to read."
ROWS = [data.Row("here", 0.01, 1.0, 4.0), data.Row("here", 0.03, 2.0, 4.0), data.Row("GPU", 0.9, 0.1, 0.2)]


def models() -> dict[str, LanguageModel]:
    torch.manual_seed(0)
    sizes = dict(d_model=16, layers=2, heads=2, d_ff=150, context=128)
    return {"gated": LanguageModel(ModelConfig(**sizes)), "plain": LanguageModel(ModelConfig(**sizes, gated=False))}


@pytest.fixture(scope="module")
def read():
    return sentence.read(models(), TEXT)


@pytest.mark.parametrize("cut", sentence.CUTS)
@pytest.mark.parametrize("name", ["gated", "plain"])
def test_at_a_cut_all_is_what_the_library_gives(read, name, cut):
    """A thresholded copy, which reads the sentence alone."""
    view, ids, model = sentence.view(read, ROWS, name, cut), torch.tensor([[*TEXT.encode()]]), models()[name].eval()
    values, kept = [], []
    for block in model.layers:
        block.mlp.act_fn.register_forward_hook(lambda _, __, out: values.append(out.flatten().sort().values))
    with torch.no_grad():
        model(ids)
        for block, size in zip(model.layers, list(values)):
            block.mlp.act_fn = ThresholdedActivation(torch.relu, float(size[int(cut * len(size))]))
            block.mlp.act_fn.register_forward_hook(lambda _, __, out: kept.append((out > 0)[0]))
        scores = model(ids)[0]
    loss = torch.nn.functional.cross_entropy(scores[:-1], ids[0, 1:]) / math.log(2)
    assert view["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert view["losses"][name][sentence.CUTS.index(cut)] == view["loss"]
    assert view["fires"] == sum(layer.sum(1) for layer in kept).tolist()
    after = tl.generate(model, ids, max_new_tokens=data.NEW)[0, ids.shape[1] :]
    assert view["text"] == bytes(after.tolist()).decode("utf-8", "replace")


@pytest.mark.parametrize(("name", "matrices"), [("gated", 3), ("plain", 2)])
def test_bytes_are_those_of_the_weights_that_the_counts_name(read, name, matrices):
    for cut in sentence.CUTS:
        view = sentence.view(read, ROWS, name, cut)
        assert view["dense_bytes"] == 4 * matrices * 2 * 150 * 16
        mean = sum(view["fires"]) / len(TEXT)
        assert view["bytes"] == pytest.approx(4 * 16 * (2 * 150 + (matrices - 1) * mean), abs=1)
        assert view["share"] == pytest.approx(mean / 300)


def test_states_are_of_the_token_asked_for(read):
    for token in range(len(TEXT)):
        view = sentence.view(read, ROWS, "gated", 0.9, token)
        assert (view["states"] == 2).sum() == view["fires"][token]
        assert (view["states"] > 0).sum() == view["whole"][token] >= view["fires"][token]
        assert view["states"].shape == (2, 150) and view["tokens"][token] == TEXT[token].replace(" ", "·")
    uncut = sentence.view(read, ROWS, "gated")
    assert not (uncut["states"] == 1).any() and uncut["fires"] == uncut["whole"]


@pytest.mark.parametrize(
    ("share", "took"),
    [(0.005, (1.0, 4.0)), (0.01, (1.0, 4.0)), (0.02, (1.5, 4.0)), (0.03, (2.0, 4.0)), (0.031, None), (1.0, None)],
)
def test_times_lie_on_a_line_between_the_measured_and_end_with_them(share, took):
    assert data._between(ROWS[:2], share) == (None if took is None else pytest.approx(took))


def test_a_machine_without_a_time_says_up_to_where_it_has_some(read):
    times = sentence.view(read, ROWS, "gated")["times"]  # half of the neurons of drawn weights fire
    assert times == [("here", None, 0.03), ("GPU", 0.1, 0.2)]
    assert data.of(*times[0][1:], data.ms) == "timed up to 3.0%"
    assert data.of(*times[1][1:], data.ms) == "0.1 ms of 0.2 ms"


def test_recorded_times_are_of_one_token_of_this_layer_in_current_records(keep):
    one = {"tokens": 1, "ms": 0.02, "dense_ms": 0.04}
    rows = [made.row(**one, nnz=nnz) for nnz in (121.0, 8.0)]
    others = [{"tokens": 2}, {"d_ff": 8192}, {"path": "planned (graph)"}, {"kind": "training"}, {"path": "dense eager"}]
    rows += [made.row(**(one | {"nnz": 50.0} | other)) for other in others]
    keep(
        made.record("inference", "2026-01-02T00:00:00Z", rows, kernels=()),
        made.record("inference", "2026-01-03T00:00:00Z", [made.row(**one)], kernels=("gone",)),
    )
    where = "H100, recorded 2026-01-02"
    assert data.recorded() == [data.Row(where, nnz / 5632, 0.02, 0.04) for nnz in (8.0, 121.0)]


def test_times_here_are_of_a_layer_in_which_the_asked_share_fires(keep, monkeypatch):
    seen = {}

    def time_cpu(calls, seconds):
        seen.update({name: call(0) for name, call in calls.items()})
        return {name: [float(len(name))] for name in calls}

    keep()
    monkeypatch.setattr(data.clocks, "time_cpu", time_cpu)
    rows = sentence.times("cpu", (64, 400), (0.02, 0.2))
    assert [row.share for row in rows] == pytest.approx([0.02, 0.2], abs=0.01) and rows[0].where == "here, now: CPU"
    assert [row.ms for row in rows] == [4.0, 3.0] and {row.dense_ms for row in rows} == {5.0}
    assert len({answer.sum().item() for answer in seen.values()}) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "sentence: 0;"), ("   ", "sentence: 0;"), ("a", "sentence: 1;"), ("\ud800!", "half a character at place 0")],
)
def test_a_sentence_that_cannot_be_read_is_refused_in_a_line(text, words):
    with pytest.raises(InputError, match=words) as error:
        sentence.read(models(), text)
    assert "\n" not in str(error.value)


def test_an_installed_package_has_twins_to_choose_from_too(monkeypatch, tmp_path):
    for name in ("small", "l1-free-small", "sparse-small"):
        shutil.copytree(data.core.data_dir() / "checkpoints" / name, tmp_path / "checkpoints" / name)
    assert [*sentence.shipped()] == ["L1 0", "L1 4e-4"]
    monkeypatch.setattr(data.core, "data_dir", lambda: tmp_path)
    dense, sparse = sentence.read(sentence.shipped()).models.values()
    assert dense.kept.shape == sparse.kept.shape and dense.kept[0].mean() > 2 * sparse.kept[0].mean()


def test_models_are_left_as_they_were():
    given = models()
    before = copy.deepcopy(given["gated"].state_dict())
    sentence.read(given, TEXT)
    assert given["gated"].training and not given["gated"].layers[0].mlp.act_fn._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in given["gated"].state_dict().items())


@pytest.fixture(scope="module")
def page():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web, "shipped", models)
        patch.setattr(web, "times", lambda device: ROWS)
        return web.fragment.__wrapped__()


def test_the_page_asks_nobody_for_anything_and_is_small(page):
    assert not re.search(r"(src|href)=|url\(|fetch\(|https?:|import\b", page) and len(page) < 700_000


def test_the_page_holds_what_the_views_say(page):
    held = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    for text, shown in zip(web.SENTENCES, held["sentences"], strict=True):
        read = sentence.read(models(), text)
        for (name, done), one in zip(read.models.items(), shown["models"], strict=True):
            bits = np.frombuffer(zlib.decompress(base64.b64decode(one["bits"])), np.uint8)
            assert np.array_equal(np.unpackbits(bits)[: done.kept.size], done.kept.flatten())
            for cut, at in zip(sentence.CUTS, one["cuts"], strict=True):
                view = sentence.view(read, ROWS, name, cut)
                assert at["said"] == sentence.said(view) and at["text"] == view["text"]
                assert at["fires"] == view["fires"] and at["bars"][0][2] == view["bytes"] / view["dense_bytes"]

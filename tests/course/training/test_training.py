"""What the notebook on L1 training computes, on numbers small enough to follow, and on one tiny real run."""

from dataclasses import replace

import pytest
import torch

from twell_lab.analysis.profile import profile
from twell_lab.core.errors import InputError
from twell_lab.course.training import data as training
from twell_lab.training.config import TrainConfig, TrainResult
from twell_lab.training.loop import train
from twell_lab.training.objective import l1_penalty


def result(bits: float, nnz: float, dead=(0, 0)) -> TrainResult:
    return TrainResult(
        model=None,
        config=TrainConfig(d_ff=200),
        history=[],
        validation_bits_per_byte=bits,
        mean_nnz=nnz,
        density=[nnz / 200] * 2,
        dead=list(dead),
        text={},
        seconds=1.0,
        tokens=1,
    )


@pytest.fixture(scope="module")
def small():
    text = training.some_text(60_000)
    config = replace(training.SMALL, text=text, steps=3, d_model=16, heads=2, d_ff=32, layers=2, warmup=1, device="cpu")
    return config, train(config, progress=False)


def test_some_text_is_about_as_long_as_asked_for():
    text = training.some_text(300_000)
    assert 150_000 <= text.size <= 600_000
    assert training.some_text(10**9).size > text.size
    with pytest.raises(InputError, match="size is 1"):
        training.some_text(1)


def test_held_out_windows_are_from_the_validation_part(small):
    windows = training.held_out(small[0].text, windows=3, context=20)
    assert windows.shape == (3, 20)
    validation = bytes(small[0].text.split()[1].data.tolist())
    assert all(bytes(window.tolist()) in validation for window in windows)


def test_the_table_has_a_line_for_each_run():
    lines = training.table({"no L1": result(3.2, 100.0), "L1": result(3.25, 5.0, (3, 40))}).splitlines()
    assert lines[0].split()[0] == "run" and len(lines) == 3
    assert "50.0%" in lines[1] and "2.5%" in lines[2] and "3, 40" in lines[2]


def test_verdicts_call_a_difference_one_only_beyond_what_the_seed_does():
    runs = {
        "no L1": result(3.20, 100.0),
        "seed": result(3.22, 100.0),
        "a": result(3.21, 50.0),
        "b": result(3.30, 10.0),
        "c": result(3.00, 0.0),
    }
    first, a, b, c = training.verdicts(runs, "no L1", "seed")
    assert "0.020" in first
    assert a == "a: 2.0x fewer neurons fire; +0.010 bits: within what the seed does."
    assert "10.0x" in b and "worse than no L1" in b
    assert "better than no L1" in c


def test_the_pull_is_one_whatever_the_sizes():
    torch.manual_seed(0)
    hidden = [torch.randn(3, 4, 6).relu() * 100 for _ in range(2)]
    low, high = training.pull(hidden, l1=3e-4)
    assert low == pytest.approx(1) and high == pytest.approx(1)
    squares = [(h * h).requires_grad_() for h in hidden]  # not a slope of |h|: the same check must then see it
    slope = torch.autograd.grad(l1_penalty([s.square() for s in squares]), squares)[0]
    assert slope.max() > 10 * slope[slope > 0].min()


def test_firing_share_by_hand():
    assert training.firing_share(torch.tensor([1, 1, 1, 1]), 0.5) == 0.5
    assert training.firing_share(torch.tensor([8, 0, 1, 1]), 0.8) == 0.25
    assert training.firing_share(torch.tensor([0, 0])) == 0.0
    with pytest.raises(InputError, match="share is 0"):
        training.firing_share(torch.tensor([1]), 0)


def test_dead_are_counted_over_more_and_more_tokens():
    fired = torch.zeros(8, 4, dtype=torch.bool)
    fired[0, 0] = fired[3, 1] = fired[7, 2] = True
    assert training.dead_seen_in(fired, parts=4) == [(1, 3), (2, 3), (4, 2), (8, 1)]
    assert training.dead_seen_in(fired[:1]) == [(1, 3)]


def test_nnz_by_position_is_the_profile_cut_by_position(small):
    config, run = small
    windows = training.held_out(config.text, windows=5, context=12)
    curve = training.nnz_by_position(run.model, windows, 1)
    assert curve.shape == (12,)
    assert curve.mean().item() == pytest.approx(profile(run.model, [windows]).layers[1].mean_nnz)


def test_sentences_follow_the_numbers(small):
    more, fewer, same = torch.tensor([9.0, 1, 1, 1]), torch.tensor([1.0, 9, 9, 9]), torch.ones(4)
    lines = training.first_token_sentence([more, fewer, same], ["a", "b", "c"]).splitlines()
    assert "more than" in lines[0] and "fewer than" in lines[1] and "about as many" in lines[2]
    assert "more than" in training.first_token_sentence([torch.tensor([1.0, 0, 0, 0])], ["d"])
    layer = profile(small[1].model, [torch.randint(256, (2, 8))]).layers[0]
    assert f"{layer.dead} never fire" in training.skew_sentence(layer, "layer 0")

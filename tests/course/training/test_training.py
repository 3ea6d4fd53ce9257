"""What the notebook on L1 training computes, on numbers small enough to follow, and on one tiny real run."""

from dataclasses import replace

import pytest

from twell_lab.course import sweep, training
from twell_lab.training.loop import train


@pytest.fixture(scope="module")
def small():
    text = training.some_text(60_000)
    config = replace(training.SMALL, text=text, steps=3, d_model=16, heads=2, d_ff=32, layers=2, warmup=1, device="cpu")
    return config, train(config, progress=False)


def test_some_text_is_about_as_long_as_asked_for():
    text = training.some_text(300_000)
    assert 150_000 <= text.size <= 600_000
    assert training.some_text(10**9).size > text.size


def test_held_out_windows_are_from_the_validation_part(small):
    windows = training.held_out(small[0].text, windows=3, context=20)
    assert windows.shape == (3, 20)
    validation = bytes(small[0].text.split()[1].tokens.tolist())
    assert all(bytes(window.tolist()) in validation for window in windows)


def test_runs_are_rows_like_those_of_a_recorded_sweep(small):
    config, first = small
    pressed = train(replace(config, l1=1e-2), progress=False)
    rows = sweep.rows([first, train(replace(config, seed=1), progress=False), pressed])
    assert [row["label"] for row in rows] == ["lr 0.01", "seed 1", "L1 0.01"]
    nnzs = [layer["nnz"] for layer in rows[2]["layers"]]
    assert rows[2]["mean_nnz"] == pressed.mean_nnz == pytest.approx(sum(nnzs) / 2)
    for draw in (sweep.loss_against_nnz, sweep.over_time):
        assert "here" in draw(rows, "here").layout.title.text
    assert sweep.picked(rows, 1, "here").layout.title.text.startswith("L1 1e-2: ")

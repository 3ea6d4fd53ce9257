"""Two profiles beside each other, on layers whose firing is known."""

import json

import pytest
import torch

from tests.analysis.profile.test_profile import identity_layer
from twell_lab.analysis.profile import FiringProfile, profile
from twell_lab.core import InputError

WIDTH = 40  # two of its neurons are the hottest 5%


class Several(torch.nn.Module):
    """Layers of one kind side by side, whose gate is their input."""

    def __init__(self, layers: int, gated: bool, width: int):
        super().__init__()
        self.each = torch.nn.ModuleList(identity_layer(width, gated) for _ in range(layers))

    def forward(self, x):
        return [each(x) for each in self.each]


def profiled(*tokens: set[int], layers: int = 1, gated: bool = True, width: int = WIDTH) -> FiringProfile:
    """Of layers that fire the same neurons at each of the tokens: those that are named there."""
    x = torch.full((1, len(tokens), width), -1.0)
    for at, fired in enumerate(tokens):
        x[0, at, list(fired)] = 1.0
    return profile(Several(layers, gated, width), x)


def test_a_profile_compared_with_itself_says_that_its_plan_serves():
    made = profiled({0, 1}, {0, 1, 2}, layers=3)
    found = made.compare(made)
    assert [row["layer"] for row in found.rows] == ["each.0", "each.1", "each.2"]
    for row in found.rows:
        assert (row["ratio"], row["hot_kept"]) == (1, 1)
        assert row["density"] == row["other_density"] == pytest.approx(2.5 / WIDTH)
    assert found.verdict.endswith("a plan made from one serves the other.")
    assert found.verdict.startswith("1.00 times as many neurons fire")
    assert "hot kept" in str(found) and str(found).endswith(found.verdict)
    assert json.loads(json.dumps(found.rows, allow_nan=False)) == found.rows


def test_what_differs_is_counted():
    # Here neurons 0 and 1 are the hottest, there 1 and 2: these caught 3 of the 5 firings that 0 and 1 have here.
    here, there = profiled({0, 1}, {0, 1}, {0, 2}, {7}), profiled({1, 2}, {1, 2}, {1, 2, 3}, {4})
    (row,), said = here.compare(there).rows, here.compare(there).verdict
    assert row["hot_kept"] == pytest.approx(3 / 5) and row["ratio"] == pytest.approx(7 / 8)
    assert "make a plan for each if it has hot neurons, since others are hot in 1 of 1 layers" in said
    more = profiled({0, 1, 2}, {0, 1, 2}, {0, 1, 3})
    assert "make a plan for each, since 1 of 1 layers fire another number" in more.compare(here).verdict
    assert more.compare(here).rows[0]["ratio"] == pytest.approx(1 / here.compare(more).rows[0]["ratio"])


def test_silent_layers_are_compared_as_far_as_they_can_be():
    silent, alive = profiled(set(), set()), profiled({0}, {0})
    (row,) = alive.compare(silent).rows
    assert row["ratio"] is None and row["hot_kept"] is None
    assert alive.compare(silent).verdict == "No layer fired in both profiles: there is nothing to compare."
    assert "ratio" not in str(alive.compare(silent)).splitlines()[0]  # a column without a number is left out


@pytest.mark.parametrize(
    "other, words",
    [
        (lambda: profiled({0}, layers=2), "missing in one profile"),
        (lambda: profiled({0}, width=8), "d_ff 40, gated.* and d_model 8, d_ff 8"),
        (lambda: profiled({0}, gated=False), "gated.* and .*plain"),
        (lambda: None, "is a NoneType"),
    ],
)
def test_profiles_of_other_sizes_are_refused(other, words):
    with pytest.raises(InputError, match=words):
        profiled({0}).compare(other())

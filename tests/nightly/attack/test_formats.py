"""Formats and packing under random matrices; and proof that a wrong value in any of them is seen."""

import dataclasses

import pytest
import torch

from tests.nightly.attack import formats_attack
from tests.nightly.attack.harness import attack
from twell_lab import formats
from twell_lab.formats import twell


def test_formats_and_packing(extent, report):
    counts = attack("formats", formats_attack.check, **extent(17_000))
    report("formats and packing", {"cases": counts.pop("checked"), "matrices": counts.pop("cases"), "by": counts})


@pytest.mark.parametrize("name", ["COO", "CSR", "ELL", "Hybrid", "TwELL"])
def test_one_wrong_value_is_seen(name, monkeypatch):
    cls, real = getattr(formats, name), getattr(formats, name).to_dense

    def wrong(self):
        y = real(self)
        if y.numel():
            y[-1, -1] = torch.where(y[-1, -1] == 1, 2, 1)
        return y

    monkeypatch.setattr(cls, "to_dense", wrong)
    with pytest.raises(AssertionError, match="values are others"):
        attack("formats", formats_attack.check, seed=1, cases=10)


def test_a_wrong_word_that_to_dense_reads_back_is_seen(monkeypatch):
    """Two values of a tile in the other order: the matrix is right, the layout is not."""
    real = twell._pack

    def swapped(x, keep, tile, words):
        packed = real(x, keep, tile, words)
        full = (packed.counts > 1).nonzero()
        if len(full) and words > 2:
            row, part = full[0]
            again = packed.packed.clone()
            again[row, part, 1:3] = again[row, part, 1:3].flip(0)
            return dataclasses.replace(packed, packed=again)
        return packed

    monkeypatch.setattr(twell, "_pack", swapped)
    with pytest.raises(AssertionError, match="column .*: word"):
        attack("formats", formats_attack.check, seed=1, cases=30)


def test_a_failure_names_its_seed_and_case():
    def check(r, counts):
        assert r.random() < 0.9, "the tenth part"

    with pytest.raises(AssertionError) as told:
        attack("tenths", check, seed=4, cases=100)
    line = next(line for line in str(told.value).splitlines() if "again" in line)
    number = int(line.split()[-1])
    with pytest.raises(AssertionError, match="the tenth part"):
        attack("tenths", check, seed=4, cases=0, number=number)

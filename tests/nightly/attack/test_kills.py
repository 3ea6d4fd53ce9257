"""Trainings that are killed at any moment, and saves that are killed before each of their changes to the disk."""

import sys

import pytest

from tests.nightly.attack import kills
from tests.nightly.attack.harness import attack
from tests.training.train.harming import killed_at
from twell_lab.analysis.planner import Plan
from twell_lab.models.tiny import LanguageModel, ModelConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes as Linux does")


def test_trainings_that_are_killed_and_resumed(extent, report):
    """Five runs, each killed once or more often."""
    counts = attack("kills", kills.check_training, **extent(50))
    report("trainings killed and resumed", {"cases": counts["checked"], "kills": counts["kills"], "by": counts})


def model(seed):
    made = LanguageModel(ModelConfig(vocabulary=16, d_model=8, layers=1, heads=1, d_ff=16, context=8))
    for weight in made.parameters():
        weight.data.fill_(seed)
    return made


# What saves a thing of several files, or of one, another for each seed; and how the seed is read from what was saved.
SAVES = {
    "model": (
        lambda folder, seed: model(seed).save(folder),
        lambda folder: int(next(LanguageModel.load(folder).parameters())[0, 0]),
    ),
    "plan": (
        lambda folder, seed: Plan([], "cpu", "float32", rates={"a": float(seed)}).save(folder / "it.json"),
        lambda folder: int(Plan.load(folder / "it.json").rates["a"]),
    ),
}


def test_saves_that_are_killed(report, tmp_path):
    """One thing is saved, another over it by a process that is killed, and that one once more: what has the name is one
    of the two at every time, and whole. (tests/training has this of checkpoints and of prepared texts.)"""
    kinds = dict.fromkeys(SAVES, 0)
    for kind, (save, read) in SAVES.items():
        killed = True
        while killed:
            kinds[kind] += 1
            folder = tmp_path / f"{kind} {kinds[kind]}"
            folder.mkdir()
            save(folder, 1)
            killed = killed_at(kinds[kind], lambda save=save, folder=folder: save(folder, 2))
            assert read(folder) in (1, 2)[not killed :], kinds
            save(folder, 2)
            assert read(folder) == 2
            kills.nothing_left(folder)
        assert kinds[kind] > 2
    many = sum(kinds.values())
    report("saves killed", {"cases": many, "kills": many - len(kinds), "by": kinds})

"""What the sweep's record must hold, and the models that are shipped."""

import bisect
import shutil

from twell_lab.course import sweep as course
from twell_lab.training import sweep

# The record itself


def settled(row):
    """By how much nnz still changed in the last quarter of the training: its last third over its first third."""
    steps, nnz = row["history"]["step"], row["history"]["nnz"]
    late = nnz[bisect.bisect_right(steps, 0.75 * steps[-1]) :]
    third = max(3, len(late) // 3)
    return sum(late[-third:]) / sum(late[:third]) - 1


def test_the_record_is_what_was_asked_for():
    found = course.recorded()
    rows = found.rows
    best = sweep.twin(rows)["config"]
    rates = {row["config"]["lr"] for row in rows if not row["config"]["l1"] and row["config"]["seed"] == best["seed"]}
    assert len(rates) >= 3 and min(rates) < best["lr"] < max(rates)
    at_rest = [row for row in sweep.pressed(rows) if abs(settled(row)) <= 0.05]
    assert len(at_rest) >= 8 and not at_rest[0]["config"]["l1"] and course.renewed(rows)
    for row in rows:
        assert row["parameters"] >= 50e6 and row["tokens"] < found.notes["training_size"]
        assert row["config"]["kernels"] == "off" and row["config"]["steps"] == rows[0]["config"]["steps"]
        assert len(row["layers"]) == len(row["positions"]["nnz"]) == row["config"]["layers"]
    assert found.notes["text"]["sha256"] == sweep.NOVELS["sha256"] and found.notes["text"]["licence"]


def test_the_best_sparse_point_is_what_it_must_be():
    rows = course.recorded().rows
    sparse = [row for row in sweep.pressed(rows) if row["zeros"] >= 0.97]
    best = min(sparse, key=lambda row: row["validation_bits_per_byte"])
    assert sweep.cost(best, rows) <= 0.02
    assert abs(settled(best)) < 0.05


# The models that are shipped


def test_an_installed_package_has_smaller_twins_of_the_large_models(monkeypatch, tmp_path):
    assert {course.folder(name).name for name in course.CHECKPOINTS} == {*course.CHECKPOINTS}
    for name in ("small", "l1-free-small", "sparse-small"):
        shutil.copytree(course.core.data_dir() / "checkpoints" / name, tmp_path / "checkpoints" / name)
    monkeypatch.setattr(course.core, "data_dir", lambda: tmp_path)
    assert [course.checkpoint(name).config.d_ff for name in course.CHECKPOINTS] == [384, 512, 384]

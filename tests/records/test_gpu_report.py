"""The report of the GPU tests: each file runs in a process of its own, and failures are reported once all have ended."""

import pytest
import torch

from twell_lab import core, records
from twell_lab.app import recordings

GOOD = "def test_one():\n    pass\n\n\nimport pytest\n\n\n@pytest.mark.skip(reason='here')\ndef test_two():\n    pass\n"
BAD = "def test_wrong():\n    assert 'the value' == 'another'\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """tests/gpu of a checkout without a GPU or sanitizers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(recordings.shutil, "which", lambda name: None)
    monkeypatch.setattr(core, "kernels_dir", lambda: tmp_path / "kernels")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes longer than all else
    made = tmp_path / "tests" / "gpu"
    made.mkdir(parents=True)
    return made


@pytest.fixture(autouse=True)
def plain_record(monkeypatch):
    """No hash of kernels that are not there."""
    monkeypatch.setattr(
        records.Record, "new", classmethod(lambda cls, name, purpose, rows, notes, kernels: (name, rows, notes))
    )


def test_all_files_are_run_and_counted(folder):
    for name in ("test_a.py", "test_b.py"):
        (folder / name).write_text(GOOD)
    (folder / "helper.py").write_text("raise RuntimeError")
    name, rows, notes = recordings.gpu_tests()
    assert name == "gpu-tests" and {row["suite"] for row in rows} == {f"gpu tests: test_{x}" for x in "ab"}
    assert notes["gpu_tests"] == {"passed": 2, "failed": 0, "skipped": 2, "sanitizers": []}


def test_every_failure_is_told(folder):
    for name, content in (("test_a.py", BAD), ("test_b.py", GOOD), ("test_c.py", BAD)):
        (folder / name).write_text(content)
    with pytest.raises(recordings.TestsFailed) as told:
        recordings.gpu_tests()
    assert "2 of 3 suites failed" in str(told.value)
    assert all(f"gpu tests: test_{x}" in str(told.value) for x in "ac") and "test_b" not in str(told.value)
    assert "the value" in str(told.value)


def test_a_gpu_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(core.DeviceError, match="needs an NVIDIA GPU"):
        recordings.gpu_tests()

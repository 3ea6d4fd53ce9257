"""What the tests of several subjects share."""

import pytest
import torch

from twell_lab import core


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """A function that saves these records as the only ones of the project."""
    monkeypatch.setattr(core, "records_dir", lambda: tmp_path / "records")

    def keep(*made):
        for old in (tmp_path / "records").glob("*.json"):
            old.unlink()
        for each in made:
            each.save()

    return keep


@pytest.fixture
def my_gpu(monkeypatch) -> str:
    """The name of a GPU that torch says is here; nothing can run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "My GPU")
    return "My GPU"

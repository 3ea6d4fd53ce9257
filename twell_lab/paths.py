"""Where things live: kernel sources and data (in a checkout or in the wheel), and the cubin cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _beside_or_inside(name: str) -> Path:
    """`name` at the top of a checkout, or inside the installed package (the wheel ships a copy there)."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def kernels_dir() -> Path:
    """The folder of the CUDA sources."""
    return _beside_or_inside("kernels")


def data_dir() -> Path:
    """The folder of records, checkpoints and datasheet figures."""
    return _beside_or_inside("data")


def records_dir() -> Path:
    """The folder of recorded measurements."""
    return data_dir() / "records"


def cache_dir() -> Path | None:
    """A writable folder for compiled kernels, or None where no candidate can be written.

    `TWELL_LAB_CACHE` wins; otherwise the user's cache folder, then the system's temporary folder.
    Being writable is tried, not guessed from permission bits: root may write where the bits say no,
    and a read-only mount refuses where they say yes.
    """
    named = os.environ.get("TWELL_LAB_CACHE")
    if named:
        candidates = [lambda: Path(named)]
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        owner = getattr(os, "getuid", lambda: "user")()
        # gettempdir() raises where there is no temporary folder either.
        candidates = [lambda: Path(base) / "twell-lab", lambda: Path(tempfile.gettempdir()) / f"twell-lab-{owner}"]
    for candidate in candidates:
        try:
            folder = candidate()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None

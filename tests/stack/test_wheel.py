"""The wheel holds kernels, data and notebooks in less than 8 MB, and works without the checkout."""

import json
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import twell_lab

pytest.importorskip("hatchling", reason="the build backend comes with the test extra")
ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 8_000_000
CHECKOUT_ALONE = ("data/checkpoints/l1-free/", "data/checkpoints/sparse/", "data/checkpoints/wide/")
PROGRAM = """
import json, pathlib, twell_lab
from twell_lab import core
from twell_lab.course import sweep
assert [sweep.checkpoint(name).config.d_ff for name in ('l1-free', 'small', 'sparse')] == [384, 512, 384]
assert core.INSTALLED and core.new_records_dir() == pathlib.Path.cwd()
print(json.dumps({"package": twell_lab.__file__, "kernels": str(core.kernels_dir()), "data": str(core.data_dir())}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("twell_lab-*.whl"))


def test_every_kernel_and_data_file_but_the_large_models_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("kernels", "data"):
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()]
        files = [name for name in files if not name.startswith(CHECKOUT_ALONE)]
        assert files
        for name in files:
            assert f"twell_lab/{name}" in names
    cuda = [path.name for path in (ROOT / "twell_lab" / "simulator" / "cuda").iterdir()]
    assert cuda and all(f"twell_lab/simulator/cuda/{name}" in names for name in cuda)
    assert "twell_lab/app/page.html.jinja" in names
    assert not any(name.startswith(("tests/", "notebooks/", "kernels/", "data/")) for name in names)
    assert not [name for name in names if name.startswith(tuple(f"twell_lab/{folder}" for folder in CHECKOUT_ALONE))]
    assert wheel.stat().st_size < MOST_BYTES


def test_its_notebooks_are_those_of_the_checkout_without_outputs(wheel):
    unpacked = zipfile.ZipFile(wheel)
    names = [name for name in unpacked.namelist() if name.startswith("twell_lab/notebooks/")]
    checkout = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(Path(name).name for name in names) == [path.name for path in checkout]
    for path in checkout:
        ours = json.loads(path.read_text(encoding="utf-8"))["cells"]
        packed = json.loads(unpacked.read(f"twell_lab/notebooks/{path.name}"))["cells"]
        for cell, whole in zip(packed, ours, strict=True):
            assert cell["source"] == whole["source"]
        assert not [cell for cell in packed if cell.get("outputs") or cell.get("execution_count")]


def test_what_an_index_shows_of_the_readme_links_nowhere_into_a_checkout(wheel):
    unpacked = zipfile.ZipFile(wheel)
    (name,) = [name for name in unpacked.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(unpacked.read(name))
    assert metadata["Version"] == twell_lab.__version__
    page = metadata.get_payload(decode=True).decode("utf-8")
    assert page.startswith("# twell-lab") and "make tour" in page
    assert [target for target in re.findall(r"\]\(([^)]*)\)", page) if not target.startswith("https://")] == []


def test_the_unpacked_wheel_finds_its_own_files(wheel, tmp_path):
    unpacked, elsewhere = tmp_path / "unpacked", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(unpacked)
    elsewhere.mkdir()
    environment = {"PYTHONPATH": str(unpacked), "PATH": "", "HOME": str(elsewhere)}
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    for name, path in json.loads(done.stdout).items():
        assert Path(path).is_relative_to(unpacked), name
        assert Path(path).exists(), name

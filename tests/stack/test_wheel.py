"""The wheel holds the kernels and the data, and works without the checkout."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the build backend comes with the test extra")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, twell_lab
from twell_lab.core import folders as paths
print(json.dumps({"package": twell_lab.__file__, "kernels": str(paths.kernels_dir()), "data": str(paths.data_dir())}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("twell_lab-*.whl"))


def test_every_kernel_and_data_file_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("kernels", "data"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files
        for path in files:
            assert f"twell_lab/{path.relative_to(ROOT).as_posix()}" in names
    cuda = [path.name for path in (ROOT / "twell_lab" / "simulator" / "cuda").iterdir()]
    assert cuda and all(f"twell_lab/simulator/cuda/{name}" in names for name in cuda)
    assert "twell_lab/app/page.html.jinja" in names
    assert not any(name.startswith(("tests/", "notebooks/", "kernels/", "data/")) for name in names)


def test_the_unpacked_wheel_finds_its_own_files(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for name, path in json.loads(done.stdout).items():
        assert Path(path).is_relative_to(tmp_path), name
        assert Path(path).exists(), name

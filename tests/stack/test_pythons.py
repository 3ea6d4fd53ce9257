"""What pyproject.toml promises of Python: each version named there, where this machine has it, takes all of the code.

The whole suite runs with the interpreter of the environment, the notebooks also with a newer one (`make test-colab`).
"""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLASSIFIER = "Programming Language :: Python :: "
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = [each.removeprefix(CLASSIFIER) for each in PROJECT["classifiers"] if each.startswith(f"{CLASSIFIER}3.")]
FOLDERS = ("twell_lab", "tests", "docs", "notebooks")
# Reads {name: source} and prints [name, fault] of those that it does not take. What it warns of is a fault: a later
# version refuses it.
TAKES = """
import json, sys, warnings
warnings.simplefilter("error")
faults = []
for name, source in json.load(sys.stdin).items():
    try:
        compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, Warning) as fault:
        faults.append([name, str(fault)])
print(json.dumps([list(sys.version_info[:2]), faults]))
"""


def interpreter(version: str) -> str:
    """The program of a version; skips where there is none that starts."""
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    # pyenv keeps versions that its own command, which stands on the path, does not start.
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for found in filter(None, (shutil.which(f"python{version}"), *map(str, kept))):
        if not subprocess.run([found, "-c", ""], capture_output=True, timeout=60).returncode:
            return found
    pytest.skip(f"there is no Python {version} here")


def faults(program: str, sources: dict[str, str]) -> tuple[str, list[list[str]]]:
    """(the program's version, what it does not take: [name, fault])."""
    done = subprocess.run(
        [program, "-X", "utf8", "-c", TAKES], input=json.dumps(sources), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout)
    return "{}.{}".format(*version), found


def sources() -> dict[str, str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "my-kernels" not in path.parts]
    found = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for i, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            text = "".join(cell["source"])
            if cell["cell_type"] == "code" and not text.startswith("%%") and "%pip" not in text:
                found[f"{path.name}, cell {i}"] = text
    return found


def test_the_versions_start_where_pyproject_says():
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}" and len(VERSIONS) >= 3
    numbers = [int(each.partition(".")[2]) for each in VERSIONS]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_takes_every_file_and_every_cell(version):
    found = sources()
    assert len(found) > 500
    assert faults(interpreter(version), found) == (version, [])


def test_what_a_version_does_not_take_is_found():
    wrong = {"a": "x = 1", "b": "def f(:", "c": "x = '\\d'"}
    assert [name for name, _ in faults(sys.executable, wrong)[1]] == ["b", "c"]

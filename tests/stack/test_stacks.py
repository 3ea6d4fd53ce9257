"""pyproject.toml, the three constraints files, environment.yml and the Makefile say the same thing."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What Make installs for each stack beside the course and the tests.
STACKS = {"cpu": "compile", "cu12": "cu12", "cu13": "cu13"}
# What a Colab machine came with in August 2026: an install there must leave all of it as it is.
COLAB = {"torch": "2.11.0+cu128", "numpy": "2.1.3", "cupy-cuda12x": "14.0.1"}
COLAB |= {"ipywidgets": "7.7.1", "plotly": "5.24.1", "anywidget": "0.9.21"}


def requirements(*extras: str) -> list[Requirement]:
    """pyproject's own dependencies and those of the extras."""
    return [Requirement(line) for line in PROJECT["dependencies"] + [r for extra in extras for r in EXTRAS[extra]]]


def pins(stack: str) -> dict[str, Version]:
    """The constraints file of a stack: name -> exact version."""
    found = {}
    for line in (ROOT / "constraints" / f"{stack}.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([a-z0-9-]+)==([\w.]+)", line).groups()
            assert name == canonicalize_name(name) and name not in found
            found[name] = Version(version)
    return found


def test_nothing_that_colab_has_would_be_replaced_and_its_pins_are_what_it_has():
    """Of torch the release alone: its build for Colab's CUDA is on no index of packages."""
    asked = [(canonicalize_name(one.name), one.specifier) for one in requirements(*EXTRAS)]
    assert {name for name, _ in asked} >= set(COLAB)
    assert not [name for name, versions in asked if name in COLAB and not versions.contains(COLAB[name])]
    assert pins("colab") == {name: Version(Version(version).public) for name, version in COLAB.items()}


@pytest.mark.parametrize("stack", STACKS)
def test_each_stack_pins_what_pyproject_asks_for(stack):
    pinned = pins(stack)
    for requirement in requirements("course", "test", STACKS[stack]):
        name = canonicalize_name(requirement.name)
        assert requirement.marker is None or requirement.marker.evaluate({"sys_platform": "linux"}), requirement
        assert name in pinned, requirement
        assert requirement.specifier.contains(pinned[name]), f"{requirement}, but {stack} pins {pinned[name]}"


def test_conda_says_what_pyproject_says():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    constraint, install = pip["pip"]
    stack = re.fullmatch(r"-c constraints/(\w+)\.txt", constraint)[1]
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", install)[1].split(",")
    assert set(extras) == {"course", "test", STACKS[stack]}

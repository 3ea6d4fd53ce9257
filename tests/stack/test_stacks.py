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
COLAB = {
    "torch": "2.11.0+cu128",
    "numpy": "2.1.3",
    "cupy-cuda12x": "14.0.1",
    "ipywidgets": "7.7.1",
    "plotly": "5.24.1",
    "anywidget": "0.9.21",
}
LINUX = {"sys_platform": "linux"}
WINDOWS = {"sys_platform": "win32"}
MACOS = {"sys_platform": "darwin"}


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


def applies(requirement: Requirement, environment: dict) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(environment)


def test_nothing_that_colab_has_would_be_replaced():
    seen = set()
    for requirement in requirements(*EXTRAS):
        name = canonicalize_name(requirement.name)
        if name in COLAB:
            seen.add(name)
            assert requirement.specifier.contains(COLAB[name]), f"{requirement} would replace {name} {COLAB[name]}"
    assert seen == set(COLAB)


def test_the_pins_of_colab_are_what_colab_has():
    """Of torch the release alone: its build for Colab's CUDA is on no index of packages."""
    assert pins("colab") == {name: Version(Version(version).public) for name, version in COLAB.items()}


def test_the_librarys_own_dependencies_are_bounded_from_below_only():
    wanted = {"torch", "numpy", "safetensors", "tqdm", "jinja2", "filelock", "platformdirs"}
    assert {canonicalize_name(r.name) for r in requirements()} == wanted
    for requirement in requirements():
        assert [bound.operator for bound in requirement.specifier] == [">="], requirement


@pytest.mark.parametrize("stack", STACKS)
def test_each_stack_pins_what_pyproject_asks_for(stack):
    pinned = pins(stack)
    for requirement in requirements("course", "test", STACKS[stack]):
        name = canonicalize_name(requirement.name)
        assert applies(requirement, LINUX) and name in pinned, requirement
        assert requirement.specifier.contains(pinned[name]), f"{requirement}, but {stack} pins {pinned[name]}"


def test_the_stacks_hold_the_combinations_that_resolve():
    cpu, cu12, cu13 = pins("cpu"), pins("cu12"), pins("cu13")
    assert cpu["torch"] == Version("2.13.0")
    assert Version("2.8") <= cu12["torch"] < Version("2.11")  # the last torch built for CUDA 12
    assert cu13["torch"] >= Version("2.14")
    assert "cupy-cuda12x" in cpu and "cupy-cuda12x" in cu12 and "cupy-cuda13x" in cu13
    assert not any(name.endswith("-cu13") or name == "cupy-cuda13x" for name in (*cpu, *cu12))
    assert not any(name.endswith("-cu12") or name == "cupy-cuda12x" for name in cu13)
    assert cu12["cuda-toolkit"].major == 12 and cu13["cuda-toolkit"].major == 13


def test_cuda_packages_are_asked_for_only_where_they_exist():
    for extra, places in {"cu12": (LINUX, WINDOWS), "cu13": (LINUX, WINDOWS), "compile": (LINUX,)}.items():
        for requirement in map(Requirement, EXTRAS[extra]):
            for environment in (LINUX, WINDOWS, MACOS):
                assert applies(requirement, environment) == (environment in places), requirement


def test_conda_says_what_pyproject_says():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    constraint, install = pip["pip"]
    stack = re.fullmatch(r"-c constraints/(\w+)\.txt", constraint)[1]
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", install)[1].split(",")
    assert set(extras) == {"course", "test", STACKS[stack]}

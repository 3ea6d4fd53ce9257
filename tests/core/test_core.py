"""Files whole or not at all, the cache folder, and what a machine says of itself, broken or not."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from twell_lab import core
from twell_lab.core import RecordError, StackError


@pytest.mark.parametrize(
    "content, why", [(b"", "Expecting value"), (b"{", "Expecting"), (b"\xff{}", "utf-8"), (b'{"a": NaN}', "NaN is not")]
)
def test_what_is_no_json_is_refused_by_name(tmp_path, content, why):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(RecordError, match=f"plan '.*x.json' cannot be read: .*{why}.*; accepted: JSON"):
        core.read_json(tmp_path / "x.json", "plan")


def test_json_is_read_as_it_is(tmp_path):
    value = {"a": [1, 2.5, None, True, "ž", {"b": [[]]}], "c": 10**30, "": -0.0}
    core.write_atomically(tmp_path / "x.json", json.dumps(value))
    assert core.read_json(tmp_path / "x.json", "plan") == value


@pytest.mark.parametrize("path", ["none/there.json", ".", "a\0b", "pipe", "large"])
def test_what_cannot_be_read_is_refused_by_name(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(RecordError, match="plan .* cannot be read"):
        core.read_json(f"{tmp_path}/{path}", "plan")


@pytest.mark.parametrize("content, stored", [("ž\udcff", "ž\\udcff".encode()), (b"\0\xff", b"\0\xff")])
def test_a_file_is_written_whole_through_links_and_leaves_nothing_beside_it(tmp_path, content, stored):
    (tmp_path / "link").symlink_to(tmp_path / "new" / "file")
    for _ in range(2):
        core.write_atomically(tmp_path / "link", content)
    assert (tmp_path / "new" / "file").read_bytes() == stored and (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "new") == ["file"]


def test_a_failing_write_leaves_the_earlier_file_and_names_the_folder(tmp_path, monkeypatch):
    core.write_atomically(tmp_path / "file", "before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match=f"'file' in the folder '{tmp_path}': No space left on device; name a place"):
        core.write_atomically(tmp_path / "file", "after")
    assert (tmp_path / "file").read_text() == "before" and os.listdir(tmp_path) == ["file"]


def test_a_folder_or_a_pipe_is_no_target(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(RecordError, match="a folder, a device or a pipe, not a file"):
            core.write_atomically(target, "text")
        with pytest.raises(RecordError, match="a folder, a device or a pipe, not a file"):
            core.check_target(target)


def test_folders_are_tried_before_work(tmp_path):
    core.check_folder(tmp_path / "new" / "folder")
    core.check_target(tmp_path / "other" / "file")
    assert not os.listdir(tmp_path / "new" / "folder") and not os.listdir(tmp_path / "other")
    (tmp_path / "file").touch()
    for check in (core.check_folder, core.check_target):
        with pytest.raises(RecordError, match="cannot write in the folder"):
            check(tmp_path / "file" / "below")


def test_the_cache_lies_in_the_users_own_folder_or_where_it_is_told_to(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert core.cache_dir() == tmp_path / "xdg" / "twell-lab"
    assert core.cache_dir().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TWELL_LAB_CACHE", str(tmp_path / "named"))
    assert core.cache_dir() == tmp_path / "named" and (tmp_path / "named").is_dir()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows protects folders in another way")
@pytest.mark.parametrize(
    "kind, me, why",
    [("shared", 0, "with mode 777"), ("file", 0, "File exists|Not a directory"), ("theirs", 1, "belongs to user")],
)
def test_a_cache_of_others_or_nobody_is_a_temporary_folder(tmp_path, monkeypatch, kind, me, why):
    (tmp_path / "file").touch()
    for name, mode in (("shared", 0o777), ("theirs", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    monkeypatch.setenv("TWELL_LAB_CACHE", str(tmp_path / kind))
    user = os.geteuid() + me
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.warns(UserWarning, match=f"{kind} is not used as a cache: .*({why})"):
        assert core.cache_dir() == core.private_folder()


def test_a_private_folder_ends_with_its_process():
    code = "from twell_lab import core; print(core.private_folder()); assert core.private_folder().stat().st_mode % 512 == 0o700"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "twell-lab-" in done.stdout and not os.path.exists(done.stdout.strip())


def test_without_any_folder_the_error_says_what_names_one(monkeypatch):
    def full(*_, **__):
        raise OSError(30, "Read-only file system")

    core.private_folder.cache_clear()
    monkeypatch.setattr(core.tempfile, "mkdtemp", full)
    with pytest.raises(StackError, match="Read-only file system.*TWELL_LAB_CACHE or TMPDIR"):
        core.private_folder()


def test_cupy_gets_another_cache_only_where_it_cannot_make_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPY_CACHE_DIR", "mine")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    core.let_cupy_start()
    assert os.environ["CUPY_CACHE_DIR"] == "mine"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    core.let_cupy_start()
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "cache")


SMI = "NVIDIA H100 80GB HBM3, 9.0, 81559, 580.82.07\nTesla P100-PCIE-16GB, 6.0, 16384, 580.82.07\n"
ODD = "No devices were found\nNVIDIA X, [N/A], 1, 2\nNVIDIA T4, 7.5, [N/A], 535.1\n"


def gpu(name, capability, memory, driver):
    return {"name": name, "capability": capability, "memory_gib": memory, "driver": driver}


@pytest.fixture
def packages(monkeypatch):
    """Installed packages as this test wants them: name -> version, None where it is not installed."""
    real, wanted = importlib.metadata.version, {}

    def version(name):
        if name in wanted and wanted[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return wanted.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    wanted.update(dict.fromkeys(("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")))
    return wanted


def test_a_machine_is_described_as_json_without_paths_or_the_host_name():
    described = core.describe_machine()
    text, host = json.dumps(described, allow_nan=False), platform.node()
    assert "/home" not in text and sys.prefix not in text and (len(host) < 4 or host not in text)
    assert described["python"] == platform.python_version() and described["cores"] >= 1
    assert described["torch"] == importlib.metadata.version("torch") and core.memory() > 2**28


def test_a_machine_is_described_though_every_probe_fails(monkeypatch):
    def broken(*_, **__):
        raise OSError("as on a broken machine")

    for module, name in ((platform, "freedesktop_os_release"), (core.Path, "read_text"), (core, "import_module")):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(core.subprocess, "run", broken)
    monkeypatch.setattr(core.ctypes, "CDLL", broken)
    monkeypatch.setattr(importlib.metadata, "version", broken)
    described = core.describe_machine()
    assert described.pop("gpus") == [] and all(described.pop(name) for name in ("python", "cores", "os"))
    assert set(described.values()) == {None}


@pytest.mark.parametrize(
    "answer, listed",
    [
        (SMI, [gpu("NVIDIA H100 80GB HBM3", "9.0", 79.6, "580.82.07"), gpu("Tesla P100-PCIE-16GB", "6.0", 16.0, "580.82.07")]),
        (ODD, [gpu("NVIDIA T4", "7.5", None, "535.1")]),
        (FileNotFoundError("nvidia-smi"), []),
        (subprocess.TimeoutExpired("nvidia-smi", 20), []),
        (subprocess.CalledProcessError(9, "nvidia-smi"), []),
    ],
)  # fmt: skip
def test_where_torch_sees_no_gpu_nvidia_smi_is_asked(monkeypatch, answer, listed):
    def run(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(core.subprocess, "run", run)
    assert core.describe_machine()["gpus"] == listed and core.gpu() is None


def test_gpus_are_torchs_where_it_sees_some(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA GeForce RTX 4090", major=8, minor=9, total_memory=24 * 2**30)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert core.describe_machine()["gpus"][0] | {"driver": None} == gpu("NVIDIA GeForce RTX 4090", "8.9", 24.0, None)
    assert core.gpu() == "RTX 4090"


@pytest.mark.parametrize(
    "cuda, builds, parts",
    [
        ("13.0", ["cupy-cuda12x"], ["CUDA 13.0", "cupy-cuda12x 14.2.0", "uninstall -y cupy-cuda12x", "cupy-cuda13x[ctk]"]),
        ("12.8", ["cupy-cuda13x"], ["CUDA 12.8", "cupy-cuda13x 14.2.0", "uninstall -y cupy-cuda13x", "cupy-cuda12x[ctk]"]),
        ("12.8", ["cupy-cuda12x", "cupy-cuda13x"], ["installed together", "uninstall -y cupy-cuda12x cupy-cuda13x"]),
        ("13.0", ["cupy-cuda13x"], None),
        ("13.0", ["cupy"], None),  # a source build may be for any
        (None, ["cupy-cuda12x"], None),
        ("13.0", [], None),
    ],
)  # fmt: skip
def test_torch_and_cupy_must_be_built_for_the_same_cuda(monkeypatch, packages, cuda, builds, parts):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    packages |= dict.fromkeys(builds, "14.2.0")
    if parts is None:
        return core.check_stack()
    with pytest.raises(StackError) as refused:
        core.check_stack()
    assert all(part in str(refused.value) for part in parts)

"""What other users could have put into a cache is not used: owners, modes, links and the folders above. And
what a killed process leaves behind is removed."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from twell_lab.core import folders, machine
from twell_lab.core.errors import InputError
from twell_lab.cuda import cubins

if not hasattr(os, "geteuid"):
    pytest.skip("Windows has no such owners and modes", allow_module_level=True)

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is named, and no warning or folder of another test is remembered."""
    for name in ("TWELL_LAB_CACHE", "TWELL_LAB_CUBINS", "XDG_CACHE_HOME", "CUPY_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    folders._warn_once.cache_clear()
    folders.private_folder.cache_clear()
    yield
    folders._warn_once.cache_clear()
    folders.private_folder.cache_clear()


@pytest.fixture
def system(tmp_path, monkeypatch) -> Path:
    """A temporary folder like the system's, and a home that cannot be written."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list:
    """The compilations that really happened, of a folder of kernels with k.cu."""
    made = []
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "k.cu").write_text('extern "C" __global__ void k() {}\n')
    monkeypatch.setattr(folders, "kernels_dir", lambda: tmp_path / "kernels")
    monkeypatch.setattr(cubins, "compiler", lambda: (12, 9))
    monkeypatch.setattr(cubins, "_run_nvrtc", lambda *of: (made.append(of), (b"\x7fELF %d" % len(made), "log\n"))[1])
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def private(folder: Path, system: Path) -> bool:
    return (
        folder.parent == system
        and mode(folder) == 0o700
        and folder.stat().st_uid == os.geteuid()
        and not list(folder.iterdir())
    )


# ---- folders ----


@as_root
@pytest.mark.parametrize("bits", [0o777, 0o755, 0o700])
def test_a_folder_that_somebody_else_made_is_not_used(system, bits, runs):
    planted = system / f"twell-lab-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(bits)
    os.chown(planted, STRANGER, STRANGER)
    with pytest.warns(UserWarning, match=f"{planted} belongs to user {STRANGER}, not to root") as caught:
        folder = folders.cache_dir()
        cubins.compile("k.cu", "sm_90")
    assert len(caught) == 1 and folder != planted and folder.parent == system and mode(folder) == 0o700
    assert not list(planted.iterdir()) and len(list(folder.glob("*.cubin"))) == 1
    cubins.compile("k.cu", "sm_90")
    assert len(runs) == 1  # within this process it is kept


def test_a_folder_of_another_user_than_the_effective_one_is_not_used(system, monkeypatch):
    folder = folders.cache_dir()
    assert folder == system / f"twell-lab-{os.geteuid()}"
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    monkeypatch.setenv("TWELL_LAB_CACHE", str(folder))
    assert "belongs to" in folders.refusal(folder)
    with pytest.warns(UserWarning, match="others could put kernels there"):
        assert folders.cache_dir() != folder


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702, 0o1777])
def test_a_named_folder_where_others_can_write_is_not_used(system, tmp_path, bits, monkeypatch):
    named = tmp_path / "named"
    named.mkdir()
    named.chmod(bits)
    monkeypatch.setenv("TWELL_LAB_CACHE", str(named))
    with pytest.warns(
        UserWarning, match=rf"{named} can be written by others \(mode {bits:03o}; chmod go-w\).*kept in {system}"
    ) as caught:
        assert private(folders.cache_dir(), system) and private(folders.cache_dir(), system)
    assert len(caught) == 1 and mode(named) == bits
    named.chmod(0o755)
    assert folders.cache_dir() == named


@pytest.mark.parametrize("where", ["home", "tmp"])
def test_the_users_own_folder_is_closed_to_others(system, tmp_path, where, monkeypatch):
    folder = tmp_path / "xdg" / "twell-lab" if where == "home" else system / f"twell-lab-{os.geteuid()}"
    if where == "home":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert folders.cache_dir() == folder and mode(folder) == 0o700


def test_what_is_made_is_closed_whatever_the_umask(tmp_path, monkeypatch, runs):
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        first = cubins.compile("k.cu", "sm_90")
    finally:
        os.umask(before)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(made) == 5 and not [path for path in made if mode(path) & 0o077]
    assert cubins.compile("k.cu", "sm_90") == first and len(runs) == 1


def test_folders_above_that_all_can_write(system, tmp_path, monkeypatch):
    above = tmp_path / "above"
    folder = above / "deeper" / "cache"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    above.chmod(0o777)
    assert folders.refusal(folder) == f"{above} can be written by all users (chmod o-w, or +t)"
    monkeypatch.setenv("TWELL_LAB_CACHE", str(folder))
    with pytest.warns(UserWarning, match="written by all users"):
        assert private(folders.cache_dir(), system)
    above.chmod(0o1777)
    assert folders.refusal(folder) is None and folders.cache_dir() == folder


USER, GROUP, OTHERS = 23456, 23456, 12345


@pytest.fixture
def above(tmp_path_factory, monkeypatch) -> Path:
    """A folder with a user's own one in it; this process is that user, whose own group is GROUP."""
    folder = tmp_path_factory.mktemp("above")
    (folder / "sub").mkdir(mode=0o700)
    users = {USER: ("somebody", GROUP)}
    monkeypatch.setattr("pwd.getpwuid", lambda user: SimpleNamespace(pw_name=users[user][0], pw_gid=users[user][1]))
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    monkeypatch.setattr(os, "getegid", lambda: OTHERS)  # as newgrp makes it
    os.chown(folder / "sub", USER, GROUP)
    return folder


def members(monkeypatch, known: dict[int, list[str]]) -> None:
    monkeypatch.setattr("grp.getgrgid", lambda group: SimpleNamespace(gr_mem=known[group]))


@as_root
@pytest.mark.parametrize("owner", [0, USER])
def test_folders_above_that_another_group_can_write(above, owner, system, monkeypatch):
    """Its members could put another folder in the place of the user's own."""
    members(monkeypatch, {OTHERS: []})
    os.chown(above, owner, OTHERS)
    above.chmod(0o775)
    assert folders.refusal(above / "sub") == f"{above} can be written by group {OTHERS} (chmod g-w, or +t)"
    monkeypatch.setenv("TWELL_LAB_CACHE", str(above / "sub"))
    with pytest.warns(UserWarning, match=f"written by group {OTHERS}"):
        assert folders.cache_dir() != above / "sub"
    for bits in (0o755, 0o1775):
        above.chmod(bits)
        assert folders.refusal(above / "sub") is None and folders.cache_dir() == above / "sub"


@as_root
@pytest.mark.parametrize("owner,group", [(USER, GROUP), (USER, 0), (0, 0), (0, GROUP)])
@pytest.mark.parametrize("known", [{}, {GROUP: [], 0: []}, {GROUP: ["somebody"], 0: ["root", "somebody"]}])
def test_folders_above_that_the_users_own_group_can_write(above, owner, group, known, monkeypatch):
    """As in a home folder where each user has a group of his own and the umask is 002."""
    members(monkeypatch, known)
    os.chown(above, owner, group)
    above.chmod(0o775)
    assert folders.refusal(above / "sub") is None


@as_root
def test_a_group_of_ones_own_that_others_are_in_is_none(above, monkeypatch):
    members(monkeypatch, {GROUP: ["somebody", "colleague"]})
    os.chown(above, USER, GROUP)
    above.chmod(0o770)
    assert f"written by group {GROUP}" in folders.refusal(above / "sub")


@as_root
def test_without_an_entry_the_effective_group_is_ones_own(above, monkeypatch):
    """As in a container that knows no such user."""

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("grp.getgrgid", unknown)
    os.chown(above, USER, OTHERS)
    above.chmod(0o775)
    assert folders.refusal(above / "sub") is None
    os.chown(above, USER, GROUP)
    assert f"written by group {GROUP}" in folders.refusal(above / "sub")


def test_no_private_folder_where_all_can_write(system, tmp_path, monkeypatch):
    system.chmod(0o777)
    (tmp_path / "named").mkdir()
    (tmp_path / "named").chmod(0o777)
    monkeypatch.setenv("TWELL_LAB_CACHE", str(tmp_path / "named"))
    with pytest.warns(UserWarning, match="compiled anew in each process"):
        assert folders.cache_dir() is None


def test_links(tmp_path):
    real = tmp_path / "real"
    (real / "cache").mkdir(parents=True)
    real.chmod(0o700), (real / "cache").chmod(0o700)
    (tmp_path / "link").symlink_to("real/../real")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "to-file").symlink_to(__file__)
    assert folders.refusal(tmp_path / "link" / "cache") is None
    assert "leads in a circle" in folders.refusal(tmp_path / "circle")
    assert "is not a folder" in folders.refusal(tmp_path / "to-file")
    (real / "cache").chmod(0o777)
    assert "can be written by others" in folders.refusal(tmp_path / "link" / "cache")
    with pytest.raises(FileNotFoundError):
        folders.refusal(tmp_path / "link" / "nothing")


@as_root
def test_a_link_of_somebody_else_is_not_followed(system, tmp_path):
    """It leads to another folder of this user's, whose files would be read as kernels and overwritten."""
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    link = system / "twell-lab-0"
    link.symlink_to(own)
    os.lchown(link, STRANGER, STRANGER)
    with pytest.warns(UserWarning, match=f"{link} is a link of user {STRANGER}"):
        assert private(folders.cache_dir(), system)
    assert not list(own.iterdir())


def test_the_private_folder_goes_with_its_process(tmp_path):
    (tmp_path / "named").mkdir()
    (tmp_path / "named").chmod(0o777)
    (tmp_path / "tmp").mkdir()
    program = (
        "import os, warnings\nwarnings.simplefilter('ignore')\nfrom twell_lab.core import folders\nfolder = "
        "folders.cache_dir()\n"
        "(folder / 'kernel').write_text('')\nprint(folder, flush=True)\nif os.fork() == 0: raise SystemExit\n"
        "os.wait()\nassert (folder / 'kernel').exists()\n"
    )
    environment = {**os.environ, "TWELL_LAB_CACHE": str(tmp_path / "named"), "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tmp_path / "tmp" and not list((tmp_path / "tmp").iterdir())


def test_cupys_cache_is_private_too(system, monkeypatch):
    (system / f"twell-lab-{os.geteuid()}").write_text("no folder")
    monkeypatch.setenv("CUPY_CACHE_DIR", "to be restored")
    monkeypatch.delenv("CUPY_CACHE_DIR")
    machine.let_cupy_start()
    assert private(Path(os.environ["CUPY_CACHE_DIR"]), system)


# ---- files ----


def spoil_mode(path):
    path.chmod(0o666)


def spoil_owner(path):
    os.chown(path, STRANGER, STRANGER)


SPOILERS = [spoil_mode, pytest.param(spoil_owner, marks=as_root)]


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("suffix", [".cubin", ".log"])
def test_a_cached_cubin_that_others_could_have_written_is_compiled_again(spoil, suffix, runs, tmp_path):
    first = cubins.compile("k.cu", "sm_90", cache_in=tmp_path / "cache")
    path = tmp_path / "cache" / f"{first.name}{suffix}"
    spoil(path)
    again = cubins.compile("k.cu", "sm_90", cache_in=tmp_path / "cache")
    assert len(runs) == 2 and again != first and mode(path) == 0o600 and path.stat().st_uid == os.geteuid()
    assert cubins.compile("k.cu", "sm_90", cache_in=tmp_path / "cache") == again and len(runs) == 2


@pytest.mark.parametrize("spoil", [lambda path: path.chmod(0o777), pytest.param(spoil_owner, marks=as_root)])
def test_cubins_of_a_folder_that_others_can_fill_are_refused(spoil, runs, tmp_path, monkeypatch):
    cubins.compile("k.cu", "sm_90", cache_in=tmp_path / "cubins")
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path / "cubins"))
    assert cubins.compile("k.cu", "sm_90").image == b"\x7fELF 1"
    spoil(tmp_path / "cubins")
    for call in (lambda: cubins.compile("k.cu", "sm_90"), lambda: cubins.architecture((9, 0), "k.cu")):
        with pytest.raises(InputError, match=f"TWELL_LAB_CUBINS is {tmp_path}/cubins, where others could put kernels"):
            call()
    assert len(runs) == 1


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_cubin_that_others_could_have_written_is_refused(spoil, runs, tmp_path, monkeypatch):
    made = cubins.compile("k.cu", "sm_90", cache_in=tmp_path / "cubins")
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path / "cubins"))
    spoil(tmp_path / "cubins" / f"{made.name}.cubin")
    with pytest.raises(InputError, match=f"a cubin of TWELL_LAB_CUBINS cannot be used: .*{made.name}"):
        cubins.compile("k.cu", "sm_90")


@as_root
def test_cubins_of_root_serve_every_user(runs, tmp_path, monkeypatch):
    made = cubins.compile("k.cu", "sm_90", cache_in=tmp_path / "cubins")
    (tmp_path / "cubins").chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path / "cubins"))
    assert cubins.compile("k.cu", "sm_90").image == made.image and len(runs) == 1
    assert folders.refusal(tmp_path / "cubins")  # to keep one's own kernels it would not do


def test_without_owners_nothing_is_refused(system, tmp_path, runs, monkeypatch):
    """As on Windows, which has no geteuid."""
    monkeypatch.delattr(os, "geteuid")
    monkeypatch.delattr(os, "getuid")
    folder = tmp_path / "named"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("TWELL_LAB_CACHE", str(folder))
    assert folders.cache_dir() == folder
    assert cubins.compile("k.cu", "sm_90") == cubins.compile("k.cu", "sm_90") and len(runs) == 1
    monkeypatch.delenv("TWELL_LAB_CACHE")
    assert folders.cache_dir() == system / "twell-lab-user"


# ---- what kills leave behind ----


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave(folder: Path, computer: str, process: int, *, days_ago: float = 0, kind="building") -> Path:
    path = folder / f"{kind}-{computer}-{process}-abc_1234"
    path.mkdir(parents=True)
    (path / "unit.o").write_text("half")
    then = time.time() - 24 * 3600 * days_ago
    os.utime(path, (then, then))
    return path


def test_only_what_the_dead_left_is_removed(tmp_path, dead):
    computer, other = folders.temporary_prefix().split("-")[1], "01234567"
    if computer == "00000000":
        pytest.skip("needs /proc")
    gone = [leave(tmp_path, computer, dead), leave(tmp_path, other, dead, days_ago=2)]
    file = tmp_path / f"building-{computer}-{dead}-zyx98765"
    file.write_text("half")
    kept = [
        leave(tmp_path, computer, os.getpid(), days_ago=2),
        leave(tmp_path, computer, os.getppid()),
        leave(tmp_path, "76543210", dead, days_ago=0.9),
        leave(tmp_path, other, os.getpid()),
        tmp_path / "building-projects",
        leave(tmp_path, computer, dead, kind="my-building"),
        tmp_path / "k.cubin",
    ]
    for path in kept:
        path.mkdir(exist_ok=True)
    folders.sweep(tmp_path)
    assert not [path for path in [*gone, file] if path.exists()] and not [path for path in kept if not path.exists()]


def test_links_and_others_files_are_left_alone(tmp_path, dead):
    computer = folders.temporary_prefix().split("-")[1]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("")
    (tmp_path / f"building-{computer}-{dead}-abcdefgh").symlink_to(tmp_path / "elsewhere")
    if os.geteuid() == 0:
        theirs = leave(tmp_path, computer, dead, days_ago=2)
        os.chown(theirs, STRANGER, STRANGER)
    folders.sweep(tmp_path)
    assert (tmp_path / "elsewhere" / "mine").exists()
    assert os.geteuid() != 0 or theirs.exists()


def test_the_next_build_removes_what_a_killed_one_left(runs, tmp_path, monkeypatch):
    """Killed between a cubin's temporary file and its name."""
    folder = tmp_path / "cache"
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), 9))
        cubins.compile("k.cu", "sm_90", cache_in=folder)
    os.waitpid(pid, 0)
    left = list(folder.iterdir())
    assert len(left) == 1 and left[0].name.startswith("building-")
    cubins.compile("k.cu", "sm_90", cache_in=folder)
    assert sorted(path.suffix for path in folder.iterdir()) == [".cubin", ".log"]


def test_private_folders_of_killed_processes_go_with_the_next(system, dead):
    computer = folders.temporary_prefix().split("-")[1]
    left = leave(system, computer, dead, kind="twell-lab")
    others = [system / "twell-lab-12345678", system / "twell-lab-0"]
    for path in others:
        path.mkdir()
    assert private(folders.private_folder(), system)
    assert not left.exists() and all(path.exists() for path in others)


def test_a_sweep_that_another_was_faster_with(tmp_path, dead, monkeypatch):
    left = leave(tmp_path, folders.temporary_prefix().split("-")[1], dead)

    def gone(path, *_, **__):
        raise FileNotFoundError(errno.ENOENT, "gone", str(path))

    monkeypatch.setattr(shutil, "rmtree", gone)
    folders.sweep(tmp_path)
    assert left.exists()

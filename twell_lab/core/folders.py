"""Where things lie: kernel sources and data (in a checkout or in the wheel) and the cache of compiled kernels; who else
can write into a folder; and the removal of what killed processes left behind."""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

try:
    import grp
    import pwd
except ImportError:  # Windows
    pass

_PACKAGE = Path(__file__).resolve().parents[1]


def _beside_or_inside(name: str) -> Path:
    """The folder `name`: inside the package where it was installed from a wheel, else at the top of the checkout."""
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


def notebooks_dir() -> Path:
    """The folder of the course's notebooks. In an installed package they have no outputs."""
    return _beside_or_inside("notebooks")


def is_installed() -> bool:
    """Whether the package was installed from a wheel, with its data inside it; False in a checkout."""
    return data_dir().is_relative_to(_PACKAGE)


def new_records_dir() -> Path:
    """Where new records are saved by default: in data/records of a checkout; in the working folder where the package
    is installed, since nobody should write into that."""
    return Path.cwd() if is_installed() else records_dir()


def cache_dir() -> Path | None:
    """A folder for compiled kernels into which nobody else can write; None where no folder can be written.

    It is the folder that `TWELL_LAB_CACHE` names or, without that, the first that can be written of the user's cache
    folder and one in the system's temporary folder. Files in it are run with this user's rights, so a folder that
    `refusal` objects to is not used: `private_folder` takes its place, and a warning says so."""
    folder, refused = find_cache()
    if refused:
        folder = folder or private_folder()
        instead = f"kernels are kept in {folder}" if folder else "kernels are compiled anew in each process"
        _warn_once(
            f"not used as a cache, since others could put kernels there: {'; '.join(refused)}. Instead, {instead}"
        )
    return folder


def find_cache() -> tuple[Path | None, list[str]]:
    """The cache folder (None where there is none), and why candidates before it were refused.

    Whether a folder can be written is tried, since its permission bits do not tell: root may write where they say no,
    and a read-only mount refuses where they say yes."""
    named = os.environ.get("TWELL_LAB_CACHE")
    if named:
        candidates = [Path(named)]
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        candidates = [Path(base) / "twell-lab"]
        with suppress(OSError):  # no temporary folder can be written either
            owner = "user" if _user() is None else _user()
            candidates.append(Path(tempfile.gettempdir()) / f"twell-lab-{owner}")
    refused = []
    for folder in candidates:
        try:
            make_folder(folder)
            if not named:
                _close(folder)
            if why := refusal(folder):
                refused.append(why)
                continue
            with tempfile.NamedTemporaryFile(dir=folder, prefix=temporary_prefix()):
                return folder, refused
        except OSError:
            continue
    return None, refused


@cache
def private_folder() -> Path | None:
    """A new folder in the system's temporary folder, which is removed when this process ends. None where none can be
    made, or where others could replace it."""
    try:
        system = Path(tempfile.gettempdir())
        sweep(system, "twell-lab")
        folder = Path(tempfile.mkdtemp(prefix=temporary_prefix("twell-lab")))
    except OSError:
        return None
    atexit.register(_remove, folder, os.getpid())
    return None if refusal(folder) else folder


def _remove(folder: Path, owner: int) -> None:
    """Remove a folder at the end of the process that made it, and not at the end of one forked from that."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Make the folder and the missing ones above it, with these permissions less those that the umask takes away."""
    for missing in reversed([folder, *folder.parents]):
        if not missing.exists():
            missing.mkdir(mode=mode, exist_ok=True)
    folder.mkdir(exist_ok=True)  # raises where a file has this name


# ---- who else can write there ----

_NOBODY = 65534  # in a container, the owner of files that belong to root outside of it


def _user() -> int | None:
    """The user whose rights this process has; None on Windows, which protects a user's folders in another way."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def refusal(folder: Path, *, roots_too: bool = False) -> str | None:
    """Why other users could have put files into this folder, or could replace it by another; None if nobody could.

    The folder must belong to this user, and neither its group nor others may write into it. Each folder above it must
    belong to this user or to root, and may be writable by all, or by a group with other members, only if it is sticky,
    as the system's temporary folder is. Symbolic links on the way must belong to this user or to root.

    Args:
        folder: to look at. OSError is raised where it does not exist.
        roots_too: whether the folder itself may also belong to root.
    """
    user = _user()
    if user is None:
        return None
    at, left = Path(folder.absolute().anchor), list(folder.absolute().parts[1:])
    for _ in range(1000):  # bounded, because links may lead in a circle
        facts = os.lstat(at)
        if stat.S_ISLNK(facts.st_mode):
            if facts.st_uid not in (user, 0):
                return f"{at} is a link of {_name(facts.st_uid)}"
            target = Path(os.readlink(at))
            left[:0] = target.parts[1:] if target.is_absolute() else target.parts
            at = Path(target.anchor) if target.is_absolute() else at.parent
        elif not left:
            if not stat.S_ISDIR(facts.st_mode):
                return f"{at} is not a folder"
            return _not_ours(at, facts, (user, 0) if roots_too else (user,))
        else:
            if facts.st_uid not in (user, 0, _NOBODY):
                return f"{at} belongs to {_name(facts.st_uid)}"
            if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
                return f"{at} can be written by all users (chmod o-w, or +t)"
            if (
                facts.st_mode & stat.S_IWGRP
                and not facts.st_mode & stat.S_ISVTX
                and not _is_own_group(facts.st_gid, user)
            ):
                return f"{at} can be written by group {facts.st_gid} (chmod g-w, or +t)"
            name = left.pop(0)
            at = at.parent if name == ".." else at / name
    return f"{folder} leads in a circle"


def read_trusted(path: Path) -> bytes:
    """The content of a file that belongs to this user or to root and that nobody else can write. Raises PermissionError
    for any other file."""
    with open(path, "rb") as file:
        if (user := _user()) is not None and (why := _not_ours(path, os.fstat(file.fileno()), (user, 0))):
            raise PermissionError(errno.EPERM, why)
        return file.read()


def _not_ours(path: Path, facts: os.stat_result, owners: tuple[int, ...]) -> str | None:
    if facts.st_uid not in owners:
        return f"{path} belongs to {_name(facts.st_uid)}, not to {' or '.join(map(_name, owners))}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (mode {stat.S_IMODE(facts.st_mode):03o}; chmod go-w)"
    return None


def _name(user: int) -> str:
    return "root" if user == 0 else f"user {user}"


def _is_own_group(group: int, user: int) -> bool:
    """Whether the group is root's or the user's own, and has no other members. Many systems make a group for each user,
    whose files that group may then often write (umask 002)."""
    try:
        entry = pwd.getpwuid(user)
        name, own = entry.pw_name, entry.pw_gid
    except KeyError:  # a user without an entry, as in some containers
        name, own = None, os.getegid()
    try:
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        members = set()
    return group in (0, own) and members <= {"root", name}


def _close(folder: Path) -> None:
    """Take the rights to a folder of this user away from everybody else, if its group or others may write into it."""
    facts = os.lstat(folder)
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == _user() and facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.chmod(folder, 0o700)


# ---- what killed processes leave behind ----

_OLD = 24 * 3600.0  # seconds; no build takes as long


def temporary_prefix(kind: str = "building") -> str:
    """How the names of this process's temporary files and folders begin, so that `sweep` can tell whose they are."""
    return f"{kind}-{_computer()}-{os.getpid()}-"


def sweep(folder: Path, kind: str = "building") -> None:
    """Remove the temporary files and folders that killed processes of this user left in `folder`.

    Whether a process of another computer or container still runs cannot be seen: its files are removed when they are a
    day old.
    """
    name = re.compile(rf"{kind}-([0-9a-f]{{8}})-(\d+)-[a-z0-9_]{{8}}")
    for path in sorted(folder.glob(f"{kind}-*")):
        try:
            facts, found = path.lstat(), name.fullmatch(path.name)
            if not found or (_user() is not None and facts.st_uid != _user()):
                continue
            here = found[1] == _computer() != _UNKNOWN
            if is_alive(int(found[2])) if here else time.time() - facts.st_mtime < _OLD:
                continue
            if stat.S_ISDIR(facts.st_mode):
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:  # another process removed it first
            continue


_UNKNOWN = "0" * 8


@cache
def _computer() -> str:
    """Eight hexadecimal digits for this computer since its start and this container, within which a process id means
    one process. _UNKNOWN where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return _UNKNOWN
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


def is_alive(process: int) -> bool:
    """Whether a process with this id runs on this machine. True on Windows, where asking would send it a signal."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs, and belongs to another user
        pass
    return True

"""Where things live: kernel sources and data (in a checkout or in the wheel), and the cubin cache."""

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
from functools import cache
from pathlib import Path

try:
    import grp
    import pwd
except ImportError:  # Windows
    pass

_PACKAGE = Path(__file__).resolve().parents[1]


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


def notebooks_dir() -> Path:
    """The folder of the course's notebooks; an installed package has them without outputs."""
    return _beside_or_inside("notebooks")


def is_installed() -> bool:
    """Whether the package was installed, with its data inside, which nobody writes into; False in a checkout."""
    return data_dir().is_relative_to(_PACKAGE)


def new_records_dir() -> Path:
    """Where new records go unless told: a checkout's data/records; the working folder of an installed package."""
    return Path.cwd() if is_installed() else records_dir()


def cache_dir() -> Path | None:
    """A folder for compiled kernels that nobody else can write in, or None where no candidate can be written.

    It is the one that `TWELL_LAB_CACHE` names or, without that, the user's cache folder, or one in the system's
    temporary folder. What is kept there runs with this user's rights, so a folder that `refusal` objects to is not
    used: `private_folder` takes its place, with a warning. Whether a folder can be written is tried, not read off its
    permission bits: root may write where they say no, and a read-only mount refuses where they say yes."""
    folder, refused = find_cache()
    if refused:
        folder = folder or private_folder()
        instead = f"kernels are kept in {folder}" if folder else "kernels are compiled anew in each process"
        _warn_once(
            f"not used as a cache, since others could put kernels there: {'; '.join(refused)}. Instead, {instead}"
        )
    return folder


def find_cache() -> tuple[Path | None, list[str]]:
    """The cache folder (None where there is none), and why candidates before it were refused."""
    named = os.environ.get("TWELL_LAB_CACHE")
    if named:
        candidates = [lambda: Path(named)]
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        owner = "user" if _user() is None else _user()
        # gettempdir() raises where there is no temporary folder either.
        candidates = [lambda: Path(base) / "twell-lab", lambda: Path(tempfile.gettempdir()) / f"twell-lab-{owner}"]
    refused = []
    for candidate in candidates:
        try:
            folder = candidate()
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
    """A new folder in the system's temporary folder, removed when this process ends; None where none is safe."""
    try:
        system = Path(tempfile.gettempdir())
        sweep(system, "twell-lab")
        folder = Path(tempfile.mkdtemp(prefix=temporary_prefix("twell-lab")))
    except OSError:
        return None
    atexit.register(_remove, folder, os.getpid())
    return None if refusal(folder) else folder


def _remove(folder: Path, owner: int) -> None:
    """Removes a folder at the end of the process that made it: a forked one leaves it alone."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Make the folder and those above it that are missing, with at most these rights, whatever the umask grants."""
    for missing in reversed([folder, *folder.parents]):
        if not missing.exists():
            missing.mkdir(mode=mode, exist_ok=True)
    folder.mkdir(exist_ok=True)  # says what is wrong with something that is no folder


# ---- who else can write there ----

_NOBODY = 65534  # what belongs to nobody in a container, to root outside of it


def _user() -> int | None:
    """The user whose rights this process has; None on Windows, whose folders are the user's own by other means."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def refusal(folder: Path, *, roots_too: bool = False) -> str | None:
    """Why others could have put files into this folder, or could put another one in its place; None if nobody can.

    It must belong to this user (`roots_too`: or to root), and neither group nor others may write there. The folders
    above it may not be writable by all or by a group that others are in, unless they are sticky as the system's
    temporary folder is; links must be this user's or root's. Raises OSError for a folder that is not there."""
    user = _user()
    if user is None:
        return None
    at, left = Path(folder.absolute().anchor), list(folder.absolute().parts[1:])
    for _ in range(1000):  # steps, for links may lead in a circle
        facts = os.lstat(at)
        if stat.S_ISLNK(facts.st_mode):
            if facts.st_uid not in (user, 0):
                return f"{at} is a link of {_name(facts.st_uid)}"
            target = Path(os.readlink(at))
            left[:0] = target.parts[1:] if target.is_absolute() else target.parts
            at = Path(target.anchor) if target.is_absolute() else at.parent
        elif not left:
            if not stat.S_ISDIR(facts.st_mode):
                return f"{at} is no folder"
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
    """The content of a file that this user or root wrote and nobody else can. Raises PermissionError for another."""
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
    """Whether nobody but root and this user is known to be in the group: root's own, or the one that many systems make
    for each user, who then often lets it write everywhere (umask 002)."""
    try:
        name, own = (entry := pwd.getpwuid(user)).pw_name, entry.pw_gid
    except KeyError:  # as in a container
        name, own = None, os.getegid()
    try:
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        members = set()
    return group in (0, own) and members <= {"root", name}


def _close(folder: Path) -> None:
    """Make a folder of this user's own writable by this user alone, whatever umask it was made with."""
    facts = os.lstat(folder)
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == _user() and facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.chmod(folder, 0o700)


# ---- what killed processes leave behind ----

_OLD = 24 * 3600.0  # seconds: no build takes as long


def temporary_prefix(kind: str = "building") -> str:
    """How names of temporary files and folders begin, so that `sweep` knows whose they are."""
    return f"{kind}-{_computer()}-{os.getpid()}-"


def sweep(folder: Path, kind: str = "building") -> None:
    """Remove what processes of this user left in `folder` under such names when they were killed.

    Whether a process of another computer or container lives cannot be seen: what it left is removed after a day.
    """
    name = re.compile(rf"{kind}-([0-9a-f]{{8}})-(\d+)-[a-z0-9_]{{8}}")
    for path in sorted(folder.glob(f"{kind}-*")):
        try:
            facts, found = path.lstat(), name.fullmatch(path.name)
            if not found or (_user() is not None and facts.st_uid != _user()):
                continue
            if _is_alive(int(found[2])) if found[1] == _computer() != _UNKNOWN else time.time() - facts.st_mtime < _OLD:
                continue
            if stat.S_ISDIR(facts.st_mode):
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:  # another one was faster
            continue


_UNKNOWN = "0" * 8


@cache
def _computer() -> str:
    """Eight digits that stand for this computer since it started, and this container: where process numbers are one's
    own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return _UNKNOWN
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True

"""From a .cu file to a library for this computer: the C++ compiler, the cache of what it built (by a digest of all that
went into it), and the way back from addresses to source lines."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import takewhile
from os.path import normpath
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from .. import core
from ..core import CompileError, StackError
from . import source
from .faults import Unsupported
from .report import Launch, Report
from .source import OwnText, Parameter
from .symbols import Line, Variable, find_lines, find_variables, symbols_of

CUDA = Path(__file__).parent / "cuda"
KINDS = {
    "fast": "-O2 -fno-optimize-sibling-calls -fsanitize=integer-divide-by-zero".split(),
    "watched": (
        "-O0 -fsanitize=thread,integer-divide-by-zero,alignment,bounds-strict --param=tsan-distinguish-volatile=1 "
        "-finstrument-functions -fsanitize-coverage=trace-pc -DSIM_WATCHED"
    ).split(),
}
MOST_SHARED = 232_448  # bytes of dynamic shared memory that a block may ask for at most (sm_90)
_NEEDS = (
    "the simulator needs GCC's C++ compiler: `apt install g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora) "
    "or `conda install -c conda-forge gxx`"
)


class Compiler(NamedTuple):
    """GCC's C++ compiler: its path, and the first line of what it says of its version."""

    path: str
    version: str


def compiler() -> Compiler:
    """The compiler that TWELL_LAB_CXX names, else the first of g++ and c++ that works. Raises StackError where there is
    none, with what to install, and on a machine that the simulator does not run on."""
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        here = f"this is {platform.system()} on {platform.machine()}"
        raise StackError(f"the simulator runs on Linux on x86-64 or 64-bit Arm (on Windows: in WSL 2); {here}")
    return _compiler(os.environ.get("TWELL_LAB_CXX", ""), os.environ.get("PATH", ""))


@cache
def _compiler(named: str, path: str) -> Compiler:
    for candidate in [named] if named else ["g++", "c++"]:
        if (found := shutil.which(candidate, path=path or None)) and (works := _try(found)):
            return works
    raise StackError(f"TWELL_LAB_CXX is {named!r}, which is no compiler that works here; {_NEEDS}" if named else _NEEDS)


def _try(path: str) -> Compiler | None:
    """Return what the compiler says of itself, or None where it cannot make a library out of a watched function."""
    try:
        found = Compiler(path, _run([path, "--version"]).stdout.partition("\n")[0])
        with tempfile.TemporaryDirectory(dir=core.cache_dir()) as temporary:
            made = Path(temporary, "tried.so")
            command = [path, *_flags("watched", {}), "-shared", "-pthread", "-x", "c++", "-", "-o", made]
            _run(command, text="#include <math.h>\n#include <utility>\nfloat f(float* x) { return *x; }\n")
            return found if made.is_file() else None
    except OSError:
        return None


def available() -> bool:
    """Return whether `compiler()` finds one."""
    with suppress(StackError):
        return bool(compiler())
    return False


def _run(command: list, folder: Path | None = None, text: str = "") -> subprocess.CompletedProcess:
    # Messages in English: they are read here. What a killed compiler leaves behind goes with the folder.
    environment = {**os.environ, "LC_ALL": "C"} | ({"TMPDIR": str(folder)} if folder else {})
    texts: dict[str, Any] = {"input": text, "capture_output": True, "encoding": "utf-8", "errors": "replace"}
    return subprocess.run(list(map(str, command)), cwd=folder, env=environment, umask=0o077, **texts)


def _flags(kind: str, defines: Mapping[str, object]) -> list[str]:
    # A unique symbol exists once in a process: two builds of a file would share their __shared__ arrays.
    flags = (
        "-std=c++17 -fPIC -fno-plt -w -ffp-contract=off -fno-strict-aliasing -fno-omit-frame-pointer -fno-gnu-unique "
        "-fmax-errors=5"
    ).split()
    # Debug information about lines and inlined functions alone: a quarter of the size. DWARF 4, since some binutils
    # (2.40) misread the headers of version 5; gcc needs the two flags in this order.
    flags += ["-gdwarf-4", "-g1"]
    flags.append("-fstack-clash-protection")  # a large frame then cannot skip the closed end of its stack
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags.append("-fcf-protection=none")
    return [*flags, *KINDS[kind], *(f"-D{k}" if v is True else f"-D{k}={v}" for k, v in sorted(defines.items()))]


def sources(file: str | Path) -> dict[str, str]:
    """The file, of kernels/ or one's own, and every header that it includes with quotes, looked up beside what includes
    it, in the file's own folder, and in kernels/: by their paths from there. CompileError for what is no text."""
    common, path = core.kernels_dir(), Path(file)
    in_kernels = isinstance(file, str) and len(path.parts) == 1 and (common / path).is_file()
    if in_kernels or not (path.is_file() or path.is_absolute()):
        path = common / path
    found: dict[str, str] = {}
    _collect(path.name, path, path.parent, common, found)
    return found


def _collect(name: str, path: Path, own: Path, common: Path, found: dict[str, str]) -> None:
    try:
        found[name] = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CompileError(f"{name} in {path.parent} cannot be read: {reason}") from error
    for header in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', source.code_only(found[name]), re.M):
        beside, plain = normpath(PurePosixPath(name).parent / header), normpath(header)
        places = [(known, folder / known) for folder in (own, common) for known in (beside, plain)]
        if hit := next((place for place in places if place[1].is_file()), None):
            if hit[0] not in found:
                _collect(*hit, own, common, found)
        elif not (CUDA / header).is_file() and not source.CUDA_HEADER.fullmatch(header):
            raise CompileError(f'{name} includes "{header}", which is neither in {own} nor in {common}')


def _write(texts: Mapping[str, str], folder: Path) -> Path:
    """Writes the sources below `folder`, and returns where to compile: so deep that names with ../ stay inside."""
    inside = folder.resolve() / "in" / "a" / "b" / "c"
    for name, text in texts.items():
        path = Path(normpath(inside / name))
        if not path.is_relative_to(folder.resolve()):
            raise CompileError(f"{name} lies too far from the file that includes it; put a copy beside it")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    inside.mkdir(parents=True, exist_ok=True)
    return inside


def listing(sources: Mapping[str, str], entry: str, defines: Mapping[str, object] = {}) -> OwnText:
    """What `entry` declares with these macros: its kernels and its variables. Raises CompileError, and Unsupported for
    the first thing in the active code that only a GPU can do."""
    own = preprocessed(sources, entry, defines)
    source.refuse(own)
    return own


def preprocessed(sources: Mapping[str, str], entry: str, defines: Mapping[str, object]) -> OwnText:
    """The text of `entry` and its headers with these macros. Raises CompileError."""
    return _preprocessed(tuple(sorted(sources.items())), entry, tuple(sorted(defines.items())), compiler(), CUDA)


@lru_cache(maxsize=16)
def _preprocessed(texts: tuple, entry: str, defines: tuple, cxx: Compiler, cuda: Path) -> OwnText:
    with _work_in(core.cache_dir(), entry) as temporary:
        inside = _write(dict(texts), temporary)
        flags = [*_flags("fast", dict(defines)), "-DSIM_LISTING", *_includes(cuda)]
        done = _compile([cxx.path, *flags, "-E", "-x", "c++", f"./{entry}"], entry, temporary, inside)
        return OwnText(done.stdout, dict(texts))


@contextmanager
def _work_in(folder: Path, what: str) -> Iterator[Path]:
    """A context with a temporary folder inside of this one. StackError where there is no room for it."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            yield Path(temporary)
    except OSError as error:
        raise StackError(
            f"no room to build {what} in {folder} ({error.strerror}); TWELL_LAB_CACHE can name another folder"
        ) from error


def _includes(cuda: Path) -> list:
    cuda = cuda.resolve()
    return ["-iquote", ".", "-I", cuda, "-include", cuda / "cuda_on_cpu.h"]


_loaded: dict[str, Any] = {}


@dataclass(frozen=True)
class Built:
    """A library of one file's kernels. path: the .so; needs: that of the simulator's C++; kernels: by name; shared:
    where its arrays lie; variables: __device__ and __constant__ ones; constants: the names of the latter."""

    path: Path
    needs: Path
    kind: str
    sources: dict[str, str]
    kernels: dict[str, tuple[Parameter, ...]]
    shared: tuple[Variable, ...]
    variables: tuple[Variable, ...]
    constants: tuple[str, ...]
    compiler: Compiler
    _lines: dict[int, Line] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def runtime(self) -> Any:
        """The simulator's own library, loaded: one for all libraries that need one of its name."""
        runtime = _loaded.setdefault(self.needs.name, ctypes.CDLL(str(self.needs)))
        runtime.sim_launch.restype = ctypes.POINTER(Report)
        runtime.sim_launch.argtypes = [ctypes.POINTER(Launch)]
        runtime.sim_free.argtypes = [ctypes.POINTER(Report)]
        runtime.sim_base.restype, runtime.sim_base.argtypes = ctypes.c_uint64, [ctypes.c_void_p]
        return runtime

    @cached_property
    def handle(self) -> Any:
        return self.runtime and ctypes.CDLL(str(self.path))

    def sizes(self, kernel: str) -> list[int]:
        ended_by_zero = ctypes.POINTER(ctypes.c_int).in_dll(self.handle, f"sim_sizes_{kernel}")
        return list(takewhile(bool, ended_by_zero))

    def lines(self, pcs: Iterable[int]) -> dict[int, Line]:
        """Lines by return address, counted from where the library is loaded; Line("?", 0, "", "?"): unknown."""
        if new := sorted({*map(int, pcs)} - self._lines.keys()):
            self._lines.update(find_lines(_tool, self.path, new, self.sources))
        return self._lines


def build(
    sources: Mapping[str, str],
    entry: str,
    defines: Mapping[str, object] = {},
    kind: str = "fast",
    *,
    cache_in: Path | None = None,
) -> Built:
    """Compiles `entry`, or reads it from the cache (`cache_in`, or the user's).

    kind: "fast", or "watched": every access, call and basic block tells the runtime. Raises Unsupported for code that
    needs a GPU, CompileError with the compiler's messages, StackError without a compiler or room for what it writes."""
    cxx, folder = compiler(), (cache_in or core.cache_dir()).resolve()
    listed = listing(sources, entry, defines)
    wanted = [*_flags(kind, defines), entry, *(part for pair in sorted(sources.items()) for part in pair)]
    runtime = _runtime(cxx, folder)

    def make(temporary: Path) -> Path:
        return _make(cxx, sources, entry, defines, kind, listed, temporary, runtime)

    path = _cached(folder / f"{Path(entry).stem}-{kind}-{_digest(cxx, wanted)}.so", entry, make)
    shared, variables = find_variables(_tool, path, listed.variables)
    constants = tuple(d.name for d in listed.variables if d.space == "constant")
    return Built(path, runtime, kind, dict(sources), listed.kernels, shared, variables, constants, cxx)


def _make(cxx: Compiler, sources, entry: str, defines, kind: str, listed: OwnText, temporary: Path, runtime) -> Path:
    inside = _write(sources, temporary)
    unit = [f'#include "{entry}"', *(f"using namespace {n};" for n in listed.namespaces)]
    unit += [f"SIM_EXPORT({kernel})" for kernel in listed.kernels]
    (inside / _UNIT).write_text("\n".join([*unit, ""]), encoding="utf-8")
    dynamic = sorted({d.name for d in listed.variables if d.space == "shared" and d.shape is None})
    (inside / "sim_dynamic.cpp").write_text(_MARKS + "".join(_DYNAMIC.format(d, MOST_SHARED) for d in dynamic))
    here = [f"-ffile-prefix-map={inside}=.", f"-ffile-prefix-map={CUDA.resolve()}=simulator"]
    flags = [*_flags(kind, defines), *_includes(CUDA), *here]
    _compile([cxx.path, *flags, "-c", _UNIT, "-o", "unit.o"], entry, temporary, inside)
    _refuse_host_calls(cxx, inside / "unit.o", entry)
    flags = [*_flags("fast", {}), *here]
    _compile([cxx.path, *flags, "-c", "sim_dynamic.cpp", "-o", "dynamic.o"], entry, temporary, inside)
    link = ["-Wl,--no-undefined", *(f"-Wl,--wrap={name}" for name in _WRAPPED), "-shared", "-pthread", "-Wl,-Bsymbolic"]
    _compile([cxx.path, *link, "unit.o", "dynamic.o", runtime, "-o", "made.so"], entry, temporary, inside)
    return inside / "made.so"


# Functions of the C library that kernels must not call as they are; heap.cpp and watch.cpp have their replacements.
_WRAPPED = """malloc calloc realloc free _Znwm _Znam _ZnwmRKSt9nothrow_t _ZnamRKSt9nothrow_t _ZdlPv _ZdaPv _ZdlPvm 
    _ZdaPvm exit quick_exit _exit _Exit pthread_exit abort _ZSt9terminatev __cyg_profile_func_enter
    __cyg_profile_func_exit""".split()
# These lie in the sections of variables that can be written: of those that begin as zeros, and of the others.
_MARKS = 'extern "C" char sim_zeros, sim_data;\nchar sim_zeros, sim_data = 1;\n'
_DYNAMIC = "extern thread_local char {0}[];\nalignas(1024) thread_local char {0}[{1}];\n"


# What code for a device may leave to the C library beside <math.h> and _WRAPPED: memory, text and C++'s own support.
_FOR_DEVICES = re.compile(
    r"mem(cpy|move|set|cmp|chr)|str(len|cmp|ncmp|cpy|ncpy|chr)|v?printf|puts|putchar|l?l?abs|bsearch|qsort"
    r"|aligned_alloc|posix_memalign|_.*"
)


def _refuse_host_calls(cxx: Compiler, unit: Path, entry: str) -> None:
    """Raise CompileError where the kernels call a function of the host's C library: system, fork, raise and others."""
    library, mathematics = ctypes.CDLL(None), _run([cxx.path, "-print-file-name=libm.so.6"]).stdout.strip()
    known = {row[7].partition("@")[0] for row in symbols_of(_tool, mathematics) if row[6] != "UND"} | set(_WRAPPED)
    for name in sorted({row[7] for row in symbols_of(_tool, unit) if row[6] == "UND"} - known):
        if not _FOR_DEVICES.fullmatch(name) and not name.startswith("sim_") and hasattr(library, name):
            said = f"{entry} calls {name}(), which only the host has"
            raise CompileError(f"{said}; a kernel calls functions of the device")


def _compile(command: list, entry: str, temporary: Path, inside: Path) -> subprocess.CompletedProcess:
    done = _run(command, inside)
    if done.returncode:
        hidden = {f"{inside}/": "", f"{temporary.resolve()}/": "", f"{CUDA.resolve()}/": "simulator/"}
        raise _complaint(entry, done.stderr or done.stdout, hidden)
    return done


_UNIT = "sim_unit.cpp"  # the generated file that includes the .cu
_MOST_LINES = 20
_GENERATED = re.compile(rf"^(?:In file included|\s+) from (?:<command-line>|<built-in>|\S*{_UNIT}).*\n", re.M)
_UNDEFINED = re.compile(r"(?:(?<=[\s/:])([^\s/:]+:\d+): )?undefined reference to [`']?(.*?)'?$", re.M)
_NO_HEADER = re.compile(r"^(\S.*?:\d+):\d+: fatal error: ([^:\n]+): No such file", re.M)
_UNKNOWN = re.compile(  # names of CUDA's own start with two underscores
    r"^(\S.*?:\d+):\d+: error: (?:there are no arguments to )?"
    r"'(__\w+)'(?: was not declared| does not name| that depend)(?:.*(; did you mean '\w+'\?))?",
    re.M,
)


def _complaint(entry: str, messages: str, hidden: Mapping[str, str]) -> CompileError | Unsupported:
    """Unsupported for a name or a header of CUDA's that the simulator lacks, else CompileError with the first lines."""
    for folder, instead in hidden.items():
        messages = messages.replace(folder, instead)
    messages = re.sub(r"(?m)(^|\s)\./", r"\1", _GENERATED.sub("", messages))
    if (header := _NO_HEADER.search(messages)) and source.CUDA_HEADER.fullmatch(header[2]):
        return Unsupported(f"{header[1]}: <{header[2]}> cannot run in the simulator: the header is CUDA's own")
    if name := _UNKNOWN.search(messages):
        return Unsupported(f"{name[1]}: {name[2]} is not known to the simulator{name[3] or ''}")
    lines = [line for line in messages.split("\n") if line.strip()]
    if undefined := _UNDEFINED.findall(messages):
        undefined = dict.fromkeys((at or entry, name) for at, name in undefined)
        lines = [f"{at}: {name} is declared and used, and defined nowhere" for at, name in undefined]
    more = [f"({len(lines) - _MOST_LINES} more lines)"] if len(lines) > _MOST_LINES else []
    return CompileError("\n".join([f"{entry} does not compile for the simulator:", *lines[:_MOST_LINES], *more]))


def _runtime(cxx: Compiler, folder: Path) -> Path:
    """The library of the simulator's own C++, which is never watched itself: compiled once for each compiler."""
    flags, cuda = [*_flags("fast", {}), "-g0"], CUDA.resolve()
    path = folder / f"simulator-{_digest(cxx, flags)}.so"

    def make(here: Path) -> Path:
        hidden = [f"-ffile-prefix-map={here}=.", f"-ffile-prefix-map={cuda}=simulator"]

        def compile(unit: Path) -> str:
            command = [cxx.path, *flags, *hidden, "-I", cuda, "-c", unit, "-o", f"{unit.stem}.o"]
            _compile(command, unit.name, here, here)
            return f"{unit.stem}.o"

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compile, sorted(cuda.glob("*.cpp"))))
        link = ["-shared", "-pthread", "-Wl,-Bsymbolic", f"-Wl,-soname,{path.name}", *objects, "-ldl", "-o", "made.so"]
        _compile([cxx.path, *link], path.name, here, here)
        return here / "made.so"

    return _cached(path, path.name, make)


def _cached(path: Path, what: str, make: Callable[[Path], Path]) -> Path:
    """Return the path of a file of the cache. Where it is not there, `make` makes it in a temporary folder."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _work_in(path.parent, what) as temporary:
            os.replace(make(temporary), path)
    return path


def _digest(cxx: Compiler, parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in (cxx.path, cxx.version, platform.machine(), *parts):
        digest.update(part.encode() + b"\0")
    for path in sorted([*CUDA.glob("*.h"), *CUDA.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


@cache
def _tool(name: str) -> str | None:
    """The path of a program, the compiler's own before one on PATH."""
    told = _run([compiler().path, f"-print-prog-name={name}"]).stdout.strip()
    return shutil.which(told or name) or shutil.which(name)

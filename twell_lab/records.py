"""Recorded measurements with their provenance, and the hash that ties them to the kernels that ran.

A record is one JSON file: where, when and with which software something was measured, the rows that were
measured, and notes. `data/records` holds the project's own; `Record.save` writes a reader's.

Kernels and their GPU evidence must not drift apart, so each record carries `kernel_hash()`: a SHA-256 over
the kernel sources and the code that launches them. `verify()` fails when the newest GPU test report carries
another hash, unless `UNVERIFIED.json` beside it names the present hash and says why no GPU run exists yet.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import tokenize
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

from . import paths
from .errors import RecordError
from .files import WHOLE, read_json, write_atomically

SCHEMA = 1
UNVERIFIED = "UNVERIFIED.json"
LAUNCH_CODE = ("dispatch.py", "jit.py", "launch.py", "launch_columns.py", "launch_decode.py", "launch_lost.py", "launch_sm80.py",
               "launch_sm90.py", "launch_sm90_dense.py", "launch_train.py", "launch_train_dense.py", "launch_transpose.py",
               "tma.py", "training.py")
FLAT_KEYS = ("record", "kind", "device", "dtype", "tokens", "d_model", "d_ff", "nnz", "workload", "path",
             "ms", "dense_ms", "x_dense", "spread", "date", "commit", "kernel_hash", "stale")


@dataclass
class Record:
    """One measurement run. Times in rows are in milliseconds, memory in bytes, the date is UTC.

    A row with a `kind` is a measurement and must also name its `device`, its `path` and its median time `ms`;
    other rows (test reports, for one) are free in form. `machine` is `machine.describe()`. `commit` is the
    commit the code came from, None outside a checkout; `dirty` says whether the tree differed from it.
    """

    name: str
    purpose: str
    rows: list[dict]
    date: str
    commit: str | None
    dirty: bool | None
    kernel_hash: str
    machine: dict
    notes: dict = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self):
        _check(self)

    @classmethod
    def new(cls, name: str, purpose: str, rows: list[dict], notes: dict | None = None) -> Record:
        """A record of what was just measured here: date, commit, kernel hash and machine are filled in."""
        from . import machine
        commit, dirty = source_commit()
        return cls(name=name, purpose=purpose, rows=rows, notes=notes or {}, commit=commit, dirty=dirty,
                   date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                   kernel_hash=kernel_hash(), machine=machine.describe())

    def to_json(self) -> str:
        """The record as JSON text. Raises RecordError for a value JSON has no form for, NaN included."""
        order = ("schema", "name", "purpose", "date", "commit", "dirty", "kernel_hash", "machine", "notes",
                 "rows")
        try:
            data = asdict(self)
            return json.dumps({key: data[key] for key in order}, indent=1, allow_nan=False) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"record {self.name!r} cannot be written as JSON: {error}; rows and notes take "
                              "strings, finite numbers, booleans, None, lists and dicts") from None

    def save(self, folder: str | Path | None = None) -> Path:
        """Write `name-date.json` into `folder` (default: the project's records) and return its path.

        The file appears whole or not at all, and an older record is never overwritten.
        """
        folder = paths.records_dir() if folder is None else Path(folder)
        stem = f"{self.name}-{re.sub('[-:]', '', self.date)}"
        target, again = folder / f"{stem}.json", 2
        while target.exists():
            target, again = folder / f"{stem}-{again}.json", again + 1
        write_atomically(target, self.to_json())
        return target


def _check(record: Record) -> None:
    """Raise RecordError naming the first field that is of the wrong type."""
    def refuse(name: str, value, accepted: str):
        raise RecordError(f"record {record.name!r}: {name} is {value!r:.120}; accepted: {accepted}")

    if type(record.schema) is not int or record.schema != SCHEMA:
        refuse("schema", record.schema, f"{SCHEMA} (a newer file needs a newer twell-lab)")
    if not (isinstance(record.name, str) and re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", record.name)):
        refuse("name", record.name, "lower-case letters, digits, '-', '_' and '.'")
    if not (isinstance(record.purpose, str) and record.purpose.strip()):
        refuse("purpose", record.purpose, "a sentence")
    try:
        datetime.strptime(record.date, "%Y-%m-%dT%H:%M:%SZ")
    except (TypeError, ValueError):
        refuse("date", record.date, "UTC as YYYY-MM-DDTHH:MM:SSZ")
    if not (record.commit is None or isinstance(record.commit, str)):
        refuse("commit", record.commit, "a commit's hexadecimal name, or null")
    if not (record.dirty is None or isinstance(record.dirty, bool)):
        refuse("dirty", record.dirty, "true, false or null")
    if not (isinstance(record.kernel_hash, str) and re.fullmatch(r"[0-9a-f]{64}", record.kernel_hash)):
        refuse("kernel_hash", record.kernel_hash, "64 hexadecimal digits")
    for name in ("machine", "notes"):
        if not isinstance(getattr(record, name), dict):
            refuse(name, getattr(record, name), "an object")
    if not isinstance(record.rows, list):
        refuse("rows", record.rows, "a list of objects")
    for i, row in enumerate(record.rows):
        if not isinstance(row, dict):
            refuse(f"rows[{i}]", row, "an object")
        if "kind" not in row:
            continue
        for key in ("kind", "device", "path"):
            if not (isinstance(row.get(key), str) and row[key]):
                refuse(f"rows[{i}].{key}", row.get(key), "a name")
        ms = row.get("ms")
        if not _is_number(ms) or ms <= 0:
            refuse(f"rows[{i}].ms", ms, "a time in milliseconds above zero")
        for key in ("tokens", "d_model", "d_ff", "nnz", "dense_ms", "x_dense", "spread"):
            if row.get(key) is not None and not _is_number(row[key]):
                refuse(f"rows[{i}].{key}", row[key], "a finite number, or null")
        for key in ("dtype", "workload"):
            if not isinstance(row.get(key), (str, type(None))):
                refuse(f"rows[{i}].{key}", row[key], "a name, or null")


def _is_number(value) -> bool:
    """Whether it is a number as one is measured: finite, and within what tensors hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < WHOLE


def load(path: str | Path) -> Record:
    """Read one record. Raises RecordError naming the file and the field that is wrong."""
    path = Path(path)
    data = _read_object(path)
    known = [f.name for f in fields(Record)]
    for name in known:
        if name not in data:
            raise RecordError(f"{path.name}: {name} is missing; a record has {', '.join(known)}")
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise RecordError(f"{path.name}: unknown field {unknown[0]!r}; a record has {', '.join(known)}")
    try:
        return Record(**data)
    except RecordError as error:
        raise RecordError(f"{path.name}: {error}") from None


def load_all(folder: str | Path | None = None) -> list[Record]:
    """Every record of a folder (default: the project's own), oldest first. A missing folder holds none."""
    folder = paths.records_dir() if folder is None else Path(folder)
    if not folder.is_dir():
        return []
    records = [load(path) for path in sorted(folder.glob("*.json")) if path.name != UNVERIFIED]
    return sorted(records, key=lambda record: record.date)


def flat_rows(records: list[Record]) -> list[dict]:
    """Every measurement of these records as one flat dict with exactly the keys of FLAT_KEYS.

    What a row does not say is None. `stale` marks a GPU time taken with kernels other than the present ones;
    a CPU time runs none of them and is never stale.
    """
    flat = []
    for record in records:
        outdated = stale(record)
        for row in record.rows:
            if "kind" not in row:
                continue
            known = {**row, "record": record.name, "date": record.date, "commit": record.commit,
                     "kernel_hash": record.kernel_hash, "stale": outdated and not is_cpu(row["device"])}
            flat.append({key: known.get(key) for key in FLAT_KEYS})
    return flat


def table(rows: list[dict], columns: dict[str, str]) -> str:
    """Rows as aligned text. columns: key in the row -> heading; floats to four digits, None as a dash."""
    def shown(value) -> str:
        if value is None or isinstance(value, str):  # a name in a file may hold anything, and a terminal obeys some of it
            return (value if value.isprintable() else repr(value)[1:-1]) if value else "-"
        if isinstance(value, float):
            return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        return f"{value:,}" if type(value) is int else str(value)

    cells = [list(columns.values())] + [[shown(row.get(key)) for key in columns] for row in rows]
    numeric = [any(isinstance(row.get(key), (int, float)) for row in rows) for key in columns]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in
                              zip(line, widths, numeric, strict=True)).rstrip() for line in cells)


def is_cpu(device: str) -> bool:
    """Whether a row's device name means the CPU."""
    return device.lower().startswith("cpu")


def stale(record: Record) -> bool:
    """Whether this record was made with other kernels or launch code than the present ones.

    Not if its notes say under "kernels" that they were off: then none of them ran.
    """
    return record.kernel_hash != kernel_hash() and not str(record.notes.get("kernels", "")).startswith("off")


def verify(folder: str | Path | None = None, tree: str | Path | None = None) -> str:
    """Check that the kernels as they are were tested on a GPU, or are named as not reported on yet.

    The newest record whose notes hold `gpu_tests` must carry the present kernel hash and report no failure.
    Otherwise `UNVERIFIED.json` in the folder must be {"kernel_hash": the present hash, "why": a reason,
    "date": ...}. Returns one sentence saying which of the two holds; raises RecordError where neither does.
    `tree` is another checkout to look at (tests use copies).
    """
    if folder is None:
        folder = paths.records_dir() if tree is None else Path(tree) / "data" / "records"
    folder, now = Path(folder), kernel_hash(tree)
    reports = [record for record in load_all(folder) if "gpu_tests" in record.notes]
    if reports and reports[-1].kernel_hash == now:
        report = reports[-1]
        tests = report.notes["gpu_tests"]
        passed, failed = (tests.get(key) if isinstance(tests, dict) else None for key in ("passed", "failed"))
        if type(failed) is not int or failed != 0 or type(passed) is not int or passed <= 0:
            raise RecordError(f"the GPU test report {report.name} of {report.date} is no evidence: "
                              f"notes.gpu_tests is {tests!r:.200}; accepted: passed above 0 and failed 0")
        return f"kernels {now[:12]} were tested on a GPU on {report.date}"
    was = f"the newest GPU test report carries {reports[-1].kernel_hash[:12]}" if reports else \
        "there is no GPU test report"
    if (folder / UNVERIFIED).exists():
        entry = _read_object(folder / UNVERIFIED)
        if entry.get("kernel_hash") == now and isinstance(entry.get("why"), str) and entry["why"].strip():
            return f"kernels {now[:12]} have no GPU test report of their own yet: {entry['why'].strip()}"
        was += f" and {UNVERIFIED} names {str(entry.get('kernel_hash'))[:12]}" \
            if entry.get("kernel_hash") != now else f" and {UNVERIFIED} gives no reason in \"why\""
    raise RecordError(f"the kernels have hash {now}, but {was}. Run the GPU tests and keep their report in "
                      f"data/records, or name this hash and the reason in data/records/{UNVERIFIED}")


# ---- the kernel hash ---------------------------------------------------------------------------------------


def kernel_hash(tree: str | Path | None = None) -> str:
    """SHA-256 of the kernel sources and launch code, comments and white space stripped.

    Covers kernels/*.cu, kernels/*.cuh and the files of LAUNCH_CODE in twell_lab/ (those that exist), in path order,
    each path followed by its tokens. Rewording a comment keeps the hash, changing code changes it.
    `tree` is the top of a checkout; by default the kernels and package in use.
    """
    kernels = paths.kernels_dir() if tree is None else Path(tree) / "kernels"
    package = Path(__file__).resolve().parent if tree is None else Path(tree) / "twell_lab"
    sources = {f"kernels/{path.name}": path for suffix in ("*.cu", "*.cuh") for path in kernels.glob(suffix)}
    sources |= {f"twell_lab/{name}": package / name for name in LAUNCH_CODE if (package / name).exists()}
    digest = hashlib.sha256()
    for name, path in sorted(sources.items()):
        try:
            text = path.read_text(encoding="utf-8")
            tokens = _python_tokens(text) if path.suffix == ".py" else _cuda_tokens(text)
        except (OSError, UnicodeDecodeError, SyntaxError, tokenize.TokenError, RecordError) as error:
            raise RecordError(f"{name} cannot be hashed: {error}") from None
        for part in (name, *tokens):
            # The length before each part keeps two different token lists from ever reading the same.
            data = part.encode()
            digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()


_CUDA_TOKEN = re.compile(r"""
    (?P<space>   [^\S\n]+ | /\*.*?\*/ | //[^\n]* )
  | (?P<newline> \n )
  | (?P<raw>     (?:u8|[uUL])?R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)" )
  | (?P<string>  (?:u8|[uUL])?"(?:[^"\\\n]|\\.)*" | (?:u8|[uUL])?'(?:[^'\\\n]|\\.)+' )
  | (?P<word>    \.?\d(?:[eEpP][+-]|'[0-9a-zA-Z]|[\w.])* | [^\W\d]\w* )
  | (?P<mark>    <<=|>>=|\.\.\.|->\*|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|\#\#|[^\s\w"'] )
""", re.VERBOSE | re.DOTALL)


def _cuda_tokens(text: str) -> list[str]:
    """The tokens of a CUDA C++ source. Ends of preprocessor lines count, all other white space does not."""
    text = text.replace("\\\n", "")
    tokens, at, directive, line_start, spaced = [], 0, False, True, False
    while at < len(text):
        match = _CUDA_TOKEN.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise RecordError(f"line {line} has an unfinished string or character: {text[at:at + 40]!r}")
        at, kind, token = match.end(), match.lastgroup, match[0]
        if kind == "newline":
            if directive:
                tokens.append("\n")
            directive, line_start, spaced = False, True, True
        elif kind == "space":
            spaced = True
        else:
            if line_start and token == "#":
                directive = True
            # `#define F(x)` takes an argument, `#define F (x)` does not: there white space is code.
            if token == "(" and directive and not spaced and tokens[-2:-1] == ["define"]:
                token = "(argument"
            tokens.append(token)
            line_start = spaced = False
    return tokens


def _python_tokens(text: str) -> list[str]:
    """The tokens of a Python source, the same on every Python version from 3.11 on.

    Docstrings are strings, so they count. An f-string is one token, as it was before Python 3.12 split it.
    """
    lines = text.splitlines(keepends=True)
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
    named = {tokenize.NEWLINE: "\n", tokenize.INDENT: "indent", tokenize.DEDENT: "dedent"}
    opening = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")} - {None}
    closing = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")} - {None}
    tokens, depth, start = [], 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in opening:
            start = start if depth else token.start
            depth += 1
        elif token.type in closing:
            depth -= 1
            if not depth:
                tokens.append(_between(lines, start, token.end))
        elif not depth and token.type not in skipped:
            tokens.append(named.get(token.type, token.string))
    return tokens


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text from one (line from 1, column) position to another."""
    part = lines[start[0] - 1:end[0]]
    part[-1] = part[-1][:end[1]]
    part[0] = part[0][start[1]:]
    return "".join(part)


# ---- files and provenance ----------------------------------------------------------------------------------


def _read_object(path: Path) -> dict:
    data = read_json(path, "record")
    if not isinstance(data, dict):
        raise RecordError(f"record {str(path)!r} holds a {type(data).__name__}; a record is an object")
    return data


def source_commit() -> tuple[str | None, bool | None]:
    """The checkout this package runs from: (commit, whether the tree differs from it), or (None, None).

    A tree that was copied without its `.git` can say where it came from through TWELL_LAB_COMMIT, in the form
    of `git describe --always --abbrev=40 --dirty --exclude='*'`.
    """
    told = os.environ.get("TWELL_LAB_COMMIT", "").strip()
    if told:
        return told.removesuffix("-dirty"), told.endswith("-dirty")
    top = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "--no-optional-locks", "-C", str(top), *words], capture_output=True,
                              text=True, check=True, timeout=20).stdout.strip()

    try:
        # An installed package may lie inside some other project's checkout; that commit is not ours.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != top:
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None

"""What ran for a record: the commit, and a hash of each kernel's sources and launch code.

The hash of a kernel is a SHA-256 over the tokens of its source with its headers, and over the syntax trees of its
declaration in `cuda/registry.py`, of its launch functions, and of all functions, classes and constants of the package
that these use, directly or through others. Comments, docstrings, annotations, white space, and the names and folders of
files are left out, so that a file may move without a new hash. So is code that decides nothing about a launch
(`_NOT_FOLLOWED`): `core` (errors, where files lie), the simulator, the table of all kernels, and `sources`, which reads
numbers from sources that are hashed themselves."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import resolve_name
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from .. import core
from ..core import CompileError, RecordError
from ..cuda import sources

_NOT_FOLLOWED = {"core", "simulator", "sources", "KERNELS"}


class Sources(NamedTuple):
    """The folders of the kernels and of the package in a checkout."""

    kernels: Path
    package: Path

    @classmethod
    def of(cls, tree: str | Path | None = None) -> Sources:
        """Those of the checkout with this top folder; by default those that are in use."""
        if tree is None:
            return cls(core.kernels_dir(), Path(__file__).resolve().parents[1])
        return cls(Path(tree) / "kernels", Path(tree) / "twell_lab")


def kernel_hashes(tree: str | Path | None = None) -> dict[str, str]:
    """The hash of every kernel, 64 hexadecimal digits, by the kernel's name.

    Args:
        tree: the top folder of a checkout; by default the code in use.

    Raises:
        RecordError: for a source, a header or a launch function that is missing or cannot be read, and for a source
            that is not declared.
    """
    return dict(_present()) if tree is None else _hashes(Sources.of(tree))


@cache
def _present() -> dict[str, str]:
    return _hashes(Sources.of())


def _hashes(tree: Sources) -> dict[str, str]:
    declared = _declared(tree.package / "cuda" / "registry.py")
    undeclared = {path.stem for path in tree.kernels.glob("*.cu")} - set(declared)
    if undeclared:
        raise RecordError(f"{min(undeclared)}.cu is in kernels/, and twell_lab/cuda/registry.py does not declare it")
    package = _Package(tree.package)
    return {name: _hash(tree.kernels, name, package, *declaration) for name, declaration in declared.items()}


def _declared(registry: Path) -> dict[str, tuple[tuple[str, ...], list[ast.AST]]]:
    """The kernels that a cuda/registry.py declares. For each: the functions that launch it, which are the second
    argument of its `Kernel(...)`, and the arguments after that. The file is read and not imported: it may be of another
    checkout, and importing it needs torch."""
    known: dict[str, object] = {}
    found = {}
    try:
        tree = ast.parse(registry.read_bytes())
        for statement in tree.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Kernel":
                    name, functions = (_constant(each, known) for each in node.args[:2])
                    found[name] = functions, [*node.args[2:], *node.keywords]
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], (ast.Name, ast.Tuple)):
                with suppress(ValueError):
                    names, value = _names_of(statement), _constant(statement.value, known)
                    known |= {names[0]: value} if len(names) == 1 else dict(zip(names, value, strict=True))
    except (OSError, SyntaxError, ValueError) as error:
        raise RecordError(f"{registry} cannot be read: {error}") from None
    return found


def _constant(node: ast.expr, known: dict):
    """The value of a string, of a name in `known`, or of a tuple of these. ValueError for anything else."""
    if isinstance(node, ast.Tuple):
        values: list = []
        for each in node.elts:
            values += _constant(each.value, known) if isinstance(each, ast.Starred) else [_constant(each, known)]
        return tuple(values)
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError(f"line {node.lineno} holds neither a string nor a tuple of strings")


def _hash(kernels: Path, name: str, package: _Package, functions: tuple[str, ...], declaration: list[ast.AST]) -> str:
    writer = _Writer(package, "twell_lab.cuda.registry")
    declared = [writer.text(each) for each in declaration]
    code = package.reached(functions, writer.references)
    digest = hashlib.sha256()
    for part in (*_source(kernels, f"{name}.cu", set()), "declaration", *declared, "launch code", *code):
        # With the length before each part, two different lists of parts never give the same bytes.
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()


# ---- CUDA sources ----


def _source(kernels: Path, name: str, seen: set[str]) -> Iterator[str]:
    """The tokens of a source, with each #include replaced by the tokens of that header where it comes first."""
    seen.add(name)
    try:
        tokens = sources.tokens((kernels / name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, CompileError) as error:
        raise RecordError(f"kernels/{name} cannot be hashed: {error}") from None
    at = 0
    while at < len(tokens):
        header = (
            tokens[at + 2].strip('"') if tokens[at : at + 2] == ("#", "include") and tokens[at + 2][0] == '"' else None
        )
        if header is None:
            yield tokens[at]
        elif header not in seen:
            yield from _source(kernels, header, seen)
        at += 1 if header is None else 4  # #, include, the name, the end of the line


# ---- Python: launch functions and all that they use ----


class _Module:
    """The definitions at the top level of a Python file by name, and what each imported name stands for."""

    def __init__(self, path: Path, dotted: str):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            raise RecordError(f"{dotted.replace('.', '/')}.py cannot be hashed: {error}") from None
        self.package = dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]
        self.defined: dict[str, list[ast.stmt]] = {}
        self.imported: dict[str, tuple[str, str | None]] = {}  # alias: (module, name in it or None)
        for statement in _top_level(tree.body):
            for name in _names_of(statement):
                self.defined.setdefault(name, []).append(statement)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = resolve_name("." * node.level + (node.module or ""), self.package)
                self.imported |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}


class _Package:
    """A Python package, read from its files and not imported."""

    def __init__(self, folder: Path):
        self.folder, self.modules = folder, {}

    def module(self, dotted: str) -> _Module | None:
        """The module with this dotted name; None if it is not in the package."""
        if dotted not in self.modules:
            top, *parts = dotted.split(".")
            base = self.folder.joinpath(*parts)
            path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            there = top == "twell_lab" and path.is_file()
            self.modules[dotted] = _Module(path, dotted) if there else None
        return self.modules[dotted]

    def find(self, dotted: str, name: str) -> tuple[str, str] | None:
        """Where the name that the module `dotted` uses is defined, as (module, name). The second is "" if the name
        stands for a module. None for a name that is not of the package."""
        module = self.module(dotted)
        if module is None:
            return None
        if name in module.defined:
            return dotted, name
        if name in module.imported:
            source, there = module.imported[name]
            if self.module(f"{source}.{there}") is not None:
                return f"{source}.{there}", ""
            return self.find(source, there)
        return (f"{dotted}.{name}", "") if self.module(f"{dotted}.{name}") is not None else None

    def reached(self, functions: tuple[str, ...], others: list[tuple[str, str]]) -> list[str]:
        """The definitions of these functions, of others given as (module, name), and of all that they use, each as its
        name and its code in one line, sorted."""
        found: dict[tuple[str, str], str] = {}
        waiting = list(others)
        for each in functions:
            dotted, _, name = f"twell_lab.{each}".rpartition(".")
            if self.module(dotted) is None or name not in self.module(dotted).defined:
                raise RecordError(f"{each}, which launches a kernel, is not there")
            waiting.append((dotted, name))
        while waiting:
            dotted, name = place = waiting.pop()
            if place in found or _NOT_FOLLOWED & {*dotted.split("."), name}:
                continue
            writer = _Writer(self, dotted)
            found[place] = name + " " + "; ".join(writer.text(node) for node in self.module(dotted).defined[name])
            waiting += writer.references
        return sorted(found.values())


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, including those in an `if` or a `try`."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try)):
            handlers = [each.body for each in getattr(statement, "handlers", [])]
            for part in (statement.body, statement.orelse, getattr(statement, "finalbody", []), *handlers):
                yield from _top_level(part)
        else:
            yield statement


def _names_of(statement: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [
        node.id for target in targets if target is not None for node in ast.walk(target) if isinstance(node, ast.Name)
    ]


class _Writer:
    """Writes the syntax tree of a definition as text, and collects the definitions that it names (`references`)."""

    _LEFT_OUT = {"ctx", "type_comment", "type_params", "kind", "annotation", "returns", "lineno"}

    def __init__(self, package: _Package, dotted: str):
        self.package, self.dotted, self.references = package, dotted, []

    def text(self, node: ast.AST, local: frozenset[str] = frozenset()) -> str:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            local |= _bound_in(node)
        found = self._reference(node, local)
        if found is not None:
            self.references += [found] if found[1] else []
            return f"<{found[1] or 'module'}>"
        if isinstance(node, ast.AnnAssign):  # as an assignment without the annotation
            value = "" if node.value is None else self.text(node.value, local)
            return f"Assign([{self.text(node.target, local)}], {value})"
        if isinstance(node, ast.JoinedStr):
            return f"JoinedStr([{', '.join(self._pieces(node, local))}])"
        if isinstance(node, ast.Constant):
            named = isinstance(node.value, str) and re.fullmatch(r"\w*\.cuh?", node.value)
            return "a source" if named else repr(node.value)
        fields = []
        for name, value in ast.iter_fields(node):
            if name not in self._LEFT_OUT and value is not None and value != []:
                fields.append(self._field(name, value, node, local))
        return f"{type(node).__name__}({', '.join(fields)})"

    def _pieces(self, node: ast.JoinedStr, local: frozenset[str]) -> Iterator[str]:
        """The parts of an f-string. Neighbouring texts are joined, because Python versions split them differently."""
        for is_text, group in groupby(node.values, lambda part: isinstance(part, ast.Constant)):
            parts = list(group)
            if is_text:
                parts = [ast.Constant("".join(part.value for part in parts if isinstance(part, ast.Constant)))]
            yield from (self.text(part, local) for part in parts)

    def _field(self, name: str, value, node: ast.AST, local: frozenset[str]) -> str:
        if isinstance(value, ast.AST):
            return self.text(value, local)
        if not isinstance(value, list):
            return repr(value)
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        texts = (
            self.text(each, local) if isinstance(each, ast.AST) else repr(each)
            for each in value
            if not isinstance(each, (ast.Import, ast.ImportFrom))
        )
        return f"[{', '.join(texts)}]"

    def _reference(self, node: ast.AST, local: frozenset[str]) -> tuple[str, str] | None:
        """The definition of the package that a name, or an attribute of a module of the package, stands for."""
        if isinstance(node, ast.Name) and node.id not in local:
            return self.package.find(self.dotted, node.id)
        if isinstance(node, ast.Attribute):
            module = self._reference(node.value, local)
            return self.package.find(module[0], node.attr) if module and not module[1] else None
        return None


def _bound_in(function: ast.AST) -> frozenset[str]:
    """The names of a function's own variables, which hide those of the module: its arguments and what it assigns."""
    nodes = list(ast.walk(function))
    shared = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return frozenset(names - shared)


# ---- the commit ----


def source_commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout that this package runs from, and whether files differ from it. (None, None) outside a
    checkout.

    For a copy without `.git`, the environment variable TWELL_LAB_COMMIT can say it, in the form of
    `git describe --always --abbrev=40 --dirty --exclude='*'`.
    """
    told = os.environ.get("TWELL_LAB_COMMIT", "").strip()
    if told:
        return told.removesuffix("-dirty"), told.endswith("-dirty")
    top = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(top), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        # An installed package may lie in the checkout of another project, whose commit says nothing about it.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != top:
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None

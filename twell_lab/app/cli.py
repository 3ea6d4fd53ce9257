"""The `twell-lab` command: its subcommands, each a function whose parameters are its arguments and options; and what
errors and interruptions become. What a subcommand needs is imported when it runs, so that `--help` is quick.

Exit status: 0 done; 1 a check failed; 2 a mistake in the input or the set-up, which one line on stderr names;
130 interrupted.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import twell_lab as tl

from ..core import TwellError
from . import bench_command, commands, doctor, model_commands, terminal

COMMANDS: dict[str, Callable[..., terminal.Answer | None]] = {
    "doctor": doctor.doctor,
    "tour": commands.tour,
    "train": commands.train,
    "prepare": commands.prepare,
    "sample": model_commands.sample,
    "profile": model_commands.profile,
    "sparsify": model_commands.sparsify,
    "predict": commands.predict,
    "bench": bench_command.bench,
    "bench model": bench_command.bench_model,
    "course": commands.course,
    "submit": commands.submit,
    "grade": commands.grade,
    "record": commands.record,
    "records": commands.list_records,
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors begin as all others do."""

    def error(self, message: str) -> NoReturn:
        print(f"twell-lab: {message}; {self.prog} --help says more", file=sys.stderr)
        raise SystemExit(2)


def _parser(asked: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; only if it is asked for with the fields of a training's config, whose class needs torch."""
    text = "How activation sparsity in a language model becomes real GPU speed."
    parser = _Parser(prog="twell-lab", description=text)
    parser.add_argument("--version", action="version", version=f"twell-lab {tl.__version__}")
    added = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        what, _, more = (inspect.getdoc(command) or "").partition("\n\n")  # nothing under -OO
        one = added.add_parser(
            name,
            help=what[:1].lower() + what[1:].rstrip("."),
            description=what,
            epilog=more,
            formatter_class=argparse.RawDescriptionHelpFormatter if more else argparse.HelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        one.add_argument("--json", action="store_true", default=False, help="print the result as JSON, not as a table")
        _add_parameters(one, command)
        if name == asked == "train":
            _add_parameters(one, tl.TrainConfig)
    return parser


# ---- the options of a function ----

# In a docstring: a line that is the title of a section, or a field with its text, whose further lines are indented.
_ENTRY = re.compile(r"^(?P<title>\w[\w ]*):$|^(?P<indent> *)(?P<name>\w+): (?P<text>.+(?:\n(?P=indent) {4}.+)*)", re.M)


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path; a file or folder is accepted")
    return Path(text)


_KINDS: dict[Any, tuple[str, Callable]] = {
    int: ("N", int),
    float: ("X", float),
    Path: ("PATH", _path),
    str: ("WORD", str),
}


def _add_parameters(parser: argparse.ArgumentParser, command: Callable) -> None:
    """Add an argument for each positional parameter of a command and an option for each other; of a dataclass an option
    for each field, with its text in the docstring as help, in the group of its section there."""
    hints, texts = get_type_hints(command, include_extras=True), {}
    group: argparse._ActionsContainer = parser
    for entry in _ENTRY.finditer(inspect.getdoc(command) or "") if isinstance(command, type) else ():  # none under -OO
        if entry["title"]:
            group = parser.add_argument_group(entry["title"][0].lower() + entry["title"][1:])
        else:
            text = " ".join(entry["text"].split()).rstrip(".")
            text = re.sub(r"\b[a-z0-9]+_\w+", lambda word: _option(word[0]) if word[0] in hints else word[0], text)
            texts[entry["name"]] = group, text
    for name, parameter in inspect.signature(command).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        group, text = texts.get(name, (parser, ""))
        needed = parameter.default is parameter.empty
        how = _how(hints[name], None if needed else parameter.default, text)
        if parameter.kind is parameter.KEYWORD_ONLY or isinstance(command, type):
            group.add_argument(_option(name), dest=name, required=needed, **how)
        else:
            group.add_argument(name, **({} if needed else {"nargs": "?"}) | how | {"metavar": name.upper()})


def _option(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"  # from_: `from` is a word of Python's


def _how(hint: Any, default: Any, text: str) -> dict[str, Any]:
    """Return arguments of add_argument; the default is added to the help in brackets unless that has some."""
    leaves = _leaves(hint)
    text = [text, *(leaf for leaf in leaves if isinstance(leaf, str))][-1]
    if default not in (None, False, ()) and "[" not in text:
        values = default if isinstance(default, tuple) else (default,)
        text += f" [{' '.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}]"
    how: dict[str, Any] = {"help": text.strip().replace("%", "%%")}
    if bool in leaves:
        return how | {"action": argparse.BooleanOptionalAction}
    if Sequence in leaves:
        how["nargs"] = "+"
    if words := [get_args(leaf) for leaf in leaves if get_origin(leaf) is Literal]:
        return how | {"choices": words[0]}
    metavar, read = next(_KINDS[leaf] for leaf in leaves if leaf in _KINDS)
    return how | {"metavar": metavar, "type": read}


def _leaves(hint: Any) -> list:
    if get_origin(hint) is Literal or not get_args(hint):
        return [hint]
    return [get_origin(hint), *chain.from_iterable(map(_leaves, get_args(hint)))]


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
        # Before torch is loaded: its threads sleep while they wait in a tour, which is to time alike everywhere, and in
        # a training on a busy machine, where one that spins takes the core from the one that it waits for.
        busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does: what was measured is saved
        if arguments[:1] == ["tour"] or arguments[:1] == ["train"] and busy:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    rank = os.environ.get("RANK", "0")
    try:
        terminal.set_up()
        if arguments[:2] == ["bench", "model"]:  # two words, one command
            arguments = ["bench model", *arguments[2:]]
        try:
            options = vars(_parser(*arguments[:1]).parse_args(arguments or ["--help"]))
        except SystemExit as stopped:
            if not stopped.code:  # after --help or --version, whose output argparse may have lost
                terminal.write("")
            raise
        command, json = COMMANDS[options.pop("command")], options.pop("json")
        if (answer := command(**options)) is None:  # another process of torchrun's gives it
            return 0
        answer.say(json)
        return answer.status
    except KeyboardInterrupt as error:
        if rank != "0":  # under torchrun one process reports it for all
            return 130
        why, status = "\ntwell-lab: interrupted", 130
        if folder := getattr(error, "folder", None):  # of checkpoint.Interrupted: a training that was saved
            started = "torchrun as before, with" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "twell-lab train"
            why = f"\ntwell-lab: {error}; to go on: {started} --resume {shlex.quote(folder)}"
    except TwellError as error:  # there each process reports its own
        why, status = f"twell-lab{'' if rank == '0' else f', process {rank}'}: {error}", 2
    except (MemoryError, RuntimeError, OSError) as error:
        # torch raises a RuntimeError with one of these wordings where it cannot allocate memory on the CPU.
        memory = isinstance(error, MemoryError) or re.search("out of memory|can't allocate|alloc_cpu", str(error))
        if not memory and getattr(error, "errno", None) is None:  # of a file or device, and handled nowhere else
            raise
        what = "this does not fit into memory; smaller sizes are accepted" if memory else error
        why, status = f"twell-lab: {what}", 2
    print(why, file=sys.stderr)
    return status

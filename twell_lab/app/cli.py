"""The `twell-lab` command: the table of its subcommands, and what errors and interruptions become. Each subcommand
imports what it needs when it runs, so that `--help` is quick.

Exit status: 0 done; 1 a check failed; 2 a mistake in the input or the set-up, which one line on stderr names;
130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .. import __version__
from ..core import TwellError
from . import terminal, train_command
from .options import Option, add_fields, option, path, whole

MODEL = "bench model"  # two words, one command

# ---- options that several commands have ----

_SAVED = "a folder that twell-lab train --out wrote, or one of transformers, or a repository of the Hub"
_TEXT = option(
    "--text",
    "PATH",
    "a file or folder, read whole; of the text that the model was trained on, only the held-out part "
    "[the held-out part of the source of Python's standard library]",
)
_DTYPES, _WORKLOADS = ["bfloat16", "float16", "float32"], ["lognormal", "uniform"]
_DEVICE = option("--device", "DEVICE", "cpu, cuda, cuda:1 [a GPU where there is one]")
_OWN = f"{', '.join(_DTYPES)} [bfloat16 on a GPU, float16 on one older than sm_80, else float32]"
_DTYPE = option("--dtype", "DTYPE", _OWN, choices=_DTYPES)
_PATHS = "twell, hot_cold, two_four, blocks, or lossy: int8, fp8, twell_int8, predicted, experts"
_LAYER = (
    option("--d-model", "N", "the layer's width", 2048),
    option("--d-ff", "N", "its neurons", 5632),
    option("--nnz", "X", "mean number of neurons firing for a token", 29.0, type=float),
    option("--workload", "", "a few neurons fire far more often, or all alike", "lognormal", choices=_WORKLOADS),
)
_PLANNING = (
    option("--tokens", "N", "tokens at once to plan for", [1, 64, 2048, 16384]),
    option("--predict-only", None, "time none of the candidates"),
    option("--calls", "", "how the model will be called", "eager", choices=["eager", "compiled", "captured"]),
    option("--paths", "PATH", f"what to weigh beside dense: {_PATHS} [twell hot_cold]", nargs="+", type=str),
    _DEVICE,
    _DTYPE,
)
_PLANNED = "how many windows to profile, and how many others to time on"
_PLAN = option("--plan", "FILE", "a plan that twell-lab plan --out wrote [a new one]")


def _model(windows: str, out: str = "", also: str = "") -> tuple[Option, ...]:
    """Return the options for a model and a text. windows: what --windows counts; out: what --out saves, if it is a
    file; also: what else MODEL may be."""
    kept = (option("--out", "FILE", f"save the {out} here, as JSON"),) if out else ()
    return option("model", "MODEL", _SAVED + also), _TEXT, option("--windows", "N", windows, 256), *kept


# ---- the commands ----


class Command(NamedTuple):
    """A subcommand: "module:function" of this package, which is given the parsed options and returns an Answer; what
    it does; its options, of which the last are the fields of a dataclass, also "module:name"; and what stands below its
    help."""

    run: str
    text: str
    options: tuple[Option, ...]
    fields: str | None
    epilog: str | None


COMMANDS: dict[str, Command] = {}


def _command(
    run: str, text: str, *options: Option, name: str | None = None, fields: str | None = None, epilog: str | None = None
) -> None:
    """Add a command, called as its function is unless it has another name."""
    COMMANDS[name or run.partition(":")[2]] = Command(run, text, options, fields, epilog)


_command("commands:doctor", "Say what this machine has, what will run where, and what is missing.")
_command(
    "commands:tour",
    "Train with and without L1, profile, pack, time, and write a page.",
    option("--render", "TOUR_JSON", "only draw the page of an earlier tour, of any machine", type=path),
    fields="options:TourOptions",
)
_command(
    "train_command:run",
    "Train a small ReLU language model, with an L1 penalty if asked for.",
    option("--out", "DIR", "a new folder, for metrics, a checkpoint for --resume and, at the end, the model"),
    option("--resume", "DIR", "go on with the run saved there; --steps, where and how it computes may change"),
    option("--config", "NAME", "what to start from: 1M to 2B, 'list' shows them; or a file of YAML or JSON"),
    name="train",
    fields=".training.config:TrainConfig",
    epilog=train_command.EPILOG,
)
_command(
    "commands:prepare",
    "Read a text of any length once, encode it, and keep its tokens for training.",
    option("text", "PATH", "a file, a folder of files, or hf:owner/name?bytes=10e9, so much of a dataset of the Hub"),
    option("--out", "DIR", "a new folder, for twell-lab train --text", required=True),
    option("--tokenizer", "WORD", "bytes, bpe:4096 (a BPE of that size, trained here), or a file [bytes]"),
)
_command(
    "speak_commands:sample",
    "Let a saved model continue a text, and time it.",
    option("model", "MODEL", _SAVED),
    option("--prompt", "TEXT", "what the model continues [a new line]", "\n"),
    option("--tokens", "N", "how many to add, unless a model of transformers ends its text before", 200),
    option("--temperature", "X", "0 takes the most likely token; above, tokens are drawn [0]", 0.0),
    option("--top-k", "N", "draw from the N most likely tokens alone"),
    option("--seed", "N", "of the draw [another one each time]", type=whole),
    option("--sparse", None, "plan the layers on this text, swap them, and compare with the dense model"),
    _DEVICE,
)
_command(
    "analysis_commands:profile",
    "Count which neurons of a saved model fire on a text.",
    *_model("how many windows", "counts", "; or a profile that --out saved"),
    option("--against", "FILE", "compare with the profile that --out saved here"),
    option("--html", "FILE", "draw it into a page that needs no network"),
    option("--plot", "FILE", "draw its layers into a picture: .png, .svg or .pdf; needs kaleido"),
)
_command(
    "analysis_commands:plan",
    "Choose a path for every layer of a saved model: dense, TwELL or hot/cold, or what --paths names.",
    *_model(_PLANNED, "plan"),
    *_PLANNING,
    option("--all", None, "print every candidate, not only what was chosen"),
)
_command(
    "analysis_commands:thresholds",
    "Choose what a model that was not trained to be sparse may set to zero: lossy.",
    *_model("how many windows to calibrate on, and how many others to measure the loss on", "thresholds"),
    option("--sparsity", "X", "the share of values to set to zero", 0.5),
    option("--method", "", "behind the gate, or at the projections' inputs", "cats", choices=["cats", "teal"]),
    option("--greedy", None, "give each layer its own sparsity, by measured errors"),
)
_command(
    "analysis_commands:predict",
    "Say what a layer should take on a GPU that you do not have.",
    option("gpu", "GPU", 'a GPU of data/gpus.json, such as "RTX 4090"; "list" names all'),
    option("--tokens", "N", "tokens at once", [1, 16, 256, 2048, 16384]),
    *_LAYER,
    option("--no-gated", None, "a plain layer, without a gate", action="store_false", dest="gated"),
)
_command(
    "sparsify_command:run",
    "Save a model with a plan of its layers beside it.",
    *_model(_PLANNED),
    option("--out", "DIR", "a folder without a model", required=True),
    _PLAN,
    option("--relufy", None, "put ReLUs in the place of SiLU, GELU and the like; then train it further"),
    *_PLANNING,
    name="sparsify",
)
_command(
    "speak_commands:export",
    "Write a saved model as a LlamaForCausalLM that others read.",
    option("model", "DIR", "a folder that twell-lab train --out wrote"),
    option("--out", "DIR", "a folder without a model", required=True),
)
_command(
    "bench_command:layer",
    "Check and time a sparse feed-forward layer against torch's dense one.",
    option("--tokens", "N", "tokens at once", [1, 8, 64]),
    *_LAYER,
    option("--compiled", None, "time torch.compile's dense layer too"),
    option("--seconds", "S", "how long to measure each size on a CPU", 2.0),
    option("--out", "DIR", "save the records here"),
    _DEVICE,
    (_DTYPE[0], _DTYPE[1] | {"nargs": "+"}),
    name="bench",
    epilog="twell-lab bench model times a whole model: twell-lab bench model --help",
)
_command(
    "bench_command:whole_model",
    "Check and time a whole model, dense beside sparse.",
    option("model", "PATH", f"{_SAVED}; or a size, 1M to 2B: a drawn Llama"),
    option("--tokens", "N", "of each forward, up to the model's context or a multiple of it [at most 2048]", nargs="+"),
    option("--batches", "N", "of the steps of decoding; none after it: no decoding", [1, 8, 64], nargs="*"),
    option("--text", "PATH", "what a saved model reads [as of twell-lab profile]; a size reads random tokens"),
    option("--firing", "FILE", "of a size: a saved profile, as which its neurons fire [0.5%% of them for a token]"),
    _PLAN,
    option(
        "--paths", "PATH", f"time the model on each of these too: {_PATHS}, with error and loss [none]", [], type=str
    ),
    option("--compiled", None, "time both models under torch.compile too"),
    option("--graphs", None, "on a GPU, time forwards as CUDA graphs too"),
    option("--training", None, "time a training step too"),
    option("--seconds", "S", "how long to measure each row on a CPU; on a GPU its energy [1; 3]"),
    option("--out", "DIR", "save the record here"),
    _DEVICE,
    _DTYPE,
    name=MODEL,
)
_command(
    "commands:course",
    "Copy the course's notebooks into a folder and open JupyterLab there.",
    option("folder", "DIR", "a folder that has none of them yet", Path("twell-lab-course"), nargs="?"),
    option("--no-open", None, "only copy them", action="store_false", dest="open"),
)
_command(
    "commands:submit",
    "Judge a kernel of the capstone, which runs here as any program does, and write a record of its medal.",
    option("file", "FILE", "a CUDA source with the kernel down"),
    option("--out", "DIR", "save the record here [this folder]", Path()),
)
_command(
    "commands:record",
    "Make one of the recordings that the course's figures come from.",
    option("name", "NAME", "without a name, the names are listed", nargs="?"),
    option("--out", "DIR", "where the record goes [data/records of a checkout, else the working folder]"),
    option("--seed", "N", "for attack only: draw other cases", type=whole),
    option("--seconds", "S", "for attack, and recordings of large tables: how long at most"),
)
_command(
    "commands:compile_kernels",
    "Compile the kernels for machines that have no compiler.",
    option("out", "DIR", "a folder; TWELL_LAB_CUBINS names it on those machines"),
    option("--arch", "ARCH", "of the GPUs, sm_75 to sm_120", ["sm_90"]),
    option("--dtype", "DTYPE", f"{', '.join(_DTYPES)} [bfloat16]", ["bfloat16"], choices=_DTYPES),
    option("--d-model", "N", "model widths", [2048]),
    name="compile",
)
_command(
    "commands:list_records",
    "List the records that there are, or the rows of one kind.",
    option("kind", "KIND", "list the rows of these", nargs="?"),
    option("--folder", "DIR", "another folder than data/records"),
    option("--verify", None, "only check that each kernel was tested on a GPU, or is named as untested"),
    name="records",
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors begin as all others do."""

    def error(self, message: str) -> NoReturn:
        terminal.tell(f"twell-lab: {message}; {self.prog} --help says more")
        raise SystemExit(2)


def _parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line. It knows the fields that are options only where `arguments` ask for their
    command, because the import of their class may need torch."""
    parser = _Parser(
        prog="twell-lab", description="How activation sparsity in a language model becomes real GPU speed."
    )
    parser.add_argument("--version", action="version", version=f"twell-lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        what = command.text[0].lower() + command.text[1:].rstrip(".")
        added = commands.add_parser(name, help=what, description=command.text, epilog=command.epilog)
        if command.epilog:
            added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
        if command.fields and name in arguments:
            add_fields(added, _named(command.fields))
        for option_name, how in command.options:
            added.add_argument(option_name, **how)
    return parser


def _named(place: str) -> Any:
    """Return what "module:name" names, of a module of this package."""
    module, _, name = place.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


# ---- what happens around a command ----


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
        _share_cores(arguments)
    try:
        terminal.set_up()
        with terminal.warnings_in_one_line():
            return _run(arguments)
    except TwellError as error:
        number = os.environ.get("RANK", "0")  # under torchrun each process reports its own error
        terminal.tell(f"twell-lab{'' if number == '0' else f', process {number}'}: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        # torch raises a RuntimeError with one of these wordings where it cannot allocate memory on the CPU.
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate|alloc_cpu", str(error)):
            raise
        terminal.tell("twell-lab: this does not fit into memory; smaller sizes are accepted")
        return 2
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun one process reports it for all
            terminal.tell(f"\ntwell-lab: {_how_to_go_on(error, arguments)}")
        return 130
    except OSError as error:  # an error of a file or device that is handled nowhere else
        if error.errno is None:
            raise
        what = "the system says" if error.filename is None else repr(error.filename)
        terminal.tell(f"twell-lab: {what}: {error.strerror}")
        return 2


def _share_cores(arguments: Sequence[str]) -> None:
    """Have torch's threads sleep while they wait, in a tour, which is to time alike on all machines, and in a training
    on a machine that others keep busy: there a thread that spins takes the core from the one that it waits for. On an
    idle machine spinning is faster. To be called before torch is loaded."""
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
    if arguments[:1] == ["tour"] or arguments[:1] == ["train"] and busy:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _run(arguments: list[str]) -> int:
    """Do what these arguments ask for and write the output. Returns the exit status."""
    if arguments[:2] == MODEL.split():
        arguments = [MODEL, *arguments[2:]]
    parser = _parser(arguments)
    try:
        _check_command(parser, arguments)
        options = parser.parse_args(arguments)
    except SystemExit as stopped:
        if not stopped.code:  # after --help or --version, whose output argparse may have lost
            terminal.write("")
        raise
    answer = _named(COMMANDS[options.command].run)(options)
    if answer is None:  # another process of torchrun's gives it
        return 0
    answer.say(options.json)
    return answer.status


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """End with the help where there is no argument; and as argparse does, but with the most similar command's name,
    where the first word is none of the commands."""
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    first, second = arguments[0], next(iter(arguments[1:]), "-")
    if first == "bench" and not second.startswith("-"):
        parser.error(f"bench takes no {second!r:.80}, but options; twell-lab {MODEL} times a whole model")
    if not first.startswith("-") and first not in COMMANDS:
        alike = difflib.get_close_matches(first, COMMANDS, n=1)
        meant = f"did you mean {alike[0]!r}? " if alike else ""
        parser.error(f"there is no command {first!r:.80}; {meant}accepted: {', '.join(COMMANDS)}")


def _how_to_go_on(error: BaseException, arguments: list[str]) -> str:
    """Return what was interrupted, and the command line that goes on with it or runs it again."""
    folder = getattr(error, "folder", None)  # of checkpoint.Interrupted
    if folder is None:
        return f"interrupted; to run it again: {_typed(arguments)}"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return f"{error}; to go on: torchrun as before, with --resume {shlex.quote(folder)}"
    return f"{error}; to go on: {_typed(['train', '--resume', folder])}"


def _typed(arguments: list[str]) -> str:
    """Return the `twell-lab` command with these arguments, as one would type it here."""
    started = [sys.argv[0]] if Path(sys.argv[0]).name.startswith("twell-lab") else ["python", "-m", "twell_lab"]
    return shlex.join([*started, *arguments])

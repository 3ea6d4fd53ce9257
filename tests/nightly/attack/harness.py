"""What the fuzzers share: cases that are made from a seed and a number alone, in this process or in one that may crash
or hang."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

MOST_FAILURES = 10
MEMORY = 12 << 30  # bytes of address space of a process of its own
Check = Callable[[random.Random, Counter], None]
PLACE = "TWELL_LAB_ATTACK"  # the environment variable that names the folder for what the attacks write
PRELOADED = ["torch", *(f"twell_lab.{name}" for name in ("app.cli", "training.loop", "analysis.planner", "simulator"))]
PRELOADED.append("twell_lab.training.text.source")


@cache
def home() -> Path:
    """A folder of this process's own for what an attack writes."""
    return Path(tempfile.mkdtemp(dir=os.environ.get(PLACE)))


def randomness(name: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{name} {seed} {number}")


def attack(
    name: str, check: Check, *, seed: int, cases: int, number: int | None = None, seconds: float | None = None
) -> dict:
    """Run check(r, counts) for each case, until `seconds` have passed, or for the one of this number. Returns the
    counts; at the end raises AssertionError with all failures, and how to run each again.

    check adds 1 to counts["checked"] for each result that it compared, and may count categories of its own.
    """
    counts, failures, begin = Counter(), [], time.monotonic()
    for each in range(cases) if number is None else (number,):
        if seconds is not None and time.monotonic() - begin > seconds:
            break
        try:
            check(randomness(name, seed, each), counts)
        except Exception as error:
            failures.append(said(name, seed, each, error))
            if len(failures) >= MOST_FAILURES:
                break
        counts["cases"] += 1
    assert_none(failures)
    return dict(counts)


def said(name: str, seed: int, number: int, error: BaseException | str) -> str:
    where, text = "", error
    if isinstance(error, BaseException):
        frames = reversed(traceback.extract_tb(error.__traceback__)[-4:])
        where = " at " + " < ".join(f"{frame.name}:{frame.lineno}" for frame in frames)
        text = f"{type(error).__name__}: {error}"
    again = f"--attack-seed {seed} --attack-case {number}"
    return f"{name}, seed {seed}, case {number}{where}\n  {text[:1500]}\n  again: {again}"


def assert_none(failures: list[str]) -> None:
    assert not failures, "\n".join([f"{len(failures)} failures:", *failures])


# ---- in processes of their own ----

_context = multiprocessing.get_context("forkserver")


def forked(target: Callable, *arguments) -> multiprocessing.Process:
    """target(*arguments) in a process that has torch and the package loaded already: a fork of one that has done
    nothing else."""
    _context.set_forkserver_preload(PRELOADED)
    process = _context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def isolated(name: str, where: str, *, seed: int, cases: int, number: int | None = None, seconds: float = 60.0) -> dict:
    """`attack` in a process with bounded memory, for checks that may crash, hang or take all memory. A case that does is
    a failure, and the next case begins in a new process.

    where: "module:function" of check(r, counts); seconds: how long a case may take."""
    counts, failures = Counter(), []
    wanted = iter(range(cases) if number is None else (number,))
    each = next(wanted, None)
    while each is not None and len(failures) < MOST_FAILURES:
        ours, theirs = _context.Pipe()
        process = forked(_serve, theirs, name, where, seed)
        theirs.close()
        try:
            while each is not None and len(failures) < MOST_FAILURES:
                ours.send(each)
                if not ours.poll(seconds):
                    failures.append(said(name, seed, each, f"not done within {seconds:.0f} s"))
                    break
                failed, counted = ours.recv()
                counts.update(counted)
                counts["cases"] += 1
                if failed:
                    failures.append(failed)
                each = next(wanted, None)
            else:
                each = None
        except (EOFError, BrokenPipeError, ConnectionResetError):
            process.join(10)
            failures.append(said(name, seed, each, f"the process ended: {_ending(process.exitcode)}"))
        finally:
            process.kill()
            process.join()
            ours.close()
        if each is not None:
            each = next(wanted, None)
    assert_none(failures)
    return dict(counts)


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"


def _serve(pipe, name: str, where: str, seed: int) -> None:
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, function = where.partition(":")
    check = getattr(importlib.import_module(module), function)
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            os._exit(0)
        counts, failed = Counter(), None
        try:
            check(randomness(name, seed, number), counts)
        except BaseException as error:  # SystemExit too: no check may end the process
            failed = said(name, seed, number, error)
        pipe.send((failed, counts))


# ---- damage ----

HOSTILE = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "0", "NaN", "\u0000", "\ud800", "é" * 50, "x" * 5000),
    *([], {}, [[]], [None], {"": None}, ["x"] * 40, "../../../etc/passwd"),
    *("float32", "bfloat16", "complex64", "cpu", "cuda:99"),
)
WAYS = (*["flip"] * 3, "flips", *["cut"] * 2, "empty", "zeros", "noise", "gap", "twice", "more", *["value"] * 2)


def damaged(content: bytes, r: random.Random) -> tuple[bytes, str]:
    """The content with some damage, and what was done to it."""
    if not content:
        return r.randbytes(r.randint(1, 50)), "filled"
    at, size = r.randrange(len(content)), min(len(content), r.choice((1, 2, 8, 64, 512, 4096)))
    way, before, after = r.choice(WAYS), content[:at], content[at + size :]
    middle = content[at : at + size]
    if way == "value":
        return _other_value(content, r)
    if way in ("flip", "flips"):
        changed = bytearray(content)
        for _ in range(1 if way == "flip" else r.randint(2, 20)):
            changed[r.randrange(len(changed))] ^= 1 << r.randrange(8)
        return bytes(changed), way
    made = {
        "cut": before,
        "empty": b"",
        "zeros": before + bytes(len(middle)) + after,
        "noise": before + r.randbytes(len(middle)) + after,
        "gap": before + after,
        "twice": before + middle + middle + after,
        "more": content + r.randbytes(size),
    }
    return made[way], f"{way}: {size} bytes at {at}"


def _other_value(content: bytes, r: random.Random) -> tuple[bytes, str]:
    """JSON with a value, or a field, that is another one; other content with a bit flipped."""
    import json

    try:
        whole = json.loads(content)
    except (ValueError, UnicodeDecodeError):
        at = r.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], f"bit flipped in byte {at}"
    places = list(_places(whole))
    if not places or r.random() < 0.05:
        value = r.choice(HOSTILE)
        return json.dumps(value).encode(), f"all of it is {value!r:.60}"
    holder, key = r.choice(places)
    way = r.randrange(8)
    if way == 0:
        del holder[key]
        done = f"{key!r} gone"
    elif way == 1 and isinstance(holder, dict):
        holder[r.choice(("", "extra", "__class__"))] = r.choice(HOSTILE)
        done = "a field more"
    elif way == 2:
        holder[key] = [[]]
        for _ in range(500):
            holder[key] = [holder[key]]
        done = f"{key!r} is a list within 500 lists"
    else:
        value = r.choice(HOSTILE)
        holder[key] = value
        done = f"{key!r} is {value!r:.60}"
    return json.dumps(whole).encode(), done


def _places(value):
    for key in (
        list(value) if isinstance(value, dict) else range(min(len(value), 30)) if isinstance(value, list) else ()
    ):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from itertools.islice(_places(value[key]), 200)

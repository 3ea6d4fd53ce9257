"""The simulator's runtime on arm64, by emulation where a cross compiler and qemu are there, and the same driver
here."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from twell_lab import core, simulator
from twell_lab.simulator import toolchain

HERE = Path(__file__).parent
CROSS, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def output_of_driver(cxx: str, folder: Path, run_with: list[str], machine: list[str]) -> str:
    """What arm64_driver.cpp prints, built by `cxx`."""
    flags = "-std=c++17 -fstack-clash-protection -g -w -ffp-contract=off -fno-strict-aliasing -fno-omit-frame-pointer"
    common = [*flags.split(), *machine, "-I", str(toolchain.CUDA), "-I", str(core.kernels_dir())]
    watched = ["-include", "cuda_on_cpu.h", "-DVALUE_BF16", *toolchain.KINDS["watched"]]
    (folder / "unit.cpp").write_text(f'#include "smxx_pack.cu"\n{CRASHES}SIM_EXPORT(pack_v2)\nSIM_EXPORT(crashes)\n')
    subprocess.run([cxx, *common, *watched, "-c", "unit.cpp", "-o", "unit.o"], cwd=folder, check=True)
    runtime = [*map(str, sorted(toolchain.CUDA.glob("*.cpp"))), "-fPIC", "-shared", "-Wl,-Bsymbolic"]
    subprocess.run([cxx, *common, "-O2", *runtime, "-pthread", "-o", "libruntime.so"], cwd=folder, check=True)
    wrap = [f"-Wl,--wrap={name}" for name in toolchain._WRAPPED]
    linked = [str(HERE / "arm64_driver.cpp"), *wrap, "-L.", "-lruntime", "-Wl,-rpath,$ORIGIN", "-pthread"]
    subprocess.run([cxx, *common, "-O2", "unit.o", *linked, "-o", "driver"], cwd=folder, check=True)
    done = subprocess.run([*run_with, "./driver"], cwd=folder, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


CRASHES = """#include <signal.h>
static void large_array(int i) { volatile char mine[100 << 20]; mine[i] = 1; }
extern "C" __global__ void crashes(int which) {
    if (which == 0) *(volatile int*)0x123456789000ull = 1;
    if (which == 1) large_array(which);
    if (which == 2) __builtin_trap();
    if (which == 3) for (;;) {}
    if (which == 4) raise(SIGABRT);
}
"""
EXPECTED = (
    "fault 0, lane reads 900, kept 129, first word 3f800000, steps {steps}\n"  # 3 rows of 300, every 7th positive
    "fault 1 of thread 170\n"  # the first to read element 900: lane 10 of the sixth warp
    "crash 0: fault 1 of thread 0, a path of 1\n"  # out of bounds
    "crash 1: fault 12 of thread 0, a path of 1\n"  # no stack left
    "crash 2: fault 9 of thread 0, a path of 1\n"  # a trap
    "crash 3: fault 10 of thread 0, a path of 1\n"  # too long
    "crash 4: fault 14 of thread 0, a path of 1\n"  # abort()
)


def test_the_driver_on_this_machine(tmp_path):
    if not simulator.available() or toolchain.compiler().name != "g++":
        pytest.skip("needs g++")
    machine = ["-fcf-protection=none"] if platform.machine() == "x86_64" else []
    said = output_of_driver(toolchain.compiler().path, tmp_path, [], machine)
    assert said == EXPECTED.format(steps=said.split("steps ")[1].split()[0])


def test_arm64_under_emulation(tmp_path):
    if not (shutil.which(CROSS) and shutil.which(EMULATOR) and Path(LIBRARIES).is_dir()):
        pytest.skip(f"needs {CROSS} and {EMULATOR} (Debian: apt install g++-aarch64-linux-gnu qemu-user)")
    said = output_of_driver(CROSS, tmp_path, [EMULATOR, "-L", LIBRARIES], [])
    assert said == EXPECTED.format(steps=said.split("steps ")[1].split()[0])

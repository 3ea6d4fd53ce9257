"""Every barrier of every portable kernel deleted and every bound shifted, one at a time: something notices each.

Either the simulator finds a fault, or the result differs from the reference; what neither can notice is explained here.
"""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.nightly.mutants import mutants
from tests.nightly.mutants.mutant_battery import DEFINES
from tests.nightly.mutants.mutants import Mutant
from twell_lab import simulator
from twell_lab.simulator import toolchain

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
ROOT = Path(__file__).parents[3]
FILES = list(DEFINES)  # headers: in the first of these that notices
PROCESSES = 2

VECTORS = "rows, tiles and chunks are whole vectors: no column lies between"
POWERS = "step is a power of two"
SAME = "the sum, or the count, is the same in every lane"
BUTTERFLY = "17, 8, 4, 2 and 1 also bring every lane's value once"
NOTHING = "one more turn, in which no lane has anything"
# (file, what is changed, shift): why no result can change.
SURVIVORS = {
    ("smxx_pack.cu", "base «<»width; base += WARP)", +1): NOTHING,
    ("smxx_pack.cu", "if (lane «==»0) out[0] = count;", +1): SAME,
    ("smxx_pack.cu", "if (first «<»width) v.raw", -1): VECTORS,
    ("smxx_pack.cu", "step «<»WARP; step *= 2", +1): POWERS,
    ("smxx_pack.cu", "step «<»WARP; step *= 2", -1): POWERS,
    ("smxx_pack.cu", "for (int i = 0; i «<»VECTOR; ++i) {", +1): "`mine` has no bit of a value after the last",
    ("smxx_pack.cu", "«for (int i =»0; i < VECTOR; ++i) {", -1): "`mine`, shifted by -1 or by 31, has no bit left",
    ("smxx_pack.cu", "base «<»width; base += WARP * VECTOR)", +1): NOTHING,
    ("smxx_pack.cu", "base «<»width; base += WARP * VECTOR)", -1): VECTORS,
    ("smxx_gated.cu", "«c +=»blockDim.x) nonfinite |=", -1): "some values are looked at twice",
    ("smxx_gated.cu", "«==»0) part[threadIdx.x / WARP] = dot", +1): SAME,
    ("smxx_gated.cu", "«==»0) part[turn][team()]", +1): SAME,
    ("smxx_gated.cu", "const bool mine = TEAMS «==»1", -1): "with one team, `steps` ends when `left` does",
    ("smxx_down.cu", "if (i «==»at + WARP)", -1): "the next pairs are loaded one entry earlier",
    ("smxx_down.cu", "if (at + lane «<=»kept)", +1): "one more pair, which nobody uses",
    ("smxx_up.cu", "facts.kept «<»list.room", -1): "the hidden values of such a row lie beside its words instead",
    ("smxx_up.cu", "if (threadIdx.x «==»0) {", +1): SAME,
    ("smxx_quantise_rows.cu", "if (most «<»121u << 23)", +1): "up to 2^-5 the steps of E4M3 are still 2^-9",
    ("smxx_quantise_rows.cu", "«for (int step =»WARP / 2", +1): BUTTERFLY,
    ("smxx_quantise_rows.cu", "if (threadIdx.x % WARP «==»0) part", +1): SAME,
    ("smxx_quantise_rows.cu", "«for (int w =»1; w < THREADS / WARP", -1): "the first warp's largest is looked at twice",
    ("smxx_quantise_rows.cu", "if (threadIdx.x «==»0) scales", +1): SAME,
    ("smxx_quantise_rows.cu", "c «<»columns) held[k]", -1): VECTORS,
    ("smxx_quantise_rows.cu", "there && c «<»columns; c += THREADS * VECTOR)", -1): VECTORS,
    ("smxx_quantise_rows.cu", "VECTOR; c «<»columns; c += THREADS * VECTOR) {", -1): VECTORS,
    ("smxx_quantise_rows.cu", "if (c «<»columns) store_bytes", -1): VECTORS,
    ("dense_row.cuh", "#define SLAB «2048»", +1): "slabs of 2048 are dealt; larger ones hold them and do not overlap",
    ("dense_row.cuh", "v += __shfl_xor_sync(ALL_LANES, v, step)", +1): BUTTERFLY,
    ("dense_row.cuh", "i «<»CHUNKS * VECTOR; i += 4", +1): "what is past the last chunk lies past D_MODEL",
    ("dense_row.cuh", "i «<»CHUNKS * VECTOR; i += 4", -1): VECTORS,
    ("dense_row.cuh", "if (c «<»D_MODEL)", -1): VECTORS,
    ("dense_row.cuh", "for (int k = 0; k «<»CHUNKS; ++k)", +1): "of copy_row: the next chunk lies past D_MODEL",
    ("dense_row.cuh", "#define CHUNKS", +1): "at most one more chunk, which lies past D_MODEL",
    ("dense_row.cuh", "#define CHUNKS", -1): VECTORS,
    ("dense_row.cuh", "return TEAMS «==»1", -1): "with one team, threadIdx.x / LANES is 0 as well",
    ("dense_row.cuh", "if (wanted && chunk_column(k) «<»D_MODEL) r.v[k]", -1): VECTORS,
    ("dense_row.cuh", "if (chunk_column(k) «<»D_MODEL)", -1): VECTORS,
    ("dense_row.cuh", "t «<»TEAMS; ++t", +1): "one more barrier, at which no team adds",
    ("row_walk.cuh", "if (at_ «<»listed_)", +1): NOTHING,
    ("row_walk.cuh", "group_ + WARP «<»tiles()", +1): "one more group, of no tiles",
    ("row_walk.cuh", "v += __shfl_xor_sync(ALL_LANES, v, step)", +1): BUTTERFLY,
    ("row_walk.cuh", "step «<»WARP; step *= 2", +1): POWERS,
    ("row_walk.cuh", "step «<»WARP; step *= 2", -1): POWERS,
    ("row_walk.cuh", "if (++strip_ * WARP «>=»width)", +1): NOTHING,
    ("row_walk.cuh", "e.lanes = __ballot_sync(ALL_LANES, i «<»end)", +1): "one more entry, whose value is 0",
    ("pool_walk.cuh", "if (group_ + WARP «>=»tiles())", +1): "one more group, of no tiles",
    ("pool_walk.cuh", "while (at_ «>=»listed_)", +1): NOTHING,
    ("pool_walk.cuh", "ALL_LANES, mine_ «>»SLOTS); over;", -1): "words that are just full leave nothing for the pool",
    ("pool_walk.cuh", "threadIdx.x «!=»0) return", +1): SAME,
    ("pool_walk.cuh", "if (threadIdx.x «==»0) {", +1): "any thread can take the slot",
}
# What counts rows for `stats`, a parameter that each launch leaves null.
_UNCOUNTED = {
    "const bool over = mine_ «>»SLOTS;": (-1,),  # a tile that is just full would count as one in the pool
    "!stats || threadIdx.x «!=»0) return;": (-1,),
    "if (threadIdx.x «!=»0) return;": (-1,),
    "if (blockIdx.x «==»0) atomicAdd(&stats[0]": (1, -1),
    "threadIdx.x «>=»WARP) return;": (1, -1),
    "blockIdx.x % POOL_ROWS «!=»0": (1, -1),
    "row «<»(int)gridDim.x": (1, -1),
    "threadIdx.x «<»POOL_ROWS": (1, -1),
    "(head & 3) «==»ROW_LOST": (1, -1),
}
SURVIVORS |= {
    ("pool_walk.cuh", text, shift): "nobody counts" for text, shifts in _UNCOUNTED.items() for shift in shifts
}
# Past the end of a thread's own array of structs, whose elements are used by their address, or memory that nobody
# wrote: a check of bounds may not see it, and what lies there is anything.
OPEN = {
    ("dense_row.cuh", "for (int k = 0; k «<»CHUNKS; ++k) found |=", +1): "a chunk past the row's last is looked at",
    ("dense_row.cuh", "for (int k = 0; k «<»CHUNKS; ++k) {", +1): "a chunk past the row's last is loaded, or used",
    ("smxx_pack.cu", "for (int j = 0; j «<»TILES; ++j) {", +1): "a tile that is not used is loaded",
    ("smxx_quantise_rows.cu", "for (int k = 0; k «<»HELD; ++k) {", +1): "the loop behind stores the right one",
    ("smxx_down.cu", "«for (int i =»1, at = 0; i <= kept", -1): "the head as an entry, of a column nobody wrote",
}


class Battery:
    """A process that runs the battery; one that dies of a mutant is replaced."""

    def __init__(self, folder: Path) -> None:
        self.command = [sys.executable, "-m", "tests.nightly.mutants.mutant_battery", str(folder)]
        self.process = None

    def __call__(self, file: str, mutant: Mutant) -> str | None:
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
        print(json.dumps([file, mutant.number, mutant.shift, mutant.compiled]), file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return json.loads(answer)
        self.close()
        return "crash"

    def close(self) -> None:
        if self.process:
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="module")
def fates(tmp_path_factory) -> dict[Mutant, str | None]:
    """What noticed each mutant: the name of a fault, "differs", or None. Those of headers: by the first file that
    does."""
    folder = tmp_path_factory.mktemp("mutants")
    todo: list[tuple[str, Mutant]] = []
    for file in FILES:
        changed, found = mutants.of_sources(toolchain.sources(file))
        (folder / Path(file).stem).mkdir()
        for name, text in changed.items():
            (folder / Path(file).stem / name).write_text(text)
        todo += [(file, mutant) for mutant in [Mutant(0, file, 0, "none", "", 0, False), *found]]

    lock = threading.Lock()
    same = lambda mutant: (mutant.file, mutant.line, mutant.text, mutant.shift)  # noqa: E731
    noticed: dict[tuple, str | None] = {}

    def work() -> None:
        battery = Battery(folder)
        while True:
            with lock:
                if not todo:
                    break
                file, mutant = todo.pop(0)
            if not noticed.get(same(mutant)):
                noticed[same(mutant)] = battery(file, mutant)
        battery.close()

    by_same = {same(mutant): mutant for _, mutant in todo}
    workers = [threading.Thread(target=work) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {mutant: noticed[key] for key, mutant in by_same.items()}


def explained(mutant: Mutant, where: dict) -> list[tuple]:
    return [key for key in where if key[0] == mutant.file and key[1] in mutant.text and key[2] == mutant.shift]


def test_without_a_mutant_nothing_is_noticed(fates):
    unchanged = {mutant.file: fate for mutant, fate in fates.items() if mutant.kind == "none"}
    assert unchanged == dict.fromkeys(FILES)


def test_every_deleted_barrier_is_caught_by_the_simulator(fates):
    barriers = {f"{mutant.line} of {mutant}": fate for mutant, fate in fates.items() if mutant.kind == "barrier"}
    # Only what the portable kernels include: the simulator runs no PTX, so headers of one architecture are not its own.
    texts = {name: text for file in FILES for name, text in toolchain.sources(file).items()}
    code = "".join(mutants.mutated(name, text) for name, text in texts.items())
    assert len(barriers) == code.count("__syncthreads") >= 6
    assert set(barriers.values()) <= {"SharedRace", "UninitialisedRead", "MismatchedBarrier"}, barriers


def test_every_shifted_bound_is_caught_or_explained(fates):
    survivors = [m for m, fate in fates.items() if fate in (None, "crash") and m.kind != "none"]
    unexplained = [str(m) for m in survivors if not explained(m, SURVIVORS) and not explained(m, OPEN)]
    assert unexplained == []
    used = Counter(key for m in survivors for key in explained(m, SURVIVORS))
    assert set(used) == set(SURVIVORS), "explanations of mutants that are caught"
    assert all(explained(m, OPEN) for m, fate in fates.items() if fate == "crash")
    assert all(any(explained(m, OPEN) == [key] for m in fates) for key in OPEN), "explanations of what is no mutant"

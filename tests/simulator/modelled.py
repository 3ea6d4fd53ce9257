"""A few kernels in plain Python that record themselves as the simulator's runtime does.

A Block keeps real memory, so a kernel that is modelled wrongly computes the wrong result. Sectors, lines and
passes over the banks are counted here access by access, from their definitions.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from twell_lab.simulator.report import FOOTPRINT, LANES, SITES, STEPS, ArrayInfo
from twell_lab.simulator.symbols import Line

READ, WRITE, ATOMIC, BRANCH, WARP, BARRIER, WATCH = range(7)


def bf16_bytes(values) -> np.ndarray:
    """Values that bfloat16 holds exactly, as its bytes."""
    bits = np.asarray(values, np.float32).reshape(-1).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "not a bfloat16"
    return (bits >> 16).astype(np.uint16).view(np.uint8)


def rounded(values) -> np.ndarray:
    """The nearest bfloat16 towards zero, as float32."""
    return (np.asarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


class Block:
    """One block of `threads` threads. lines: pc -> Line; arrays: their bytes are copied."""

    def __init__(self, threads: int, lines: dict[int, Line], arrays: list[ArrayInfo], names: tuple = ()) -> None:
        self.threads, self.lines, self.arrays, self.names = threads, lines, arrays, names
        self.memory = [np.zeros(a.nbytes, np.uint8) if a.before is None else a.before.copy() for a in arrays]
        self.steps, self.lanes, self.sites = [], [], {}
        self.touched = {READ: set(), WRITE: set()}

    def number(self, name: str) -> int:
        return next(i for i, array in enumerate(self.arrays) if array.name == name)

    def _step(self, path, kind, space, size, lanes, name=-1) -> None:
        """lanes: (thread, array, offset, bytes of the value)."""
        self.steps.append(
            (lanes[0][0] // 32, kind, space, size, _padded(path), len(path), 0, len(self.lanes), len(lanes), name)
        )
        for thread, array, offset, value in lanes:
            self.lanes.append((thread, array, offset, np.frombuffer(bytes(value).ljust(16, b"\0"), np.uint8)))

    def _site(self, path, kind, space, **more) -> None:
        self.sites.setdefault((tuple(path), kind, space), Counter()).update(more)

    def access(self, kind, name, path, places: dict[int, int], values: dict[int, int] | None = None, count: int = 1):
        """Read (returns thread -> raw value), or write, the elements `places` (thread -> element) of an array."""
        number = self.number(name)
        array, size = self.arrays[number], self.arrays[number].itemsize * count
        shared = array.space == "shared"
        lanes = []
        for thread, element in places.items():
            offset = element * array.itemsize
            cell = self.memory[number][offset : offset + size]
            if kind != READ:
                cell[:] = np.frombuffer(int(values[thread]).to_bytes(size, "little"), np.uint8)
            lanes.append((thread, number, offset, cell.tobytes()))
        space = 2 if shared else 1
        self._step(path, kind, space, size, lanes)
        touched = [(offset + b) for _, _, offset, value in lanes for b in range(len(value))]
        sectors = {byte // 32 for byte in touched}
        banks = Counter(word % 32 for word in {byte // 4 for byte in touched})
        self._site(
            path,
            kind,
            space,
            requests=1,
            accesses=len(lanes),
            bytes=size * len(lanes),
            sectors=0 if shared else len(sectors),
            lines=0 if shared else len({byte // 128 for byte in touched}),
            wavefronts=max(banks.values()) if shared else 0,
            ideal_wavefronts=-(-len({byte // 4 for byte in touched}) // 32) if shared else 0,
        )
        for way, not_it in ((READ, WRITE), (WRITE, READ)):
            if not shared and kind != not_it:  # an atomic is both
                self.touched[way] |= {(number, sector) for sector in sectors}
        return {thread: int.from_bytes(value, "little") for thread, _, _, value in lanes}

    def collective(self, path, results: dict[int, int]) -> None:
        self._step(path, WARP, 0, 8, [(thread, -1, 0, int(r).to_bytes(8, "little")) for thread, r in results.items()])
        self._site(path, WARP, 0, requests=1, accesses=len(results))

    def barrier(self, path, threads) -> None:
        for warp in sorted({thread // 32 for thread in threads}):
            mine = [thread for thread in threads if thread // 32 == warp]
            self._step(path, BARRIER, 0, 0, [(thread, -1, 0, b"") for thread in mine])
            self._site(path, BARRIER, 0, requests=1, accesses=len(mine))

    def watch(self, path, name, values: dict[int, float]) -> None:
        self._step(
            path,
            WATCH,
            0,
            8,
            [(thread, -1, 0, np.float64(v).tobytes()) for thread, v in values.items()],
            self.names.index(name),
        )

    def branch(self, path, ways: dict[int, object]) -> None:
        self._site(path, BRANCH, 0, requests=1, accesses=len(ways), divergent=int(len(set(ways.values())) > 1))

    def raw(self) -> dict[str, np.ndarray]:
        """sites, footprint, steps and lanes, in the runtime's layout."""
        sites = np.zeros(len(self.sites), SITES)
        for row, ((path, kind, space), sums) in zip(sites, self.sites.items(), strict=True):
            row["path"], row["depth"], row["kind"], row["space"] = _padded(path), len(path), kind, space
            for name, value in sums.items():
                row[name] = value
        used = [i for i, array in enumerate(self.arrays) if array.space == "global"]
        reads, writes = ([sum(number == i for number, _ in self.touched[kind]) for i in used] for kind in (READ, WRITE))
        footprint = list(zip(used, reads, writes, reads, strict=True))  # one block: what it read is what was read
        return {
            "sites": sites,
            "footprint": np.array(footprint, FOOTPRINT),
            "steps": np.array(self.steps, STEPS),
            "lanes": np.array(self.lanes, LANES),
        }


def _padded(path) -> np.ndarray:
    return np.array(list(path) + [0] * (12 - len(path)), np.uint64)


# ---- packing, as kernels/smxx_pack.cu does it, for whole tiles and bfloat16 ----

PACK_LINES = {
    100: Line("smxx_pack.cu", 41, "const value_t v = in[c];", "pack_v1"),
    101: Line("smxx_pack.cu", 44, "if (count < words) out[count] = make_word(v, c);", "pack_v1"),
    102: Line("smxx_pack.cu", 46, "out[0] = count;  // the true count, also when it exceeds the slots", "pack_v1"),
    103: Line("smxx_pack.cu", 42, "if (!kept(v)) continue;", "pack_v1"),
    200: Line("smxx_pack.cu", 63, "const value_t v = c < width ? in[c] : from_float(0.0f);", "pack_v2"),
    201: Line("smxx_pack.cu", 64, "const unsigned here = __ballot_sync(ALL_LANES, kept(v));", "pack_v2"),
    202: Line("smxx_pack.cu", 67, "if (kept(v) && slot < words) out[slot] = make_word(v, c);", "pack_v2"),
    203: Line("smxx_pack.cu", 68, "count += __popc(here);", "pack_v2"),
    204: Line("smxx_pack.cu", 70, "if (lane == 0) out[0] = count;", "pack_v2"),
}


def pack_arrays(gate: np.ndarray, tile: int, words: int) -> list[ArrayInfo]:
    """gate: float32 [rows, columns] that bfloat16 holds; columns a multiple of tile."""
    rows, columns = gate.shape
    shape = (rows, columns // tile, words)
    return [
        ArrayInfo("gate", "global", "bfloat16", gate.shape, bf16_bytes(gate)),
        ArrayInfo("packed", "global", np.dtype("i4"), shape, np.zeros(4 * int(np.prod(shape)), np.uint8)),
    ]


def pack_v1(gate: np.ndarray, tile: int, words: int) -> Block:
    """One thread a tile; all tiles in one block."""
    tiles = gate.size // tile
    block = Block(tiles, PACK_LINES, pack_arrays(gate, tile, words))
    count = dict.fromkeys(range(tiles), 0)
    for warp in range(0, tiles, 32):
        mine = range(warp, min(warp + 32, tiles))
        for c in range(tile):
            v = block.access(READ, "gate", [100], {t: t * tile + c for t in mine})
            kept = {t: _fires(v[t]) for t in mine}
            block.branch([103], kept)
            for t in mine:
                count[t] += kept[t]
            out = {t: t * words + count[t] for t in mine if kept[t] and count[t] < words}
            if out:
                block.access(WRITE, "packed", [101], out, {t: v[t] << 16 | c for t in out})
        block.access(WRITE, "packed", [102], {t: t * words for t in mine}, {t: count[t] for t in mine})
    return block


def pack_v2(gate: np.ndarray, tile: int, words: int) -> Block:
    """One warp a tile; all tiles in one block. Watches `count`."""
    tiles = gate.size // tile
    block = Block(32 * tiles, PACK_LINES, pack_arrays(gate, tile, words), ("count",))
    for item in range(tiles):
        mine, count = range(32 * item, 32 * item + 32), 0
        for base in range(0, tile, 32):
            v = block.access(READ, "gate", [200], {t: item * tile + base + t % 32 for t in mine})
            kept = sum(_fires(v[t]) << t % 32 for t in mine)
            block.collective([201], dict.fromkeys(mine, kept))
            slot = {t: count + 1 + (kept & ((1 << t % 32) - 1)).bit_count() for t in mine}
            out = {t: item * words + slot[t] for t in mine if _fires(v[t]) and slot[t] < words}
            if out:
                block.access(WRITE, "packed", [202], out, {t: v[t] << 16 | base + t % 32 for t in out})
            count += kept.bit_count()
            block.watch([203], "count", dict.fromkeys(mine, float(count)))
        block.access(WRITE, "packed", [204], {mine[0]: item * words}, {mine[0]: count})
    return block


def _fires(bits: int) -> bool:
    return not np.uint32(bits << 16).view(np.float32) <= 0


# ---- a sum through shared memory, two warps and two barriers ----

SUM_LINES = {
    300: Line("sum.cu", 3, "part[threadIdx.x] = x[threadIdx.x];", "block_sum"),
    301: Line("sum.cu", 4, "__syncthreads();", "block_sum"),
    302: Line("sum.cu", 5, "for (int i = 0; i < 2; ++i) total += load(part, i);", "block_sum"),
    303: Line("helpers.cuh", 9, "return p[32 * i + threadIdx.x % 32];", "load"),
    304: Line("sum.cu", 6, "__syncthreads();", "block_sum"),
    305: Line("sum.cu", 7, "atomicAdd(y, total);", "block_sum"),
}


def block_sum(x: np.ndarray) -> Block:
    """64 threads copy x into shared memory, read it across the warps, and add to y with atomics."""
    arrays = [
        ArrayInfo("x", "global", np.dtype("f4"), (64,), x.astype(np.float32).view(np.uint8)),
        ArrayInfo("y", "global", np.dtype("f4"), (32,), np.zeros(128, np.uint8)),
        ArrayInfo("part", "shared", np.dtype("f4"), (64,), None),
    ]
    block = Block(64, SUM_LINES, arrays)
    warps = [range(0, 32), range(32, 64)]
    for mine in warps:
        v = block.access(READ, "x", [300], {t: t for t in mine})
        block.access(WRITE, "part", [300], {t: t for t in mine}, v)
    block.barrier([301], range(64))
    for mine in warps:
        for i in range(2):
            block.access(READ, "part", [302, 303], {t: 32 * i + t % 32 for t in mine})
    block.barrier([304], range(64))
    for mine in warps:
        for t in mine:
            old = np.frombuffer(block.memory[1][4 * (t % 32) : 4 * (t % 32) + 4].tobytes(), np.float32)[0]
            new = np.float32(old + x[t])
            block.access(ATOMIC, "y", [305], {t: t % 32}, {t: int(np.float32(new).view(np.uint32))})
    return block

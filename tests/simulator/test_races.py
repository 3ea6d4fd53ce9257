"""Small kernels that are wrong, with the fault that each must give, and small ones that are right and must run without
one and give NumPy's values: on one core and on two. A record of kind `sanitizer` says what the four tools of NVIDIA's
compute-sanitizer report of the same kernels on a GPU; WHY says where they and the simulator differ.

Every kernel is `k(int* a, int* b, const int* x)` with a and b of 1,024 zeros and x of 1,024 small numbers; T is the
thread in its block, B the block, N the threads of a block."""

from dataclasses import dataclass

import numpy as np
import pytest

from twell_lab import records, simulator
from twell_lab.core import CompileError
from twell_lab.simulator import faults

pytestmark = pytest.mark.skipif(not simulator.available(), reason="the simulator needs a C++ compiler")
X = np.random.default_rng(0).integers(-9, 10, 1024).astype(np.int32)
COMMON = """
#define T ((int)threadIdx.x)
#define B ((int)blockIdx.x)
#define N ((int)blockDim.x)
#define ALL 0xffffffffu
__device__ int counter, other_counter, total, table[64], flags[64];
__constant__ int fixed[4] = {1, 2, 3, 4};
struct Pair { float re, im; };
__device__ int deep(int n) { return n ? 1 + deep(n - 1) : 0; }
__device__ int endless(int n) { return n == -5 ? 0 : 1 + endless(n + 1); }
__device__ int warp_sum(int v) {
    for (int by = 16; by; by /= 2) v += __shfl_down_sync(ALL, v, by);
    return v;
}
"""


@dataclass(frozen=True)
class Wrong:
    """body: of the kernel; fault: what a launch of grid x block raises."""

    body: str
    fault: type
    block: int = 64
    grid: int = 1


@dataclass(frozen=True)
class Right:
    """body: of the kernel; a: x -> what the first values of a are afterwards."""

    body: str
    a: object
    block: int = 64
    grid: int = 1


SHARED = "__shared__ int s[64]; "
WRONG = {
    # shared memory: a barrier is missing
    "reversed": Wrong(SHARED + "s[T] = x[T]; a[T] = s[63 - T];", faults.SharedRace),
    "neighbour": Wrong(SHARED + "s[T] = x[T]; a[T] = s[T ? T - 1 : 0];", faults.SharedRace),
    "one_writes_all_read": Wrong("__shared__ int s; if (T == 0) s = 5; a[T] = s;", faults.SharedRace),
    "all_write_one": Wrong("__shared__ int s; s = T; __syncthreads(); a[T] = s;", faults.SharedRace),
    "reduction_without_the_inner_barrier": Wrong(
        SHARED
        + "s[T] = x[T]; __syncthreads(); for (int by = 32; by; by /= 2) if (T < by) s[T] += s[T + by]; if (T == 0) a[0] = s[0];",
        faults.SharedRace,
    ),
    "scan_in_place": Wrong(
        SHARED + "s[T] = x[T]; __syncthreads(); for (int by = 1; by < 64; by *= 2)"
        " { if (T >= by) s[T] += s[T - by]; __syncthreads(); } a[T] = s[T];",
        faults.SharedRace,
    ),
    "next_tile_too_early": Wrong(
        SHARED + "int sum = 0; for (int t = 0; t < 4; ++t) { s[T] = x[64 * t + T]; __syncthreads(); sum += s[63 - T]; }"
        " a[T] = sum;",
        faults.SharedRace,
    ),
    "warp_sync_between_warps": Wrong(SHARED + "s[T] = x[T]; __syncwarp(); a[T] = s[63 - T];", faults.SharedRace),
    "warp_without_sync": Wrong(SHARED + "s[T] = x[T]; a[T] = s[T ^ 1];", faults.SharedRace, block=32),
    "volatile_shared": Wrong(
        "__shared__ volatile int s[64]; s[T] = x[T]; a[T] = s[T ^ 1];", faults.SharedRace, block=32
    ),
    "zeroed_then_counted": Wrong(
        "__shared__ int s; if (T == 0) s = 0; atomicAdd(&s, 1); __syncthreads(); a[T] = s;", faults.SharedRace
    ),
    "counted_then_read": Wrong(
        "__shared__ int s; if (T == 0) s = 0; __syncthreads(); atomicAdd(&s, 1); if (T == 63) a[0] = s;",
        faults.SharedRace,
    ),
    "counted_then_cleared": Wrong(
        "__shared__ int s; if (T == 0) s = 0; __syncthreads(); atomicAdd(&s, 1); if (T == 63) s = 0; a[T] = T;",
        faults.SharedRace,
    ),
    "bytes_of_one_word_shared": Wrong(
        "__shared__ char s[64]; s[T] = 1; s[T ^ 1] = 2; __syncthreads(); a[T] = s[T];", faults.SharedRace
    ),
    # arrays and variables of the device
    "global_reversed": Wrong("a[T] = x[T]; b[T] = a[63 - T];", faults.GlobalRace),
    "shift_in_place": Wrong("a[T] = a[T + 1];", faults.GlobalRace),
    "one_word_of_all": Wrong("a[0] += x[T];", faults.GlobalRace),
    "one_word_of_blocks": Wrong("a[0] += 1;", faults.GlobalRace, block=1, grid=8),
    "same_value_of_blocks": Wrong("a[T] = 1;", faults.GlobalRace, grid=2),
    "block_reads_anothers": Wrong("a[64 * B + T] = x[T]; b[T] = a[T];", faults.GlobalRace, grid=2),
    "block_overwrites_what_another_reads": Wrong("if (B == 0) b[T] = a[T]; else a[T] = 1;", faults.GlobalRace, grid=2),
    "stored_then_counted": Wrong("if (T == 0) a[0] = 5; atomicAdd(a, 1);", faults.GlobalRace),
    "global_counted_then_read": Wrong("atomicAdd(a, 1); if (T == 63) a[1] = a[0];", faults.GlobalRace),
    "read_beside_atomics": Wrong("if (a[0] < 50) atomicAdd(a, 1);", faults.GlobalRace),
    "atomic_elsewhere": Wrong("atomicAdd(b, 1); a[0] += 1;", faults.GlobalRace, block=1, grid=8),
    "device_array": Wrong("table[T] = T; a[T] = table[63 - T];", faults.GlobalRace),
    "device_variable": Wrong("total += 1;", faults.GlobalRace, block=1, grid=8),
    "device_variable_read": Wrong("atomicAdd(&total, 1); a[T] = total;", faults.GlobalRace),
    "last_block_without_fence": Wrong(
        "a[1 + B] = 1; if (atomicAdd(&counter, 1) == 7) { for (int i = 0; i < 8; ++i) a[0] += a[1 + i]; counter = 0; }",
        faults.GlobalRace,
        block=1,
        grid=8,
    ),
    "last_block_without_barrier": Wrong(
        "__shared__ bool last; b[64 * B + T] = 1; __threadfence(); if (T == 0) last = atomicAdd(&counter, 1) == 3;"
        " __syncthreads(); if (!last) return; if (T == 0) { for (int i = 0; i < 256; ++i) a[0] += b[i]; counter = 0; }",
        faults.GlobalRace,
        grid=4,
    ),
    "flag_without_fence": Wrong(
        "if (B == 0) { a[0] = 7; atomicExch(b, 1); } else { while (!atomicAdd(b, 0)) {} a[1] = a[0]; }",
        faults.GlobalRace,
        block=1,
        grid=2,
    ),
    "volatile_flag_without_fence": Wrong(
        "volatile int* flag = b; if (B == 0) { a[0] = 7; *flag = 1; } else { while (!*flag) {} a[1] = a[0]; }",
        faults.GlobalRace,
        block=1,
        grid=2,
    ),
    "fence_of_the_block_for_the_grid": Wrong(
        "if (B == 0) { a[0] = 7; __threadfence_block(); atomicExch(b, 1); }"
        " else { while (!atomicAdd(b, 0)) {} a[1] = a[0]; }",
        faults.GlobalRace,
        block=1,
        grid=2,
    ),
    "fence_after_the_flag": Wrong(
        "if (B == 0) { a[0] = 7; atomicExch(b, 1); __threadfence(); }"
        " else { while (!atomicAdd(b, 0)) {} a[1] = a[0]; }",
        faults.GlobalRace,
        block=1,
        grid=2,
    ),
    "another_flag": Wrong(
        "if (B == 0) { a[0] = 7; __threadfence(); atomicExch(b, 1); } else { atomicAdd(b + 1, 0); a[1] = a[0]; }",
        faults.GlobalRace,
        block=1,
        grid=2,
    ),
    "vector_over_a_scalar": Wrong(
        "if (T == 0) *(int4*)a = make_int4(1, 2, 3, 4); else a[T % 4] = 1;", faults.GlobalRace
    ),
    "halves_of_one_word": Wrong("((short*)a)[T / 2] = 1;", faults.GlobalRace),
    # barriers and warps
    "barrier_in_a_branch": Wrong("if (T < 32) __syncthreads(); a[T] = 1; __syncthreads();", faults.MismatchedBarrier),
    "two_barriers": Wrong("if (T < 32) __syncthreads(); else { a[T] = 1; __syncthreads(); }", faults.MismatchedBarrier),
    "barrier_in_an_uneven_loop": Wrong(
        "for (int i = 0; i < 1 + T / 32; ++i) __syncthreads(); a[T] = 1; __syncthreads();", faults.MismatchedBarrier
    ),
    "shuffle_in_a_branch": Wrong(
        "int v = T; if (T < 16) v = __shfl_sync(ALL, v, 0); else __syncwarp(); a[T] = v;", faults.MismatchedBarrier, 32
    ),
    "shuffle_at_two_places": Wrong(
        "int v = T; if (T < 16) v = __shfl_xor_sync(ALL, v, 1); else v = __shfl_xor_sync(ALL, v, 2); a[T] = v;",
        faults.WarpFault,
        block=32,
    ),
    "ballot_at_two_places": Wrong(
        "if (T < 16) a[T] = __ballot_sync(ALL, 1); else a[T] = __ballot_sync(ALL, T > 20);", faults.WarpFault, 32
    ),
    "two_masks": Wrong("a[T] = __shfl_xor_sync(T < 16 ? 0x1ffffu : ALL, T, 1);", faults.WarpFault, block=32),
    "sync_with_two_masks": Wrong("__syncwarp(T < 16 ? 0x1ffffu : ALL); a[T] = T;", faults.WarpFault, block=32),
    "mask_without_the_caller": Wrong("a[T] = __shfl_sync(0xffffu, T, 0);", faults.WarpFault, block=32),
    "lane_out_of_the_mask": Wrong("if (T < 16) a[T] = __shfl_sync(0xffffu, T, 20);", faults.WarpFault, block=32),
    "width_24": Wrong("a[T] = __shfl_xor_sync(ALL, T, 1, 24);", faults.WarpFault, block=32),
    "width_0": Wrong("a[T] = __shfl_sync(ALL, T, 1, 0);", faults.WarpFault, block=32),
    "width_64": Wrong("a[T] = __shfl_down_sync(ALL, T, 1, 64);", faults.WarpFault, block=32),
    # bounds, alignment, initialisation
    "past_the_end": Wrong("a[1024 + T] = 1;", faults.OutOfBounds),
    "before_the_start": Wrong("a[T - 1] = x[T];", faults.OutOfBounds),
    "past_the_end_of_shared": Wrong(SHARED + "s[T + 1] = x[T]; a[T] = 1;", faults.OutOfBounds),
    "past_the_end_of_a_device_array": Wrong("table[T + 1] = 1;", faults.OutOfBounds),
    "negative_shared": Wrong(SHARED + "s[T - 1] = x[T]; a[T] = 1;", faults.OutOfBounds),
    "own_array": Wrong(
        "int own[4] = {}; for (int i = 0; i <= 4; ++i) own[i] = x[i]; a[T] = own[0];", faults.OutOfBounds
    ),
    "vector_at_a_word": Wrong("int4 v = ((const int4*)(x + 1))[T]; a[T] = v.x;", faults.Misaligned),
    "float_at_a_byte": Wrong(
        "__shared__ char s[64]; s[T] = 1; __syncthreads(); a[T] = (int)*(float*)(s + 1);", faults.Misaligned
    ),
    "float_at_two_bytes": Wrong(
        "__shared__ char s[64]; s[T] = 1; __syncthreads(); a[T] = (int)*(float*)(s + 2);", faults.Misaligned
    ),
    "double_at_four_bytes": Wrong(
        "__shared__ double s[8]; if (T == 0) s[0] = s[1] = 1; __syncthreads(); a[T] = (int)*(double*)((char*)s + 4);",
        faults.Misaligned,
    ),
    "double_stored_at_four_bytes": Wrong(
        "__shared__ double s[8]; if (T == 0) *(double*)((char*)s + 12) = 1; a[T] = T;", faults.Misaligned
    ),
    "float2_at_four_bytes": Wrong(
        "__shared__ float2 s[4]; if (T < 4) s[T] = make_float2(T, T); __syncthreads(); float2 v = *(float2*)((float*)s + 1);"
        " a[T] = (int)v.x;",
        faults.Misaligned,
    ),
    "float4_at_eight_bytes": Wrong(
        "if (T == 0) { float4* to = (float4*)(table + 2); *to = make_float4(1, 2, 3, 4); }", faults.Misaligned
    ),
    "unwritten_shared": Wrong(SHARED + "if (T < 32) s[T] = 1; __syncthreads(); a[T] = s[T];", faults.UninitialisedRead),
    "unzeroed_count": Wrong("__shared__ int s; atomicAdd(&s, 1); __syncthreads(); a[T] = s;", faults.UninitialisedRead),
    "constant_written": Wrong("int* p = (int*)fixed; p[T % 4] = 1;", faults.ConstantWrite),
    # values and limits
    "division": Wrong("a[T] = 5 / (x[T] - x[T]);", faults.DivisionByZero),
    "endless_recursion": Wrong("a[T] = endless(x[T] & 1);", faults.StackOverflow),
    "large_own_array": Wrong("char own[600 << 10]; own[T] = 1; own[500000] = 2; a[T] = own[T];", faults.StackOverflow),
    "assertion": Wrong("assert(x[T] > 100);", faults.AssertionFault),
}
RIGHT = {
    "copy": Right("a[T] = x[T];", lambda x: x[:64]),
    "guarded": Right("int i = 64 * B + T; if (i < 100) a[i] = 2 * x[i];", lambda x: 2 * x[:100], grid=2),
    "reversed": Right(SHARED + "s[T] = x[T]; __syncthreads(); a[T] = s[63 - T];", lambda x: x[63::-1]),
    "reversed_in_global": Right(
        "a[T] = x[T]; __syncthreads(); b[T] = a[63 - T]; __syncthreads(); a[T] = b[T];", lambda x: x[63::-1]
    ),
    "neighbours_with_halo": Right(
        "__shared__ int s[66]; s[T + 1] = x[64 * B + T]; if (T == 0) s[0] = B ? x[64 * B - 1] : 0;"
        " if (T == 63) s[65] = x[64 * B + 64]; __syncthreads(); a[64 * B + T] = s[T] + s[T + 1] + s[T + 2];",
        lambda x: np.convolve(np.concatenate([[0], x[:129]]), [1, 1, 1], "valid")[:128],
        grid=2,
    ),
    "reduction": Right(
        SHARED + "s[T] = x[T]; __syncthreads();"
        " for (int by = 32; by; by /= 2) { if (T < by) s[T] += s[T + by]; __syncthreads(); } if (T == 0) a[0] = s[0];",
        lambda x: [x[:64].sum()],
    ),
    "reduction_of_a_warp": Right("int v = warp_sum(x[T]); if (T == 0) a[0] = v;", lambda x: [x[:32].sum()], block=32),
    "reduction_of_warps": Right(
        "__shared__ int s[2]; int v = warp_sum(x[T]); if (T % 32 == 0) s[T / 32] = v; __syncthreads();"
        " if (T == 0) a[0] = s[0] + s[1];",
        lambda x: [x[:64].sum()],
    ),
    "butterfly": Right(
        "int v = x[T]; for (int by = 16; by; by /= 2) v += __shfl_xor_sync(ALL, v, by); a[T] = v;",
        lambda x: np.repeat([x[:32].sum(), x[32:64].sum()], 32),
    ),
    "warp_exchange": Right(
        SHARED + "s[T] = x[T]; __syncwarp(); a[T] = s[T ^ 1];", lambda x: x[:64].reshape(-1, 2)[:, ::-1]
    ),
    "scan": Right(
        "__shared__ int s[2][64]; int from = 0; s[0][T] = x[T]; __syncthreads(); for (int by = 1; by < 64; by *= 2)"
        " { s[1 - from][T] = s[from][T] + (T >= by ? s[from][T - by] : 0); from = 1 - from; __syncthreads(); }"
        " a[T] = s[from][T];",
        lambda x: np.cumsum(x[:64]),
    ),
    "scan_in_place": Right(
        SHARED + "s[T] = x[T]; __syncthreads(); for (int by = 1; by < 64; by *= 2)"
        " { int v = T >= by ? s[T - by] : 0; __syncthreads(); s[T] += v; __syncthreads(); } a[T] = s[T];",
        lambda x: np.cumsum(x[:64]),
    ),
    "scan_by_shuffles": Right(
        "int v = x[T]; for (int by = 1; by < 32; by *= 2) { int u = __shfl_up_sync(ALL, v, by); if (T >= by) v += u; } a[T] = v;",
        lambda x: np.cumsum(x[:32]),
        block=32,
    ),
    "histogram": Right(
        "atomicAdd(&a[x[64 * B + T] + 9], 1);", lambda x: np.bincount(x[:512] + 9, minlength=19), grid=8
    ),
    "histogram_in_shared": Right(
        "__shared__ int s[19]; if (T < 19) s[T] = 0; __syncthreads(); atomicAdd(&s[x[64 * B + T] + 9], 1); __syncthreads();"
        " if (T < 19) atomicAdd(&a[T], s[T]);",
        lambda x: np.bincount(x[:512] + 9, minlength=19),
        grid=8,
    ),
    "counted_then_read": Right(
        "__shared__ int s; if (T == 0) s = 0; __syncthreads(); atomicAdd(&s, 1); __syncthreads(); a[T] = s;",
        lambda x: np.full(64, 64),
    ),
    "maximum": Right("atomicMax(a, x[64 * B + T]);", lambda x: [max(0, x[:512].max())], grid=8),
    "appended": Right("if (x[T] > 0) { int i = atomicAdd(b, 1); a[i] = 1; }", lambda x: np.ones((x[:64] > 0).sum())),
    "compacted_by_ballot": Right(
        "unsigned fires = __ballot_sync(ALL, x[T] > 0); if (x[T] > 0) a[__popc(fires & ((1u << T) - 1))] = x[T];",
        lambda x: x[:32][x[:32] > 0],
        block=32,
    ),
    "compare_and_swap": Right(
        "int old = a[0] * 0; for (;;) { int seen = atomicCAS(a, old, old + x[T]); if (seen == old) break; old = seen; }",
        lambda x: [x[0]],
        block=1,
    ),
    "two_pass_sum": Right(
        "atomicAdd(&b[B], x[64 * B + T]); __threadfence(); __syncthreads();"
        " if (T == 0 && atomicAdd(&counter, 1) == 3) { for (int i = 0; i < 4; ++i) a[0] += b[i]; counter = 0; }",
        lambda x: [x[:256].sum()],
        grid=4,
    ),
    "last_block": Right(
        "__shared__ bool last; if (T == 0) { b[B] = 1; __threadfence(); last = atomicAdd(&counter, 1) == 7; }"
        " __syncthreads(); if (last && T == 0) { for (int i = 0; i < 8; ++i) a[0] += b[i]; counter = 0; }",
        lambda x: [8],
        grid=8,
    ),
    "last_block_all_write": Right(
        "__shared__ bool last; b[64 * B + T] = x[64 * B + T]; __syncthreads(); if (T == 0) { __threadfence();"
        " last = atomicAdd(&counter, 1) == 3; } __syncthreads(); if (!last) return; int sum = 0;"
        " for (int i = 0; i < 4; ++i) sum += b[64 * i + T]; a[T] = sum; if (T == 0) counter = 0;",
        lambda x: x[:256].reshape(4, 64).sum(0),
        grid=4,
    ),
    "last_block_fence_before_barrier": Right(
        "__shared__ bool last; b[64 * B + T] = x[64 * B + T]; __threadfence(); __syncthreads();"
        " if (T == 0) last = atomicAdd(&counter, 1) == 3; __syncthreads(); if (!last) return; __threadfence(); int sum = 0;"
        " for (int i = 0; i < 4; ++i) sum += b[64 * i + T]; a[T] = sum; if (T == 0) counter = 0;",
        lambda x: x[:256].reshape(4, 64).sum(0),
        grid=4,
    ),
    "last_warp": Right(
        "b[64 * B + T] = x[64 * B + T]; __threadfence(); __syncwarp(); int before = 0;"
        " if (T % 32 == 0) before = atomicAdd(&counter, 1); if (__shfl_sync(ALL, before, 0) != 3) return; __threadfence();"
        " int sum = 0; for (int i = 0; i < 4; ++i) sum += b[32 * i + T % 32]; a[T % 32] = sum; if (T % 32 == 0) counter = 0;",
        lambda x: x[:128].reshape(4, 32).sum(0),
        grid=2,
    ),
    "flag": Right(
        "if (B == 0) { a[0] = 7; __threadfence(); atomicExch(b, 1); }"
        " else { while (!atomicAdd(b, 0)) {} __threadfence(); a[1] = a[0]; }",
        lambda x: [7, 7],
        block=1,
        grid=2,
    ),
    "volatile_flag": Right(
        "volatile int* flag = b; if (B == 0) { a[0] = 7; __threadfence(); *flag = 1; }"
        " else { while (!*flag) {} __threadfence(); a[1] = a[0]; }",
        lambda x: [7, 7],
        block=1,
        grid=2,
    ),
    "flag_of_a_block": Right(
        "if (B == 0) { a[T] = x[T]; __syncthreads(); if (T == 0) { __threadfence(); atomicExch(b, 1); } }"
        " else { if (T == 0) while (!atomicAdd(b, 0)) {} __syncthreads(); a[64 + T] = a[63 - T]; }",
        lambda x: np.concatenate([x[:64], x[63::-1]]),
        grid=2,
    ),
    "chain_of_blocks": Right(
        "if (B) { while (!atomicAdd(&b[B - 1], 0)) {} __threadfence(); } a[B] = x[B] + (B ? a[B - 1] : 0);"
        " __threadfence(); atomicExch(&b[B], 1);",
        lambda x: np.cumsum(x[:6]),
        block=1,
        grid=6,
    ),
    "chain_hands_on": Right(
        "if (B) { while (!atomicAdd(&b[B - 1], 0)) {} __threadfence(); } else a[0] = 5; if (B) a[B] = a[0];"
        " __threadfence(); atomicExch(&b[B], 1);",
        lambda x: [5] * 6,
        block=1,
        grid=6,
    ),
    "lock": Right(
        "while (atomicCAS(b, 0, 1)) {} __threadfence(); a[0] += x[B]; __threadfence(); atomicExch(b, 0);",
        lambda x: [x[:6].sum()],
        block=1,
        grid=6,
    ),
    "ticket": Right(
        "int mine = atomicAdd(b, 1); while (atomicAdd(b + 1, 0) != mine) {} __threadfence(); a[0] += x[B];"
        " __threadfence(); atomicAdd(b + 1, 1);",
        lambda x: [x[:6].sum()],
        block=1,
        grid=6,
    ),
    "double_buffer": Right(
        "__shared__ int s[2][64]; int sum = 0; s[0][T] = x[T]; __syncthreads(); for (int t = 0; t < 4; ++t)"
        " { if (t < 3) s[(t + 1) % 2][T] = x[64 * (t + 1) + T]; sum += s[t % 2][63 - T]; __syncthreads(); } a[T] = sum;",
        lambda x: x[:256].reshape(4, 64)[:, ::-1].sum(0),
    ),
    "tiles_with_both_barriers": Right(
        SHARED + "int sum = 0; for (int t = 0; t < 4; ++t) { s[T] = x[64 * t + T]; __syncthreads(); sum += s[63 - T];"
        " __syncthreads(); } a[T] = sum;",
        lambda x: x[:256].reshape(4, 64)[:, ::-1].sum(0),
    ),
    "producer_and_consumer_warps": Right(
        "__shared__ int s[2][32]; for (int t = 0; t < 5; ++t) { if (T < 32 && t < 4) s[t % 2][T] = x[32 * t + T];"
        " if (T >= 32 && t) a[32 * (t - 1) + T - 32] = s[(t - 1) % 2][T - 32]; __syncthreads(); }",
        lambda x: x[:128],
    ),
    "matrix_product": Right(
        "__shared__ int p[8][8], q[8][8]; int i = T / 8, j = T % 8; p[i][j] = x[T]; q[i][j] = x[64 + T]; __syncthreads();"
        " int sum = 0; for (int k = 0; k < 8; ++k) sum += p[i][k] * q[k][j]; a[T] = sum;",
        lambda x: x[:64].reshape(8, 8) @ x[64:128].reshape(8, 8),
    ),
    "transpose": Right(
        "__shared__ int s[8][9]; s[T / 8][T % 8] = x[T]; __syncthreads(); a[T] = s[T % 8][T / 8];",
        lambda x: x[:64].reshape(8, 8).T,
    ),
    "early_exit": Right("if (T >= 40) return; __syncthreads(); a[T] = x[T];", lambda x: x[:40]),
    "early_exit_of_lanes": Right(
        "if (T >= 20) return; a[T] = __shfl_sync(ALL, x[T], 3);", lambda x: [x[3]] * 20, block=32
    ),
    "part_of_a_warp": Right(
        "int v = x[T]; if (T < 16) v = __shfl_xor_sync(0xffffu, v, 1); __syncwarp(); a[T] = v;",
        lambda x: np.concatenate([x[:16].reshape(-1, 2)[:, ::-1].ravel(), x[16:32]]),
        block=32,
    ),
    "narrow_shuffle": Right("a[T] = __shfl_sync(ALL, x[T], 0, 8);", lambda x: np.repeat(x[:32:8], 8), block=32),
    "function_called_at_two_places": Right(
        "int v; if (B) v = warp_sum(x[T]); else v = warp_sum(2 * x[T]); if (T == 0) a[B] = v;",
        lambda x: [2 * x[:32].sum(), x[:32].sum()],
        block=32,
        grid=2,
    ),
    "any_and_all": Right(
        "bool any = __syncthreads_or(x[T] > 8), all = __syncthreads_and(x[T] > -10); a[T] = any + 2 * all + 4 *"
        " (__syncthreads_count(x[T] > 0) > 0);",
        lambda x: np.full(64, (x[:64] > 8).any() + 2 + 4),
    ),
    "grid_stride": Right(
        "for (int i = 64 * B + T; i < 1000; i += 128) a[i] = x[i] + 1;", lambda x: x[:1000] + 1, grid=2
    ),
    "vectors": Right("((int4*)a)[T] = ((const int4*)x)[T];", lambda x: x[:256]),
    "structs": Right(
        "Pair* to = (Pair*)a; Pair p; p.re = x[T], p.im = 0; to[T] = p; Pair q = to[T]; b[T] = (int)q.re; __syncthreads();"
        " a[T] = 0; __syncthreads(); a[T] = b[T];",
        lambda x: x[:32],
        block=32,
    ),
    "struct_at_a_word": Right(
        "if (T == 0) { Pair* to = (Pair*)(a + 1); Pair p; p.re = 1, p.im = 2; *to = p; a[1] = (int)to->im; a[2] = 0; }",
        lambda x: [0, 2, 0],
    ),
    "bytes_apart": Right("((char*)a)[T] = 1;", lambda x: np.full(16, 0x01010101)),
    "recursion": Right("a[T] = deep(80);", lambda x: np.full(64, 80)),
    "own_array": Right(
        "int own[16]; for (int i = 0; i < 16; ++i) own[i] = x[i] * T; a[T] = own[15];", lambda x: x[15] * np.arange(64)
    ),
    "device_array": Right("table[T] = x[T]; __syncthreads(); a[T] = table[63 - T];", lambda x: x[63::-1]),
    "constant": Right("a[T] = fixed[T % 4];", lambda x: np.tile([1, 2, 3, 4], 16)),
    "rows_of_warps": Right(
        "int row = 2 * B + T / 32, v = warp_sum(x[32 * row + T % 32]); if (T % 32 == 0) a[row] = v;",
        lambda x: x[:128].reshape(4, 32).sum(1),
        grid=2,
    ),
    "maximum_by_index": Right(
        "__shared__ int best; if (T == 0) best = -100; __syncthreads(); atomicMax(&best, x[T]); __syncthreads(); a[T] ="
        " x[T] == best;",
        lambda x: x[:64] == x[:64].max(),
    ),
    "odd_even_sort": Right(
        SHARED
        + "s[T] = x[T]; __syncthreads(); for (int i = 0; i < 64; ++i) { int j = 2 * T + i % 2; if (j < 63 && s[j] >"
        " s[j + 1]) { int v = s[j]; s[j] = s[j + 1]; s[j + 1] = v; } __syncthreads(); } a[T] = s[T];",
        lambda x: np.sort(x[:64]),
    ),
    "stencil_two_buffers": Right(
        "a[T] = x[T]; __syncthreads(); for (int i = 0; i < 2; ++i) { b[T] = a[T] + (T ? a[T - 1] : 0); __syncthreads(); a[T] ="
        " b[T]; __syncthreads(); }",
        lambda x: np.convolve(x[:64], [1, 2, 1])[:64],
    ),
    "work_queue": Right(
        "for (;;) { int i = atomicAdd(b, 1); if (i >= 100) break; a[i] = 3 * x[i]; }", lambda x: 3 * x[:100], grid=3
    ),
    "match": Right("a[T] = __popc(__match_any_sync(ALL, T % 4));", lambda x: np.full(32, 8), block=32),
    "reduce_by_hardware": Right("a[T] = __reduce_add_sync(ALL, x[T]);", lambda x: np.full(32, x[:32].sum()), block=32),
    "exchange_of_half_a_warp": Right(
        SHARED + "unsigned half = T % 32 < 16 ? 0xffffu : 0xffff0000u; s[T] = x[T]; __syncwarp(half);"
        " a[T] = s[T ^ 8] + __popc(__ballot_sync(half, T % 3 == 0));",
        lambda x: x[np.arange(64) ^ 8] + np.repeat((np.arange(64) % 3 == 0).reshape(4, 16).sum(1), 16),
    ),
    "chain_of_syncwarps": Right(  # 0 to 1 to 2: order is passed on
        "__shared__ int s; if (T == 0) s = x[0]; if (T < 2) __syncwarp(3u); if (T == 1 || T == 2) __syncwarp(6u);"
        " if (T == 2) a[0] = s;",
        lambda x: [x[0]],
    ),
    "writer_after_readers": Right(
        "__shared__ int s; for (int i = 0; i < 3; ++i) { if (T == i) s = x[i]; __syncthreads(); a[T] = s + i;"
        " __syncthreads(); }",
        lambda x: np.full(64, x[2] + 2),
    ),
    "own_element": Right(
        SHARED + "s[T] = 0; for (int i = 0; i < 6; ++i) s[T] += x[i], a[T] = s[T];", lambda x: np.full(64, x[:6].sum())
    ),
    "vote_before_exit": Right(  # lanes that have left need not come
        "if (__syncthreads_or(x[T] > 9) || T % 32 >= 8) return; a[T] = __shfl_sync(ALL, x[T], 0);",
        lambda x: np.repeat([x[0], 0, x[32], 0], [8, 24, 8, 24]),
    ),
    "memset_apart": Right("memset(a + 4 * T, 1, 16);", lambda x: np.full(256, 0x01010101)),
}

# Where compute-sanitizer, of kernels built by nvcc -O3, reports nothing and the simulator a fault, and why. No tool reports
# anything of a right kernel.
WHY = {
    "racecheck looks at shared memory alone": """global_reversed shift_in_place one_word_of_all one_word_of_blocks
        same_value_of_blocks block_reads_anothers block_overwrites_what_another_reads stored_then_counted
        global_counted_then_read read_beside_atomics atomic_elsewhere device_array device_variable device_variable_read
        last_block_without_fence last_block_without_barrier flag_without_fence volatile_flag_without_fence
        fence_of_the_block_for_the_grid fence_after_the_flag another_flag vector_over_a_scalar halves_of_one_word""",
    "one thread writes a word that others read or count; why racecheck reports nothing was not looked for": """
        one_writes_all_read zeroed_then_counted counted_then_read counted_then_cleared""",
    "synccheck looks at barriers; what these operations are given is undefined, and not checked": """shuffle_at_two_places
        ballot_at_two_places mask_without_the_caller lane_out_of_the_mask width_24 width_0 width_64""",
    "memcheck reports nothing of what lies beside a static array of a block or of the program": """past_the_end_of_shared
        negative_shared past_the_end_of_a_device_array""",
    "the compiler keeps the array in registers, or loads the one word that is used": "own_array vector_at_a_word",
    "initcheck looks at global memory alone": "unwritten_shared unzeroed_count",
}
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Every kernel of both tables in one file, so that the compiler starts once."""
    path = tmp_path_factory.mktemp("races") / "races.cu"
    cases = {f"wrong_{name}": case for name, case in WRONG.items()} | {
        f"right_{name}": case for name, case in RIGHT.items()
    }
    path.write_text(
        COMMON
        + "".join(
            f'extern "C" __global__ void {name}(int* a, int* b, const int* x) {{\n{case.body}\n}}\n'
            for name, case in cases.items()
        )
    )
    return simulator.compile(path)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_named_and_changes_nothing(program, name, cores):
    case, a, b = WRONG[name], np.zeros(1024, np.int32), np.zeros(1024, np.int32)
    with pytest.raises(case.fault):
        program.launch(f"wrong_{name}", case.grid, case.block, (a, b, X), cores=cores)
    assert not a.any() and not b.any()


@pytest.mark.parametrize("call", ["system(0)", "fork()", "raise(9)", "rand()"])
def test_a_call_of_the_hosts_library_is_refused(tmp_path, call):
    path = tmp_path / "host.cu"
    path.write_text(
        "#include <signal.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        f'extern "C" __global__ void k(int* a) {{ a[0] = {call}; }}'
    )
    with pytest.raises(CompileError, match=f"calls {call.partition('(')[0]}"):
        simulator.compile(path).launch("k", 1, 1, (np.zeros(4, np.int32),))


@pytest.mark.parametrize("watch, cores", [("counts", 1), ("faults", 2), (None, 2)])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_gives_numpys_values(program, name, watch, cores):
    case, a = RIGHT[name], np.zeros(1024, np.int32)
    arguments = (a, np.zeros(1024, np.int32), X)
    program.launch(f"right_{name}", case.grid, case.block, arguments, watch=watch, cores=cores)
    expected = np.ravel(case.a(X))
    np.testing.assert_array_equal(a[: len(expected)], expected)


def reports() -> dict[str, dict[str, str]]:
    """Return kernel -> tool, or "plain", -> the report in a few words, "nothing" for none, of what the recorded run came to:
    it ran out of time before the last kernels, and some were added since."""
    found = [record for record in records.load_all() if record.name == "sanitizer"]
    rows = max(found, key=lambda record: record.date).rows
    unfinished = ("not run", "does not end", "does not compile")
    return {
        row["kernel"]: row for row in rows if not any(row[tool].startswith(unfinished) for tool in ("plain", *TOOLS))
    }


def test_the_record_has_kernels_of_both_tables():
    assert set(reports()) <= {f"wrong_{name}" for name in WRONG} | {f"right_{name}" for name in RIGHT}
    assert len(reports()) > 110


def test_right_kernels_give_numpys_values_on_the_gpu():
    said = {kernel: row["plain"] for kernel, row in reports().items() if kernel.startswith("right_")}
    assert said == dict.fromkeys(said, "NumPy's values")


def test_where_compute_sanitizer_says_otherwise_the_table_says_why():
    reported = {kernel: any(row[tool] != "nothing" for tool in TOOLS) for kernel, row in reports().items()}
    differs = {kernel for kernel, is_reported in reported.items() if is_reported != kernel.startswith("wrong_")}
    assert differs == {f"wrong_{name}" for names in WHY.values() for name in names.split()}

// Every line of raw PTX that the Hopper kernels (sm_90a) use, each behind a name that says what it does.
//
// Shared memory is addressed by 32-bit numbers here, as PTX does. Include twell.cuh first (VALUE_BF16 or VALUE_FP16),
// and define CLUSTER: how many blocks form a cluster (1 or 2; 1 needs no cluster launch), and B_ALONG_N: 1 where the rows
// of b in memory run along n and not along k.
//
// Words used below. mbarrier: a counter in shared memory; its phase ends when the arrivals it was set up for and the
// bytes it was told to expect have come, and a wait asks for the parity of the phase. TMA: the copy engine; one thread
// starts the copy of a box of a matrix, described by a tensor map that the host made, and the bytes report to an
// mbarrier. wgmma: a matrix product by a warpgroup (4 warps) whose operands lie in shared memory and whose sums lie in
// registers.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap; a kernel takes it as const __grid_constant__

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---------------------------------------------------------------- barriers
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Make initialised barriers known to the other blocks of the cluster and to the copy engine.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// One arrival, and the phase also waits for `bytes` from the copy engine.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "AGAIN%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @done bra OUT%=;\n bra AGAIN%=;\nOUT%=:\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}
// Arrive on the barrier at this address in block `rank` of the cluster. Without `.release.cluster`: spelled out, it
// compiles to a full memory barrier of the GPU, and one each k-step made a cluster kernel much slower. What the arrival
// has to order is only reads of shared memory by wgmma, and wgmma_wait has seen those finished.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
#if CLUSTER > 1
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
        " mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier), "r"(rank) : "memory");
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank = 0;
#if CLUSTER > 1
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}
// A barrier among the 128 threads of one warpgroup; number 0 is __syncthreads.
__device__ __forceinline__ void warpgroup_sync(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }

// ---------------------------------------------------------------- registers: a warpgroup gives some away, another
// takes them
template <int N>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// ---------------------------------------------------------------- TMA: a box of a matrix to shared memory
// Coordinates count elements, innermost dimension first. What lies outside the matrix arrives as zeros, and counts as
// bytes.
#define TMA_LOAD(DIMENSIONS) "cp.async.bulk.tensor." DIMENSIONS ".shared::cluster.global.mbarrier::complete_tx::bytes"
#define EVERY_BLOCK ((unsigned short)((1 << CLUSTER) - 1))
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1) {
    asm volatile(TMA_LOAD("2d") " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1) : "memory");
}
// The same box to the same place in every block of the cluster; each block's own barrier counts the bytes.
__device__ __forceinline__ void tma_load_all(u32 to, const TensorMap* map, u32 barrier, int c0, int c1) {
#if CLUSTER > 1
    asm volatile(TMA_LOAD("2d") ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(EVERY_BLOCK) : "memory");
#else
    tma_load(to, map, barrier, c0, c1);
#endif
}
__device__ __forceinline__ void tma_load_all(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
#if CLUSTER > 1
    asm volatile(TMA_LOAD("5d") ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(EVERY_BLOCK) : "memory");
#else
    asm volatile(TMA_LOAD("5d") " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
#endif
}

// ---------------------------------------------------------------- wgmma
// Between the last touch of the sums by other instructions and the first product.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N of the committed groups are unfinished.
template <int N>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// An operand in shared memory: rows of 64 16-bit values along k, 128 bytes, under the 128-byte swizzle; groups of 8
// rows lie 1024 bytes apart. Add 2 (times 16 bytes) for the next 16 values along k.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// b, if its rows run along n: boxes of 64 steps of k x 64 columns, a row 128 bytes under the same swizzle; the boxes of
// the next columns lie 8192 bytes apart. Add 128 (times 16 bytes) for the next 16 steps of k.
__device__ __forceinline__ u64 operand_along_n(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | 512ull << 16 | 64ull << 32 | 1ull << 62;
}
#if defined(VALUE_FP16)
#define PTX_VALUE "f16"
#else
#define PTX_VALUE "bf16"
#endif
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define R64(i) R16(i), R16(i + 16), R16(i + 32), R16(i + 48)
#define PTX_TEXT_(x) #x
#define PTX_TEXT(x) PTX_TEXT_(x)
// d [64][256] = a [64][16] x b [256][16]^T, plus d if `add`. A thread's d[4 j + 2 r + e] is row 16 * warp + lane / 4 +
// 8 r, column 8 j + 2 * (lane % 4) + e.
__device__ __forceinline__ void wgmma_64x256x16(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %130, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n256k16.f32." PTX_VALUE "." PTX_VALUE " {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
        " %128, %129, add, 1, 1, 0, " PTX_TEXT(B_ALONG_N) ";\n}\n"
        : R64(0), R64(64)
        : "l"(a), "l"(b), "r"(add));
}

// ---------------------------------------------------------------- pairs of values, and words in shared memory
// Two floats rounded to nearest even, the first in the low half.
__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn." PTX_VALUE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// 0xffff in each half that fires: greater than zero, or unordered (NaN).
__device__ __forceinline__ u32 fires_pair(u32 pair) {
    u32 halves;
    asm("set.gtu.u32." PTX_VALUE "x2 %0, %1, %2;" : "=r"(halves) : "r"(pair), "r"(0));
    return halves;
}
__device__ __forceinline__ void store_shared(u32 at, u32 word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}
__device__ __forceinline__ u32 load_shared(u32 at) {
    u32 word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
}
__device__ __forceinline__ uint4 load_shared_4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
// Predicated rather than branched around: a divergent branch costs far more than a store that does nothing.
__device__ __forceinline__ void store_shared_if(u32 keep, u32 at, u32 word) {
    asm volatile("{\n .reg .pred k;\n setp.ne.u32 k, %0, 0;\n @k st.shared.b32 [%1], %2;\n}\n" ::"r"(keep), "r"(at), "r"(word) : "memory");
}
__device__ __forceinline__ void store_if(u32 keep, u32* to, u32 word) {
    asm volatile("{\n .reg .pred k;\n setp.ne.u32 k, %0, 0;\n @k st.global.b32 [%1], %2;\n}\n" ::"r"(keep), "l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared_4_if(u32 keep, u32 at, const u32* v) {
    asm volatile("{\n .reg .pred k;\n setp.ne.u32 k, %5, 0;\n @k st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n}\n"
                 ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(keep) : "memory");
}

// ---------------------------------------------------------------- results: to shared memory, and by the copy engine
// from there
// Four 8 x 8 matrices of 16-bit values. Lane i gives where a row of 16 bytes goes: row i % 8 of matrix i / 8. Of each
// matrix a lane holds row lane / 4, columns 2 * (lane % 4) + {0, 1}: what wgmma leaves.
__device__ __forceinline__ void store_matrices(u32 row, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}
// By each thread that wrote to shared memory, before the threads meet and one of them starts a copy from there.
__device__ __forceinline__ void copies_may_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A box in shared memory to its place in a matrix; what lies outside the matrix is left out.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(from), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the copies that this thread committed have read their source; until they are done.
__device__ __forceinline__ void copies_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// As torch's relu of round_pair: negative becomes 0, NaN stays NaN.
__device__ __forceinline__ u32 round_pair_relu(float low, float high) {
    u32 pair;
    asm("cvt.rn.relu." PTX_VALUE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// CUDA's language for a C++ compiler: what a kernel file uses without including anything. The compiler includes this file
// before the unmodified .cu. `runtime.h` declares the simulator's side of the functions named sim_*.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cstring>
#include <utility>

#define __host__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// A kernel that tests the architecture takes its portable path.
#define __CUDA_ARCH__ 750

#if defined(SIM_LISTING)  // preprocessing only: toolchain.py finds kernels and variables by these names
#define __global__ SIM_GLOBAL
#define __shared__ SIM_SHARED
#define __device__ SIM_DEVICE
#define __constant__ SIM_CONSTANT
#else
#define __global__
#define __device__
#define __constant__
#if __GNUC__ >= 10  // else GCC guards arrays of float4, __half, ... for a
#define __shared__ __constinit thread_local  // constructor that does nothing
#else
#define __shared__ thread_local
#endif
#endif

#if defined(SIM_WATCHED)  // no function is inlined, so that each has its place in the tree of calls
#define __forceinline__ inline
#define SIM_INLINE static inline
#define SIM_QUIET __attribute__((no_sanitize("thread"), no_instrument_function))
#else
#define __forceinline__ inline __attribute__((always_inline))
#define SIM_INLINE static inline __attribute__((always_inline))
#define SIM_QUIET
#endif

#include "cuda_types.h"
#include "sim_thread.h"

#if defined(SIM_WATCHED)  // functions of the runtime that return copies: reading a copy is no access to memory
extern "C" SimIndex sim_thread_index();
extern "C" SimIndex sim_block_index();
extern "C" dim3 sim_block_size();
extern "C" dim3 sim_grid_size();
#define threadIdx sim_thread_index()
#define blockIdx sim_block_index()
#define blockDim sim_block_size()
#define gridDim sim_grid_size()
#else
#define threadIdx (sim_thread()->thread_index)
#define blockIdx (sim_thread()->block_index)
#define blockDim (sim_thread()->block_size)
#define gridDim (sim_thread()->grid_size)
#endif
#define warpSize 32

enum SimCollective {
    SIM_SHUFFLE, SIM_SHUFFLE_UP, SIM_SHUFFLE_DOWN, SIM_SHUFFLE_XOR, SIM_BALLOT, SIM_ANY, SIM_ALL, SIM_MATCH, SIM_SYNCWARP,
    SIM_REDUCE_ADD, SIM_REDUCE_MIN, SIM_REDUCE_MAX, SIM_REDUCE_MIN_SIGNED, SIM_REDUCE_MAX_SIGNED, SIM_REDUCE_AND,
    SIM_REDUCE_OR, SIM_REDUCE_XOR, SIM_BARRIER, SIM_BARRIER_OR, SIM_BARRIER_AND, SIM_BARRIER_COUNT
};

extern "C" {
uint64_t sim_warp_wide(int kind, unsigned mask, uint64_t value, int parameter, int width);
int sim_barrier(int kind, int predicate);
void sim_pause();
void sim_atomic(const void* address, int bytes, const void* place);
void sim_fence(int device);
void sim_watch_value(int name, double value);
void sim_assertion(const char* text);
void* sim_set(void* to, int value, uint64_t n, uint64_t room, const void* place);
void* sim_move(void* to, const void* from, uint64_t n, uint64_t room, const void* place);
}

// ---- barriers and what warps do together ----

SIM_INLINE void __syncthreads() { sim_barrier(SIM_BARRIER, 0); }
SIM_INLINE int __syncthreads_or(int p) { return sim_barrier(SIM_BARRIER_OR, p != 0); }
SIM_INLINE int __syncthreads_and(int p) { return sim_barrier(SIM_BARRIER_AND, p != 0); }
SIM_INLINE int __syncthreads_count(int p) { return sim_barrier(SIM_BARRIER_COUNT, p != 0); }
SIM_INLINE void __nanosleep(unsigned) { sim_pause(); }
SIM_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { sim_warp_wide(SIM_SYNCWARP, mask, 0, 0, 32); }
SIM_INLINE unsigned __ballot_sync(unsigned mask, int p) { return (unsigned)sim_warp_wide(SIM_BALLOT, mask, p != 0, 0, 32); }
SIM_INLINE int __any_sync(unsigned mask, int p) { return (int)sim_warp_wide(SIM_ANY, mask, p != 0, 0, 32); }
SIM_INLINE int __all_sync(unsigned mask, int p) { return (int)sim_warp_wide(SIM_ALL, mask, p != 0, 0, 32); }

template <class T>
SIM_INLINE T sim_shuffle(int kind, unsigned mask, T value, int parameter, int width) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t word = 0;
    memcpy((void*)&word, (const void*)&value, sizeof(T));
    word = sim_warp_wide(kind, mask, word, parameter, width);
    memcpy((void*)&value, (const void*)&word, sizeof(T));
    return value;
}
template <class T>
SIM_INLINE T __shfl_sync(unsigned mask, T v, int lane, int width = 32) { return sim_shuffle(SIM_SHUFFLE, mask, v, lane, width); }
template <class T>
SIM_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) { return sim_shuffle(SIM_SHUFFLE_UP, mask, v, (int)by, width); }
template <class T>
SIM_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) { return sim_shuffle(SIM_SHUFFLE_DOWN, mask, v, (int)by, width); }
template <class T>
SIM_INLINE T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32) { return sim_shuffle(SIM_SHUFFLE_XOR, mask, v, with, width); }
template <class T>
SIM_INLINE unsigned __match_any_sync(unsigned mask, T value) {
    uint64_t word = 0;
    memcpy((void*)&word, (const void*)&value, sizeof(T));
    return (unsigned)sim_warp_wide(SIM_MATCH, mask, word, 0, 32);
}
#define SIM_REDUCTION(NAME, SIGNED, UNSIGNED)                                                                              \
    SIM_INLINE unsigned NAME(unsigned mask, unsigned v) { return (unsigned)sim_warp_wide(UNSIGNED, mask, v, 0, 32); }     \
    SIM_INLINE int NAME(unsigned mask, int v) { return (int)sim_warp_wide(SIGNED, mask, (unsigned)v, 0, 32); }
SIM_REDUCTION(__reduce_add_sync, SIM_REDUCE_ADD, SIM_REDUCE_ADD)
SIM_REDUCTION(__reduce_min_sync, SIM_REDUCE_MIN_SIGNED, SIM_REDUCE_MIN)
SIM_REDUCTION(__reduce_max_sync, SIM_REDUCE_MAX_SIGNED, SIM_REDUCE_MAX)
#undef SIM_REDUCTION
SIM_INLINE unsigned __reduce_and_sync(unsigned mask, unsigned v) { return (unsigned)sim_warp_wide(SIM_REDUCE_AND, mask, v, 0, 32); }
SIM_INLINE unsigned __reduce_or_sync(unsigned mask, unsigned v) { return (unsigned)sim_warp_wide(SIM_REDUCE_OR, mask, v, 0, 32); }
SIM_INLINE unsigned __reduce_xor_sync(unsigned mask, unsigned v) { return (unsigned)sim_warp_wide(SIM_REDUCE_XOR, mask, v, 0, 32); }

// ---- memory: cache hints change nothing here; the compiler's instrumentation sees the accesses ----

#define SIM_LOAD(NAME) template <class T> SIM_INLINE T NAME(const T* p) { return *p; }
SIM_LOAD(__ldg) SIM_LOAD(__ldca) SIM_LOAD(__ldcg) SIM_LOAD(__ldcs) SIM_LOAD(__ldlu) SIM_LOAD(__ldcv)
#undef SIM_LOAD
#define SIM_STORE(NAME) template <class T> SIM_INLINE void NAME(T* p, T v) { *p = v; }
SIM_STORE(__stwb) SIM_STORE(__stcg) SIM_STORE(__stcs) SIM_STORE(__stwt)
#undef SIM_STORE
SIM_QUIET SIM_INLINE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST), sim_fence(1); }
SIM_QUIET SIM_INLINE void __threadfence_block() { sim_fence(0); }
SIM_QUIET SIM_INLINE void __threadfence_system() { __threadfence(); }

#if defined(SIM_WATCHED)  // where the kernel calls it
#define SIM_PLACE __builtin_return_address(0)
#else
#define SIM_PLACE nullptr
#endif
// Blocks run on several cores, so these are real atomics. NEW is an expression in `old` and `v`.
#define SIM_ATOMIC(NAME, TYPE, BITS, NEW)                                                                                  \
    SIM_QUIET SIM_INLINE TYPE NAME(TYPE* p, TYPE v) {                                                                      \
        sim_atomic(p, sizeof(TYPE), SIM_PLACE);                                                                            \
        BITS seen, wanted;                                                                                                 \
        __atomic_load((BITS*)p, &seen, __ATOMIC_RELAXED);                                                                  \
        TYPE old, next;                                                                                                    \
        do {                                                                                                               \
            memcpy(&old, &seen, sizeof old);                                                                               \
            next = (NEW);                                                                                                  \
            memcpy(&wanted, &next, sizeof next);                                                                           \
        } while (!__atomic_compare_exchange((BITS*)p, &seen, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));         \
        return old;                                                                                                        \
    }
#define SIM_ATOMICS(TYPE, BITS)                                                                                            \
    SIM_ATOMIC(atomicAdd, TYPE, BITS, old + v)                                                                             \
    SIM_ATOMIC(atomicMax, TYPE, BITS, old > v ? old : v)                                                                   \
    SIM_ATOMIC(atomicMin, TYPE, BITS, old < v ? old : v)                                                                   \
    SIM_ATOMIC(atomicAnd, TYPE, BITS, old & v)                                                                             \
    SIM_ATOMIC(atomicOr, TYPE, BITS, old | v)                                                                              \
    SIM_ATOMIC(atomicXor, TYPE, BITS, old ^ v)                                                                             \
    SIM_ATOMIC(atomicExch, TYPE, BITS, (void(old), v))                                                                     \
    SIM_QUIET SIM_INLINE TYPE atomicCAS(TYPE* p, TYPE compare, TYPE v) {                                                   \
        sim_atomic(p, sizeof(TYPE), SIM_PLACE);                                                                            \
        __atomic_compare_exchange(p, &compare, &v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                             \
        return compare;                                                                                                    \
    }
SIM_ATOMICS(int, unsigned)
SIM_ATOMICS(unsigned, unsigned)
SIM_ATOMICS(unsigned long long, unsigned long long)
SIM_ATOMIC(atomicAdd, float, unsigned, old + v)
SIM_ATOMIC(atomicAdd, double, unsigned long long, old + v)
SIM_ATOMIC(atomicExch, float, unsigned, (void(old), v))
SIM_ATOMIC(atomicSub, int, unsigned, old - v)
SIM_ATOMIC(atomicSub, unsigned, unsigned, old - v)
#undef SIM_ATOMICS
#undef SIM_ATOMIC

SIM_INLINE void __trap() { sim_assertion("__trap()"); }
#include "assert.h"

// The compiler's instrumentation does not see what these functions touch. If the call names a variable, the compiler
// knows how many bytes it has: `room`.
#if defined(SIM_WATCHED)
SIM_QUIET SIM_INLINE void* sim_memset(size_t room, void* to, int value, size_t n) { return sim_set(to, value, n, room, SIM_PLACE); }
SIM_QUIET SIM_INLINE void* sim_memmove(size_t room, void* to, const void* from, size_t n) {
    return sim_move(to, from, n, room, SIM_PLACE);
}
namespace std { using ::sim_memset; using ::sim_memmove; }
#define SIM_ROOM(TO, ...) __builtin_object_size(TO, 0)
#define memset(...) sim_memset(SIM_ROOM(__VA_ARGS__, 0), __VA_ARGS__)
#define memcpy(...) sim_memmove(SIM_ROOM(__VA_ARGS__, 0), __VA_ARGS__)
#define memmove(...) sim_memmove(SIM_ROOM(__VA_ARGS__, 0), __VA_ARGS__)
#endif

// ---- what toolchain.py puts in: a watched expression, and a way to call each kernel ----

SIM_INLINE void sim_watch(int name, double value) { sim_watch_value(name, value); }
SIM_INLINE void sim_watch(int name, float value) { sim_watch_value(name, value); }
SIM_INLINE void sim_watch(int name, bool value) { sim_watch_value(name, value); }
SIM_INLINE void sim_watch(int name, int value) { sim_watch_value(name, value); }
SIM_INLINE void sim_watch(int name, unsigned value) { sim_watch_value(name, value); }
SIM_INLINE void sim_watch(int name, long value) { sim_watch_value(name, (double)value); }
SIM_INLINE void sim_watch(int name, unsigned long value) { sim_watch_value(name, (double)value); }
SIM_INLINE void sim_watch(int name, long long value) { sim_watch_value(name, (double)value); }
SIM_INLINE void sim_watch(int name, unsigned long long value) { sim_watch_value(name, (double)value); }
template <class T>
SIM_INLINE void sim_watch(int name, const T& value) { sim_watch_value(name, (float)value); }

template <class... A, size_t... I>
SIM_QUIET static inline void sim_apply(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(A*)arguments[I]...);
}
template <class... A>
SIM_QUIET static inline void sim_apply(void (*kernel)(A...), void** arguments) {
    sim_apply(kernel, arguments, std::make_index_sequence<sizeof...(A)>());
}
template <class... A>
constexpr int sim_count(void (*)(A...)) { return sizeof...(A); }
template <class F> struct SimSizes;
template <class... A>
struct SimSizes<void (*)(A...)> { static constexpr int bytes[] = {(int)sizeof(A)..., 0}; };
#define SIM_EXPORT(NAME)                                                                            \
    extern "C" SIM_QUIET void sim_call_##NAME(void** arguments) { sim_apply(&NAME, arguments); }    \
    extern "C" const int* const sim_sizes_##NAME = SimSizes<decltype(&NAME)>::bytes;

// pack: dense gate [rows, columns] -> TwELL words. Keeps `not (g <= 0)`, with SIGNED `g != 0`; columns ascending.
//
// What bounds it: reading the gate once from device memory; then, as versions get better, the instructions for each
// tile.
//
//   pack_v1  one thread a tile: neighbouring threads read addresses 512 bytes apart
//   pack_v2  one warp a tile: 32 neighbouring columns at a time, a ballot gives each kept value its slot. Any shape,
//            any alignment
//   pack_v3  16-byte loads: a lane holds 8 (fp32: 4) neighbouring columns, a prefix sum over the lanes' counts gives
//            the slots. Needs columns and tile to be multiples of the vector
//   pack_v4  a warp loads the vectors of four tiles before it looks at the first: four times the bytes under way
//
// Worklog: docs/kernels/smxx_pack.md
#include "activation.cuh"

// Where tile `item` of the matrix begins; tiles are numbered row by row.
__device__ __forceinline__ const value_t* tile_of(const value_t* gate, unsigned item, int columns, int tile) {
    const unsigned tiles = tiles_of(columns, tile);
    return gate + (long long)(item / tiles) * columns + (long long)(item % tiles) * tile;
}

extern "C" __global__ void __launch_bounds__(128)
pack_v1(const value_t* __restrict__ gate, word_t* __restrict__ packed,
        long long rows, int columns, int tile, int words) {
    const unsigned tiles = tiles_of(columns, tile);
    const unsigned item = blockIdx.x * blockDim.x + threadIdx.x;  // the host keeps rows * tiles below 2^31
    if (item >= rows * tiles) return;
    const value_t* in = tile_of(gate, item, columns, tile);
    word_t* out = packed + (long long)item * words;

    int count = 0;
    for (int c = 0; c < tile_width(columns, tile, item % tiles); ++c) {
        const value_t v = in[c];
        if (!kept(v)) continue;
        ++count;
        if (count < words) out[count] = make_word(v, c);
    }
    out[0] = count;  // the true count, also when it exceeds the slots
}

extern "C" __global__ void __launch_bounds__(256)
pack_v2(const value_t* __restrict__ gate, word_t* __restrict__ packed,
        long long rows, int columns, int tile, int words) {
    const unsigned tiles = tiles_of(columns, tile);
    const int lane = threadIdx.x % WARP;
    const unsigned item = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (item >= rows * tiles) return;  // whole warps leave together
    const int width = tile_width(columns, tile, item % tiles);
    const value_t* in = tile_of(gate, item, columns, tile);
    word_t* out = packed + (long long)item * words;

    int count = 0;
    for (int base = 0; base < width; base += WARP) {
        const int c = base + lane;
        const value_t v = c < width ? in[c] : from_float(0.0f);
        const unsigned here = __ballot_sync(ALL_LANES, kept(v));
        // Kept values in lower lanes come first: their number is this lane's place in line.
        const int slot = count + 1 + __popc(here & ((1u << lane) - 1));
        if (kept(v) && slot < words) out[slot] = make_word(v, c);
        count += __popc(here);
    }
    if (lane == 0) out[0] = count;
}

// A strip is what one warp holds at a time: WARP * VECTOR neighbouring columns, one vector a lane.
__device__ __forceinline__ Vector load_strip(const value_t* in, int first, int width) {
    Vector v;
    v.raw = make_uint4(0, 0, 0, 0);
    if (first < width) v.raw = __ldcs((const uint4*)(in + first));  // read once: leave the cache to others
    return v;
}

// Append the kept values of one strip to `out`, after the `count` that are there; returns the new count.
__device__ __forceinline__ int pack_strip(const Vector& v, int first, int count, word_t* out, int words) {
    const int lane = threadIdx.x % WARP;
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) mine |= (unsigned)kept(v.value(i)) << i;
    if (!__any_sync(ALL_LANES, mine)) return count;  // most strips of a sparse gate are silent

    int through = __popc(mine);  // becomes the inclusive prefix sum of the lanes' counts
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, through, step);
        if (lane >= step) through += below;
    }
    int slot = count + through - __popc(mine);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        if (!(mine >> i & 1)) continue;
        ++slot;
        if (slot < words) out[slot] = make_word(v.value(i), first + i);
    }
    return count + __shfl_sync(ALL_LANES, through, WARP - 1);
}

template <int TILES>
__device__ __forceinline__ void pack_tiles(const value_t* gate, word_t* packed, long long rows, int columns, int tile,
                                           int words) {
    const unsigned tiles = tiles_of(columns, tile);
    const int lane_column = threadIdx.x % WARP * VECTOR;
    const unsigned first_item = (blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * TILES;

    Vector strip[TILES];  // the first strip of each tile, all under way before any is looked at
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
        const unsigned item = first_item + j;
        const int width = item < rows * tiles ? tile_width(columns, tile, item % tiles) : 0;
        strip[j] = load_strip(tile_of(gate, item, columns, tile), lane_column, width);
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
        const unsigned item = first_item + j;
        if (item >= rows * tiles) return;
        const int width = tile_width(columns, tile, item % tiles);
        const value_t* in = tile_of(gate, item, columns, tile);
        word_t* out = packed + (long long)item * words;
        int count = pack_strip(strip[j], lane_column, 0, out, words);
        for (int base = WARP * VECTOR; base < width; base += WARP * VECTOR)
            count = pack_strip(load_strip(in, base + lane_column, width), base + lane_column, count, out, words);
        if (lane_column == 0) out[0] = count;
    }
}

#define PACK_KERNEL(NAME, TILES)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) NAME(const value_t* __restrict__ gate,                      \
                                                           word_t* __restrict__ packed, long long rows,           \
                                                           int columns, int tile, int words) {                    \
        pack_tiles<TILES>(gate, packed, rows, columns, tile, words);                                              \
    }
PACK_KERNEL(pack_v3, 1)
PACK_KERNEL(pack_v4, 4)

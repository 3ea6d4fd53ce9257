// Walks the kept entries of one packed row, up to 32 at a time, one a lane: what every kernel that reads TwELL
// does first.
//
// Tiles are taken in groups of 32. Each lane reads one tile's count, a prefix sum over the lanes lines the
// group's words up in one list, and the list is dealt out 32 entries a turn: a row with 29 entries spread over
// 22 tiles is one turn, with one load a lane, not 22 short loops.
//
// A tile with more values than slots is finished from one of two places, both exact:
//   gate   the dense row it was packed from, if that is still there: the whole tile is read from it instead;
//   tail   the CSR tail that holds what the tiles could not.
// With neither, every count must fit. The order of the entries is fixed, so every sum is deterministic. A third place,
// the pool, has a walk of its own (pool_walk.cuh).
#pragma once
#include "activation.cuh"

struct Entries {
    unsigned lanes;  // which lanes hold an entry
    float value;
    int column;  // within the matrix
};

// The lanes that are left after the first n of them.
__device__ __forceinline__ unsigned drop(unsigned lanes, int n) {
    for (int i = 0; i < n; ++i) lanes &= lanes - 1;
    return lanes;
}

// The sum of v over the lanes, in every lane.
__device__ __forceinline__ int sum_over_lanes(int v) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) v += __shfl_xor_sync(ALL_LANES, v, step);
    return v;
}

// The sum of v over the lanes up to and including this one.
__device__ __forceinline__ int sum_up_to_lane(int v) {
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, v, step);
        if ((int)(threadIdx.x % WARP) >= step) v += below;
    }
    return v;
}

// The first lane whose `through` is more than i, by binary search: `through` rises from lane to lane. Lane 31 where
// none is.
__device__ __forceinline__ int first_reaching_past(int i, int through) {
    int owner = 0;
#pragma unroll
    for (int step = WARP / 2; step; step /= 2)
        if (__shfl_sync(ALL_LANES, through, owner + step - 1) <= i) owner += step;
    return owner;
}

// Everything that describes one packed matrix, as the kernels get it.
struct Packed {
    const word_t* words_of;       // [rows][tiles][words]
    const value_t* gate;          // [rows][columns] or null
    const long long* tail_pointer;  // [rows + 1] or null
    const int* tail_column;
    const value_t* tail_value;
    int columns, tile, words;
};

// Only what changes is kept in registers; the rest is computed from the kernel's parameters when it is wanted.
class RowWalk {
public:
    __device__ __forceinline__ RowWalk(const Packed& m, int row) : m_(m), row_(row), tail_at_(0) { open_group(0); }

    // The next up to 32 entries; false when the row is done. The whole warp calls it together.
    __device__ __forceinline__ bool next(Entries& e) {
        for (;;) {
            if (at_ < listed_) return deal(e), true;
            if (overflowing_) {
                if (read_gate(e), e.lanes) return true;
            } else if (group_ + WARP < tiles()) {
                open_group(group_ + WARP);
            } else {
                return m_.tail_pointer && read_tail(e);
            }
        }
    }

    // Whether every column of the row is kept.
    __device__ bool full() const {
        int count = 0;
        for (int t = lane(); t < tiles(); t += WARP) count += (int)*tile_words(t);
        return sum_over_lanes(count) == m_.columns;
    }

private:
    const Packed& m_;
    const int row_;
    int group_;             // first tile of the group
    int mine_;              // entries listed in this lane's tile
    int through_;           // entries listed up to and including this lane's tile
    int listed_, at_;       // entries listed in the group, and how many were dealt
    unsigned overflowing_;  // tiles of the group still to be read from the gate
    int strip_;             // 32-column strip of the first of them
    int tail_at_;           // entries of the tail that were dealt

    __device__ __forceinline__ static int lane() { return threadIdx.x % WARP; }
    __device__ __forceinline__ int tiles() const { return tiles_of(m_.columns, m_.tile); }
    __device__ __forceinline__ const word_t* tile_words(int t) const {
        return m_.words_of + ((long long)row_ * tiles() + t) * m_.words;
    }

    __device__ __forceinline__ void open_group(int first) {
        const int t = first + lane(), slots = m_.words - 1;
        const int count = t < tiles() ? (int)*tile_words(t) : 0;
        group_ = first, at_ = 0, strip_ = 0;
        overflowing_ = __ballot_sync(ALL_LANES, m_.gate && count > slots);
        mine_ = count <= slots ? count : m_.gate ? 0 : slots;
        through_ = sum_up_to_lane(mine_);
        listed_ = __shfl_sync(ALL_LANES, through_, WARP - 1);
    }

    __device__ __forceinline__ void deal(Entries& e) {
        const int i = at_ + lane();
        at_ += WARP;
        const int owner = first_reaching_past(i, through_);  // the lane of its tile
        const int before = __shfl_sync(ALL_LANES, through_ - mine_, owner);
        e.lanes = __ballot_sync(ALL_LANES, i < listed_);
        e.value = 0.0f, e.column = 0;
        if (i < listed_) {
            const word_t w = tile_words(group_ + owner)[1 + i - before];
            e.value = to_float(word_value(w));
            e.column = (group_ + owner) * m_.tile + word_column(w);
        }
    }

    __device__ __forceinline__ void read_gate(Entries& e) {
        const int t = group_ + __ffs(overflowing_) - 1, width = tile_width(m_.columns, m_.tile, t);
        const int c = strip_ * WARP + lane();
        e.column = t * m_.tile + c;
        const value_t v = c < width ? m_.gate[(long long)row_ * m_.columns + e.column] : from_float(0.0f);
        e.lanes = __ballot_sync(ALL_LANES, kept(v));
        e.value = to_float(v);
        if (++strip_ * WARP >= width) strip_ = 0, overflowing_ &= overflowing_ - 1;
    }

    __device__ __forceinline__ bool read_tail(Entries& e) {
        const long long i = m_.tail_pointer[row_] + tail_at_ + lane(), end = m_.tail_pointer[row_ + 1];
        tail_at_ += WARP;
        e.lanes = __ballot_sync(ALL_LANES, i < end);
        e.column = i < end ? m_.tail_column[i] : 0;
        e.value = i < end ? to_float(m_.tail_value[i]) : 0.0f;
        return e.lanes;
    }
};

// Walks the kept entries of one packed row whose overflow lies in the pool (twell.cuh), up to 32 at a time, one a lane;
// and hands on the rows that the pool could not hold.
//
// As in RowWalk the entries of 32 tiles form one list. Here it holds all their values: of each tile those in its words,
// then those in the pool. So the order, and with it every bit of the sums, is that of tiles with a slot for every
// column. Where the pooled values of a tile begin follows from the counts of the earlier rows of the row's group. Those
// counts are loaded only for a tile that overflows, by 16 lanes at once.
#pragma once
#include "dense_row.cuh"
#include "row_walk.cuh"

static_assert(POOL_ROWS <= WARP, "a lane counts for each row of a group");

struct Pooled {
    const word_t* words_of;  // [rows][tiles][POOLED_WORDS]
    const word_t* pool;      // [ceil(rows / POOL_ROWS)][tiles][POOL_WORDS]
    int columns;
};

struct RowFacts {
    int kept;
    bool pooled;  // whether some tile has more values than slots
    bool beyond;  // whether the pool could not hold some
    bool lost;    // whether others have to compute the row
};

class PoolWalk {
public:
    __device__ __forceinline__ PoolWalk(const Pooled& m, int row) : m_(m), row_(row) { open_group(0); }

    // Before the first call of next. A row is lost if it has more values than the pool could take, or more than `most`.
    __device__ __forceinline__ RowFacts facts(int most) {
        RowFacts f = {0, false, false, false};
        for (;;) {
            const bool over = mine_ > SLOTS;
            f.kept += listed_;
            f.pooled |= __any_sync(ALL_LANES, over);
            f.beyond |= __any_sync(ALL_LANES, over && pooled_at_ + mine_ - SLOTS > POOL_WORDS);
            if (group_ + WARP >= tiles()) break;
            open_group(group_ + WARP);
        }
        if (group_) open_group(0);
        f.lost = f.beyond || f.kept > most;
        return f;
    }

    // The next up to 32 entries; false when the row is done. The whole warp calls it together.
    __device__ __forceinline__ bool next(Entries& e) {
        while (at_ >= listed_) {
            if (group_ + WARP >= tiles()) return false;
            open_group(group_ + WARP);
        }
        deal(e);
        return true;
    }

    // The place of this lane's entry, of the last call of next, in two arrays laid out like the words and the pool.
    __device__ __forceinline__ float* beside(float* of_words, float* of_pool) const {
        return in_pool_ ? of_pool + word_at_ : of_words + word_at_;
    }

private:
    const Pooled& m_;
    const int row_;
    int group_;          // first tile of the group
    int mine_;           // entries of this lane's tile
    int through_;        // entries up to and including this lane's tile
    int pooled_at_;      // where those of this lane's tile that lie in the pool begin
    int listed_, at_;    // entries of the group, and how many were dealt
    bool in_pool_;       // whether this lane's entry was read from the pool,
    long long word_at_;  // and from which word

    __device__ __forceinline__ static int lane() { return threadIdx.x % WARP; }
    __device__ __forceinline__ int tiles() const { return tiles_of(m_.columns, POOLED_TILE); }
    __device__ __forceinline__ const word_t* tile_words(int row, int t) const {
        return m_.words_of + ((long long)row * tiles() + t) * POOLED_WORDS;
    }

    __device__ __forceinline__ void open_group(int first) {
        const int t = first + lane();
        mine_ = t < tiles() ? (int)*tile_words(row_, t) : 0;
        group_ = first, at_ = 0, pooled_at_ = 0;
        for (unsigned over = __ballot_sync(ALL_LANES, mine_ > SLOTS); over; over &= over - 1) {
            const int owner = __ffs(over) - 1, earlier = row_ / POOL_ROWS * POOL_ROWS + lane();
            int taken = earlier < row_ ? max((int)*tile_words(earlier, first + owner) - SLOTS, 0) : 0;
            taken = sum_over_lanes(taken);
            if (lane() == owner) pooled_at_ = taken;
        }
        through_ = sum_up_to_lane(mine_);
        listed_ = __shfl_sync(ALL_LANES, through_, WARP - 1);
    }

    __device__ __forceinline__ void deal(Entries& e) {
        const int i = at_ + lane();
        at_ += WARP;
        const int owner = first_reaching_past(i, through_);
        const int slot = i - __shfl_sync(ALL_LANES, through_ - mine_, owner);
        const int pooled_at = __shfl_sync(ALL_LANES, pooled_at_, owner);
        e.lanes = __ballot_sync(ALL_LANES, i < listed_);
        e.value = 0.0f, e.column = 0;
        if (i < listed_) {
            const int t = group_ + owner;
            in_pool_ = slot >= SLOTS;
            word_at_ = in_pool_ ? ((long long)(row_ / POOL_ROWS) * tiles() + t) * POOL_WORDS + pooled_at + slot - SLOTS
                                : ((long long)row_ * tiles() + t) * POOLED_WORDS + 1 + slot;
            const word_t w = (in_pool_ ? m_.pool : m_.words_of)[word_at_];
            e.value = to_float(word_value(w));
            e.column = t * POOLED_TILE + word_column(w);
        }
    }
};

// stats += tokens, kept entries, rows that are read from the pool, lost rows; null: not counted. The number of tokens
// is that of blocks, and known to the first.
__device__ __forceinline__ void count_row(unsigned long long* stats, const RowFacts& f) {
    if (!stats || threadIdx.x != 0) return;
    if (blockIdx.x == 0) atomicAdd(&stats[0], (unsigned long long)gridDim.x);
    if (f.kept) atomicAdd(&stats[1], (unsigned long long)f.kept);
    if (f.pooled || f.lost) atomicAdd(&stats[f.lost ? 3 : 2], 1ull);
}

// What the first pass of a gated layer (smxx_up.cu) leaves for the second (smxx_down.cu), for each row, in the row's
// part of an array of floats laid out like the words: pairs of a hidden value's bits and its column, in the order of
// the walk. In the first word of the first pair's place is a head, what became of the row: kept values * 8 + (in the
// pool ? 4 : 0) + one of
#define ROW_LISTED 0
#define ROW_BESIDE 1  // too many for pairs: the hidden values lie beside the words (PoolWalk::beside)
#define ROW_NAN 2     // all of y's row is NaN
#define ROW_LOST 3
struct HiddenRow {
    int2* pairs;
    int room;  // how many pairs fit, the head's included
    __device__ __forceinline__ HiddenRow(float* hidden, int row, int columns)
        : pairs((int2*)(hidden + (long long)row * tiles_of(columns, POOLED_TILE) * POOLED_WORDS)),
          room(tiles_of(columns, POOLED_TILE) * POOLED_WORDS / 2) {}
    __device__ __forceinline__ int& head() const { return pairs->x; }
};

// As count_row, but once for the POOL_ROWS rows of a group: the first row's block does it, by the rows' heads. Where a
// row takes few nanoseconds, an atomic operation for each on one number would be felt.
__device__ __forceinline__ void count_rows(unsigned long long* stats, float* hidden, int columns) {
    const int row = blockIdx.x + threadIdx.x;
    if (!stats || blockIdx.x % POOL_ROWS != 0 || threadIdx.x >= WARP) return;
    const bool mine = threadIdx.x < POOL_ROWS && row < (int)gridDim.x;
    const int head = mine ? HiddenRow(hidden, row, columns).head() : 0;
    const int kept = sum_over_lanes(head >> 3);
    const unsigned lost = __ballot_sync(ALL_LANES, (head & 3) == ROW_LOST), pooled = __ballot_sync(ALL_LANES, head & 4) & ~lost;
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) atomicAdd(&stats[0], (unsigned long long)gridDim.x);
    if (kept) atomicAdd(&stats[1], (unsigned long long)kept);
    if (pooled) atomicAdd(&stats[2], (unsigned long long)__popc(pooled));
    if (lost) atomicAdd(&stats[3], (unsigned long long)__popc(lost));
}

// A lost row takes the next slot of `lost` ([0]: how many there are, [1 + slot]: which row, or ~row if the pool could not
// hold it), and its x goes to lost_x[slot]. Rows come in any order; what is computed from them must not depend on it. All
// of the block calls it.
__device__ __forceinline__ void hand_on(const RowVectors& x, int row, const RowFacts& facts, int* lost, value_t* lost_x) {
    __shared__ int slot;
    if (threadIdx.x == 0) {
        slot = atomicAdd(lost, 1);
        lost[1 + slot] = facts.beyond ? ~row : row;
    }
    __syncthreads();
    if (team() == 0) copy_row(lost_x + (long long)slot * D_MODEL, x);
}

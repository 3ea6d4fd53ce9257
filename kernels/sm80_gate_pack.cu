// gate_pack: x [tokens, d_model] x gate [d_ff, d_model]^T (+ bias) -> TwELL words and the pool, by mma.sync: Ampere and
// Ada, Turing without asynchronous copies, and newer GPUs that have no kernel of their own. The dense gate is never
// stored.
//
// What bounds it: the tensor cores. On an H100 they take mma.sync at a lower rate than wgmma; bytes are no limit.
//
//   gate_pack_v1  one stage: load, wait, multiply. Packs by ballots, 32 columns of a row at a time
//   gate_pack_v2  several stages under way (cp.async), and fragments loaded one product ahead
//   gate_pack_v3  each lane finds its firing columns as bits, in registers; a warp packs 16 rows at once by counting
//                 bits
//   gate_pack_v4  blocks stay and walk over tiles: the next tile's stages are under way while one is packed
//
// Compile with -DVERSION=1..4, -DBK=32|64 (columns of x and gate in a stage), -DSTAGES=2.. and -DTURING for sm_75 (or
// to test its code on a newer GPU). Worklog: docs/kernels/sm80_gate_pack.md
#include "ptx_sm80.cuh"

#ifndef BM
#define BM 128  // tokens of a block's tile
#endif
#define BN POOLED_TILE  // its neurons: a block owns whole tiles of the format
#ifndef THREADS
#define THREADS 256  // 2 x 4 warps of 64 x 64
#endif
#define STAGE_ROW_BYTES (BK * 2)
#define STAGE_BYTES ((BM + BN) * STAGE_ROW_BYTES)
#define STAGE_CHUNKS (BK / 8)  // 16-byte chunks of one row of a stage
#define GROUP 8                  // rows of tiles that blocks walk together
#define MASKS (VERSION > 2)      // packed by a bit for each column; v1 and v2: by ballots
#define PIPELINED (VERSION > 1)  // v1 has one stage
#define APART (VERSION > 3)      // tiles are laid out for packing beside the stages
// Where half a tile's rows are laid out for packing: values, then the bits. The little shared memory of sm_75 has room
// for one half, so the two take turns there from v3 on.
#define HALF_ROWS (BM / 2)
#define STRIPS (BN / 16)
#define HALF_VALUES (HALF_ROWS * BN * 2)
#define HALF_BYTES (HALF_VALUES + (MASKS ? HALF_ROWS * BN / 8 : 0))
#if defined(TURING)
#define TAKE_TURNS MASKS
#else
#define TAKE_TURNS 0
#endif

struct Problem {
    const value_t *x, *gate, *bias;
    word_t *packed, *pool;
    int tokens, d_model, d_ff;
    __device__ __forceinline__ int row_tiles() const { return (tokens + BM - 1) / BM; }
    __device__ __forceinline__ int column_tiles() const { return tiles_of(d_ff, BN); }
    __device__ __forceinline__ int tiles() const { return row_tiles() * column_tiles(); }
};

// Tiles are numbered so that those of one wave share rows of x and of the weights: down GROUP tiles, then to the right.
struct Tile { int m, n; };
__device__ __forceinline__ Tile tile_at(const Problem& p, int number) {
    const int columns = p.column_tiles(), first = number / (GROUP * columns) * GROUP;
    const int within = number % (GROUP * columns);
    const int height = min(GROUP, p.row_tiles() - first);
    return {first + within % height, within / height};
}

// ---------------------------------------------------------------- from global to shared memory
// A stage holds BK values of each of 128 rows of x, then of 256 weight rows. Its 16-byte chunks are swizzled, so that
// the eight rows of an ldmatrix, and the eight chunks that a quarter of a warp writes, lie in different banks.
__device__ __forceinline__ unsigned place(int row, int chunk) {
    const int key = BK == 64 ? row % 8 : row / 2 % 4;
    return row * STAGE_ROW_BYTES + (chunk ^ key) * 16;
}
// Which weight row is stored at a place. A lane holds columns 2q and 2q + 1 of a product tile; in this order of weight
// rows the 64 columns of a warp give each lane 16 neighbouring neurons, of which tile j holds numbers j and j + 8.
__device__ __forceinline__ int neuron_at(int place) { return place / 64 * 64 + place % 8 * 8 + place / 8 % 8; }

// One thread's part of bringing in the stages, in the order in which they are used, on from one tile of the block to
// the next.
class Feed {
public:
    __device__ __forceinline__ Feed(const Problem& p, unsigned memory)
        : p_(p), row_((int)threadIdx.x / STAGE_CHUNKS), chunk_((int)threadIdx.x % STAGE_CHUNKS),
          place_(place(row_, chunk_)), to_(memory + place_), tile_(blockIdx.x), k_(0), slot_(0) {
        open_tile();
    }
    // Start a part of the next stage; the last part moves on. part and parts have to be known to the compiler.
    __device__ __forceinline__ void start(int part = 0, int parts = 1) {
        const bool in_row = k_ + chunk_ * 8 < p_.d_model;
        const int x_rows = in_row ? x_rows_ : 0, gate_rows = in_row ? gate_rows_ : 0;
        const unsigned pitch = p_.d_model * 2;  // ops/ampere.py refuses widths of which 256 rows take 4 GiB or more
        // After the last tile there is nothing to bring, and zeros would run into the tile laid out in the same memory.
        if (APART || tile_ < p_.tiles()) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                if (i * parts / COPIES != part) continue;
                const int at = i * STRIDE;  // row of the stage, less row_
                const bool left = at < BM;
                const int row = left ? at : neuron_at(at - BM);  // neuron_at(row_ + n * STRIDE) is neuron_at(row_) + this
                const bool inside = row < (left ? x_rows : gate_rows);
                const char* from = (left ? x_ : gate_) + ((left ? x_offset() : gate_offset()) + row * pitch);
#if PIPELINED && ASYNC_COPIES
                copy_async(to_ + at * STAGE_ROW_BYTES, from, inside);
#else
                held_[i] = make_uint4(0, 0, 0, 0);
                if (inside) held_[i] = *(const uint4*)from;
#endif
            }
        }
        if (part + 1 < parts) return;
#if PIPELINED && ASYNC_COPIES
        commit_copies();
        next_slot();
#endif
        k_ += BK, x_ += STAGE_ROW_BYTES, gate_ += STAGE_ROW_BYTES;
        if (k_ >= p_.d_model) {
            k_ = 0, tile_ += gridDim.x;
            open_tile();
        }
    }
    // Make sure that the oldest stage that was started is in shared memory, as far as this thread brings it.
    __device__ __forceinline__ void land() {
#if PIPELINED && ASYNC_COPIES
        wait_copies<STAGES - 2>();
#else
#pragma unroll
        for (int i = 0; i < COPIES; ++i) store_shared(to_ + i * STRIDE * STAGE_ROW_BYTES, held_[i]);
        if (PIPELINED) next_slot();
#endif
    }

private:
    static constexpr int STRIDE = THREADS / STAGE_CHUNKS;  // a multiple of the swizzle
    static constexpr int COPIES = (BM + BN) / STRIDE;
    const Problem& p_;
    const int row_, chunk_;
    const unsigned place_;
    unsigned to_;  // this thread's first place in the next stage
    int tile_, k_, slot_;
    int x_rows_, gate_rows_;  // rows of x and of the weights from this thread's first on
    const char *x_, *gate_;   // the tile's first rows, at k_
#if !(PIPELINED && ASYNC_COPIES)
    uint4 held_[COPIES];
#endif

    __device__ __forceinline__ unsigned x_offset() const { return row_ * p_.d_model * 2 + chunk_ * 16; }
    __device__ __forceinline__ unsigned gate_offset() const { return neuron_at(row_) * p_.d_model * 2 + chunk_ * 16; }
    __device__ __forceinline__ void next_slot() {
        const bool wrap = ++slot_ == STAGES;
        to_ += wrap ? -(STAGES - 1) * STAGE_BYTES : STAGE_BYTES;
        if (wrap) slot_ = 0;
    }
    __device__ __forceinline__ void open_tile() {
        const int x_row = tile_ < p_.tiles() ? tile_at(p_, tile_).m * BM : p_.tokens;
        const int gate_row = tile_ < p_.tiles() ? tile_at(p_, tile_).n * BN : p_.d_ff;
        x_rows_ = p_.tokens - x_row - row_, gate_rows_ = p_.d_ff - gate_row - neuron_at(row_);
        x_ = (const char*)(p_.x + (long long)x_row * p_.d_model);
        gate_ = (const char*)(p_.gate + (long long)gate_row * p_.d_model);
    }
};

// ---------------------------------------------------------------- products of one stage
// What a warp holds of 16 steps along k: four tiles of its rows of x, eight of its weight rows.
struct Fragments {
    unsigned x[4][4], gate[8][2];
    // x_at, gate_at: this lane's places for k = 0 of the stage. The swizzle is an exclusive or, so moving along k is
    // one.
    __device__ __forceinline__ void load(unsigned x_at, unsigned gate_at, int k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) load_matrices(x[i], (x_at ^ k * 32) + i * 16 * STAGE_ROW_BYTES);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            unsigned two[4];
            load_matrices(two, (gate_at ^ k * 32) + j * 8 * STAGE_ROW_BYTES);
            gate[j][0] = two[0], gate[j][1] = two[1], gate[j + 1][0] = two[2], gate[j + 1][1] = two[3];
        }
    }
};
typedef float Sums[4][8][4];
__device__ __forceinline__ void multiply(Sums& sums, const Fragments& f) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) multiply_add(sums[i][j], f.x[i], f.gate[j][0], f.gate[j][1]);
}

struct Warp {  // where this thread's part of the product is
    int lane, m, n;
    __device__ __forceinline__ Warp() : lane(threadIdx.x % WARP), m(threadIdx.x / WARP / 4), n(threadIdx.x / WARP % 4) {}
    __device__ __forceinline__ unsigned x_place() const { return place(64 * m + lane % 16, lane / 16); }
    __device__ __forceinline__ unsigned gate_place() const { return place(BM + 64 * n + lane / 16 * 8 + lane % 8, lane / 8 % 2); }
    __device__ __forceinline__ int strip() const { return 4 * n + lane % 4; }  // its 16 neighbouring columns
};

// ---------------------------------------------------------------- packing
// Rounded values of half a tile lie in shared memory as [row][strip][pair], 512 bytes a row; pair j of a strip holds
// columns j and j + 8. The halves of a strip change places in odd rows: the lanes of a quarter warp write to different
// banks.
__device__ __forceinline__ int value_place(int row, int column) {
    return row * (BN * 2) + column / 16 * 32 + (column % 8 * 4 ^ row % 2 * 16) + column / 8 % 2 * 2;
}

// Bit c: whether column c of the strip fires. Neither -0 nor a negative does, and NaN is 0x7fff after rounding: so it
// is those whose sign is clear and whose other bits are not all zero.
__device__ __forceinline__ unsigned firing(const unsigned (&pairs)[8]) {
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= (((pairs[j] & 0x7fff7fffu) + 0x7fff7fffu) & ~pairs[j] & 0x80008000u) >> (15 - j);
    return (bits | bits >> 8) & 0xffffu;
}

// Round the sums and write them where all four warps of these rows can read them; with MASKS only the strips of which a
// column fires. values: HALF_BYTES.
__device__ __forceinline__ void dump(Sums& sums, const Problem& p, const Tile& t, const Warp& w, unsigned char* values) {
    if (p.bias) {
        const int first = t.n * BN + w.strip() * 16;
#pragma unroll
        for (int j = 0; j < 8; ++j) {  // d_ff is a multiple of 8
            const float low = first < p.d_ff ? to_float(p.bias[first + j]) : 0.0f;
            const float high = first + 8 < p.d_ff ? to_float(p.bias[first + 8 + j]) : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[i][j][0] += low, sums[i][j][1] += high;
                sums[i][j][2] += low, sums[i][j][3] += high;
            }
        }
    }
    const int row = w.lane / 4;  // the lane's first; the others are 8 apart
    const unsigned first_half = shared_address(values) + value_place(row, w.strip() * 16);
    const unsigned second_half = shared_address(values) + value_place(row, w.strip() * 16 + 4);
    unsigned short* masks = (unsigned short*)(values + HALF_VALUES) + row * STRIPS + w.strip();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        unsigned pairs[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) pairs[j] = rounded_pair(sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]);
        const unsigned bits = MASKS ? firing(pairs) : 1;
        if (MASKS) masks[i * 8 * STRIPS] = bits;
        store_shared_if(bits, first_half + i * 8 * BN * 2, pairs[0], pairs[1], pairs[2], pairs[3]);
        store_shared_if(bits, second_half + i * 8 * BN * 2, pairs[4], pairs[5], pairs[6], pairs[7]);
    }
}

// Where the kept values of one row go: the first SLOTS to its words, the others to the group's pool from `start` on.
struct Destination {
    word_t *words, *pool;
    int start;
    __device__ __forceinline__ void put(int rank, word_t word) const {
        if (rank < SLOTS) words[1 + rank] = word;
        else if (start + rank - SLOTS < POOL_WORDS) pool[start + rank - SLOTS] = word;
    }
};
__device__ __forceinline__ word_t* words_of(const Problem& p, int token, int n) {
    return p.packed + ((long long)token * p.column_tiles() + n) * POOLED_WORDS;
}
__device__ __forceinline__ word_t* pool_of(const Problem& p, int token, int n) {
    return p.pool + ((long long)(token / POOL_ROWS) * p.column_tiles() + n) * POOL_WORDS;
}

// One warp packs a group of 16 rows, row after row, 32 columns at a time: a ballot gives each kept value its place in
// line. row: the first of them in the half tile; token: in the matrix.
__device__ __forceinline__ void pack_by_ballots(const Problem& p, int n, int row, int token, const unsigned char* values) {
    const int lane = threadIdx.x % WARP, width = tile_width(p.d_ff, BN, n);
    int start = 0;  // in the pool
    for (int r = 0; r < POOL_ROWS && token + r < p.tokens; ++r) {
        const Destination to = {words_of(p, token + r, n), pool_of(p, token, n), start};
        int count = 0;
#pragma unroll
        for (int c = lane; c < BN; c += WARP) {
            const value_t v = *(const value_t*)(values + value_place(row + r, c));
            const bool keep = c < width && fires(v);
            const unsigned kept = __ballot_sync(ALL_LANES, keep);
            if (keep) to.put(count + __popc(kept & ((1u << lane) - 1)), make_word(v, c));
            count += __popc(kept);
        }
        if (lane == 0) to.words[0] = count;
        start += max(0, count - SLOTS);
    }
}

// One warp packs a group of 16 rows at once: two lanes a row, each half of its columns, from the bits that dump() left.
__device__ __forceinline__ void pack_by_masks(const Problem& p, int n, int row, int token, const unsigned char* values) {
    const int lane = threadIdx.x % WARP, half = lane % 2;
    row += lane / 2, token += lane / 2;
    const int width = token < p.tokens ? tile_width(p.d_ff, BN, n) : 0;
    const uint4 m = *(const uint4*)(values + HALF_VALUES + row * (BN / 8) + half * 16);
    unsigned long long bits[2] = {m.x | (unsigned long long)m.y << 32, m.z | (unsigned long long)m.w << 32};
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // beyond the matrix lies 0, or NaN where the row of x is not finite
        const int inside = width - 128 * half - 64 * i;
        if (inside < 64) bits[i] = inside <= 0 ? 0 : bits[i] & ((1ull << inside) - 1);
    }
    const int mine = __popcll(bits[0]) + __popcll(bits[1]), other = __shfl_xor_sync(ALL_LANES, mine, 1);
    const int count = mine + other, excess = max(0, count - SLOTS);
    int through = excess;  // becomes the sum over the rows up to this one
    if (__any_sync(ALL_LANES, excess)) {
#pragma unroll
        for (int step = 2; step < WARP; step *= 2) {
            const int before = __shfl_up_sync(ALL_LANES, through, step);
            if (lane >= step) through += before;
        }
    }
    const Destination to = {words_of(p, token, n), pool_of(p, token, n), through - excess};
    if (half == 0 && token < p.tokens) to.words[0] = count;
    int rank = half ? other : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll 1
        for (unsigned long long left = bits[i]; left; left &= left - 1) {
            const int c = 128 * half + 64 * i + __ffsll(left) - 1;
            to.put(rank++, make_word(*(const value_t*)(values + value_place(row, c)), c));
        }
}

// Four warps own half of the rows, lay them out and pack them; only these four wait for each other. memory: free to
// overwrite, HALF_BYTES for each half, or for both where they take turns.
__device__ __forceinline__ void pack_tile(Sums& sums, const Problem& p, int tile, const Warp& w, unsigned char* memory) {
    const Tile t = tile_at(p, tile);
    unsigned char* values = memory + (TAKE_TURNS ? 0 : w.m * HALF_BYTES);
    const int row = w.n * POOL_ROWS, token = t.m * BM + w.m * HALF_ROWS + row;
#if TAKE_TURNS
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
        if (turn == w.m) dump(sums, p, t, w, values);
        __syncthreads();
        if (turn == w.m) pack_by_masks(p, t.n, row, token, values);
        __syncthreads();
    }
#else
    dump(sums, p, t, w, values);
    named_barrier(1 + w.m, THREADS / 2);
    if (MASKS) pack_by_masks(p, t.n, row, token, values);
    else pack_by_ballots(p, t.n, row, token, values);
#endif
}

// ---------------------------------------------------------------- the kernels
#define PARAMETERS                                                                                                        \
    const value_t *__restrict__ x, const value_t *__restrict__ gate, const value_t *__restrict__ bias,                    \
        word_t *__restrict__ packed, word_t *__restrict__ pool, int *__restrict__ lost, int tokens, int d_model, int d_ff
#define BEGIN                                                             \
    extern __shared__ __align__(1024) unsigned char memory[];             \
    const Problem p = {x, gate, bias, packed, pool, tokens, d_model, d_ff}; \
    const Warp w;                                                         \
    if (lost && blockIdx.x == 0 && threadIdx.x == 0) lost[0] = 0;  /* the reader of the words counts there */

#define NUMBERED(VERSION) gate_pack_v##VERSION
#define KERNEL(VERSION) NUMBERED(VERSION)

#if VERSION == 1
extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(VERSION)(PARAMETERS) {
    BEGIN
    Feed feed(p, shared_address(memory));
    const unsigned x_at = shared_address(memory) + w.x_place(), gate_at = shared_address(memory) + w.gate_place();
    Sums sums = {};
    for (int k = 0; k < d_model; k += BK) {
        feed.start();
        __syncthreads();  // the step before has been read
        feed.land();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BK / 16; ++i) {
            Fragments f;
            f.load(x_at, gate_at, i);
            multiply(sums, f);
        }
    }
    __syncthreads();
    pack_tile(sums, p, blockIdx.x, w, memory);
}
#else
// The step after is loaded while one is multiplied: fragments within a stage, and stages from global memory. v4 lays a
// tile out beside the stages, so that the next tile's are under way while it is packed.
extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(VERSION)(PARAMETERS) {
    BEGIN
    constexpr int STEPS = BK / 16;
    const unsigned base = shared_address(memory);
    Feed feed(p, base);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) feed.start();
    feed.land();
    __syncthreads();

    unsigned x_at = base + w.x_place(), gate_at = base + w.gate_place();
    int slot = 0;
    Fragments f[2];
    f[0].load(x_at, gate_at, 0);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < p.tiles(); tile += gridDim.x) {
        Sums sums = {};
#pragma unroll 1
        for (int k = 0; k < d_model; k += BK) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                if (i == STEPS - 1) {
                    // After the barrier this stage has been read by all warps, and the next one is there for all.
                    feed.land();
                    __syncthreads();
                    const bool wrap = ++slot == STAGES;
                    const int by = wrap ? -(STAGES - 1) * STAGE_BYTES : STAGE_BYTES;
                    if (wrap) slot = 0;
                    x_at += by, gate_at += by;
                }
                f[(i + 1) % 2].load(x_at, gate_at, (i + 1) % STEPS);
                if (i < STEPS - 1) feed.start(i, STEPS - 1);
                multiply(sums, f[i % 2]);
            }
        }
        if (!APART) __syncthreads();  // every warp has read the stage after the last, which is none
        pack_tile(sums, p, tile, w, memory + (APART ? STAGES * STAGE_BYTES : 0));
    }
}
#endif

#ifdef LAUNCH_SHARED  // what a launch asks for
#define PIPELINE_BYTES (STAGES * STAGE_BYTES)
#define PACKING_BYTES ((TAKE_TURNS ? 1 : 2) * HALF_BYTES)
static_assert(LAUNCH_SHARED == (APART                            ? PIPELINE_BYTES + PACKING_BYTES
                                : PIPELINE_BYTES > PACKING_BYTES ? PIPELINE_BYTES
                                                                 : PACKING_BYTES),
              "ops/gate_pack.py has another size");
#endif

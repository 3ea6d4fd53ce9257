// Who touched which bytes, and what puts one access before another: program order, __syncthreads, __syncwarp, and a flag:
// a fence, then an atomic or a volatile store (a signal), then an atomic or a volatile load of the same word that sees it.
//
// Every word of shared memory and of the arrays keeps its last few uses. An access that conflicts with one of them (both
// reach the same byte, at least one writes, and they are not two atomics) without an order between them is a race.
#include <string.h>

#include <algorithm>

#include "runtime.h"

// ---- which accesses conflict, and which one makes another one redundant ----

// Bit b of row a: accesses of the kinds a and b conflict.
constexpr uint8_t bits(std::initializer_list<Use> uses) {
    uint8_t all = 0;
    for (Use use : uses) all = (uint8_t)(all | 1 << use);
    return all;
}
constexpr uint8_t CONFLICTS[] = {
    /* LOADS */ bits({STORES, CHANGES, SETS}),
    /* STORES */ bits({LOADS, STORES, CHANGES, LOOKS, SETS}),
    /* CHANGES */ bits({LOADS, STORES}),
    /* LOOKS */ bits({STORES}),
    /* SETS */ bits({LOADS, STORES, SETS}),
};
static bool writes(int use) { return use != LOADS && use != LOOKS; }

static bool in_block(const Thread& me, const Access& a) {
    if (a.block != (uint32_t)me.worker->block + 1) return false;
    if (a.thread == me.number || a.epoch < me.worker->epoch) return true;
    return a.thread / LANES_A_WARP == me.number / LANES_A_WARP && me.seen[a.thread % LANES_A_WARP] >= a.clock;
}

// ---- flags ----

static bool is_shared(const Worker& w, uint64_t address) {
    return address - (uint64_t)w.shared_begin < w.launch->thread_local_bytes;
}

static Flags& flags_at(Worker& w, uint64_t word) { return is_shared(w, word) ? w.own_flags : *w.flags; }

static void learn(Known& to, uint64_t word, uint32_t count) {
    auto at = std::lower_bound(to.begin(), to.end(), std::make_pair(word, 0u));
    if (at != to.end() && at->first == word) at->second = std::max(at->second, count);
    else to.insert(at, {word, count});
}
static void learn(Known& to, const Known& more) {
    for (const auto& [word, count] : more) learn(to, word, count);
}

static bool covers(const Thread& me, const Known& known, const Access& a, uint64_t word) {
    for (const auto& [flag, count] : known) {
        Flags& flags = flags_at(*me.worker, flag);
        std::lock_guard<std::mutex> hold(flags.lock);
        const auto found = flags.signals.find(flag);
        if (found == flags.signals.end()) continue;
        for (uint32_t i = 0; i < count && i < found->second.size(); ++i) {
            const Signal& s = found->second[i];
            if (s.block != a.block) continue;
            const Fence* f = a.block == (uint32_t)me.worker->block + 1 ? s.near.get() : s.far.get();
            if (!f) continue;
            if (a.epoch < f->epoch) return true;
            if (a.thread / LANES_A_WARP == f->warp && f->seen[a.thread % LANES_A_WARP] >= a.clock) return true;
            if (flag == word && a.thread == s.thread && a.use == CHANGES) return true;  // the signal itself
        }
    }
    return false;
}

static bool ordered(const Thread& me, const Access& a, uint64_t word) {
    return in_block(me, a) || covers(me, me.known, a, word) || covers(me, me.worker->known, a, word);
}

// The access that looked at a flag is done: what the flag says is known from here on.
void order_flag(Thread& me) {
    if (!me.looked_at) return;
    const uint64_t flag = me.looked_at;
    me.looked_at = 0;
    Worker& w = *me.worker;
    Flags& flags = flags_at(w, flag);
    if (!flags.any.load(std::memory_order_relaxed)) return;
    std::lock_guard<std::mutex> hold(flags.lock);
    const auto found = flags.signals.find(flag);
    if (found == flags.signals.end()) return;
    const auto before = std::lower_bound(me.known.begin(), me.known.end(), std::make_pair(flag, 0u));
    uint32_t i = before != me.known.end() && before->first == flag ? before->second : 0;
    const uint32_t count = (uint32_t)found->second.size();
    learn(me.known, flag, count);
    for (; i < count; ++i) {
        const Signal& s = found->second[i];
        const Fence* f = s.block == (uint32_t)w.block + 1 ? s.near.get() : s.far.get();
        if (f) learn(me.known, f->known);  // what its thread had learned from others
    }
    w.uses_flags = true;
}

static void signal(Thread& me, uint64_t word) {
    if (!me.near) return;
    Flags& flags = flags_at(*me.worker, word);
    std::lock_guard<std::mutex> hold(flags.lock);
    flags.signals[word].push_back({(uint32_t)me.worker->block + 1, (uint32_t)me.number, me.near, me.far});
    flags.any.store(true, std::memory_order_relaxed);
}

static std::shared_ptr<Fence> fence_of(const Thread& me, uint32_t epoch) {
    auto fence = std::make_shared<Fence>();
    fence->epoch = epoch, fence->warp = (uint32_t)me.number / LANES_A_WARP;
    memcpy(fence->seen, me.seen, sizeof fence->seen);
    fence->known = me.worker->known;
    learn(fence->known, me.known);
    return fence;
}

// __threadfence() of every scope but the block's is `device`.
extern "C" void sim_fence(int device) {
    if (!sim_running.load(std::memory_order_relaxed)) return;
    Thread& me = *self();
    if (!me.worker->launch->watch) return;
    order_flag(me);
    me.seen[me.lane] = me.clock++;
    me.near = fence_of(me, me.worker->epoch);
    me.worker->uses_flags = true;
    if (device) me.far = me.near, me.unfenced = false;
}

// ---- barriers ----

// A warp-wide operation hands on what its lanes know of flags; __syncwarp also puts what came before it in order, and
// makes the lanes' fences one: what each has written and fenced, any of them can signal.
void order_warp(Warp& w, uint32_t lanes, bool sync) {
    uint32_t known[LANES_A_WARP] = {};
    if (sync) {
        for (uint32_t left = lanes; left; left &= left - 1) {
            Thread& t = *w.lane[__builtin_ctz(left)];
            t.seen[t.lane] = t.clock++;
            for (int i = 0; i < LANES_A_WARP; ++i) known[i] = std::max(known[i], t.seen[i]);
        }
        for (uint32_t left = lanes; left; left &= left - 1) memcpy(w.lane[__builtin_ctz(left)]->seen, known, sizeof known);
    }
    const Thread& first = *w.lane[__builtin_ctz(lanes)];
    Worker& worker = *first.worker;
    for (uint32_t left = lanes; left; left &= left - 1) order_flag(*w.lane[__builtin_ctz(left)]);
    if (!worker.uses_flags) return;
    Known all;
    bool fenced = sync;
    for (uint32_t left = lanes; left; left &= left - 1) {
        const Thread& t = *w.lane[__builtin_ctz(left)];
        learn(all, t.known);
        fenced &= !t.unfenced;
    }
    std::shared_ptr<Fence> common;
    for (uint32_t left = lanes; left; left &= left - 1) {
        Thread& t = *w.lane[__builtin_ctz(left)];
        t.known = all;
        if (!fenced || !t.far) continue;
        if (!common) common = fence_of(t, worker.epoch);
        t.near = t.far = common;
    }
}

void order_barrier(Worker& w) {
    ++w.epoch;
    for (size_t i = 0; i < w.count; ++i) order_flag(w.threads[i]);
    if (!w.uses_flags) return;
    bool fenced = true;
    for (size_t i = 0; i < w.count; ++i) {
        Thread& t = w.threads[i];
        learn(w.known, t.known);
        t.known.clear();
        fenced &= !t.unfenced;
    }
    std::shared_ptr<Fence> common;
    for (size_t i = 0; i < w.count && fenced; ++i) {
        Thread& t = w.threads[i];
        if (!t.far) continue;
        if (!common) common = fence_of(t, w.epoch);
        t.near = t.far = common;
    }
}

void order_start(Worker& w) {
    w.epoch = 0, w.uses_flags = false;
    w.known.clear(), w.own_flags.signals.clear(), w.own_flags.any = false;
}

// ---- an access ----

struct Locked {
    Word& word;
    const bool shared;
    Locked(Word& word, bool shared) : word(word), shared(shared) {
        if (!shared) while (__atomic_test_and_set(&word.lock, __ATOMIC_ACQUIRE)) {}
    }
    ~Locked() { if (!shared) __atomic_clear(&word.lock, __ATOMIC_RELEASE); }
};

// Notes one use of a word, and returns whether it races; then `other` is the use that it races with.
static bool note(const Thread& me, Word& word, uint64_t address, const Access& now, Access& other, bool shared) {
    const Locked hold(word, shared);
    int n = 0, same = 0, oldest = -1;
    for (int i = 0; i < USES && word.uses[i].block; ++i) {
        const Access& a = word.uses[i];
        const bool conflict = a.mask & now.mask && CONFLICTS[now.use] >> a.use & 1;
        const bool covered = !(a.mask & ~now.mask) && !(CONFLICTS[a.use] & ~CONFLICTS[now.use]);
        const bool before = (conflict || covered) && ordered(me, a, address);
        if (conflict && !before) {
            other = a;
            return true;
        }
        if (covered && before) continue;  // whatever races with it races with this access, too
        if (a.use == now.use && ++same == 1) oldest = n;
        word.uses[n++] = a;
    }
    if (n == USES || same > 1) {  // a few of one kind are enough: a later access is not ordered after all of them
        const int out = oldest >= 0 ? oldest : 0;
        for (int i = out; i + 1 < n; ++i) word.uses[i] = word.uses[i + 1];
        --n;
    }
    word.uses[n++] = now;
    if (n < USES) word.uses[n].block = 0;
    return false;
}

bool order_access(Thread& me, Word* words, uint64_t begin, uint64_t address, uint32_t size, Use use, uint32_t site,
                  bool& unwritten, Access& other) {
    Worker& w = *me.worker;
    const bool shared = is_shared(w, address), flag = use >= CHANGES;
    Access now = {(uint32_t)w.block + 1, (uint16_t)me.number, 0, (uint8_t)use, w.number, w.epoch, me.clock, site};
    if (!shared && writes(use)) me.unfenced = true;
    for (uint64_t at = address; at < address + size; at = (at | 3) + 1) {
        Word& word = words[(at >> 2) - (begin >> 2)];
        const uint64_t last = std::min((at | 3) + 1, address + size);
        now.mask = (uint8_t)((1u << ((last - 1 & 3) + 1)) - (1u << (at & 3))) & 15;
        if (shared && word.serial != w.block_serial) word = Word{}, word.serial = w.block_serial;
        if (shared && now.mask & ~word.written) unwritten = true;
        if (note(me, word, at & ~3ull, now, other, shared)) return true;
        if (shared && writes(use)) word.written |= now.mask;
    }
    if (!flag) return false;
    if (writes(use)) signal(me, address & ~3ull);
    if (use != SETS) me.looked_at = address & ~3ull;
    return false;
}

// Checks every access of a watched build. The compiler adds ThreadSanitizer's instrumentation, calls of
// __tsan_read4(address) and the like, and this file defines these functions: they check bounds, alignment, initialisation
// and order, and keep a log for count.cpp.
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#define HOOK extern "C" __attribute__((visibility("hidden"), noinline))
#define HERE (uint64_t) __builtin_return_address(0)

bool Sites::before(uint32_t a, uint32_t b) const {
    if (a == b) return false;
    while (all[a].depth > all[b].depth) {
        a = all[a].parent;
        if (a == b) return true;  // a lies inside the call b: it comes before what follows b
    }
    while (all[b].depth > all[a].depth) {
        b = all[b].parent;
        if (a == b) return false;
    }
    while (all[a].parent != all[b].parent) a = all[a].parent, b = all[b].parent;
    return all[a].pc < all[b].pc;
}

uint32_t Sites::find(uint32_t parent, uint64_t pc) {
    const uint64_t key = pc * 0x9e3779b97f4a7c15u ^ ((uint64_t)parent << 32 | parent);
    uint32_t at = NO_SITE;
    for (uint64_t probe = key;; ++probe) {
        auto found = children.find(probe);
        if (found == children.end()) {
            at = (uint32_t)all.size();
            all.push_back(Site{pc, parent, all[parent].depth + 1, BRANCH, {}, {}});
            children.emplace(probe, at);
            return at;
        }
        if (all[found->second].pc == pc && all[found->second].parent == parent) return found->second;
    }
}

// Module-relative program counters, outermost call first; calls deeper than MOST_FRAMES lose their outermost frames.
SimPath Sites::path(uint32_t site) const {
    SimPath p{};
    uint32_t chain[MOST_FRAMES];
    for (; site != 0 && site != NO_SITE && p.depth < MOST_FRAMES; site = all[site].parent) chain[p.depth++] = site;
    for (int i = 0; i < p.depth; ++i) p.pc[i] = all[chain[p.depth - 1 - i]].pc - sim_module_base;
    return p;
}

SimFault fault_of(Thread& me, int kind, uint64_t pc) {
    SimFault f{};
    f.kind = kind, f.thread = me.number, f.block = me.worker->block;
    if (pc) f.path = me.worker->sites.path(me.worker->sites.child(me.site, pc));
    return f;
}

// ---- order: which accesses a barrier or __syncwarp has put before the current one ----

void watch_syncwarp(Warp& w, uint32_t lanes) {
    uint32_t known[LANES_A_WARP] = {};
    for (uint32_t left = lanes; left; left &= left - 1) {
        Thread& t = *w.lane[__builtin_ctz(left)];
        t.seen[t.lane] = t.clock++;
        for (int i = 0; i < LANES_A_WARP; ++i) known[i] = known[i] > t.seen[i] ? known[i] : t.seen[i];
    }
    for (uint32_t left = lanes; left; left &= left - 1) memcpy(w.lane[__builtin_ctz(left)]->seen, known, sizeof known);
}

static bool ordered(const Thread& me, uint32_t thread, uint32_t epoch, uint32_t clock) {
    if (thread == (uint32_t)me.number || epoch < me.worker->epoch) return true;
    const bool same_warp = thread / LANES_A_WARP == (uint32_t)me.number / LANES_A_WARP;
    return same_warp && me.seen[thread % LANES_A_WARP] >= clock;
}

static bool races(const Thread& me, const Access& a) {
    return a.thread != NO_THREAD && !ordered(me, a.thread, a.epoch, a.clock);
}

static SimFault fault_at(Thread& me, int kind, uint64_t address, uint32_t size, int how, uint64_t pc,
                         int64_t other_block = -1, int other = -1, bool other_writes = false, uint32_t other_site = 0) {
    SimFault f = fault_of(me, kind, pc);
    f.address = address, f.size = size, f.is_write = how != READ;
    const uint64_t in_shared = address - (uint64_t)me.worker->shared_begin;
    f.shared_offset = in_shared < me.worker->launch->thread_local_bytes ? (int64_t)in_shared : -1;
    f.other_block = other_block, f.other_thread = other, f.other_is_write = other_writes;
    if (other >= 0) f.other_path = me.worker->sites.path(other_site);
    return f;
}

template <class... A>
[[noreturn]] static void stop_at(Thread& me, A... a) {
    stop(me, fault_at(me, a...));
}

static void check_shared(Thread& me, uint64_t address, uint32_t size, int how, uint64_t pc) {
    Worker& w = *me.worker;
    const uint32_t site = w.sites.child(me.site, pc);
    const Access now_here = {(uint32_t)me.number, w.epoch, me.clock, site};
    const Access nobody = {NO_THREAD, 0, 0, 0};
    for (uint32_t i = 0; i < size; ++i) {
        SharedByte& b = w.shared[address - (uint64_t)w.shared_begin + i];
        if (b.block_serial != w.block_serial) b = {w.block_serial, false, nobody, nobody, nobody};
        const bool unwritten = b.write.thread == NO_THREAD;
        // It becomes a race if somebody writes it before the next barrier.
        if (how != WRITE && unwritten && !w.unwritten.kind) w.unwritten = fault_at(me, UNINITIALISED, address, size, how, pc);
        const Access* against[3] = {&b.write, &b.read, &b.other_read};
        for (int k = how == ATOMIC && b.atomic; k < (how == READ ? 1 : 3); ++k) {
            if (!races(me, *against[k])) continue;
            if (unwritten) w.unwritten.kind = NO_FAULT;
            stop_at(me, SHARED_RACE, address, size, how, pc, w.block, (int)against[k]->thread, k == 0, against[k]->site);
        }
        if (how != READ) {
            b.write = now_here, b.read = b.other_read = nobody, b.atomic = how == ATOMIC;
        } else if (b.read.thread == NO_THREAD || b.read.thread == now_here.thread) {
            b.read = now_here;
        } else {
            b.other_read = now_here;
        }
    }
}

static void check_global(Thread& me, int buffer, uint64_t offset, uint64_t address, uint32_t size, int how, uint64_t pc) {
    Worker& w = *me.worker;
    GlobalByte* bytes = w.global[buffer].bytes;
    std::atomic<bool>& touched = w.global[buffer].written;
    w.used_atomic |= how == ATOMIC;
    if (how == ATOMIC || (how == READ && !touched.load(std::memory_order_relaxed))) return;
    if (how == WRITE) touched.store(true, std::memory_order_relaxed);
    const uint32_t mine = (uint32_t)w.block + 1, site = w.sites.child(me.site, pc);
    for (uint32_t i = 0; i < size; ++i) {
        GlobalByte& g = bytes[offset + i];
        const uint32_t seen = __atomic_load_n(&g.block, __ATOMIC_RELAXED);
        // Another block may have signalled by an atomic that its writes are done. Such an order is not tracked here.
        const bool fine = seen == mine ? ordered(me, g.thread, g.epoch, g.clock) : w.used_atomic;
        if (seen && !fine)
            stop_at(me, GLOBAL_RACE, address, size, how, pc, (int64_t)seen - 1, (int)g.thread, true, g.site);
        if (how != WRITE) continue;
        g.thread = (uint32_t)me.number, g.epoch = w.epoch, g.clock = me.clock, g.site = site;
        __atomic_store_n(&g.block, mine, __ATOMIC_RELAXED);
    }
}

// ---- accesses ----

// A thread that has logged this much without meeting others is taken to loop for ever; each event takes memory.
constexpr size_t MOST_EVENTS = 1 << 24;

static void log_event(Thread& me, uint64_t address, uint32_t size, int kind, int space, uint64_t pc) {
    if (me.log.size() >= MOST_EVENTS) stop(me, fault_of(me, TOO_LONG, pc));
    if (me.unread_write >= 0) resolve_write(me);
    Event e{address, me.worker->sites.child(me.site, pc), (uint8_t)kind, (uint8_t)space, (uint16_t)size, {}};
    if (me.worker->tracing()) {
        if (kind == READ) memcpy(e.value, (const void*)address, size < 16 ? size : 16);
        if (kind == WRITE || kind == ATOMIC) me.unread_write = (int64_t)me.log.size();
    }
    me.log.push_back(e);
}

static void access(const void* pointer, uint32_t size, int how, bool aligned, uint64_t pc) {
    if (!sim_running.load(std::memory_order_relaxed)) return;
    const uint64_t address = (uint64_t)pointer, stack = (uint64_t)__builtin_frame_address(0) & ~(SIM_STACK - 1);
    if ((address & ~(SIM_STACK - 1)) == stack) return;  // a local variable: a register of the GPU
    Thread& me = *self();
    if (!me.in_kernel) return;
    Worker& w = *me.worker;
    const SimLaunch& l = *w.launch;

    int space = NOWHERE;
    const uint64_t in_shared = address - (uint64_t)w.shared_begin;
    if (in_shared < l.thread_local_bytes) {
        for (int i = 0; i < l.n_shared && space == NOWHERE; ++i)
            if (in_shared - l.shared[i].offset < l.shared[i].bytes && in_shared + size <= l.shared[i].offset + l.shared[i].bytes)
                space = SHARED;
    } else {
        for (int i = 0; i < l.n_buffers && space == NOWHERE; ++i) {
            const uint64_t offset = address - l.buffers[i].begin;
            if (offset >= l.buffers[i].bytes || offset + size > l.buffers[i].bytes) continue;
            space = GLOBAL;
            if (aligned && address % size) stop_at(me, MISALIGNED, address, size, how, pc);
            check_global(me, i, offset, address, size, how, pc);
        }
        // The program's own constants and __device__ variables.
        if (space == NOWHERE && address >= sim_module_base && address < sim_module_end) space = GLOBAL;
    }
    if (space == NOWHERE) stop_at(me, OUT_OF_BOUNDS, address, size, how, pc);
    if (aligned && address % size) stop_at(me, MISALIGNED, address, size, how, pc);
    if (space == SHARED) check_shared(me, address, size, how, pc);
    if (w.counting()) log_event(me, address, size, how, space, pc);
}

#define SIZED(BYTES)                                                                                                   \
    HOOK void __tsan_read##BYTES(void* p) { access(p, BYTES, READ, true, HERE); }                                      \
    HOOK void __tsan_write##BYTES(void* p) { access(p, BYTES, WRITE, true, HERE); }                                    \
    HOOK void __tsan_volatile_read##BYTES(void* p) { access(p, BYTES, READ, true, HERE); }                             \
    HOOK void __tsan_volatile_write##BYTES(void* p) { access(p, BYTES, WRITE, true, HERE); }                           \
    HOOK void __tsan_unaligned_read##BYTES(void* p) { access(p, BYTES, READ, false, HERE); }                           \
    HOOK void __tsan_unaligned_write##BYTES(void* p) { access(p, BYTES, WRITE, false, HERE); }                         \
    HOOK void __tsan_unaligned_volatile_read##BYTES(void* p) { access(p, BYTES, READ, false, HERE); }                  \
    HOOK void __tsan_unaligned_volatile_write##BYTES(void* p) { access(p, BYTES, WRITE, false, HERE); }                \
    HOOK void __tsan_read_write##BYTES(void* p) {                                                                      \
        access(p, BYTES, READ, true, HERE);                                                                            \
        access(p, BYTES, WRITE, true, HERE);                                                                           \
    }
SIZED(1) SIZED(2) SIZED(4) SIZED(8) SIZED(16)
HOOK void __tsan_read_range(void* p, uint64_t n) { access(p, (uint32_t)n, READ, false, HERE); }
HOOK void __tsan_write_range(void* p, uint64_t n) { access(p, (uint32_t)n, WRITE, false, HERE); }
HOOK void __tsan_vptr_read(void*) {}
HOOK void __tsan_vptr_update(void*, void*) {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_init() {}

// ---- memset, memcpy and memmove: the whole range is checked before any of it is touched, then copied piece by piece ----

static void check_range(Thread& me, const void* pointer, uint64_t n, uint64_t room, int how, uint64_t pc) {
    const uint64_t address = (uint64_t)pointer, stack = (uint64_t)__builtin_frame_address(0) & ~(SIM_STACK - 1);
    Worker& w = *me.worker;
    const SimLaunch& l = *w.launch;
    auto inside = [&](uint64_t begin, uint64_t bytes) { return address - begin < bytes && n <= bytes - (address - begin); };
    bool fits = false;
    if ((address & ~(SIM_STACK - 1)) == stack) {  // no variable reaches across a call's return address
        fits = n <= room && inside(stack, SIM_STACK);
        for (int i = 0; i <= me.depth; ++i) {
            const uint64_t frame = (uint64_t)me.frames[i];
            fits &= address >= frame + 16 || address + n <= frame;
        }
    } else {
        fits = inside(sim_module_base, sim_module_end - sim_module_base);
        for (int i = 0; i < l.n_shared; ++i) fits |= inside((uint64_t)w.shared_begin + l.shared[i].offset, l.shared[i].bytes);
        for (int i = 0; i < l.n_buffers; ++i) fits |= inside(l.buffers[i].begin, l.buffers[i].bytes);
        fits &= n <= room;
    }
    if (fits) return;
    SimFault f = fault_at(me, OUT_OF_BOUNDS, address, 0, how, pc);
    f.size = n;
    if ((address & ~(SIM_STACK - 1)) == stack) f.shared_offset = OWN_MEMORY;
    stop(me, f);
}

static bool watched_now() { return sim_running.load(std::memory_order_relaxed) && self()->in_kernel; }

constexpr uint64_t PIECE = 16;

extern "C" void* sim_set(void* to, int value, uint64_t n, uint64_t room, const void* place) {
    if (!n || !watched_now()) return memset(to, value, n);
    check_range(*self(), to, n, room, WRITE, (uint64_t)place);
    for (uint64_t i = 0; i < n; i += PIECE) {
        const uint64_t bytes = n - i < PIECE ? n - i : PIECE;
        access((char*)to + i, (uint32_t)bytes, WRITE, false, (uint64_t)place);
        memset((char*)to + i, value, bytes);
    }
    return to;
}

extern "C" void* sim_move(void* to, const void* from, uint64_t n, uint64_t room, const void* place) {
    if (!n || !watched_now()) return memmove(to, from, n);
    check_range(*self(), from, n, n, READ, (uint64_t)place);
    check_range(*self(), to, n, room, WRITE, (uint64_t)place);
    const bool upwards = to <= from;  // so that what overlaps is read before it is written
    for (uint64_t done = 0, bytes; done < n; done += bytes) {
        bytes = n - done < PIECE ? n - done : PIECE;
        const uint64_t i = upwards ? done : n - done - bytes;
        access((const char*)from + i, (uint32_t)bytes, READ, false, (uint64_t)place);
        access((char*)to + i, (uint32_t)bytes, WRITE, false, (uint64_t)place);
        memmove((char*)to + i, (const char*)from + i, bytes);
    }
    return to;
}
HOOK void* __tsan_memcpy(void* to, const void* from, uint64_t n) { return sim_move(to, from, n, n, (const void*)HERE); }
HOOK void* __tsan_memmove(void* to, const void* from, uint64_t n) { return sim_move(to, from, n, n, (const void*)HERE); }
HOOK void* __tsan_memset(void* to, int value, uint64_t n) { return sim_set(to, value, n, n, (const void*)HERE); }

extern "C" void sim_copy(void* to, const void* from, int bytes, int piece, void* place) {
    for (int i = 0; i < bytes; i += piece) {
        access((const char*)from + i, (uint32_t)piece, READ, true, (uint64_t)place);
        access((char*)to + i, (uint32_t)piece, WRITE, true, (uint64_t)place);
    }
    memcpy(to, from, (size_t)bytes);
}

// An index past the end of an array whose size the compiler knows: of a thread's own array, or past the end of a row that
// another row follows. The compiler has been asked to call this before such an access (-fsanitize=bounds).
struct TypeName { uint16_t kind, info; char name[1]; };  // info of an integer: log2 of its bits, then whether it is signed
struct BadIndex { const char* file; uint32_t line, column; const TypeName *array, *index; };
HOOK void __ubsan_handle_out_of_bounds(const BadIndex* bad, uint64_t index) {
    if (!sim_running.load(std::memory_order_relaxed)) return;
    Thread& me = *self();
    if (!me.in_kernel) return;
    SimFault f = fault_of(me, OUT_OF_BOUNDS, HERE);
    const int unused = 64 - (1 << (bad->index->info >> 1));
    if (unused > 0) index = bad->index->info & 1 ? (uint64_t)((int64_t)(index << unused) >> unused) : index << unused >> unused;
    f.text = bad->array->name, f.lane_or_mask = index;
    stop(me, f);
}

// Integer divisions that no processor can do: here they would end the process (-fsanitize=integer-divide-by-zero).
HOOK void __ubsan_handle_divrem_overflow(const void*, uint64_t, uint64_t) {
    if (sim_running.load(std::memory_order_relaxed)) stop(*self(), fault_of(*self(), DIVISION, HERE));
}

// ---- the tree of calls, basic blocks, and what the header reports by itself ----

// The frame of the function that called the hook. For these hooks, a function's first block runs before the function is
// entered and its last one after it was left; the frame shows that these blocks are not its caller's.
#define CALLER_FRAME (*(void**)__builtin_frame_address(0))

HOOK void __cyg_profile_func_enter(void*, void* call) {
    if (!sim_running.load(std::memory_order_relaxed)) return;
    Thread& me = *self();
    if (!me.in_kernel) {  // the kernel itself: the root
        me.in_kernel = true, me.depth = 0;
    } else {
        if (++me.depth == MOST_CALLS) stop(me, fault_of(me, TOO_LONG, (uint64_t)call));
        me.site = me.worker->sites.child(me.site, (uint64_t)call);
    }
    me.frames[me.depth] = CALLER_FRAME;
    // The frame is too large for a stack whose end is not closed: self() may already be another thread.
    Thread& running = *me.worker->guarded.running;
    if (&me != &running || ((uintptr_t)__builtin_frame_address(0) & (SIM_STACK - 1)) < SIM_CLOSED)
        stop(running, fault_of(running, STACK_OVERFLOW, (uint64_t)call));
}

HOOK void __cyg_profile_func_exit(void*, void*) {
    if (!sim_running.load(std::memory_order_relaxed)) return;
    Thread& me = *self();
    if (me.site == 0) me.in_kernel = false;
    else me.site = me.worker->sites.all[me.site].parent, --me.depth;
}

static __attribute__((noinline)) void block_seen(Thread& me, void* frame, uint64_t pc) {
    const bool own = me.frames[me.depth] == frame;
    if ((me.worker->ticks & 0xffff) == 0 && out_of_time(*me.worker))  // of a function not yet entered: its call
        stop(me, fault_of(me, TOO_LONG, own ? pc : ((uint64_t*)frame)[1]));
    if (own && me.worker->counting()) log_event(me, 0, 0, BRANCH, NOWHERE, pc);
}

HOOK void __sanitizer_cov_trace_pc() {  // the most frequent of all: nothing but the test stays inside
    if (!sim_running.load(std::memory_order_relaxed)) return;
    Thread& me = *self();
    if (me.in_kernel && ((++me.worker->ticks & 0xffff) == 0 || me.worker->is_counting)) block_seen(me, CALLER_FRAME, HERE);
}

void watch_collective(Thread& me, int kind, uint64_t pc) {
    log_event(me, 0, 8, kind, NOWHERE, pc);
    memcpy(me.log.back().value, &me.got, 8);
    if (kind == WARP_WIDE) memcpy(me.log.back().value + 8, &me.absent, sizeof me.absent);
}

extern "C" __attribute__((noinline)) void sim_atomic(const void* p, int bytes, const void* place) {
    if (self()->worker->launch->watch) access(p, (uint32_t)bytes, ATOMIC, true, (uint64_t)place);
}

extern "C" __attribute__((noinline)) void sim_watch_value(int name, double value) {
    Thread& me = *self();
    if (!me.worker->counting()) return;
    log_event(me, (uint64_t)name, 8, WATCH, NOWHERE, HERE);
    memcpy(me.log.back().value, &value, 8);
}

extern "C" __attribute__((noinline)) void sim_assertion(const char* text) {
    Thread& me = *self();
    SimFault f = fault_of(me, ASSERTION, HERE);
    f.text = text;
    stop(me, f);
}

// What a watched build asks for its indices: copies, since the lines that read them are watched themselves.
extern "C" SimIndex sim_thread_index() { return self()->thread_index; }
extern "C" SimIndex sim_block_index() { return self()->block_index; }
extern "C" dim3 sim_block_size() { return self()->block_size; }
extern "C" dim3 sim_grid_size() { return self()->grid_size; }

// Checks every access of a watched build. The compiler adds ThreadSanitizer's instrumentation, calls of
// __tsan_read4(address) and the like, and this file defines these functions: they check bounds, alignment, initialisation
// and order, and keep a log for count.cpp.
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#define HOOK extern "C" __attribute__((noinline))
#define HERE (uint64_t) __builtin_return_address(0)

static SimFault fault_at(Thread& me, int kind, uint64_t address, uint32_t size, int how, uint64_t pc) {
    SimFault f = fault_of(me, kind, pc);
    f.address = address, f.size = size, f.is_write = how;
    const uint64_t in_shared = address - (uint64_t)me.worker->shared_begin;
    f.shared_offset = in_shared < me.worker->launch->thread_local_bytes ? (int64_t)in_shared : -1;
    f.other_thread = -1;
    return f;
}

template <class... A>
[[noreturn]] static void stop_at(Thread& me, A... a) {
    stop(me, fault_at(me, a...));
}

[[noreturn]] static void stop_for_race(Thread& me, SimFault f, const Access& other) {
    f.other_block = (int64_t)other.block - 1, f.other_thread = other.thread;
    f.other_is_write = other.use == CHANGES ? ATOMIC : other.use == STORES || other.use == SETS ? WRITE : READ;
    me.worker->other = other;  // its place is looked up when no worker runs any more
    stop(me, f);
}

static void check_shared(Thread& me, uint64_t address, uint32_t size, int how, uint64_t pc) {
    Worker& w = *me.worker;
    bool unwritten = false;
    Access other;
    const Use use = how == READ ? LOADS : how == WRITE ? STORES : CHANGES;
    const bool races = order_access(me, w.shared.data(), (uint64_t)w.shared_begin, address, size, use,
                                    w.sites.child(me.site, pc), unwritten, other);
    if (unwritten && (races || how != WRITE)) {
        // It becomes a race if somebody writes it before the next barrier.
        if (races) w.unwritten.kind = NO_FAULT;
        else if (!w.unwritten.kind) w.unwritten = fault_at(me, UNINITIALISED, address, size, how, pc);
    }
    if (races) stop_for_race(me, fault_at(me, SHARED_RACE, address, size, how, pc), other);
}

static void check_global(Thread& me, int buffer, uint64_t address, uint32_t size, int how, bool is_volatile, uint64_t pc) {
    Worker& w = *me.worker;
    const SimBuffer& b = w.launch->buffers[buffer];
    if (how != READ && b.kind == NO_WRITES) stop_at(me, CONSTANT_WRITE, address, size, how, pc);
    std::atomic<bool>& touched = w.global[buffer].written;
    if (how == READ && b.kind != ANY_USE && !touched.load(std::memory_order_relaxed)) return;
    if (how != READ) touched.store(true, std::memory_order_relaxed);
    bool unwritten;
    Access other;
    const Use use = how == ATOMIC ? CHANGES : how == READ ? (is_volatile ? LOOKS : LOADS) : is_volatile ? SETS : STORES;
    if (order_access(me, w.global[buffer].words, b.begin, address, size, use, w.sites.child(me.site, pc), unwritten, other))
        stop_for_race(me, fault_at(me, GLOBAL_RACE, address, size, how, pc), other);
}

// ---- accesses ----

// Whether an address is on the stack that runs: a local variable, a register of the GPU.
static inline bool is_own(uint64_t address) {
    return !((address ^ (uint64_t)__builtin_frame_address(0)) & ~(SIM_STACK - 1));
}

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

static void access(const void* pointer, uint32_t size, int how, uint32_t aligned, uint64_t pc, bool is_volatile = false) {
    if (!sim_running.load(std::memory_order_relaxed)) return;
    const uint64_t address = (uint64_t)pointer;
    if (is_own(address)) return;
    Thread& me = *self();
    if (!me.in_kernel) return;
    Worker& w = *me.worker;
    const SimLaunch& l = *w.launch;
    if (me.looked_at) order_flag(me);

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
            if (address % aligned) stop_at(me, MISALIGNED, address, size, how, pc);
            check_global(me, i, address, size, how, is_volatile, pc);
        }
        // The program's own constants.
        if (space == NOWHERE && address >= w.module.base && address < w.module.end) space = GLOBAL;
    }
    if (space == NOWHERE) stop_at(me, OUT_OF_BOUNDS, address, size, how, pc);
    if (address % aligned) stop_at(me, MISALIGNED, address, size, how, pc);
    // Before the last lane of a warp signals, the other warps look once more, if threads of this block wait in loops: who
    // waits for one arrival too few goes on then, and meets what that lane has not handed over yet.
    if (space == SHARED && how == ATOMIC && w.pauses && !(me.warp->alive >> me.lane >> 1)) sim_switch(&me.sp, w.main_sp);
    if (space == SHARED) check_shared(me, address, size, how, pc);
    if (w.counting()) log_event(me, address, size, how, space, pc);
}

// The compiler says "unaligned" of copies of structs, which need no more than their members, and of what it knows to be
// misaligned; a member of 4 bytes is the usual one.
#define PART(BYTES) ((BYTES) < 4 ? (BYTES) : 4)
#define SIZED(BYTES)                                                                                                   \
    HOOK void __tsan_read##BYTES(void* p) { access(p, BYTES, READ, BYTES, HERE); }                                     \
    HOOK void __tsan_write##BYTES(void* p) { access(p, BYTES, WRITE, BYTES, HERE); }                                   \
    HOOK void __tsan_volatile_read##BYTES(void* p) { access(p, BYTES, READ, BYTES, HERE, true); }                      \
    HOOK void __tsan_volatile_write##BYTES(void* p) { access(p, BYTES, WRITE, BYTES, HERE, true); }                    \
    HOOK void __tsan_unaligned_read##BYTES(void* p) { access(p, BYTES, READ, PART(BYTES), HERE); }                     \
    HOOK void __tsan_unaligned_write##BYTES(void* p) { access(p, BYTES, WRITE, PART(BYTES), HERE); }                   \
    HOOK void __tsan_unaligned_volatile_read##BYTES(void* p) { access(p, BYTES, READ, PART(BYTES), HERE, true); }      \
    HOOK void __tsan_unaligned_volatile_write##BYTES(void* p) { access(p, BYTES, WRITE, PART(BYTES), HERE, true); }    \
    HOOK void __tsan_read_write##BYTES(void* p) {                                                                      \
        access(p, BYTES, READ, BYTES, HERE);                                                                           \
        access(p, BYTES, WRITE, BYTES, HERE);                                                                          \
    }
SIZED(1) SIZED(2) SIZED(4) SIZED(8) SIZED(16)
HOOK void __tsan_read_range(void* p, uint64_t n) { access(p, (uint32_t)n, READ, 1, HERE); }
HOOK void __tsan_write_range(void* p, uint64_t n) { access(p, (uint32_t)n, WRITE, 1, HERE); }
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
    if (is_own(address)) {  // no variable reaches across a call's return address
        fits = n <= room && inside(stack, SIM_STACK);
        for (const void* start : me.frames) {
            const uint64_t frame = (uint64_t)start;
            fits &= address >= frame + 16 || address + n <= frame;
        }
    } else {
        fits = inside(w.module.base, w.module.end - w.module.base);
        for (int i = 0; i < l.n_shared; ++i) fits |= inside((uint64_t)w.shared_begin + l.shared[i].offset, l.shared[i].bytes);
        for (int i = 0; i < l.n_buffers; ++i) fits |= inside(l.buffers[i].begin, l.buffers[i].bytes);
        fits &= n <= room;
    }
    if (fits) return;
    SimFault f = fault_at(me, OUT_OF_BOUNDS, address, 0, how, pc);
    f.size = n;
    if (is_own(address)) f.shared_offset = OWN_MEMORY;
    stop(me, f);
}

static bool watched_now() { return sim_running.load(std::memory_order_relaxed) && self()->in_kernel; }

constexpr uint64_t PIECE = 16;

extern "C" void* sim_set(void* to, int value, uint64_t n, uint64_t room, const void* place) {
    if (!n || !watched_now()) return memset(to, value, n);
    check_range(*self(), to, n, room, WRITE, (uint64_t)place);
    for (uint64_t i = 0; i < n; i += PIECE) {
        const uint64_t bytes = n - i < PIECE ? n - i : PIECE;
        access((char*)to + i, (uint32_t)bytes, WRITE, 1, (uint64_t)place);
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
        access((const char*)from + i, (uint32_t)bytes, READ, 1, (uint64_t)place);
        access((char*)to + i, (uint32_t)bytes, WRITE, 1, (uint64_t)place);
        memmove((char*)to + i, (const char*)from + i, bytes);
    }
    return to;
}
HOOK void* __tsan_memcpy(void* to, const void* from, uint64_t n) { return sim_move(to, from, n, n, (const void*)HERE); }
HOOK void* __tsan_memmove(void* to, const void* from, uint64_t n) { return sim_move(to, from, n, n, (const void*)HERE); }
HOOK void* __tsan_memset(void* to, int value, uint64_t n) { return sim_set(to, value, n, n, (const void*)HERE); }

extern "C" void sim_copy(void* to, const void* from, int bytes, int piece, void* place) {
    for (int i = 0; i < bytes; i += piece) {
        access((const char*)from + i, (uint32_t)piece, READ, (uint32_t)piece, (uint64_t)place);
        access((char*)to + i, (uint32_t)piece, WRITE, (uint32_t)piece, (uint64_t)place);
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

// A load or store of a type at an address that is no multiple of its alignment: before the access, and also where the
// compiler says "unaligned" of it (-fsanitize=alignment). A member of a misaligned struct may be aligned.
struct Mismatch { const char* file; uint32_t line, column; const TypeName* type; uint8_t log_alignment, kind; };
HOOK void __ubsan_handle_type_mismatch_v1(const Mismatch* bad, uint64_t address) {
    if (!sim_running.load(std::memory_order_relaxed) || bad->kind > 1 || is_own(address)) return;
    Thread& me = *self();
    if (me.in_kernel) stop_at(me, MISALIGNED, address, 1u << bad->log_alignment, bad->kind ? WRITE : READ, HERE);
}

// Integer divisions that no processor can do: here they would end the process (-fsanitize=integer-divide-by-zero).
HOOK void __ubsan_handle_divrem_overflow(const void*, uint64_t, uint64_t) {
    if (sim_running.load(std::memory_order_relaxed)) stop(*self(), fault_of(*self(), DIVISION, HERE));
}

// ---- the tree of calls, basic blocks, and what the header reports by itself ----

// The frame of the function that called the hook. For these hooks, a function's first block runs before the function is
// entered and its last one after it was left; the frame shows that these blocks are not its caller's.
#define CALLER_FRAME (*(void**)__builtin_frame_address(0))

// The C library has functions of these names, too, which do nothing: the linker puts these in their place (--wrap).
HOOK void __wrap___cyg_profile_func_enter(void*, void* call) {
    if (!sim_running.load(std::memory_order_relaxed)) return;
    Thread& me = *self();
    // The frame may be too large for a stack whose end is not closed: then self() is already another thread.
    Thread& running = *me.worker->guarded.running;
    if (running.top - (uint64_t)__builtin_frame_address(0) > MOST_OWN_MEMORY)
        stop(running, fault_of(running, STACK_OVERFLOW, (uint64_t)call));
    if (!me.in_kernel) {  // the kernel itself: the root
        me.in_kernel = true, me.depth = 0;
    } else {
        ++me.depth;
        me.site = me.worker->sites.child(me.site, (uint64_t)call);
    }
    me.frames.push_back(CALLER_FRAME);
}

HOOK void __wrap___cyg_profile_func_exit(void*, void*) {
    if (!sim_running.load(std::memory_order_relaxed)) return;
    Thread& me = *self();
    me.frames.pop_back();
    if (me.site == 0) me.in_kernel = false;
    else me.site = me.worker->sites.all[me.site].parent, --me.depth;
}

static __attribute__((noinline)) void block_seen(Thread& me, void* frame, uint64_t pc) {
    const bool own = me.frames.back() == frame;
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
    if (self()->worker->launch->watch) access(p, (uint32_t)bytes, ATOMIC, (uint32_t)bytes, (uint64_t)place);
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

// Calls by which a kernel could end the process: exit and the like, and freeing memory that is not the kernel's to free.
//
// The linker puts these functions in the place of the C library's (--wrap, see toolchain.py). What kernels take with malloc
// and new comes from a separate region, so that each wrong free is recognised with certainty and never reaches the C
// library, which would end the process or keep a lock that others then wait for. Calls from outside of kernels, such as the
// runtime's own, go on to the C library.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>

#include "runtime.h"

#define HERE (uint64_t) __builtin_return_address(0)
// Weak: a library that is linked without --wrap has none of them.
#define REAL(RESULT, NAME, ...) extern "C" __attribute__((weak)) RESULT __real_##NAME(__VA_ARGS__)
#define INSTEAD(RESULT, NAME, ...) extern "C" __attribute__((visibility("hidden"), noinline)) RESULT __wrap_##NAME(__VA_ARGS__)

constexpr size_t HEAP = 1 << 30, BETWEEN = 16, LARGE = 64 << 10, KEPT_BACK = 1024;

struct Block { size_t bytes; bool taken; };
struct Heap {
    std::mutex lock;
    uint64_t begin = 0;
    size_t used = 0;
    std::map<uint64_t, Block> blocks;
    std::map<size_t, std::deque<uint64_t>> given_back;  // by their room; the first is the one given back longest ago
    bool has(const void* p) const { return begin && (uint64_t)p - begin < HEAP; }
};

// The heap of all libraries of the process; null before a kernel has taken any memory.
static Heap* heap() {
    const std::atomic<Heap*>* common = common_heap();
    return common ? common->load() : nullptr;
}

static size_t room_of(size_t bytes) { return (bytes + BETWEEN + 15) & ~(size_t)15; }

// Null if the C library has to give the memory: the caller is no kernel, or there is no room here.
static void* take(size_t bytes, uint64_t place) {
    const Thread* me = thread_in_kernel();
    if (!me || place < me->worker->guarded.begin || place >= me->worker->guarded.end || bytes > HEAP / 2) return nullptr;
    if (!heap()) {
        Heap *none = nullptr, *first = new Heap();
        if (!common_heap()->compare_exchange_strong(none, first)) delete first;
    }
    Heap& h = *heap();
    std::lock_guard<std::mutex> hold(h.lock);
    if (!h.begin) {
        void* region = mmap(nullptr, HEAP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region == MAP_FAILED) return nullptr;
        h.begin = (uint64_t)region;
    }
    const size_t room = room_of(bytes);
    std::deque<uint64_t>& old = h.given_back[room];
    uint64_t at = h.begin + h.used;
    if (!old.empty() && (old.size() > KEPT_BACK || h.used + room > HEAP)) at = old.front(), old.pop_front();
    else if (h.used + room <= HEAP) h.used += room;
    else return nullptr;
    h.blocks[at] = {bytes, true};
    return (void*)at;
}

static bool is_the_launchs(const Worker& w, uint64_t at, bool& in_array) {
    const SimLaunch& l = *w.launch;
    for (int i = 0; i < l.n_buffers; ++i) in_array |= at - l.buffers[i].begin < l.buffers[i].bytes;
    return in_array || at - (uint64_t)w.shared_begin < l.thread_local_bytes || at - (uint64_t)w.stacks < MOST_THREADS * SIM_STACK ||
           at - sim_module_base < sim_module_end - sim_module_base;
}

// Takes memory back that a kernel was given here; false if it came from the C library. Memory that neither gave is a
// fault, which ends the block of threads.
static bool give_back(void* p, uint64_t place) {
    const uint64_t at = (uint64_t)p;
    Heap* h = heap();
    Thread* me = thread_in_kernel();
    const char* why = nullptr;
    bool in_array = false;
    if (h && h->has(p)) {
        std::lock_guard<std::mutex> hold(h->lock);
        const auto found = h->blocks.find(at);
        if (found != h->blocks.end() && found->second.taken) {
            const size_t bytes = found->second.bytes, room = room_of(bytes);
            found->second.taken = false;
            h->given_back[room].push_back(at);
            const uint64_t first = (at + 4095) & ~4095ull, last = (at + bytes) & ~4095ull;
            if (bytes >= LARGE) madvise((void*)first, last - first, MADV_DONTNEED);
            return true;
        }
        why = found != h->blocks.end() ? "it gives back a second time what it has given back"
                                       : "it gives back an address inside of what they gave";
    } else if (me && is_the_launchs(*me->worker, at, in_array)) {
        why = "it gives back what they did not give";
    }
    if (!why) return false;
    if (!me) abort();  // as the C library does
    SimFault f = fault_of(*me, BROKEN_HEAP, place);
    f.text = why, f.address = at, f.size = in_array, f.shared_offset = -1;
    stop(*me, f);
}

static size_t taken_bytes(Heap& h, const void* p) {
    std::lock_guard<std::mutex> hold(h.lock);
    const auto found = h.blocks.find((uint64_t)p);
    return found != h.blocks.end() && found->second.taken ? found->second.bytes : 0;
}

// Marks a call in which the C library works on its heap: if it finds the heap damaged, guard.cpp knows from where.
struct AtWork {
    Thread* me = thread_in_kernel();
    explicit AtWork(uint64_t place) { if (me) me->worker->guarded.in_heap = place; }
    ~AtWork() { if (me) me->worker->guarded.in_heap = 0; }
};

// ---- malloc, new and their kin ----

REAL(void*, calloc, size_t, size_t);
REAL(void*, realloc, void*, size_t);
INSTEAD(void*, calloc, size_t n, size_t each) {
    size_t bytes;
    void* p = __builtin_mul_overflow(n, each, &bytes) ? nullptr : take(bytes, HERE);
    if (p) return memset(p, 0, bytes);
    const AtWork at_work(HERE);
    return __real_calloc(n, each);
}

#define TAKES(NAME)                                    \
    REAL(void*, NAME, size_t);                         \
    INSTEAD(void*, NAME, size_t bytes) {               \
        if (void* p = take(bytes, HERE)) return p;     \
        const AtWork at_work(HERE);                          \
        return __real_##NAME(bytes);                   \
    }
#define TAKES_OR_NULL(NAME)                                              \
    REAL(void*, NAME, size_t, const void*);                              \
    INSTEAD(void*, NAME, size_t bytes, const void* nothrow) {            \
        if (void* p = take(bytes, HERE)) return p;                       \
        const AtWork at_work(HERE);                                            \
        return __real_##NAME(bytes, nothrow);                            \
    }
#define GIVES_BACK(NAME)                                       \
    REAL(void, NAME, void*);                                   \
    INSTEAD(void, NAME, void* p) {                             \
        if (!p || give_back(p, HERE)) return;                  \
        const AtWork at_work(HERE);                                  \
        __real_##NAME(p);                                      \
    }
#define GIVES_BACK_SIZED(NAME)                                 \
    REAL(void, NAME, void*, size_t);                           \
    INSTEAD(void, NAME, void* p, size_t bytes) {               \
        if (!p || give_back(p, HERE)) return;                  \
        const AtWork at_work(HERE);                                  \
        __real_##NAME(p, bytes);                               \
    }
TAKES(malloc) TAKES(_Znwm) TAKES(_Znam)  // new, new[]
TAKES_OR_NULL(_ZnwmRKSt9nothrow_t) TAKES_OR_NULL(_ZnamRKSt9nothrow_t)
GIVES_BACK(free) GIVES_BACK(_ZdlPv) GIVES_BACK(_ZdaPv)  // delete, delete[]
GIVES_BACK_SIZED(_ZdlPvm) GIVES_BACK_SIZED(_ZdaPvm)

INSTEAD(void*, realloc, void* p, size_t bytes) {
    if (!p) {
        if (void* made = take(bytes, HERE)) return made;
    } else if (Heap* h = heap(); h && h->has(p)) {
        void* made = bytes ? take(bytes, HERE) : nullptr;
        if (bytes && !made) made = __real_malloc(bytes);
        if (bytes && !made) return nullptr;
        if (made) memcpy(made, p, std::min(taken_bytes(*h, p), bytes));
        give_back(p, HERE);
        return made;
    } else {
        give_back(p, HERE);
    }
    const AtWork at_work(HERE);
    return __real_realloc(p, bytes);
}

// ---- the end of the process ----

static void end_with_fault(const char* call, uint64_t place) {
    if (Thread* me = thread_in_kernel()) {
        SimFault f = fault_of(*me, PROCESS_END, place);
        f.text = call;
        stop(*me, f);
    }
}

#define ENDS(NAME, TYPE)                              \
    REAL(void, NAME, TYPE) __attribute__((noreturn)); \
    INSTEAD(void, NAME, TYPE code) {                  \
        end_with_fault(#NAME "()", HERE);             \
        __real_##NAME(code);                          \
    }
ENDS(exit, int) ENDS(quick_exit, int) ENDS(_exit, int) ENDS(_Exit, int) ENDS(pthread_exit, void*)
#define ENDS_OF_ITSELF(NAME, CALL)                    \
    REAL(void, NAME, void) __attribute__((noreturn)); \
    INSTEAD(void, NAME, void) {                       \
        end_with_fault(CALL, HERE);                   \
        __real_##NAME();                              \
    }
ENDS_OF_ITSELF(abort, "abort()") ENDS_OF_ITSELF(_ZSt9terminatev, "std::terminate()")

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
#define INSTEAD(RESULT, NAME, ...) extern "C" __attribute__((noinline)) RESULT __wrap_##NAME(__VA_ARGS__)
extern "C" {  // new, new[], delete, delete[] and std::terminate
void *_Znwm(size_t), *_Znam(size_t), *_ZnwmRKSt9nothrow_t(size_t, const void*), *_ZnamRKSt9nothrow_t(size_t, const void*);
void _ZdlPv(void*), _ZdaPv(void*), _ZdlPvm(void*, size_t), _ZdaPvm(void*, size_t), _ZSt9terminatev();
}

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

static Heap& heap = *new Heap();  // of all kernels of the process

static size_t room_of(size_t bytes) { return (bytes + BETWEEN + 15) & ~(size_t)15; }

// Null if the C library has to give the memory: the caller is no kernel, or there is no room here.
static void* take(size_t bytes) {
    if (!thread_in_kernel() || bytes > HEAP / 2) return nullptr;
    std::lock_guard<std::mutex> hold(heap.lock);
    if (!heap.begin) {
        void* region = mmap(nullptr, HEAP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region == MAP_FAILED) return nullptr;
        heap.begin = (uint64_t)region;
    }
    const size_t room = room_of(bytes);
    std::deque<uint64_t>& old = heap.given_back[room];
    uint64_t at = heap.begin + heap.used;
    if (!old.empty() && (old.size() > KEPT_BACK || heap.used + room > HEAP)) at = old.front(), old.pop_front();
    else if (heap.used + room <= HEAP) heap.used += room;
    else return nullptr;
    heap.blocks[at] = {bytes, true};
    return (void*)at;
}

static bool is_the_launchs(const Worker& w, uint64_t at, bool& in_array) {
    const SimLaunch& l = *w.launch;
    for (int i = 0; i < l.n_buffers; ++i) in_array |= at - l.buffers[i].begin < l.buffers[i].bytes;
    return in_array || at - (uint64_t)w.shared_begin < l.thread_local_bytes || at - (uint64_t)w.stacks < MOST_THREADS * SIM_STACK ||
           at - w.module.base < w.module.end - w.module.base;
}

// Takes memory back that a kernel was given here; false if it came from the C library. Memory that neither gave is a
// fault, which ends the block of threads.
static bool give_back(void* p, uint64_t place) {
    const uint64_t at = (uint64_t)p;
    Thread* me = thread_in_kernel();
    const char* why = nullptr;
    bool in_array = false;
    if (heap.has(p)) {
        std::lock_guard<std::mutex> hold(heap.lock);
        const auto found = heap.blocks.find(at);
        if (found != heap.blocks.end() && found->second.taken) {
            const size_t bytes = found->second.bytes, room = room_of(bytes);
            found->second.taken = false;
            heap.given_back[room].push_back(at);
            const uint64_t first = (at + 4095) & ~4095ull, last = (at + bytes) & ~4095ull;
            if (bytes >= LARGE) madvise((void*)first, last - first, MADV_DONTNEED);
            return true;
        }
        why = found != heap.blocks.end() ? "it gives back a second time what it has given back"
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

static size_t taken_bytes(const void* p) {
    std::lock_guard<std::mutex> hold(heap.lock);
    const auto found = heap.blocks.find((uint64_t)p);
    return found != heap.blocks.end() && found->second.taken ? found->second.bytes : 0;
}

// Marks a call in which the C library works on its heap: if it finds the heap damaged, guard.cpp knows from where.
struct AtWork {
    Thread* me = thread_in_kernel();
    explicit AtWork(uint64_t place) { if (me) me->worker->guarded.in_heap = place; }
    ~AtWork() { if (me) me->worker->guarded.in_heap = 0; }
};

// ---- malloc, new and their kin ----

INSTEAD(void*, calloc, size_t n, size_t each) {
    size_t bytes;
    void* p = __builtin_mul_overflow(n, each, &bytes) ? nullptr : take(bytes);
    if (p) return memset(p, 0, bytes);
    const AtWork at_work(HERE);
    return calloc(n, each);
}

#define TAKES(NAME)                          \
    INSTEAD(void*, NAME, size_t bytes) {     \
        if (void* p = take(bytes)) return p; \
        const AtWork at_work(HERE);          \
        return NAME(bytes);                  \
    }
#define TAKES_OR_NULL(NAME)                                   \
    INSTEAD(void*, NAME, size_t bytes, const void* nothrow) { \
        if (void* p = take(bytes)) return p;                  \
        const AtWork at_work(HERE);                           \
        return NAME(bytes, nothrow);                          \
    }
#define GIVES_BACK(NAME)                      \
    INSTEAD(void, NAME, void* p) {            \
        if (!p || give_back(p, HERE)) return; \
        const AtWork at_work(HERE);           \
        NAME(p);                              \
    }
#define GIVES_BACK_SIZED(NAME)                   \
    INSTEAD(void, NAME, void* p, size_t bytes) { \
        if (!p || give_back(p, HERE)) return;    \
        const AtWork at_work(HERE);              \
        NAME(p, bytes);                          \
    }
TAKES(malloc) TAKES(_Znwm) TAKES(_Znam)  // new, new[]
TAKES_OR_NULL(_ZnwmRKSt9nothrow_t) TAKES_OR_NULL(_ZnamRKSt9nothrow_t)
GIVES_BACK(free) GIVES_BACK(_ZdlPv) GIVES_BACK(_ZdaPv)  // delete, delete[]
GIVES_BACK_SIZED(_ZdlPvm) GIVES_BACK_SIZED(_ZdaPvm)

INSTEAD(void*, realloc, void* p, size_t bytes) {
    if (!p) {
        if (void* made = take(bytes)) return made;
    } else if (heap.has(p)) {
        void* made = bytes ? take(bytes) : nullptr;
        if (bytes && !made) made = malloc(bytes);
        if (bytes && !made) return nullptr;
        if (made) memcpy(made, p, std::min(taken_bytes(p), bytes));
        give_back(p, HERE);
        return made;
    } else {
        give_back(p, HERE);
    }
    const AtWork at_work(HERE);
    return realloc(p, bytes);
}

// ---- the end of the process ----

static void end_with_fault(const char* call, uint64_t place) {
    if (Thread* me = thread_in_kernel()) {
        SimFault f = fault_of(*me, PROCESS_END, place);
        f.text = call;
        stop(*me, f);
    }
}

#define ENDS(NAME, TYPE)                  \
    INSTEAD(void, NAME, TYPE code) {      \
        end_with_fault(#NAME "()", HERE); \
        NAME(code);                       \
    }
ENDS(exit, int) ENDS(quick_exit, int) ENDS(_exit, int) ENDS(_Exit, int) ENDS(pthread_exit, void*)
#define ENDS_OF_ITSELF(NAME, CALL)  \
    INSTEAD(void, NAME, void) {     \
        end_with_fault(CALL, HERE); \
        NAME();                     \
    }
ENDS_OF_ITSELF(abort, "abort()") ENDS_OF_ITSELF(_ZSt9terminatev, "std::terminate()")

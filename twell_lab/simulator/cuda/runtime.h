// What the .cpp files of this folder share: one library, which those of the kernels need. Kernels see cuda_on_cpu.h only.
//
// A block's threads are fibers on one core. A fiber runs until it meets a barrier or a warp-wide operation that
// others still have to reach; then the next lane of its warp goes on. Blocks are dealt out to the cores' workers.
// A kernel's __shared__ arrays are thread_local, so each worker has a set of its own.
#pragma once
#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_types.h"
#include "sim_thread.h"

enum Watch { FAULTS = 1, COUNTS = 2 };
enum Kind { READ, WRITE, ATOMIC, BRANCH, WARP_WIDE, BARRIER, WATCH };
enum Space { NOWHERE, GLOBAL, SHARED };
enum FaultKind {
    NO_FAULT, OUT_OF_BOUNDS, MISALIGNED, MISMATCHED_BARRIER, SHARED_RACE, GLOBAL_RACE, UNINITIALISED, BAD_LANE, BAD_MASK,
    ASSERTION, TOO_LONG, DIVISION, STACK_OVERFLOW, BROKEN_HEAP, PROCESS_END, CONSTANT_WRITE, MIXED_CALLS, MIXED_MASKS, BAD_WIDTH
};
constexpr int MOST_FRAMES = 12, LANES_A_WARP = 32, MOST_THREADS = 1024;
constexpr int64_t OWN_MEMORY = -2;  // as shared_offset: the address is of the thread's own variables
// The lower end of each stack is closed, so that a thread that needs more is stopped before it damages its neighbour's.
// The closed part is as large as the distance between two of a compiler's stack probes (64 KiB on arm64), in whole pages.
constexpr uintptr_t SIM_CLOSED = 64 << 10;
constexpr uint64_t MOST_OWN_MEMORY = 512 << 10;  // bytes of a thread's own calls and arrays, as on a GPU
constexpr uint32_t NO_SITE = 0xffffffffu, NO_THREAD = 0xffffu;

// ---- what Python hands over and gets back (report.py has the same structures) ----

enum BufferKind { ANY_USE, NO_WRITES, WRITES_UNLIKELY };  // __constant__; an argument `const T*`
struct SimBuffer { uint64_t begin, bytes, kind; };      // one array argument, or a variable of the program
struct SimShared { uint64_t offset, bytes; };           // one __shared__ array, by its place in the thread-local block
struct SimLaunch {
    void (*call)(void**);
    void** arguments;
    uint32_t grid[3], block[3];
    uint32_t workers, watch;
    int64_t trace_block, trace_limit;  // the block whose steps are kept (-1: none), and how many
    double seconds;                    // limit for the whole launch
    const SimBuffer* buffers;
    const SimShared* shared;
    int32_t n_buffers, n_shared;
    uint64_t thread_local_bytes;
    volatile int32_t cancel;  // set from outside to end the launch
    int32_t guarded;          // if 0, a crash ends the process
};
struct SimPath { uint64_t pc[MOST_FRAMES]; int32_t depth, pad; };  // outermost call first
struct SimWaiting { int32_t thread, kind; SimPath path; };
struct SimFault {
    int32_t kind, thread, other_thread, is_write, other_is_write, pad;
    uint64_t size;
    int64_t block, other_block;
    uint64_t address, lane_or_mask;
    int64_t shared_offset;  // of the address in the thread-local block, -1 or OWN_MEMORY
    const char* text;
    SimPath path, other_path;
    SimWaiting* waiting;
    int64_t n_waiting;
};
struct Totals { int64_t requests, accesses, bytes, sectors, lines, wavefronts, ideal_wavefronts, divergent; };
constexpr int TOTALS = sizeof(Totals) / sizeof(int64_t);
struct SimSite { uint64_t pc[MOST_FRAMES]; int32_t depth, kind, space, pad; Totals totals; };
struct SimFootprint { int64_t array, read_sectors, written_sectors, block_read_sectors; };
struct SimStep { int32_t warp, kind, space, size; SimPath path; int32_t lanes, name; };
struct SimLane { int32_t thread, array; int64_t offset; uint8_t value[16]; };
struct SimReport {
    SimFault fault;
    SimSite* sites; int64_t n_sites;
    SimFootprint* footprint; int64_t n_footprint;
    SimStep* steps; int64_t n_steps;
    SimLane* lanes; int64_t n_lanes;
    int32_t truncated, pad;
};

// ---- the code's places: a tree of calls, so that two lanes' places can be compared in program order ----

struct Site {
    uint64_t pc;
    uint32_t parent;
    int32_t depth, kind;
    Totals global, shared;
};
struct Sites {
    uint64_t base;  // of the library with the kernel
    std::vector<Site> all;
    std::unordered_map<uint64_t, uint32_t> children;
    struct Recent { uint64_t pc; uint32_t parent, site; } recent[4096];  // most look-ups end here
    Sites() { clear(); }
    void clear() {
        all.assign(1, Site{0, NO_SITE, 0, 0, {}, {}}), children.clear();
        for (Recent& r : recent) r = {0, NO_SITE, NO_SITE};
    }
    uint32_t child(uint32_t parent, uint64_t pc) {
        Recent& r = recent[(pc ^ pc >> 12 ^ parent * 0x9e3779b1u) % 4096];
        if (r.pc != pc || r.parent != parent) r = {pc, parent, find(parent, pc)};
        return r.site;
    }
    bool before(uint32_t a, uint32_t b) const;  // does a come first in the program?
    SimPath path(uint32_t site) const;
private:
    uint32_t find(uint32_t parent, uint64_t pc);
};

struct Event {  // one lane's part of a warp instruction
    uint64_t address;
    uint32_t site;
    uint8_t kind, space;
    uint16_t size;
    uint8_t value[16];
};

// ---- order.cpp: who used a word of 4 bytes, and what a flag tells ----

enum Use { LOADS, STORES, CHANGES, LOOKS, SETS };  // CHANGES: atomically; LOOKS, SETS: a volatile load, store of an array
struct Access {  // block: its number + 1, 0: none; mask: which bytes; clock: the thread's; worker: whose tree `site` is in
    uint32_t block;
    uint16_t thread;
    uint8_t mask : 4, use : 4, worker;
    uint32_t epoch, clock, site;
};
constexpr int USES = 4;
struct Word {  // serial, written: of shared memory alone, the block that used it and the bytes that it wrote
    uint32_t serial;
    uint8_t written, lock;
    Access uses[USES];  // from the oldest on
};
struct GlobalShadow { Word* words; std::atomic<bool> written; };

using Known = std::vector<std::pair<uint64_t, uint32_t>>;  // (address of a flag, how many of its signals), ascending
struct Fence { uint32_t epoch, warp, seen[LANES_A_WARP]; Known known; };  // what came before a fence of one thread
struct Signal { uint32_t block, thread; std::shared_ptr<const Fence> near, far; };  // for its own block, for others
struct Flags {
    std::mutex lock;
    std::atomic<bool> any{false};
    std::unordered_map<uint64_t, std::vector<Signal>> signals;
};

struct Warp;
struct Worker;

struct Thread : SimThread {
    void* sp;
    uint64_t top;  // of what its calls and arrays take on its stack
    Worker* worker;
    Warp* warp;
    int number, lane;
    bool waiting, done;
    // The operation it waits in, what it gives to it, and what it got from it.
    int wait_kind, parameter, width;
    uint32_t mask, absent;  // absent: lanes that the mask names and that had left the kernel
    uint64_t given, got, wait_pc;
    // Watched builds only.
    uint32_t site;             // the function it is in, as a place in the tree of calls
    bool in_kernel;
    int depth;                 // calls below the kernel, and the stack frame of each
    std::vector<void*> frames;
    uint32_t clock, seen[LANES_A_WARP];  // __syncwarp steps: own, and the last known of each lane
    std::shared_ptr<const Fence> near, far;  // its last fence of any scope, and of the device's
    bool unfenced;             // it has written to an array since
    uint64_t looked_at;        // the flag that its last access looked at, or 0
    Known known;               // the signals that it has seen, beside its worker's
    std::vector<Event> log;
    int64_t unread_write;      // index in log of a write whose value is still to be looked up, or -1
};

struct Warp {
    Thread* lane[LANES_A_WARP];
    uint32_t runnable, waiting, at_barrier, alive;
    int number;
};

// Where the library with a kernel is: all of it, and its code, in which a kernel can be left at any moment.
struct Module { uint64_t base, end, code, code_end; size_t tls_id; };

// What a signal handler found (how: READ, WRITE or -1, unknown), and what it knows of the thread that it runs in.
struct Crash { int signal, code, how; uint64_t address, pc, sp, fp; };
struct Guarded {
    void* const* main_sp;        // where the worker goes on when it leaves the kernel
    Thread* volatile running;    // whose code it is in, null outside of kernels
    const volatile int32_t* cancel;
    double deadline;
    Module module;
    int timer;
    bool late;
    volatile uint64_t in_heap;   // the call of malloc, free or the like that the C library is at work on, or 0
    Crash crash;
};

struct Worker {
    const SimLaunch* launch;
    Module module;
    int64_t block;  // linear number in the grid
    uint32_t block_serial, epoch;
    void* main_sp;
    char* stacks;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    int alive, at_barrier;
    bool fault_found, pauses;  // pauses: whether a thread of the block has waited in a loop
    SimFault fault;
    SimFault unwritten;  // the first read of shared memory that nobody has written yet: a fault at the next barrier
    std::vector<SimWaiting> fault_waiting;
    double deadline;
    uint64_t ticks;
    Guarded guarded;
    std::vector<char> signal_stack;
    // Watched builds only.
    uint8_t number;   // among the launch's workers
    size_t count;     // of the block's threads
    char* shared_begin;
    std::vector<Word> shared;
    GlobalShadow* global;  // one for each buffer, common to all workers
    Flags* flags;          // of arrays, common to all workers
    Flags own_flags;       // of this block's shared memory
    bool uses_flags;
    Known known;           // by all threads of the block, since its last barrier
    Access other;          // what `fault` collides with
    Sites sites;
    std::vector<std::vector<uint64_t>> read_bits, written_bits;  // one bit a sector, for each buffer
    std::vector<std::vector<uint32_t>> last_reader;  // the serial of the block that read a sector last, for each buffer
    std::vector<int64_t> block_reads;  // sectors, each counted once for every block that read it
    std::vector<SimStep> steps;
    std::vector<SimLane> lanes;
    bool truncated;
    bool is_counting;  // of this block's accesses, for counts or for a trace
    bool counting() const { return is_counting; }
    bool tracing() const { return block == launch->trace_block; }
};

inline Thread* self() { return static_cast<Thread*>(sim_thread()); }

// Each of these files calls only those above it; launch.cpp, the C interface, calls them all.

// fibers.cpp
extern "C" void sim_switch(void** save, void* load);
char* make_stacks(bool closed);
void aim_at_start(Thread&, void (*kernel)());
void release_stack(char* stack);

// fault.cpp
extern std::atomic<int> sim_running;
double now();
bool out_of_time(const Worker&);
Module module_of(uint64_t address);
char* thread_local_block(const Module&);
SimFault fault_of(Thread&, int kind, uint64_t pc);
void end_with(Worker&, const SimFault&);
[[noreturn]] void stop(Thread&, SimFault);

// guard.cpp: while it lives, a crash of the kernel that this thread runs ends the kernel's block alone
bool guard_begin();
void guard_end();
struct GuardedThread {
    explicit GuardedThread(Worker&);
    ~GuardedThread();
    Worker& worker;
    stack_t old_stack = {};
    sigset_t old_mask;
};
SimFault fault_of_crash(Thread&);
Thread* thread_in_kernel();  // the one whose code runs here, null outside of kernels

// order.cpp: who used a word before, and whether anything puts one use before the other (heap.cpp is called by kernels)
void order_start(Worker&);
void order_barrier(Worker&);
void order_warp(Warp&, uint32_t lanes, bool sync);
void order_flag(Thread&);
bool order_access(Thread&, Word* words, uint64_t begin, uint64_t address, uint32_t size, Use, uint32_t site, bool& unwritten,
                  Access& other);

// count.cpp
void count_warp(Worker&, Warp&);
void resolve_write(Thread&);

// watch.cpp: hooks into watched builds
void watch_collective(Thread&, int kind, uint64_t pc);

// block.cpp, which launch.cpp calls
void run_block(Worker&, int64_t block);

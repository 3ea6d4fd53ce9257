// Runs one block: which thread goes on next, what a warp-wide operation returns, and when a barrier opens.
#include <string.h>

#include "runtime.h"
enum { SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, ANY, ALL, MATCH, SYNCWARP, REDUCE_ADD, REDUCE_MIN,
       REDUCE_MAX, REDUCE_MIN_SIGNED, REDUCE_MAX_SIGNED, REDUCE_AND, REDUCE_OR, REDUCE_XOR, WAIT_BARRIER, WAIT_BARRIER_OR,
       WAIT_BARRIER_AND, WAIT_BARRIER_COUNT };  // as SimCollective in cuda_on_cpu.h

// The current thread has to wait: switches to the next lane of its warp that can run, or to run_block if none can.
// round: whether lanes before it count too.
static void leave(Thread& me, bool round = true) {
    Warp& w = *me.warp;
    const uint32_t after = w.runnable & ~((2u << me.lane) - 1u);
    if (!after && !(round && w.runnable)) return sim_switch(&me.sp, me.worker->main_sp);
    Thread* next = w.lane[__builtin_ctz(after ? after : w.runnable)];
    me.worker->guarded.running = next;
    sim_switch(&me.sp, next->sp);
}

static SimPath where(Thread& t) {
    SimFault f = fault_of(t, 0, t.wait_pc);
    return f.path;
}

// ---- warp-wide operations ----

static uint64_t reduced(int kind, const Warp& w, uint32_t lanes) {
    bool first = true;
    uint32_t sum = 0;
    for (uint32_t left = lanes; left; left &= left - 1, first = false) {
        const uint32_t v = (uint32_t)w.lane[__builtin_ctz(left)]->given;
        if (first) { sum = v; continue; }
        switch (kind) {
            case REDUCE_ADD: sum += v; break;
            case REDUCE_MIN: sum = v < sum ? v : sum; break;
            case REDUCE_MAX: sum = v > sum ? v : sum; break;
            case REDUCE_MIN_SIGNED: sum = (int32_t)v < (int32_t)sum ? v : sum; break;
            case REDUCE_MAX_SIGNED: sum = (int32_t)v > (int32_t)sum ? v : sum; break;
            case REDUCE_AND: sum &= v; break;
            case REDUCE_OR: sum |= v; break;
            default: sum ^= v;
        }
    }
    return sum;
}

// The lane that a shuffle reads from.
static int source_lane(const Thread& t) {
    const int segment = t.lane & ~(t.width - 1), last = segment + t.width - 1;
    int from;
    switch (t.wait_kind) {
        case SHUFFLE: return segment + (t.parameter & (t.width - 1));
        case SHUFFLE_UP: from = t.lane - t.parameter; return from < segment ? t.lane : from;
        case SHUFFLE_DOWN: from = t.lane + t.parameter; return from > last || from < 0 ? t.lane : from;
        default: from = t.lane ^ t.parameter; return from > last || from < 0 ? t.lane : from;
    }
}

static void complete(Worker& worker, Warp& w, uint32_t lanes) {
    if (worker.counting() && lanes == w.alive) count_warp(worker, w);
    const int kind = w.lane[__builtin_ctz(lanes)]->wait_kind;
    uint64_t common = 0;
    if (kind == BALLOT || kind == ANY || kind == ALL) {
        for (uint32_t left = lanes; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            common |= (uint64_t)(w.lane[lane]->given != 0) << lane;
        }
        if (kind == ANY) common = common != 0;
        if (kind == ALL) common = common == lanes;
    } else if (kind >= REDUCE_ADD) {
        common = reduced(kind, w, lanes);
    }
    if (worker.launch->watch) order_warp(w, lanes, kind == SYNCWARP);
    for (uint32_t left = lanes; left; left &= left - 1) {
        Thread& t = *w.lane[__builtin_ctz(left)];
        if (kind <= SHUFFLE_XOR) {
            const int from = source_lane(t);
            if (!(lanes >> from & 1)) {  // undefined on a GPU; here a fault, or in a fast build the lane's own value
                t.got = t.given;
                if (worker.launch->watch && !worker.fault_found) {
                    SimFault f = fault_of(t, BAD_LANE, t.wait_pc);
                    f.lane_or_mask = from, f.block = worker.block, f.thread = t.number;
                    worker.fault = f, worker.fault_found = true;
                }
            } else {
                t.got = w.lane[from]->given;
            }
        } else if (kind == MATCH) {
            t.got = 0;
            for (uint32_t others = lanes; others; others &= others - 1) {
                const int lane = __builtin_ctz(others);
                t.got |= (uint64_t)(w.lane[lane]->given == t.given) << lane;
            }
        } else {
            t.got = common;
        }
        t.absent = t.mask & ~w.alive;
        t.waiting = false;
    }
    w.waiting &= ~lanes;
    w.runnable |= lanes;
}

// Where a lane called the warp-wide operation that it waits in; the calls inside of the header are left out.
static uint64_t call_of(const Worker& worker, const Thread& t) {
    const std::vector<Site>& all = worker.sites.all;
    return all[t.wait_kind <= SHUFFLE_XOR ? all[t.site].parent : t.site].pc;
}

// Stops where `me` has come to an operation that can't be the one in which another lane waits, and both wait for both.
static void check_meeting(Worker& worker, const Warp& w, Thread& me) {
    for (uint32_t left = w.waiting & me.mask & ~(1u << me.lane); left; left &= left - 1) {
        Thread& other = *w.lane[__builtin_ctz(left)];
        if (!(other.mask >> me.lane & 1) || other.wait_kind != me.wait_kind) continue;
        const bool calls = worker.launch->watch && me.wait_kind != SYNCWARP && call_of(worker, me) != call_of(worker, other);
        if (other.mask == me.mask && !calls) continue;
        SimFault f = fault_of(me, other.mask == me.mask ? MIXED_CALLS : MIXED_MASKS, me.wait_pc);
        f.lane_or_mask = (uint64_t)other.mask << 32 | me.mask;
        f.other_thread = other.number, f.other_block = worker.block, f.other_path = where(other);
        stop(me, f);
    }
}

// Completes the operation that `t` waits in, once every lane that its mask names, and that has not left, waits there too.
static bool complete_if_all_there(Worker& worker, Warp& w, const Thread& t) {
    const uint32_t lanes = t.mask & w.alive;
    if ((w.waiting & lanes) != lanes) return false;
    for (uint32_t left = lanes; left; left &= left - 1) {
        const Thread& other = *w.lane[__builtin_ctz(left)];
        if (other.wait_kind != t.wait_kind || other.mask != t.mask) return false;
    }
    complete(worker, w, lanes);
    return true;
}

static void check_time(Thread& me) {
    Worker& w = *me.worker;
    if ((++w.ticks & 0xfff) == 0 && out_of_time(w)) stop(me, fault_of(me, TOO_LONG, me.wait_pc));
}

// __nanosleep: all others of the block get a turn before the thread goes on, so that it may wait for them in a loop.
extern "C" __attribute__((noinline)) void sim_pause() {
    Thread& me = *self();
    me.wait_pc = (uint64_t)__builtin_return_address(0);
    me.worker->pauses = true;
    check_time(me);
    leave(me, false);
}

extern "C" __attribute__((noinline)) uint64_t sim_warp_wide(int kind, unsigned mask, uint64_t value, int parameter, int width) {
    Thread& me = *self();
    Worker& worker = *me.worker;
    Warp& w = *me.warp;
    const uint64_t pc = me.wait_pc = (uint64_t)__builtin_return_address(0);
    if (!(mask >> me.lane & 1)) {
        SimFault f = fault_of(me, BAD_MASK, pc);
        f.lane_or_mask = mask;
        stop(me, f);
    }
    if (kind <= SHUFFLE_XOR && (width < 1 || width > LANES_A_WARP || width & (width - 1))) {
        SimFault f = fault_of(me, BAD_WIDTH, pc);
        f.lane_or_mask = (uint64_t)(int64_t)width;
        stop(me, f);
    }
    check_time(me);
    me.wait_kind = kind, me.mask = mask, me.given = value, me.parameter = parameter, me.width = width;
    check_meeting(worker, w, me);
    me.waiting = true;
    w.waiting |= 1u << me.lane;
    if (!complete_if_all_there(worker, w, me)) {
        w.runnable &= ~(1u << me.lane);
        leave(me);
    }
    if (worker.fault_found) sim_switch(&me.sp, worker.main_sp);
    if (worker.counting()) watch_collective(me, WARP_WIDE, pc);
    return me.got;
}

// ---- barriers of the block ----

static void open_barrier(Worker& worker, Thread& last) {
    if (worker.unwritten.kind) stop(last, worker.unwritten);
    bool any = false, all = true;
    int count = 0;
    for (Warp& w : worker.warps) {
        if (worker.counting()) count_warp(worker, w);
        for (uint32_t left = w.at_barrier; left; left &= left - 1) {
            const Thread& t = *w.lane[__builtin_ctz(left)];
            any |= t.given != 0, all &= t.given != 0, count += t.given != 0;
        }
    }
    for (Warp& w : worker.warps) {
        for (uint32_t left = w.at_barrier; left; left &= left - 1) {
            Thread& t = *w.lane[__builtin_ctz(left)];
            t.got = t.wait_kind == WAIT_BARRIER_OR ? any : t.wait_kind == WAIT_BARRIER_AND ? all : count;
            t.waiting = false;
        }
        w.runnable |= w.at_barrier;
        w.at_barrier = 0;
    }
    worker.at_barrier = 0;
    if (worker.launch->watch) order_barrier(worker);
}

static SimFault mismatch(Worker& worker) {
    worker.fault_waiting.clear();
    Thread* first = nullptr;
    for (Warp& w : worker.warps)
        for (uint32_t left = w.alive; left; left &= left - 1) {
            Thread& t = *w.lane[__builtin_ctz(left)];
            if (!t.waiting) continue;
            if (!first) first = &t;
            worker.fault_waiting.push_back({t.number, t.wait_kind, where(t)});
        }
    SimFault f = fault_of(*first, MISMATCHED_BARRIER, first->wait_pc);
    f.thread = first->number, f.block = worker.block;
    return f;
}

// Whether all waiting threads wait at the same barrier. A GPU would let different barriers meet; no author means that.
static bool same_barrier(Worker& worker) {
    const Thread* first = nullptr;
    for (Warp& w : worker.warps)
        for (uint32_t left = w.at_barrier; left; left &= left - 1) {
            const Thread& t = *w.lane[__builtin_ctz(left)];
            if (!first) first = &t;
            if (t.wait_kind != first->wait_kind) return false;
            // In a watched build `site` is the call of __syncthreads in the kernel.
            if (worker.sites.all[t.site].pc != worker.sites.all[first->site].pc) return false;
        }
    return true;
}

extern "C" __attribute__((noinline)) int sim_barrier(int kind, int predicate) {
    Thread& me = *self();
    Worker& worker = *me.worker;
    const uint64_t pc = me.wait_pc = (uint64_t)__builtin_return_address(0);
    check_time(me);
    me.wait_kind = kind, me.given = predicate;
    me.waiting = true;
    me.warp->at_barrier |= 1u << me.lane;
    me.warp->runnable &= ~(1u << me.lane);
    if (++worker.at_barrier == worker.alive) {
        if (worker.launch->watch && !same_barrier(worker)) stop(me, mismatch(worker));
        open_barrier(worker, me);
    } else {
        leave(me);
    }
    if (worker.counting()) watch_collective(me, BARRIER, pc);
    return (int)me.got;
}

// ---- a thread's end ----

static void thread_done(Thread& me) {
    Worker& worker = *me.worker;
    Warp& w = *me.warp;
    me.done = true;
    w.alive &= ~(1u << me.lane);
    w.runnable &= ~(1u << me.lane);
    --worker.alive;
    if (worker.counting()) resolve_write(me);
    if (!w.alive && worker.counting()) count_warp(worker, w);
    // Lanes that waited for this thread alone can go on.
    for (uint32_t left = w.waiting; left; left &= left - 1)
        if (complete_if_all_there(worker, w, *w.lane[__builtin_ctz(left)])) break;
    if (worker.alive && worker.at_barrier == worker.alive) {
        if (worker.launch->watch && !same_barrier(worker)) stop(me, mismatch(worker));
        open_barrier(worker, me);
    }
    leave(me);
    __builtin_unreachable();
}

// ---- the block ----

static void begin() {
    Thread& me = *self();
    me.worker->launch->call(me.worker->launch->arguments);
    thread_done(me);
}

static void start(Worker& worker) {
    const SimLaunch& l = *worker.launch;
    const uint32_t n = l.block[0] * l.block[1] * l.block[2];
    worker.warps.assign((n + LANES_A_WARP - 1) / LANES_A_WARP, Warp{});
    worker.alive = (int)n, worker.at_barrier = 0, worker.count = n, ++worker.block_serial;
    worker.unwritten = SimFault{};
    worker.pauses = false;
    order_start(worker);
    const uint64_t b = (uint64_t)worker.block;
    const SimIndex index = {(unsigned)(b % l.grid[0]), (unsigned)(b / l.grid[0] % l.grid[1]), (unsigned)(b / l.grid[0] / l.grid[1])};
    for (uint32_t i = 0; i < n; ++i) {
        Thread& t = worker.threads[i];
        t.thread_index = {i % l.block[0], i / l.block[0] % l.block[1], i / l.block[0] / l.block[1]};
        t.block_index = index;
        t.block_size = dim3(l.block[0], l.block[1], l.block[2]);
        t.grid_size = dim3(l.grid[0], l.grid[1], l.grid[2]);
        t.worker = &worker, t.number = (int)i, t.lane = (int)(i % LANES_A_WARP);
        t.warp = &worker.warps[i / LANES_A_WARP];
        t.waiting = t.done = t.in_kernel = false, t.depth = 0;
        t.site = 0, t.clock = 1, t.unread_write = -1;
        t.near = t.far = nullptr, t.unfenced = false, t.looked_at = 0, t.known.clear(), t.frames.clear();
        t.log.clear();
        memset(t.seen, 0, sizeof t.seen);
        t.warp->lane[t.lane] = &t, t.warp->number = (int)(i / LANES_A_WARP);
        t.warp->alive |= 1u << t.lane, t.warp->runnable |= 1u << t.lane;
        aim_at_start(t, begin);
    }
}

static void run_threads(Worker& worker, int64_t block) {
    worker.block = block;
    worker.is_counting = worker.launch->watch & COUNTS || worker.tracing();
    start(worker);
    while (worker.alive) {
        bool moved = false;
        for (Warp& w : worker.warps) {
            if (!w.runnable) continue;
            moved = true;
            Thread* next = w.lane[__builtin_ctz(w.runnable)];
            worker.guarded.running = next;
            sim_switch(&worker.main_sp, next->sp);
            Thread& last = *worker.guarded.running;
            worker.guarded.running = nullptr;
            if (worker.guarded.crash.signal) end_with(worker, fault_of_crash(last));
            if (worker.fault_found) return;
        }
        if (!moved) {
            worker.fault = mismatch(worker);
            worker.fault_found = true;
            break;
        }
    }
    if (worker.unwritten.kind) worker.fault = worker.unwritten, worker.fault_found = true;
}

void run_block(Worker& worker, int64_t block) {
    run_threads(worker, block);
    if (worker.fault_found && worker.tracing())  // the steps up to the fault
        for (Warp& w : worker.warps) count_warp(worker, w);
}

// The C interface: deals the blocks of a grid out to workers, one a core, and gathers what they found.
#include <stdlib.h>
#include <string.h>

#include <map>
#include <mutex>
#include <thread>

#include "runtime.h"

// ---- workers are kept from launch to launch, since they own much memory ----

static std::mutex idle_lock;
static std::vector<Worker*> idle;

// On Linux before 6.13 the closed ends of stacks split the memory of one worker into 2,048 mappings, and a process may have
// 65,530 of them: only the first workers get closed ends.
constexpr int CLOSED = 8;

static Worker* take_worker() {  // null without memory for stacks
    static int made = 0;
    std::lock_guard<std::mutex> hold(idle_lock);
    if (idle.empty()) {
        char* stacks = make_stacks(made < CLOSED);
        if (!stacks) return nullptr;
        ++made;
        idle.push_back(new Worker());
        idle.back()->stacks = stacks;
    }
    Worker* w = idle.back();
    idle.pop_back();
    return w;
}

static void give_back(const std::vector<Worker*>& workers) {  // the first is the next to be taken
    std::lock_guard<std::mutex> hold(idle_lock);
    idle.insert(idle.end(), workers.rbegin(), workers.rend());
}

static void prepare(Worker& w, const SimLaunch& l, const Module& module, GlobalShadow* global, double deadline) {
    w.launch = &l;
    w.module = module, w.sites.base = module.base;
    const size_t threads = (size_t)l.block[0] * l.block[1] * l.block[2];
    if (w.threads.size() < threads) w.threads.resize(threads);
    w.fault_found = false;
    w.fault = SimFault{};
    w.deadline = deadline;
    w.global = global;
    w.truncated = false;
    w.steps.clear(), w.lanes.clear(), w.sites.clear();
    w.read_bits.assign((size_t)l.n_buffers, {}), w.written_bits.assign((size_t)l.n_buffers, {});
    w.last_reader.assign((size_t)l.n_buffers, {}), w.block_reads.assign((size_t)l.n_buffers, 0);
    if (l.watch & COUNTS)
        for (int i = 0; i < l.n_buffers; ++i) {
            const size_t words = (size_t)(l.buffers[i].bytes / 32 + 2) / 64 + 1;
            w.read_bits[(size_t)i].resize(words), w.written_bits[(size_t)i].resize(words);
            w.last_reader[(size_t)i].resize(64 * words);
        }
}

static void work(Worker& w, std::atomic<int64_t>& next, std::atomic<int64_t>& first_fault, int64_t blocks) {
    const SimLaunch& l = *w.launch;
    w.shared_begin = thread_local_block(w.module);
    const GuardedThread guarded(w);
    if (l.watch) w.shared.assign((size_t)l.thread_local_bytes / 4 + 2, Word{});
    // A first block begins even when the time is over, as it may be where the computer is busy: so it is known where.
    for (bool first = true;; first = false) {
        const int64_t block = next.fetch_add(1);
        if (block >= blocks || block > first_fault.load()) return;
        // No block sees what the one before it left: all bits set are a NaN in every floating type.
        for (int i = 0; i < l.n_shared; ++i) memset(w.shared_begin + l.shared[i].offset, 0xff, (size_t)l.shared[i].bytes);
        if (first ? l.cancel : out_of_time(w)) {
            w.fault = SimFault{};
            w.fault.kind = TOO_LONG, w.fault.block = block, w.fault_found = true;
        } else {
            run_block(w, block);
        }
        if (w.fault_found) {
            int64_t seen = first_fault.load();
            while (block < seen && !first_fault.compare_exchange_weak(seen, block)) {}
            return;
        }
    }
}

// ---- the report ----

template <class T>
static T* copy_out(const std::vector<T>& v) {
    T* out = (T*)malloc(v.size() * sizeof(T) + 1);
    if (!v.empty()) memcpy(out, v.data(), v.size() * sizeof(T));
    return out;
}

struct PathLess {  // of sites whose totals are all zero
    bool operator()(const SimSite& a, const SimSite& b) const { return memcmp(&a, &b, sizeof a) < 0; }
};

static void gather_counts(SimReport& report, const SimLaunch& l, const std::vector<Worker*>& workers) {
    std::map<SimSite, Totals, PathLess> merged;
    for (Worker* w : workers)
        for (uint32_t i = 1; i < w->sites.all.size(); ++i) {
            const Site& s = w->sites.all[i];
            for (int space = NOWHERE; space <= SHARED; ++space) {
                const Totals& t = space == SHARED ? s.shared : s.global;
                const bool memory = s.kind == READ || s.kind == WRITE || s.kind == ATOMIC;
                if (!t.requests || memory == (space == NOWHERE)) continue;
                if (!memory && space != NOWHERE) continue;
                const SimPath path = w->sites.path(i);
                SimSite key{};
                memcpy(key.pc, path.pc, sizeof key.pc);
                key.depth = path.depth, key.kind = s.kind, key.space = space;
                for (int k = 0; k < TOTALS; ++k) ((int64_t*)&merged[key])[k] += ((const int64_t*)&t)[k];
            }
        }
    std::vector<SimSite> sites;
    for (auto& [key, totals] : merged) sites.push_back(key), sites.back().totals = totals;
    std::vector<SimFootprint> footprint;
    for (int i = 0; i < l.n_buffers; ++i) {
        int64_t n[2] = {0, 0};
        for (size_t word = 0; word < workers[0]->read_bits[(size_t)i].size(); ++word) {
            uint64_t read = 0, written = 0;
            for (Worker* w : workers) read |= w->read_bits[(size_t)i][word], written |= w->written_bits[(size_t)i][word];
            n[0] += __builtin_popcountll(read), n[1] += __builtin_popcountll(written);
        }
        int64_t block_reads = 0;
        for (Worker* w : workers) block_reads += w->block_reads[(size_t)i];
        footprint.push_back({i, n[0], n[1], block_reads});
    }
    report.sites = copy_out(sites), report.n_sites = (int64_t)sites.size();
    report.footprint = copy_out(footprint), report.n_footprint = (int64_t)footprint.size();
}

// Returns null without memory for the stacks of a block's threads.
extern "C" SimReport* sim_launch(SimLaunch* launch) {
    const SimLaunch& l = *launch;
    std::vector<Worker*> workers;
    for (uint32_t i = 0; i < l.workers && i <= UINT8_MAX; ++i) {
        workers.push_back(take_worker());
        if (workers.back()) continue;
        workers.pop_back(), give_back(workers);
        return nullptr;
    }
    const int64_t blocks = (int64_t)l.grid[0] * l.grid[1] * l.grid[2];
    std::atomic<int64_t> next{0}, first_fault{INT64_MAX};
    std::vector<GlobalShadow> global((size_t)l.n_buffers);
    for (int i = 0; i < l.n_buffers; ++i)  // calloc: memory is only used for what is touched
        global[(size_t)i].words = l.watch ? (Word*)calloc((size_t)l.buffers[i].bytes / 4 + 2, sizeof(Word)) : nullptr;
    Flags flags;
    const double deadline = now() + l.seconds;
    const Module module = module_of((uint64_t)l.call);
    for (size_t i = 0; i < workers.size(); ++i) {
        prepare(*workers[i], l, module, global.data(), deadline);
        workers[i]->number = (uint8_t)i, workers[i]->flags = &flags;
    }

    launch->guarded = guard_begin();
    ++sim_running;
    std::vector<std::thread> others;
    for (size_t i = 1; i < workers.size(); ++i)
        others.emplace_back([&, i] { work(*workers[i], next, first_fault, blocks); });
    work(*workers[0], next, first_fault, blocks);
    for (std::thread& t : others) t.join();
    --sim_running;
    if (l.guarded) guard_end();

    SimReport* report = (SimReport*)calloc(1, sizeof(SimReport));
    for (Worker* w : workers) {
        if (w->fault_found && w->fault.block == first_fault.load()) {
            report->fault = w->fault;
            report->fault.waiting = copy_out(w->fault_waiting);
            report->fault.n_waiting = (int64_t)w->fault_waiting.size();
            w->fault_waiting.clear();
            const bool race = w->fault.kind == SHARED_RACE || w->fault.kind == GLOBAL_RACE;
            if (race) report->fault.other_path = workers[w->other.worker]->sites.path(w->other.site);
        }
        if (!w->steps.empty()) {
            report->steps = copy_out(w->steps), report->n_steps = (int64_t)w->steps.size();
            report->lanes = copy_out(w->lanes), report->n_lanes = (int64_t)w->lanes.size();
            report->truncated = w->truncated;
        }
    }
    if (l.watch & COUNTS) gather_counts(*report, l, workers);
    for (GlobalShadow& g : global) free(g.words);
    give_back(workers);
    return report;
}

extern "C" void sim_free(SimReport* r) {
    free(r->fault.waiting), free(r->sites), free(r->footprint), free(r->steps), free(r->lanes), free(r);
}

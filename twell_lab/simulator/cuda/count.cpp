// Merges the logs of a warp's lanes into warp instructions, and counts what the memory system would see of them.
//
// In the simulator each lane ran by itself. On a GPU the lanes of a warp run in step as long as they take the same
// branches; where they diverge, the lanes that are earlier in the program run first, so that all meet again after it. The
// logs are merged by the same rule: of the lanes' next events, the one earliest in the program comes next, with all lanes
// that are at it.
#include <string.h>

#include "runtime.h"

constexpr int SECTOR = 5, LINE = 7;  // 32 and 128 bytes

void resolve_write(Thread& t) {
    if (t.unread_write < 0) return;
    Event& e = t.log[(size_t)t.unread_write];
    memcpy(e.value, (const void*)e.address, e.size < 16 ? e.size : 16);
    t.unread_write = -1;
}

// Distinct units of 2^shift bytes that a group of accesses touches; calls `each` with every one of them.
template <class F>
static int units(Event* const* e, int n, int shift, F each) {
    uint64_t found[LANES_A_WARP * 2];
    int many = 0, extra = 0;
    for (int i = 0; i < n; ++i)
        for (uint64_t u = e[i]->address >> shift; u <= (e[i]->address + e[i]->size - 1) >> shift; ++u) {
            bool known = false;
            for (int k = many - 1; k >= 0 && !known; --k) known = found[k] == u;
            if (known) continue;
            if (many < LANES_A_WARP * 2) found[many++] = u;
            else ++extra;  // only a copy of a large struct gets here
            each(u);
        }
    return many + extra;
}

// Passes over the 32 banks of 4 bytes: lanes that want different words of one bank take turns. Accesses of 8 and 16
// bytes are served for a half and a quarter of the warp at a time.
static void count_banks(Event* const* e, int n, Totals& totals) {
    const int size = e[0]->size, words = size > 4 ? size / 4 : 1, at_once = words >= 4 ? 8 : words == 2 ? 16 : 32;
    for (int first = 0; first < n; first += at_once) {
        uint64_t seen[32][LANES_A_WARP];
        int deep[32] = {}, most = 0;
        for (int i = first; i < n && i < first + at_once; ++i)
            for (int k = 0; k < words; ++k) {
                const uint64_t word = e[i]->address / 4 + (uint64_t)k;
                int& d = deep[word % 32];
                bool known = false;
                for (int j = 0; j < d && !known; ++j) known = seen[word % 32][j] == word;
                if (!known && d < LANES_A_WARP) seen[word % 32][d++] = word;
                most = d > most ? d : most;
            }
        totals.wavefronts += most, totals.ideal_wavefronts += 1;
    }
}

static void count_access(Worker& w, Event* const* e, int n, Totals& totals) {
    for (int i = 0; i < n; ++i) totals.bytes += e[i]->size;
    if (e[0]->space == SHARED) return count_banks(e, n, totals);
    totals.lines += units(e, n, LINE, [](uint64_t) {});
    totals.sectors += units(e, n, SECTOR, [&](uint64_t sector) {
        if (!(w.launch->watch & COUNTS)) return;
        const SimLaunch& l = *w.launch;
        for (int i = 0; i < l.n_buffers; ++i) {
            const uint64_t first = l.buffers[i].begin >> SECTOR, at = sector - first;
            if (sector < first || sector > (l.buffers[i].begin + l.buffers[i].bytes - 1) >> SECTOR) continue;
            if (e[0]->kind != WRITE) {
                w.read_bits[(size_t)i][at / 64] |= 1ull << at % 64;
                uint32_t& last = w.last_reader[(size_t)i][at];
                w.block_reads[(size_t)i] += last != w.block_serial;
                last = w.block_serial;
            }
            if (e[0]->kind != READ) w.written_bits[(size_t)i][at / 64] |= 1ull << at % 64;
            return;
        }
    });
}

static void trace(Worker& w, const Warp& warp, Event* const* e, const int* lanes, int n) {
    if ((int64_t)w.steps.size() >= w.launch->trace_limit) {
        w.truncated = true;
        return;
    }
    SimStep s{};
    s.warp = warp.number, s.kind = e[0]->kind, s.space = e[0]->space, s.size = e[0]->size;
    s.path = w.sites.path(e[0]->site);
    s.lanes = n, s.name = e[0]->kind == WATCH ? (int)e[0]->address : -1;
    for (int i = 0; i < n; ++i) {
        SimLane lane{warp.lane[lanes[i]]->number, -1, 0, {}};
        memcpy(lane.value, e[i]->value, 16);
        const SimLaunch& l = *w.launch;
        if (e[i]->space == SHARED)
            for (int k = 0; k < l.n_shared; ++k) {
                const uint64_t at = e[i]->address - (uint64_t)w.shared_begin - l.shared[k].offset;
                if (at < l.shared[k].bytes) lane.array = l.n_buffers + k, lane.offset = (int64_t)at;
            }
        if (e[i]->space == GLOBAL)
            for (int k = 0; k < l.n_buffers; ++k) {
                const uint64_t at = e[i]->address - l.buffers[k].begin;
                if (at < l.buffers[k].bytes) lane.array = k, lane.offset = (int64_t)at;
            }
        w.lanes.push_back(lane);
    }
    w.steps.push_back(s);
}

void count_warp(Worker& w, Warp& warp) {
    size_t at[LANES_A_WARP] = {};
    for (int i = 0; i < LANES_A_WARP; ++i)
        if (warp.lane[i]) resolve_write(*warp.lane[i]);
    const bool tracing = w.tracing();
    for (;;) {
        uint32_t lead = NO_SITE;
        for (int i = 0; i < LANES_A_WARP; ++i) {
            if (!warp.lane[i] || at[i] == warp.lane[i]->log.size()) continue;
            const uint32_t site = warp.lane[i]->log[at[i]].site;
            if (lead == NO_SITE || (site != lead && w.sites.before(site, lead))) lead = site;
        }
        if (lead == NO_SITE) break;
        Event* group[LANES_A_WARP];
        int lanes[LANES_A_WARP], n = 0;
        for (int i = 0; i < LANES_A_WARP; ++i) {
            if (!warp.lane[i] || at[i] == warp.lane[i]->log.size()) continue;
            Event& e = warp.lane[i]->log[at[i]];
            if (e.site != lead || (n && (e.space != group[0]->space || e.kind != group[0]->kind))) continue;
            group[n] = &e, lanes[n++] = i, ++at[i];
        }
        Site& site = w.sites.all[lead];
        site.kind = group[0]->kind;
        Totals& totals = group[0]->space == SHARED ? site.shared : site.global;
        ++totals.requests, totals.accesses += n;
        if (group[0]->kind <= ATOMIC) count_access(w, group, n, totals);
        if (group[0]->kind == BRANCH) {  // did the lanes go on together?
            bool split = false;
            auto next = [&](int k) {
                const std::vector<Event>& log = warp.lane[lanes[k]]->log;
                return at[lanes[k]] < log.size() ? log[at[lanes[k]]].site : NO_SITE;
            };
            for (int k = 1; k < n && !split; ++k) split = next(k) != next(0);
            totals.divergent += split;
        } else if (tracing) {
            trace(w, warp, group, lanes, n);
        }
    }
    for (int i = 0; i < LANES_A_WARP; ++i)
        if (warp.lane[i]) warp.lane[i]->log.clear();
}

// Packs a small gate with pack_v2, watched, and says how many values and sectors it
// saw: what test_arm64.py builds for another processor.
#include <stdio.h>
#include <string.h>

#include <vector>

#include "runtime.h"

extern "C" SimReport* sim_launch(SimLaunch*);
extern "C" void sim_call_pack_v2(void**);
extern "C" void sim_call_crashes(void**);

int main() {
    const int rows = 3, columns = 300, tile = 256, words = 32, tiles = 2;
    std::vector<unsigned short> gate(rows * columns);
    std::vector<unsigned> packed(rows * tiles * words, 0xdeadbeef);
    for (int i = 0; i < rows * columns; ++i) gate[i] = i % 7 ? 0xbf80 : 0x3f80;  // -1, and 1 in every seventh place
    const void* in = gate.data();
    void* out = packed.data();
    long long n = rows;
    int c = columns, t = tile, w = words;
    void* arguments[] = {&in, &out, &n, &c, &t, &w};
    const SimBuffer buffers[] = {{(uint64_t)in, gate.size() * 2}, {(uint64_t)out, packed.size() * 4}};
    SimLaunch l{};
    l.call = sim_call_pack_v2, l.arguments = arguments;
    l.grid[0] = l.grid[1] = l.grid[2] = 1, l.block[0] = 256, l.block[1] = l.block[2] = 1;
    l.workers = 2, l.watch = FAULTS | COUNTS, l.trace_block = 0, l.trace_limit = 100000, l.seconds = 60;
    l.buffers = buffers, l.n_buffers = 2;
    SimReport* report = sim_launch(&l);
    long reads = 0, kept = 0;
    for (int64_t i = 0; i < report->n_sites; ++i)
        if (report->sites[i].kind == READ) reads += report->sites[i].totals.accesses;
    for (int i = 0; i < rows * tiles; ++i) kept += packed[i * words];
    printf("fault %d, lane reads %ld, kept %ld, first word %08x, steps %ld\n", report->fault.kind, reads, kept, packed[1],
           (long)report->n_steps);
    // One column too many: the last row's last tile ends past the array.
    c = columns + 1;
    report = sim_launch(&l);
    printf("fault %d of thread %d\n", report->fault.kind, report->fault.thread);
    // What ends a program otherwise.
    for (int which = 0; which < 5; ++which) {
        void* number[] = {&which};
        l.call = sim_call_crashes, l.arguments = number, l.watch = 0, l.trace_block = -1, l.n_buffers = 0, l.seconds = 0.3;
        l.guarded = 1;
        report = sim_launch(&l);
        printf("crash %d: fault %d of thread %d, a path of %d\n", which, report->fault.kind, report->fault.thread,
               report->fault.path.depth);
        fflush(stdout);
    }
}

// What all others stand on: the time, where running code is in the tree of calls, and how a fault ends a block.
#include <link.h>
#include <time.h>

#include <algorithm>

#include "runtime.h"

std::atomic<int> sim_running{0};

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool out_of_time(const Worker& w) { return w.launch->cancel || now() > w.deadline; }

// ---- where a library is, and its thread-local block with the kernel's __shared__ arrays ----

static int find_module(dl_phdr_info* info, size_t, void* out) {
    Module& found = *(Module*)out;
    Module m = {(uint64_t)info->dlpi_addr, 0, 0, 0, info->dlpi_tls_modid};
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& p = info->dlpi_phdr[i];
        const uint64_t begin = info->dlpi_addr + p.p_vaddr, end = begin + p.p_memsz;
        if (p.p_type != PT_LOAD) continue;
        if (found.code >= begin && found.code < end) m.code = begin, m.code_end = end;
        m.end = std::max(m.end, end);
    }
    if (m.code) found = m;
    return m.code != 0;
}

Module module_of(uint64_t address) {
    Module m{0, 0, address, 0, 0};
    dl_iterate_phdr(find_module, &m);
    return m;
}

struct TlsIndex { unsigned long module, offset; };
extern "C" void* __tls_get_addr(TlsIndex*);

char* thread_local_block(const Module& m) {
    if (!m.tls_id) return nullptr;
    TlsIndex index{m.tls_id, 0};
    return (char*)__tls_get_addr(&index);
}

// Where the library is loaded that has this address: what its symbols' values are counted from.
extern "C" uint64_t sim_base(uint64_t address) { return module_of(address).base; }

// ---- the tree of calls ----

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
    for (int i = 0; i < p.depth; ++i) p.pc[i] = all[chain[p.depth - 1 - i]].pc - base;
    return p;
}

SimFault fault_of(Thread& me, int kind, uint64_t pc) {
    SimFault f{};
    f.kind = kind, f.thread = me.number, f.block = me.worker->block;
    if (pc) f.path = me.worker->sites.path(me.worker->sites.child(me.site, pc));
    return f;
}

// ---- the end of a block ----

void end_with(Worker& w, const SimFault& fault) {
    w.fault = w.unwritten.kind ? w.unwritten : fault;
    w.fault_found = true;
    for (Thread& t : w.threads)  // frees what an endless loop has logged
        if (t.log.capacity() > 1 << 16) std::vector<Event>().swap(t.log), t.unread_write = -1;
}

// Ends the block with a fault; the threads of the block are not continued.
void stop(Thread& me, SimFault fault) {
    Worker& w = *me.worker;
    end_with(w, fault);
    sim_switch(&me.sp, w.main_sp);
    __builtin_unreachable();
}

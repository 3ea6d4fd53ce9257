// Threads of a block as fibers: a stack each, and a switch that saves what the calling convention says must survive.
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
.type sim_switch, @function
sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
.globl sim_resume
.hidden sim_resume
sim_resume:
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size sim_switch, . - sim_switch
)");
constexpr int SAVED_WORDS = 7, RETURN_WORD = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
.type sim_switch, %function
sim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
.globl sim_resume
.hidden sim_resume
sim_resume:
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size sim_switch, . - sim_switch
)");
constexpr int SAVED_WORDS = 20, RETURN_WORD = 11;
#else
#error "the simulator switches fibers on x86-64 and arm64 only"
#endif

// Stacks for as many threads as a block can have. Memory is used only where it is touched, and never given back. The word
// after the last stack says whether the stacks' ends may be closed in a way that splits the mapping.
char* make_stacks(bool closed) {
    const size_t bytes = SIM_STACK * (MOST_THREADS + 2);
    void* region = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) return nullptr;
    char* stacks = (char*)(((uintptr_t)region + SIM_STACK - 1) & ~(SIM_STACK - 1));
    *(int*)(stacks + MOST_THREADS * SIM_STACK) = closed;
    return stacks;
}

static void close_end(const char* stacks, char* stack) {
    constexpr int GUARD_INSTALL = 102;  // Linux 6.13: closes pages without splitting the memory
    if (madvise(stack, SIM_CLOSED, GUARD_INSTALL) && *(const int*)(stacks + MOST_THREADS * SIM_STACK))
        mprotect(stack, SIM_CLOSED, PROT_NONE);
}

void release_stack(char* stack) { madvise(stack + SIM_CLOSED, SIM_STACK - SIM_CLOSED, MADV_DONTNEED); }

// The thread's next switch enters `kernel` from the top.
void aim_at_start(Thread& t, void (*kernel)()) {
    char* top = t.worker->stacks + (t.number + 1) * SIM_STACK;
    if (!*(SimThread**)(top - 8)) close_end(t.worker->stacks, top - SIM_STACK);  // never used before
    *(SimThread**)(top - 8) = &t;
    // Each stack begins at another place within its page: otherwise all would use the same lines of the cache.
    void** words = (void**)(top - 64 - t.number % 128 * 1088) - SAVED_WORDS;
#if defined(__x86_64__)
    words -= (uintptr_t)(words + SAVED_WORDS) % 16 == 0 ? 1 : 0;  // a called function finds its stack 8 past 16
#else
    words = (void**)((uintptr_t)words & ~(uintptr_t)15);
#endif
    memset(words, 0, SAVED_WORDS * sizeof *words);
    words[RETURN_WORD] = (void*)kernel;
    t.sp = words, t.top = (uint64_t)words;
}

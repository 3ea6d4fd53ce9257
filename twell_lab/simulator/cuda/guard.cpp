// A kernel that crashes, or runs on and on, ends its launch and not the process.
//
// While launches run, the process has handlers for the signals of a crash. A worker's thread that receives one while it
// runs a kernel goes on where it left for the kernel: in run_block, on its own stack, with a note of what happened.
// A timer's signal, which comes several times a second, does the same to a kernel that has used up its time. Every other
// signal goes to the handler that was there before.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include "runtime.h"

#if !defined(sigev_notify_thread_id)
#define sigev_notify_thread_id _sigev_un._tid
#endif

extern "C" void sim_resume();  // fibers.cpp: the second half of a switch

constexpr int TICK = SIGURG;  // ignored by default, and hardly ever used
constexpr int CRASHES[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}, GUARDED = 7;
constexpr double TICKS_APART = 0.05, LATE_TICKS_APART = 0.001;  // seconds

static pthread_key_t key;
static std::atomic<bool> has_key{false};
static std::mutex guard_lock;
static int guard_count = 0;
static struct sigaction previous[NSIG];
static volatile bool passed_on[NSIG];

#if defined(__x86_64__)
static uint64_t counter_of(const ucontext_t& c) { return (uint64_t)c.uc_mcontext.gregs[REG_RIP]; }
static uint64_t stack_of(const ucontext_t& c) { return (uint64_t)c.uc_mcontext.gregs[REG_RSP]; }
static uint64_t frame_of(const ucontext_t& c) { return (uint64_t)c.uc_mcontext.gregs[REG_RBP]; }
// Whether the frame at REG_RBP is that of the code at pc: it is not yet where a function begins, and no more where it
// returns. There a function of the header would be taken for its caller, and the place have no line.
static bool has_its_frame(uint64_t pc) {
    static constexpr uint8_t ENDBR[] = {0xf3, 0x0f, 0x1e, 0xfa}, PUSH_RBP = 0x55, SET_RBP[] = {0x48, 0x89, 0xe5}, RET = 0xc3;
    const uint8_t* at = (const uint8_t*)pc;
    return *at != PUSH_RBP && *at != RET && memcmp(at, SET_RBP, sizeof SET_RBP) && memcmp(at, ENDBR, sizeof ENDBR);
}
static int how_of(const ucontext_t& c) { return c.uc_mcontext.gregs[REG_ERR] & 2 ? WRITE : READ; }
static void continue_at(ucontext_t& c, void* sp) {
    c.uc_mcontext.gregs[REG_RIP] = (greg_t)&sim_resume;
    c.uc_mcontext.gregs[REG_RSP] = (greg_t)sp;
    c.uc_mcontext.gregs[REG_EFL] &= ~0x400;  // copies go upwards, as every function expects
}
#else
static uint64_t counter_of(const ucontext_t& c) { return c.uc_mcontext.pc; }
static uint64_t stack_of(const ucontext_t& c) { return c.uc_mcontext.sp; }
static uint64_t frame_of(const ucontext_t& c) { return c.uc_mcontext.regs[29]; }
static bool has_its_frame(uint64_t) { return true; }
static int how_of(const ucontext_t&) { return -1; }
static void continue_at(ucontext_t& c, void* sp) {
    c.uc_mcontext.pc = (uint64_t)&sim_resume;
    c.uc_mcontext.sp = (uint64_t)sp;
}
#endif

static void tick_every(Guarded& g, double seconds) {
    const timespec apart = {0, (long)(1e9 * seconds)};
    const struct itimerspec when = {apart, apart};
    syscall(SYS_timer_settime, g.timer, 0, &when, nullptr);
}

// Does what would have happened without these handlers.
static void pass_on(int number, siginfo_t* info, void* context) {
    const struct sigaction& to = previous[number];
    if (number == TICK) {
        if (to.sa_flags & SA_SIGINFO) to.sa_sigaction(number, info, context);
        else if (to.sa_handler != SIG_DFL && to.sa_handler != SIG_IGN) to.sa_handler(number);
        return;
    }
    const bool ignored = !(to.sa_flags & SA_SIGINFO) && to.sa_handler == SIG_IGN;
    if (ignored && info->si_code <= 0) return;  // sent by a process, not raised by an instruction: has no effect
    // The instruction runs again, with the previous handler in place. If the signal comes back here a second time, that
    // handler has passed it on to this one: the default action follows.
    struct sigaction next = to;
    if (passed_on[number] || ignored) {
        memset(&next, 0, sizeof next);
        next.sa_handler = SIG_DFL;
    }
    passed_on[number] = true;
    sigaction(number, &next, nullptr);
    if (info->si_code <= 0) raise(number);  // no instruction would raise it again
}

static void on_signal(int number, siginfo_t* info, void* context) {
    const int error = errno;
    Guarded* g = (Guarded*)pthread_getspecific(key);
    ucontext_t& c = *(ucontext_t*)context;
    const bool tick = number == TICK && info->si_code == SI_TIMER && g && info->si_value.sival_ptr == g;
    // abort() sends its signal to the thread that it is called in; all others are raised by an instruction.
    const bool own = number == SIGABRT ? info->si_code == SI_TKILL && info->si_pid == getpid() : info->si_code > 0 && number != TICK;
    if (tick ? g->running != nullptr : g && g->running && own) {
        const uint64_t pc = counter_of(c);
        bool leaves = !tick;
        if (tick && (*g->cancel || now() > g->deadline)) {
            // Elsewhere it may hold a lock, of malloc's for example.
            leaves = pc >= g->module.code && pc < g->module.code_end && has_its_frame(pc);
            if (!leaves && !g->late) g->late = true, tick_every(*g, LATE_TICKS_APART);
        }
        if (leaves) {
            const int how = tick || number == SIGABRT ? -1 : how_of(c);
            g->crash = {number, info->si_code, how, (uint64_t)info->si_addr, pc, stack_of(c), frame_of(c)};
            continue_at(c, *g->main_sp);
        }
    } else if (!tick) {
        pass_on(number, info, context);
    }
    errno = error;
}

static bool is_ours(const struct sigaction& a) { return a.sa_flags & SA_SIGINFO && a.sa_sigaction == on_signal; }

// The handlers are installed from the first guard_begin to the last guard_end.
bool guard_begin() {
    std::lock_guard<std::mutex> hold(guard_lock);
    if (!has_key && pthread_key_create(&key, nullptr)) return false;
    has_key = true;
    if (guard_count++) return true;
    for (int i = 0; i < GUARDED; ++i) {
        const int number = i ? CRASHES[i - 1] : TICK;
        struct sigaction ours = {}, now_there;
        ours.sa_sigaction = on_signal;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
        sigaction(number, nullptr, &now_there);
        passed_on[number] = false;
        if (is_ours(now_there)) continue;  // other code had saved our handler and has put it back
        previous[number] = now_there;
        sigaction(number, &ours, nullptr);
    }
    return true;
}

void guard_end() {
    std::lock_guard<std::mutex> hold(guard_lock);
    if (--guard_count) return;
    for (int i = 0; i < GUARDED; ++i) {
        const int number = i ? CRASHES[i - 1] : TICK;
        struct sigaction now_there;
        sigaction(number, nullptr, &now_there);
        if (is_ours(now_there)) sigaction(number, &previous[number], nullptr);
    }
}

// ---- a worker's thread ----

constexpr size_t SIGNAL_STACK = 64 << 10;

static sigset_t guarded_signals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, TICK);
    for (int number : CRASHES) sigaddset(&set, number);
    return set;
}

GuardedThread::GuardedThread(Worker& w) : worker(w) {
    Guarded& g = w.guarded;
    const SimLaunch& l = *w.launch;
    g.main_sp = &w.main_sp, g.running = nullptr, g.crash.signal = 0, g.late = false, g.in_heap = 0;
    if (!l.guarded) return;
    g.cancel = &l.cancel, g.deadline = w.deadline, g.module = w.module;

    w.signal_stack.resize(SIGNAL_STACK);
    stack_t stack = {};
    stack.ss_sp = w.signal_stack.data(), stack.ss_size = w.signal_stack.size();
    sigaltstack(&stack, &old_stack);
    const sigset_t set = guarded_signals();
    pthread_sigmask(SIG_UNBLOCK, &set, &old_mask);
    pthread_setspecific(key, &g);

    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = TICK, event.sigev_value.sival_ptr = &g;
    event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
    g.timer = -1;
    if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &g.timer) == 0)
        tick_every(g, std::min(TICKS_APART, std::max(l.seconds, LATE_TICKS_APART)));
}

GuardedThread::~GuardedThread() {
    if (!worker.launch->guarded) return;
    if (worker.guarded.timer >= 0) syscall(SYS_timer_delete, worker.guarded.timer);
    pthread_setspecific(key, nullptr);
    pthread_sigmask(SIG_SETMASK, &old_mask, nullptr);
    sigaltstack(&old_stack, nullptr);
}

Thread* thread_in_kernel() {
    const Guarded* g = has_key ? (const Guarded*)pthread_getspecific(key) : nullptr;
    return g ? g->running : nullptr;
}

// ---- what happened ----

// The place in the kernel's code, as a return address: where the crash was or, if that is outside, the call that led there.
static uint64_t place_of(const Thread& me, const Crash& c, uint64_t lowest, uint64_t top) {
    const uint64_t begin = me.worker->module.code, end = me.worker->module.code_end;
    auto word = [&](uint64_t at) { return at >= lowest && at <= top - 8 && at % 8 == 0 ? *(const uint64_t*)at : 0; };
    if (c.pc < begin || c.pc >= end) {
        for (uint64_t at = (c.sp + 7) & ~7ull; at >= lowest && at < top; at += 8)
            if (word(at) > begin && word(at) < end) return word(at);
        return 0;
    }
    uint64_t place = c.pc + 1, frame = c.fp;
    // Walks out of the header's functions, which the tree of calls leaves out, to the function where the tree stands.
    for (int i = 0; me.in_kernel && i < 8 && frame != (uint64_t)me.frames.back(); ++i, frame = word(frame)) {
        const uint64_t back = word(frame + 8);
        if (back <= begin || back >= end) break;
        place = back;
    }
    return place;
}

SimFault fault_of_crash(Thread& me) {
    Worker& w = *me.worker;
    const Crash c = w.guarded.crash;
    const uint64_t in_heap = w.guarded.in_heap;
    w.guarded.crash.signal = 0, w.guarded.in_heap = 0;
    const uint64_t bottom = (uint64_t)(w.stacks + me.number * SIM_STACK), lowest = bottom + SIM_CLOSED;
    const bool memory = c.signal == SIGSEGV || c.signal == SIGBUS;
    const bool overflow = memory && (c.sp < lowest || c.sp >= bottom + SIM_STACK || (c.address >= bottom && c.address < lowest));
    const int kind = c.signal == TICK ? TOO_LONG : c.signal == SIGFPE ? DIVISION
                     : c.signal == SIGABRT ? (in_heap ? BROKEN_HEAP : PROCESS_END) : !memory ? ASSERTION
                     : overflow ? STACK_OVERFLOW : OUT_OF_BOUNDS;
    SimFault f = fault_of(me, kind, overflow ? c.pc + 1 : in_heap ? in_heap : place_of(me, c, lowest, bottom + SIM_STACK));
    if (kind == ASSERTION) f.text = "a trap instruction: __builtin_trap(), or code that cannot be reached";
    if (kind == BROKEN_HEAP) f.text = "the C library found it broken";
    if (kind == PROCESS_END) f.text = "abort(), which the C or C++ library called: for an exception that nothing caught, for example";
    if (kind == OUT_OF_BOUNDS) {
        // The processor does not report an address that no memory can have.
        f.address = c.code == SI_KERNEL ? ~0ull : c.address, f.is_write = c.how, f.size = 0;
        const uint64_t in_shared = f.address - (uint64_t)w.shared_begin;
        f.shared_offset = in_shared < w.launch->thread_local_bytes ? (int64_t)in_shared : -1;
    }
    if (overflow) release_stack((char*)bottom);
    return f;
}

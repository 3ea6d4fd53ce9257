// <assert.h> for kernels: a failed assertion is a fault with its line, and the process goes on. No include guard, as there.
#undef assert
#if defined(NDEBUG)
#define assert(condition) ((void)0)
#else
#define assert(condition) ((condition) ? (void)0 : sim_assertion("assert(" #condition ")"))
#endif

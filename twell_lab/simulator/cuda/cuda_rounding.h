// Exact conversions between binary formats, in integer arithmetic: what float16, bfloat16 and the intrinsics with a
// named rounding (_rn, _rz, _ru, _rd) are built on.
//
// A format is <FRACTION, EXPONENT> bits: float16 <10, 5>, bfloat16 <7, 8>, float32 <23, 8>. Every value of these is a
// normal double, so a result is computed as a double and rounded to its format once. Where the double itself is not
// exact it is rounded to odd: the two doubles around the exact value, the one whose last bit is 1. That keeps the fact
// that something was lost, so the second rounding is right, in every mode, for any format of at most 50 fraction bits.
//
// Subnormals are kept, also on a thread that flushes its own (torch.set_flush_denormal): only normal doubles are
// computed with. Needs the processor's default rounding, to nearest, and no -ffast-math.
#pragma once
#include <math.h>

// On a GPU each of these functions is an instruction or a few, on registers: a watched build sees no call, no branch
// and no access inside of it. Compilers too old for an attribute leave something: GCC before 12 the branches.
#if !defined(__has_attribute)
#define __has_attribute(name) 0
#endif
#if __has_attribute(no_sanitize_coverage)
#define SIM_UNWATCHED __attribute__((no_instrument_function, no_sanitize_coverage, no_sanitize("thread")))
#else
#define SIM_UNWATCHED __attribute__((no_instrument_function, no_sanitize("thread")))
#endif
#define SIM_VALUE static inline SIM_UNWATCHED

// The compiler's instrumentation does not see a struct that goes from an array straight into a call, `f(in[i])`, or from
// a call straight into an array, `out[i] = f()`. In watched builds a copy constructor and an assignment that are not
// trivial make these seen, each as one access of the whole struct. A struct of one's own is only seen there if it has such
// a pair.
#if defined(SIM_WATCHED)
// Copies, telling the runtime of a read and a write at `place` in the kernel; in pieces of `piece` bytes.
extern "C" void sim_copy(void* to, const void* from, int bytes, int piece, void* place);
#define SIM_SEEN_COPIES(NAME)                                                                                       \
    SIM_UNWATCHED __attribute__((noinline)) NAME(const NAME& v) {                                                   \
        sim_copy(this, &v, sizeof(NAME), sim_piece<NAME>(), __builtin_return_address(0));                           \
    }                                                                                                               \
    SIM_UNWATCHED __attribute__((noinline)) NAME& operator=(const NAME& v) {                                        \
        sim_copy(this, &v, sizeof(NAME), sim_piece<NAME>(), __builtin_return_address(0));                           \
        return *this;                                                                                               \
    }
template <typename T>
SIM_UNWATCHED constexpr int sim_piece() {  // a GPU moves up to 16 bytes at once if their number is a power of two
    return sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0 ? sizeof(T) : alignof(T);
}
#else
#define SIM_SEEN_COPIES(NAME)
#endif

enum SimRounding { SIM_NEAREST, SIM_ZERO, SIM_UP, SIM_DOWN };

// The same bits as another type. A union and not memcpy: sanitizers turn memcpy into calls of their own.
template <typename To, typename From>
SIM_VALUE To sim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits need the same size");
    union {
        From from;
        To to;
    } both = {from};
    return both.to;
}

// 2^exponent, for exponents of normal doubles.
SIM_VALUE double sim_power(int exponent) { return sim_bits<double>((unsigned long long)(exponent + 1023) << 52); }

// The double with the value of a format's bits; of a NaN, some NaN.
template <int FRACTION, int EXPONENT>
SIM_VALUE double sim_widen(unsigned int bits) {
    const int top = (1 << EXPONENT) - 1, bias = top >> 1;
    const unsigned int fraction = bits & ((1u << FRACTION) - 1);
    const int exponent = (int)(bits >> FRACTION) & top;
    const bool negative = bits >> (FRACTION + EXPONENT) & 1;
    double size;
    if (exponent == top)
        size = sim_bits<double>(fraction ? 0x7ff8000000000000ull : 0x7ff0000000000000ull);
    else if (exponent == 0)
        size = (double)fraction * sim_power(1 - bias - FRACTION);
    else
        size = (double)(fraction | 1u << FRACTION) * sim_power(exponent - bias - FRACTION);
    return negative ? -size : size;
}

// The format's bits of a double, rounded. Any NaN becomes the format's canonical NaN, all ones below the sign: 0x7fff.
template <int FRACTION, int EXPONENT>
SIM_VALUE unsigned int sim_narrow(double value, SimRounding rounding) {
    const unsigned int infinity = ((1u << EXPONENT) - 1) << FRACTION;
    const int smallest = 2 - (1 << (EXPONENT - 1));  // the exponent of the smallest normal value
    const unsigned long long bits = sim_bits<unsigned long long>(value);
    const bool negative = bits >> 63;
    const unsigned int sign = (unsigned int)negative << (FRACTION + EXPONENT);
    unsigned long long significand = bits & 0xfffffffffffffull;
    int exponent = (int)(bits >> 52 & 0x7ff);
    if (exponent == 0x7ff) return significand ? infinity | ((1u << FRACTION) - 1) : sign | infinity;
    if (exponent) significand |= 1ull << 52;
    exponent = exponent ? exponent - 1023 : -1022;

    // value = significand * 2^(exponent - 52); all but FRACTION + 1 bits are dropped, and of a subnormal more.
    const int steps = exponent > smallest ? exponent - smallest : 0;
    int drop = 52 - FRACTION + (exponent < smallest ? smallest - exponent : 0);
    if (drop > 55) drop = 55;  // all is dropped, and less than half a unit
    unsigned long long kept = significand >> drop;
    const unsigned long long rest = significand & ((1ull << drop) - 1), half = 1ull << (drop - 1);
    if (rounding == SIM_NEAREST) kept += rest > half || (rest == half && (kept & 1));
    if (rounding == SIM_UP) kept += rest && !negative;
    if (rounding == SIM_DOWN) kept += rest && negative;

    // The leading 1 of a normal value adds itself to the exponent field, and so does a carry.
    const unsigned long long size = kept + ((unsigned long long)steps << FRACTION);
    if (size < infinity) return sign | (unsigned int)size;
    const bool away = rounding == SIM_NEAREST || rounding == (negative ? SIM_DOWN : SIM_UP);
    return sign | (away ? infinity : infinity - 1);
}

// The same for a double that the program itself holds: its NaN keeps the sign and the upper part of the payload.
template <int FRACTION, int EXPONENT>
SIM_VALUE unsigned int sim_narrow_own(double value, SimRounding rounding) {
    if (value == value) return sim_narrow<FRACTION, EXPONENT>(value, rounding);
    const unsigned long long bits = sim_bits<unsigned long long>(value);
    const unsigned int quiet = ((1u << (EXPONENT + 1)) - 1) << (FRACTION - 1);
    return (unsigned int)(bits >> 63) << (FRACTION + EXPONENT) | quiet |
           ((unsigned int)(bits >> (52 - FRACTION)) & ((1u << FRACTION) - 1));
}

SIM_VALUE double sim_from_float(float f) { return sim_widen<23, 8>(sim_bits<unsigned int>(f)); }
SIM_VALUE float sim_to_float(double value, SimRounding rounding) {
    return sim_bits<float>(sim_narrow<23, 8>(value, rounding));
}

// a + b, rounded to odd. Knuth's two-sum gives what the nearest double is off by.
SIM_VALUE double sim_sum(double a, double b) {
    const double sum = a + b;
    if (!(fabs(sum) <= 1.7976931348623157e308)) return sum;  // infinite or NaN: nothing was rounded
    const double b_seen = sum - a;
    const double off = (a - (sum - b_seen)) + (b - b_seen);
    unsigned long long bits = sim_bits<unsigned long long>(sum);
    if (off != 0 && !(bits & 1)) bits += (off > 0) == (sum > 0) ? 1ull : ~0ull;
    return sim_bits<double>(bits);
}

// a * b + c, rounded to odd, for operands of at most 26 significant bits each: their product is exact.
SIM_VALUE double sim_fma(double a, double b, double c) { return sim_sum(a * b, c); }

// An integer as a double, rounded to odd.
SIM_VALUE double sim_from_size(unsigned long long size) {
    const int drop = size >> 53 ? 11 - __builtin_clzll(size) : 0;
    const unsigned long long kept = size >> drop;
    return (double)(kept | (kept << drop != size)) * sim_power(drop);
}
template <typename I>
SIM_VALUE double sim_from_integer(I i) {
    return i < (I)1 && i != 0 ? -sim_from_size(-(unsigned long long)i) : sim_from_size((unsigned long long)i);
}

// A double as an integer of type I: rounded, then clamped to I's range. NaN gives what PTX 9.0 says under `cvt`: 0, but
// the top bit alone where either side is 64 bits wide.
template <typename I>
SIM_VALUE I sim_to_integer(double value, SimRounding rounding, bool of_double) {
    const bool is_signed = (I)-1 < (I)1;
    const unsigned long long top = 1ull << (8 * sizeof(I) - 1);
    const unsigned long long greatest = is_signed ? top - 1 : top - 1 + top;
    if (value != value) return of_double || sizeof(I) == 8 ? (I)top : (I)0;
    if (rounding == SIM_NEAREST) value = rint(value);
    if (rounding == SIM_ZERO) value = trunc(value);
    if (rounding == SIM_UP) value = ceil(value);
    if (rounding == SIM_DOWN) value = floor(value);
    if (value >= (double)greatest) return (I)greatest;
    if (value <= (is_signed ? -(double)top : 0.0)) return is_signed ? (I)top : (I)0;
    return (I)value;
}

// A 16-bit float type from its bits.
template <typename T>
SIM_VALUE T sim_sixteen(unsigned int bits) {
    T t;
    t.__x = (unsigned short)bits;
    return t;
}

// What __half and __nv_bfloat16 have in common: the type, the pair, and every function that has the same name for both.
// Included once each by cuda_fp16.h and cuda_bf16.h (no #pragma once), which define
//   SIM_TYPE, SIM_PAIR            the names of the type and of two of them in 32 bits
//   SIM_FORMAT                    its numbers of fraction and exponent bits
//   SIM_FLOAT(bits)               the float with the value of its bits
//
// Each result is the exact one, rounded once (to nearest even where no rounding is named). Subnormals are kept. A NaN
// result is 0x7fff, whatever the operands' NaN were; a double's own NaN keeps its sign and the top of its payload.

struct SIM_TYPE {
    unsigned short __x;

    SIM_TYPE() = default;
    SIM_SEEN_COPIES(SIM_TYPE)
#define SIM_FROM(TYPE, DOUBLE) \
    SIM_UNWATCHED SIM_TYPE(TYPE v) : __x((unsigned short)sim_narrow<SIM_FORMAT>(DOUBLE, SIM_NEAREST)) {}
    SIM_FROM(float, sim_from_float(v))
    SIM_FROM(short, v)
    SIM_FROM(unsigned short, v)
    SIM_FROM(int, v)
    SIM_FROM(unsigned int, v)
    SIM_FROM(long, sim_from_integer(v))
    SIM_FROM(unsigned long, sim_from_integer(v))
    SIM_FROM(long long, sim_from_integer(v))
    SIM_FROM(unsigned long long, sim_from_integer(v))
#undef SIM_FROM
    SIM_UNWATCHED SIM_TYPE(double v) : __x((unsigned short)sim_narrow_own<SIM_FORMAT>(v, SIM_NEAREST)) {}

    // These read the object, which may lie in memory that a watched build watches: they are not SIM_UNWATCHED.
    operator float() const { return SIM_FLOAT(__x); }
    operator bool() const { return (__x & 0x7fff) != 0; }
#define SIM_TO(TYPE) \
    operator TYPE() const { return sim_to_integer<TYPE>(sim_widen<SIM_FORMAT>(__x), SIM_ZERO, false); }
    SIM_TO(char)
    SIM_TO(signed char)
    SIM_TO(unsigned char)
    SIM_TO(short)
    SIM_TO(unsigned short)
    SIM_TO(int)
    SIM_TO(unsigned int)
    SIM_TO(long)
    SIM_TO(unsigned long)
    SIM_TO(long long)
    SIM_TO(unsigned long long)
#undef SIM_TO
};

struct alignas(4) SIM_PAIR {
    SIM_TYPE x, y;
    SIM_PAIR() = default;
    SIM_SEEN_COPIES(SIM_PAIR)
    SIM_UNWATCHED SIM_PAIR(SIM_TYPE low, SIM_TYPE high) : x(low), y(high) {}
};

SIM_VALUE double sim_value(SIM_TYPE a) { return sim_widen<SIM_FORMAT>(a.__x); }
SIM_VALUE bool __hisnan(SIM_TYPE a) { const double v = sim_value(a); return v != v; }
SIM_VALUE int __hisinf(SIM_TYPE a) { const double v = sim_value(a); return (v > 1e300) - (v < -1e300); }

// ---- arithmetic: a double that is exact or rounded to odd, then rounded ----

#define SIM_ROUND(DOUBLE) sim_sixteen<SIM_TYPE>(sim_narrow<SIM_FORMAT>(DOUBLE, SIM_NEAREST))

SIM_VALUE SIM_TYPE __hadd(SIM_TYPE a, SIM_TYPE b) { return SIM_ROUND(sim_sum(sim_value(a), sim_value(b))); }
SIM_VALUE SIM_TYPE __hsub(SIM_TYPE a, SIM_TYPE b) { return SIM_ROUND(sim_sum(sim_value(a), -sim_value(b))); }
SIM_VALUE SIM_TYPE __hmul(SIM_TYPE a, SIM_TYPE b) { return SIM_ROUND(sim_value(a) * sim_value(b)); }
SIM_VALUE SIM_TYPE __hfma(SIM_TYPE a, SIM_TYPE b, SIM_TYPE c) {
    return SIM_ROUND(sim_fma(sim_value(a), sim_value(b), sim_value(c)));
}
// No quotient of two 11-bit numbers lies nearer to a tie than 2^-25 of itself without being one, and no square root
// either, so the rounding to a double in between does no harm.
SIM_VALUE SIM_TYPE __hdiv(SIM_TYPE a, SIM_TYPE b) { return SIM_ROUND(sim_value(a) / sim_value(b)); }
SIM_VALUE SIM_TYPE hsqrt(SIM_TYPE a) { return SIM_ROUND(sqrt(sim_value(a))); }
SIM_VALUE SIM_TYPE hrcp(SIM_TYPE a) { return SIM_ROUND(1.0 / sim_value(a)); }

SIM_VALUE SIM_TYPE __hneg(SIM_TYPE a) { return sim_sixteen<SIM_TYPE>(__hisnan(a) ? 0x7fffu : a.__x ^ 0x8000u); }
SIM_VALUE SIM_TYPE __habs(SIM_TYPE a) { return sim_sixteen<SIM_TYPE>(__hisnan(a) ? 0x7fffu : a.__x & 0x7fffu); }

// Of a number and a NaN the number; the _nan kind gives NaN. -0 < +0.
SIM_VALUE SIM_TYPE __hmax_nan(SIM_TYPE a, SIM_TYPE b) {
    const double v = sim_value(a), w = sim_value(b);
    if (v != v || w != w) return sim_sixteen<SIM_TYPE>(0x7fff);
    return v == w ? sim_sixteen<SIM_TYPE>(a.__x & b.__x) : v > w ? a : b;
}
SIM_VALUE SIM_TYPE __hmin_nan(SIM_TYPE a, SIM_TYPE b) {
    const double v = sim_value(a), w = sim_value(b);
    if (v != v || w != w) return sim_sixteen<SIM_TYPE>(0x7fff);
    return v == w ? sim_sixteen<SIM_TYPE>(a.__x | b.__x) : v < w ? a : b;
}
SIM_VALUE SIM_TYPE __hmax(SIM_TYPE a, SIM_TYPE b) { return __hmax_nan(__hisnan(a) ? b : a, __hisnan(b) ? a : b); }
SIM_VALUE SIM_TYPE __hmin(SIM_TYPE a, SIM_TYPE b) { return __hmin_nan(__hisnan(a) ? b : a, __hisnan(b) ? a : b); }

// _rn is never contracted, and neither is anything else here. _sat clamps to [0, 1], with NaN becoming 0; _relu to >= 0.
SIM_VALUE SIM_TYPE sim_saturate(SIM_TYPE a) { return __hmin(__hmax(a, SIM_TYPE(0)), SIM_TYPE(1)); }
SIM_VALUE SIM_TYPE __hadd_rn(SIM_TYPE a, SIM_TYPE b) { return __hadd(a, b); }
SIM_VALUE SIM_TYPE __hsub_rn(SIM_TYPE a, SIM_TYPE b) { return __hsub(a, b); }
SIM_VALUE SIM_TYPE __hmul_rn(SIM_TYPE a, SIM_TYPE b) { return __hmul(a, b); }
SIM_VALUE SIM_TYPE __hadd_sat(SIM_TYPE a, SIM_TYPE b) { return sim_saturate(__hadd(a, b)); }
SIM_VALUE SIM_TYPE __hsub_sat(SIM_TYPE a, SIM_TYPE b) { return sim_saturate(__hsub(a, b)); }
SIM_VALUE SIM_TYPE __hmul_sat(SIM_TYPE a, SIM_TYPE b) { return sim_saturate(__hmul(a, b)); }
SIM_VALUE SIM_TYPE __hfma_sat(SIM_TYPE a, SIM_TYPE b, SIM_TYPE c) { return sim_saturate(__hfma(a, b, c)); }
SIM_VALUE SIM_TYPE __hfma_relu(SIM_TYPE a, SIM_TYPE b, SIM_TYPE c) { return __hmax_nan(__hfma(a, b, c), SIM_TYPE(0)); }

// ---- of one value: roundings to whole numbers (exact), and functions a GPU approximates (here rounded from double) ----

#define SIM_FUNCTION(NAME, EXPRESSION)                                                                    \
    SIM_VALUE SIM_TYPE h##NAME(SIM_TYPE a) { const double v = sim_value(a); return SIM_ROUND(EXPRESSION); } \
    SIM_VALUE SIM_PAIR h2##NAME(SIM_PAIR a) { return SIM_PAIR(h##NAME(a.x), h##NAME(a.y)); }
SIM_FUNCTION(trunc, trunc(v))
SIM_FUNCTION(ceil, ceil(v))
SIM_FUNCTION(floor, floor(v))
SIM_FUNCTION(rint, rint(v))
SIM_FUNCTION(rsqrt, 1.0 / sqrt(v))
SIM_FUNCTION(exp, exp(v))
SIM_FUNCTION(exp2, exp2(v))
SIM_FUNCTION(exp10, pow(10.0, v))
SIM_FUNCTION(log, log(v))
SIM_FUNCTION(log2, log2(v))
SIM_FUNCTION(log10, log10(v))
SIM_FUNCTION(sin, sin(v))
SIM_FUNCTION(cos, cos(v))
SIM_FUNCTION(tanh, tanh(v))
#undef SIM_FUNCTION

// ---- comparisons. With a NaN they are false; those ending in u are true ----

#define SIM_COMPARISON(NAME, OPERATOR)                                                                                     \
    SIM_VALUE bool __h##NAME(SIM_TYPE a, SIM_TYPE b) {                                                                     \
        return !__hisnan(a) && !__hisnan(b) && sim_value(a) OPERATOR sim_value(b);                                         \
    }                                                                                                                      \
    SIM_VALUE bool __h##NAME##u(SIM_TYPE a, SIM_TYPE b) { return __hisnan(a) || __hisnan(b) || __h##NAME(a, b); }          \
    SIM_COMPARISON_OF_PAIRS(NAME)                                                                                          \
    SIM_COMPARISON_OF_PAIRS(NAME##u)
#define SIM_COMPARISON_OF_PAIRS(NAME)                                                                                      \
    SIM_VALUE SIM_PAIR __h##NAME##2(SIM_PAIR a, SIM_PAIR b) {                                                              \
        return SIM_PAIR(SIM_TYPE((int)__h##NAME(a.x, b.x)), SIM_TYPE((int)__h##NAME(a.y, b.y)));                           \
    }                                                                                                                      \
    SIM_VALUE unsigned int __h##NAME##2_mask(SIM_PAIR a, SIM_PAIR b) {                                                     \
        return (__h##NAME(a.x, b.x) ? 0xffffu : 0) | (__h##NAME(a.y, b.y) ? 0xffff0000u : 0);                              \
    }                                                                                                                      \
    SIM_VALUE bool __hb##NAME##2(SIM_PAIR a, SIM_PAIR b) { return __h##NAME(a.x, b.x) && __h##NAME(a.y, b.y); }
SIM_COMPARISON(eq, ==)
SIM_COMPARISON(ne, !=)
SIM_COMPARISON(lt, <)
SIM_COMPARISON(le, <=)
SIM_COMPARISON(gt, >)
SIM_COMPARISON(ge, >=)
#undef SIM_COMPARISON
#undef SIM_COMPARISON_OF_PAIRS

// ---- pairs: each half by itself ----

#define SIM_PAIR_1(NAME, OF) SIM_VALUE SIM_PAIR NAME(SIM_PAIR a) { return SIM_PAIR(OF(a.x), OF(a.y)); }
#define SIM_PAIR_2(NAME, OF) SIM_VALUE SIM_PAIR NAME(SIM_PAIR a, SIM_PAIR b) { return SIM_PAIR(OF(a.x, b.x), OF(a.y, b.y)); }
#define SIM_PAIR_3(NAME, OF) \
    SIM_VALUE SIM_PAIR NAME(SIM_PAIR a, SIM_PAIR b, SIM_PAIR c) { return SIM_PAIR(OF(a.x, b.x, c.x), OF(a.y, b.y, c.y)); }
SIM_PAIR_1(__hneg2, __hneg)
SIM_PAIR_1(__habs2, __habs)
SIM_PAIR_1(__hisnan2, (int)__hisnan)
SIM_PAIR_1(h2sqrt, hsqrt)
SIM_PAIR_1(h2rcp, hrcp)
SIM_PAIR_2(__hadd2, __hadd)
SIM_PAIR_2(__hsub2, __hsub)
SIM_PAIR_2(__hmul2, __hmul)
SIM_PAIR_2(__h2div, __hdiv)
SIM_PAIR_2(__hadd2_rn, __hadd)
SIM_PAIR_2(__hsub2_rn, __hsub)
SIM_PAIR_2(__hmul2_rn, __hmul)
SIM_PAIR_2(__hadd2_sat, __hadd_sat)
SIM_PAIR_2(__hsub2_sat, __hsub_sat)
SIM_PAIR_2(__hmul2_sat, __hmul_sat)
SIM_PAIR_2(__hmax2, __hmax)
SIM_PAIR_2(__hmin2, __hmin)
SIM_PAIR_2(__hmax2_nan, __hmax_nan)
SIM_PAIR_2(__hmin2_nan, __hmin_nan)
SIM_PAIR_3(__hfma2, __hfma)
SIM_PAIR_3(__hfma2_sat, __hfma_sat)
SIM_PAIR_3(__hfma2_relu, __hfma_relu)
#undef SIM_PAIR_1
#undef SIM_PAIR_2
#undef SIM_PAIR_3
SIM_VALUE float __low2float(SIM_PAIR a) { return SIM_FLOAT(a.x.__x); }
SIM_VALUE float __high2float(SIM_PAIR a) { return SIM_FLOAT(a.y.__x); }
SIM_VALUE SIM_PAIR __lowhigh2highlow(SIM_PAIR a) { return SIM_PAIR(a.y, a.x); }

// ---- operators. Those with a reference touch memory: not SIM_UNWATCHED ----

#define SIM_OPERATORS(T, ADD, SUB, MUL, DIV, NEG, ONE)                          \
    SIM_VALUE T operator+(T a) { return a; }                                    \
    SIM_VALUE T operator-(T a) { return NEG(a); }                               \
    SIM_VALUE T operator+(T a, T b) { return ADD(a, b); }                       \
    SIM_VALUE T operator-(T a, T b) { return SUB(a, b); }                       \
    SIM_VALUE T operator*(T a, T b) { return MUL(a, b); }                       \
    SIM_VALUE T operator/(T a, T b) { return DIV(a, b); }                       \
    static inline T& operator+=(T& a, T b) { return a = ADD(a, b); }            \
    static inline T& operator-=(T& a, T b) { return a = SUB(a, b); }            \
    static inline T& operator*=(T& a, T b) { return a = MUL(a, b); }            \
    static inline T& operator/=(T& a, T b) { return a = DIV(a, b); }            \
    static inline T& operator++(T& a) { return a = ADD(a, ONE); }               \
    static inline T& operator--(T& a) { return a = SUB(a, ONE); }               \
    static inline T operator++(T& a, int) { const T old = a; ++a; return old; } \
    static inline T operator--(T& a, int) { const T old = a; --a; return old; }
SIM_OPERATORS(SIM_TYPE, __hadd, __hsub, __hmul, __hdiv, __hneg, SIM_TYPE(1))
SIM_OPERATORS(SIM_PAIR, __hadd2, __hsub2, __hmul2, __h2div, __hneg2, SIM_PAIR(SIM_TYPE(1), SIM_TYPE(1)))
#undef SIM_OPERATORS
// != is true where a NaN is, as for float.
#define SIM_COMPARING(T, EQ, NEU, LT, LE, GT, GE)               \
    SIM_VALUE bool operator==(T a, T b) { return EQ(a, b); }    \
    SIM_VALUE bool operator!=(T a, T b) { return NEU(a, b); }   \
    SIM_VALUE bool operator<(T a, T b) { return LT(a, b); }     \
    SIM_VALUE bool operator<=(T a, T b) { return LE(a, b); }    \
    SIM_VALUE bool operator>(T a, T b) { return GT(a, b); }     \
    SIM_VALUE bool operator>=(T a, T b) { return GE(a, b); }
SIM_COMPARING(SIM_TYPE, __heq, __hneu, __hlt, __hle, __hgt, __hge)
SIM_COMPARING(SIM_PAIR, __hbeq2, __hbneu2, __hblt2, __hble2, __hbgt2, __hbge2)
#undef SIM_COMPARING
#undef SIM_ROUND

// What fires, and with which value: the activation behind the gate's product, or behind up's in a plain layer.
//
// Compile with at most one of these; without any it is the ReLU.
//   ACTS_ABOVE      g where g > threshold, which is 0 or more (FATReLU)
//   ACTS_SILU, ACTS_GELU, ACTS_GELU_TANH
//                   act(g) where |act(g)| >= threshold, values of either sign (CATS)
// And with BOTH, in gated layers, up goes through a ReLU as well (dReLU). SIGNED is for kernels whose gate values went
// through such an activation before, which left zeros: with it everything else is kept.
#pragma once
#include "twell.cuh"

// Whether the activation returns to zero far below zero: torch's gives NaN for minus infinity.
#if defined(ACTS_SILU) || defined(ACTS_GELU) || defined(ACTS_GELU_TANH)
#define FALLS_BACK 1
#else
#define FALLS_BACK 0
#endif

// Whether a value belongs into the packed matrix.
__device__ __forceinline__ bool kept(value_t v) {
#if defined(SIGNED)
    return to_float(v) != 0.0f;
#else
    return fires(v);
#endif
}

struct Activated {
    float value;  // where it does not fire, of no use
    bool fires;
};

// The activation of a gate value, in torch's steps: computed in float32 and rounded to the type of the values, in which
// it is compared with the threshold. NaN fires. Minus infinity, which may be a large number rounded to 16 bits, is
// silent, as such a number is.
__device__ __forceinline__ Activated activated(value_t gate, float threshold) {
    const float g = to_float(gate);
#if defined(ACTS_ABOVE)
    return {g, !(g <= threshold)};
#elif FALLS_BACK
#if defined(ACTS_SILU)
    const float exact = g / (1.0f + expf(-g));
#elif defined(ACTS_GELU)
    const float exact = g * 0.5f * (1.0f + erff(g * 0.70710678118654752440f));
#else
    const float inner = 0.79788456080286535588f * (g + 0.044715f * (g * g * g));
    const float exact = 0.5f * g * (1.0f + tanhf(inner));
#endif
    const float value = to_float(from_float(exact));
    return {value, !(fabsf(value) < threshold) && !(g < -3.402823466e38f)};
#else
    return {g, !(g <= 0.0f)};
#endif
}

// h of a neuron of a gated layer that fires: its value after the activation, times up's.
template <class Sum>
__device__ __forceinline__ Sum hidden(float value, Sum up) {
#if defined(BOTH)
    // The ReLU's zero silences the neuron, also one whose gate overflowed. Minus infinity is that of a row of x which
    // is not finite: there the dense layer multiplies whatever it has.
    if (up <= 0) return up < (Sum)-3.402823466e38f ? value * 0.0f : 0.0f;
#endif
    return value * up;
}

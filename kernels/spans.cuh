// What a training step keeps of a layer's gate, one list for all rows (smxx_survivors.cu writes it): words `value bits
// << 16 | column of the matrix`, columns ascending, and for each row a span int2 (start, count) of that list. A gated
// layer has a float u beside each word. What reads it: smxx_train_rows.cu, smxx_train_slabs.cu, smxx_columns.cu.
//
// int lost[rows + 2] names two kinds of rows. Lost rows are not in the list: lost[0] is how many there are, lost[1..]
// their numbers, ascending. Heavy rows have more than HEAVY entries: lost[rows + 1] is how many there are, and
// lost[rows], lost[rows - 1].. are their numbers, ascending. No row is both, so the two never meet: where there are too
// many of them, rows with more than HEAVY entries are lost instead.
#pragma once

#define LOST (-1)  // the start of a row that the list does not hold
#ifndef HEAVY
#define HEAVY 256  // a row with more entries is walked by a whole block where others are walked by a group of lanes
#endif

// h of an entry: of a gated layer in fp32, not rounded.
__device__ __forceinline__ float hidden_value(float g, const float* ups, int at) { return ups ? g * ups[at] : g; }

// Zero and NaN are their own sign.
__device__ __forceinline__ float sign_of(float h) { return h > 0 ? 1.0f : h < 0 ? -1.0f : h; }

// The softmax of one row of logits, as `sample` and `token_logprobs` both see it: one piece of code, hence equal bits.
#pragma once
#include <cmath>

#include "common.h"

// Sums over a row, with t = (x - maximum) * inverse_temperature and e = exp(t).
struct RowSums {
  double total;     // sum of e
  double weighted;  // sum of e * t
};

// A temperature so small that its inverse overflows behaves like this one: every gap is infinite for all purposes.
RK_INLINE float inverse_temperature(float temperature) {
  const float inverse = 1.0f / temperature;
  return inverse < 1e30f ? inverse : 1e30f;
}

// The maximum of a row, and its minimum where asked for. Returns false where a value is NaN or +inf (the minimum then
// means nothing), or where every value is -inf.
bool row_maximum(const float* x, long size, float* maximum, float* minimum = nullptr);

// Sums of a row; also writes e to `exponentials` where given (room for a multiple of 16, zeros past the end).
RowSums row_sums(const float* x, long size, float maximum, float inverse, float* exponentials);

float row_logprob(float x, float maximum, float inverse, double total);
float row_entropy(RowSums sums);

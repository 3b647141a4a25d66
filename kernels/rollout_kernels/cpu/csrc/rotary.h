// Rotary embedding of one row, half-split style, for the kernel of its own and for the end of a matrix product.
#pragma once
#include "common.h"

template <typename T>
RK_INLINE void rotate_heads(T* x, long heads, long head_dim, const float* cosine, const float* sine, float direction) {
  const long half = head_dim / 2;
  for (long h = 0; h < heads; h++) {
    T* low = x + h * head_dim;
    T* high = low + half;
    for (long d = 0; d < half; d += 16) {
      const long count = half - d;
      const v16f c = load_lanes(cosine + d, count), s = load_lanes(sine + d, count) * direction;
      const v16f a = load_lanes(low + d, count), b = load_lanes(high + d, count);
      store_lanes(low + d, a * c - b * s, count);
      store_lanes(high + d, b * c + a * s, count);
    }
  }
}

// SiLU gating, for the kernel of its own and for the end of a matrix product.
#pragma once
#include "common.h"

// From exp(-|x|), which cannot overflow. A NaN gives 0 here and is still in the factor x of every use.
RK_INLINE v16f sigmoid(v16f x) {
  const v16f e = exp_nonpositive(vmax(from_bits(as_bits(x) | 0x80000000u), splat(-100.0f)));
  return select((v16i)(x >= 0.0f), splat(1.0f), e) / (1.0f + e);
}

// out = silu(gate) * up for one row.
template <typename T>
RK_INLINE void silu_and_mul_row(const T* gate, const T* up, T* out, long size) {
  for (long i = 0; i < size; i += 16) {
    const long count = size - i;
    const v16f g = load_lanes(gate + i, count);
    store_lanes(out + i, g * sigmoid(g) * load_lanes(up + i, count), count);
  }
}

// What the kernels beside the matrix product and the attention share.
#pragma once
#include <type_traits>

#include "simd.h"

static const v16i kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Runs `call` with a null pointer of the element type that a dtype code names.
template <typename Call>
static inline void with_dtype(int dtype, Call call) {
  if (dtype == RK_BFLOAT16)
    call((bf16*)nullptr);
  else
    call((float*)nullptr);
}

// The element type behind such a pointer.
#define RK_ELEMENT(pointer) std::remove_pointer_t<decltype(pointer)>

RK_INLINE float to_float(float x) { return x; }
RK_INLINE float to_float(bf16 x) { return bf16_to_float(x); }

template <typename T>
RK_INLINE v16f load_lanes(const T* p, long count) {
  return count >= 16 ? load(p) : load_partial(p, count);
}
template <typename T>
RK_INLINE void store_lanes(T* p, v16f v, long count) {
  if (count >= 16)
    store(p, v);
  else
    store_partial(p, v, count);
}

// exp for t <= 0, within about 1 ulp; exactly 1 at 0 and exactly 0 below -87.3. Shorter than `vexp`, which must also
// serve NaN and large values: cut off the integer n of t / ln 2, and add n to the exponent of the polynomial's value.
RK_INLINE v16f exp_nonpositive(v16f t) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const v16f shifted = t * 1.44269504088896341f + magic;
  const v16f n = shifted - magic;
  v16f r = t - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  const v16f p = exp_polynomial(r);
  const v16f result = from_bits(as_bits(p) + (as_bits(shifted) << 23));
  return (v16f)((v16i)result & (v16i)(t >= -87.3f));
}

// Whether any lane of a comparison's result is true.
RK_INLINE bool any_lane(v16i mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  uint64_t words[8];
  memcpy(words, &mask, sizeof words);
  return ((words[0] | words[1]) | (words[2] | words[3]) | (words[4] | words[5]) | (words[6] | words[7])) != 0;
#endif
}

// One bit a lane.
RK_INLINE uint32_t lane_bits(v16i mask) {
#if defined(__AVX512F__)
  return (uint32_t)_mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < 16; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}

// Below this many elements a parallel region costs more than it saves. It never changes a result.
constexpr long kParallelElements = 1 << 15;

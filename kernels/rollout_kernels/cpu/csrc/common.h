// What the kernels beside the matrix product and the attention share.
#pragma once
#include <type_traits>

#include "simd.h"

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

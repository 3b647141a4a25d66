// The noise of sampling: 32 bits for each (seed, sample index, position, token id), from no state at all.
// `reference/noise.py` defines the same function.
#pragma once
#include "simd.h"

struct NoiseKey {
  uint32_t first, second;
};

RK_INLINE uint64_t mix64(uint64_t h) {
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
  return h ^ (h >> 31);
}

RK_INLINE NoiseKey noise_key(uint64_t seed, uint64_t sample_index, uint64_t position) {
  const uint64_t step = 0x9e3779b97f4a7c15ull;
  uint64_t h = mix64(seed + step);
  h = mix64((h ^ sample_index) + step);
  h = mix64((h ^ position) + step);
  return {(uint32_t)h, (uint32_t)(h >> 32)};
}

// Two rounds of a 32-bit finaliser, a half of the key before each. Works on one id or on 16.
template <typename U>
RK_INLINE U noise_bits(U id, NoiseKey key) {
  U h = id * 0x9e3779b1u + key.first;
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = (h ^ (h >> 15)) * 0x846ca68bu;
  h = (h ^ (h >> 16)) + key.second;
  h = (h ^ (h >> 17)) * 0xed5ad4bbu;
  h = (h ^ (h >> 11)) * 0xac4c1b51u;
  return h ^ (h >> 15);
}

// Portable 16-lane vectors (GCC vector extensions), bfloat16 conversion, and exp and log of fixed accuracy.
//
// Every function is a pure function of its lanes, so a value does not depend on where it stands in a vector.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef uint16_t bf16;

enum { RK_FLOAT32 = 0, RK_BFLOAT16 = 1, RK_INT8 = 2 };

#define RK_INLINE static inline __attribute__((always_inline))

RK_INLINE v16f splat(float x) { return v16f{} + x; }
RK_INLINE v16u as_bits(v16f x) { return (v16u)x; }
RK_INLINE v16f from_bits(v16u x) { return (v16f)x; }

RK_INLINE v16f select(v16i mask, v16f a, v16f b) {
  return (v16f)(((v16i)a & mask) | ((v16i)b & ~mask));
}

RK_INLINE v16f load(const float* p) {
  v16f v;
  memcpy(&v, p, sizeof v);
  return v;
}
RK_INLINE void store(float* p, v16f v) { memcpy(p, &v, sizeof v); }

RK_INLINE float bf16_to_float(bf16 h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; every NaN becomes the quiet NaN.
RK_INLINE bf16 float_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

RK_INLINE v16f load(const bf16* p) {
  v16h h;
  memcpy(&h, p, sizeof h);
  return from_bits(__builtin_convertvector(h, v16u) << 16);
}
// As float_to_bf16, also below 2^-126.
RK_INLINE v16h to_bf16_exactly(v16f v) {
  v16u u = as_bits(v);
  v16u rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  v16i nan = (v16i)((u & 0x7fffffffu) > 0x7f800000u);
  rounded = (rounded & ~(v16u)nan) | (0x7fc0u & (v16u)nan);
  return __builtin_convertvector(rounded, v16h);
}
RK_INLINE v16h to_bf16(v16f v) {
#if defined(__AVX512BF16__)
  return (v16h)_mm512_cvtneps_pbh((__m512)v);  // takes numbers below 2^-126 as zero
#else
  return to_bf16_exactly(v);
#endif
}
RK_INLINE void store(bf16* p, v16f v) {
  v16h h = to_bf16(v);
  memcpy(p, &h, sizeof h);
}

// The first `count` lanes from memory, zeros in the others. Reads nothing past `count`.
template <typename T>
RK_INLINE v16f load_partial(const T* p, long count) {
  T buffer[16] = {};
  memcpy(buffer, p, (size_t)count * sizeof(T));
  return load(buffer);
}
template <typename T>
RK_INLINE void store_partial(T* p, v16f v, long count) {
  T buffer[16];
  store(buffer, v);
  memcpy(p, buffer, (size_t)count * sizeof(T));
}

#if defined(__AVX512F__)
RK_INLINE v16f vmax(v16f a, v16f b) { return (v16f)_mm512_max_ps((__m512)a, (__m512)b); }
RK_INLINE v16f vmin(v16f a, v16f b) { return (v16f)_mm512_min_ps((__m512)a, (__m512)b); }
#else
RK_INLINE v16f vmax(v16f a, v16f b) { return select((v16i)(a > b), a, b); }
RK_INLINE v16f vmin(v16f a, v16f b) { return select((v16i)(a < b), a, b); }
#endif

// One fixed tree, so that a sum has the same bits wherever it is taken.
RK_INLINE float horizontal_sum(v16f v) {
#if defined(__AVX512F__)
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                                 _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
#else
  float a[16];
  store(a, v);
  float b[8], c[4];
  for (int i = 0; i < 8; i++) b[i] = a[i] + a[i + 8];
  for (int i = 0; i < 4; i++) c[i] = b[i] + b[i + 4];
  return (c[0] + c[2]) + (c[1] + c[3]);
#endif
}
RK_INLINE float horizontal_max(v16f v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float a[16];
  store(a, v);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
  return a[0];
#endif
}

// exp(r) for |r| <= ln(2)/2, about 1 ulp.
RK_INLINE v16f exp_polynomial(v16f r) {
  v16f p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

// exp, about 1 ulp; exactly 0 below -87.3 (-inf included), +inf above 88.7; NaN stays NaN.
// Range reduction to |r| <= ln(2)/2 and a polynomial of degree 6.
#if defined(__AVX512F__)
RK_INLINE v16f vexp(v16f x) {
  const __m512 v = (__m512)x;
  // With the constant first, these two give back a NaN.
  const __m512 clamped = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-88.0f), v));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504088896341f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  const __m512 p = _mm512_scalef_ps((__m512)exp_polynomial((v16f)r), n);
  return (v16f)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), p);
}
#else
RK_INLINE v16f vexp(v16f x) {
  const float log2e = 1.44269504088896341f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  v16f clamped = vmin(vmax(x, splat(-87.4f)), splat(88.8f));
  v16f shifted = clamped * log2e + magic;
  v16f n = shifted - magic;
  v16f r = clamped - n * ln2_high;
  r = r - n * ln2_low;
  const v16f p = exp_polynomial(r);
  // Scale by 2^n in two steps, so that n = 128 does not overflow before the product does.
  v16i exponent = __builtin_convertvector(n, v16i);
  v16i half = exponent >> 1;
  v16f scale_a = (v16f)((half + 127) << 23);
  v16f scale_b = (v16f)((exponent - half + 127) << 23);
  v16f result = p * scale_a * scale_b;
  result = select((v16i)(x < -87.3f), v16f{}, result);
  result = select((v16i)(x > 88.72284f), splat(__builtin_inff()), result);
  return select((v16i)(x != x), x, result);
}
#endif

// log of positive normal numbers, about 1 ulp; log(0) = -inf; log(+inf) = +inf; negative and NaN give NaN.
RK_INLINE v16f vlog(v16f x) {
  v16i bits = (v16i)x;
  v16i exponent = (bits >> 23) - 126;
  v16f m = (v16f)((bits & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  v16i small = (v16i)(m < 0.707106781186547524f);
  exponent = exponent + small;  // a true lane is -1
  m = select(small, m + m, m) - 1.0f;
  v16f e = __builtin_convertvector(exponent, v16f);
  v16f z = m * m;
  v16f p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  v16f y = p * m * z;
  y = y + e * -2.12194440e-4f;
  y = y - 0.5f * z;
  v16f result = m + y + e * 0.693359375f;
  result = select((v16i)(x == 0.0f), splat(-__builtin_inff()), result);
  result = select((v16i)(x == __builtin_inff()), x, result);
  return select((v16i)((x != x) | (x < 0.0f)), splat(__builtin_nanf("")), result);
}

RK_INLINE float sexp(float x) { return vexp(splat(x))[0]; }
RK_INLINE float slog(float x) { return vlog(splat(x))[0]; }

// out = x @ weight^T + bias with int8 weights and activations, row-invariant.
//
// A weight has one scale a row (output channel). Activations are quantised here, each row by itself, with one scale for
// every 32 neighbours along K. Products inside such a group are summed as integers, which are exact in any order; the
// groups' sums, each times its scale, are added as float32 from the first group to the last.
//
// Weights are packed as [N / 16][K / 4][16][4] unsigned bytes, value + 128: one step of 64 bytes holds four neighbours
// along K of 16 output channels, as the VNNI instructions want them, and a product of one row reads one stream. What the
// 128 adds to a group's sums is taken off by starting them at -128 times the sum of the group's activations.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common.h"
#include "kernels.h"
#include "simd.h"
#include "threads.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef int8_t v16c __attribute__((vector_size(16)));

constexpr long kGroup = 32;     // neighbours along K with one activation scale
constexpr long kPanel = 16;     // output channels that are packed together
constexpr long kSteps = kGroup / 4;
constexpr long kAhead = 2048;      // bytes of weights between what is multiplied and what is prefetched
constexpr float kSmallest = 0x1p-100f;  // what is below counts as zero; 127 divided by what is above is finite

// Rows of a register tile: tall ones over one panel read one stream of weights, which is fastest while memory is what
// limits; wide ones over two panels load less for each product.
#if defined(__AVX512F__)
constexpr int kTallRows = 8, kWideRows = 6;
#else
constexpr int kTallRows = 2, kWideRows = 0;
#endif

long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

// sums + the products of 16 x 4 weights (unsigned) with 4 activations (signed bytes), summed by fours. Exact.
RK_INLINE v16i dot(v16i sums, const uint8_t* weights, int32_t activations) {
#if defined(__AVX512VNNI__)
  return (v16i)_mm512_dpbusd_epi32((__m512i)sums, _mm512_loadu_si512(weights), _mm512_set1_epi32(activations));
#elif defined(__AVX2__)
  // Bytes 0 and 2 of each four as 16-bit numbers, then bytes 1 and 3: sums of two products fit 32 bits exactly.
  const __m256i four = _mm256_set1_epi32(activations);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
  __m256i halves[2];
  memcpy(halves, &sums, sizeof halves);
  for (int i = 0; i < 2; i++) {
    const __m256i w = _mm256_loadu_si256((const __m256i*)(weights + 32 * i));
    const __m256i low = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even);
    const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd);
    halves[i] = _mm256_add_epi32(halves[i], _mm256_add_epi32(low, high));
  }
  memcpy(&sums, halves, sizeof halves);
  return sums;
#else
  v16u w;
  memcpy(&w, weights, sizeof w);
  int8_t four[4];
  memcpy(four, &activations, sizeof four);
  for (int i = 0; i < 4; i++) sums += (v16i)((w >> (8 * i)) & 255u) * (int32_t)four[i];
  return sums;
#endif
}

// The nearest integers, ties to even, of numbers within +-127.
RK_INLINE v16i nearest(v16f x) {
#if defined(__AVX512F__)
  return (v16i)_mm512_cvtps_epi32((__m512)x);
#else
  asm("" : "+m"(x));  // the product that made x is rounded by itself, not within the addition
  const v16f magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer in the low bits
  return (v16i)as_bits(x + magic) - 0x4b400000;
#endif
}

RK_INLINE v16f absolute(v16f x) { return from_bits(as_bits(x) & 0x7fffffffu); }

// What numbers are divided by, and multiplied with, when they are quantised. A scale of NaN, with values of 0, stands for
// numbers that are not finite.
struct Scale {
  float scale, inverse;
};

RK_INLINE Scale scale_of(float largest, bool finite) {
  if (!finite) return {NAN, 0.0f};
  if (largest < kSmallest) return {0.0f, 0.0f};
  return {largest / 127.0f, 127.0f / largest};
}

RK_INLINE v16i quantise(v16f x, Scale scale) { return nearest(scale.inverse == 0.0f ? splat(0.0f) : x * scale.inverse); }

RK_INLINE int32_t sum_lanes(v16i v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < 16; i++) total += v[i];
  return total;
#endif
}

// A quantised row of activations: `groups` x 32 values, then the groups' scales, then where their sums begin.
struct Row {
  int8_t* values;
  float* scales;
  int32_t* starts;
};

long row_bytes(long groups) { return round_up(groups * (kGroup + 8), 64); }

RK_INLINE Row row_at(char* scratch, long row, long groups) {
  char* p = scratch + row * row_bytes(groups);
  return {(int8_t*)p, (float*)(p + groups * kGroup), (int32_t*)(p + groups * (kGroup + 4))};
}

template <typename T>
void quantise_activations(const T* x, long K, Row row) {
  for (long g = 0; g * kGroup < K; g++) {
    const long left = K - g * kGroup;
    const v16f a = load_lanes(x + g * kGroup, left);
    const v16f b = left > 16 ? load_lanes(x + g * kGroup + 16, left - 16) : splat(0.0f);
    const v16f largest = vmax(absolute(a), absolute(b));
    const bool finite = !any_lane(~((v16i)(absolute(a) < INFINITY) & (v16i)(absolute(b) < INFINITY)));
    const Scale scale = scale_of(horizontal_max(largest), finite);
    const v16i qa = quantise(a, scale), qb = quantise(b, scale);
    const v16c bytes[2] = {__builtin_convertvector(qa, v16c), __builtin_convertvector(qb, v16c)};
    memcpy(row.values + g * kGroup, bytes, sizeof bytes);
    row.scales[g] = scale.scale;
    row.starts[g] = -128 * sum_lanes(qa + qb);
  }
}

struct Problem {
  char* x;  // quantised rows
  const uint8_t* w;
  const float* w_scales;
  const char* bias;
  char* out;
  long out_stride, N, groups;
  int bias_dtype, out_dtype;
};

RK_INLINE void finish(const Problem& p, long row, long column, v16f sums) {
  const long count = p.N - column;
  sums *= load_lanes(p.w_scales + column, count);
  if (p.bias)
    sums += p.bias_dtype == RK_BFLOAT16 ? load_lanes((const bf16*)p.bias + column, count)
                                        : load_lanes((const float*)p.bias + column, count);
  const long at = row * p.out_stride + column;
  if (p.out_dtype == RK_BFLOAT16)
    store_lanes((bf16*)p.out + at, sums, count);
  else
    store_lanes((float*)p.out + at, sums, count);
}

// Calls `call` with `rows`, from 1 to `MaxRows`, as a compile-time constant.
template <int MaxRows, typename Call>
RK_INLINE void call_with_rows(long rows, Call call) {
  if constexpr (MaxRows > 1)
    if (rows < MaxRows) return call_with_rows<MaxRows - 1>(rows, call);
  call(std::integral_constant<int, MaxRows>{});
}

// One register tile: `Rows` rows of x against `Panels` panels of the weight.
template <int Rows, int Panels>
RK_INLINE void tile(const Problem& p, long row, long panel) {
  const long panel_bytes = p.groups * kGroup * kPanel;
  const uint8_t* w = p.w + panel * panel_bytes;
  Row x[Rows];
  for (int r = 0; r < Rows; r++) x[r] = row_at(p.x, row + r, p.groups);
  v16f totals[Rows * Panels] = {};
  for (long g = 0; g < p.groups; g++) {
    v16i sums[Rows * Panels];
    for (int r = 0; r < Rows; r++)
      for (int i = 0; i < Panels; i++) sums[r * Panels + i] = v16i{} + x[r].starts[g];
    for (long s = 0; s < kSteps; s++, w += 64) {
      if (Rows == 1) __builtin_prefetch(w + kAhead, 0, 3);
      for (int r = 0; r < Rows; r++) {
        int32_t activations;
        memcpy(&activations, x[r].values + (g * kSteps + s) * 4, 4);
        for (int i = 0; i < Panels; i++)
          sums[r * Panels + i] = dot(sums[r * Panels + i], w + i * panel_bytes, activations);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int i = 0; i < Panels; i++)
        totals[r * Panels + i] += __builtin_convertvector(sums[r * Panels + i], v16f) * x[r].scales[g];
  }
  for (int r = 0; r < Rows; r++)
    for (int i = 0; i < Panels; i++) finish(p, row + r, (panel + i) * kPanel, totals[r * Panels + i]);
}

// Rows up to `rows_end` against some panels, in tiles of nearly the same height.
template <int MaxRows, int Panels>
void rows_of_tiles(const Problem& p, long row, long rows_end, long panel) {
  for (long tiles = (rows_end - row + MaxRows - 1) / MaxRows; tiles > 0; tiles--) {
    const long rows = (rows_end - row + tiles - 1) / tiles;
    call_with_rows<MaxRows>(rows, [&](auto count) { tile<decltype(count)::value, Panels>(p, row, panel); });
    row += rows;
  }
}

void block(const Problem& p, long row, long rows_end, long panel, long panels_end) {
  if constexpr (kWideRows > 0)
    if (rows_end - row > kTallRows)
      for (; panel + 2 <= panels_end; panel += 2) rows_of_tiles<kWideRows, 2>(p, row, rows_end, panel);
  for (; panel < panels_end; panel++) rows_of_tiles<kTallRows, 1>(p, row, rows_end, panel);
}

// Work is cut into strips of rows (whose quantised x stays in the second-level cache) and pairs of panels. A thread goes
// through neighbouring panels of a strip.
void multiply(const Problem& p, long T) {
  const long num_panels = (p.N + kPanel - 1) / kPanel, pairs = (num_panels + 1) / 2;
  constexpr long kCache = 192 * 1024, kRows = 24;
  const long strip = std::max(kCache / row_bytes(p.groups) / kRows * kRows, kRows), strips = (T + strip - 1) / strip;
  parallel_ranges(pairs * strips, (double)T * p.N * p.groups * kGroup > 40000.0, [&](Range& range) {
    for (long i, end; range.take(1, &i, &end);) {
      const long row = i / pairs * strip, panel = i % pairs * 2;
      block(p, row, std::min(row + strip, T), panel, std::min(panel + 2, num_panels));
    }
  });
}

// Quantises and packs 16 rows of a weight; rows past `count` are zeros of scale 0, and get no place in `scales`.
template <typename T>
void pack_panel(const T* weight, long stride, long count, long K, uint8_t* values, float* scales) {
  const long depth = round_up(K, kGroup);
  for (long k = 0; k < depth; k += 4)
    if (count < kPanel || k + 4 > K) memset(values + k * kPanel, 128, 4 * kPanel);
  for (long r = 0; r < count; r++) {
    const T* row = weight + r * stride;
    v16f largest = splat(0.0f);
    v16i finite = ~v16i{};
    for (long k = 0; k < K; k += 16) {
      const v16f x = absolute(load_lanes(row + k, K - k));
      finite &= (v16i)(x < INFINITY);
      largest = vmax(largest, x);
    }
    const Scale scale = scale_of(horizontal_max(largest), !any_lane(~finite));
    scales[r] = scale.scale;
    for (long k = 0; k < K; k += 16) {
      const v16i q = quantise(load_lanes(row + k, K - k), scale) + 128;
      const v16c bytes = __builtin_convertvector(q, v16c);
      uint32_t words[4];
      memcpy(words, &bytes, sizeof words);
      for (long i = 0; i < 4 && k + 4 * i < depth; i++) memcpy(values + (k + 4 * i) * kPanel + 4 * r, &words[i], 4);
    }
  }
}

}  // namespace

// x is [T, K], values and w_scales [N] are those of rk_quantize_weight. `scratch` holds the quantised rows: T times K
// rounded up to 32, times 5/4, rounded up to 64 bytes.
extern "C" void rk_linear_int8(const void* x, long x_row_stride, int x_dtype, const void* values, const float* w_scales,
                               const void* bias, int bias_dtype, void* scratch, void* out, long out_row_stride,
                               int out_dtype, long T, long N, long K) {
  const long groups = (K + kGroup - 1) / kGroup;
  with_dtype(x_dtype, [&](auto* p) {
    parallel_for(T, T * K > kParallelElements, [&](long t) {
      quantise_activations((const RK_ELEMENT(p)*)x + t * x_row_stride, K, row_at((char*)scratch, t, groups));
    });
  });
  const Problem problem = {(char*)scratch, (const uint8_t*)values, w_scales, (const char*)bias, (char*)out,
                           out_row_stride, N, groups, bias_dtype, out_dtype};
  multiply(problem, T);
}

// weight is [N, K]; values [N / 16][K / 4][16][4] with N rounded up to 16 and K to 32, scales [N].
extern "C" void rk_quantize_weight(const void* weight, long row_stride, int dtype, void* values, float* scales, long N,
                                   long K) {
  const long panel_bytes = round_up(K, kGroup) * kPanel;
  with_dtype(dtype, [&](auto* p) {
    parallel_for((N + kPanel - 1) / kPanel, N * K > kParallelElements, [&](long panel) {
      const long row = panel * kPanel, count = N - row < kPanel ? N - row : kPanel;
      pack_panel((const RK_ELEMENT(p)*)weight + row * row_stride, row_stride, count, K,
                 (uint8_t*)values + panel * panel_bytes, scales + row);
    });
  });
}

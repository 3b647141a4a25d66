// Low-rank adapters, one for each token: y = a[id] x, and out += scale[id] * b[id] y. Row-invariant: each number is one
// dot product in one fixed order, whatever tokens and adapters stand beside it.
#include <vector>

#include "common.h"
#include "kernels.h"
#include "threads.h"

namespace {

// Sums each of 16 vectors; lane i of the result is the sum of v[i]. Every sum takes the same tree.
RK_INLINE v16f sum_each(const v16f* v) {
  const v16i eights = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const v16i fours = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const v16i twos = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
  const v16i ones = kLaneIndex * 2;
  v16f a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)
    a[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], eights) + __builtin_shuffle(v[2 * i], v[2 * i + 1], eights + 8);
  for (int i = 0; i < 4; i++)
    b[i] = __builtin_shuffle(a[2 * i], a[2 * i + 1], fours) + __builtin_shuffle(a[2 * i], a[2 * i + 1], fours + 4);
  for (int i = 0; i < 2; i++)
    c[i] = __builtin_shuffle(b[2 * i], b[2 * i + 1], twos) + __builtin_shuffle(b[2 * i], b[2 * i + 1], twos + 2);
  return __builtin_shuffle(c[0], c[1], ones) + __builtin_shuffle(c[0], c[1], ones + 1);
}

constexpr long kTile = 16;

// As `load_lanes`, quick for short rows too: ranks below 16 are common.
template <typename T>
RK_INLINE v16f load_short(const T* p, long count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 mask = (__mmask16)(count >= 16 ? 0xffff : (1u << count) - 1);
  if constexpr (sizeof(T) == 4)
    return (v16f)_mm512_maskz_loadu_ps(mask, p);
  else
    return from_bits(__builtin_convertvector((v16h)_mm256_maskz_loadu_epi16(mask, p), v16u) << 16);
#else
  return load_lanes(p, count);
#endif
}

#if defined(__AVX512BF16__)
// As below, on pairs of bfloat16: half the steps, and nothing to widen.
template <int Rows>
RK_INLINE v16f dot_rows(const bf16* vector, const bf16* matrix, long count, long size) {
  const bf16* row[Rows];
  for (int r = 0; r < Rows; r++) row[r] = matrix + (r < count ? r : count - 1) * size;
  __m512 sums[kTile] = {};
  for (long i = 0; i < size; i += 32) {
    const __mmask32 mask = size - i >= 32 ? 0xffffffffu : (1u << (size - i)) - 1;
    const __m512bh lanes = (__m512bh)_mm512_maskz_loadu_epi16(mask, vector + i);
    for (int r = 0; r < Rows; r++)
      sums[r] = _mm512_dpbf16_ps(sums[r], lanes, (__m512bh)_mm512_maskz_loadu_epi16(mask, row[r] + i));
  }
  v16f wide[kTile];
  for (int r = 0; r < kTile; r++) wide[r] = (v16f)sums[r];
  return sum_each(wide);
}
#endif

// Dot products of `vector` with `count` <= Rows rows of `matrix`, rows of `size` elements, in the first `count` lanes.
template <int Rows, typename T>
RK_INLINE v16f dot_rows(const T* vector, const T* matrix, long count, long size) {
  const T* row[Rows];
  for (int r = 0; r < Rows; r++) row[r] = matrix + (r < count ? r : count - 1) * size;
  v16f sums[kTile] = {};
  long i = 0;
  for (; i + 16 <= size; i += 16) {
    const v16f lanes = load(vector + i);
    for (int r = 0; r < Rows; r++) sums[r] += load(row[r] + i) * lanes;
  }
  if (i < size) {
    const v16f lanes = load_short(vector + i, size - i);
    for (int r = 0; r < Rows; r++) sums[r] += load_short(row[r] + i, size - i) * lanes;
  }
  return sum_each(sums);
}

// Lane i of vector j becomes lane j of vector i.
RK_INLINE void transpose(v16f* v) {
  for (int d = 8; d > 0; d /= 2) {
    const v16i upper = (kLaneIndex & d) != 0;  // -1 in the lanes that come from the partner
    const v16i first = kLaneIndex + (upper & (16 - d)), second = first + d;
    for (int i = 0; i < kTile; i++) {
      if (i & d) continue;
      const v16f a = v[i], b = v[i + d];
      v[i] = __builtin_shuffle(a, b, first);
      v[i + d] = __builtin_shuffle(a, b, second);
    }
  }
}

// 16 rows of `rank` elements (those from `count` on are zeros) -> `rank` vectors with a row's element in each lane.
template <typename T>
RK_INLINE void transpose_rows(const T* rows, long count, long rank, v16f* out) {
  for (long r = 0; r < rank; r += 16) {
    v16f v[kTile];
    for (int i = 0; i < kTile; i++) v[i] = i < count ? load_short(rows + i * rank + r, rank - r) : v16f{};
    transpose(v);
    for (long i = 0; i < 16 && r + i < rank; i++) out[r + i] = v[i];
  }
}

// 1 + the index of the first id that is neither -1 nor an adapter, or 0.
long bad_id(const int* ids, long rows, long num_adapters) {
  for (long t = 0; t < rows; t++)
    if (ids[t] < -1 || ids[t] >= num_adapters) return t + 1;
  return 0;
}

template <typename T>
void shrink_rows(const T* x, long x_row, const T* a, const int* ids, float* out, long rows, long rank, long size) {
  parallel_for(rows, rows * rank * size > kParallelElements, [&](long t) {
    for (long r = 0; r < rank; r += kTile) {
      v16f sums = {};
      if (ids[t] >= 0) {
        const T* matrix = a + (ids[t] * rank + r) * size;
        sums = rank - r > 8 ? dot_rows<16>(x + t * x_row, matrix, rank - r, size)
                            : dot_rows<8>(x + t * x_row, matrix, rank - r, size);
      }
      store_lanes(out + t * rank + r, sums, rank - r);
    }
  });
}

// Adds to `Tokens` tokens that follow each other and have one adapter: 16 columns, `turned` as `transpose_rows` makes it.
// Each token's sums are made in the same order whatever `Tokens` is; several at once only hide each other's latency.
template <int Tokens, typename Out>
RK_INLINE void expand_tile(const float* y, long rank, const v16f* turned, float scale, Out* out, long out_row,
                           long columns) {
  v16f sums[Tokens] = {};
  for (long r = 0; r < rank; r++) {
    const v16f weights = turned[r];
    for (int t = 0; t < Tokens; t++) sums[t] += weights * y[t * rank + r];
  }
  for (int t = 0; t < Tokens; t++) {
    Out* target = out + t * out_row;
    store_lanes(target, load_lanes(target, columns) + sums[t] * scale, columns);
  }
}

// A tile of columns is turned once for all tokens in a row that have the same adapter.
template <typename T, typename Out>
void expand_rows(const float* y, const T* b, const int* ids, const float* scales, Out* out, long out_row, long rows,
                 long rank, long columns) {
  constexpr long strip = 64, batch = 64;  // columns and tokens of an item
  const long strips = (columns + strip - 1) / strip, batches = (rows + batch - 1) / batch;
  parallel_items(strips * batches, 1, rows * rank * columns > kParallelElements, [&](Items& items) {
    std::vector<float> memory(rank * 16 + 16);
    v16f* turned = (v16f*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    for (long begin, end; items.take(&begin, &end);)
      for (long item = begin; item < end; item++) {
        const long first = item % strips * strip, token = item / strips * batch;
        for (long n = first; n < columns && n < first + strip; n += kTile) {
          int held = -1;
          const long end = rows < token + batch ? rows : token + batch;
          for (long t = token; t < end;) {
            const int id = ids[t];
            if (id < 0) {
              t++;
              continue;
            }
            if (id != held) transpose_rows(b + (id * columns + n) * rank, columns - n, rank, turned);
            held = id;
            if (t + 4 <= end && ids[t + 1] == id && ids[t + 2] == id && ids[t + 3] == id) {
              expand_tile<4>(y + t * rank, rank, turned, scales[id], out + t * out_row + n, out_row, columns - n);
              t += 4;
            } else {
              expand_tile<1>(y + t * rank, rank, turned, scales[id], out + t * out_row + n, out_row, columns - n);
              t++;
            }
          }
        }
      }
  });
}

}  // namespace

// x [rows, size], a [adapters, rank, size] contiguous -> out [rows, rank]; zeros where the id is -1. Returns 0, or 1 +
// the index of the first id that is no adapter's; nothing is written then.
extern "C" long rk_lora_shrink(const void* x, long x_row, int dtype, const void* a, const int* ids, float* out,
                               long rows, long rank, long size, long num_adapters) {
  const long bad = bad_id(ids, rows, num_adapters);
  if (bad) return bad;
  with_dtype(dtype, [&](auto* p) {
    typedef RK_ELEMENT(p) T;
    shrink_rows((const T*)x, x_row, (const T*)a, ids, out, rows, rank, size);
  });
  return 0;
}

// y [rows, rank], b [adapters, columns, rank], both contiguous; out [rows, columns] is added to. Returns as above.
extern "C" long rk_lora_expand(const float* y, const void* b, int dtype, const int* ids, const float* scales, void* out,
                               long out_row, int out_dtype, long rows, long rank, long columns, long num_adapters) {
  const long bad = bad_id(ids, rows, num_adapters);
  if (bad) return bad;
  with_dtype(dtype, [&](auto* p) {
    with_dtype(out_dtype, [&](auto* o) {
      expand_rows(y, (const RK_ELEMENT(p)*)b, ids, scales, (RK_ELEMENT(o)*)out, out_row, rows, rank, columns);
    });
  });
  return 0;
}

// Low-rank adapters, one for each token: y = a[id] x, and out += scale[id] * b[id] y. Row-invariant: each number is one
// dot product in one fixed order, whatever tokens and adapters stand beside it.
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

constexpr long kTile = 16;  // dot products with one vector at a time

// Dot products of `vector` with `count` rows of `matrix`, rows of `size` elements; lanes from `count` on are zero.
template <typename V, typename M>
RK_INLINE v16f dot_rows(const V* vector, const M* matrix, long count, long size) {
  v16f sums[kTile] = {};
  if (count >= kTile) {
    for (long i = 0; i < size; i += 16) {
      const v16f lanes = load_lanes(vector + i, size - i);
      for (long r = 0; r < kTile; r++) sums[r] += load_lanes(matrix + r * size + i, size - i) * lanes;
    }
  } else {
    for (long r = 0; r < count; r++)
      for (long i = 0; i < size; i += 16)
        sums[r] += load_lanes(matrix + r * size + i, size - i) * load_lanes(vector + i, size - i);
  }
  return sum_each(sums);
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
      const T* matrix = a + (ids[t] * rank + r) * size;
      const v16f sums = ids[t] < 0 ? v16f{} : dot_rows(x + t * x_row, matrix, rank - r, size);
      store_lanes(out + t * rank + r, sums, rank - r);
    }
  });
}

template <typename T, typename Out>
void expand_rows(const float* y, const T* b, const int* ids, const float* scales, Out* out, long out_row, long rows,
                 long rank, long columns) {
  constexpr long strip = 256;  // columns of an item
  const long strips = (columns + strip - 1) / strip;
  parallel_for(rows * strips, rows * rank * columns > kParallelElements, [&](long item) {
    const long t = item / strips, first = item % strips * strip;
    if (ids[t] < 0) return;
    for (long n = first; n < columns && n < first + strip; n += kTile) {
      const v16f sums = dot_rows(y + t * rank, b + (ids[t] * columns + n) * rank, columns - n, rank);
      Out* target = out + t * out_row + n;
      store_lanes(target, load_lanes(target, columns - n) + sums * scales[ids[t]], columns - n);
    }
  });
}

}  // namespace

// x [rows, size], a [adapters, rank, size] contiguous -> out [rows, rank]; zeros where the id is -1. Returns 0, or 1 + the
// index of the first id that is no adapter's; nothing is written then.
extern "C" long rk_lora_shrink(const void* x, long x_row, int dtype, const void* a, const int* ids, float* out, long rows,
                               long rank, long size, long num_adapters) {
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

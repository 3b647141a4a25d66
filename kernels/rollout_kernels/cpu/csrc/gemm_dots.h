// The elements of matrix products, and dot products of several rows and columns at once in vector registers.
//
// The lanes of an accumulator run over K (32 bfloat16 pairs-of-pairs, or 16 floats, a step), one accumulator an
// output, and end in one fixed tree of additions. Register tiles of several rows and columns share loads only, so an
// output has the same bits whatever stands beside it. Weights are read where the checkpoint's layout has them.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
RK_INLINE __m512 add_halves(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }

// Sums each of 16 vectors; lane i of the result is the sum of v[i]. Every sum takes the same tree.
RK_INLINE v16f reduce16(const __m512* v) {
  __m512 quads[4];
  for (int i = 0; i < 4; i++) {
    __m512 a = v[4 * i], b = v[4 * i + 1], c = v[4 * i + 2], d = v[4 * i + 3];
    __m512 ab = add_halves(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = add_halves(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    quads[i] = add_halves(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  }
  __m512 pq = add_halves(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
  __m512 rs = add_halves(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
  return (v16f)add_halves(_mm512_shuffle_f32x4(pq, rs, 0x88), _mm512_shuffle_f32x4(pq, rs, 0xdd));
}
#else
RK_INLINE v16f reduce16(const v16f* v) {
  v16f result;
  for (int i = 0; i < 16; i++) result[i] = horizontal_sum(v[i]);
  return result;
}
#endif

struct Float32 {
  typedef float element;
#if defined(__AVX512F__)
  typedef __m512 accumulator;
#else
  typedef v16f accumulator;
#endif
  typedef v16f vector;
  static constexpr long step = 16;
  static inline __attribute__((always_inline)) vector load_full(const float* p) { return load(p); }
  static inline __attribute__((always_inline)) vector load_tail(const float* p, long count) { return load_partial(p, count); }
  static inline __attribute__((always_inline)) accumulator multiply_add(accumulator acc, vector a, vector b) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps((__m512)a, (__m512)b, acc);
#else
    return acc + a * b;
#endif
  }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  typedef bf16 element;
  typedef __m512 accumulator;
  typedef __m512i vector;
  static constexpr long step = 32;
  static inline __attribute__((always_inline)) vector load_full(const bf16* p) { return _mm512_loadu_si512(p); }
  static inline __attribute__((always_inline)) vector load_tail(const bf16* p, long count) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
  }
  static inline __attribute__((always_inline)) accumulator multiply_add(accumulator acc, vector a, vector b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
};
#else
struct Bfloat16 : Float32 {
  typedef bf16 element;
  static inline __attribute__((always_inline)) vector load_full(const bf16* p) { return load(p); }
  static inline __attribute__((always_inline)) vector load_tail(const bf16* p, long count) { return load_partial(p, count); }
};
#endif

struct Problem {
  const char* x;
  const char* w;
  const char* bias;
  char* out;
  long x_stride, w_stride, out_stride, K;
  int bias_dtype, out_dtype;
};

RK_INLINE float read_scalar(const char* base, int dtype, long i) {
  return dtype == RK_BFLOAT16 ? bf16_to_float(((const bf16*)base)[i]) : ((const float*)base)[i];
}

// Writes a tile's sums, `Columns` neighbours to each of its rows.
template <int Rows, int Columns, typename Element, typename Vector>
RK_INLINE void scatter_rows(Element* out, long stride, Vector sums) {
  Element values[16];
  memcpy(values, &sums, sizeof values);
  for (int r = 0; r < Rows; r++) memcpy(out + r * stride, values + r * Columns, Columns * sizeof(Element));
}

// Adds up each accumulator of a tile, and writes what comes out.
template <int Rows, int Columns, typename Accumulator>
RK_INLINE void write_sums(const Problem& p, long row, long column, const Accumulator* acc) {
  static_assert(Rows * Columns <= 16, "a tile's sums fill one vector");
  Accumulator group[16] = {};
  for (int i = 0; i < Rows * Columns; i++) group[i] = acc[i];
  v16f sums = reduce16(group);
  if (p.bias) {
    float bias[16] = {};
    for (int i = 0; i < Rows * Columns; i++) bias[i] = read_scalar(p.bias, p.bias_dtype, column + i % Columns);
    sums += load(bias);
  }
  const long first = row * p.out_stride + column;
  if (p.out_dtype == RK_BFLOAT16)
    scatter_rows<Rows, Columns>((bf16*)p.out + first, p.out_stride, to_bf16(sums));
  else
    scatter_rows<Rows, Columns>((float*)p.out + first, p.out_stride, sums);
}

// Weights that will be needed soon, in the second-level cache, which can wait for many more lines at a time than the first:
// a tile asks for `lines` of them at each step along K.
struct Prefetch {
  const char* next;
  const char* end;
  int lines;
};

RK_INLINE void prefetch_some(Prefetch& ahead) {
  for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.next + 64 * i, 0, 2);
  ahead.next += 64 * ahead.lines;
}

// Keeps the compiler from loading the value again for every use, which would leave the loads the bottleneck.
template <typename Vector>
RK_INLINE Vector in_register(Vector x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

// One register tile: `Rows` rows of x against `Columns` rows of the weight, side by side along K.
template <typename Type, int Rows, int Columns>
RK_INLINE void tile(const Problem& p, long row, long column, Prefetch& ahead) {
  typedef typename Type::element element;
  const element* x[Rows];
  const element* w[Columns];
  for (int r = 0; r < Rows; r++) x[r] = (const element*)p.x + (row + r) * p.x_stride;
  for (int c = 0; c < Columns; c++) w[c] = (const element*)p.w + (column + c) * p.w_stride;
  typename Type::accumulator acc[Rows * Columns] = {};
  long k = 0;
  for (; k + Type::step <= p.K; k += Type::step) {
    typename Type::vector xs[Rows];
    for (int r = 0; r < Rows; r++) xs[r] = Type::load_full(x[r] + k);
    prefetch_some(ahead);
    for (int c = 0; c < Columns; c++) {
      typename Type::vector ws = in_register(Type::load_full(w[c] + k));
      for (int r = 0; r < Rows; r++) acc[r * Columns + c] = Type::multiply_add(acc[r * Columns + c], xs[r], ws);
    }
  }
  if (k < p.K) {
    typename Type::vector xs[Rows];
    for (int r = 0; r < Rows; r++) xs[r] = Type::load_tail(x[r] + k, p.K - k);
    for (int c = 0; c < Columns; c++) {
      typename Type::vector ws = Type::load_tail(w[c] + k, p.K - k);
      for (int r = 0; r < Rows; r++) acc[r * Columns + c] = Type::multiply_add(acc[r * Columns + c], xs[r], ws);
    }
  }
  write_sums<Rows, Columns>(p, row, column, acc);
}

// As `tile`, one row of the weight after another, which is how memory gives most: for few rows of x, which wait for it.
// `next`: the weights behind those of the tile, or null.
template <typename Type, int Rows, int Columns>
RK_INLINE void tile_in_turn(const Problem& p, long row, long column, const char* next) {
  typedef typename Type::element element;
  typedef typename Type::accumulator accumulator;
  constexpr int ahead = 2;  // rows of the weight between the one at hand and the one that is asked for
  const long stride = p.w_stride * (long)sizeof(element);
  const element* x = (const element*)p.x + row * p.x_stride;
  accumulator acc[Rows * Columns] = {};
#pragma GCC unroll 16
  for (int c = 0; c < Columns; c++) {
    const element* w = (const element*)(p.w + (column + c) * stride);
    const char* soon = (const char*)w;
    if (c + ahead < Columns)
      soon += ahead * stride;
    else if (next)
      soon = next + (c + ahead - Columns) * stride;
    long k = 0;
    for (; k + Type::step <= p.K; k += Type::step) {
      __builtin_prefetch(soon + k * sizeof(element), 0, 2);
      typename Type::vector ws = in_register(Type::load_full(w + k));
      for (int r = 0; r < Rows; r++) {
        accumulator& sum = acc[r * Columns + c];
        sum = Type::multiply_add(sum, Type::load_full(x + r * p.x_stride + k), ws);
      }
    }
    if (k < p.K) {
      typename Type::vector ws = Type::load_tail(w + k, p.K - k);
      for (int r = 0; r < Rows; r++) {
        accumulator& sum = acc[r * Columns + c];
        sum = Type::multiply_add(sum, Type::load_tail(x + r * p.x_stride + k, p.K - k), ws);
      }
    }
  }
  write_sums<Rows, Columns>(p, row, column, acc);
}

template <typename Type, int Columns>
RK_INLINE void rows_of_tiles(const Problem& p, long row, long rows_end, long column, const char* next) {
  // What the next columns need is asked for a little at a time, by the first tiles of this strip.
  const long tiles = (rows_end - row + 3) / 4;
  const int lines = tiles == 1 ? Columns : tiles <= 3 ? (Columns + 1) / 2 : (Columns + 3) / 4;
  Prefetch ahead = {next, next + Columns * p.w_stride * (long)sizeof(typename Type::element), next ? lines : 0};
  for (; row + 4 <= rows_end; row += 4) {
    tile<Type, 4, Columns>(p, row, column, ahead);
    if (ahead.next >= ahead.end) ahead.lines = 0;
  }
  switch (rows_end - row) {
    case 3: tile<Type, 3, Columns>(p, row, column, ahead); break;
    case 2: tile<Type, 2, Columns>(p, row, column, ahead); break;
    case 1: tile<Type, 1, Columns>(p, row, column, ahead); break;
  }
}

// A block of outputs. `next`: the weights that come after it, or null.
template <typename Type>
void columns_of_tiles(const Problem& p, long row, long rows_end, long column, long columns_end, const char* next) {
  constexpr long columns = 4, ahead = 8;  // of a tile; and between those at hand and those that are asked for
  const long stride = p.w_stride * (long)sizeof(typename Type::element);
  for (; column + columns <= columns_end; column += columns) {
    const long beyond = column + ahead + columns - columns_end;
    const char* soon = beyond <= 0 ? p.w + (column + ahead) * stride : next;
    if (beyond > 0 && next) soon += (beyond - columns) * stride;
    rows_of_tiles<Type, columns>(p, row, rows_end, column, soon);
  }
  for (; column < columns_end; column++) rows_of_tiles<Type, 1>(p, row, rows_end, column, nullptr);
}

template <typename Type, int Rows, int Columns>
void columns_in_turn(const Problem& p, long row, long column, long columns_end, const char* next) {
  const long stride = p.w_stride * (long)sizeof(typename Type::element);
  for (; column + Columns <= columns_end; column += Columns) {
    const char* soon = column + Columns < columns_end ? p.w + (column + Columns) * stride : next;
    tile_in_turn<Type, Rows, Columns>(p, row, column, soon);
  }
  for (; column < columns_end; column++) tile_in_turn<Type, Rows, 1>(p, row, column, nullptr);
}

template <typename Type>
void dot_products(const Problem& p, long row, long rows_end, long column, long columns_end, const char* next) {
  switch (rows_end - row) {
    case 1: return columns_in_turn<Type, 1, 16>(p, row, column, columns_end, next);
    case 2: return columns_in_turn<Type, 2, 8>(p, row, column, columns_end, next);
    default: return columns_of_tiles<Type>(p, row, rows_end, column, columns_end, next);
  }
}

}  // namespace

// out = x @ weight^T + bias, row-invariant: each output is one dot product over K in one fixed order.
//
// The lanes of an accumulator run over K (32 bfloat16 pairs-of-pairs, or 16 floats, a step), one accumulator an
// output, and end in one fixed tree of additions. Register tiles of several rows and columns share loads only, so an
// output has the same bits whatever stands beside it. Weights are read where the checkpoint's layout has them.
// Machines with tile registers (`gemm_tiles.h`) add bfloat16 up in an order of their own, for all rows alike.
#include <algorithm>
#include <vector>

#include "activation.h"
#include "gemm_tiles.h"
#include "kernels.h"
#include "rotary.h"
#include "simd.h"
#include "threads.h"

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

// Weights that will be needed soon: a tile asks for `lines` cache lines of them at each step along K. With one or two rows,
// which wait for nothing but memory, they come straight into the first-level cache and are near; otherwise into the second,
// which can wait for many more lines at a time.
template <bool IsNear>
struct Prefetch {
  static constexpr long columns = IsNear ? 4 : 8;  // between what is computed and what is prefetched
  const char* next;
  int lines;
};

template <bool IsNear>
RK_INLINE void prefetch_some(Prefetch<IsNear>& ahead) {
  if (ahead.lines == 0) return;
  for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.next + 64 * i, 0, IsNear ? 3 : 2);
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

// One register tile: `Rows` rows of x against `Columns` rows of the weight.
template <typename Type, int Rows, int Columns, bool IsNear>
RK_INLINE void tile(const Problem& p, long row, long column, Prefetch<IsNear>& ahead) {
  typedef typename Type::element element;
  typedef typename Type::accumulator accumulator;
  const element* x[Rows];
  const element* w[Columns];
  for (int r = 0; r < Rows; r++) x[r] = (const element*)p.x + (row + r) * p.x_stride;
  for (int c = 0; c < Columns; c++) w[c] = (const element*)p.w + (column + c) * p.w_stride;
  accumulator acc[Rows * Columns] = {};
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
  static_assert(Rows * Columns <= 16, "a tile's sums fill one vector");
  accumulator group[16] = {};
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

template <typename Type, int Columns, bool IsNear>
RK_INLINE void rows_of_tiles(const Problem& p, long row, long rows_end, long column, const char* next_columns) {
  // What the next columns need is asked for a little at a time, by the first tiles of this strip.
  const long tiles = (rows_end - row + 3) / 4;
  const int lines = tiles == 1 ? Columns : tiles <= 3 ? (Columns + 1) / 2 : (Columns + 3) / 4;
  const char* end = next_columns + Columns * p.w_stride * (long)sizeof(typename Type::element);
  Prefetch<IsNear> ahead = {next_columns, next_columns ? lines : 0};
  for (; row + 4 <= rows_end; row += 4) {
    tile<Type, 4, Columns>(p, row, column, ahead);
    if (ahead.next >= end) ahead.lines = 0;
  }
  switch (rows_end - row) {
    case 3: tile<Type, 3, Columns>(p, row, column, ahead); break;
    case 2: tile<Type, 2, Columns>(p, row, column, ahead); break;
    case 1: tile<Type, 1, Columns>(p, row, column, ahead); break;
  }
}

template <typename Type, bool IsNear>
void columns_of_tiles(const Problem& p, long row, long rows_end, long column, long columns_end) {
  const long stride = p.w_stride * (long)sizeof(typename Type::element);
  for (; column + 4 <= columns_end; column += 4) {
    const long next = column + Prefetch<IsNear>::columns;
    const char* next_columns = next + 4 <= columns_end ? p.w + next * stride : nullptr;
    rows_of_tiles<Type, 4, IsNear>(p, row, rows_end, column, next_columns);
  }
  for (; column < columns_end; column++) rows_of_tiles<Type, 1, IsNear>(p, row, rows_end, column, nullptr);
}

template <typename Type>
void register_block(const Problem& p, long row, long rows_end, long column, long columns_end) {
  if (rows_end - row <= 2)
    columns_of_tiles<Type, true>(p, row, rows_end, column, columns_end);
  else
    columns_of_tiles<Type, false>(p, row, rows_end, column, columns_end);
}

// What a thread needs for its blocks, beside the problem.
template <typename Type>
struct Scratch {
  void block(const Problem& p, long row, long rows_end, long column, long columns_end) {
    register_block<Type>(p, row, rows_end, column, columns_end);
  }
};

#if defined(RK_TILES)
// The rows of x that were packed last stay for the next block of columns.
template <>
struct Scratch<Bfloat16> {
  void block(const Problem& p, long row, long rows_end, long column, long columns_end) {
    if (!has_tiles()) return register_block<Bfloat16>(p, row, rows_end, column, columns_end);
    static thread_local PackedRows packed;  // some 512 KiB, kept, since fresh memory would cost page faults
    const long steps = (p.K + kTileStep - 1) / kTileStep, stride = p.w_stride * (long)sizeof(bf16);
    if (row != row_ || rows_end != rows_end_) {
      packed.pack((const bf16*)p.x + row * p.x_stride, p.x_stride, rows_end - row, p.K);
      row_ = row;
      rows_end_ = rows_end;
    }
    for (long first = column; first < columns_end; first += 2 * kTileRows) {
      const long columns = std::min(columns_end - first, 2 * kTileRows);
      const char* w = p.w + first * stride;
      long w_stride = stride;
      if (p.K % kTileStep || columns % kTileRows) {
        w = copy_weights(p, first, columns, steps);
        w_stride = steps * kTileStep * (long)sizeof(bf16);
      }
      const bool is_next_there = p.w_stride == p.K && first + 4 * kTileRows <= columns_end;
      Ahead ahead = {p.w + (first + 2 * kTileRows) * stride, is_next_there ? 2 * kTileRows : 0};
      float bias[2 * kTileRows];
      for (long c = 0; p.bias && c < 2 * kTileRows; c++)
        bias[c] = c < columns ? read_scalar(p.bias, p.bias_dtype, first + c) : 0.0f;
      for (long r = row; r < rows_end; r += 2 * kTileRows) {
        const long rows = std::min(rows_end - r, 2 * kTileRows);
        const bf16* x = packed.at((r - row) / kTileRows, 0);
        const long x_stride = steps * kTileValues;
        if (columns > kTileRows && rows > kTileRows)
          add_up_tiles<2, 2>(w, w_stride, x, x_stride, steps, ahead, sums_);
        else if (columns > kTileRows)
          add_up_tiles<2, 1>(w, w_stride, x, x_stride, steps, ahead, sums_);
        else if (rows > kTileRows)
          add_up_tiles<1, 2>(w, w_stride, x, x_stride, steps, ahead, sums_);
        else
          add_up_tiles<1, 1>(w, w_stride, x, x_stride, steps, ahead, sums_);
        ahead.lines = 0;
        for (long t = 0; t * kTileRows < rows; t++) {
          const long count = std::min(rows - t * kTileRows, kTileRows);
          const long place = (r + t * kTileRows) * p.out_stride + first;
          if (p.out_dtype == RK_BFLOAT16)
            write_tile(sums_, t, count, columns, p.bias ? bias : nullptr, (bf16*)p.out + place, p.out_stride);
          else
            write_tile(sums_, t, count, columns, p.bias ? bias : nullptr, (float*)p.out + place, p.out_stride);
        }
      }
    }
  }

 private:
  // Columns and values along K that do not fill a tile, with zeros after them.
  const char* copy_weights(const Problem& p, long first, long columns, long steps) {
    static thread_local std::vector<bf16> copied;
    copied.assign(2 * kTileRows * steps * kTileStep, 0);
    for (long c = 0; c < columns; c++)
      memcpy(copied.data() + c * steps * kTileStep, (const bf16*)p.w + (first + c) * p.w_stride, p.K * sizeof(bf16));
    asm volatile("" ::: "memory");
    return (const char*)copied.data();
  }

  TileRegisters registers_{kProductTiles};
  TileSums sums_;
  long row_ = -1, rows_end_ = -1;
};
#endif

long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

// Rotary embedding of a product's outputs.
struct Rotation {
  const long* positions;
  const float* cos_sin;
  long head_dim, num_columns;  // the first `num_columns` outputs of a row are heads that are rotated
};

// How the outputs are cut: blocks of rows (whose x stays in the second-level cache) and of columns (whose weights stay in
// the second-level cache while all rows pass), a column block a multiple of `unit`.
struct Blocking {
  long rows, columns, num_column_blocks, strips, strip;
  bool tiled;
  Blocking(long T, long N, long row_bytes, long unit, long threads, bool tiled) : tiled(tiled) {
    if (tiled) {
      rows = std::clamp(512 * 1024 / row_bytes / 32 * 32, 32L, 512L);
    } else {
      rows = (96 * 1024 / row_bytes) / 4 * 4;
      rows = rows < 4 ? 4 : rows > 64 ? 64 : rows;
      if (T <= 16) rows = 16;
    }
    const long most = (256 * 1024 / row_bytes) / unit > 1 ? (256 * 1024 / row_bytes) / unit : 1;
    columns = most * unit;
    // Smaller blocks where that lets the threads end together.
    for (long units = most - 1; 2 * units >= most && units > 0; units--)
      if (longest_share(N, units * unit, threads) < longest_share(N, columns, threads)) columns = units * unit;
    num_column_blocks = (N + columns - 1) / columns;
    // Many rows: also split those, in strips of whole row blocks.
    strips = tiled && T > rows ? (T + rows - 1) / rows : 1;
    while (!tiled && threads > 1 && num_column_blocks * strips < threads * 8 && T / (strips * 2) >= rows) strips *= 2;
    strip = tiled ? round_up((T + strips - 1) / strips, 32) : round_up((T + strips - 1) / strips, rows);
    if (tiled) rows = strip;
  }

  // Columns of the thread that has most of them, when the threads take turns.
  static long longest_share(long N, long columns, long threads) {
    const long blocks = (N + columns - 1) / columns;
    return (blocks + threads - 1) / threads * columns;
  }

  // Calls `body(row, rows_end, column, columns_end)` for the blocks of an item, one block of columns in a strip of rows.
  template <typename Body>
  void visit(long item, long T, long N, Body body) const {
    // Rows that are packed for the tiles meet all columns before the next rows are.
    const long j = tiled ? item % num_column_blocks : item / strips, s = tiled ? item / num_column_blocks : item % strips;
    const long end = (s + 1) * strip < T ? (s + 1) * strip : T;
    const long columns_end = (j + 1) * columns < N ? (j + 1) * columns : N;
    for (long r = s * strip; r < end; r += rows) body(r, r + rows < end ? r + rows : end, j * columns, columns_end);
  }
};

// `visit` for every item, with each thread's scratch. Which thread takes which changes no output.
template <typename Type, typename Body>
void for_blocks(const Blocking& blocking, long T, long N, bool worthwhile, Body body) {
  parallel_items(blocking.num_column_blocks * blocking.strips, 1, worthwhile, [&](Items& items) {
    Scratch<Type> scratch;
    for (long item, end; items.take(&item, &end);)
      for (; item < end; item++)
        blocking.visit(item, T, N, [&](long row, long rows_end, long column, long columns_end) {
          body(scratch, row, rows_end, column, columns_end);
        });
  });
}

template <typename Type>
bool is_tiled() {
#if defined(RK_TILES)
  return std::is_same_v<Type, Bfloat16> && has_tiles();
#else
  return false;
#endif
}

bool worthwhile(long T, long N, long K) { return (double)T * N * K >= 20000.0; }

template <typename Type>
void multiply(const Problem& p, long T, long N) {
  const Blocking blocking(T, N, p.K * (long)sizeof(typename Type::element), 16, num_threads(), is_tiled<Type>());
  for_blocks<Type>(blocking, T, N, worthwhile(T, N, p.K),
                   [&](Scratch<Type>& scratch, long row, long rows_end, long column, long columns_end) {
                     scratch.block(p, row, rows_end, column, columns_end);
                   });
}

// The heads are rotated as soon as a block of rows has them, rounded as without this.
template <typename Type>
void multiply_and_rotate(const Problem& p, long T, long N, const Rotation& rotation) {
  typedef typename Type::element element;
  long unit = rotation.head_dim;
  while (unit % 16) unit += rotation.head_dim;
  const Blocking blocking(T, N, p.K * (long)sizeof(element), unit, num_threads(), is_tiled<Type>());
  const auto compute = [&](Scratch<Type>& scratch, long row, long rows_end, long column, long columns_end) {
    scratch.block(p, row, rows_end, column, columns_end);
    const long rotated_end = columns_end < rotation.num_columns ? columns_end : rotation.num_columns;
    if (column >= rotated_end) return;
    for (long t = row; t < rows_end; t++) {
      const float* cosine = rotation.cos_sin + rotation.positions[t] * rotation.head_dim;
      rotate_heads((element*)p.out + t * p.out_stride + column, (rotated_end - column) / rotation.head_dim,
                   rotation.head_dim, cosine, cosine + rotation.head_dim / 2, 1.0f);
    }
  };
  for_blocks<Type>(blocking, T, N, worthwhile(T, N, p.K), compute);
}

// out = silu(x @ gate^T) * (x @ up^T): the weight has I rows of gate, then I rows of up. A thread computes the same columns
// of both into a buffer of its own, rounded as without this.
template <typename Type>
void multiply_and_gate(const Problem& p, long T, long I) {
  typedef typename Type::element element;
  const long row_bytes = p.K * (long)sizeof(element);
  const Blocking blocking(T, I, 2 * row_bytes, 16, num_threads(), is_tiled<Type>());
  const long most = blocking.rows < T ? blocking.rows : T, width = blocking.columns;
  parallel_items(blocking.num_column_blocks * blocking.strips, 1, worthwhile(T, 2 * I, p.K), [&](Items& items) {
    std::vector<element> buffer(2 * most * width);
    Scratch<Type> scratch;
    Problem part = p;
    part.out_stride = width;
    for (long item, end; items.take(&item, &end);)
      for (; item < end; item++)
        blocking.visit(item, T, I, [&](long row, long rows_end, long column, long columns_end) {
          element* gate = buffer.data();
          element* up = gate + most * width;
          // `block` writes to out + row * stride + column, counted from the whole problem's origin.
          part.out = (char*)(gate - row * width - column);
          scratch.block(part, row, rows_end, column, columns_end);
          part.out = (char*)(up - row * width - column - I);
          scratch.block(part, row, rows_end, column + I, columns_end + I);
          for (long t = row; t < rows_end; t++)
            silu_and_mul_row(gate + (t - row) * width, up + (t - row) * width,
                             (element*)p.out + t * p.out_stride + column, columns_end - column);
        });
  });
}

}  // namespace

extern "C" void rk_linear(const void* x, long x_row_stride, int x_dtype, const void* w, long w_row_stride, int w_dtype,
                          const void* bias, void* out, long out_row_stride, int out_dtype, long T, long N, long K) {
  Problem p = {(const char*)x, (const char*)w, (const char*)bias, (char*)out, x_row_stride, w_row_stride,
               out_row_stride, K, w_dtype, out_dtype};
  if (x_dtype == RK_BFLOAT16)
    multiply<Bfloat16>(p, T, N);
  else
    multiply<Float32>(p, T, N);
}

// As rk_linear with outputs of x's dtype, then rk_rotary on the first `rotated_columns` of them, in heads of `head_dim`.
// Returns 0, or 1 + the index of the first position outside the table; nothing is written then.
extern "C" long rk_linear_rotary(const void* x, long x_row_stride, int dtype, const void* w, long w_row_stride,
                                 const void* bias, void* out, long T, long N, long K, const long* positions,
                                 const float* cos_sin, long max_positions, long head_dim, long rotated_columns) {
  for (long t = 0; t < T; t++)
    if (positions[t] < 0 || positions[t] >= max_positions) return t + 1;
  Problem p = {(const char*)x, (const char*)w, (const char*)bias, (char*)out, x_row_stride, w_row_stride, N, K, dtype, dtype};
  const Rotation rotation = {positions, cos_sin, head_dim, rotated_columns};
  if (dtype == RK_BFLOAT16)
    multiply_and_rotate<Bfloat16>(p, T, N, rotation);
  else
    multiply_and_rotate<Float32>(p, T, N, rotation);
  return 0;
}

// As rk_linear with outputs of x's dtype, then rk_silu_and_mul: w has 2 I rows, out is [T, I].
extern "C" void rk_linear_silu_and_mul(const void* x, long x_row_stride, int dtype, const void* w, long w_row_stride,
                                       const void* bias, void* out, long T, long I, long K) {
  Problem p = {(const char*)x, (const char*)w, (const char*)bias, (char*)out, x_row_stride, w_row_stride, I, K, dtype, dtype};
  if (dtype == RK_BFLOAT16)
    multiply_and_gate<Bfloat16>(p, T, I);
  else
    multiply_and_gate<Float32>(p, T, I);
}

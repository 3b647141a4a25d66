// out = x @ weight^T + bias, row-invariant: each output is one dot product over K in one fixed order (`gemm_dots.h`), or, on
// machines with tile registers, in the order of those (`gemm_tiles.h`), for all rows alike.
#include <algorithm>
#include <numeric>
#include <vector>

#include "activation.h"
#include "gemm_dots.h"
#include "gemm_tiles.h"
#include "kernels.h"
#include "rotary.h"
#include "threads.h"

namespace {

constexpr long kColumns = 32;  // neighbouring outputs that a thread takes at a time

// Memory of a thread for outputs that are not yet what is asked for.
template <typename Element>
class OutputBuffer {
 public:
  Element* buffer(long count) {
    if ((long)memory_.size() < count) memory_.resize(count);
    return memory_.data();
  }

 private:
  std::vector<Element> memory_;
};

// Outputs of some rows and columns, from dot products. `next`: the weights that will probably be needed after these, or null.
template <typename Type>
void dot_block(const Problem& p, long row, long rows_end, long column, long columns_end, const char* next) {
  // Rows whose values stay in the cache while all columns pass.
  const long most = std::clamp(96 * 1024 / (p.K * (long)sizeof(typename Type::element)) / 4 * 4, 4L, 64L);
  for (; rows_end - row > most; row += most, next = nullptr)
    dot_products<Type>(p, row, row + most, column, columns_end, next);
  dot_products<Type>(p, row, rows_end, column, columns_end, next);
}

// What a thread needs for its blocks, beside the problem.
template <typename Type>
struct Scratch : OutputBuffer<typename Type::element> {
  void block(const Problem& p, long row, long rows_end, long column, long columns_end, const char* next) {
    dot_block<Type>(p, row, rows_end, column, columns_end, next);
  }
};

#if defined(RK_TILES)
// The rows of x that were packed last stay for the next block of columns.
template <>
struct Scratch<Bfloat16> : OutputBuffer<bf16> {
  void block(const Problem& p, long row, long rows_end, long column, long columns_end, const char* next) {
    if (!has_tiles()) return dot_block<Bfloat16>(p, row, rows_end, column, columns_end, next);
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
      const char* soon = first + 2 * kTileRows < columns_end ? p.w + (first + 2 * kTileRows) * stride : next;
      Ahead ahead = {soon, soon && p.w_stride == p.K ? 2 * kTileRows : 0};
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

// Rotary embedding of a product's outputs.
struct Rotation {
  const long* positions;
  const float* cos_sin;
  long head_dim, num_columns;  // the first `num_columns` outputs of a row are heads that are rotated
};

template <typename Type>
bool is_tiled() {
#if defined(RK_TILES)
  return std::is_same_v<Type, Bfloat16> && has_tiles();
#else
  return false;
#endif
}

// How the outputs are cut: strips of rows, whose x stays in the second-level cache, and units of neighbouring columns. A
// thread goes through neighbouring units of a strip, with all rows of the strip each, so that weights stream once.
struct Blocking {
  long T, N, rows, unit, units;  // of a strip: its rows; columns of a unit, and how many units there are

  Blocking(long T, long N, long row_bytes, long unit, bool tiled) : T(T), N(N), unit(unit) {
    const long most = std::clamp(512 * 1024 / row_bytes / 32 * 32, 32L, 512L);
    const long strips = (T + most - 1) / most, granule = tiled ? 32 : 4;
    rows = strips > 1 ? ((T + strips - 1) / strips + granule - 1) / granule * granule : T;
    units = (N + unit - 1) / unit;
  }

  // Calls `body(row, rows_end, column, columns_end)` for all outputs, with scratch of each thread. Which thread takes which
  // changes no output.
  template <typename Type, typename Body>
  void for_blocks(bool worthwhile, Body body) const {
    const long strips = T ? (T + rows - 1) / rows : 0;
    parallel_ranges(units * strips, worthwhile, [&](Range& range) {
      Scratch<Type> scratch;
      for (long i, end; range.take(1, &i, &end);) {
        const long row = i / units * rows, column = i % units * unit;
        body(scratch, row, std::min(row + rows, T), column, std::min(column + unit, N));
      }
    });
  }
};

bool worthwhile(long T, long N, long K) { return (double)T * N * K >= 20000.0; }

// The weights from `column` on, or null where there are none.
template <typename Type>
const char* weights_at(const Problem& p, long column, long N) {
  return column < N ? p.w + column * p.w_stride * (long)sizeof(typename Type::element) : nullptr;
}

template <typename Type>
void multiply(const Problem& p, long T, long N) {
  const Blocking blocking(T, N, p.K * (long)sizeof(typename Type::element), kColumns, is_tiled<Type>());
  blocking.for_blocks<Type>(
      worthwhile(T, N, p.K), [&](Scratch<Type>& scratch, long row, long rows_end, long column, long columns_end) {
        scratch.block(p, row, rows_end, column, columns_end, weights_at<Type>(p, columns_end, N));
      });
}

// The heads are rotated as soon as a block of rows has them, rounded as without this.
template <typename Type>
void multiply_and_rotate(const Problem& p, long T, long N, const Rotation& rotation) {
  typedef typename Type::element element;
  const long unit = std::lcm(rotation.head_dim, kColumns);
  const Blocking blocking(T, N, p.K * (long)sizeof(element), unit, is_tiled<Type>());
  blocking.for_blocks<Type>(
      worthwhile(T, N, p.K), [&](Scratch<Type>& scratch, long row, long rows_end, long column, long columns_end) {
        scratch.block(p, row, rows_end, column, columns_end, weights_at<Type>(p, columns_end, N));
        const long rotated_end = std::min(columns_end, rotation.num_columns);
        if (column >= rotated_end) return;
        for (long t = row; t < rows_end; t++) {
          const float* cosine = rotation.cos_sin + rotation.positions[t] * rotation.head_dim;
          rotate_heads((element*)p.out + t * p.out_stride + column, (rotated_end - column) / rotation.head_dim,
                       rotation.head_dim, cosine, cosine + rotation.head_dim / 2, 1.0f);
        }
      });
}

// out = silu(x @ gate^T) * (x @ up^T): the weight has I rows of gate, then I rows of up. A thread computes the same columns
// of both into a buffer of its own, rounded as without this.
template <typename Type>
void multiply_and_gate(const Problem& p, long T, long I) {
  typedef typename Type::element element;
  const Blocking blocking(T, I, p.K * (long)sizeof(element), kColumns, is_tiled<Type>());
  blocking.for_blocks<Type>(
      worthwhile(T, 2 * I, p.K), [&](Scratch<Type>& scratch, long row, long rows_end, long column, long columns_end) {
        element* gate = scratch.buffer(2 * (rows_end - row) * kColumns);
        element* up = gate + (rows_end - row) * kColumns;
        Problem part = p;
        part.out_stride = kColumns;
        // `block` writes to out + row * stride + column, counted from the whole problem's origin.
        part.out = (char*)(gate - row * kColumns - column);
        scratch.block(part, row, rows_end, column, columns_end, weights_at<Type>(p, I + column, 2 * I));
        part.out = (char*)(up - row * kColumns - column - I);
        scratch.block(part, row, rows_end, I + column, I + columns_end, weights_at<Type>(p, columns_end, I));
        for (long t = row; t < rows_end; t++)
          silu_and_mul_row(gate + (t - row) * kColumns, up + (t - row) * kColumns,
                           (element*)p.out + t * p.out_stride + column, columns_end - column);
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

// The two products of the attention on the tile registers of Intel's AMX (`tiles.h`), for bfloat16 and heads of a multiple
// of 32 dimensions. Keys and values have the layout of a right operand already (`attention_tiles.h`). Up to 16 rows of
// queries stand in a tile, and what the rows past the last one hold meets no other row.
#pragma once
#include "attention_rows.h"
#include "tiles.h"

#if defined(RK_TILES)
// Tiles 0 to 3 hold sums, 4 queries, 5 keys, 6 probabilities of 16 keys, and 7 their values.
constexpr TileShape kAttentionTiles[8] = {{16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 32}, {8, 64}};

// Some lines of the group that comes next, between two products: few at a time, which the processor can wait for at once.
template <int Lines>
RK_INLINE void prefetch_lines(bool wanted, const bf16* next, long stride) {
  for (int line = 0; wanted && line < Lines; line++) __builtin_prefetch(next + line * stride, 0, 3);
}

// scores[r] = q[r] . keys, for the first `Tiles` tiles of keys; the others are not written.
template <int Tiles>
void score_on_tiles(const Group<Bfloat16>& group, Rows<Bfloat16>& rows, int row, long dim, bool prefetches) {
  const bf16* q = rows.q.data() + row * dim;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long d = 0; d < dim; d += 32) {
    const long place = d * kTile;
    _tile_loadd(4, q + d, dim * sizeof(bf16));
#define RK_KEYS(t)                                                           \
  prefetch_lines<16>(prefetches, group.next_keys[t] + place, 32);            \
  if (t < Tiles) {                                                           \
    _tile_loadd(5, group.keys[t] + place, 64);                               \
    _tile_dpbf16ps(t, 4, 5);                                                 \
  }
    RK_KEYS(0) RK_KEYS(1) RK_KEYS(2) RK_KEYS(3)
#undef RK_KEYS
  }
  float* scores = rows.scores(row);
  constexpr long stride = kGroup * sizeof(float);
  _tile_stored(0, scores, stride);
  if (Tiles > 1) _tile_stored(1, scores + kTile, stride);
  if (Tiles > 2) _tile_stored(2, scores + 2 * kTile, stride);
  if (Tiles > 3) _tile_stored(3, scores + 3 * kTile, stride);
}

static inline void score_rows_on_tiles(const Group<Bfloat16>& group, Rows<Bfloat16>& rows, int first, int end, long dim,
                                       int tiles) {
  asm volatile("" ::: "memory");  // the intrinsics of tiles do not say that they read
  for (int row = first; row < end; row += kTile) switch (tiles) {
      case 4: score_on_tiles<4>(group, rows, row, dim, row == first); break;
      case 3: score_on_tiles<3>(group, rows, row, dim, row == first); break;
      case 2: score_on_tiles<2>(group, rows, row, dim, row == first); break;
      default: score_on_tiles<1>(group, rows, row, dim, row == first);
    }
}

// out[r] += probabilities[r] . values, for `Vectors` vectors of 16 dimensions from `first_dim` on.
template <int Vectors>
void add_on_tiles(const Group<Bfloat16>& group, const bf16* probabilities, float* out, long dim, long first_dim, int tiles,
                  bool prefetches) {
  const long stride = dim * sizeof(float);
  out += first_dim;
  _tile_loadd(0, out, stride);
  _tile_loadd(1, out + kTile, stride);
  if (Vectors == 4) {
    _tile_loadd(2, out + 2 * kTile, stride);
    _tile_loadd(3, out + 3 * kTile, stride);
  }
  for (int t = 0; t < tiles; t++) {
    const bf16* values = group.values[t] + first_dim * 2;
    const bf16* next_values = group.next_values[t] + first_dim * 2;
    _tile_loadd(6, probabilities + t * kTile, kGroup * sizeof(bf16));
#define RK_VALUES(v)                                                         \
  if (v < Vectors) {                                                         \
    prefetch_lines<kTile / 2>(prefetches, next_values + v * 2 * kTile, dim * 2); \
    _tile_loadd(7, values + v * 2 * kTile, stride);                          \
    _tile_dpbf16ps(v, 6, 7);                                                 \
  }
    RK_VALUES(0) RK_VALUES(1) RK_VALUES(2) RK_VALUES(3)
#undef RK_VALUES
  }
  _tile_stored(0, out, stride);
  _tile_stored(1, out + kTile, stride);
  if (Vectors == 4) {
    _tile_stored(2, out + 2 * kTile, stride);
    _tile_stored(3, out + 3 * kTile, stride);
  }
}

// out[r] = out[r] * factor[r] + probabilities[r] . values. `spare`: room for 16 rows of the output.
static inline void add_values_on_tiles(const Group<Bfloat16>& group, Rows<Bfloat16>& rows, int first, int end, long dim,
                                       int tiles, float* spare) {
  for (int row = first; row < end; row += kTile) {
    const int count = end - row < kTile ? end - row : kTile;
    float* own = rows.out.data() + row * dim;
    float* out = count < kTile ? spare : own;
    for (int r = 0; r < count; r++)
      for (long d = 0; d < dim; d += kTile) store(out + r * dim + d, load(own + r * dim + d) * rows.factor[row + r]);
    asm volatile("" ::: "memory");
    long d = 0;
    for (; d + 4 * kTile <= dim; d += 4 * kTile)
      add_on_tiles<4>(group, rows.probabilities(row), out, dim, d, tiles, row == first);
    if (d < dim) add_on_tiles<2>(group, rows.probabilities(row), out, dim, d, tiles, row == first);
    if (out == spare) memcpy(own, spare, count * dim * sizeof(float));
  }
}
#endif

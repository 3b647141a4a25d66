// Products of bfloat16 on the tile registers of Intel's AMX (`tiles.h`).
//
// The left operand is the weight, 16 of its rows as they lie in the checkpoint's layout; the right one x, packed so that
// two neighbours along K of 16 rows stand side by side. A result holds 16 outputs of each of 16 rows of x and is turned
// when it is written. Every output is added up along K in the order of the instruction, whatever stands beside it, and
// also where there is but one row.
#pragma once
#include "tiles.h"

#if defined(RK_TILES)
#include <algorithm>
#include <vector>

constexpr long kTileRows = 16, kTileStep = 32;  // of a tile: its rows, and its values along K
constexpr long kTileValues = kTileRows * kTileStep;
constexpr TileShape kProductTiles[8] = {{16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}};

// The rows and columns of 16 vectors of 16 values of four bytes change places.
RK_INLINE void transpose16(__m512i* v) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    t[c] = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; c++) {
    v[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    v[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    v[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    v[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
}

// Rows of x as the products take them: for each 16 rows and each step along K a tile, zeros where there is nothing.
class PackedRows {
 public:
  void pack(const bf16* x, long stride, long count, long K) {
    steps_ = (K + kTileStep - 1) / kTileStep;
    const long tiles = (count + kTileRows - 1) / kTileRows;
    if ((long)memory_.size() < tiles * steps_ * kTileValues + 32) memory_.resize(tiles * steps_ * kTileValues + 32);
    for (long tile = 0; tile < tiles; tile++)
      for (long step = 0; step < steps_; step++) {
        const long rows = std::min(count - tile * kTileRows, kTileRows), values = std::min(K - step * kTileStep, kTileStep);
        const bf16* source = x + tile * kTileRows * stride + step * kTileStep;
        const __mmask32 mask = values == kTileStep ? ~0u : (1u << values) - 1;
        __m512i v[16] = {};
        for (long r = 0; r < rows; r++) v[r] = _mm512_maskz_loadu_epi16(mask, source + r * stride);
        if (rows == 1)
          spread(v[0], at(tile, step));
        else
          turn(v, at(tile, step));
      }
    asm volatile("" ::: "memory");  // the intrinsics of tiles do not say that they read
  }

  bf16* at(long tile, long step) { return base() + (tile * steps_ + step) * kTileValues; }

 private:
  static void turn(__m512i* v, bf16* target) {
    transpose16(v);
    for (int i = 0; i < 16; i++) _mm512_store_si512(target + i * kTileStep, v[i]);
  }
  // A single row: its pairs become the first column.
  static void spread(__m512i v, bf16* target) {
    alignas(64) uint32_t pairs[16];
    _mm512_store_si512(pairs, v);
    for (int i = 0; i < 16; i++)
      _mm512_store_si512(target + i * kTileStep, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)pairs[i])));
  }
  bf16* base() { return (bf16*)(((uintptr_t)memory_.data() + 63) / 64 * 64); }

  std::vector<bf16> memory_;
  long steps_ = 0;
};

// Sums of up to 2 x 2 tiles: 16 rows of the weight each, and 16 rows of x each.
struct TileSums {
  alignas(64) float values[2][2][kTileRows * kTileRows];  // [tile of the weight][tile of x][output][row]
};

// Weights that will be needed soon, in the second-level cache: some lines of them at each step.
struct Ahead {
  const char* next;
  long lines;
};

// `x`: the tiles of 16 rows, and, `x_stride` values on, those of the next 16. `w_stride` is in bytes.
template <int WTiles, int XTiles>
void add_up_tiles(const char* w, long w_stride, const bf16* x, long x_stride, long steps, Ahead ahead, TileSums& sums) {
  _tile_zero(0);
  if (XTiles == 2) _tile_zero(1);
  if (WTiles == 2) _tile_zero(2);
  if (WTiles == 2 && XTiles == 2) _tile_zero(3);
  for (long s = 0; s < steps; s++) {
    for (long i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.next + 64 * i, 0, 2);
    ahead.next += 64 * ahead.lines;
    _tile_loadd(6, x + s * kTileValues, 64);
    _tile_loadd(4, w + s * kTileStep * sizeof(bf16), w_stride);
    _tile_dpbf16ps(0, 4, 6);
    if (XTiles == 2) {
      _tile_loadd(7, x + x_stride + s * kTileValues, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (WTiles == 2) {
      _tile_loadd(5, w + kTileRows * w_stride + s * kTileStep * sizeof(bf16), w_stride);
      _tile_dpbf16ps(2, 5, 6);
      if (XTiles == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums.values[0][0], 64);
  if (XTiles == 2) _tile_stored(1, sums.values[0][1], 64);
  if (WTiles == 2) _tile_stored(2, sums.values[1][0], 64);
  if (WTiles == 2 && XTiles == 2) _tile_stored(3, sums.values[1][1], 64);
}

// Writes the sums of one tile of x: `rows` rows of up to 32 outputs, with `bias` (null: none) added.
RK_INLINE void write_tile(const TileSums& sums, int x_tile, long rows, long columns, const float* bias, bf16* out,
                          long stride) {
  const __mmask32 mask = columns == 32 ? ~0u : (1u << columns) - 1;
  __m512i pairs[16] = {};
  for (int i = 0; i < (columns + 1) / 2; i++) {
    const float* source = sums.values[i / 8][x_tile] + 2 * (i % 8) * kTileRows;
    v16f first = load(source), second = load(source + kTileRows);
    if (bias) first = first + bias[2 * i], second = second + bias[2 * i + 1];
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)to_bf16(first));
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)to_bf16(second)), 16);
    pairs[i] = _mm512_or_si512(low, high);
  }
  transpose16(pairs);
  for (long r = 0; r < rows; r++) _mm512_mask_storeu_epi16(out + r * stride, mask, pairs[r]);
}

RK_INLINE void write_tile(const TileSums& sums, int x_tile, long rows, long columns, const float* bias, float* out,
                          long stride) {
  for (long first = 0; first < columns; first += kTileRows) {
    const long count = std::min(columns - first, kTileRows);
    __m512i v[16];
    for (int i = 0; i < kTileRows; i++) {
      v16f sum = load(sums.values[first / kTileRows][x_tile] + i * kTileRows);
      if (bias) sum = sum + bias[first + i];
      v[i] = (__m512i)sum;
    }
    transpose16(v);
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    for (long r = 0; r < rows; r++) _mm512_mask_storeu_epi32(out + r * stride + first, mask, v[r]);
  }
}
#endif

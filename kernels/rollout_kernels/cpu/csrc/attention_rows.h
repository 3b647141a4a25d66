// Query rows meet a group of 64 keys: scores, online softmax (Milakov and Gimelshein, 2018), weighted values; each of the
// three for all rows before the next, so that the processor has independent work throughout.
//
// Scores are kept in units of log 2, so that the exponential is a power of two. The row's maximum only rises; a masked key
// has the exact probability zero, and a group in which every key is masked changes nothing: the factor is then exactly 1.
// The order of a row's additions does not depend on the rows beside it, nor on whether the compiler knows `Dim`.
#pragma once
#include "attention_tiles.h"
#include "tiles.h"

constexpr int kRows = 6;        // query rows in registers at once
// Query rows between whose scores and values the group stays in the first-level cache.
#if defined(RK_TILES)
constexpr int kBatchRows = 48;
#else
constexpr int kBatchRows = 24;
#endif
constexpr float kMasked = -__builtin_inff();
constexpr float kNothingSeen = -1e30f;  // finite, so that a difference of two is a number
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// Keeps the compiler from contracting a product with a later addition, which it may do in one variant and not in another.
RK_INLINE v16f rounded(v16f x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// 2^t for t <= 0: exactly 1 at 0, exactly 0 far below, NaN for NaN. Relative error 1e-4 for bfloat16, whose own rounding is
// 20 times that, else 1e-7.
template <typename Type>
RK_INLINE v16f exp2_nonpositive(v16f t) {
#if defined(__AVX512F__)
  t = vmax(splat(-200.0f), t);  // with the constant first, this gives back a NaN
  const v16f n = (v16f)_mm512_roundscale_ps((__m512)t, 8);
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  t = vmax(splat(-127.0f), t);
  const v16f shifted = t + magic;
  const v16f n = shifted - magic;
#endif
  const v16f r = t - n;
  v16f p;
  if (Type::inner == 2) {
    p = splat(5.500893185e-2f);
    p = p * r + 2.422109678e-1f;
    p = p * r + 6.932829279e-1f;
  } else {
    p = splat(1.326472732e-3f);
    p = p * r + 9.671512785e-3f;
    p = p * r + 5.550733744e-2f;
    p = p * r + 2.402224208e-1f;
    p = p * r + 6.931469776e-1f;
  }
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (v16f)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const v16f result = from_bits(as_bits(p) + (as_bits(shifted) << 23));
  return (v16f)((v16i)result & ~(v16i)(t <= -126.0f));
#endif
}

typedef float v4f __attribute__((vector_size(16)));

RK_INLINE v4f load_four(const float* p) {
  v4f v;
  memcpy(&v, p, sizeof v);
  return v;
}

// The largest lane of each of four vectors.
RK_INLINE v4f largest_lanes(const v16f* v) {
#if defined(__AVX512F__)
  auto merge = [](v16f x, v16f y) {  // in each quarter: two lanes of x and y in turn
    return _mm512_max_ps(_mm512_unpacklo_ps((__m512)x, (__m512)y), _mm512_unpackhi_ps((__m512)x, (__m512)y));
  };
  const __m512d a = (__m512d)merge(v[0], v[1]), b = (__m512d)merge(v[2], v[3]);
  const __m512 four = _mm512_max_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  const __m512 half = _mm512_max_ps(four, _mm512_shuffle_f32x4(four, four, 0x4e));
  return (v4f)_mm512_castps512_ps128(_mm512_max_ps(half, _mm512_shuffle_f32x4(half, half, 0xb1)));
#else
  return v4f{horizontal_max(v[0]), horizontal_max(v[1]), horizontal_max(v[2]), horizontal_max(v[3])};
#endif
}

// soft_cap * tanh(x / soft_cap), by exp(-2 |x| / soft_cap).
RK_INLINE v16f cap_softly(v16f x, float soft_cap) {
  const v16f magnitude = (v16f)((v16u)x & 0x7fffffffu);
  const v16f e = exp2_nonpositive<Float32>(rounded(magnitude * (-2.0f * kLog2e / soft_cap)));
  const v16f result = soft_cap * ((1.0f - e) / (1.0f + e));
  return (v16f)((v16u)result | ((v16u)x & 0x80000000u));
}

// What rows have met so far (out = sum of 2^(score - maximum) * value; total in 16 parts), and their passage through the
// group at hand.
template <typename Type>
struct Rows {
  typedef typename Type::element element;
  Buffer<element> q;
  Buffer<float> maximum, total, out;
  Buffer<float> factor;
  Rows(long count, long padded_dim)
      : q((count + kTile) * padded_dim),  // tiles read 16 rows, whatever the last ones are
        maximum(count + kTile),
        total(count * kTile),
        out(count * padded_dim),
        factor(count + kTile),
        scores_((kBatchRows + kTile) * kGroup),
        probabilities_((kBatchRows + kTile) * kGroup) {}

  // Of up to `kBatchRows` rows, the first of which is named here.
  void begin_batch(int first) { first_ = first; }
  float* scores(int row) { return scores_.data() + (row - first_) * kGroup; }
  element* probabilities(int row) { return probabilities_.data() + (row - first_) * kGroup; }

 private:
  Buffer<float> scores_;
  Buffer<element> probabilities_;
  int first_ = 0;
};

// The keys of a group that a row sees.
struct Span {
  int first, end;
};

// scores[r] = q[r] . keys, for `Count` rows from `row` on and the first `Tiles` tiles; the others are not written.
template <typename Type, int Count, int Dim, int Tiles>
RK_INLINE void score_tiles(const Group<Type>& group, Rows<Type>& rows, int row, long padded_dim) {
  const long dim = Dim ? Dim : padded_dim;
  constexpr int inner = Type::inner;
  const typename Type::element* q = rows.q.data() + row * dim;
  float* scores = rows.scores(row);
  v16f acc[Count][Tiles];
  for (int r = 0; r < Count; r++)
    for (int t = 0; t < Tiles; t++) acc[r][t] = v16f{};
  for (long d = 0; d < dim; d += inner) {
    for (int t = 0; t < kGroupTiles; t++) __builtin_prefetch(group.next_keys[t] + d * kTile, 0, 2);
    for (int r = 0; r < Count; r++)
      for (int t = 0; t < Tiles; t++)
        acc[r][t] = Type::multiply_add(acc[r][t], q + r * dim + d, group.keys[t] + d * kTile);
  }
  for (int r = 0; r < Count; r++)
    for (int t = 0; t < Tiles; t++) store(scores + r * kGroup + t * kTile, acc[r][t]);
}

template <typename Type, int Count, int Dim>
void score_rows(const Group<Type>& group, Rows<Type>& rows, int row, long padded_dim, int tiles) {
  switch (tiles) {
    case 4: score_tiles<Type, Count, Dim, 4>(group, rows, row, padded_dim); break;
    case 3: score_tiles<Type, Count, Dim, 3>(group, rows, row, padded_dim); break;
    case 2: score_tiles<Type, Count, Dim, 2>(group, rows, row, padded_dim); break;
    default: score_tiles<Type, Count, Dim, 1>(group, rows, row, padded_dim);
  }
}

// What masks, soft cap and the scales of quantised keys make of a row's scores.
template <typename Type>
void adjust_scores(const Arguments& a, const Group<Type>& group, float* scores, Span span) {
  static const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int t = 0; t < kGroupTiles; t++) {
    const v16i key = lanes + t * kTile;
    v16f s = load(scores + t * kTile);
    if (a.key_scales) s = s * load(group.key_scales + t * kTile);
    if (a.soft_cap > 0) s = cap_softly(s * a.scale, a.soft_cap);
    store(scores + t * kTile, select((v16i)(key >= span.first) & (v16i)(key < span.end), s, splat(kMasked)));
  }
}

// Raises the maximum of the rows from `first` to `end` to what the group's scores reach, and notes by which factor that
// shrinks what they have met before.
template <typename Type>
void raise_maxima(Rows<Type>& rows, int first, int end, float scale) {
  for (int row = first; row < end; row += 4) {
    const int count = end - row < 4 ? end - row : 4;
    v16f largest[4];
    for (int r = 0; r < 4; r++) {
      const float* s = rows.scores(row + (r < count ? r : 0));
      largest[r] = vmax(vmax(load(s), load(s + kTile)), vmax(load(s + 2 * kTile), load(s + 3 * kTile)));
    }
    const v4f old = load_four(rows.maximum.data() + row), maximum = largest_lanes(largest) * scale;
    const v4f raised = maximum > old ? maximum : old;
    const v4f fall = old - raised;
    memcpy(rows.maximum.data() + row, &raised, count * sizeof(float));
    memcpy(rows.factor.data() + row, &fall, count * sizeof(float));
  }
  for (int row = first; row < end; row += kTile) {
    float* factor = rows.factor.data() + row;
    store(factor, exp2_nonpositive<Float32>(load(factor)));
  }
}

// Turns the scores of the rows from `first` to `end` into probabilities, and adds those to the rows' totals.
template <typename Type>
void weigh_scores(const Group<Type>& group, Rows<Type>& rows, int first, int end, float scale, bool quantised) {
  for (int row = first; row < end; row++) {
    const v16f maximum = splat(rows.maximum[row]);
    v16f p[kGroupTiles];
    for (int t = 0; t < kGroupTiles; t++)
      p[t] = exp2_nonpositive<Type>(load(rows.scores(row) + t * kTile) * scale - maximum);
    float* total = rows.total.data() + row * kTile;
    store(total, load(total) * rows.factor[row] + ((p[0] + p[1]) + (p[2] + p[3])));
    for (int t = 0; t < kGroupTiles; t++) {
      if (quantised) p[t] = p[t] * load(group.value_scales + t * kTile);
      store(rows.probabilities(row) + t * kTile, p[t]);
    }
  }
}

// out[r] = out[r] * factor[r] + probabilities[r] . values, for some vectors of the output from `first_dim` on.
template <typename Type, int Count, int Vectors>
RK_INLINE void add_vectors(const Group<Type>& group, Rows<Type>& rows, int row, long dim, long first_dim, int tiles) {
  constexpr int inner = Type::inner;
  const typename Type::element* probabilities = rows.probabilities(row);
  float* out = rows.out.data() + row * dim + first_dim;
  v16f acc[Count][Vectors];
  for (int r = 0; r < Count; r++)
    for (int v = 0; v < Vectors; v++) acc[r][v] = rounded(load(out + r * dim + v * kTile) * rows.factor[row + r]);
  for (int t = 0; t < tiles; t++) {
    const typename Type::element* values = group.values[t] + first_dim * inner;
    const typename Type::element* next_values = group.next_values[t] + first_dim * inner;
    for (int k = 0; k < kTile; k += inner) {
      for (int v = 0; v < Vectors; v++) __builtin_prefetch(next_values + k * dim + v * kTile * inner, 0, 2);
      for (int r = 0; r < Count; r++)
        for (int v = 0; v < Vectors; v++)
          acc[r][v] = Type::multiply_add(acc[r][v], probabilities + r * kGroup + t * kTile + k,
                                         values + k * dim + v * kTile * inner);
    }
  }
  for (int r = 0; r < Count; r++)
    for (int v = 0; v < Vectors; v++) store(out + r * dim + v * kTile, acc[r][v]);
}

template <typename Type, int Count, int Dim>
void add_values(const Group<Type>& group, Rows<Type>& rows, int row, long padded_dim, int tiles) {
  const long dim = Dim ? Dim : padded_dim;
  long d = 0;
  for (; d + 4 * kTile <= dim; d += 4 * kTile) add_vectors<Type, Count, 4>(group, rows, row, dim, d, tiles);
  if (Dim % (4 * kTile) != 0 || Dim == 0)
    for (; d < dim; d += kTile) add_vectors<Type, Count, 1>(group, rows, row, dim, d, tiles);
}

// The two products for blocks of up to six rows, as equal as can be, from `first` to `end`.
template <typename Type, int Dim, bool Values>
void multiply_rows(const Group<Type>& group, Rows<Type>& rows, int first, int end, long padded_dim, int tiles) {
  const int blocks = (end - first + kRows - 1) / kRows;
  for (int b = 0, row = first; b < blocks; b++) {
    const int count = (end - row + blocks - b - 1) / (blocks - b);
#define RK_ROWS(Count)                                                                       \
  case Count:                                                                                \
    Values ? add_values<Type, Count, Dim>(group, rows, row, padded_dim, tiles)               \
           : score_rows<Type, Count, Dim>(group, rows, row, padded_dim, tiles);              \
    break;
    switch (count) { RK_ROWS(6) RK_ROWS(5) RK_ROWS(4) RK_ROWS(3) RK_ROWS(2) RK_ROWS(1) }
#undef RK_ROWS
    row += count;
  }
}

// Causal attention of any mix of prefill chunks and decodes over a paged KV cache.
//
// The cache is made of tiles of 16 keys, laid out for this file: a key tile holds, for each pair of head dimensions,
// the 16 keys side by side, so that the lanes of a score vector are keys; a value tile holds, for each pair of keys, the
// head dimensions side by side, so that the lanes of an output vector are dimensions.
//
// A query meets its keys in groups of 64 that start at fixed absolute positions, with an online softmax (Milakov and
// Gimelshein, 2018). A masked key has the exact probability zero, and a group in which every key is masked changes
// nothing, so that the result of a query depends on its own keys alone: prefill, chunked prefill and decode agree bit
// for bit whatever the block size.
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int kTile = 16;
constexpr int kGroupTiles = 4;
constexpr int kGroup = kTile * kGroupTiles;
constexpr int kRows = 6;          // query rows in registers at once
constexpr int kItemRows = 48;     // query rows that pass over a group of keys while it is in the cache
constexpr float kMasked = -__builtin_inff();

// One pair (bfloat16) or one value (float32) of the inner dimension: what a broadcast takes from the left operand.
struct Bfloat16 {
  typedef bf16 element;
  static constexpr int inner = 2;
#if defined(__AVX512BF16__)
  static inline __attribute__((always_inline)) v16f multiply_add(v16f acc, const bf16* left, const bf16* right) {
    int pair;
    memcpy(&pair, left, 4);
    __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
    __m512bh b = (__m512bh)_mm512_loadu_si512(right);
    return (v16f)_mm512_dpbf16_ps((__m512)acc, a, b);
  }
#else
  static inline __attribute__((always_inline)) v16f multiply_add(v16f acc, const bf16* left, const bf16* right) {
    v16u pairs;
    memcpy(&pairs, right, sizeof pairs);
    acc = acc + bf16_to_float(left[0]) * from_bits(pairs << 16);
    return acc + bf16_to_float(left[1]) * from_bits(pairs & 0xffff0000u);
  }
#endif
};

struct Float32 {
  typedef float element;
  static constexpr int inner = 1;
  static inline __attribute__((always_inline)) v16f multiply_add(v16f acc, const float* left, const float* right) {
    return acc + left[0] * load(right);
  }
};

struct Arguments {
  const char* q;
  long q_row_stride;
  const char* k_cache;
  const char* v_cache;
  const int* block_tables;
  long block_table_stride;
  const int* query_start;
  const int* seq_lens;
  long num_q_heads, num_kv_heads, head_dim, padded_dim, block_size, tiles_per_block;
  float scale;
  char* out;
  float* lse;
};

struct Item {
  int sequence, kv_head, first_query, num_queries;
};

template <typename Type>
struct Scratch {
  typedef typename Type::element element;
  std::vector<element> q, probabilities, key_tiles, value_tiles;
  std::vector<float> scores, out, maximum, total;
  Scratch(long rows, long padded_dim)
      : q(rows * padded_dim),
        probabilities(kRows * kGroup),
        key_tiles(kGroup * padded_dim),
        value_tiles(kGroup * padded_dim),
        scores(kRows * kGroup),
        out(rows * padded_dim),
        maximum(rows),
        total(rows) {}
};

// Pointers to the four key and value tiles of a group. Tiles that lie whole and valid in the cache are used in place;
// the others (odd block sizes, the end of the sequence) are gathered, with zeros past the end, since slots that nobody
// has written may hold anything.
template <typename Type>
void locate_group(const Arguments& a, const int* block_table, int kv_head, long first_key, long num_keys,
                  Scratch<Type>& scratch, const typename Type::element** keys, const typename Type::element** values) {
  typedef typename Type::element element;
  const long tile_elements = kTile * a.padded_dim;
  const bool whole_tiles = a.block_size % kTile == 0;
  constexpr int inner = Type::inner;
  for (int t = 0; t < kGroupTiles; t++) {
    const long start = first_key + t * kTile;
    keys[t] = values[t] = nullptr;
    if (start >= num_keys) continue;
    if (whole_tiles) {
      const long tile = (long)block_table[start / a.block_size] * a.tiles_per_block + start % a.block_size / kTile;
      const long offset = (tile * a.num_kv_heads + kv_head) * tile_elements;
      keys[t] = (const element*)a.k_cache + offset;
      values[t] = (const element*)a.v_cache + offset;
      if (start + kTile <= num_keys) continue;
    }
    element* key_tile = scratch.key_tiles.data() + t * tile_elements;
    element* value_tile = scratch.value_tiles.data() + t * tile_elements;
    memset(key_tile, 0, tile_elements * sizeof(element));
    memset(value_tile, 0, tile_elements * sizeof(element));
    const long end = start + kTile < num_keys ? start + kTile : num_keys;
    for (long position = start; position < end; position++) {
      const long in_block = position % a.block_size;
      const long tile = (long)block_table[position / a.block_size] * a.tiles_per_block + in_block / kTile;
      const long lane = in_block % kTile, target = position - start;
      const element* key_source = (const element*)a.k_cache + (tile * a.num_kv_heads + kv_head) * tile_elements;
      const element* value_source = (const element*)a.v_cache + (tile * a.num_kv_heads + kv_head) * tile_elements;
      for (long d = 0; d < a.padded_dim / inner; d++)
        for (int i = 0; i < inner; i++)
          key_tile[(d * kTile + target) * inner + i] = key_source[(d * kTile + lane) * inner + i];
      for (long d = 0; d < a.padded_dim; d++)
        value_tile[((target / inner) * a.padded_dim + d) * inner + target % inner] =
            value_source[((lane / inner) * a.padded_dim + d) * inner + lane % inner];
    }
    keys[t] = key_tile;
    values[t] = value_tile;
  }
}

// scores[r][key] = scale * q[r] . key, masked past each row's own position.
template <typename Type, int Rows>
RK_INLINE void score_rows(const Arguments& a, const typename Type::element* q, const typename Type::element** keys,
                          const long* visible, float* scores) {
  constexpr int inner = Type::inner;
  static const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  v16f acc[Rows][kGroupTiles] = {};
  long most = 0;
  for (int r = 0; r < Rows; r++) most = visible[r] > most ? visible[r] : most;
  const int tiles = most >= kGroup ? kGroupTiles : (int)((most + kTile - 1) / kTile);
  if (tiles == kGroupTiles) {
    for (long d = 0; d < a.padded_dim; d += inner)
      for (int r = 0; r < Rows; r++)
        for (int t = 0; t < kGroupTiles; t++)
          acc[r][t] = Type::multiply_add(acc[r][t], q + r * a.padded_dim + d, keys[t] + d * kTile);
  } else {
    for (int t = 0; t < tiles; t++)
      for (long d = 0; d < a.padded_dim; d += inner)
        for (int r = 0; r < Rows; r++)
          acc[r][t] = Type::multiply_add(acc[r][t], q + r * a.padded_dim + d, keys[t] + d * kTile);
  }
  long least = kGroup;
  for (int r = 0; r < Rows; r++) least = visible[r] < least ? visible[r] : least;
  if (least >= kGroup) {
    for (int r = 0; r < Rows; r++)
      for (int t = 0; t < kGroupTiles; t++) store(scores + r * kGroup + t * kTile, acc[r][t] * a.scale);
    return;
  }
  for (int r = 0; r < Rows; r++)
    for (int t = 0; t < kGroupTiles; t++) {
      v16i hidden = (v16i)(lanes + t * kTile >= (int)(visible[r] > kGroup ? kGroup : visible[r]));
      store(scores + r * kGroup + t * kTile, select(hidden, splat(kMasked), acc[r][t] * a.scale));
    }
}

// out[r] = out[r] * factor[r] + probabilities[r] . values, four output vectors at a time.
template <typename Type, int Rows, int Vectors>
RK_INLINE void accumulate_rows(const Arguments& a, const typename Type::element* probabilities,
                               const typename Type::element** values, int tiles, long first_dim, const float* factor,
                               float* out) {
  constexpr int inner = Type::inner;
  v16f acc[Rows][Vectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++)
      acc[r][v] = load(out + r * a.padded_dim + first_dim + v * kTile) * factor[r];
  for (int t = 0; t < tiles; t++)
    for (int k = 0; k < kTile; k += inner) {
      const typename Type::element* row = values[t] + k * a.padded_dim + first_dim * inner;
      for (int r = 0; r < Rows; r++)
        for (int v = 0; v < Vectors; v++)
          acc[r][v] = Type::multiply_add(acc[r][v], probabilities + r * kGroup + t * kTile + k, row + v * kTile * inner);
    }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) store(out + r * a.padded_dim + first_dim + v * kTile, acc[r][v]);
}

template <typename Type, int Rows>
void attend_rows(const Arguments& a, Scratch<Type>& scratch, int row, const long* visible,
                 const typename Type::element** keys, const typename Type::element** values) {
  typedef typename Type::element element;
  float* scores = scratch.scores.data();
  element* probabilities = scratch.probabilities.data();
  float* out = scratch.out.data() + row * a.padded_dim;
  score_rows<Type, Rows>(a, scratch.q.data() + row * a.padded_dim, keys, visible, scores);
  float factor[kTile] = {};
  long most = 0;
  for (int r = 0; r < Rows; r++) {
    most = visible[r] > most ? visible[r] : most;
    const float* s = scores + r * kGroup;
    const float group_maximum =
        horizontal_max(vmax(vmax(load(s), load(s + kTile)), vmax(load(s + 2 * kTile), load(s + 3 * kTile))));
    const float old = scratch.maximum[row + r];
    const float maximum = group_maximum > old ? group_maximum : old;
    factor[r] = old - maximum;
    scratch.maximum[row + r] = maximum;
  }
  store(factor, vexp(load(factor)));
  for (int r = 0; r < Rows; r++) {
    v16f sum[kGroupTiles];
    for (int t = 0; t < kGroupTiles; t++) {
      element* target = probabilities + r * kGroup + t * kTile;
      store(target, vexp(load(scores + r * kGroup + t * kTile) - scratch.maximum[row + r]));
      sum[t] = load(target);  // what the product below really uses
    }
    scratch.total[row + r] = scratch.total[row + r] * factor[r] + horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  const int tiles = most >= kGroup ? kGroupTiles : (int)((most + kTile - 1) / kTile);
  long d = 0;
  for (; d + 4 * kTile <= a.padded_dim; d += 4 * kTile)
    accumulate_rows<Type, Rows, 4>(a, probabilities, values, tiles, d, factor, out);
  for (; d < a.padded_dim; d += kTile)
    accumulate_rows<Type, Rows, 1>(a, probabilities, values, tiles, d, factor, out);
}

template <typename Type>
void attend_item(const Arguments& a, const Item& item, Scratch<Type>& scratch) {
  typedef typename Type::element element;
  const long group_size = a.num_q_heads / a.num_kv_heads;
  const long first_token = a.query_start[item.sequence] + item.first_query;
  const long num_keys = a.seq_lens[item.sequence];
  const long num_queries_total = a.query_start[item.sequence + 1] - a.query_start[item.sequence];
  const long first_position = num_keys - num_queries_total + item.first_query;
  const int* block_table = a.block_tables + item.sequence * a.block_table_stride;
  const int rows = (int)(item.num_queries * group_size);

  for (int r = 0; r < rows; r++) {
    const element* source = (const element*)a.q + (first_token + r / group_size) * a.q_row_stride +
                            (item.kv_head * group_size + r % group_size) * a.head_dim;
    element* target = scratch.q.data() + r * a.padded_dim;
    memcpy(target, source, a.head_dim * sizeof(element));
    memset(target + a.head_dim, 0, (a.padded_dim - a.head_dim) * sizeof(element));
    scratch.maximum[r] = kMasked;
    scratch.total[r] = 0.0f;
  }
  memset(scratch.out.data(), 0, rows * a.padded_dim * sizeof(float));

  const element* keys[kGroupTiles];
  const element* values[kGroupTiles];
  const long last_position = first_position + item.num_queries - 1;
  for (long first_key = 0; first_key <= last_position; first_key += kGroup) {
    locate_group<Type>(a, block_table, item.kv_head, first_key, num_keys, scratch, keys, values);
    for (int row = 0; row < rows; row += kRows) {
      const int count = rows - row < kRows ? rows - row : kRows;
      long visible[kRows];
      bool any = false;
      for (int r = 0; r < count; r++) {
        visible[r] = first_position + (row + r) / group_size + 1 - first_key;
        visible[r] = visible[r] < 0 ? 0 : visible[r];
        any = any || visible[r] > 0;
      }
      if (!any) continue;
      switch (count) {
        case 6: attend_rows<Type, 6>(a, scratch, row, visible, keys, values); break;
        case 5: attend_rows<Type, 5>(a, scratch, row, visible, keys, values); break;
        case 4: attend_rows<Type, 4>(a, scratch, row, visible, keys, values); break;
        case 3: attend_rows<Type, 3>(a, scratch, row, visible, keys, values); break;
        case 2: attend_rows<Type, 2>(a, scratch, row, visible, keys, values); break;
        case 1: attend_rows<Type, 1>(a, scratch, row, visible, keys, values); break;
      }
    }
  }

  for (int r = 0; r < rows; r++) {
    const long token = first_token + r / group_size, head = item.kv_head * group_size + r % group_size;
    const float inverse = 1.0f / scratch.total[r];
    const float* source = scratch.out.data() + r * a.padded_dim;
    element* target = (element*)a.out + (token * a.num_q_heads + head) * a.head_dim;
    long d = 0;
    for (; d + kTile <= a.head_dim; d += kTile) store(target + d, load(source + d) * inverse);
    if (d < a.head_dim) store_partial(target + d, load(source + d) * inverse, a.head_dim - d);
    if (a.lse) a.lse[token * a.num_q_heads + head] = scratch.maximum[r] + slog(scratch.total[r]);
  }
}

template <typename Type>
void attend(const Arguments& a, long num_seqs) {
  const long group_size = a.num_q_heads / a.num_kv_heads;
  const int queries_per_item = (int)(kItemRows / group_size > 0 ? kItemRows / group_size : 1);
  std::vector<Item> items;
  // Heads outermost: neighbouring items of one head read the blocks that their sequences share from the cache.
  for (long h = 0; h < a.num_kv_heads; h++)
    for (long s = 0; s < num_seqs; s++) {
      const int queries = a.query_start[s + 1] - a.query_start[s];
      for (int first = 0; first < queries; first += queries_per_item) {
        const int count = queries - first < queries_per_item ? queries - first : queries_per_item;
        items.push_back({(int)s, (int)h, first, count});
      }
    }
  parallel_items((long)items.size(), 1, true, [&](Items& queue) {
    Scratch<Type> scratch(queries_per_item * group_size, a.padded_dim);
    for (long i, end; queue.take(&i, &end);) attend_item<Type>(a, items[i], scratch);
  });
}

}  // namespace

extern "C" void rk_paged_attention(const void* q, long q_row_stride, const void* k_cache, const void* v_cache, int dtype,
                                   const int* block_tables, long block_table_stride, const int* query_start,
                                   const int* seq_lens, long num_seqs, long num_q_heads, long num_kv_heads, long head_dim,
                                   long block_size, float scale, void* out, float* lse) {
  Arguments a = {(const char*)q, q_row_stride, (const char*)k_cache, (const char*)v_cache, block_tables,
                 block_table_stride, query_start, seq_lens, num_q_heads, num_kv_heads, head_dim,
                 (head_dim + kTile - 1) / kTile * kTile, block_size, (block_size + kTile - 1) / kTile, scale, (char*)out, lse};
  if (dtype == RK_BFLOAT16)
    attend<Bfloat16>(a, num_seqs);
  else
    attend<Float32>(a, num_seqs);
}

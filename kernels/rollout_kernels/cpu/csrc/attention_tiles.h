// Keys and values as the attention reads them: groups of 64 keys, made of four tiles of the paged cache.
//
// A key tile holds, for each pair of head dimensions, its 16 keys side by side, so that the lanes of a score vector are
// keys; a value tile holds, for each pair of keys, the head dimensions side by side, so that the lanes of an output
// vector are dimensions. A cache of float32 has single values in place of the pairs. A quantised cache holds int8 in
// pairs, and a scale for each key: integers of this size are exact in bfloat16, and the scales meet the scores and the
// probabilities, so that nothing is rounded on the way.
#pragma once
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "simd.h"

constexpr int kTile = 16;
constexpr int kGroupTiles = 4;
constexpr int kGroup = kTile * kGroupTiles;

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

// Scratch memory that starts with a cache line, so that no vector of it lies in two. Its contents are undefined.
template <typename T>
class Buffer {
 public:
  explicit Buffer(long count) : memory_((T*)aligned_alloc(64, (count * sizeof(T) + 64) / 64 * 64), free) {}
  T* data() { return memory_.get(); }
  T& operator[](long i) { return memory_.get()[i]; }

 private:
  std::unique_ptr<T[], void (*)(void*)> memory_;
};

struct Arguments {
  const char* q;
  long q_row_stride;
  const char* k_cache;
  const char* v_cache;
  const float* key_scales;  // null where the cache is not quantised
  const float* value_scales;
  const int* block_tables;
  long block_table_stride;
  const int* query_start;
  const int* seq_lens;
  const int* last_places;  // null, or of each sequence: the place of its last key in the block table, -1 for its own
  long num_seqs, num_q_heads, num_kv_heads, head_dim, padded_dim, block_size, tiles_per_block;
  float scale;
  long window;     // keys that a query sees at most, its own included
  float soft_cap;  // 0: none
  char* out;
  float* lse;
};

// The tile that holds key `position` of a sequence, counted over the whole cache, one head after the other.
static inline long find_tile(const Arguments& a, int sequence, int kv_head, long position) {
  const int* block_table = a.block_tables + sequence * a.block_table_stride;
  const long block = block_table[position / a.block_size];
  return (block * a.tiles_per_block + position % a.block_size / kTile) * a.num_kv_heads + kv_head;
}

// Whether the last key of a sequence stands elsewhere than in its own place of the block table.
static inline bool has_other_last(const Arguments& a, int sequence) {
  return a.last_places && a.last_places[sequence] >= 0;
}

// The four tiles of a group, in the type that the products take, and what to load into the processor's cache meanwhile.
template <typename Type>
struct Group {
  const typename Type::element *keys[kGroupTiles], *values[kGroupTiles];
  const typename Type::element *next_keys[kGroupTiles], *next_values[kGroupTiles];
  alignas(64) float key_scales[kGroup], value_scales[kGroup];
};

// Memory for tiles that cannot be used where they lie.
template <typename Type, typename Cached>
struct TileBuffers {
  Buffer<Cached> gathered;                  // tiles in the cache's own layout
  Buffer<typename Type::element> unpacked;  // quantised tiles in the layout of the products
  explicit TileBuffers(long padded_dim)
      : gathered(2 * kGroup * padded_dim), unpacked(std::is_same_v<Cached, int8_t> ? 2 * kGroup * padded_dim : 0) {}
};

// The layout of a tile in the cache: how many values of the contracted dimension lie side by side.
template <typename Cached>
constexpr int kCachedInner = sizeof(Cached) <= 2 ? 2 : 1;

// Copies the key at a place of a sequence's block table to lane `target` of a tile.
template <typename Cached>
void gather_key(const Arguments& a, int sequence, int kv_head, long place, long target, Cached* keys, Cached* values,
                float* key_scales, float* value_scales) {
  const long tile_elements = kTile * a.padded_dim;
  constexpr int inner = kCachedInner<Cached>;
  const long tile = find_tile(a, sequence, kv_head, place), lane = place % a.block_size % kTile;
  const Cached* key_source = (const Cached*)a.k_cache + tile * tile_elements;
  const Cached* value_source = (const Cached*)a.v_cache + tile * tile_elements;
  for (long d = 0; d < a.padded_dim / inner; d++)
    for (int i = 0; i < inner; i++)
      keys[(d * kTile + target) * inner + i] = key_source[(d * kTile + lane) * inner + i];
  for (long d = 0; d < a.padded_dim; d++)
    values[((target / inner) * a.padded_dim + d) * inner + target % inner] =
        value_source[((lane / inner) * a.padded_dim + d) * inner + lane % inner];
  if (a.key_scales) {
    key_scales[target] = a.key_scales[tile * kTile + lane];
    value_scales[target] = a.value_scales[tile * kTile + lane];
  }
}

// Copies keys `start` to `end` of a sequence to a tile of its own. Its other keys are zeros, since slots that nobody has
// written may hold anything.
template <typename Cached>
void gather_tile(const Arguments& a, int sequence, int kv_head, long start, long end, Cached* keys, Cached* values,
                 float* key_scales, float* value_scales) {
  const long tile_elements = kTile * a.padded_dim;
  memset(keys, 0, tile_elements * sizeof(Cached));
  memset(values, 0, tile_elements * sizeof(Cached));
  memset(key_scales, 0, kTile * sizeof(float));
  memset(value_scales, 0, kTile * sizeof(float));
  for (long position = start; position < end; position++)
    gather_key(a, sequence, kv_head, position, position - start, keys, values, key_scales, value_scales);
}

// Puts the last key of a sequence, which stands elsewhere, into a copy of the tile that begins at key `start`.
template <typename Cached>
void gather_last(const Arguments& a, int sequence, int kv_head, long start, Cached* keys, Cached* values,
                 float* key_scales, float* value_scales) {
  gather_key(a, sequence, kv_head, a.last_places[sequence], a.seq_lens[sequence] - 1 - start, keys, values, key_scales,
             value_scales);
}

// The first `count` of a tile's 16 keys' values, with zeros after them: a probability of zero does not make a number of
// what nobody has written. Its keys can stay where they lie, since what comes of them is masked.
template <typename Cached>
void copy_values(const Cached* values, long count, long padded_dim, Cached* out) {
  constexpr int inner = kCachedInner<Cached>;
  const long row = padded_dim * inner, whole = count / inner * row;
  memcpy(out, values, whole * sizeof(Cached));
  memset(out + whole, 0, (kTile * padded_dim - whole) * sizeof(Cached));
  if (count % inner)
    for (long d = 0; d < row; d += inner) out[whole + d] = values[whole + d];
}

RK_INLINE v16f load_integers(const int8_t* p) {
#if defined(__AVX512F__)
  return (v16f)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  v16f v;
  for (int i = 0; i < 16; i++) v[i] = p[i];
  return v;
#endif
}

// The integers of a quantised tile, exact, in the layout of the products.
static inline void unpack_tile(const int8_t* keys, const int8_t* values, long padded_dim, bf16* out_keys, bf16* out_values) {
  for (long i = 0; i < kTile * padded_dim; i += kTile) {
    store(out_keys + i, load_integers(keys + i));
    store(out_values + i, load_integers(values + i));
  }
}
static inline void unpack_tile(const int8_t* keys, const int8_t* values, long padded_dim, float* out_keys,
                               float* out_values) {
  for (long d = 0; d < padded_dim; d++)
    for (int key = 0; key < kTile; key++) {
      out_keys[d * kTile + key] = keys[(d / 2 * kTile + key) * 2 + d % 2];
      out_values[key * padded_dim + d] = values[(key / 2 * padded_dim + d) * 2 + key % 2];
    }
}

// Fills in the first tiles of the group at `first_key`. Those that lie whole in the cache are used in place, apart from the
// values of a sequence's last tile; the others (odd block sizes) are gathered. Keys below `first_seen` are seen by no row and not read.
template <typename Type, typename Cached>
void locate_group(const Arguments& a, int sequence, int kv_head, long first_key, long first_seen,
                  int tiles, TileBuffers<Type, Cached>& buffers, Group<Type>& group) {
  typedef typename Type::element element;
  const long tile_elements = kTile * a.padded_dim;
  const long num_keys = a.seq_lens[sequence];
  for (int t = 0; t < tiles; t++) {
    const long start = first_key + t * kTile;
    const long end = start + kTile < num_keys ? start + kTile : num_keys;
    const bool in_place = a.block_size % kTile == 0 && end > first_seen;
    const Cached *keys, *values;
    if (in_place) {
      const long tile = find_tile(a, sequence, kv_head, start);
      keys = (const Cached*)a.k_cache + tile * tile_elements;
      values = (const Cached*)a.v_cache + tile * tile_elements;
      if (a.key_scales) {
        memcpy(group.key_scales + t * kTile, a.key_scales + tile * kTile, kTile * sizeof(float));
        memcpy(group.value_scales + t * kTile, a.value_scales + tile * kTile, kTile * sizeof(float));
        memset(group.value_scales + t * kTile + (end - start), 0, (start + kTile - end) * sizeof(float));
      }
      const bool other_last = end == num_keys && has_other_last(a, sequence);
      if (end < start + kTile || other_last) {
        Cached* copied = buffers.gathered.data() + (2 * t + 1) * tile_elements;
        copy_values(values, end - start, a.padded_dim, copied);
        values = copied;
      }
      if (other_last) {
        Cached* copied = buffers.gathered.data() + 2 * t * tile_elements;
        memcpy(copied, keys, tile_elements * sizeof(Cached));
        keys = copied;
        gather_last(a, sequence, kv_head, start, copied, copied + tile_elements, group.key_scales + t * kTile,
                    group.value_scales + t * kTile);
      }
    } else {
      Cached* gathered = buffers.gathered.data() + 2 * t * tile_elements;
      gather_tile(a, sequence, kv_head, start, end > first_seen ? end : start, gathered, gathered + tile_elements,
                  group.key_scales + t * kTile, group.value_scales + t * kTile);
      if (end == num_keys && has_other_last(a, sequence))
        gather_last(a, sequence, kv_head, start, gathered, gathered + tile_elements, group.key_scales + t * kTile,
                    group.value_scales + t * kTile);
      keys = gathered;
      values = gathered + tile_elements;
    }
    if constexpr (std::is_same_v<Cached, int8_t>) {
      element* unpacked = buffers.unpacked.data() + 2 * t * tile_elements;
      unpack_tile(keys, values, a.padded_dim, unpacked, unpacked + tile_elements);
      group.keys[t] = unpacked;
      group.values[t] = unpacked + tile_elements;
    } else {
      group.keys[t] = keys;
      group.values[t] = values;
    }
  }
  for (int t = 0; t < kGroupTiles; t++) {
    group.next_keys[t] = group.keys[0];
    group.next_values[t] = group.values[0];
  }
}

// Names the tiles of the group that will be read after this one.
template <typename Type, typename Cached>
void announce_group(const Arguments& a, int sequence, int kv_head, long first_key, Group<Type>& group) {
  for (int t = 0; t < kGroupTiles; t++) {
    const long start = first_key + t * kTile;
    if (start >= a.seq_lens[sequence]) break;
    const long offset = find_tile(a, sequence, kv_head, start) * kTile * a.padded_dim;
    const Cached* keys = (const Cached*)a.k_cache + offset;
    const Cached* values = (const Cached*)a.v_cache + offset;
    if constexpr (std::is_same_v<Cached, int8_t>) {
      for (long i = 0; i < kTile * a.padded_dim; i += 64) {
        __builtin_prefetch(keys + i);
        __builtin_prefetch(values + i);
      }
    } else {
      group.next_keys[t] = keys;
      group.next_values[t] = values;
    }
  }
}

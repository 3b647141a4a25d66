// Writing keys and values into the tiled cache, and copying whole blocks within or between caches. Tiles are laid out as
// `attention_tiles.h` describes.
#include <vector>

#include "common.h"
#include "kernels.h"
#include "threads.h"

namespace {

constexpr long kTile = 16;
constexpr float kLargest = 127.0f;  // the largest magnitude of a quantised element

// Where the heads of a token go. Inner is 2 for elements of two bytes or one, else 1: how many values of the contracted
// dimension lie side by side.
template <typename T>
struct Slot {
  static constexpr int inner = sizeof(T) <= 2 ? 2 : 1;
  T *keys, *values;
  long lane, padded_dim;

  Slot(void* k_cache, void* v_cache, long slot, long heads, long head, long padded)
      : keys((T*)k_cache + (slot / kTile * heads + head) * padded * kTile),
        values((T*)v_cache + (slot / kTile * heads + head) * padded * kTile),
        lane(slot % kTile),
        padded_dim(padded) {}

  // Those that lie side by side, from dimension `d`, a multiple of `inner`, on.
  void write_keys(long d, const T* x) const { memcpy(keys + d * kTile + lane * inner, x, inner * sizeof(T)); }
  void write_key(long d, T x) const { keys[((d / inner) * kTile + lane) * inner + d % inner] = x; }
  void write_value(long d, T x) const { values[((lane / inner) * padded_dim + d) * inner + lane % inner] = x; }
};

struct Tokens {
  const void *k, *v;
  long k_row, k_head, v_row, v_head, heads, head_dim;
};

template <typename T>
void write_token(const Tokens& tokens, long t, long slot, void* k_cache, void* v_cache, long padded_dim) {
  for (long h = 0; h < tokens.heads; h++) {
    const T* key = (const T*)tokens.k + t * tokens.k_row + h * tokens.k_head;
    const T* value = (const T*)tokens.v + t * tokens.v_row + h * tokens.v_head;
    const Slot<T> target(k_cache, v_cache, slot, tokens.heads, h, padded_dim);
    constexpr int inner = Slot<T>::inner;
    long d = 0;
    for (; d + inner <= tokens.head_dim; d += inner) {
      target.write_keys(d, key + d);
      for (int i = 0; i < inner; i++) target.write_value(d + i, value[d + i]);
    }
    for (; d < padded_dim; d++) {
      target.write_key(d, d < tokens.head_dim ? key[d] : T{});
      target.write_value(d, d < tokens.head_dim ? value[d] : T{});
    }
  }
}

// Rounds a head's values to multiples of its scale, amax / 127, and returns the scale. NaN or infinity among the values
// makes the scale, and so every value that will be read, NaN or infinite.
template <typename T>
float quantise(const T* x, long head_dim, int8_t* out) {
  v16f largest = {};
  for (long d = 0; d < head_dim; d += 16) {
    const v16f value = load_lanes(x + d, head_dim - d);
    const v16f magnitude = from_bits(as_bits(value) & 0x7fffffffu);
    largest = select((v16i)((magnitude > largest) | (magnitude != magnitude)), magnitude, largest);
  }
  float scale = 0.0f;
  for (int lane = 0; lane < 16; lane++)
    if (!(largest[lane] <= scale)) scale = largest[lane];
  scale /= kLargest;
  const float divisor = scale == 0.0f ? 1.0f : scale;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (long d = 0; d < head_dim; d += 16) {
    v16f steps = load_lanes(x + d, head_dim - d) / divisor;
    steps = vmin(vmax(steps, splat(-kLargest)), splat(kLargest));
    const v16i integers = (v16i)(steps + magic) - 0x4b400000;  // the bits of the magic number
    for (long lane = 0; lane < 16 && d + lane < head_dim; lane++) out[d + lane] = (int8_t)integers[lane];
  }
  return scale;
}

template <typename T>
void write_quantised_token(const Tokens& tokens, long t, long slot, void* k_cache, void* v_cache, float* key_scales,
                           float* value_scales, long padded_dim, int8_t* keys, int8_t* values) {
  for (long h = 0; h < tokens.heads; h++) {
    const long place = (slot / kTile * tokens.heads + h) * kTile + slot % kTile;
    key_scales[place] = quantise((const T*)tokens.k + t * tokens.k_row + h * tokens.k_head, tokens.head_dim, keys);
    value_scales[place] = quantise((const T*)tokens.v + t * tokens.v_row + h * tokens.v_head, tokens.head_dim, values);
    const Slot<int8_t> target(k_cache, v_cache, slot, tokens.heads, h, padded_dim);
    for (long d = 0; d < padded_dim; d++) {
      target.write_key(d, d < tokens.head_dim ? keys[d] : 0);
      target.write_value(d, d < tokens.head_dim ? values[d] : 0);
    }
  }
}

}  // namespace

// `*_row` and `*_head` are strides in elements. `kv_dtype` of the cache: that of the tokens, or int8 with scales
// [tiles, heads, 16]. Returns 0, or 1 + the index of the first slot outside the cache, in which case nothing is written. No
// two tokens may name one slot.
extern "C" long rk_write_kv(const void* k, long k_row, long k_head, const void* v, long v_row, long v_head, int dtype,
                            int kv_dtype, void* k_cache, void* v_cache, float* key_scales, float* value_scales,
                            const long* slots, long num_slots, long num_tokens, long heads, long head_dim) {
  for (long t = 0; t < num_tokens; t++)
    if (slots[t] < 0 || slots[t] >= num_slots) return t + 1;
  const Tokens tokens = {k, v, k_row, k_head, v_row, v_head, heads, head_dim};
  const long padded_dim = (head_dim + kTile - 1) / kTile * kTile;
  const bool worthwhile = num_tokens * heads * head_dim > kParallelElements / 8;  // most of them in a cache line of its own
  with_dtype(dtype, [&](auto* p) {
    typedef RK_ELEMENT(p) T;
    if (kv_dtype != RK_INT8) {
      parallel_for(num_tokens, worthwhile,
                   [&](long t) { write_token<T>(tokens, t, slots[t], k_cache, v_cache, padded_dim); });
      return;
    }
    parallel_items(num_tokens, 16, worthwhile, [&](Items& items) {
      std::vector<int8_t> keys(head_dim), values(head_dim);
      for (long begin, end; items.take(&begin, &end);)
        for (long t = begin; t < end; t++)
          write_quantised_token<T>(tokens, t, slots[t], k_cache, v_cache, key_scales, value_scales, padded_dim,
                                   keys.data(), values.data());
    });
  });
  return 0;
}

// Copies block `pairs[2i]` of each source to block `pairs[2i + 1]` of its destination, in the order of the pairs. A
// block is `block_bytes[c]` bytes of cache c.
extern "C" void rk_copy_blocks(void* const* sources, void* const* destinations, const long* block_bytes, long num_caches,
                               const long* pairs, long num_pairs) {
  parallel_for(num_caches, num_pairs > 1, [&](long c) {
    for (long i = 0; i < num_pairs; i++)
      memmove((char*)destinations[c] + pairs[2 * i + 1] * block_bytes[c],
              (const char*)sources[c] + pairs[2 * i] * block_bytes[c], (size_t)block_bytes[c]);
  });
}

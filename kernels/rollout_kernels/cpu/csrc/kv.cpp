// Writing keys and values into the tiled cache, and copying whole blocks within or between caches. Tiles are laid out as
// `attention.cpp` describes.
#include "common.h"
#include "kernels.h"
#include "threads.h"

namespace {

constexpr long kTile = 16;

// Inner is 2 for bfloat16 and 1 for float32: how many values of the contracted dimension lie side by side.
template <typename T, int Inner>
void write_token(const T* k, const T* v, long head_stride_k, long head_stride_v, T* k_cache, T* v_cache, long slot,
                 long heads, long head_dim, long padded_dim) {
  const long tile = slot / kTile, lane = slot % kTile;
  for (long h = 0; h < heads; h++) {
    T* key = k_cache + (tile * heads + h) * padded_dim * kTile;
    T* value = v_cache + (tile * heads + h) * padded_dim * kTile;
    const T* key_source = k + h * head_stride_k;
    const T* value_source = v + h * head_stride_v;
    for (long d = 0; d < padded_dim; d++) {
      const bool real = d < head_dim;
      key[((d / Inner) * kTile + lane) * Inner + d % Inner] = real ? key_source[d] : T{};
      value[((lane / Inner) * padded_dim + d) * Inner + lane % Inner] = real ? value_source[d] : T{};
    }
  }
}

template <typename T, int Inner>
void write_tokens(const void* k, long k_row, long k_head, const void* v, long v_row, long v_head, void* k_cache,
                  void* v_cache, const long* slots, long tokens, long heads, long head_dim) {
  const long padded_dim = (head_dim + kTile - 1) / kTile * kTile;
  parallel_for(tokens, tokens * heads * head_dim > kParallelElements, [&](long t) {
    write_token<T, Inner>((const T*)k + t * k_row, (const T*)v + t * v_row, k_head, v_head, (T*)k_cache, (T*)v_cache,
                          slots[t], heads, head_dim, padded_dim);
  });
}

}  // namespace

// `*_row` and `*_head` are strides in elements. Returns 0, or 1 + the index of the first slot outside the cache, in which
// case nothing is written. No two tokens may name one slot.
extern "C" long rk_write_kv(const void* k, long k_row, long k_head, const void* v, long v_row, long v_head, int dtype,
                            void* k_cache, void* v_cache, const long* slots, long num_slots, long tokens, long heads,
                            long head_dim) {
  for (long t = 0; t < tokens; t++)
    if (slots[t] < 0 || slots[t] >= num_slots) return t + 1;
  if (dtype == RK_BFLOAT16)
    write_tokens<bf16, 2>(k, k_row, k_head, v, v_row, v_head, k_cache, v_cache, slots, tokens, heads, head_dim);
  else
    write_tokens<float, 1>(k, k_row, k_head, v, v_row, v_head, k_cache, v_cache, slots, tokens, heads, head_dim);
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

// A 64-bit fingerprint of bytes, for telling whether two tensors are the same (not against an adversary).
//
// The bytes are cut into chunks of 64 KiB. In a chunk, 32 lanes each take every 32nd 64-bit word:
//   state = rotate_left(state ^ word, 23) * kLane,  sum += state
// (without the sum, a few bits changed in two neighbouring words could cancel). The states of a chunk are folded in order
// and then the sums, the chunks in order, and last the number of bytes. Missing bytes of the last stripe of 256 bytes
// count as zeros. `reference/fingerprint.py` says the same in numpy.
#include <vector>

#include "simd.h"
#include "threads.h"

namespace {

constexpr long kChunk = 1 << 16, kStripe = 256, kLanes = 32;
constexpr uint64_t kLane = 0xd6e8feb86659fd93ull, kFold = 0xa0761d6478bd642full, kSeed = 0x9e3779b97f4a7c15ull;

typedef uint64_t v8u64 __attribute__((vector_size(64)));

RK_INLINE uint64_t fold(uint64_t h, uint64_t value) {
  h = (h ^ value) * kFold;
  return h ^ (h >> 29);
}

struct Lanes {
  v8u64 state[4], sum[4];
  inline __attribute__((always_inline)) void absorb(const char* p) {
    for (int j = 0; j < 4; j++) {
      v8u64 word;
      memcpy(&word, p + 64 * j, sizeof word);
      word ^= state[j];
      state[j] = ((word << 23) | (word >> 41)) * kLane;
      sum[j] += state[j];
    }
  }
};

uint64_t hash_chunk(const char* data, long size) {
  uint64_t words[2 * kLanes] = {};
  for (long i = 0; i < kLanes; i++) words[i] = kSeed * (uint64_t)(i + 1);
  Lanes lanes;
  memcpy(&lanes, words, sizeof words);
  long i = 0;
  for (; i + kStripe <= size; i += kStripe) lanes.absorb(data + i);
  if (i < size) {
    char last[kStripe] = {};
    memcpy(last, data + i, (size_t)(size - i));
    lanes.absorb(last);
  }
  memcpy(words, &lanes, sizeof words);
  uint64_t h = kSeed;
  for (const uint64_t word : words) h = fold(h, word);
  return h;
}

// Copies bytes [first, first + size) of the rows laid end to end.
void gather(const char* data, long row_bytes, long row_stride, long first, long size, char* out) {
  long row = first / row_bytes, offset = first % row_bytes;
  while (size > 0) {
    const long count = row_bytes - offset < size ? row_bytes - offset : size;
    memcpy(out, data + row * row_stride + offset, (size_t)count);
    out += count;
    size -= count;
    row++;
    offset = 0;
  }
}

}  // namespace

// Rows of `row_bytes` bytes, `row_stride` bytes apart; the result depends on the rows' bytes laid end to end alone.
extern "C" uint64_t rk_fingerprint(const void* data, long rows, long row_bytes, long row_stride) {
  const long total = rows * row_bytes, chunks = (total + kChunk - 1) / kChunk;
  const bool contiguous = rows <= 1 || row_stride == row_bytes;
  std::vector<uint64_t> hashes((size_t)chunks);
  // Below 4 MiB waking threads costs more than it saves.
  parallel_items(chunks, 16, chunks >= 64, [&](Items& items) {
    std::vector<char> buffer(contiguous ? 0 : kChunk);
    for (long begin, end; items.take(&begin, &end);)
      for (long c = begin; c < end; c++) {
        const long first = c * kChunk, size = total - first < kChunk ? total - first : kChunk;
        const char* source = (const char*)data + first;
        if (!contiguous) {
          gather((const char*)data, row_bytes, row_stride, first, size, buffer.data());
          source = buffer.data();
        }
        hashes[c] = hash_chunk(source, size);
      }
  });
  uint64_t h = kSeed;
  for (long c = 0; c < chunks; c++) h = fold(h, hashes[c]);
  h = fold(h, (uint64_t)total);
  return h ^ (h >> 32);
}

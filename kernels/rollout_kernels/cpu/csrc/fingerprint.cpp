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

// The hash of a chunk while its stripes come.
struct ChunkHash {
  v8u64 state[4], sum[4];

  ChunkHash() {
    uint64_t words[kLanes];
    for (long i = 0; i < kLanes; i++) words[i] = kSeed * (uint64_t)(i + 1);
    memcpy(state, words, sizeof state);
    memset(sum, 0, sizeof sum);
  }
  inline __attribute__((always_inline)) void absorb(const char* stripe) {
    for (int j = 0; j < 4; j++) {
      v8u64 word;
      memcpy(&word, stripe + 64 * j, sizeof word);
      word ^= state[j];
      state[j] = ((word << 23) | (word >> 41)) * kLane;
      sum[j] += state[j];
    }
  }
  uint64_t value() const {
    uint64_t h = kSeed;
    for (const v8u64* lanes : {state, sum}) {
      uint64_t words[kLanes];
      memcpy(words, lanes, sizeof words);
      for (const uint64_t word : words) h = fold(h, word);
    }
    return h;
  }
};

uint64_t hash_chunk(const char* data, long size) {
  ChunkHash hash;
  long i = 0;
  for (; i + kStripe <= size; i += kStripe) hash.absorb(data + i);
  if (i < size) {
    char last[kStripe] = {};
    memcpy(last, data + i, (size_t)(size - i));
    hash.absorb(last);
  }
  return hash.value();
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

// The bytes of the chunks' hashes folded in order, then their number.
uint64_t fold_chunks(const std::vector<uint64_t>& hashes, long total) {
  uint64_t h = kSeed;
  for (const uint64_t hash : hashes) h = fold(h, hash);
  h = fold(h, (uint64_t)total);
  return h ^ (h >> 32);
}

// Weights may be below 2^-126, and what torch makes of them must come out.
RK_INLINE void put(float* p, v16f v) { store(p, v); }
RK_INLINE void put(bf16* p, v16f v) {
  const v16h h = to_bf16_exactly(v);
  memcpy(p, &h, sizeof h);
}

// `size` bytes of the converted elements, up to one stripe; the rest of `stripe` becomes zeros.
template <class To, class From>
struct Convert {
  const From* from;
  inline __attribute__((always_inline)) void operator()(long first, long size, char* stripe) const {
    const From* in = from + first / (long)sizeof(To);
    const long count = size / (long)sizeof(To);
    To* out = (To*)stripe;
    if (size == kStripe) {
      for (long i = 0; i < kStripe / (long)sizeof(To); i += 16) put(out + i, load(in + i));
      return;
    }
    memset(stripe, 0, kStripe);
    for (long i = 0; i < count; i += 16) put(out + i, load_partial(in + i, count - i < 16 ? count - i : 16));
  }
};

struct Bytes {
  const char* from;
  inline __attribute__((always_inline)) void operator()(long first, long size, char* stripe) const {
    if (size < kStripe) memset(stripe, 0, kStripe);
    memcpy(stripe, from + first, (size_t)size);
  }
};

// A stripe to memory that nobody reads soon: lines that are written whole need not be read first.
RK_INLINE void write_past_cache(char* to, const char* stripe) {
#if defined(__AVX512F__)
  for (int i = 0; i < kStripe; i += 64) _mm512_stream_si512((__m512i*)(to + i), _mm512_loadu_si512(stripe + i));
#elif defined(__AVX__)
  for (int i = 0; i < kStripe; i += 32)
    _mm256_stream_si256((__m256i*)(to + i), _mm256_loadu_si256((const __m256i*)(stripe + i)));
#else
  memcpy(to, stripe, kStripe);
#endif
}

// Bytes [first, first + size) of the destination; returns the hash of what `read` gives, not of what lies there afterwards:
// a copy that goes wrong shows when the destination is read again.
template <class Read>
uint64_t copy_chunk(char* to, long first, long size, const Read& read) {
  ChunkHash hash;
  alignas(64) char stripe[kStripe];
  const bool aligned = (uintptr_t)(to + first) % 64 == 0;
  for (long i = 0; i < size; i += kStripe) {
    const long bytes = size - i < kStripe ? size - i : kStripe;
    read(first + i, bytes, stripe);
    hash.absorb(stripe);
    if (aligned && bytes == kStripe)
      write_past_cache(to + first + i, stripe);
    else
      memcpy(to + first + i, stripe, (size_t)bytes);
  }
#if defined(__AVX__)
  _mm_sfence();
#endif
  return hash.value();
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
  return fold_chunks(hashes, total);
}

// Copies `count` elements, converting them, and returns the fingerprint of the copy, hashed while it is in cache.
// dtypes: 0 float32, 1 bfloat16; of the same type, any elements of `size` bytes.
extern "C" uint64_t rk_copy_and_fingerprint(void* to, int to_dtype, const void* from, int from_dtype, long count, long size) {
  const long total = count * size, chunks = (total + kChunk - 1) / kChunk;
  std::vector<uint64_t> hashes((size_t)chunks);
  parallel_items(chunks, 16, chunks >= 64, [&](Items& items) {
    for (long begin, end; items.take(&begin, &end);)
      for (long c = begin; c < end; c++) {
        const long first = c * kChunk, bytes = total - first < kChunk ? total - first : kChunk;
        if (to_dtype == from_dtype)
          hashes[c] = copy_chunk((char*)to, first, bytes, Bytes{(const char*)from});
        else if (to_dtype == 1)
          hashes[c] = copy_chunk((char*)to, first, bytes, Convert<bf16, float>{(const float*)from});
        else
          hashes[c] = copy_chunk((char*)to, first, bytes, Convert<float, bf16>{(const bf16*)from});
      }
  });
  return fold_chunks(hashes, total);
}

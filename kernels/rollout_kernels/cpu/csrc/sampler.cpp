// Draws one token from each row of logits, with every array of numbers that belongs to the draw.
//
// The draw is an exponential race: argmax of e_i / E_i with E_i = -log(1 - u_i), u_i from noise that is a pure function
// of (seed, sample index, position, id). Since E_i >= u_i, a token with e_i < u_i * best cannot win, and the logarithm is
// needed for a few tokens of a row only.
#include "filters.h"
#include "noise.h"
#include "softmax_row.h"
#include "threads.h"

namespace {

enum Status : uint8_t { kOk = 0, kNotNumbers = 1, kNothingLeft = 2 };

// Mirrors the C structure in `ops.py`.
struct SampleArguments {
  const float* logits;
  long row_stride, vocab_size, num_draws, num_rows;
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const long* seed;
  const long* sample_index;
  const long* position;
  const long* row_index;    // nullable: draw r uses row r
  const int* banned_start;  // nullable, [num_draws + 1]
  const int* banned_ids;
  long* token_ids;
  float* raw_logprobs;
  float* sampled_logprobs;
  float* kept_mass;
  float* entropy;
  uint8_t* status;
};

// The winner of the race among `count` tokens. `exponentials` has zeros up to a multiple of 16; `ids` ascend (null: 0,
// 1, 2, ...), with readable memory up to `count` only.
long race(const float* exponentials, const int* ids, long count, NoiseKey key) {
  const float margin = 1.0f - 0x1p-20f;  // keeps the test below on the safe side of its rounding
  double best = 0.0;
  float bound = 1e-30f * margin;
  long winner = -1;
  for (long i = 0; i < count; i += 16) {
    v16u id = (v16u)(kLaneIndex + (int)i);
    if (ids) {
      id = v16u{};
      memcpy(&id, ids + i, (size_t)std::min(16L, count - i) * sizeof(int));
    }
    const v16f e = load(exponentials + i);
    const v16u bits = noise_bits(id, key);
    const v16f u = __builtin_convertvector(bits, v16f) * (0x1p-32f * margin);
    const v16i candidates = (v16i)(e >= u * bound);
    if (__builtin_expect(!any_lane(candidates), 1)) continue;
    for (uint32_t mask = lane_bits(candidates); mask; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      if (!(e[lane] > 0.0f)) continue;
      const double score = (double)e[lane] / -log1p(-((double)bits[lane] + 0.5) * 0x1p-32);
      if (score > best) {
        best = score;
        bound = (float)score * margin;
        winner = id[lane];
      }
    }
  }
  return winner;
}

long first_equal(const float* x, long size, float value) {
  long i = 0;
  for (; i + 16 <= size; i += 16)
    if (const uint32_t bits = lane_bits((v16i)(load(x + i) == value))) return i + __builtin_ctz(bits);
  while (x[i] != value) i++;
  return i;
}

struct Drawn {
  long token_id = -1;
  float raw_logprob = __builtin_nanf(""), sampled_logprob = __builtin_nanf("");
  float kept_mass = __builtin_nanf(""), entropy = __builtin_nanf("");
  Status status = kOk;
};

Drawn draw_row(const SampleArguments& a, long draw, Scratch& scratch) {
  const long size = a.vocab_size;
  const float* raw = a.logits + (a.row_index ? a.row_index[draw] : draw) * a.row_stride;
  const float temperature = a.temperature[draw];
  Drawn result;
  float raw_maximum;
  if (!row_maximum(raw, size, &raw_maximum)) {
    result.status = std::all_of(raw, raw + size, [](float v) { return v == -kInfinity; }) ? kNothingLeft : kNotNumbers;
    return result;
  }
  const float* x = raw;  // the logits that are sampled from
  float maximum = raw_maximum;
  const bool banned = a.banned_start && a.banned_start[draw + 1] > a.banned_start[draw];
  if (banned) {
    memcpy(scratch.masked.data(), raw, size * sizeof(float));
    for (int i = a.banned_start[draw]; i < a.banned_start[draw + 1]; i++) scratch.masked[a.banned_ids[i]] = -kInfinity;
    x = scratch.masked.data();
    if (!row_maximum(x, size, &maximum)) {
      result.status = kNothingLeft;
      return result;
    }
  }
  if (temperature == 0.0f) {
    const RowSums sums = row_sums(raw, size, raw_maximum, 1.0f, nullptr);
    result.token_id = first_equal(x, size, maximum);
    result.raw_logprob = row_logprob(raw[result.token_id], raw_maximum, 1.0f, sums.total);
    result.sampled_logprob = 0.0f;
    result.kept_mass = expf(result.raw_logprob);
    result.entropy = row_entropy(sums);
    return result;
  }
  const float inverse = inverse_temperature(temperature);
  float* exponentials = scratch.exponentials.data();
  const RowSums tempered = row_sums(raw, size, raw_maximum, inverse, banned ? nullptr : exponentials);
  const double raw_total = inverse == 1.0f ? tempered.total : row_sums(raw, size, raw_maximum, 1.0f, nullptr).total;
  double kept_total = tempered.total;
  if (banned) kept_total = row_sums(x, size, maximum, inverse, exponentials).total;

  const Filters filters = {a.top_k[draw] > 0 && a.top_k[draw] < size ? a.top_k[draw] : 0L, a.top_p[draw], a.min_p[draw]};
  const NoiseKey key = noise_key(a.seed[draw], a.sample_index[draw], a.position[draw]);
  bool whole = !banned;
  if (filters.any()) {
    const long count = apply_filters(x, size, kept_total, filters, scratch);
    float* weights = scratch.weights.data();
    for (long i = count; i % 16; i++) weights[i] = 0.0f;
    result.token_id = race(weights, scratch.ids.data(), count, key);
    if (count < size) {
      whole = false;
      kept_total = 0.0;
      for (long i = 0; i < count; i++) kept_total += weights[i];
    }
  } else {
    result.token_id = race(exponentials, nullptr, size, key);
  }
  result.raw_logprob = row_logprob(raw[result.token_id], raw_maximum, 1.0f, raw_total);
  result.sampled_logprob = row_logprob(x[result.token_id], maximum, inverse, kept_total);
  const double shift = exp((double)((maximum - raw_maximum) * inverse));
  result.kept_mass = whole ? 1.0f : (float)std::min(1.0, shift * kept_total / tempered.total);
  result.entropy = row_entropy(tempered);
  return result;
}

// 0, or the number of the first argument of draw r that is out of range, in the order of `sample`'s arguments.
int check_draw(const SampleArguments& a, long r) {
  if (!(a.temperature[r] >= 0.0f && a.temperature[r] < kInfinity)) return 1;
  if (a.top_k[r] < -1) return 2;
  if (!(a.top_p[r] > 0.0f && a.top_p[r] <= 1.0f)) return 3;
  if (!(a.min_p[r] >= 0.0f && a.min_p[r] <= 1.0f)) return 4;
  const long row = a.row_index ? a.row_index[r] : r;
  if (row < 0 || row >= a.num_rows) return 5;
  if (!a.banned_start) return 0;
  if (a.banned_start[r] < 0 || a.banned_start[r + 1] < a.banned_start[r]) return 6;
  for (int i = a.banned_start[r]; i < a.banned_start[r + 1]; i++)
    if (a.banned_ids[i] < 0 || a.banned_ids[i] >= a.vocab_size) return 6;
  return 0;
}

}  // namespace

// Returns 0, or 8 * (draw + 1) + the number of the argument that is out of range there; nothing is drawn then.
extern "C" long rk_sample(const SampleArguments* arguments) {
  const SampleArguments& a = *arguments;
  for (long r = 0; r < a.num_draws; r++)
    if (const int problem = check_draw(a, r)) return 8 * (r + 1) + problem;
  parallel_items(a.num_draws, 1, true, [&](Items& items) {
    Scratch scratch(a.vocab_size);
    for (long r, end; items.take(&r, &end);) {
      const Drawn drawn = draw_row(a, r, scratch);
      a.token_ids[r] = drawn.token_id;
      a.raw_logprobs[r] = drawn.raw_logprob;
      a.sampled_logprobs[r] = drawn.sampled_logprob;
      a.kept_mass[r] = drawn.kept_mass;
      a.entropy[r] = drawn.entropy;
      a.status[r] = drawn.status;
    }
  });
  return 0;
}

// The noise itself, for tests and for tools that replay draws.
extern "C" void rk_noise_bits(long seed, long sample_index, long position, const long* token_ids, long* bits, long count) {
  const NoiseKey key = noise_key(seed, sample_index, position);
  for (long i = 0; i < count; i++) bits[i] = noise_bits((uint32_t)token_ids[i], key);
}

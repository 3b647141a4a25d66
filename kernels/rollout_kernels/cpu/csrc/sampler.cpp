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
  const float* adjusted;  // nullable, [num_adjusted, vocab_size]
  long adjusted_stride, num_adjusted;
  const long* adjusted_index;  // -1: the draw's row of the logits
  const int* allowed;          // nullable, [num_allowed, words]: a bit for each token
  long allowed_stride, num_allowed;
  const long* allowed_index;  // -1: everything
  const long* forced;         // nullable; -1: draw
  long* token_ids;
  float* raw_logprobs;
  float* sampled_logprobs;
  float* kept_mass;
  float* entropy;
  uint8_t* status;
  int* num_kept;
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

// How many logits are above -inf.
long count_finite(const float* x, long size) {
  v16i count = {};
  long i = 0;
  for (; i + 16 <= size; i += 16) count -= (v16i)(load(x + i) > -kInfinity);
  long total = 0;
  for (int lane = 0; lane < 16; lane++) total += count[lane];
  for (; i < size; i++) total += x[i] > -kInfinity;
  return total;
}

// Writes x to `masked`, with -inf where the bit of a token is not set. Returns how many logits above -inf are left.
long apply_mask(const float* x, const uint32_t* words, long size, float* masked, float* maximum) {
  const v16f nothing = splat(-kInfinity);
  v16f best = nothing;
  v16i count = {};
  for (long i = 0; i < size; i += 16) {
    const uint32_t bits = words[i / 32] >> (i % 32) & 0xffffu;
    const v16i may = (v16i)((v16u{} + bits) >> (v16u)kLaneIndex & 1u) != 0;
    const long rest = size - i;
    const v16f v = select(may & (v16i)(kLaneIndex < (int)std::min(16L, rest)), load_lanes(x + i, rest), nothing);
    store_lanes(masked + i, v, rest);
    best = vmax(v, best);
    count -= (v16i)(v > -kInfinity);
  }
  *maximum = horizontal_max(best);
  long total = 0;
  for (int lane = 0; lane < 16; lane++) total += count[lane];
  return total;
}

// The bits of the tokens that a draw may take, in `scratch.words`. Returns false where it may take all.
bool allowed_words(const SampleArguments& a, long draw, Scratch& scratch) {
  const bool banned = a.banned_start && a.banned_start[draw + 1] > a.banned_start[draw];
  const bool masked = a.allowed && a.allowed_index[draw] >= 0;
  if (!banned && !masked) return false;
  std::vector<uint32_t>& words = scratch.words;
  words.assign((size_t)(a.vocab_size + 31) / 32, ~0u);
  if (masked) memcpy(words.data(), a.allowed + a.allowed_index[draw] * a.allowed_stride, words.size() * sizeof(uint32_t));
  if (banned)
    for (int i = a.banned_start[draw]; i < a.banned_start[draw + 1]; i++)
      words[a.banned_ids[i] / 32] &= ~(1u << (a.banned_ids[i] % 32));
  return true;
}

struct Drawn {
  long token_id = -1;
  float raw_logprob = __builtin_nanf(""), sampled_logprob = __builtin_nanf("");
  float kept_mass = __builtin_nanf(""), entropy = __builtin_nanf("");
  Status status = kOk;
  long num_kept = 0;
};

// The maximum of a row; sets the status where there is none. `lowest` is the row's minimum.
bool check_row(const float* x, long size, float* maximum, float* lowest, Status* status) {
  if (row_maximum(x, size, maximum, lowest)) return true;
  *status = std::all_of(x, x + size, [](float v) { return v == -kInfinity; }) ? kNothingLeft : kNotNumbers;
  return false;
}

Drawn draw_row(const SampleArguments& a, long draw, Scratch& scratch) {
  const long size = a.vocab_size;
  const float* logits = a.logits + (a.row_index ? a.row_index[draw] : draw) * a.row_stride;
  const float* row = logits;  // what the draw is made from, before masks
  if (a.adjusted && a.adjusted_index[draw] >= 0) row = a.adjusted + a.adjusted_index[draw] * a.adjusted_stride;
  const long forced = a.forced ? a.forced[draw] : -1;
  const float temperature = a.temperature[draw];
  Drawn result;
  float logits_maximum, lowest;
  if (!check_row(logits, size, &logits_maximum, &lowest, &result.status)) return result;
  float row_top = logits_maximum;
  if (row != logits && !check_row(row, size, &row_top, &lowest, &result.status)) return result;
  const float* x = row;  // and after masks
  float maximum = row_top;
  long finite = -1;  // tokens that masks leave: counted when they are asked for
  const bool masked = allowed_words(a, draw, scratch);
  if (masked) {
    scratch.masked.resize(size);
    x = scratch.masked.data();
    finite = apply_mask(row, scratch.words.data(), size, scratch.masked.data(), &maximum);
    if (finite == 0) {
      result.status = kNothingLeft;
      return result;
    }
  }
  if (temperature == 0.0f) {
    const RowSums sums = row_sums(row, size, row_top, 1.0f, nullptr);
    const double logits_total = row == logits ? sums.total : row_sums(logits, size, logits_maximum, 1.0f, nullptr).total;
    const long best = first_equal(x, size, maximum);
    result.token_id = forced >= 0 ? forced : best;
    result.raw_logprob = row_logprob(logits[result.token_id], logits_maximum, 1.0f, logits_total);
    result.sampled_logprob = result.token_id == best ? 0.0f : -kInfinity;
    result.kept_mass = expf(row_logprob(row[best], row_top, 1.0f, sums.total));
    result.entropy = row_entropy(sums);
    result.num_kept = 1;
    return result;
  }
  const float inverse = inverse_temperature(temperature);
  float* exponentials = scratch.exponentials.data();
  const RowSums tempered = row_sums(row, size, row_top, inverse, masked ? nullptr : exponentials);
  const double logits_total = row == logits && inverse == 1.0f
                                  ? tempered.total
                                  : row_sums(logits, size, logits_maximum, 1.0f, nullptr).total;
  double kept_total = tempered.total;
  if (masked) kept_total = row_sums(x, size, maximum, inverse, exponentials).total;

  const Filters filters = {a.top_k[draw] > 0 && a.top_k[draw] < size ? a.top_k[draw] : 0L, a.top_p[draw], a.min_p[draw]};
  const NoiseKey key = noise_key(a.seed[draw], a.sample_index[draw], a.position[draw]);
  bool whole = !masked;
  bool kept = true;  // false where filters leave the forced token out; that of a masked one shows in its logit
  result.token_id = forced;
  if (filters.any()) {
    const long count = apply_filters(x, size, kept_total, filters, scratch);
    float* weights = scratch.weights.data();
    const int* ids = scratch.ids.data();
    for (long i = count; i % 16; i++) weights[i] = 0.0f;
    if (forced < 0)
      result.token_id = race(weights, ids, count, key);
    else
      kept = std::binary_search(ids, ids + count, (int)forced);
    if (count < size) {
      whole = false;
      kept_total = 0.0;
      for (long i = 0; i < count; i++) kept_total += weights[i];
    }
    result.num_kept = count;
  } else {
    if (forced < 0) result.token_id = race(exponentials, nullptr, size, key);
    if (finite < 0) finite = lowest > -kInfinity ? size : count_finite(x, size);
    result.num_kept = finite;
  }
  const long token = result.token_id;
  result.raw_logprob = row_logprob(logits[token], logits_maximum, 1.0f, logits_total);
  result.sampled_logprob = kept ? row_logprob(x[token], maximum, inverse, kept_total) : -kInfinity;
  const double shift = exp((double)((maximum - row_top) * inverse));
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
  if (a.banned_start) {
    if (a.banned_start[r] < 0 || a.banned_start[r + 1] < a.banned_start[r]) return 6;
    for (int i = a.banned_start[r]; i < a.banned_start[r + 1]; i++)
      if (a.banned_ids[i] < 0 || a.banned_ids[i] >= a.vocab_size) return 6;
  }
  const auto outside = [r](const long* index, long count) { return index && (index[r] < -1 || index[r] >= count); };
  if (outside(a.adjusted_index, a.num_adjusted)) return 7;
  if (outside(a.allowed_index, a.num_allowed)) return 8;
  if (outside(a.forced, a.vocab_size)) return 9;
  return 0;
}

}  // namespace

// Returns 0, or 16 * (draw + 1) + the number of the argument that is out of range there; nothing is drawn then.
extern "C" long rk_sample(const SampleArguments* arguments) {
  const SampleArguments& a = *arguments;
  for (long r = 0; r < a.num_draws; r++)
    if (const int problem = check_draw(a, r)) return 16 * (r + 1) + problem;
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
      a.num_kept[r] = (int)drawn.num_kept;
    }
  });
  return 0;
}

// The noise itself, for tests and for tools that replay draws.
extern "C" void rk_noise_bits(long seed, long sample_index, long position, const long* token_ids, long* bits, long count) {
  const NoiseKey key = noise_key(seed, sample_index, position);
  for (long i = 0; i < count; i++) bits[i] = noise_bits((uint32_t)token_ids[i], key);
}

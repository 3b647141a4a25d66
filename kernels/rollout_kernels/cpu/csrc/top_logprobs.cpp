// The largest log-probabilities of rows of logits at temperature 1, and ranks and log-probabilities of given tokens.
//
// Row sums are those of `sample`. The largest logits are found without sorting the row: the maxima of groups give a value
// that enough logits reach, one pass collects what reaches it and counts what is above the given token, and only that is
// sorted.
#include <algorithm>
#include <functional>
#include <vector>

#include "softmax_row.h"
#include "threads.h"

namespace {

const float kInfinity = __builtin_inff();
const float kNotANumber = __builtin_nanf("");

// Mirrors the C structure in `bindings.py`.
struct TopArguments {
  const float* logits;
  long row_stride, vocab_size, num_draws, num_rows, num_top;
  const long* token_ids;    // -1: none
  const long* row_index;    // nullable: draw r uses row r
  const int* chosen_start;  // nullable, [num_draws + 1]
  const int* chosen_ids;
  int* top_ids;
  float* top_logprobs;
  float* logprobs;
  int* ranks;
  float* chosen_logprobs;
};

struct Scratch {
  std::vector<float> maxima;
  std::vector<uint64_t> keys;
};

// Keys ascend where logits descend, and among equal logits (-0 is 0) where ids ascend.
uint64_t sort_key(float logit, long id) {
  const float value = logit + 0.0f;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (uint64_t)~ascending << 32 | (uint64_t)id;
}

// A value that at least `k` of the logits reach, close to the k-th largest: the k-th largest of the maxima of groups.
float lower_bound_of_top(const float* x, long size, long k, std::vector<float>& maxima) {
  const long vectors_per_group = std::min(64L, size / (64 * std::max(k, 4L)));
  if (vectors_per_group < 2) return -kInfinity;
  maxima.clear();
  for (long i = 0; i + 16 <= size; i += 16 * vectors_per_group) {
    v16f best = load(x + i);
    for (long j = 1; j < vectors_per_group && i + 16 * j + 16 <= size; j++) best = vmax(best, load(x + i + 16 * j));
    maxima.resize(maxima.size() + 16);
    store(maxima.data() + maxima.size() - 16, best);
  }
  if ((long)maxima.size() < k) return -kInfinity;
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
  return maxima[k - 1];
}

// Leaves the keys of the logits that reach `bound` in `keys` (no bound: NaN); returns how many logits are above `value`.
long collect_and_count(const float* x, long size, float bound, float value, std::vector<uint64_t>& keys) {
  v16i above = {};
  keys.clear();
  for (long i = 0; i < size; i += 16) {
    const long rest = size - i;
    const v16i inside = kLaneIndex < (int)std::min(16L, rest);
    const v16f v = load_lanes(x + i, rest);
    above -= (v16i)(v > value) & inside;
    const v16i reached = (v16i)(v >= bound) & inside;
    if (__builtin_expect(!any_lane(reached), 1)) continue;
    for (uint32_t bits = lane_bits(reached); bits; bits &= bits - 1) {
      const long id = i + __builtin_ctz(bits);
      keys.push_back(sort_key(x[id], id));
    }
  }
  long count = 0;
  for (int lane = 0; lane < 16; lane++) count += above[lane];
  return count;
}

void top_of_row(const TopArguments& a, long draw, Scratch& scratch) {
  const long size = a.vocab_size, k = a.num_top, token = a.token_ids[draw];
  const float* x = a.logits + (a.row_index ? a.row_index[draw] : draw) * a.row_stride;
  int* top_ids = a.top_ids + draw * k;
  float* top_logprobs = a.top_logprobs + draw * k;
  const long first = a.chosen_start ? a.chosen_start[draw] : 0, end = a.chosen_start ? a.chosen_start[draw + 1] : 0;
  float maximum;
  if (!row_maximum(x, size, &maximum)) {
    for (long i = 0; i < k; i++) top_ids[i] = (int)i;
    std::fill(top_logprobs, top_logprobs + k, kNotANumber);
    std::fill(a.chosen_logprobs + first, a.chosen_logprobs + end, kNotANumber);
    a.logprobs[draw] = kNotANumber;
    a.ranks[draw] = 0;
    return;
  }
  const double total = row_sums(x, size, maximum, 1.0f, nullptr).total;
  const auto logprob = [&](long id) { return row_logprob(x[id], maximum, 1.0f, total); };
  const float bound = k > 0 ? lower_bound_of_top(x, size, k, scratch.maxima) : kNotANumber;
  std::vector<uint64_t>& keys = scratch.keys;
  const long above = collect_and_count(x, size, bound, token < 0 ? kInfinity : x[token], keys);
  if ((long)keys.size() > k) std::nth_element(keys.begin(), keys.begin() + k, keys.end());
  std::sort(keys.begin(), keys.begin() + k);
  for (long i = 0; i < k; i++) {
    top_ids[i] = (int)(uint32_t)keys[i];
    top_logprobs[i] = logprob(top_ids[i]);
  }
  for (long i = first; i < end; i++) a.chosen_logprobs[i] = logprob(a.chosen_ids[i]);
  a.logprobs[draw] = token < 0 ? kNotANumber : logprob(token);
  a.ranks[draw] = token < 0 ? 0 : (int)above + 1;
}

// 0, or the number of the first argument of draw r that is out of range: 1 token id, 2 row, 3 chosen ids.
int check_draw(const TopArguments& a, long r) {
  if (a.token_ids[r] < -1 || a.token_ids[r] >= a.vocab_size) return 1;
  const long row = a.row_index ? a.row_index[r] : r;
  if (row < 0 || row >= a.num_rows) return 2;
  if (!a.chosen_start) return 0;
  if (a.chosen_start[r] < 0 || a.chosen_start[r + 1] < a.chosen_start[r]) return 3;
  for (int i = a.chosen_start[r]; i < a.chosen_start[r + 1]; i++)
    if (a.chosen_ids[i] < 0 || a.chosen_ids[i] >= a.vocab_size) return 3;
  return 0;
}

}  // namespace

// Returns 0, or 4 * (draw + 1) + the number of the argument that is out of range there; nothing is computed then.
extern "C" long rk_top_logprobs(const TopArguments* arguments) {
  const TopArguments& a = *arguments;
  for (long r = 0; r < a.num_draws; r++)
    if (const int problem = check_draw(a, r)) return 4 * (r + 1) + problem;
  parallel_items(a.num_draws, 1, true, [&](Items& items) {
    Scratch scratch;
    for (long r, end; items.take(&r, &end);) top_of_row(a, r, scratch);
  });
  return 0;
}

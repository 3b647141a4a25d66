// Top-k, top-p and min-p of one row.
//
// The filters keep a prefix of the tokens in the order (logit descending, id ascending), so each filter is a cut in that
// order and the kept set is the shortest prefix. A cut is found without sorting: histograms of the mass over the logits,
// refined inside the bin where the cut lies. All sums run in the order of the ids.
#pragma once
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

const float kInfinity = __builtin_inff();

// Where a prefix ends: tokens with a larger logit, or the same logit and an id up to `id`, belong to it.
struct Cut {
  float logit;
  int id;
};

// Memory of a thread for the rows of one call. What few draws need is there once one of them asks: all of it together is
// nine times a row, and its first touch takes longer than the draw.
struct Scratch {
  std::vector<float> exponentials, masked, group_maxima;
  std::vector<int> ids;  // of the tokens under consideration, ascending, with their logits and exponentials
  std::vector<float> logits, weights;
  std::vector<int> bin_of, subset;  // for find_cut
  std::vector<float> subset_logits, subset_weights;
  std::vector<double> bins;
  std::vector<uint32_t> words;  // a bit for each token that may be drawn

  explicit Scratch(long size) : exponentials(padded(size)) {}

  void make_room_for_filters(long size) {
    for (auto* buffer : {&logits, &weights, &subset_logits, &subset_weights}) buffer->resize(padded(size));
    for (auto* buffer : {&ids, &bin_of, &subset}) buffer->resize(padded(size));
    bins.resize(2048);
  }

 private:
  static long padded(long size) { return size + 32; }  // room for whole vectors past the end
};

// Appends the lanes that `bits` selects; may write a whole vector past the end.
RK_INLINE long append(int* target, long count, v16i values, uint32_t bits) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(target + count, _mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)values));
  return count + __builtin_popcount(bits);
#else
  for (; bits; bits &= bits - 1) target[count++] = values[__builtin_ctz(bits)];
  return count;
#endif
}

// Bins of equal width from the highest logit down: a monotone map, whatever its rounding. Halves cannot overflow.
struct Bins {
  float high, scale, last;
  Bins(float low, float high, long num_bins)
      : high(high * 0.5f), scale((float)(num_bins - 1) / (high * 0.5f - low * 0.5f)), last((float)(num_bins - 1)) {
    scale = scale < 1e37f ? scale : 1e37f;
  }
  v16i operator()(v16f logits) const {
    return __builtin_convertvector(vmin((high - logits * 0.5f) * scale, splat(last)), v16i);
  }
};

// The first `count` of the order (logit descending, index ascending): stops before the weight reaches `target`.
Cut walk(const float* logits, const float* weights, const int* positions, long count, double before, double target,
         bool sorted, std::vector<int>& order) {
  order.resize(count);
  for (long i = 0; i < count; i++) order[i] = (int)i;
  if (!sorted)
    std::sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
  Cut cut = {logits[order[0]], positions ? positions[order[0]] : order[0]};
  for (const int i : order) {
    if (before >= target) break;
    cut = {logits[i], positions ? positions[i] : i};
    before += weights ? (double)weights[i] : 1.0;
  }
  return cut;
}

// The end of the longest prefix in which the weight before every token is below `target`. The logits are finite and stand
// in the order of the ids; a Cut's id is a position among them. No weights: all are 1. count > 0.
Cut find_cut(const float* logits, const float* weights, long count, double target, Scratch& s) {
  constexpr long few = 48;
  const int* positions = nullptr;  // null: 0, 1, 2, ...
  double before = 0.0;
  std::vector<int> order;
  while (true) {
    v16f lowest = splat(logits[0]), highest = lowest;
    for (long i = 0; i < count; i += 16) {
      const v16f v = select((v16i)(kLaneIndex < (int)std::min(16L, count - i)), load(logits + i), splat(logits[0]));
      lowest = vmin(v, lowest);
      highest = vmax(v, highest);
    }
    const float low = -horizontal_max(-lowest), high = horizontal_max(highest);
    if (low == high || count <= few) return walk(logits, weights, positions, count, before, target, low == high, order);
    const Bins bins(low, high, (long)s.bins.size());
    for (long i = 0; i < count; i += 16) {
      const v16i bin = bins(select((v16i)(kLaneIndex < (int)std::min(16L, count - i)), load(logits + i), splat(low)));
      memcpy(s.bin_of.data() + i, &bin, sizeof bin);
    }
    std::fill(s.bins.begin(), s.bins.end(), 0.0);
    for (long i = 0; i < count; i++) s.bins[s.bin_of[i]] += weights ? (double)weights[i] : 1.0;
    long bin = 0;
    const long last = (long)s.bins.size() - 1;
    while (bin < last && before + s.bins[bin] < target) before += s.bins[bin++];
    long n = 0, filled = 0;
    for (long i = 0; i < count; i += 16) {
      v16i bin_of, source = kLaneIndex + (int)i;
      memcpy(&bin_of, s.bin_of.data() + i, sizeof bin_of);
      const uint32_t bits = lane_bits((v16i)(bin_of == (int)bin)) & (count - i < 16 ? (1u << (count - i)) - 1 : 0xffffu);
      if (!bits) continue;
      if (positions) memcpy(&source, positions + i, sizeof source);
      const v16f logit = load(logits + i), weight = weights ? load(weights + i) : splat(1.0f);
      n = append(s.subset.data(), filled, source, bits);
      append((int*)s.subset_logits.data(), filled, (v16i)logit, bits);
      append((int*)s.subset_weights.data(), filled, (v16i)weight, bits);
      filled = n;
    }
    // Rounding can leave the last bin empty where the weights just add up to the target: everything is kept.
    if (n == 0) return {low, (int)count};
    if (n == count) return walk(logits, weights, positions, count, before, target, false, order);  // too close to split
    logits = s.subset_logits.data();
    weights = s.subset_weights.data();
    positions = s.subset.data();
    count = n;
  }
}

// Takes under consideration the tokens whose `values` are at least `threshold` and whose logits are above -inf.
long collect(const float* values, float threshold, const float* x, long size, Scratch& s) {
  const float* e = s.exponentials.data();
  long count = 0;
  for (long i = 0; i < size; i += 16) {
    const long rest = size - i;
    const v16f logits = load_lanes(x + i, rest);
    const v16i wanted = (v16i)(load_lanes(values + i, rest) >= threshold) & (v16i)(logits > -kInfinity);
    const uint32_t bits = lane_bits(wanted) & (rest < 16 ? (1u << rest) - 1 : 0xffffu);
    if (!bits) continue;
    append((int*)s.logits.data(), count, (v16i)logits, bits);
    append((int*)s.weights.data(), count, (v16i)load(e + i), bits);
    count = append(s.ids.data(), count, kLaneIndex + (int)i, bits);
  }
  return count;
}

// Keeps the tokens for which `kept(logits, weights, positions)` is true, in place.
template <typename Kept>
long keep_if(long count, Scratch& s, Kept kept) {
  long n = 0;
  for (long i = 0; i < count; i += 16) {
    const v16f logits = load(s.logits.data() + i), weights = load(s.weights.data() + i);
    v16i ids;
    memcpy(&ids, s.ids.data() + i, sizeof ids);
    const uint32_t valid = count - i < 16 ? (1u << (count - i)) - 1 : 0xffffu;
    const uint32_t bits = lane_bits(kept(logits, weights, kLaneIndex + (int)i)) & valid;
    append((int*)s.logits.data(), n, (v16i)logits, bits);
    append((int*)s.weights.data(), n, (v16i)weights, bits);
    n = append(s.ids.data(), n, ids, bits);
  }
  return n;
}

// A value that at least `k` of the logits reach, close to the k-th largest: the k-th largest of the maxima of groups.
float top_k_lower_bound(const float* x, long size, long k, Scratch& scratch) {
  const long vectors_per_group = std::min(64L, size / (64 * std::max(k, 4L)));
  if (vectors_per_group < 2) return -kInfinity;
  std::vector<float>& maxima = scratch.group_maxima;
  maxima.clear();
  for (long i = 0; i + 16 <= size; i += 16 * vectors_per_group) {
    v16f best = load(x + i);
    for (long j = 1; j < vectors_per_group && i + 16 * j + 16 <= size; j++) best = vmax(best, load(x + i + 16 * j));
    maxima.resize(maxima.size() + 16);
    store(maxima.data() + maxima.size() - 16, best);
  }
  maxima.erase(std::remove(maxima.begin(), maxima.end(), -kInfinity), maxima.end());
  const long count = (long)maxima.size();
  if (count < k) return -kInfinity;
  maxima.resize(count + 16);
  return find_cut(maxima.data(), nullptr, count, (double)k, scratch).logit;
}

struct Filters {
  long top_k;  // 0: off
  float top_p, min_p;
  bool any() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
};

// Leaves the kept tokens' ids and exponentials in `s.ids` and `s.weights`; returns how many. x is masked where need be,
// and `s.exponentials` belong to it, with the maximum at exactly 1 and the sum `total`.
long apply_filters(const float* x, long size, double total, Filters filters, Scratch& s) {
  s.make_room_for_filters(size);
  long count;
  if (filters.top_k > 0) {
    count = collect(x, top_k_lower_bound(x, size, filters.top_k, s), x, size, s);
    if (filters.top_k < count) {
      const float cut = find_cut(s.logits.data(), nullptr, count, (double)filters.top_k, s).logit;
      count = keep_if(count, s, [&](v16f logits, v16f, v16i) { return (v16i)(logits >= cut); });
    }
    total = 0.0;
    for (long i = 0; i < count; i++) total += s.weights[i];
  } else {
    // Tokens below this together weigh less than what top-p drops, so none of them is kept.
    const double light = (1.0 - (double)filters.top_p) * total / (double)size * 0.999;
    count = collect(s.exponentials.data(), std::max({(float)light, filters.min_p, 1e-38f}), x, size, s);
  }
  if (filters.top_p < 1.0f) {
    const Cut cut = find_cut(s.logits.data(), s.weights.data(), count, (double)filters.top_p * total, s);
    count = keep_if(count, s, [&](v16f logits, v16f, v16i i) {
      return (v16i)(logits > cut.logit) | ((v16i)(logits == cut.logit) & (v16i)(i <= cut.id));
    });
  }
  if (filters.min_p > 0.0f)
    count = keep_if(count, s, [&](v16f, v16f weights, v16i) { return (v16i)(weights >= filters.min_p); });
  return count;
}

}  // namespace

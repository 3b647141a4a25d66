// Row sums shared with the sampler, log-probabilities of given tokens, and their gradient.
#include <vector>

#include "softmax_row.h"
#include "threads.h"

namespace {

RK_INLINE v16f load_logits(const float* x, long count) {
  if (count >= 16) return load(x);
  return select((v16i)(kLaneIndex < (int)count), load_partial(x, count), splat(-__builtin_inff()));
}

}  // namespace

__attribute__((noinline)) bool row_maximum(const float* x, long size, float* maximum, float* minimum) {
  const v16f infinity = splat(__builtin_inff());
  v16f best[4] = {-infinity, -infinity, -infinity, -infinity};
  v16f least[4] = {infinity, infinity, infinity, infinity};
  v16i good = ~v16i{};
  long i = 0;
  for (; i + 64 <= size; i += 64)
    for (int j = 0; j < 4; j++) {
      const v16f v = load(x + i + 16 * j);
      good &= (v16i)(v < infinity);
      best[j] = vmax(v, best[j]);
      least[j] = vmin(v, least[j]);
    }
  for (; i < size; i += 16) {
    const v16f v = load_logits(x + i, size - i);
    good &= (v16i)(v < infinity);
    best[0] = vmax(v, best[0]);
    least[0] = vmin(select((v16i)(kLaneIndex < (int)(size - i)), v, infinity), least[0]);
  }
  if (minimum) *minimum = -horizontal_max(-vmin(vmin(least[0], least[1]), vmin(least[2], least[3])));
  *maximum = horizontal_max(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
  return !any_lane(~good) && *maximum > -__builtin_inff();
}

// Blocks of 1024 values are added in float32, four vectors side by side, and the blocks in float64.
__attribute__((noinline)) RowSums row_sums(const float* x, long size, float maximum, float inverse, float* exponentials) {
  RowSums sums = {0.0, 0.0};
  for (long block = 0; block < size; block += 1024) {
    const long end = block + 1024 < size ? block + 1024 : size;
    v16f total[4] = {}, weighted[4] = {};
    const auto add = [&](long i, int j, v16f logits) __attribute__((always_inline)) {
      const v16f t = vmax((logits - maximum) * inverse, splat(-200.0f));
      const v16f e = exp_nonpositive(t);
      total[j] += e;
      weighted[j] += e * t;
      if (exponentials) store(exponentials + i, e);
    };
    long i = block;
    for (; i + 64 <= end; i += 64)
      for (int j = 0; j < 4; j++) add(i + 16 * j, j, load(x + i + 16 * j));
    for (; i < end; i += 16) add(i, 0, load_logits(x + i, end - i));
    sums.total += horizontal_sum((total[0] + total[1]) + (total[2] + total[3]));
    sums.weighted += horizontal_sum((weighted[0] + weighted[1]) + (weighted[2] + weighted[3]));
  }
  return sums;
}

__attribute__((noinline)) float row_logprob(float x, float maximum, float inverse, double total) {
  return (float)((double)((x - maximum) * inverse) - log(total));
}

__attribute__((noinline)) float row_entropy(RowSums sums) {
  const double entropy = log(sums.total) - sums.weighted / sums.total;
  return (float)(entropy > 0.0 ? entropy : 0.0);
}

namespace {

const float kNotANumber = __builtin_nanf("");

// 0, or what is wrong with row r: 1 the token id, 2 the temperature.
int check_row(const long* token_ids, const float* temperatures, float temperature, long r, long size) {
  const float t = temperatures ? temperatures[r] : temperature;
  if (!(t > 0.0f && t < __builtin_inff())) return 2;
  return token_ids[r] < 0 || token_ids[r] >= size;
}

template <typename T>
void logprob_gradient(const float* x, long size, long token_id, float inverse, float grad, float* exponentials, T* out) {
  float maximum;
  if (!row_maximum(x, size, &maximum)) {
    for (long i = 0; i < size; i += 16) store_lanes(out + i, splat(kNotANumber), size - i);
    return;
  }
  const double total = row_sums(x, size, maximum, inverse, exponentials).total;
  const float slope = grad * inverse, scale = (float)(-(double)slope / total);
  exponentials[token_id] -= (float)total;  // d logprob / d x = onehot - p
  for (long i = 0; i < size; i += 16) store_lanes(out + i, load(exponentials + i) * scale, size - i);
}

}  // namespace

// `temperatures` is [rows], or null where `temperature` serves all rows. `entropy` may be null. A row that is not all
// numbers gives NaN. Returns 0, or 4 * (row + 1) + what is wrong there (see `check_row`).
extern "C" long rk_token_logprobs(const float* logits, long row_stride, const long* token_ids, const float* temperatures,
                                  float temperature, float* logprobs, float* entropy, long rows, long size) {
  for (long r = 0; r < rows; r++)
    if (const int problem = check_row(token_ids, temperatures, temperature, r, size)) return 4 * (r + 1) + problem;
  parallel_for(rows, true, [&](long r) {
    const float* x = logits + r * row_stride;
    const float inverse = inverse_temperature(temperatures ? temperatures[r] : temperature);
    float maximum;
    if (row_maximum(x, size, &maximum)) {
      const RowSums sums = row_sums(x, size, maximum, inverse, nullptr);
      logprobs[r] = row_logprob(x[token_ids[r]], maximum, inverse, sums.total);
      if (entropy) entropy[r] = row_entropy(sums);
    } else {
      logprobs[r] = kNotANumber;
      if (entropy) entropy[r] = kNotANumber;
    }
  });
  return 0;
}

// out[r] = grad[r] * d logprob[r] / d logits[r], contiguous rows in `out_dtype`. Arguments were checked by the forward.
extern "C" void rk_token_logprobs_backward(const float* logits, long row_stride, const long* token_ids,
                                           const float* temperatures, float temperature, const float* grad, void* out,
                                           int out_dtype, long rows, long size) {
  with_dtype(out_dtype, [&](auto* p) {
    typedef RK_ELEMENT(p) T;
    parallel_items(rows, 1, true, [&](Items& items) {
      std::vector<float> exponentials((size + 15) / 16 * 16);
      for (long r, end; items.take(&r, &end);)
        logprob_gradient(logits + r * row_stride, size, token_ids[r],
                         inverse_temperature(temperatures ? temperatures[r] : temperature), grad[r], exponentials.data(),
                         (T*)out + r * size);
    });
  });
}

// Token embedding, RMS norm with a residual, rotary embedding and SiLU gating, with their backward passes. Rows are independent; inside
// a row the order is fixed, so a row's result does not depend on the rows beside it or on the number of threads.
#include <cmath>
#include <vector>

#include "activation.h"
#include "common.h"
#include "kernels.h"
#include "rotary.h"
#include "threads.h"

namespace {

// h = x + residual (stored to `sum` where given); returns the sum of squares in one fixed order.
template <typename X>
float add_and_square(const X* x, const float* residual, float* sum, long size) {
  v16f squares[2] = {};
  for (long i = 0; i < size; i += 16) {
    const long count = size - i;
    v16f h = load_lanes(x + i, count);
    if (residual) h = h + load_lanes(residual + i, count);
    if (sum) store_lanes(sum + i, h, count);
    squares[(i >> 4) & 1] += h * h;
  }
  return horizontal_sum(squares[0] + squares[1]);
}

template <typename W, typename Out>
void scale_row(const float* h, const W* weight, float factor, Out* out, long size) {
  for (long i = 0; i < size; i += 16) {
    const long count = size - i;
    store_lanes(out + i, load_lanes(h + i, count) * factor * load_lanes(weight + i, count), count);
  }
}

template <typename X, typename W, typename Out>
void rms_norm_rows(const X* x, long x_stride, const W* weight, float eps, const float* residual, long residual_stride,
                   Out* out, float* sum, long rows, long size) {
  parallel_items(rows, 8, rows * size > kParallelElements, [&](Items& items) {
    std::vector<float> buffer(sum ? 0 : size);
    for (long begin, end; items.take(&begin, &end);)
      for (long t = begin; t < end; t++) {
        float* h = sum ? sum + t * size : buffer.data();
        const float squares =
            add_and_square(x + t * x_stride, residual ? residual + t * residual_stride : nullptr, h, size);
        scale_row(h, weight, 1.0f / sqrtf(squares / (float)size + eps), out + t * size, size);
      }
  });
}

// grad_h = grad_sum + r w g - h r^3 mean(h w g), and r = rsqrt(mean(h^2) + eps) for the weight's gradient.
template <typename G, typename W, typename X>
float rms_norm_backward_row(const G* grad, const float* grad_sum, const float* h, const W* weight, float eps, X* grad_x,
                            float* grad_residual, long size) {
  v16f squares[2] = {};
  v16f products[2] = {};
  for (long i = 0; i < size; i += 16) {
    const long count = size - i;
    const v16f value = load_lanes(h + i, count);
    squares[(i >> 4) & 1] += value * value;
    products[(i >> 4) & 1] += value * load_lanes(weight + i, count) * load_lanes(grad + i, count);
  }
  const float r = 1.0f / sqrtf(horizontal_sum(squares[0] + squares[1]) / (float)size + eps);
  const float slope = horizontal_sum(products[0] + products[1]) * r * r * r / (float)size;
  for (long i = 0; i < size; i += 16) {
    const long count = size - i;
    v16f g = load_lanes(weight + i, count) * load_lanes(grad + i, count) * r - load_lanes(h + i, count) * slope;
    if (grad_sum) g = g + load_lanes(grad_sum + i, count);
    if (grad_x) store_lanes(grad_x + i, g, count);
    if (grad_residual) store_lanes(grad_residual + i, g, count);
  }
  return r;
}

template <typename T>
void silu_rows(const T* x, long stride, T* out, long rows, long size) {
  parallel_for(rows, rows * size > kParallelElements, [&](long t) {
    const T* gate = x + t * stride;
    silu_and_mul_row(gate, gate + size, out + t * size, size);
  });
}

template <typename T>
void silu_backward_rows(const T* grad, const T* x, long stride, T* grad_x, long rows, long size) {
  parallel_for(rows, rows * size > kParallelElements, [&](long t) {
    const T* gate = x + t * stride;
    T* target = grad_x + t * 2 * size;
    for (long i = 0; i < size; i += 16) {
      const long count = size - i;
      const v16f d = load_lanes(grad + t * size + i, count);
      const v16f g = load_lanes(gate + i, count), up = load_lanes(gate + size + i, count), s = sigmoid(g);
      store_lanes(target + i, d * up * s * (1.0f + g * (1.0f - s)), count);
      store_lanes(target + size + i, d * g * s, count);
    }
  });
}

}  // namespace

// Rows of a table, widened to float32. Returns 0, or 1 + the index of the first id outside the table; nothing is written then.
extern "C" long rk_embedding(const void* weight, long w_row_stride, int dtype, const long* ids, long vocab_size, float* out,
                             long rows, long size) {
  for (long t = 0; t < rows; t++)
    if (ids[t] < 0 || ids[t] >= vocab_size) return t + 1;
  with_dtype(dtype, [&](auto* p) {
    parallel_for(rows, rows * size > kParallelElements, [&](long t) {
      const auto* row = (const RK_ELEMENT(p)*)weight + ids[t] * w_row_stride;
      for (long i = 0; i < size; i += 16) store_lanes(out + t * size + i, load_lanes(row + i, size - i), size - i);
    });
  });
  return 0;
}

extern "C" void rk_rms_norm(const void* x, long x_stride, int x_dtype, const void* weight, int w_dtype, float eps,
                            const float* residual, long residual_stride, void* out, int out_dtype, float* sum, long rows,
                            long size) {
  with_dtype(x_dtype, [&](auto* xp) {
    with_dtype(w_dtype, [&](auto* wp) {
      with_dtype(out_dtype, [&](auto* op) {
        rms_norm_rows((const RK_ELEMENT(xp)*)x, x_stride, (const RK_ELEMENT(wp)*)weight, eps, residual, residual_stride,
                      (RK_ELEMENT(op)*)out, sum, rows, size);
      });
    });
  });
}

// All rows contiguous. `grad_sum`, `grad_x`, `grad_residual` and `grad_weight` may be null; `inverse_rms` is [rows].
extern "C" void rk_rms_norm_backward(const void* grad, int grad_dtype, const float* grad_sum, const float* h,
                                     const void* weight, int w_dtype, float eps, void* grad_x, int x_dtype,
                                     float* grad_residual, float* inverse_rms, float* grad_weight, long rows, long size) {
  with_dtype(grad_dtype, [&](auto* gp) {
    typedef RK_ELEMENT(gp) G;
    with_dtype(w_dtype, [&](auto* wp) {
      typedef RK_ELEMENT(wp) W;
      with_dtype(x_dtype, [&](auto* xp) {
        typedef RK_ELEMENT(xp) X;
        parallel_for(rows, rows * size > kParallelElements, [&](long t) {
          inverse_rms[t] = rms_norm_backward_row((const G*)grad + t * size, grad_sum ? grad_sum + t * size : nullptr,
                                                 h + t * size, (const W*)weight, eps,
                                                 grad_x ? (X*)grad_x + t * size : nullptr,
                                                 grad_residual ? grad_residual + t * size : nullptr, size);
        });
      });
    });
    if (!grad_weight) return;
    // Each column adds up over the rows in order, 64 columns to an item.
    constexpr long strip = 64;
    parallel_for((size + strip - 1) / strip, rows * size > kParallelElements, [&](long item) {
      const long first = item * strip;
      v16f sums[strip / 16] = {};
      for (long t = 0; t < rows; t++)
        for (long i = first; i < size && i < first + strip; i += 16)
          sums[(i - first) / 16] +=
              load_lanes((const G*)grad + t * size + i, size - i) * load_lanes(h + t * size + i, size - i) * inverse_rms[t];
      for (long i = first; i < size && i < first + strip; i += 16)
        store_lanes(grad_weight + i, sums[(i - first) / 16], size - i);
    });
  });
}

// Rotates q and k in place; their rows may be apart, their heads lie side by side. `direction` is 1, or -1 for the inverse
// rotation (the backward pass). Returns 0, or 1 + the index of the first position outside the table; nothing is rotated then.
extern "C" long rk_rotary(void* q, long q_row, long q_heads, void* k, long k_row, long k_heads, int dtype, long head_dim,
                          const long* positions, const float* cos_sin, long max_positions, float direction, long rows) {
  for (long t = 0; t < rows; t++)
    if (positions[t] < 0 || positions[t] >= max_positions) return t + 1;
  with_dtype(dtype, [&](auto* p) {
    typedef RK_ELEMENT(p) T;
    parallel_for(rows, rows * (q_heads + k_heads) * head_dim > kParallelElements, [&](long t) {
      const float* cosine = cos_sin + positions[t] * head_dim;
      rotate_heads((T*)q + t * q_row, q_heads, head_dim, cosine, cosine + head_dim / 2, direction);
      rotate_heads((T*)k + t * k_row, k_heads, head_dim, cosine, cosine + head_dim / 2, direction);
    });
  });
  return 0;
}

extern "C" void rk_silu_and_mul(const void* x, long stride, int dtype, void* out, long rows, long size) {
  with_dtype(dtype, [&](auto* p) { silu_rows((const RK_ELEMENT(p)*)x, stride, (RK_ELEMENT(p)*)out, rows, size); });
}

extern "C" void rk_silu_and_mul_backward(const void* grad, const void* x, long stride, int dtype, void* grad_x, long rows,
                                         long size) {
  with_dtype(dtype, [&](auto* p) {
    typedef RK_ELEMENT(p) T;
    silu_backward_rows((const T*)grad, (const T*)x, stride, (T*)grad_x, rows, size);
  });
}

// Backward pass of causal self-attention over packed sequences, in float32.
//
// One item is a (sequence, key-value head): nobody else adds to its gradients, so the result is deterministic. It passes
// over blocks of 64 keys; each block meets every later block of 48 queries of every query head of the group:
//   P = exp(scale Q K^T - lse)    dP = dO V^T    dS = scale P (dP - delta)    delta = sum(dO O)
//   dV += P^T dO                  dK += dS^T Q   dQ += dS K
// All five products are one routine, since its left operand is read by single values and may lie transposed.
#include <algorithm>
#include <vector>

#include "common.h"
#include "threads.h"

namespace {

constexpr long kKeys = 64, kQueries = 48;
#if defined(__AVX512F__)
constexpr int kRows = 6, kVectors = 4;  // 24 accumulators of 32 registers
#else
constexpr int kRows = 3, kVectors = 2;
#endif

// A left operand of any layout: element (r, k) is data[r * row + k * column].
struct Left {
  const float* data;
  long row, column;
};

template <int Rows, int Vectors>
RK_INLINE void multiply_tile(Left a, const float* b, long b_row, float* c, long c_row, long depth, bool accumulate) {
  v16f acc[Rows][Vectors] = {};
  if (accumulate)
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) acc[r][v] = load(c + r * c_row + 16 * v);
  for (long k = 0; k < depth; k++) {
    v16f right[Vectors];
    for (int v = 0; v < Vectors; v++) right[v] = load(b + k * b_row + 16 * v);
    for (int r = 0; r < Rows; r++) {
      const float left = a.data[r * a.row + k * a.column];
      for (int v = 0; v < Vectors; v++) acc[r][v] += left * right[v];
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) store(c + r * c_row + 16 * v, acc[r][v]);
}

template <int Rows, int Vectors>
void multiply_rows(Left a, long rows, const float* b, long b_row, float* c, long c_row, long depth, bool accumulate) {
  long r = 0;
  for (; r + Rows <= rows; r += Rows)
    multiply_tile<Rows, Vectors>({a.data + r * a.row, a.row, a.column}, b, b_row, c + r * c_row, c_row, depth, accumulate);
  for (; r < rows; r++)
    multiply_tile<1, Vectors>({a.data + r * a.row, a.row, a.column}, b, b_row, c + r * c_row, c_row, depth, accumulate);
}

// c[rows, columns] (+)= a[rows, depth] @ b[depth, columns]; columns is a multiple of 16.
void multiply(Left a, long rows, const float* b, long b_row, long columns, float* c, long c_row, long depth,
              bool accumulate) {
  long n = 0;
  for (; n + 16 * kVectors <= columns; n += 16 * kVectors)
    multiply_rows<kRows, kVectors>(a, rows, b + n, b_row, c + n, c_row, depth, accumulate);
  for (; n < columns; n += 16) multiply_rows<kRows, 1>(a, rows, b + n, b_row, c + n, c_row, depth, accumulate);
}

struct Arguments {
  const void *grad, *q, *k, *v, *out;
  const float* lse;
  const int* query_start;
  long q_row, k_row, v_row;  // strides in elements; heads are head_dim apart
  long num_q_heads, num_kv_heads, head_dim, padded_dim;
  float scale;
  void *grad_q, *grad_k, *grad_v;
};

struct Scratch {
  std::vector<float> q, grad, grad_q;               // [group, length, padded_dim]
  std::vector<float> delta;                         // [group, length]
  std::vector<float> value_row;                     // [padded_dim]
  std::vector<float> keys, grad_k, grad_v;          // [kKeys, padded_dim]
  std::vector<float> keys_across, values_across;    // [padded_dim, kKeys]
  std::vector<float> probabilities, grad_scores;    // [kQueries, kKeys]

  void reserve(long group, long length, long padded_dim) {
    for (auto* buffer : {&q, &grad, &grad_q}) buffer->assign(group * length * padded_dim, 0.0f);
    for (auto* buffer : {&keys, &grad_k, &grad_v, &keys_across, &values_across}) buffer->assign(kKeys * padded_dim, 0.0f);
    delta.assign(group * length, 0.0f);
    value_row.resize(padded_dim);
    probabilities.resize(kQueries * kKeys);
    grad_scores.resize(kQueries * kKeys);
  }
};

template <typename T>
void unpack(const T* source, long size, float* target) {
  for (long i = 0; i < size; i += 16) store_lanes(target + i, load_lanes(source + i, size - i), size - i);
}

// Keys (and the transposed keys and values) of one block, zeros past the end of the sequence.
template <typename T>
void load_keys(const Arguments& a, long first_token, long count, long head, Scratch& s) {
  std::vector<float>& row = s.value_row;
  std::fill(s.keys.begin(), s.keys.end(), 0.0f);
  for (long j = 0; j < kKeys; j++) {
    const long token = first_token + j;
    if (j < count) {
      float* key = s.keys.data() + j * a.padded_dim;
      unpack((const T*)a.k + token * a.k_row + head * a.head_dim, a.head_dim, key);
      unpack((const T*)a.v + token * a.v_row + head * a.head_dim, a.head_dim, row.data());
      for (long d = 0; d < a.head_dim; d++) {
        s.keys_across[d * kKeys + j] = key[d];
        s.values_across[d * kKeys + j] = row[d];
      }
    } else {
      for (long d = 0; d < a.head_dim; d++) s.keys_across[d * kKeys + j] = s.values_across[d * kKeys + j] = 0.0f;
    }
  }
}

// From scores and dP to P and dS, in place. Query `first_query + r` sees keys up to its own index.
void softmax_backward(float* probabilities, float* grad_scores, const float* lse, long lse_stride, const float* delta,
                      long rows, long columns, long first_query, long first_key, float scale) {
  for (long r = 0; r < rows; r++) {
    const int visible = (int)(first_query + r - first_key + 1);
    for (long j = 0; j < columns; j += 16) {
      float* p = probabilities + r * kKeys + j;
      float* d = grad_scores + r * kKeys + j;
      const v16f value = select((v16i)(kLaneIndex + (int)j < visible), vexp(load(p) * scale - lse[r * lse_stride]), v16f{});
      store(p, value);
      store(d, value * (load(d) - delta[r]) * scale);
    }
  }
}

template <typename T>
void load_queries(const Arguments& a, long start, long length, long first_head, long group, Scratch& s) {
  for (long g = 0; g < group; g++)
    for (long i = 0; i < length; i++) {
      const long row = g * length + i, head = first_head + g;
      const long packed = ((start + i) * a.num_q_heads + head) * a.head_dim;
      unpack((const T*)a.q + (start + i) * a.q_row + head * a.head_dim, a.head_dim, s.q.data() + row * a.padded_dim);
      unpack((const T*)a.grad + packed, a.head_dim, s.grad.data() + row * a.padded_dim);
      v16f sum = {};
      for (long d = 0; d < a.head_dim; d += 16)
        sum += load_lanes((const T*)a.out + packed + d, a.head_dim - d) * load(s.grad.data() + row * a.padded_dim + d);
      s.delta[row] = horizontal_sum(sum);
    }
}

template <typename T>
void store_rows(const float* source, long padded_dim, void* target, long first, long row_stride, long rows, long size) {
  for (long i = 0; i < rows; i++)
    for (long d = 0; d < size; d += 16)
      store_lanes((T*)target + first + i * row_stride + d, load(source + i * padded_dim + d), size - d);
}

template <typename T>
void backward_item(const Arguments& a, long sequence, long kv_head, Scratch& s) {
  const long group = a.num_q_heads / a.num_kv_heads, dim = a.padded_dim;
  const long start = a.query_start[sequence], length = a.query_start[sequence + 1] - start;
  s.reserve(group, length, dim);
  load_queries<T>(a, start, length, kv_head * group, group, s);
  float* probabilities = s.probabilities.data();
  float* grad_scores = s.grad_scores.data();
  for (long first_key = 0; first_key < length; first_key += kKeys) {
    const long num_keys = std::min(kKeys, length - first_key);
    load_keys<T>(a, start + first_key, num_keys, kv_head, s);
    std::fill(s.grad_k.begin(), s.grad_k.end(), 0.0f);
    std::fill(s.grad_v.begin(), s.grad_v.end(), 0.0f);
    for (long g = 0; g < group; g++)
      for (long first = first_key; first < length; first += kQueries) {
        const long rows = std::min(kQueries, length - first);
        const long keys = std::min(num_keys, first + rows - first_key), columns = (keys + 15) / 16 * 16;
        const float* q = s.q.data() + (g * length + first) * dim;
        const float* grad = s.grad.data() + (g * length + first) * dim;
        multiply({q, dim, 1}, rows, s.keys_across.data(), kKeys, columns, probabilities, kKeys, dim, false);
        multiply({grad, dim, 1}, rows, s.values_across.data(), kKeys, columns, grad_scores, kKeys, dim, false);
        softmax_backward(probabilities, grad_scores, a.lse + (start + first) * a.num_q_heads + kv_head * group + g,
                         a.num_q_heads, s.delta.data() + g * length + first, rows, columns, first, first_key, a.scale);
        multiply({probabilities, 1, kKeys}, keys, grad, dim, dim, s.grad_v.data(), dim, rows, true);
        multiply({grad_scores, 1, kKeys}, keys, q, dim, dim, s.grad_k.data(), dim, rows, true);
        multiply({grad_scores, kKeys, 1}, rows, s.keys.data(), dim, dim, s.grad_q.data() + (g * length + first) * dim, dim,
                 keys, true);
      }
    const long row = a.num_kv_heads * a.head_dim, offset = (start + first_key) * row + kv_head * a.head_dim;
    store_rows<T>(s.grad_k.data(), dim, a.grad_k, offset, row, num_keys, a.head_dim);
    store_rows<T>(s.grad_v.data(), dim, a.grad_v, offset, row, num_keys, a.head_dim);
  }
  for (long g = 0; g < group; g++) {
    const long row = a.num_q_heads * a.head_dim;
    store_rows<T>(s.grad_q.data() + g * length * dim, dim, a.grad_q, start * row + (kv_head * group + g) * a.head_dim, row,
                  length, a.head_dim);
  }
}

}  // namespace

// grad, out and the results are contiguous; q, k and v have rows `*_row` elements apart. lse is [tokens, num_q_heads].
extern "C" void rk_attention_backward(const void* grad, const void* q, long q_row, const void* k, long k_row,
                                      const void* v, long v_row, const void* out, const float* lse, int dtype,
                                      const int* query_start, long num_seqs, long num_q_heads, long num_kv_heads,
                                      long head_dim, float scale, void* grad_q, void* grad_k, void* grad_v) {
  const Arguments a = {grad, q, k, v, out, lse, query_start, q_row, k_row, v_row, num_q_heads, num_kv_heads, head_dim,
                       (head_dim + 15) / 16 * 16, scale, grad_q, grad_k, grad_v};
  const long items = num_seqs * num_kv_heads;
  parallel_items(items, 1, true, [&](Items& queue) {
    Scratch scratch;
    for (long i, end; queue.take(&i, &end);)
      with_dtype(dtype, [&](auto* p) { backward_item<RK_ELEMENT(p)>(a, i / num_kv_heads, i % num_kv_heads, scratch); });
  });
}

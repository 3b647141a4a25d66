// Backward pass of causal self-attention over packed sequences.
//
// One item is a (sequence, key-value head): nobody else adds to its gradients, so the result is deterministic. It passes
// over blocks of 64 keys; each block meets every later block of 48 queries of every query head of the group:
//   P = exp(scale Q K^T - lse)    dP = dO V^T    dS = scale P (dP - delta)    delta = sum(dO O)
//   dV += P^T dO                  dK += dS^T Q   dQ += dS K
// Scores above a soft cap c are c tanh(scale Q K^T / c), and dS has the slope of that.
// Where the machine multiplies pairs of bfloat16, the operands of bfloat16 tensors stay in it (P and dS are rounded to
// it); else they are widened. Sums are float32. All five products are one routine: the left operand is read by single
// values (or pairs of neighbours along the summed dimension) and may lie transposed; the right operand holds, for each
// value or pair of the summed dimension, the columns side by side.
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
constexpr long kStrip = 6;  // query rows whose scores are in the cache at once; even, so that no pair is cut

struct Float32 {
  typedef float element;
  static constexpr long inner = 1;  // values of the summed dimension in one step
  typedef v16f right, left;
  static inline __attribute__((always_inline)) right load_right(const float* p) { return load(p); }
  static inline __attribute__((always_inline)) left load_left(const float* p) { return splat(*p); }
  static inline __attribute__((always_inline)) v16f multiply_add(v16f acc, left a, right b) { return acc + a * b; }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  typedef bf16 element;
  static constexpr long inner = 2;
  typedef __m512bh right, left;
  static inline __attribute__((always_inline)) right load_right(const bf16* p) {
    return (__m512bh)_mm512_loadu_si512(p);
  }
  static inline __attribute__((always_inline)) left load_left(const bf16* p) {
    int pair;
    memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static inline __attribute__((always_inline)) v16f multiply_add(v16f acc, left a, right b) {
    return (v16f)_mm512_dpbf16_ps((__m512)acc, a, b);
  }
};
#else
typedef Float32 Bfloat16;
#endif

// What tensors of an element type are multiplied in.
template <typename T>
struct Operands {
  typedef Float32 type;
};
template <>
struct Operands<bf16> {
  typedef Bfloat16 type;
};

// Element (r, step) of a left operand is data[r * row + step * column], and its neighbours where a step has several.
template <typename Type>
struct Left {
  const typename Type::element* data;
  long row, column;
};

template <typename Type, int Rows, int Vectors>
RK_INLINE void multiply_tile(Left<Type> a, const typename Type::element* b, long b_row, float* c, long c_row, long steps,
                             bool accumulate) {
  v16f acc[Rows][Vectors] = {};
  if (accumulate)
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) acc[r][v] = load(c + r * c_row + 16 * v);
  for (long k = 0; k < steps; k++) {
    typename Type::right right[Vectors];
    for (int v = 0; v < Vectors; v++) right[v] = Type::load_right(b + k * b_row + 16 * Type::inner * v);
    for (int r = 0; r < Rows; r++) {
      const typename Type::left left = Type::load_left(a.data + r * a.row + k * a.column);
      for (int v = 0; v < Vectors; v++) acc[r][v] = Type::multiply_add(acc[r][v], left, right[v]);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) store(c + r * c_row + 16 * v, acc[r][v]);
}

template <typename Type, int Vectors>
void multiply_rows(Left<Type> a, long rows, const typename Type::element* b, long b_row, float* c, long c_row, long steps,
                   bool accumulate) {
  const auto from = [&](long r) { return Left<Type>{a.data + r * a.row, a.row, a.column}; };
  long r = 0;
  for (; r + kRows <= rows; r += kRows)
    multiply_tile<Type, kRows, Vectors>(from(r), b, b_row, c + r * c_row, c_row, steps, accumulate);
  for (; r + 2 <= rows; r += 2)
    multiply_tile<Type, 2, Vectors>(from(r), b, b_row, c + r * c_row, c_row, steps, accumulate);
  if (r < rows) multiply_tile<Type, 1, Vectors>(from(r), b, b_row, c + r * c_row, c_row, steps, accumulate);
}

// c[rows, columns] (+)= a[rows, steps] @ b[steps, columns]; columns is a multiple of 16, b_row is that of a step.
template <typename Type>
void multiply(Left<Type> a, long rows, const typename Type::element* b, long b_row, long columns, float* c, long c_row,
              long steps, bool accumulate) {
  long n = 0;
  const auto next = [&](auto vectors) {
    multiply_rows<Type, vectors>(a, rows, b + n * Type::inner, b_row, c + n, c_row, steps, accumulate);
    n += 16 * vectors;
  };
  while (n + 16 * kVectors <= columns) next(std::integral_constant<int, kVectors>());
  if (kVectors == 4 && n + 48 <= columns) next(std::integral_constant<int, 3>());
  if (n + 32 <= columns) next(std::integral_constant<int, 2>());
  if (n < columns) next(std::integral_constant<int, 1>());
}

struct Arguments {
  const void *grad, *q, *k, *v, *out;
  const float* lse;
  const int* query_start;
  long q_row, k_row, v_row;  // strides in elements; heads are head_dim apart
  long num_q_heads, num_kv_heads, head_dim, padded_dim;
  float scale, soft_cap;  // a soft cap of 0: none
  long window;            // keys that a query sees at most, its own included
  void *grad_q, *grad_k, *grad_v;
};

constexpr long in_pairs(long rows) { return (rows + 1) / 2 * 2; }

// Of an even number of rows, and of padded_dim columns unless said otherwise. "Pairs" lie as right operands do: for each
// two rows their values alternate, column by column; where a step has one value they are the rows as they are, and the
// buffer stays empty.
template <typename Type>
struct Scratch {
  typedef typename Type::element element;
  std::vector<element> q, grad, q_pairs, grad_pairs;             // [group, length]
  std::vector<float> grad_q, delta;                              // [group, length], delta without columns
  std::vector<element> keys, key_pairs;                          // [kKeys]
  std::vector<element> keys_across, values_across;               // [padded_dim / inner, kKeys, inner]
  std::vector<float> grad_k, grad_v;                             // [kKeys]
  std::vector<element> probability_pairs, score_pairs, scores;   // [kQueries, kKeys]
  float strip[kStrip * kKeys], grad_strip[kStrip * kKeys];

  void reserve(long group, long length, long dim) {
    const long rows = group * in_pairs(length);
    for (auto* buffer : {&q, &grad}) buffer->assign(rows * dim, 0);
    for (auto* buffer : {&keys, &keys_across, &values_across}) buffer->assign(kKeys * dim, 0);
    if (Type::inner == 2) {
      for (auto* buffer : {&q_pairs, &grad_pairs}) buffer->assign(rows * dim, 0);
      key_pairs.assign(kKeys * dim, 0);
      scores.assign(kQueries * kKeys, 0);
    }
    for (auto* buffer : {&grad_k, &grad_v}) buffer->assign(kKeys * dim, 0.0f);
    for (auto* buffer : {&probability_pairs, &score_pairs}) buffer->assign(kQueries * kKeys, 0);
    grad_q.assign(rows * dim, 0.0f);
    delta.assign(rows, 0.0f);
  }
  const element* paired(const std::vector<element>& rows, const std::vector<element>& pairs) const {
    return (Type::inner == 2 ? pairs : rows).data();
  }
};

template <typename T, typename E>
void unpack(const T* source, long size, E* target) {
  for (long i = 0; i < size; i += 16) store_lanes(target + i, load_lanes(source + i, size - i), size - i);
}
void pair_rows(const float*, long, long, float*) {}
#if defined(__AVX512BF16__)
void unpack(const bf16* source, long size, bf16* target) { memcpy(target, source, size * sizeof(bf16)); }

// Two vectors of float32 as bfloat16, their lanes alternating.
RK_INLINE void store_pairs(bf16* target, v16f even, v16f odd) {
  const v16u low = __builtin_convertvector(to_bf16(even), v16u), high = __builtin_convertvector(to_bf16(odd), v16u);
  const v16u pairs = low | (high << 16);
  memcpy(target, &pairs, sizeof pairs);
}

void pair_rows(const bf16* rows, long count, long dim, bf16* pairs) {
  for (long r = 0; r < count; r += 2)
    for (long d = 0; d < dim; d += 16)
      store_pairs(pairs + r * dim + 2 * d, load(rows + r * dim + d), load(rows + (r + 1) * dim + d));
}
#endif

// Keys and values of one block, zeros past the end of the sequence.
template <typename T, typename Type>
void load_keys(const Arguments& a, long first_token, long count, long head, Scratch<Type>& s) {
  typedef typename Type::element element;
  constexpr long inner = Type::inner;
  const long dim = a.padded_dim;
  for (auto* buffer : {&s.keys, &s.keys_across, &s.values_across}) std::fill(buffer->begin(), buffer->end(), 0);
  std::vector<element> value(dim, 0);
  for (long j = 0; j < count; j++) {
    const long token = first_token + j;
    element* key = s.keys.data() + j * dim;
    unpack((const T*)a.k + token * a.k_row + head * a.head_dim, a.head_dim, key);
    unpack((const T*)a.v + token * a.v_row + head * a.head_dim, a.head_dim, value.data());
    for (long d = 0; d < dim; d += inner) {
      memcpy(s.keys_across.data() + d * kKeys + j * inner, key + d, inner * sizeof(element));
      memcpy(s.values_across.data() + d * kKeys + j * inner, value.data() + d, inner * sizeof(element));
    }
  }
  pair_rows(s.keys.data(), kKeys, dim, s.key_pairs.data());
}

// tanh, to about 1e-7.
RK_INLINE v16f vtanh(v16f x) {
  const v16f magnitude = (v16f)((v16u)x & 0x7fffffffu);
  const v16f e = vexp(-2.0f * magnitude);
  return (v16f)((v16u)((1.0f - e) / (1.0f + e)) | ((v16u)x & 0x80000000u));
}

// P and dS of one row: query `query` sees keys up to its own index, `window` of them.
struct Row {
  v16f probability, grad_score;
};
RK_INLINE Row softmax_backward(const Arguments& a, v16f score, v16f grad, float lse, float delta, long query,
                               long first_key) {
  const long last = query - first_key, hidden = last - a.window;  // lanes up to here
  v16i visible = (v16i)(kLaneIndex <= (int)last);
  if (hidden >= 0) visible &= (v16i)(kLaneIndex > (int)hidden);
  v16f scaled = score * a.scale, slope = splat(a.scale);
  if (a.soft_cap > 0) {
    const v16f capped = vtanh(scaled / a.soft_cap);
    scaled = a.soft_cap * capped;
    slope *= 1.0f - capped * capped;
  }
  const v16f p = vexp(scaled - lse);
  return {select(visible, p, v16f{}), select(visible, p * (grad - delta) * slope, v16f{})};
}

RK_INLINE void store_row_pair(Scratch<Float32>& s, long row, long column, Row even, Row odd) {
  const long place = row * kKeys + column;
  store(s.probability_pairs.data() + place, even.probability);
  store(s.probability_pairs.data() + place + kKeys, odd.probability);
  store(s.score_pairs.data() + place, even.grad_score);
  store(s.score_pairs.data() + place + kKeys, odd.grad_score);
}
#if defined(__AVX512BF16__)
RK_INLINE void store_row_pair(Scratch<Bfloat16>& s, long row, long column, Row even, Row odd) {
  const long place = row * kKeys + column, pairs = row * kKeys + 2 * column;
  store_pairs(s.probability_pairs.data() + pairs, even.probability, odd.probability);
  store_pairs(s.score_pairs.data() + pairs, even.grad_score, odd.grad_score);
  store(s.scores.data() + place, even.grad_score);
  store(s.scores.data() + place + kKeys, odd.grad_score);
}
#endif

template <typename T, typename Type>
void load_queries(const Arguments& a, long start, long length, long first_head, long group, Scratch<Type>& s) {
  const long rows = in_pairs(length), dim = a.padded_dim;
  for (long g = 0; g < group; g++) {
    for (long i = 0; i < length; i++) {
      const long row = g * rows + i, head = first_head + g;
      const long packed = ((start + i) * a.num_q_heads + head) * a.head_dim;
      unpack((const T*)a.q + (start + i) * a.q_row + head * a.head_dim, a.head_dim, s.q.data() + row * dim);
      unpack((const T*)a.grad + packed, a.head_dim, s.grad.data() + row * dim);
      v16f sum = {};
      for (long d = 0; d < a.head_dim; d += 16)
        sum += load_lanes((const T*)a.out + packed + d, a.head_dim - d) * load(s.grad.data() + row * dim + d);
      s.delta[row] = horizontal_sum(sum);
    }
    pair_rows(s.q.data() + g * rows * dim, rows, dim, s.q_pairs.data() + g * rows * dim);
    pair_rows(s.grad.data() + g * rows * dim, rows, dim, s.grad_pairs.data() + g * rows * dim);
  }
}

template <typename T>
void store_rows(const float* source, long padded_dim, void* target, long first, long row_stride, long rows, long size) {
  for (long i = 0; i < rows; i++)
    for (long d = 0; d < size; d += 16)
      store_lanes((T*)target + first + i * row_stride + d, load(source + i * padded_dim + d), size - d);
}

// A block of queries of one head, whose rows begin at `offset` in the scratch, against the block of keys that is loaded.
template <typename Type>
void backward_block(const Arguments& a, Scratch<Type>& s, long offset, const float* lse, long first, long rows,
                    long first_key, long num_keys) {
  constexpr long inner = Type::inner;
  const long dim = a.padded_dim, steps = dim / inner;
  const long keys = std::min(num_keys, first + rows - first_key), columns = (keys + 15) / 16 * 16;
  for (long r = 0; r < rows; r += kStrip) {
    const long strip_rows = std::min(kStrip, rows - r), place = (offset + first + r) * dim;
    const long seen = std::min((first + r + strip_rows - first_key + 15) / 16 * 16, columns);
    multiply<Type>({s.q.data() + place, dim, inner}, strip_rows, s.keys_across.data(), kKeys * inner, seen, s.strip,
                   kKeys, steps, false);
    multiply<Type>({s.grad.data() + place, dim, inner}, strip_rows, s.values_across.data(), kKeys * inner, seen,
                   s.grad_strip, kKeys, steps, false);
    for (long i = 0; i < strip_rows; i += 2) {
      const long query = first + r + i;
      for (long j = 0; j < seen; j += 16) {
        Row pair[2] = {};
        for (long n = 0; n < 2 && i + n < strip_rows; n++)
          pair[n] = softmax_backward(a, load(s.strip + (i + n) * kKeys + j), load(s.grad_strip + (i + n) * kKeys + j),
                                     lse[(query + n) * a.num_q_heads], s.delta[offset + query + n], query + n,
                                     first_key + j);
        store_row_pair(s, r + i, j, pair[0], pair[1]);
      }
      for (long j = seen; j < columns; j += 16) store_row_pair(s, r + i, j, Row{}, Row{});
    }
  }
  const long place = (offset + first) * dim, row_steps = (rows + inner - 1) / inner;
  multiply<Type>({s.probability_pairs.data(), inner, kKeys * inner}, keys, s.paired(s.grad, s.grad_pairs) + place,
                 dim * inner, dim, s.grad_v.data(), dim, row_steps, true);
  multiply<Type>({s.score_pairs.data(), inner, kKeys * inner}, keys, s.paired(s.q, s.q_pairs) + place, dim * inner, dim,
                 s.grad_k.data(), dim, row_steps, true);
  multiply<Type>({s.paired(s.score_pairs, s.scores), kKeys, inner}, rows, s.paired(s.keys, s.key_pairs), dim * inner, dim,
                 s.grad_q.data() + place, dim, (keys + inner - 1) / inner, true);
}

template <typename T, typename Type>
void backward_item(const Arguments& a, long sequence, long kv_head, Scratch<Type>& s) {
  const long group = a.num_q_heads / a.num_kv_heads, dim = a.padded_dim;
  const long start = a.query_start[sequence], length = a.query_start[sequence + 1] - start, rows = in_pairs(length);
  s.reserve(group, length, dim);
  load_queries<T>(a, start, length, kv_head * group, group, s);
  for (long first_key = 0; first_key < length; first_key += kKeys) {
    const long num_keys = std::min(kKeys, length - first_key);
    load_keys<T>(a, start + first_key, num_keys, kv_head, s);
    std::fill(s.grad_k.begin(), s.grad_k.end(), 0.0f);
    std::fill(s.grad_v.begin(), s.grad_v.end(), 0.0f);
    // Queries behind these do not see any of the keys.
    const long end = a.window < length ? std::min(length, in_pairs(first_key + num_keys - 1 + a.window)) : length;
    for (long g = 0; g < group; g++)
      for (long first = first_key; first < end; first += kQueries)
        backward_block(a, s, g * rows, a.lse + start * a.num_q_heads + kv_head * group + g, first,
                       std::min(kQueries, end - first), first_key, num_keys);
    const long row = a.num_kv_heads * a.head_dim, offset = (start + first_key) * row + kv_head * a.head_dim;
    store_rows<T>(s.grad_k.data(), dim, a.grad_k, offset, row, num_keys, a.head_dim);
    store_rows<T>(s.grad_v.data(), dim, a.grad_v, offset, row, num_keys, a.head_dim);
  }
  for (long g = 0; g < group; g++) {
    const long row = a.num_q_heads * a.head_dim;
    store_rows<T>(s.grad_q.data() + g * rows * dim, dim, a.grad_q, start * row + (kv_head * group + g) * a.head_dim, row,
                  length, a.head_dim);
  }
}

}  // namespace

// grad, out and the results are contiguous; q, k and v have rows `*_row` elements apart. lse is [tokens, num_q_heads]. A
// `window` of 0 and a `soft_cap` of 0 stand for none.
extern "C" void rk_attention_backward(const void* grad, const void* q, long q_row, const void* k, long k_row,
                                      const void* v, long v_row, const void* out, const float* lse, int dtype,
                                      const int* query_start, long num_seqs, long num_q_heads, long num_kv_heads,
                                      long head_dim, float scale, long window, float soft_cap, void* grad_q,
                                      void* grad_k, void* grad_v) {
  const Arguments a = {grad, q, k, v, out, lse, query_start, q_row, k_row, v_row, num_q_heads, num_kv_heads, head_dim,
                       (head_dim + 15) / 16 * 16, scale, soft_cap, window > 0 ? window : __LONG_MAX__ / 2,
                       grad_q, grad_k, grad_v};
  const long items = num_seqs * num_kv_heads;
  with_dtype(dtype, [&](auto* p) {
    typedef RK_ELEMENT(p) T;
    parallel_items(items, 1, true, [&](Items& queue) {
      Scratch<typename Operands<T>::type> scratch;
      for (long i, end; queue.take(&i, &end);) backward_item<T>(a, i / num_kv_heads, i % num_kv_heads, scratch);
    });
  });
}

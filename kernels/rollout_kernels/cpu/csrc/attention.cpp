// Causal attention of any mix of prefill chunks and decodes over a paged KV cache.
//
// A query meets its keys in groups of 64 that start at fixed absolute positions (`attention_rows.h`), so that its result
// depends on its own keys alone: prefill, chunked prefill and decode agree bit for bit whatever the block size. Sequences
// whose block tables begin alike are processed together: a group of keys that they share is read once for all of their
// queries, each of which goes through the same groups in the same order as it would alone.
#include <algorithm>
#include <vector>

#include "attention_on_tiles.h"
#include "attention_rows.h"
#include "kernels.h"
#include "threads.h"

namespace {

constexpr int kItemRows = 48;      // query rows that pass over a group of keys while it is in the processor's cache
constexpr int kLeastRows = 12;     // items with fewer rows than this are not split to occupy the threads
constexpr int kItemsAThread = 6;
constexpr int kItemHeads = 4;      // heads of the keys, at most, that an item of few rows processes side by side

// Consecutive queries of a sequence. `shared`: how many groups of keys, from the first on, are those of the part before.
struct Part {
  int sequence, first_query, num_queries;
  long shared;
};

// Neighbouring parts that are processed together, for some heads of the keys.
struct Item {
  int first_head, num_heads, first_part, num_parts;
  long work;
};

// A group of keys for the rows of some parts of an item.
struct Visit {
  int sequence;
  long group;
  int first_row, end_row;
  long lowest, highest;  // positions of these rows
};

long num_queries(const Arguments& a, int sequence) { return a.query_start[sequence + 1] - a.query_start[sequence]; }
long group_size(const Arguments& a) { return a.num_q_heads / a.num_kv_heads; }

// Absolute position of a part's first query.
long first_position(const Arguments& a, const Part& part) {
  return a.seq_lens[part.sequence] - num_queries(a, part.sequence) + part.first_query;
}

// The first key that a query at `position` sees.
long first_seen(const Arguments& a, long position) { return position + 1 > a.window ? position + 1 - a.window : 0; }

long first_group(const Arguments& a, const Part& part) { return first_seen(a, first_position(a, part)) / kGroup; }
long end_group(const Arguments& a, const Part& part) {
  return (first_position(a, part) + part.num_queries - 1) / kGroup + 1;
}

// Keys of a sequence that stand where its block table says: all but, perhaps, the last.
long keys_in_place(const Arguments& a, int sequence) { return a.seq_lens[sequence] - has_other_last(a, sequence); }

// Groups that two sequences have in common: whole ones, from the first on, in the very same blocks.
long shared_groups(const Arguments& a, int one, int other) {
  const long keys = std::min(keys_in_place(a, one), keys_in_place(a, other));
  const int* left = a.block_tables + one * a.block_table_stride;
  const int* right = a.block_tables + other * a.block_table_stride;
  const long blocks = keys / a.block_size;
  const long same = std::mismatch(left, left + blocks, right).first - left;
  return same * a.block_size / kGroup;
}

// Whether one sequence comes before the other, in an order that puts those with the same first blocks side by side.
bool table_before(const Arguments& a, int one, int other) {
  const long blocks = a.seq_lens[one] / a.block_size, other_blocks = a.seq_lens[other] / a.block_size;
  const int order = memcmp(a.block_tables + one * a.block_table_stride, a.block_tables + other * a.block_table_stride,
                           std::min(blocks, other_blocks) * sizeof(int));
  if (order != 0) return order < 0;
  return blocks != other_blocks ? blocks < other_blocks : one < other;
}

// The work of all sequences in parts: those with few rows, sorted so that neighbours share; then the others, in pieces.
std::vector<Part> make_parts(const Arguments& a) {
  const long queries_per_part = std::max(kItemRows / group_size(a), 1L);
  std::vector<int> small;
  std::vector<Part> parts, pieces;
  for (int s = 0; s < a.num_seqs; s++) {
    const long queries = num_queries(a, s);
    if (queries > 0 && 2 * queries <= queries_per_part) {
      small.push_back(s);
      continue;
    }
    for (long first = 0; first < queries; first += queries_per_part)
      pieces.push_back({s, (int)first, (int)std::min(queries - first, queries_per_part), 0});
  }
  std::sort(small.begin(), small.end(), [&](int one, int other) { return table_before(a, one, other); });
  for (size_t i = 0; i < small.size(); i++)
    parts.push_back({small[i], 0, (int)num_queries(a, small[i]), i > 0 ? shared_groups(a, small[i - 1], small[i]) : 0});
  parts.insert(parts.end(), pieces.begin(), pieces.end());
  return parts;
}

// The items, made for one head, for all of them. Sequences with few rows have several heads side by side where that leaves
// enough items for the threads: a row alone waits for its own maximum, and heads of a block lie one after another.
std::vector<Item> over_heads(const Arguments& a, const std::vector<Part>& parts, const std::vector<Item>& items) {
  const bool enough = (long)items.size() >= kItemsAThread * num_threads();
  std::vector<Item> all;
  // Heads outermost: neighbouring items find the keys that they share in the processor's cache.
  for (int h = 0; h < a.num_kv_heads; h++)
    for (Item item : items) {
      const bool few_rows = 2 * parts[item.first_part].num_queries * group_size(a) <= kItemRows;
      const int width = enough && few_rows ? kItemHeads : 1;
      if (h % width) continue;
      item.first_head = h;
      item.num_heads = (int)std::min((long)width, a.num_kv_heads - h);
      all.push_back(item);
    }
  return all;
}

// Parts that share groups together, up to `kItemRows` rows, but not so many that threads would have nothing to do.
std::vector<Item> make_items(const Arguments& a, const std::vector<Part>& parts) {
  auto rows_of = [&](const Part& part) { return part.num_queries * group_size(a); };
  auto work_of = [&](const Part& part) { return rows_of(part) * (end_group(a, part) - first_group(a, part)); };
  long total = 0;
  for (const Part& part : parts) total += work_of(part) * a.num_kv_heads;
  const long limit = total / (kItemsAThread * num_threads());

  std::vector<Item> items;
  long rows = 0;
  for (size_t i = 0; i < parts.size(); i++) {
    const Part& part = parts[i];
    const bool full = rows + rows_of(part) > kItemRows;
    if (i == 0 || part.shared == 0 || full || (rows >= kLeastRows && items.back().work + work_of(part) > limit)) {
      items.push_back({0, 1, (int)i, 0, 0});
      rows = 0;
    }
    rows += rows_of(part);
    items.back().num_parts++;
    items.back().work += work_of(part);
  }
  // The longest first, so that the threads end at the same time.
  std::stable_sort(items.begin(), items.end(), [](const Item& x, const Item& y) { return x.work > y.work; });
  return over_heads(a, parts, items);
}

template <typename Type, typename Cached>
class Worker {
 public:
  Worker(const Arguments& a, const std::vector<Part>& parts, long max_rows, int max_heads)
      : a_(a), parts_(parts), positions_(max_rows), places_(max_rows) {
    heads_.reserve(max_heads);
    for (int h = 0; h < max_heads; h++) heads_.emplace_back(max_rows, a.padded_dim);
  }

  void attend(const Item& item) {
    num_heads_ = item.num_heads;
    for (int h = 0; h < num_heads_; h++) heads_[h].kv_head = item.first_head + h;
    visits_.clear();
    first_rows_.assign(1, 0);
    for (int p = 0; p < item.num_parts; p++) begin_part(parts_[item.first_part + p]);
    plan(item, 0, item.num_parts, 0);
    for (size_t i = 0; i < visits_.size(); i++) visit(visits_[i], i + 1 < visits_.size() ? &visits_[i + 1] : nullptr);
    for (int h = 0; h < num_heads_; h++)
      for (int row = 0; row < first_rows_.back(); row++) finish_row(heads_[h], row);
  }

 private:
  typedef typename Type::element element;

  // A head of the keys: its group at hand, and the rows that meet it.
  struct Head {
    int kv_head = 0;
    TileBuffers<Type, Cached> buffers;
    Group<Type> group;
    Rows<Type> rows;
    Head(long max_rows, long padded_dim) : buffers(padded_dim), rows(max_rows, padded_dim) {}
  };

  void begin_part(const Part& part) {
    const long size = group_size(a_);
    const int first = first_rows_.back(), end = first + (int)(part.num_queries * size);
    const long token = a_.query_start[part.sequence] + part.first_query;
    for (int row = first; row < end; row++) {
      positions_[row] = first_position(a_, part) + (row - first) / size;
      places_[row] = (token + (row - first) / size) * a_.num_q_heads + (row - first) % size;
    }
    for (int h = 0; h < num_heads_; h++) begin_rows(heads_[h], first, end, token);
    first_rows_.push_back(end);
  }

  void begin_rows(Head& head, int first, int end, long token) {
    const long size = group_size(a_);
    Rows<Type>& rows = head.rows;
    for (int row = first; row < end; row++) {
      const int r = row - first;
      const element* source = (const element*)a_.q + (token + r / size) * a_.q_row_stride +
                              (head.kv_head * size + r % size) * a_.head_dim;
      element* target = rows.q.data() + row * a_.padded_dim;
      memcpy(target, source, a_.head_dim * sizeof(element));
      memset(target + a_.head_dim, 0, (a_.padded_dim - a_.head_dim) * sizeof(element));
      rows.maximum[row] = kNothingSeen;
    }
    memset(rows.total.data() + first * kTile, 0, (end - first) * kTile * sizeof(float));
    memset(rows.out.data() + first * a_.padded_dim, 0, (end - first) * a_.padded_dim * sizeof(float));
  }

  // Visits for parts `begin` to `end` of the item, which share every group before `group`: what they share further on
  // together, and then the parts that no longer do by themselves.
  void plan(const Item& item, int begin, int end, long group) {
    const Part* parts = parts_.data() + item.first_part;
    long common = end_group(a_, parts[begin]), first = first_group(a_, parts[begin]);
    for (int p = begin + 1; p < end; p++) {
      common = std::min(common, parts[p].shared);
      first = std::min(first, first_group(a_, parts[p]));
    }
    const auto rows = positions_.begin() + first_rows_[begin], rows_end = positions_.begin() + first_rows_[end];
    const auto [lowest, highest] = std::minmax_element(rows, rows_end);
    for (long g = std::max(group, first); g < common; g++)
      visits_.push_back({parts[begin].sequence, g, first_rows_[begin], first_rows_[end], *lowest, *highest});
    if (end - begin == 1) return;
    for (int p = begin, next; p < end; p = next) {
      for (next = p + 1; next < end && parts[next].shared > common;) next++;
      plan(item, p, next, common);
    }
  }

  void visit(const Visit& now, const Visit* next) {
    const long first_key = now.group * kGroup;
    const bool whole = now.lowest + 1 >= first_key + kGroup && first_seen(a_, now.highest) <= first_key;
    const int tiles = (int)std::min((now.highest - first_key) / kTile + 1, (long)kGroupTiles);
    int first = now.first_row, end = now.end_row;
    while (!whole && first < end && !sees(first, first_key)) first++;
    while (!whole && first < end && !sees(end - 1, first_key)) end--;
    for (int h = 0; h < num_heads_; h++) {
      Head& head = heads_[h];
      locate_group<Type, Cached>(a_, now.sequence, head.kv_head, first_key, first_seen(a_, now.lowest), tiles,
                                 head.buffers, head.group);
      if (next) announce_group<Type, Cached>(a_, next->sequence, head.kv_head, next->group * kGroup, head.group);
    }
    switch (a_.padded_dim) {
      case 64: attend_heads<64>(first_key, first, end, tiles, whole); break;
      case 128: attend_heads<128>(first_key, first, end, tiles, whole); break;
      default: attend_heads<0>(first_key, first, end, tiles, whole);
    }
  }

  bool sees(int row, long first_key) const { return span(row, first_key).first < span(row, first_key).end; }

  // What the row sees of the group at `first_key`.
  Span span(int row, long first_key) const {
    const long position = positions_[row];
    return {(int)std::clamp(first_seen(a_, position) - first_key, 0L, (long)kGroup),
            (int)std::clamp(position + 1 - first_key, 0L, (long)kGroup)};
  }

  // Heads side by side where their rows are few, else one after another.
  template <int Dim>
  void attend_heads(long first_key, int first, int end, int tiles, bool whole) {
    const int together = (end - first) * num_heads_ <= kBatchRows ? num_heads_ : 1;
    for (int h = 0; h < num_heads_; h += together)
      for (int row = first; row < end; row += kBatchRows)
        attend_rows<Dim>(h, h + together, first_key, row, std::min(row + kBatchRows, end), tiles, whole);
  }

  template <int Dim>
  void attend_rows(int first_head, int end_head, long first_key, int first, int end, int tiles, bool whole) {
    const bool adjusted = a_.soft_cap > 0 || a_.key_scales;
    const float scale = (a_.soft_cap > 0 ? 1.0f : a_.scale) * kLog2e;
    for (int h = first_head; h < end_head; h++) {
      heads_[h].rows.begin_batch(first);
      score<Dim>(heads_[h], first, end, tiles);
    }
    for (int row = first; row < end && (adjusted || !whole); row++) {
      const Span seen = span(row, first_key);
      if (adjusted || seen.first > 0 || seen.end < kGroup)
        for (int h = first_head; h < end_head; h++)
          adjust_scores(a_, heads_[h].group, heads_[h].rows.scores(row), seen);
    }
    for (int h = first_head; h < end_head; h++) raise_maxima(heads_[h].rows, first, end, scale);
    for (int h = first_head; h < end_head; h++)
      weigh_scores(heads_[h].group, heads_[h].rows, first, end, scale, a_.value_scales != nullptr);
    for (int h = first_head; h < end_head; h++) add_values<Dim>(heads_[h], first, end, tiles);
  }

  template <int Dim>
  void score(Head& head, int first, int end, int tiles) {
#if defined(RK_TILES)
    if constexpr (kMayUseTiles)
      if (uses_tiles_) return score_rows_on_tiles(head.group, head.rows, first, end, a_.padded_dim, tiles);
#endif
    multiply_rows<Type, Dim, false>(head.group, head.rows, first, end, a_.padded_dim, tiles);
  }

  template <int Dim>
  void add_values(Head& head, int first, int end, int tiles) {
#if defined(RK_TILES)
    if constexpr (kMayUseTiles)
      if (uses_tiles_)
        return add_values_on_tiles(head.group, head.rows, first, end, a_.padded_dim, tiles, spare_.data());
#endif
    multiply_rows<Type, Dim, true>(head.group, head.rows, first, end, a_.padded_dim, tiles);
  }

  void finish_row(Head& head, int row) {
    Rows<Type>& rows = head.rows;
    const long place = places_[row] + head.kv_head * group_size(a_);
    const float total = horizontal_sum(load(rows.total.data() + row * kTile)), inverse = 1.0f / total;
    const float* source = rows.out.data() + row * a_.padded_dim;
    element* target = (element*)a_.out + place * a_.head_dim;
    long d = 0;
    for (; d + kTile <= a_.head_dim; d += kTile) store(target + d, load(source + d) * inverse);
    if (d < a_.head_dim) store_partial(target + d, load(source + d) * inverse, a_.head_dim - d);
    if (a_.lse) a_.lse[place] = rows.maximum[row] * kLn2 + slog(total);
  }

  const Arguments& a_;
  const std::vector<Part>& parts_;
#if defined(RK_TILES)
  static constexpr bool kMayUseTiles = std::is_same_v<Type, Bfloat16>;
  const bool uses_tiles_ = kMayUseTiles && has_tiles() && a_.padded_dim % 32 == 0;
  Buffer<float> spare_{kTile * a_.padded_dim};
  TileRegisters registers_{kAttentionTiles};
#endif
  std::vector<Head> heads_;
  int num_heads_ = 0;                     // of the item
  std::vector<long> positions_, places_;  // of each row: its query's position, and token * heads + its place in the group
  std::vector<int> first_rows_;           // of each part of the item, and the end of the last
  std::vector<Visit> visits_;
};

template <typename Type, typename Cached>
void attend(const Arguments& a) {
  const std::vector<Part> parts = make_parts(a);
  const std::vector<Item> items = make_items(a, parts);
  const long max_rows = std::max((long)kItemRows, group_size(a));
  int max_heads = 1;
  for (const Item& item : items) max_heads = std::max(max_heads, item.num_heads);
  parallel_items((long)items.size(), 1, true, [&](Items& queue) {
    Worker<Type, Cached> worker(a, parts, max_rows, max_heads);
    for (long i, end; queue.take(&i, &end);) worker.attend(items[i]);
  });
}

}  // namespace

// `dtype` of q and the output, `kv_dtype` of the cache: the same, or int8 with scales [tiles, Hkv, 16]. A `window` of 0 and
// a `soft_cap` of 0 stand for none.
extern "C" void rk_paged_attention(const void* q, long q_row_stride, const void* k_cache, const void* v_cache,
                                   const float* key_scales, const float* value_scales, int dtype, int kv_dtype,
                                   const int* block_tables, long block_table_stride, const int* query_start,
                                   const int* seq_lens, const int* last_places, long num_seqs, long num_q_heads,
                                   long num_kv_heads, long head_dim, long block_size, float scale, long window, float soft_cap, void* out, float* lse) {
  Arguments a = {};
  a.q = (const char*)q;
  a.q_row_stride = q_row_stride;
  a.k_cache = (const char*)k_cache;
  a.v_cache = (const char*)v_cache;
  a.key_scales = key_scales;
  a.value_scales = value_scales;
  a.block_tables = block_tables;
  a.block_table_stride = block_table_stride;
  a.query_start = query_start;
  a.seq_lens = seq_lens;
  a.last_places = last_places;
  a.num_seqs = num_seqs;
  a.num_q_heads = num_q_heads;
  a.num_kv_heads = num_kv_heads;
  a.head_dim = head_dim;
  a.padded_dim = (head_dim + kTile - 1) / kTile * kTile;
  a.block_size = block_size;
  a.tiles_per_block = (block_size + kTile - 1) / kTile;
  a.scale = scale;
  a.window = window > 0 ? window : __LONG_MAX__;
  a.soft_cap = soft_cap;
  a.out = (char*)out;
  a.lse = lse;
  const bool quantised = kv_dtype == RK_INT8;
  if (dtype == RK_BFLOAT16)
    quantised ? attend<Bfloat16, int8_t>(a) : attend<Bfloat16, bf16>(a);
  else
    quantised ? attend<Float32, int8_t>(a) : attend<Float32, float>(a);
}

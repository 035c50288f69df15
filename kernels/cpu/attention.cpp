// Paged attention: prefill chunks and decode in one call.
//
//   item = (request, kv head, query tile, spans of the context)
//   rows of an item = query tile x the heads that share the kv head
//
// The context is cut at multiples of kTileSlots (widened to float32, scored, summed) and of
// kSpanSlots. Every span has a softmax of its own and spans are merged in order, so it does not
// matter to the result which thread took which span, nor what else is in the batch.
#include <omp.h>

#include <vector>

#include "cache.h"
#include "scratch.h"
#include "softmax.h"
#include "tile.h"

namespace girih {
namespace {

constexpr int kSpanSlots = 512;  // a multiple of kTileSlots
constexpr int kTileRows = 96;    // rows of an item, about

struct Item {
  int request, head;       // kv head
  int first, count;        // queries of the request
  int begin, end;          // context positions that any of its rows may see
  long cost;
  long partial;            // offset of its spans' partial results, or -1: one thread does it all
};

struct SpanTask {
  int item, span;  // span -1: all spans, and the output
};

// Working memory of one thread, for items of up to `rows` rows.
struct Workspace {
  float *queries, *keys, *values, *scores, *sums, *merged;
  RowState *state, *merged_state;

  static size_t floats(int rows, int dim, int dim_v) {
    return (size_t)rows * dim + (size_t)kTileSlots * (dim + dim_v) + kMaxRows * kTileSlots +
           2 * (size_t)rows * dim_v + 4 * (size_t)rows + 64;
  }
  Workspace(float* memory, int rows, int dim, int dim_v) {
    auto take = [&](size_t count) {
      float* here = memory;
      memory += count;
      return here;
    };
    keys = take((size_t)kTileSlots * dim);
    values = take((size_t)kTileSlots * dim_v);
    scores = take(kMaxRows * kTileSlots);
    queries = take((size_t)rows * dim);
    sums = take((size_t)rows * dim_v);
    merged = take((size_t)rows * dim_v);
    state = (RowState*)take(2 * (size_t)rows);
    merged_state = (RowState*)take(2 * (size_t)rows);
  }
};

template <class T>
class Attention {
 public:
  explicit Attention(const AttentionArgs& args)
      : a_(args), group_(args.heads / args.kv_heads), wide_v_(round_up(args.dim_v, kLanes)) {}

  int rows(const Item& item) const { return item.count * group_; }
  int value_stride() const { return wide_v_; }
  int tile_queries() const { return std::max(1, kTileRows / group_); }
  size_t partial_floats(const Item& item) const {
    return (size_t)rows(item) * (wide_v_ + 2) * spans(item);
  }
  static int spans(const Item& item) {
    return (item.end + kSpanSlots - 1) / kSpanSlots - item.begin / kSpanSlots;
  }

  void write_token(int t) const {
    int64_t slot = a_.slots[t];
    if (slot < 0) return zero_row(t);
    for (int h = 0; h < a_.kv_heads; ++h)
      write_slot(a_, h, slot, (const T*)a_.k + t * a_.k_token + h * a_.k_head,
                 (const T*)a_.v + t * a_.v_token + h * a_.v_head);
  }

  void zero_row(int t) const {
    for (int h = 0; h < a_.heads; ++h)
      std::memset((T*)a_.out + t * a_.out_token + h * a_.out_head, 0, sizeof(T) * a_.dim_v);
  }

  // All spans of an item, then its output.
  void run_whole(const Item& item, Workspace& w) const {
    load_queries(item, w);
    clear(w.merged_state, w.merged, rows(item));
    for (int span = 0; span < spans(item); ++span) {
      run_span(item, span, w.state, w.sums, w);
      merge(rows(item), w.state, w.sums, w);
    }
    finish(item, w);
  }

  // One span of a split item to its partial result.
  void run_part(const Item& item, int span, float* partials, Workspace& w) const {
    load_queries(item, w);
    float* sums = partial_sums(item, span, partials);
    run_span(item, span, (RowState*)(sums + (size_t)rows(item) * wide_v_), sums, w);
  }

  void merge_parts(const Item& item, float* partials, Workspace& w) const {
    clear(w.merged_state, w.merged, rows(item));
    for (int span = 0; span < spans(item); ++span) {
      float* sums = partial_sums(item, span, partials);
      merge(rows(item), (RowState*)(sums + (size_t)rows(item) * wide_v_), sums, w);
    }
    finish(item, w);
  }

 private:
  const AttentionArgs& a_;
  const int group_;
  const int wide_v_;

  float* partial_sums(const Item& item, int span, float* partials) const {
    return partials + item.partial + (size_t)span * rows(item) * (wide_v_ + 2);
  }

  // Position in the context of the item's query `i`.
  int position(const Item& item, int i) const {
    int queries = a_.query_start[item.request + 1] - a_.query_start[item.request];
    return a_.seq_lens[item.request] - queries + item.first + i;
  }

  void load_queries(const Item& item, Workspace& w) const {
    long token = a_.query_start[item.request] + item.first;
    for (int i = 0; i < item.count; ++i) {
      for (int g = 0; g < group_; ++g) {
        const T* from =
            (const T*)a_.q + (token + i) * a_.q_token + (item.head * group_ + g) * a_.q_head;
        float* to = w.queries + (size_t)(i * group_ + g) * a_.dim;
        for (int d = 0; d < a_.dim; d += 8) {
          float wide[16];
          if constexpr (kLanes == 8)
            store(wide, load(from + d));
          else
            store(wide, load_some(from + d, 8));
          for (int j = 0; j < 8; ++j) to[d + j] = wide[j] * a_.scale;
        }
      }
    }
  }

  void clear(RowState* state, float* sums, int count) const {
    for (int r = 0; r < count; ++r) state[r] = {kNegInf, 0.0f};
    std::memset(sums, 0, sizeof(float) * count * wide_v_);
  }

  void run_span(const Item& item, int span, RowState* state, float* sums, Workspace& w) const {
    clear(state, sums, rows(item));
    int base = (item.begin / kSpanSlots + span) * kSpanSlots;
    int stop = std::min(item.end, base + kSpanSlots);
    const int32_t* table = a_.block_table + item.request * a_.table_stride;
    int start = std::max(item.begin, base) / kTileSlots * kTileSlots;
    for (int tile = start; tile < stop; tile += kTileSlots) {
      widen_tile<T>(a_, table, item.head, tile, std::max(0, item.begin - tile),
                    std::min(kTileSlots, stop - tile), w.keys, w.values, wide_v_);
      for_row_tiles(rows(item), [&](int row, int height) {
        with_rows(height, [&]<int M>() { tile_rows<M>(item, tile, row, state, sums, w); });
      });
    }
  }

  // Rows [row, row + M) against the widened tile.
  template <int M>
  void tile_rows(const Item& item, int tile, int row, RowState* state, float* sums,
                 Workspace& w) const {
    // What the first and the last row see bounds what all rows see.
    auto [begin, unused] = visible(item, tile, row);
    auto [unused2, end] = visible(item, tile, row + M - 1);
    if (begin >= end) return;
    const int columns = round_up(end, 2 * kLanes);
    const float* queries = w.queries + (size_t)row * a_.dim;
    for (int c = begin / (2 * kLanes) * (2 * kLanes); c < columns; c += 2 * kLanes) {
      Tile<M, 2> scores;
      scores.clear();
      scores.accumulate(queries, a_.dim, w.keys + c, kTileSlots, a_.dim);
      scores.write(w.scores + c, kTileSlots);
    }
    const int skipped = begin / (2 * kLanes) * (2 * kLanes);
    for (int m = 0; m < M; ++m) {
      auto [from, to] = visible(item, tile, row + m);
      float factor = softmax_row(w.scores + m * kTileSlots + skipped, columns - skipped,
                                 from - skipped, to - skipped, a_.softcap, state[row + m]);
      if (factor != 1.0f) scale(sums + (size_t)(row + m) * wide_v_, factor);
    }
    int d = 0;
    for (; d + 2 * kLanes <= wide_v_; d += 2 * kLanes) add_values<M, 2>(row, d, begin, end, sums, w);
    if (d < wide_v_) add_values<M, 1>(row, d, begin, end, sums, w);
  }

  template <int M, int NV>
  void add_values(int row, int d, int begin, int end, float* sums, Workspace& w) const {
    Tile<M, NV> tile;
    float* to = sums + (size_t)row * wide_v_ + d;
    tile.read(to, wide_v_);
    tile.accumulate(w.scores + begin, kTileSlots, w.values + (long)begin * wide_v_ + d, wide_v_,
                    end - begin);
    tile.write(to, wide_v_);
  }

  // Slots [first, second) of the tile that a row of the item sees.
  std::pair<int, int> visible(const Item& item, int tile, int row) const {
    int at = position(item, row / group_);
    int begin = a_.window ? std::max(0, at - a_.window + 1) : 0;
    int end = a_.causal ? at + 1 : a_.seq_lens[item.request];
    return {std::max(0, begin - tile), std::min(kTileSlots, end - tile)};
  }

  void scale(float* row, float factor) const {
    for (int d = 0; d < wide_v_; d += kLanes) store(row + d, load(row + d) * factor);
  }

  // Adds a span's result to the merged one.
  void merge(int count, const RowState* state, const float* sums, Workspace& w) const {
    for (int r = 0; r < count; ++r) {
      if (state[r].largest == kNegInf) continue;
      RowState& to = w.merged_state[r];
      float best = std::max(to.largest, state[r].largest);
      float before = to.largest == kNegInf ? 0.0f : exp_one(to.largest - best);
      float now = exp_one(state[r].largest - best);
      to = {best, to.sum * before + state[r].sum * now};
      float* row = w.merged + (size_t)r * wide_v_;
      const float* add = sums + (size_t)r * wide_v_;
      for (int d = 0; d < wide_v_; d += kLanes)
        store(row + d, load(row + d) * before + load(add + d) * now);
    }
  }

  // Divides by the softmax sum (with the sink's share) and writes the output rows.
  void finish(const Item& item, Workspace& w) const {
    long token = a_.query_start[item.request] + item.first;
    for (int i = 0; i < item.count; ++i) {
      if (a_.slots[token + i] < 0) continue;
      for (int g = 0; g < group_; ++g) {
        int r = i * group_ + g, head = item.head * group_ + g;
        RowState s = w.merged_state[r];
        float factor = 1.0f;
        if (a_.sinks && s.largest != kNegInf) {
          float best = std::max(s.largest, a_.sinks[head]);
          factor = exp_one(s.largest - best);
          s.sum = s.sum * factor + exp_one(a_.sinks[head] - best);
        }
        factor = s.sum > 0 ? factor / s.sum : 0.0f;
        const float* row = w.merged + (size_t)r * wide_v_;
        T* to = (T*)a_.out + (token + i) * a_.out_token + head * a_.out_head;
        for (int d = 0; d < a_.dim_v; d += kLanes) {
          vf value = load(row + d) * factor;
          if (d + kLanes <= a_.dim_v)
            store(to + d, value);
          else
            store_some(to + d, value, a_.dim_v - d);
        }
      }
    }
  }
};

// Work of a step: items, and which of them are split by span, the largest first.
struct Work {
  std::vector<Item> items;
  std::vector<SpanTask> tasks;
  std::vector<int> split;
  size_t partial_floats = 0;
  int max_rows = 0;
};

void add_items(const AttentionArgs& a, int request, int tile_queries, Work& work) {
  int queries = a.query_start[request + 1] - a.query_start[request];
  int length = a.seq_lens[request], before = length - queries;
  for (int first = 0; first < queries; first += tile_queries) {
    int count = std::min(tile_queries, queries - first);
    int begin = a.window ? std::max(0, before + first - a.window + 1) : 0;
    int end = a.causal ? before + first + count : length;
    for (int head = 0; head < a.kv_heads; ++head)
      work.items.push_back({request, head, first, count, begin, end, (long)count * (end - begin), -1});
  }
}

template <class T>
void plan(const AttentionArgs& a, const Attention<T>& kernel, int threads, Work& work) {
  work.items.clear();
  work.tasks.clear();
  work.split.clear();
  work.partial_floats = 0;
  work.max_rows = 0;
  for (int r = 0; r < a.requests; ++r) add_items(a, r, kernel.tile_queries(), work);
  long total = 0;
  for (const Item& item : work.items) total += item.cost;
  std::vector<Item>& items = work.items;
  std::sort(items.begin(), items.end(), [](const Item& x, const Item& y) { return x.cost > y.cost; });
  for (int i = 0; i < (int)items.size(); ++i) {
    Item& item = items[i];
    work.max_rows = std::max(work.max_rows, kernel.rows(item));
    // An item larger than half a thread's share would leave the others waiting.
    if (threads == 1 || item.cost * 2 * threads <= total || kernel.spans(item) == 1) {
      work.tasks.push_back({i, -1});
      continue;
    }
    item.partial = (long)work.partial_floats;
    work.partial_floats += kernel.partial_floats(item);
    work.split.push_back(i);
    for (int span = 0; span < kernel.spans(item); ++span) work.tasks.push_back({i, span});
  }
}

thread_local Work own_work;
thread_local Scratch own_workspace;
thread_local Scratch shared_partials;

template <class T>
void run(const AttentionArgs& a) {
  Attention<T> kernel(a);
  Work& work = own_work;
  plan(a, kernel, omp_get_max_threads(), work);
  float* partials = shared_partials.floats(work.partial_floats);
  const int tasks = (int)work.tasks.size(), split = (int)work.split.size();
#pragma omp parallel
  {
    const int rows = work.max_rows, dim_v = kernel.value_stride();
    Workspace w(own_workspace.floats(Workspace::floats(rows, a.dim, dim_v)), rows, a.dim, dim_v);
#pragma omp for schedule(static)
    for (int t = 0; t < a.tokens; ++t) {
      kernel.write_token(t);
      if (t >= a.query_start[a.requests]) kernel.zero_row(t);
    }
#pragma omp for schedule(dynamic)
    for (int i = 0; i < tasks; ++i) {
      const SpanTask& task = work.tasks[i];
      const Item& item = work.items[task.item];
      if (task.span < 0)
        kernel.run_whole(item, w);
      else
        kernel.run_part(item, task.span, partials, w);
    }
    if (split > 0) {
#pragma omp for schedule(dynamic)
      for (int i = 0; i < split; ++i)
        kernel.merge_parts(work.items[work.split[i]], partials, w);
    }
  }
}

}  // namespace

void paged_attention(DType dtype, const AttentionArgs& args) {
  if (dtype == DType::bfloat16)
    run<bf16>(args);
  else if (dtype == DType::float16)
    run<f16>(args);
  else
    run<float>(args);
}

}  // namespace girih

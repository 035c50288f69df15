// Paged attention: prefill chunks and decode in one call.
//
//   item = (request, kv head, query tile); its rows = query tile x heads that share the kv head
//   span = 512 positions of the context; tile = 64 positions, widened to float32 at a time
//
// Every span has a softmax of its own and spans are merged in order, so it does not matter to the
// result which thread took which span, how a prompt was cut into chunks, nor what else is in the
// batch.
#include <omp.h>

#include <vector>

#include "amx_attention.h"
#include "attention_few.h"
#include "scratch.h"

namespace girih {
namespace {

constexpr int kItemRows = 96;  // rows of an item, about

struct SpanTask {
  int item, span;  // span -1: all spans, and the output
};

// Work of a call: items, and the tasks that threads take, the largest first.
struct Work {
  std::vector<Item> items;
  std::vector<SpanTask> tasks;
  std::vector<int> split;  // items whose spans are tasks of their own
  size_t partial_floats;
  int max_rows;
};

thread_local Scratch amx_memory;

// T: of queries and outputs; C: of the caches.
template <class T, class C>
class Attention {
 public:
  explicit Attention(const AttentionArgs& args) : a_(args), rows_(args) {
#ifdef GIRIH_AMX
    amx_ = kCanUseAmx && bf16_products == Products::amx && AmxSpan::fits(args);
#endif
  }

  const Rows& rows() const { return rows_; }
  size_t partial_floats(const Item& item) const { return span_floats(item) * item.spans(); }

  void write_token(int t) const {
    int64_t slot = a_.slots[t];
    if (slot >= 0) {
      for (int h = 0; h < a_.kv_heads; ++h)
        write_slot<T, C>(a_, h, slot, (const T*)a_.k + t * a_.k_token + h * a_.k_head,
                         (const T*)a_.v + t * a_.v_token + h * a_.v_head);
    }
    if (slot >= 0 && t < a_.query_start[a_.requests]) return;
    for (int h = 0; h < a_.heads; ++h)
      std::memset((T*)a_.out + t * a_.out_token + h * a_.out_head, 0, sizeof(T) * a_.dim_v);
  }

  // All spans of an item, then its output.
  void run_whole(const Item& item, Workspace& w) const {
    load_queries(item, w);
    rows_.clear(w.merged_state, w.merged, rows_.count(item));
    for (int span = 0; span < item.spans(); ++span) {
      run_span(item, span, w.state, w.sums, w);
      rows_.merge(rows_.count(item), w.state, w.sums, w);
    }
    finish(item, w);
  }

  // One span of a split item to its partial result.
  void run_part(const Item& item, int span, float* partials, Workspace& w) const {
    load_queries(item, w);
    float* sums = partials + item.partial + span * span_floats(item);
    run_span(item, span, partial_state(item, sums), sums, w);
  }

  void merge_parts(const Item& item, float* partials, Workspace& w) const {
    rows_.clear(w.merged_state, w.merged, rows_.count(item));
    for (int span = 0; span < item.spans(); ++span) {
      float* sums = partials + item.partial + span * span_floats(item);
      rows_.merge(rows_.count(item), partial_state(item, sums), sums, w);
    }
    finish(item, w);
  }

 private:
  static constexpr bool kCanUseAmx = std::is_same_v<C, bf16>;
  const AttentionArgs& a_;
  const Rows rows_;
  bool amx_ = false;

  size_t span_floats(const Item& item) const {
    return (size_t)rows_.count(item) * (rows_.value_stride() + 2);
  }

  RowState* partial_state(const Item& item, float* sums) const {
    return (RowState*)(sums + (size_t)rows_.count(item) * rows_.value_stride());
  }

  void load_queries(const Item& item, Workspace& w) const {
    long token = a_.query_start[item.request] + item.first;
    float* to = w.queries;
    for (int i = 0; i < item.count; ++i) {
      for (int g = 0; g < rows_.group(); ++g, to += a_.dim) {
        int head = item.head * rows_.group() + g;
        const T* from = (const T*)a_.q + (token + i) * a_.q_token + head * a_.q_head;
#ifdef GIRIH_AMX
        if constexpr (kCanUseAmx) {
          const int row = i * rows_.group() + g;
          if (amx_) AmxSpan::copy_query((char*)w.queries, from, row, rows_.count(item), a_.dim);
          if (amx_) continue;
        }
#endif
        for (int d = 0; d < a_.dim; d += kLanes) {
          int count = std::min(kLanes, a_.dim - d);
          if (count == kLanes)
            store(to + d, load(from + d) * a_.scale);
          else
            store_some(to + d, load_some(from + d, count) * a_.scale, count);
        }
      }
    }
  }

  void run_span(const Item& item, int span, RowState* state, float* sums, Workspace& w) const {
    rows_.clear(state, sums, rows_.count(item));
    int base = (item.begin / kSpanSlots + span) * kSpanSlots;
    int stop = std::min(item.end, base + kSpanSlots);
    Context<C> context{a_, a_.block_table + item.request * a_.table_stride, item.head};
#ifdef GIRIH_AMX
    if constexpr (kCanUseAmx) {
      if (amx_) return AmxSpan(rows_, item, context, base, amx_memory).run((char*)w.queries, state, sums);
    }
#endif
    int start = std::max(item.begin, base) / kTileSlots * kTileSlots;
    for (int tile = start; tile < stop; tile += kTileSlots) {
      const int begin = std::max(0, item.begin - tile), end = std::min(kTileSlots, stop - tile);
      if constexpr (is_quantised<C>)
        load_scales(context, tile, begin, end, w.key_scales, w.value_scales);
      // Only bfloat16 and int8 are worth the compile time of kernels of their own.
      if constexpr (std::is_same_v<C, bf16> || is_quantised<C>) {
        if (few_rows_fit(a_, rows_.count(item))) {
          add_tile_few(item, context, tile, state, sums, w);
          continue;
        }
      }
      widen_tile(context, tile, begin, end, w.keys, w.values);
      rows_.add_tile(item, tile, state, sums, w);
    }
  }

  void add_tile_few(const Item& item, const Context<C>& context, int tile, RowState* state,
                    float* sums, Workspace& w) const {
    const int height = rows_.count(item);
    FewKernels<C> kernels = few_kernels<C>(height);
    auto [begin, end] = rows_.visible(item, tile, 0, height);
    if (begin >= end) return;
    kernels.score(context, tile, begin, end, w.queries, w.scores);
    rows_.scale(w.scores, w.key_scales, height, begin, end);
    rows_.weigh(item, tile, 0, height, state, sums, w);
    rows_.scale(w.scores, w.value_scales, height, begin, end);
    kernels.add(context, tile, begin, end, item.end, w.scores, sums, rows_.value_stride());
  }

  // The softmax sum of a row with its sink's share, as a factor on the merged sums.
  float final_factor(RowState s, int head) const {
    float factor = 1.0f;
    if (a_.sinks && s.largest != kNegInf) {
      float best = std::max(s.largest, a_.sinks[head]);
      factor = exp_one(s.largest - best);
      s.sum = s.sum * factor + exp_one(a_.sinks[head] - best);
    }
    return s.sum > 0 ? factor / s.sum : 0.0f;
  }

  void finish(const Item& item, Workspace& w) const {
    long token = a_.query_start[item.request] + item.first;
    for (int r = 0; r < rows_.count(item); ++r) {
      int head = item.head * rows_.group() + r % rows_.group();
      long t = token + r / rows_.group();
      if (a_.slots[t] < 0) continue;
      float factor = final_factor(w.merged_state[r], head);
      const float* row = w.merged + (size_t)r * rows_.value_stride();
      T* to = (T*)a_.out + t * a_.out_token + head * a_.out_head;
      for (int d = 0; d < a_.dim_v; d += kLanes) {
        vf value = load(row + d) * factor;
        if (d + kLanes <= a_.dim_v)
          store(to + d, value);
        else
          store_some(to + d, value, a_.dim_v - d);
      }
    }
  }
};

void add_items(const AttentionArgs& a, int request, int tile_queries, Work& work) {
  int queries = a.query_start[request + 1] - a.query_start[request];
  int length = a.seq_lens[request], before = length - queries;
  for (int first = 0; first < queries; first += tile_queries) {
    int count = std::min(tile_queries, queries - first);
    int begin = a.window ? std::max(0, before + first - a.window + 1) : 0;
    int end = a.causal ? before + first + count : length;
    long cost = (long)count * (end - begin);
    for (int head = 0; head < a.kv_heads; ++head)
      work.items.push_back({request, head, first, count, begin, end, cost, -1});
  }
}

template <class T, class C>
void plan(const AttentionArgs& a, const Attention<T, C>& kernel, int threads, Work& work) {
  work.items.clear();
  work.tasks.clear();
  work.split.clear();
  work.partial_floats = 0;
  work.max_rows = 0;
  int tile_queries = std::max(1, kItemRows / kernel.rows().group());
  for (int r = 0; r < a.requests; ++r) add_items(a, r, tile_queries, work);
  std::vector<Item>& items = work.items;
  std::sort(items.begin(), items.end(),
            [](const Item& x, const Item& y) { return x.cost > y.cost; });
  long total = 0;
  for (const Item& item : items) total += item.cost;
  for (int i = 0; i < (int)items.size(); ++i) {
    Item& item = items[i];
    work.max_rows = std::max(work.max_rows, kernel.rows().count(item));
    // An item larger than half a thread's share would leave the others waiting.
    if (threads == 1 || item.cost * 2 * threads <= total || item.spans() == 1) {
      work.tasks.push_back({i, -1});
      continue;
    }
    item.partial = (long)work.partial_floats;
    work.partial_floats += kernel.partial_floats(item);
    work.split.push_back(i);
    for (int span = 0; span < item.spans(); ++span) work.tasks.push_back({i, span});
  }
}

thread_local Work own_work;
thread_local Scratch own_workspace;
thread_local Scratch shared_partials;

template <class T, class C>
void run(const AttentionArgs& a) {
  Attention<T, C> kernel(a);
  Work& work = own_work;
  plan(a, kernel, omp_get_max_threads(), work);
  float* partials = shared_partials.floats(work.partial_floats);
  const int tasks = (int)work.tasks.size(), split = (int)work.split.size();
#pragma omp parallel
  {
    const int rows = work.max_rows, dim_v = kernel.rows().value_stride();
    Workspace w(own_workspace.floats(Workspace::floats(rows, a.dim, dim_v)), rows, a.dim, dim_v);
#pragma omp for schedule(static)
    for (int t = 0; t < a.tokens; ++t) kernel.write_token(t);
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

template <class T>
void run(const AttentionArgs& a) {
  if (a.quantised)
    run<T, int8_t>(a);
  else
    run<T, T>(a);
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

// The float32 part of attention: rows of one item against widened tiles of its context.
#pragma once

#include <algorithm>
#include <utility>

#include "cache.h"
#include "softmax.h"
#include "tile.h"

namespace girih {

constexpr int kSpanSlots = 512;  // a multiple of kTileSlots

// A query tile of one request and the query heads that share one kv head.
struct Item {
  int request, head;  // kv head
  int first, count;   // queries of the request
  int begin, end;     // context positions that any of its rows may see
  long cost;
  long partial;       // offset of its spans' partial results, or -1: one thread does it all

  int spans() const { return (end + kSpanSlots - 1) / kSpanSlots - begin / kSpanSlots; }
};

// Working memory of one thread, for items of up to `rows` rows.
struct Workspace {
  float *queries, *keys, *values, *scores, *sums, *merged;
  float *key_scales, *value_scales;  // of the tile's slots, for int8 caches
  RowState *state, *merged_state;

  static size_t floats(int rows, int dim, int dim_v) {
    return (size_t)rows * dim + (size_t)kTileSlots * (dim + dim_v + 2) + kMaxRows * kTileSlots +
           2 * (size_t)rows * dim_v + 4 * (size_t)rows;
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
    key_scales = take(kTileSlots);
    value_scales = take(kTileSlots);
    queries = take((size_t)rows * dim);
    sums = take((size_t)rows * dim_v);
    merged = take((size_t)rows * dim_v);
    state = (RowState*)take(2 * (size_t)rows);
    merged_state = (RowState*)take(2 * (size_t)rows);
  }
};

class Rows {
 public:
  explicit Rows(const AttentionArgs& args)
      : a_(args), group_(args.heads / args.kv_heads), wide_v_(round_up(args.dim_v, kPanel)) {}

  int group() const { return group_; }
  int value_stride() const { return wide_v_; }
  int count(const Item& item) const { return item.count * group_; }

  void clear(RowState* state, float* sums, int count) const {
    for (int r = 0; r < count; ++r) state[r] = {kNegInf, 0.0f};
    std::memset(sums, 0, sizeof(float) * count * wide_v_);
  }

  // All rows of the item against the widened tile that starts at context position `tile`.
  void add_tile(const Item& item, int tile, RowState* state, float* sums, Workspace& w) const {
    for_row_tiles(count(item), [&](int row, int height) {
      auto [begin, end] = visible(item, tile, row, height);
      if (begin >= end) return;
      score(row, height, begin, end, w);
      scale(w.scores, w.key_scales, height, begin, end);
      weigh(item, tile, row, height, state, sums, w);
      scale(w.scores, w.value_scales, height, begin, end);
      add_values(row, height, begin, end, sums, w);
    });
  }

  // Products with int8 keys or values, slots [begin, end), take in the scales of the slots.
  void scale(float* columns, const float* scales, int height, int begin, int end) const {
    if (!a_.quantised) return;
    for (int m = 0; m < height; ++m, columns += kTileSlots)
      for (int s = begin / kLanes * kLanes; s < end; s += kLanes)
        store(columns + s, load(columns + s) * load(scales + s));
  }

  // Scores to softmax weights; what the rows summed before is brought to the new scale.
  void weigh(const Item& item, int tile, int row, int height, RowState* state, float* sums,
             Workspace& w) const {
    auto [begin, end] = visible(item, tile, row, height);
    int skipped = aligned(begin), columns = round_up(end, kPanel) - skipped;
    for (int m = 0; m < height; ++m) {
      auto [from, to] = visible(item, tile, row + m, 1);
      float factor = softmax_row(w.scores + m * kTileSlots + skipped, columns, from - skipped,
                                 to - skipped, a_.softcap, state[row + m]);
      if (factor == 1.0f) continue;
      float* sum = sums + (size_t)(row + m) * wide_v_;
      for (int d = 0; d < wide_v_; d += kLanes) store(sum + d, load(sum + d) * factor);
    }
  }

  // Slots [first, second) of the tile (or `size` others) that any of the rows [row, row + height) sees.
  std::pair<int, int> visible(const Item& item, int tile, int row, int height,
                              int size = kTileSlots) const {
    int queries = a_.query_start[item.request + 1] - a_.query_start[item.request];
    int before = a_.seq_lens[item.request] - queries + item.first;
    int first = before + row / group_, last = before + (row + height - 1) / group_;
    int begin = a_.window ? std::max(0, first - a_.window + 1) : 0;
    int end = a_.causal ? last + 1 : a_.seq_lens[item.request];
    return {std::max(0, begin - tile), std::min(size, end - tile)};
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

 private:
  const AttentionArgs& a_;
  const int group_, wide_v_;

  static int aligned(int column) { return column / kPanel * kPanel; }

  void score(int row, int height, int begin, int end, Workspace& w) const {
    MultiplyFn multiply = multiply_kernel(height);
    const float* queries = w.queries + (size_t)row * a_.dim;
    for (int c = aligned(begin); c < end; c += kPanel) {
      const float* panel = w.keys + (long)c * a_.dim;
      multiply(queries, a_.dim, panel, kPanel, a_.dim, w.scores + c, kTileSlots, false,
               {(const char*)panel, 0});
    }
  }

  void add_values(int row, int height, int begin, int end, float* sums, Workspace& w) const {
    MultiplyFn multiply = multiply_kernel(height);
    for (int d = 0; d < wide_v_; d += kPanel) {
      const float* panel = w.values + (long)d * kTileSlots + begin * kPanel;
      multiply(w.scores + begin, kTileSlots, panel, kPanel, end - begin,
               sums + (size_t)row * wide_v_ + d, wide_v_, true, {(const char*)panel, 0});
    }
  }
};

}  // namespace girih

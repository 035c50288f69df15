// One span of attention on AMX tiles: bfloat16 caches, heads of multiples of 32.
//
// Scores of 32 rows against the whole span, their softmax weights in bfloat16, then the values. Any
// number of rows takes this way, so that a row's bits do not depend on what is computed beside it.
#pragma once

#include "amx.h"

#ifdef GIRIH_AMX
#include "attention_rows.h"
#include "scratch.h"

namespace girih {

class AmxSpan {
 public:
  static bool fits(const AttentionArgs& a) { return a.dim % kAmxDepth == 0 && a.dim_v % kAmxDepth == 0; }

  // Copies query `row` of an item's `rows` to tiles [row tile][step of dim][height][64 bytes].
  static void copy_query(char* to, const bf16* from, int row, int rows, int dim) {
    const int height = std::min(rows, kAmxRows);
    to += (long)(row / height) * height * dim * 2 + row % height * 64;
    for (int d = 0; d < dim; d += kAmxDepth) std::memcpy(to + (long)d * 2 * height, from + d, 64);
  }

  AmxSpan(const Rows& rows, const Item& item, const Context<bf16>& context, int base,
          Scratch& memory)
      : rows_(rows), item_(item), context_(context), base_(base), count_(rows.count(item)),
        height_(std::min(count_, kAmxRows)), begin_(std::max(0, item.begin - base)),
        end_(std::min(kSpanSlots, item.end - base)) {
    scores_ = memory.floats(2 * kAmxRows * (kStride + kSpanSlots / 2) +
                            (size_t)kSpanSlots / 2 * context.a.dim_v);
    weights_ = (char*)(scores_ + 2 * kAmxRows * kStride);
    copies_ = weights_ + 2 * kAmxRows * kSpanSlots * 2;
    for (int s = begin_ / kAmxDepth * kAmxDepth; s < end_; s += kAmxDepth)
      values_[s / kAmxDepth] = place_values(s);
  }

  // Softmax states and sums (not yet divided) of the item's rows over this span.
  void run(const char* queries, RowState* state, float* sums) {
    AmxTiles tiles(height_);
    for (int row = 0; row < count_; row += 2 * height_) {
      const char* upper = queries + (long)row * context_.a.dim * 2;
      if (count_ - row > height_)
        add<true>(upper, row, std::min(2 * height_, count_ - row), state + row, sums);
      else
        add<false>(upper, row, count_ - row, state + row, sums);
    }
  }

 private:
  static constexpr int kStride = kSpanSlots + 16;  // of a row of scores: rows in different sets of L1

  const Rows& rows_;
  const Item& item_;
  const Context<bf16>& context_;
  const int base_, count_, height_;
  const int begin_, end_;  // slots of the span that may be read
  float* scores_;
  char *weights_, *copies_;  // weights: [row tile][step of slots][height][64 bytes]
  const char* values_[kSpanSlots / kAmxDepth];

  // Where the values of 32 slots from s on lie as one: in their block, or copied, zero where unread.
  const char* place_values(int s) const {
    const AttentionArgs& a = context_.a;
    const int size = a.block_size, position = base_ + s;
    if (s >= begin_ && s + kAmxDepth <= end_ && size % kAmxDepth == 0)
      return (const char*)(context_.values(position) + position % size * (long)a.dim_v);
    char* copy = copies_ + (long)s * a.dim_v * 2;
    std::memset(copy, 0, (size_t)kAmxDepth * a.dim_v * 2);
    for (int slot = std::max(s, begin_); slot < std::min(end_, s + kAmxDepth); ++slot) {
      const int offset = (base_ + slot) % size;
      const bf16* from =
          context_.values(base_ + slot) + (long)(offset / 2) * 2 * a.dim_v + offset % 2;
      bf16* to = (bf16*)copy + (long)((slot - s) / 2) * 2 * a.dim_v + slot % 2;
      for (int d = 0; d < a.dim_v; ++d) to[2 * d] = from[2 * d];
    }
    return copy;
  }

  template <bool Lower>
  void add(const char* upper, int row, int taken, RowState* state, float* sums) {
    auto [begin, end] = rows_.visible(item_, base_, row, taken, kSpanSlots);
    if (begin >= end) return;
    score<Lower>(upper, begin, end, row == 0);
    for (int m = 0; m < taken; ++m) weigh(m, row, begin, end, state[m]);
    add_values<Lower>(row, taken, begin, end, sums);
  }

  // Queries x keys of slots [begin, end), in groups of 16 that lie in one block.
  template <bool Lower>
  void score(const char* upper, int begin, int end, bool first) {
    const AttentionArgs& a = context_.a;
    const long stride = a.block_size * 4L, step = 16 * stride, row_step = height_ * 64;
    const char* lower = upper + (long)height_ * a.dim * 2;
    for (int c = begin / 16 * 16; c < end; c += 32) {
      const char* left = (const char*)context_.keys(base_ + c);
      const char* right = c + 16 < end ? (const char*)context_.keys(base_ + c + 16) : left;
      // The next groups, or the first values, come closer meanwhile.
      const char* next = nullptr;
      long apart = stride;
      if (first && c + 32 < end) next = (const char*)context_.keys(base_ + c + 32);
      if (first && c + 32 >= end) next = values_[begin / kAmxDepth], apart = 128;
      amx_clear<Lower>();
      for (int d = 0; d < a.dim / kAmxDepth; ++d) {
        for (int line = 0; next && line < 16; ++line) {
          _mm_prefetch(next + d * 16 * apart + line * apart, _MM_HINT_T0);
          _mm_prefetch(next + d * 16 * apart + line * apart + 64, _MM_HINT_T0);
        }
        amx_step<Lower>(upper + d * row_step, lower + d * row_step, left + d * step,
                        right + d * step, stride);
      }
      amx_store<Lower>(scores_ + c, scores_ + c + 16, (long)height_ * kStride, kStride * 4);
    }
  }

  // Scores of row m to softmax weights.
  void weigh(int m, int row, int begin, int end, RowState& state) {
    const int first = begin / kAmxDepth * kAmxDepth, columns = round_up(end, kAmxDepth) - first;
    auto [from, to] = rows_.visible(item_, base_, row + m, 1, kSpanSlots);
    float* scores = scores_ + (long)m * kStride + first;
    softmax_row(scores, columns, from - first, to - first, context_.a.softcap, state,
                context_.a.scale);
    char* weights = weights_ + ((long)m / height_ * kSpanSlots + first) * height_ * 2 +
                    m % height_ * 64;
    for (int c = 0; c < columns; c += kAmxDepth, weights += height_ * 64) {
      __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(scores + c + kLanes), (__m512)load(scores + c));
      std::memcpy(weights, &both, 64);
    }
  }

  // Weights x values.
  template <bool Lower>
  void add_values(int row, int taken, int begin, int end, float* sums) const {
    const int dim = context_.a.dim_v, first = begin / kAmxDepth, last = (end - 1) / kAmxDepth;
    const char* upper = weights_;
    const char* lower = weights_ + (long)kSpanSlots * height_ * 2;
    for (int d = 0; d < dim; d += 32) {
      amx_clear<Lower>();
      for (int s = first; s <= last; ++s) {
        if (row == 0 && d == 0 && s < last)
          for (int line = 0; line < dim; ++line)
            _mm_prefetch(values_[s + 1] + line * 64, _MM_HINT_T0);
        const long at = (long)s * height_ * 64;
        const char* left = values_[s] + d * 4;
        amx_step<Lower>(upper + at, lower + at, left, left + 64, dim * 4);
      }
      alignas(64) AmxSums tiles;
      amx_store<Lower>(tiles[0][0], tiles[0][1], 2 * kAmxRows * kAmxRows, 64);
      for (int m = 0; m < taken; ++m) {
        float* to = sums + (long)(row + m) * rows_.value_stride() + d;
        const auto& half = tiles[m / height_];
        store(to, load(half[0] + m % height_ * 16));
        store(to + 16, load(half[1] + m % height_ * 16));
      }
    }
  }
};

}  // namespace girih
#endif

// Few rows (decode): scores and sums straight from the cache, widened in registers.
//
// Every sum is the same chain of multiply-adds as in the widened path, so both give equal bits.
#pragma once

#include "attention_rows.h"

namespace girih {

constexpr int kGroup = 16;                  // slots of a score group, always within one block
constexpr int kGroupVectors = kGroup / kLanes;

// How many score groups, or pairs of value vectors, share a pass: more sums while rows are few.
template <int M>
constexpr int wide_factor() {
  return M <= kMaxRows / 2 ? 2 : 1;
}

// Scores of M rows against P groups of 16 slots; keys[p] is a group's first slot.
template <class T, int M, int P>
GIRIH_INLINE void score_groups(const float* queries, int dim, const T* const (&keys)[P], int size,
                               float* scores, const char* ahead, long ahead_bytes) {
  constexpr int kPair = std::is_same_v<T, bf16> ? 2 : 1;
  Tile<M, P * kGroupVectors> tile;
  tile.clear();
  const long share = ahead_bytes / (dim / 2);
  for (int d = 0; d < dim; d += 2, ahead += share) {
    for (long line = 0; line < share; line += 64) __builtin_prefetch(ahead + line);
#pragma GCC unroll 4
    for (int v = 0; v < P * kGroupVectors; ++v) {
      vf even, odd;
      load_key_pair(keys[v / kGroupVectors] + kPair * kLanes * (v % kGroupVectors), d, size, even,
                    odd);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        tile.sum[m][v] += splat(queries[m * dim + d]) * even;
        tile.sum[m][v] += splat(queries[m * dim + d + 1]) * odd;
      }
    }
  }
  tile.write(scores, kTileSlots);
}

// Adds weights x values over the tile's slots [begin, end) for NV vectors of dimensions from d on;
// the context continues up to position `limit`.
template <class T, int M, int NV>
GIRIH_INLINE void add_dimensions(const Context<T>& context, int tile_start, int begin, int end,
                                 int limit, const float* weights, int d, float* sums, int stride) {
  Tile<M, NV> tile;
  tile.read(sums + d, stride);
  const int dim = context.a.dim_v, dim_k = context.a.dim, size = context.a.block_size;
  for (int s = begin; s < end;) {
    const int position = tile_start + s;
    const T* block = context.values(position);
    // The next tile's keys come closer meanwhile (in the first pass over the slots).
    const char* ahead = nullptr;
    const long ahead_row = dim_k * (long)sizeof(T);
    if (d == 0 && position + kTileSlots < limit)
      ahead = (const char*)context.key_block(position + kTileSlots);
    const int stop = std::min(end, s + size - position % size);
    for (int offset = position % size; s < stop;) {
      // A slot outside [begin, end) may hold anything, so it must not enter even with weight 0.
      if (ahead)
        for (long line = 0; line < 2 * ahead_row; line += 64)
          __builtin_prefetch(ahead + offset * ahead_row + line);
      bool first = offset % 2 == 0, second = offset % 2 == 1 || s + 1 < end;
      const float* weight = weights + s - offset % 2;
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        vf even, odd;
        load_value_pair(block, offset / 2 * 2, d + v * kLanes, dim, even, odd);
        if (first)
          for (int m = 0; m < M; ++m) tile.sum[m][v] += splat(weight[m * kTileSlots]) * even;
        if (second)
          for (int m = 0; m < M; ++m) tile.sum[m][v] += splat(weight[m * kTileSlots + 1]) * odd;
      }
      int taken = 2 - offset % 2;
      s += taken;
      offset += taken;
    }
  }
  tile.write(sums + d, stride);
}

// The memory of `count` slots' values, which are needed right after their scores.
template <class T>
inline std::pair<const char*, long> values_of(const Context<T>& context, int position, int count) {
  const long row = context.a.dim_v * (long)sizeof(T);
  return {(const char*)context.values(position) + position % context.a.block_size * row,
          count * row};
}

template <class T, int M>
__attribute__((noinline)) void score_few(const Context<T>& context, int tile, int begin, int end,
                                         const float* queries, float* scores) {
  constexpr int P = wide_factor<M>();
  const int dim = context.a.dim, size = context.a.block_size;
  int s = begin / kGroup * kGroup;
  for (; s + (P - 1) * kGroup < end; s += P * kGroup) {
    const T* keys[P];
    for (int p = 0; p < P; ++p) keys[p] = context.keys(tile + s + p * kGroup);
    auto [ahead, bytes] = values_of(context, tile + s, P * kGroup);
    score_groups<T, M, P>(queries, dim, keys, size, scores + s, ahead, bytes);
  }
  for (; s < end; s += kGroup) {
    const T* keys[1] = {context.keys(tile + s)};
    auto [ahead, bytes] = values_of(context, tile + s, kGroup);
    score_groups<T, M, 1>(queries, dim, keys, size, scores + s, ahead, bytes);
  }
}

template <class T, int M>
__attribute__((noinline)) void add_few(const Context<T>& context, int tile, int begin, int end,
                                       int limit, const float* weights, float* sums, int stride) {
  constexpr int NV = 2 * wide_factor<M>();
  int d = 0;
  for (; d + NV * kLanes <= context.a.dim_v; d += NV * kLanes)
    add_dimensions<T, M, NV>(context, tile, begin, end, limit, weights, d, sums, stride);
  for (; d < context.a.dim_v; d += kLanes)
    add_dimensions<T, M, 1>(context, tile, begin, end, limit, weights, d, sums, stride);
}

// Both products for one number of rows.
template <class T>
struct FewKernels {
  void (*score)(const Context<T>&, int tile, int begin, int end, const float* queries,
                float* scores);
  void (*add)(const Context<T>&, int tile, int begin, int end, int limit,
              const float* weights, float* sums, int stride);
};

constexpr int kFewRows = 8 < kMaxRows ? 8 : kMaxRows;

template <class T, int... I>
constexpr FewKernels<T> few_kernels(int rows, std::integer_sequence<int, I...>) {
  constexpr FewKernels<T> all[] = {{score_few<T, I + 1>, add_few<T, I + 1>}...};
  return all[rows - 1];
}

inline bool few_rows_fit(const AttentionArgs& a, int rows) {
  return rows <= kFewRows && a.dim_v % kLanes == 0;
}

template <class T>
inline FewKernels<T> few_kernels(int rows) {
  return few_kernels<T>(rows, std::make_integer_sequence<int, kFewRows>());
}

}  // namespace girih

// The register tile of every matrix product here: M rows x NV vectors of float32 sums.
//
// Each sum is one chain over k in ascending order, whatever M and NV are, so an output element
// does not depend on which rows are computed beside it.
#pragma once

#include "lanes.h"

namespace girih {

// Memory to prefetch during a product: `step` bytes further per step of k.
struct Ahead {
  const char* from;
  long step;
};

template <int M, int NV>
struct Tile {
  vf sum[M][NV];

  GIRIH_INLINE void clear() {
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < NV; ++v) sum[m][v] = vf{};
  }
  GIRIH_INLINE void read(const float* c, long stride) {
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < NV; ++v) sum[m][v] = load(c + m * stride + v * kLanes);
  }
  GIRIH_INLINE void write(float* c, long stride) const {
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < NV; ++v) store(c + m * stride + v * kLanes, sum[m][v]);
  }
  // sum[m] += a[m] * b, one step of k.
  GIRIH_INLINE void step(const float* a, long a_stride, const vf (&b)[NV]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      vf x = splat(a[m * a_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) sum[m][v] += x * b[v];
    }
  }
  // sum += a [M, depth] * b [depth, NV vectors], both float32. Meanwhile `ahead` comes closer.
  GIRIH_INLINE void accumulate(const float* a, long a_stride, const float* b, long b_stride,
                               int depth, Ahead ahead) {
#pragma GCC unroll 4
    for (int k = 0; k < depth; ++k) {
      __builtin_prefetch(ahead.from);
      ahead.from += ahead.step;
      vf column[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) column[v] = load(b + k * b_stride + v * kLanes);
      step(a + k, a_stride, column);
    }
  }
};

// c [M, 2 vectors] = (or +=) a [M, depth] * b [depth, 2 vectors], all float32.
using MultiplyFn = void (*)(const float* a, long a_stride, const float* b, long b_stride, int depth,
                            float* c, long c_stride, bool add, Ahead ahead);

// The kernel for 1 … kMaxRows rows (compiled once, in tile.cpp).
MultiplyFn multiply_kernel(int rows);

// Splits `rows` into tiles of nearly equal height, at most kMaxRows: body(first, height).
template <class Body>
GIRIH_INLINE void for_row_tiles(int rows, const Body& body) {
  int tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int i = 0, first = 0; i < tiles; ++i) {
    int next = (int)((long)rows * (i + 1) / tiles);
    body(first, next - first);
    first = next;
  }
}

}  // namespace girih

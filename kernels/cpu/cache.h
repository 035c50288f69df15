// Reading and writing the paged KV cache (layout: kernels/kv_layout.py).
#pragma once

#include <algorithm>

#include "kernels.h"
#include "lanes.h"

namespace girih {

constexpr int kTileSlots = 64;  // slots of the context that are widened and used at a time

// One token's key [dim] and value [dim_v] of one head to its slot.
template <class T>
inline void write_slot(const AttentionArgs& a, int head, int64_t slot, const T* k, const T* v) {
  const int size = a.block_size;
  long block = slot / size * a.kv_heads + head;
  int offset = (int)(slot % size);
  T* key = (T*)a.key_cache + block * a.dim * size;
  T* value = (T*)a.value_cache + block * a.dim_v * size;
  if constexpr (std::is_same_v<T, bf16>) {
    for (int d = 0; d < a.dim; d += 2) std::memcpy(key + (long)d * size + 2 * offset, k + d, 4);
    T* pair = value + (long)(offset / 2) * 2 * a.dim_v + offset % 2;
    for (int d = 0; d < a.dim_v; ++d) pair[2 * d] = v[d];
  } else {
    for (int d = 0; d < a.dim; ++d) key[(long)d * size + offset] = k[d];
    std::memcpy(value + (long)offset * a.dim_v, v, sizeof(T) * a.dim_v);
  }
}

// `count` slots (rounded up to 16) of a block's keys, from `offset` on, to keys[d][slot].
template <class T>
inline void widen_keys(float* keys, const T* block, int dim, int size, int offset, int count) {
  if constexpr (std::is_same_v<T, bf16>) {
    for (int d = 0; d < dim; d += 2) {
      const bf16* from = block + (long)d * size + 2 * offset;
      float* to = keys + d * kTileSlots;
      for (int s = 0; s < count; s += kLanes) {
        vf even, odd;
        load_pairs(from + 2 * s, even, odd);
        store(to + s, even);
        store(to + kTileSlots + s, odd);
      }
    }
  } else {
    for (int d = 0; d < dim; ++d)
      for (int s = 0; s < count; s += kLanes)
        store(keys + d * kTileSlots + s, load(block + (long)d * size + offset + s));
  }
}

// Slots [offset, offset + count) of a block's values to values[slot][stride]; offset is even.
template <class T>
inline void widen_values(float* values, int stride, const T* block, int dim, int offset,
                         int count) {
  if constexpr (std::is_same_v<T, bf16>) {
    for (int s = 0; s < count; s += 2) {
      const bf16* from = block + (long)(offset + s) * dim;
      float* to = values + s * stride;
      for (int d = 0; d < dim; d += kLanes) {
        vf even, odd;
        if (d + kLanes <= dim) {
          load_pairs(from + 2 * d, even, odd);
        } else {
          bf16 rest[2 * kLanes] = {};
          std::memcpy(rest, from + 2 * d, 4 * (dim - d));
          load_pairs(rest, even, odd);
        }
        store(to + d, even);
        store(to + stride + d, odd);
      }
    }
  } else {
    for (int s = 0; s < count; ++s)
      widen(values + s * stride, block + (long)(offset + s) * dim, dim);
  }
}

// The part of a request's context that one tile covers, widened to float32.
//
// Only slots [begin, end) of the tile are read (relative to its start `first`); the block table is
// read for their blocks only. Keys and values of slots outside are left as they were.
template <class T>
inline void widen_tile(const AttentionArgs& a, const int32_t* table, int head, int first, int begin,
                       int end, float* keys, float* values, int value_stride) {
  const int size = a.block_size;
  for (int s = begin / 16 * 16; s < end;) {
    int position = first + s;
    int offset = position % size;
    int count = std::min(end - s, size - offset);
    long block = (long)table[position / size] * a.kv_heads + head;
    widen_keys(keys + s, (const T*)a.key_cache + block * a.dim * size, a.dim, size, offset, count);
    widen_values(values + s * value_stride, value_stride,
                 (const T*)a.value_cache + block * a.dim_v * size, a.dim_v, offset, count);
    s += count;
  }
}

}  // namespace girih

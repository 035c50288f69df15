// Reading and writing the paged KV cache (layout: kernels/kv_layout.py).
#pragma once

#include <algorithm>
#include <type_traits>

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

// Dimensions 2i and 2i+1 of kLanes neighbouring slots; `keys` points at the first slot's element 0.
GIRIH_INLINE void load_key_pair(const bf16* keys, int d, int size, vf& even, vf& odd) {
  load_pairs(keys + (long)d * size, even, odd);
}
template <class T>
GIRIH_INLINE void load_key_pair(const T* keys, int d, int size, vf& even, vf& odd) {
  even = load(keys + (long)d * size);
  odd = load(keys + (long)(d + 1) * size);
}

// Dimensions d … d + kLanes - 1 of slots s and s+1 (s even) of a block's values.
GIRIH_INLINE void load_value_pair(const bf16* block, int s, int d, int dim, vf& even, vf& odd) {
  load_pairs(block + (long)s * dim + 2 * d, even, odd);
}
template <class T>
GIRIH_INLINE void load_value_pair(const T* block, int s, int d, int dim, vf& even, vf& odd) {
  even = load(block + (long)s * dim + d);
  odd = load(block + (long)(s + 1) * dim + d);
}

// The block that holds a context position, for one kv head.
template <class T>
struct Context {
  const AttentionArgs& a;
  const int32_t* table;
  int head;

  long block(int position) const {
    return (long)table[position / a.block_size] * a.kv_heads + head;
  }
  // Slots of the position's block, then dimension 0 of the position itself.
  const T* keys(int position) const {
    constexpr int kPair = std::is_same_v<T, bf16> ? 2 : 1;
    return key_block(position) + kPair * (position % a.block_size);
  }
  const T* key_block(int position) const {
    return (const T*)a.key_cache + block(position) * a.dim * a.block_size;
  }
  const T* values(int position) const {
    return (const T*)a.value_cache + block(position) * a.dim_v * a.block_size;
  }
};

// Widened tiles are cut in panels two vectors wide, so that products read them in order:
//   keys [slots / kPanel][dim][kPanel]      values [dim_v / kPanel][slots][kPanel]
constexpr int kPanel = 2 * kLanes;

// Keys of 16 slots from context position `position` (a multiple of 16) to tile slots `slot`….
template <class T>
inline void widen_keys(const Context<T>& context, int position, int slot, float* keys) {
  const T* from = context.keys(position);
  for (int s = 0; s < 16; s += kLanes) {
    float* to = keys + (slot + s) / kPanel * kPanel * context.a.dim + (slot + s) % kPanel;
    for (int d = 0; d < context.a.dim; d += 2) {
      vf even, odd;
      load_key_pair(from + (std::is_same_v<T, bf16> ? 2 * s : s), d, context.a.block_size, even,
                    odd);
      store(to + d * kPanel, even);
      store(to + (d + 1) * kPanel, odd);
    }
  }
}

// Values of 16 slots, likewise. Slots that nobody wrote may come out as anything.
template <class T>
inline void widen_values(const Context<T>& context, int position, int slot, float* values) {
  const int dim = context.a.dim_v;
  const T* block = context.values(position);
  const int first = position % context.a.block_size;
  for (int d = 0; d < dim; d += kLanes) {
    float* to = values + d / kPanel * kPanel * kTileSlots + d % kPanel + slot * kPanel;
    for (int s = 0; s < 16; s += 2, to += 2 * kPanel) {
      vf even, odd;
      if (d + kLanes <= dim) {
        load_value_pair(block, first + s, d, dim, even, odd);
      } else if constexpr (std::is_same_v<T, bf16>) {
        bf16 rest[2 * kLanes] = {};
        std::memcpy(rest, block + (long)(first + s) * dim + 2 * d, 4 * (dim - d));
        load_pairs(rest, even, odd);
      } else {
        even = load_some(block + (long)(first + s) * dim + d, dim - d);
        odd = load_some(block + (long)(first + s + 1) * dim + d, dim - d);
      }
      store(to, even);
      store(to + kPanel, odd);
    }
  }
}

// Slots [begin, end) of the tile that starts at context position `first`, widened to float32; whole
// groups of 16 slots are read, all in blocks that hold a slot of the range.
template <class T>
inline void widen_tile(const Context<T>& context, int first, int begin, int end, float* keys,
                       float* values) {
  for (int s = begin / 16 * 16; s < end; s += 16) {
    widen_keys(context, first + s, s, keys);
    widen_values(context, first + s, s, values);
  }
}

}  // namespace girih

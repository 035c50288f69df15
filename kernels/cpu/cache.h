// Reading and writing the paged KV cache (layout: kernels/kv/layout.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "lanes.h"

namespace girih {

constexpr int kTileSlots = 64;  // slots of the context that are widened and used at a time

constexpr int kMaxHeadDim = 512;

template <class C>
constexpr bool is_quantised = std::is_same_v<C, int8_t>;

// Elements of a block of one head; in an int8 cache a float32 scale per slot follows them.
template <class C>
GIRIH_INLINE long block_elements(int dim, int size) {
  return (long)(is_quantised<C> ? dim + (int)sizeof(float) : dim) * size;
}

// Writes from[i] / scale, rounded, to to[i * step]; returns the scale, which maps the largest to 127.
template <class T>
inline float quantise(const T* from, int count, int8_t* to, long step) {
  float wide[kMaxHeadDim];
  widen(wide, from, count);
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(wide[i]));
  const float scale = largest / 127.0f;
  for (int i = 0; i < count; ++i) {
    float value = scale > 0.0f ? std::nearbyint(wide[i] / scale) : 0.0f;
    to[i * step] = (int8_t)std::min(127.0f, std::max(-127.0f, value));
  }
  return scale;
}

// One token's key [dim] and value [dim_v] of one head to its slot.
template <class T, class C>
inline void write_slot(const AttentionArgs& a, int head, int64_t slot, const T* k, const T* v) {
  const int size = a.block_size;
  long block = slot / size * a.kv_heads + head;
  int offset = (int)(slot % size);
  C* key = (C*)a.key_cache + block * block_elements<C>(a.dim, size);
  C* value = (C*)a.value_cache + block * block_elements<C>(a.dim_v, size);
  if constexpr (is_quantised<C>) {
    ((float*)(key + (long)a.dim * size))[offset] = quantise(k, a.dim, key + offset, size);
    ((float*)(value + (long)a.dim_v * size))[offset] =
        quantise(v, a.dim_v, value + (long)offset * a.dim_v, 1);
  } else if constexpr (std::is_same_v<T, bf16>) {
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
    return (const T*)a.key_cache + block(position) * block_elements<T>(a.dim, a.block_size);
  }
  const T* values(int position) const {
    return (const T*)a.value_cache + block(position) * block_elements<T>(a.dim_v, a.block_size);
  }
  // Scales of int8 keys and values from the position on, to the end of its block.
  const float* key_scales(int position) const {
    return (const float*)(key_block(position) + (long)a.dim * a.block_size) +
           position % a.block_size;
  }
  const float* value_scales(int position) const {
    return (const float*)(values(position) + (long)a.dim_v * a.block_size) +
           position % a.block_size;
  }
};

// Widened tiles are cut in panels two vectors wide, so that products read them in order:
//   keys [slots / kPanel][dim][kPanel]      values [dim_v / kPanel][slots][kPanel]
constexpr int kPanel = 2 * kLanes;

// Keys (int8 ones without their scales) of 16 slots from context position `position` (a multiple of 16) to tile slots `slot`….
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

// Scales of slots [begin, end) of that tile; whole groups of 16 slots are read.
template <class T>
inline void load_scales(const Context<T>& context, int first, int begin, int end, float* keys,
                        float* values) {
  for (int s = begin / 16 * 16; s < end; s += 16) {
    std::memcpy(keys + s, context.key_scales(first + s), 16 * sizeof(float));
    std::memcpy(values + s, context.value_scales(first + s), 16 * sizeof(float));
  }
}

}  // namespace girih

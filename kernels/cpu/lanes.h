// One float vector of GIRIH_LANES lanes and the element types that load into it.
//
// Everything is written with the compiler's vector extensions, so the same source is AVX2 code
// (8 lanes), AVX-512 code (16 lanes), or 16-lane code lowered to whatever the machine has.
// Intrinsics appear only for float16 and int8, which the extensions cannot convert well.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef GIRIH_LANES
#define GIRIH_LANES 8
#endif
#define GIRIH_INLINE inline __attribute__((always_inline))

namespace girih {

constexpr int kLanes = GIRIH_LANES;
// Rows of a register tile two vectors wide: 12 accumulators of 16 registers, or 24 of 32.
constexpr int kMaxRows = kLanes == 8 ? 6 : 12;

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class V>
GIRIH_INLINE V load_raw(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

GIRIH_INLINE vf load(const float* p) { return load_raw<vf>(p); }

GIRIH_INLINE vf load(const bf16* p) {
  return (vf)(__builtin_convertvector(load_raw<vh>(p), vu) << 16);
}

#if defined(__F16C__)
GIRIH_INLINE __m256 load8(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#endif

GIRIH_INLINE vf load(const f16* p) {
#if defined(__AVX512F__) && GIRIH_LANES == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  vf v;
  for (int i = 0; i < kLanes / 8; ++i) {
    __m256 half = load8(p + 8 * i);
    std::memcpy((char*)&v + 32 * i, &half, 32);
  }
  return v;
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) {
    _Float16 h;
    std::memcpy(&h, p + i, 2);
    v[i] = (float)h;
  }
  return v;
#endif
}

GIRIH_INLINE vf load(const int8_t* p) {
  vi wide;
#if defined(__AVX512F__) && GIRIH_LANES == 16
  wide = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  for (int i = 0; i < kLanes / 8; ++i) {
    __m256i part = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i)));
    std::memcpy((char*)&wide + 32 * i, &part, 32);
  }
#else
  for (int i = 0; i < kLanes; ++i) wide[i] = p[i];
#endif
  return __builtin_convertvector(wide, vf);
}

// Loads kLanes neighbouring pairs: even[i] = p[2i], odd[i] = p[2i + 1].
GIRIH_INLINE void load_pairs(const bf16* p, vf& even, vf& odd) {
  vu both = load_raw<vu>(p);
  even = (vf)(both << 16);
  odd = (vf)(both & 0xffff0000u);
}

GIRIH_INLINE vf splat(float x) { return x - vf{}; }

GIRIH_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }

// Round to nearest even; a NaN stays a (quiet) NaN.
GIRIH_INLINE void store(bf16* p, vf v) {
  vu u = (vu)v;
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  rounded = (v == v) ? rounded : (vu{} + 0x7fc0u);
  vh bits = __builtin_convertvector(rounded, vh);
  std::memcpy(p, &bits, sizeof(bits));
}

GIRIH_INLINE void store(f16* p, vf v) {
#if defined(__AVX512F__) && GIRIH_LANES == 16
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (int i = 0; i < kLanes / 8; ++i) {
    __m256 half;
    std::memcpy(&half, (const char*)&v + 32 * i, 32);
    _mm_storeu_si128((__m128i*)(p + 8 * i), _mm256_cvtps_ph(half, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    _Float16 h = (_Float16)v[i];
    std::memcpy(p + i, &h, 2);
  }
#endif
}

// The first `count` (< kLanes) elements only; the other lanes are zero.
template <class T>
GIRIH_INLINE vf load_some(const T* p, int count) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, sizeof(T) * count);
  return load(buffer);
}

template <class T>
GIRIH_INLINE void store_some(T* p, vf v, int count) {
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, sizeof(T) * count);
}

// `count` elements to float32; `to` has room for a whole number of vectors, the rest is zero.
template <class T>
inline void widen(float* to, const T* from, int count) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store(to + i, load_some(from + i, count - i));
}

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace girih

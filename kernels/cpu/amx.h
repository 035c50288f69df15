// AMX tiles for bfloat16 products: blocks of up to 32 rows x 32 columns, k in steps of 32.
//
// A sum is one chain over those steps, so it does not depend on which rows are computed beside it.
#pragma once

#if defined(__AMX_BF16__)
#define GIRIH_AMX 1
#include <immintrin.h>

#include <cstring>

#include "lanes.h"

namespace girih {

constexpr int kAmxRows = 16;    // of a tile
constexpr int kAmxDepth = 32;   // k of a tile of 64 bytes a row
constexpr long kAmxStepBytes = 32 * 2 * kAmxDepth;  // what a step reads of 32 columns

// The calling thread's tiles while this object lives: 0 to 3 hold sums (two of 16 columns for the
// upper rows, two for the lower), 4 and 5 rows, 6 and 7 columns. `columns` is the first tile of columns.
class AmxTiles {
 public:
  explicit AmxTiles(int rows, int columns = 6) {
    struct alignas(64) {
      uint8_t palette, start, unused[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shape = {1, 0, {}, {}, {}};
    for (int i = 0; i < 8; ++i) {
      shape.row_bytes[i] = 64;
      shape.rows[i] = (uint8_t)(i < columns ? rows : 16);
    }
    // GCC 12 knows only that the first 8 bytes are read.
    asm volatile("" : : "r"(&shape) : "memory");
    _tile_loadconfig(&shape);
  }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
};

// Memory to prefetch during a product: `lines` of 64 bytes per step of k, steps `step` bytes apart.
struct AmxAhead {
  const char* from;
  int lines;
  long step;

  GIRIH_INLINE void fetch() {
    for (int line = 0; line < lines; ++line) _mm_prefetch(from + 64 * line, _MM_HINT_T0);
    from += step;
  }
};

// The sums of one product: [2 halves of the rows][2 halves of the columns][16][16].
using AmxSums = float[2][2][kAmxRows * kAmxRows];

template <bool Lower>
GIRIH_INLINE void amx_clear() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Lower) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// One step of k: adds upper and lower rows [rows][64 bytes] x left and right columns
// [16 pairs of k][16 columns][2], whose pairs are `stride` bytes apart.
template <bool Lower>
GIRIH_INLINE void amx_step(const char* upper, const char* lower, const char* left,
                           const char* right, long stride) {
  _tile_loadd(4, upper, 64);
  _tile_loadd(6, left, stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, right, stride);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Lower) {
    _tile_loadd(5, lower, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The sums in the tiles to memory, rows `stride` bytes apart; the lower ones `lower` floats further.
template <bool Lower>
GIRIH_INLINE void amx_store(float* left, float* right, long lower, long stride) {
  _tile_stored(0, left, stride);
  _tile_stored(1, right, stride);
  if constexpr (Lower) {
    _tile_stored(2, left + lower, stride);
    _tile_stored(3, right + lower, stride);
  }
}

}  // namespace girih
#endif

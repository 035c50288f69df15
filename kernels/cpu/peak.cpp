// What this machine can do at most, measured: the yardstick of girih.kernels.bench, which times it.
#include <omp.h>

#include "amx.h"
#include "kernels.h"
#include "lanes.h"

#define GIRIH_EXPORT extern "C" __attribute__((visibility("default")))

// All threads do `steps` x 12 independent float32 vector multiply-adds each; returns the number of
// operations.
GIRIH_EXPORT double girih_peak_fma(long steps) {
  using namespace girih;
  int threads = 0;
  float sink = 0;
#pragma omp parallel reduction(+ : sink, threads)
  {
    threads = 1;
    // Different starts, or the compiler would compute one sum twelve times.
    vf sums[12];
    for (int j = 0; j < 12; ++j) sums[j] = splat(1.0f + j);
    vf x = splat(0.5f), y = splat(1e-3f);
    for (long i = 0; i < steps; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) sums[j] = sums[j] * x + y;
    }
    for (vf& s : sums) sink += s[0];
  }
  return 2.0 * 12 * kLanes * steps * threads + 0 * sink;
}

// The same of bfloat16 products by AMX tiles: `steps` x 4 products of 16 x 16 x 32 each; 0 where
// vectors multiply bfloat16.
GIRIH_EXPORT double girih_peak_amx(long steps) {
  using namespace girih;
#ifdef GIRIH_AMX
  if (bf16_products == Products::amx) {
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    {
      threads = 1;
      AmxTiles tiles(kAmxRows);
      for (long i = 0; i < steps; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    return 4.0 * 2 * kAmxRows * kAmxRows * kAmxDepth * steps * threads;
  }
#endif
  return 0;
}

// All threads together read `count` floats once; returns their sum.
GIRIH_EXPORT float girih_peak_read(const float* data, long count) {
  using namespace girih;
  float result = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : result)
  for (long chunk = 0; chunk < count / 16384; ++chunk) {
    vf sums[8] = {};
    for (long i = chunk * 16384; i < (chunk + 1) * 16384; i += 8 * kLanes) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        __builtin_prefetch(data + i + j * kLanes + 1024);
        sums[j] += load(data + i + j * kLanes);
      }
    }
    for (vf& s : sums) result += s[0];
  }
  return result;
}

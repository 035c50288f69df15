// What this machine can do at most, measured: the yardstick of girih.kernels.bench.
#include <omp.h>

#include "lanes.h"

#define GIRIH_EXPORT extern "C" __attribute__((visibility("default")))

// Seconds that all threads take for `steps` x 12 independent vector multiply-adds each; the number
// of floating-point operations goes to *flops.
GIRIH_EXPORT double girih_peak_fma(long steps, double* flops) {
  using namespace girih;
  int threads = 1;
  float sink = 0;
  double start = omp_get_wtime();
#pragma omp parallel reduction(+ : sink)
  {
    threads = omp_get_num_threads();
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
  double seconds = omp_get_wtime() - start;
  *flops = 2.0 * 12 * kLanes * steps * threads + 0 * sink;
  return seconds;
}

// Seconds that all threads together take to read `count` floats once.
GIRIH_EXPORT double girih_peak_read(const float* data, long count, float* sum) {
  using namespace girih;
  float result = 0;
  double start = omp_get_wtime();
#pragma omp parallel for schedule(dynamic) reduction(+ : result)
  for (long chunk = 0; chunk < count / 16384; ++chunk) {
    vf sums[8] = {};
    for (long i = chunk * 16384; i < (chunk + 1) * 16384; i += 8 * kLanes) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) sums[j] += load(data + i + j * kLanes);
    }
    for (vf& s : sums) result += s[0];
  }
  *sum = result;
  return omp_get_wtime() - start;
}

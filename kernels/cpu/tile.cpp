// The float32 register tiles, one function per height.
#include "tile.h"

#include <array>
#include <utility>

namespace girih {
namespace {

template <int M>
void multiply(const float* a, long a_stride, const float* b, long b_stride, int depth, float* c,
              long c_stride, bool add, Ahead ahead) {
  Tile<M, 2> tile;
  if (add)
    tile.read(c, c_stride);
  else
    tile.clear();
  tile.accumulate(a, a_stride, b, b_stride, depth, ahead);
  tile.write(c, c_stride);
}

template <int... I>
constexpr std::array<MultiplyFn, kMaxRows> kernels(std::integer_sequence<int, I...>) {
  return {multiply<I + 1>...};
}

constexpr auto kKernels = kernels(std::make_integer_sequence<int, kMaxRows>());

}  // namespace

MultiplyFn multiply_kernel(int rows) { return kKernels[rows - 1]; }

}  // namespace girih

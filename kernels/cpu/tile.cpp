// The float32 register tiles, one function per height and width.
#include "tile.h"

#include <array>
#include <utility>

namespace girih {
namespace {

template <int M, int NV>
void multiply(const float* a, long a_stride, const float* b, long b_stride, int depth, float* c,
              long c_stride, bool add) {
  Tile<M, NV> tile;
  if (add)
    tile.read(c, c_stride);
  else
    tile.clear();
  tile.accumulate(a, a_stride, b, b_stride, depth);
  tile.write(c, c_stride);
}

template <int NV, int... I>
constexpr std::array<MultiplyFn, kMaxRows> kernels(std::integer_sequence<int, I...>) {
  return {multiply<I + 1, NV>...};
}

constexpr auto kOneVector = kernels<1>(std::make_integer_sequence<int, kMaxRows>());
constexpr auto kTwoVectors = kernels<2>(std::make_integer_sequence<int, kMaxRows>());

}  // namespace

MultiplyFn multiply_kernel(int rows, int vectors) {
  return (vectors == 1 ? kOneVector : kTwoVectors)[rows - 1];
}

}  // namespace girih

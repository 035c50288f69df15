// Known answers: every way to multiply is tried once when the library is loaded.
#include <omp.h>

#include <vector>

#include "kernels.h"
#include "lanes.h"

#define GIRIH_EXPORT extern "C" __attribute__((visibility("default")))

namespace girih {
namespace {

// Small integers: sums up to 2 * kInner + 2 are exact in every dtype and in any order.
constexpr int kInner = 75, kOuter = 40, kMostRows = 35;
int row_value(int row, int k) { return (row * 7 + k * 5) % 5 - 2; }
int weight_value(int column, int k) { return (column * 3 + k) % 3 - 1; }
int bias_value(int column) { return column % 5 - 2; }

template <class T>
void put(T* to, int value) {
  store_some(to, splat((float)value), 1);
}
void put(float* to, int value) { *to = (float)value; }

template <class T>
float get(const T* from) {
  return load_some(from, 1)[0];
}

template <class T>
bool multiplies(DType dtype) {
  const int width = panel_width(), panels = (kOuter + width - 1) / width;
  std::vector<T> weights(kOuter * kInner), bias(kOuter), x(kMostRows * kInner);
  std::vector<T> packed((size_t)panels * width * (kInner + 1)), out(kMostRows * kOuter);
  for (int n = 0; n < kOuter; ++n) {
    put(&bias[n], bias_value(n));
    for (int k = 0; k < kInner; ++k) put(&weights[n * kInner + k], weight_value(n, k));
  }
  for (int row = 0; row < kMostRows; ++row)
    for (int k = 0; k < kInner; ++k) put(&x[row * kInner + k], row_value(row, k));
  pack_rows(dtype, {weights.data(), packed.data(), kInner, kOuter, kInner, 0});
  for (int rows : {1, 5, 17, kMostRows}) {
    packed_linear(dtype, {x.data(), packed.data(), bias.data(), out.data(), kInner, kOuter, rows,
                          kOuter, kInner});
    for (int row = 0; row < rows; ++row) {
      for (int n = 0; n < kOuter; ++n) {
        int sum = bias_value(n);
        for (int k = 0; k < kInner; ++k) sum += row_value(row, k) * weight_value(n, k);
        if (get(&out[row * kOuter + n]) != (float)sum) return false;
      }
    }
  }
  return true;
}

bool vectors_multiply() {
  bf16_products = Products::vectors;
  return multiplies<float>(DType::float32) && multiplies<f16>(DType::float16) &&
         multiplies<bf16>(DType::bfloat16);
}

bool amx_multiplies() {
  bf16_products = Products::amx;
  return amx_permitted() && multiplies<bf16>(DType::bfloat16);
}

}  // namespace
}  // namespace girih

// Tries every way to multiply and takes the best one that is right. Returns what this library was
// built for and cannot be used: 0 nothing, 1 AMX (vectors serve instead), 2 anything at all.
GIRIH_EXPORT int girih_self_test() {
  using namespace girih;
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);  // a pool that starts now could not be forked
  const bool vectors = vectors_multiply(), amx = amx_multiplies();
  omp_set_num_threads(threads);
  bf16_products = amx ? Products::amx : Products::vectors;
#if defined(__AMX_BF16__)
  if (!amx && vectors) return 1;
#endif
  return vectors ? 0 : 2;
}

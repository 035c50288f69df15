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

// Every query looks for one dimension, which every kDim-th key has alone: the softmax is 0 elsewhere,
// and the result the mean of one or two values.
bool attends() {
  constexpr int kDim = 32, kHeads = 2, kBlock = 16, kContext = 40, kQueries = 5, kBlocks = 3;
  std::vector<bf16> q(kQueries * kHeads * kDim), k(kContext * kDim), v(k.size());
  std::vector<bf16> keys(kBlocks * kBlock * kDim), values(keys.size()), out(q.size());
  auto wanted = [](int query, int head) { return (query * 7 + head) % kDim; };
  auto value = [](int slot, int d) { return 2 * ((slot * 5 + d * 3) % 9 - 4); };
  for (int s = 0; s < kContext; ++s) {
    put(&k[s * kDim + s % kDim], 64);
    for (int d = 0; d < kDim; ++d) put(&v[s * kDim + d], value(s, d));
  }
  for (int i = 0; i < kQueries; ++i)
    for (int h = 0; h < kHeads; ++h) put(&q[(i * kHeads + h) * kDim + wanted(i, h)], 64);
  const int32_t table[kBlocks] = {0, 1, 2};
  std::vector<int64_t> slots(kContext);
  for (int s = 0; s < kContext; ++s) slots[s] = s;
  // The context first, one token at a time (few rows), then the queries as one chunk.
  for (int s = 0; s < kContext;) {
    const int count = s < kContext - kQueries ? 1 : kQueries, row = kHeads * kDim;
    const int32_t starts[] = {0, count}, length = s + count;
    paged_attention(DType::bfloat16,
                    {q.data(), &k[s * kDim], &v[s * kDim], keys.data(), values.data(), out.data(),
                     row, kDim, kDim, kDim, kDim, kDim, row, kDim, starts, &length, table, kBlocks,
                     &slots[s], count, 1, kHeads, 1, kDim, kDim, kBlock, 1.0f, 0.0f, true, 0,
                     nullptr, false});
    for (int i = 0; i < count; ++i) {
      for (int h = 0; h < kHeads; ++h) {
        const int first = wanted(i, h), second = first + kDim, last = s + i;
        if (first > last) continue;  // no key stands out
        for (int d = 0; d < kDim; ++d) {
          int want = value(first, d);
          if (second <= last) want = (want + value(second, d)) / 2;
          if (get(&out[i * row + h * kDim + d]) != (float)want) return false;
        }
      }
    }
    s += count;
  }
  return true;
}

bool vectors_multiply() {
  bf16_products = Products::vectors;
  return multiplies<float>(DType::float32) && multiplies<f16>(DType::float16) &&
         multiplies<bf16>(DType::bfloat16) && attends();
}

bool amx_multiplies() {
  bf16_products = Products::amx;
  return amx_permitted() && multiplies<bf16>(DType::bfloat16) && attends();
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

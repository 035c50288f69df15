// Packing weight rows into column panels (layout: kernels/ops/packing.py).
#include <algorithm>

#include "kernels.h"
#include "lanes.h"

namespace girih {

int panel_width() { return 2 * kLanes; }

namespace {

// Rows [first, last) of the source lie in one panel, so panels can be packed in parallel.
template <class T>
void pack_panel(const PackArgs& a, int panel, int first, int last) {
  const int width = 2 * kLanes;
  T* to = (T*)a.packed + (long)panel * a.k * width;
  for (int row = first; row < last; ++row) {
    const T* from = (const T*)a.rows + row * a.row_stride;
    T* column = to + (a.row_start + row) % width;
    for (int k = 0; k < a.k; ++k) column[(long)k * width] = from[k];
  }
}

void pack_panel_pairs(const PackArgs& a, int panel, int first, int last) {
  const int width = 2 * kLanes, depth = (a.k + 1) / 2;
  uint16_t* to = (uint16_t*)a.packed + (long)panel * depth * 2 * width;
  for (int row = first; row < last; ++row) {
    const uint16_t* from = (const uint16_t*)a.rows + row * a.row_stride;
    uint16_t* column = to + 2 * ((a.row_start + row) % width);
    for (int k = 0; k < a.k; ++k) column[(long)(k / 2) * 2 * width + k % 2] = from[k];
    if (a.k % 2) column[(long)(depth - 1) * 2 * width + 1] = 0;
  }
}

}  // namespace

void pack_rows(DType dtype, const PackArgs& a) {
  const int width = 2 * kLanes;
  int begin = a.row_start / width, end = (a.row_start + a.count + width - 1) / width;
#pragma omp parallel for schedule(static)
  for (int panel = begin; panel < end; ++panel) {
    int first = std::max(0, panel * width - a.row_start);
    int last = std::min(a.count, (panel + 1) * width - a.row_start);
    if (dtype == DType::bfloat16)
      pack_panel_pairs(a, panel, first, last);
    else if (dtype == DType::float16)
      pack_panel<f16>(a, panel, first, last);
    else
      pack_panel<float>(a, panel, first, last);
  }
}

}  // namespace girih

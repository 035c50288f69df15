// y = x W^T + b with W packed in column panels (bfloat16 by AMX tiles: amx_linear.cpp).
//
//   few rows    every panel is streamed once from memory and widened in registers
//   many rows   (row block x panel group) items; a panel is widened once into the thread's
//               scratch and used for all row tiles of the block, whose float32 rows stay in L2
//
// x is widened once per call, shared by all threads. Sums run over k in ascending order on both
// paths, so a row's result does not depend on the number of rows.
#include <omp.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels.h"
#include "scratch.h"
#include "tile.h"

namespace girih {
namespace {

constexpr int kWidth = 2 * kLanes;
constexpr int kStreamRows = 2 * kMaxRows;     // up to here panels are widened in registers
constexpr long kBlockBytes = 320 * 1024;      // float32 rows of a row block: most of L2
constexpr int kDepth = 1024;                  // k steps of a widened panel part
constexpr long kChunkBytes = 64 * 1024;       // packed bytes that a thread takes at a time
constexpr long kNearBytes = 2 * 1024;         // how far ahead in a panel lines are fetched
constexpr long kWideBytes = 8 * 1024 * 1024;  // float32 rows widened at a time

// What is fetched while panels are multiplied: per step of k `step` bytes of each of P streams that
// lie `panel` bytes apart; `line` is 64, or 0 where other passes fetch the second line of a step.
struct Next {
  const char* from;
  long step, panel, line;

  template <int P, int Bytes>
  GIRIH_INLINE void fetch() {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(from + p * panel);
      if constexpr (Bytes > 64) __builtin_prefetch(from + p * panel + line);
    }
    from += step;
  }
};

template <class T>
struct Weights;

template <class T>
struct PlainWeights {
  static constexpr int kStep = 1;
  template <int M, int P>
  GIRIH_INLINE static void stream(Tile<M, 2 * P>& tile, const float* a, long a_stride, const T* b,
                                  long panel_stride, int k, Next next) {
#pragma GCC unroll 2
    for (int i = 0; i < k; ++i) {
      next.fetch<P, kWidth * sizeof(T)>();
      vf column[2 * P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        column[2 * p] = load(b + p * panel_stride + (long)i * kWidth);
        column[2 * p + 1] = load(b + p * panel_stride + (long)i * kWidth + kLanes);
      }
      tile.step(a + i, a_stride, column);
    }
  }
  static void widen_panel(float* to, const T* b, int k) {
    for (long i = 0; i < (long)k * kWidth; i += kLanes) store(to + i, load(b + i));
  }
};

template <>
struct Weights<float> : PlainWeights<float> {};
template <>
struct Weights<f16> : PlainWeights<f16> {};

template <>
struct Weights<bf16> {
  static constexpr int kStep = 2;  // k comes in pairs; x is zero beyond an odd k
  template <int M, int P>
  GIRIH_INLINE static void stream(Tile<M, 2 * P>& tile, const float* a, long a_stride,
                                  const bf16* b, long panel_stride, int k, Next next) {
    for (int i = 0; i < k; i += 2) {
      next.fetch<P, 2 * kWidth * sizeof(bf16)>();
      vf even[2 * P], odd[2 * P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const bf16* pair = b + p * panel_stride + (long)i * kWidth;
        load_pairs(pair, even[2 * p], odd[2 * p]);
        load_pairs(pair + kWidth, even[2 * p + 1], odd[2 * p + 1]);
      }
      tile.step(a + i, a_stride, even);
      tile.step(a + i + 1, a_stride, odd);
    }
  }
  static void widen_panel(float* to, const bf16* b, int k) {
    for (int i = 0; i < k; i += 2) {
      for (int v = 0; v < 2; ++v) {
        vf even, odd;
        load_pairs(b + (long)i * kWidth + v * kWidth, even, odd);
        store(to + (long)i * kWidth + v * kLanes, even);
        store(to + (long)(i + 1) * kWidth + v * kLanes, odd);
      }
    }
  }
};

template <class T>
struct Call {
  const LinearArgs& args;
  const float* x;  // [rows, x_stride] float32
  long x_stride;
  int rows;
  T* out;
  int depth;  // k rounded up to the weights' step

  const T* panel(int p) const { return (const T*)args.packed + (long)p * depth * kWidth; }

  // The sums of one panel's columns (`sum_stride` apart by row) to the output.
  void finish(const float* sums, int sum_stride, int row, int height, int p) const {
    int column = p * kWidth;
    const T* bias = (const T*)args.bias;
    for (int v = 0; v < 2 && column < args.n; ++v, column += kLanes) {
      int count = std::min(kLanes, args.n - column);
      vf add = {};
      if (bias) add = count == kLanes ? load(bias + column) : load_some(bias + column, count);
      for (int m = 0; m < height; ++m) {
        T* to = out + (long)(row + m) * args.out_stride + column;
        vf value = load(sums + m * sum_stride + v * kLanes) + add;
        if (count == kLanes)
          store(to, value);
        else
          store_some(to, value, count);
      }
    }
  }

  // What pass `i` of `passes` over panels from p on fetches: what comes soon in these panels, or its
  // share of the next one. (Farther ahead, lines of large panels leave a small L2 before their use.)
  Next next_lines(int p, int i, int passes) const {
    const long bytes = (long)depth * kWidth * sizeof(T), step = kWidth * sizeof(T) * Weights<T>::kStep;
    if (passes == 1) return {(const char*)panel(p) + kNearBytes, step, bytes, 64};
    const char* from = (const char*)panel(std::min(p + 1, last_panel()));
    return {from + bytes * i / passes, step / passes, bytes, 0};
  }
  // Where pass `i` of `passes` over panel p prefetches: its share of what comes after the panel,
  // spread over the steps of k.
  Ahead next_panel(int p, int i, int passes) const {
    const char* next = (const char*)panel(std::min(p, last_panel()));
    long bytes = (long)depth * kWidth * sizeof(T);
    return {next + bytes * i / passes, (long)(kWidth * sizeof(T)) / passes};
  }
  int last_panel() const { return (args.n - 1) / kWidth; }

  template <int M, int P>
  __attribute__((noinline)) void stream_panels(int row, int p, Next next) const {
    Tile<M, 2 * P> tile;
    tile.clear();
    Weights<T>::template stream<M, P>(tile, x + row * x_stride, x_stride, panel(p),
                                      (long)depth * kWidth, depth, next);
    alignas(64) float sums[M * P * kWidth];
    tile.write(sums, P * kWidth);
    for (int i = 0; i < P; ++i) finish(sums + i * kWidth, P * kWidth, row, M, p + i);
  }

  // One pass over panels [begin, end); several at once while few rows leave registers free.
  template <int M>
  void stream_rows(int row, int begin, int end, int pass, int passes) const {
    constexpr int P = std::max(1, std::min(4, kMaxRows / M));
    int p = begin;
    for (; p + P <= end; p += P)
      stream_panels<M, P>(row, p, next_lines(p, pass, passes));
    for (; p < end; ++p) stream_panels<M, 1>(row, p, next_lines(p, pass, passes));
  }

  using StreamFn = void (*)(const Call&, int row, int begin, int end, int pass, int passes);
  template <int... I>
  static constexpr std::array<StreamFn, kMaxRows> stream_kernels(std::integer_sequence<int, I...>) {
    return {+[](const Call& c, int row, int begin, int end, int pass, int passes) {
      c.template stream_rows<I + 1>(row, begin, end, pass, passes);
    }...};
  }

  void stream(int begin, int end) const {
    static constexpr auto kStream = stream_kernels(std::make_integer_sequence<int, kMaxRows>());
    int passes = (rows + kMaxRows - 1) / kMaxRows;
    // One panel at a time when it is passed over several times: it stays in L1.
    int group = passes == 1 ? end - begin : 1;
    for (int p = begin; p < end; p += group) {
      int pass = 0;
      for_row_tiles(rows, [&](int row, int height) {
        kStream[height - 1](*this, row, p, std::min(end, p + group), pass++, passes);
      });
    }
  }

  // Rows [first, last) x one panel; `wide` holds kDepth x kWidth, `sums` the block's partial sums.
  void block(int first, int last, int p, float* wide, float* sums) const {
    for (int k = 0; k < depth; k += kDepth) {
      int part = std::min(kDepth, depth - k);
      const float* b;
      if constexpr (std::is_same_v<T, float>) {
        b = panel(p) + (long)k * kWidth;
      } else {
        Weights<T>::widen_panel(wide, panel(p) + (long)k * kWidth, part);
        b = wide;
      }
      int passes = (last - first + kMaxRows - 1) / kMaxRows, pass = 0;
      for_row_tiles(last - first, [&](int row, int height) {
        float* partial = sums + (long)row * kWidth;
        Ahead ahead = next_panel(p + 1, pass++, passes);
        ahead.from += (long)k * ahead.step;
        multiply_kernel(height)(x + (first + row) * x_stride + k, x_stride, b, kWidth, part, partial,
                                kWidth, k > 0, ahead);
        if (k + part == depth) finish(partial, kWidth, first + row, height, p);
      });
    }
  }
};

thread_local Scratch shared_rows;   // of the calling thread: x in float32
thread_local Scratch own_panel;     // of each worker: a widened panel and partial sums

int block_rows(int depth) {
  long fit = kBlockBytes / (4L * depth);
  return (int)std::clamp(fit / kMaxRows * kMaxRows, 4L * kMaxRows, 32L * kMaxRows);
}

template <class T>
void run_stream(const Call<T>& call, int panels) {
  long panel_bytes = (long)call.depth * kWidth * sizeof(T);
  int chunk = (int)std::clamp(kChunkBytes / panel_bytes, 4L, 64L);  // 4 panels share a pass
  int chunks = (panels + chunk - 1) / chunk;
#pragma omp for schedule(dynamic)
  for (int c = 0; c < chunks; ++c) call.stream(c * chunk, std::min(panels, (c + 1) * chunk));
}

template <class T>
void run_blocks(const Call<T>& call, int panels) {
  int height = block_rows(call.depth);
  int blocks = (call.rows + height - 1) / height;
  height = round_up((call.rows + blocks - 1) / blocks, kMaxRows);
  blocks = (call.rows + height - 1) / height;
  int wanted = std::max(1, 8 * omp_get_num_threads() / blocks);
  int group = std::max(1, panels / std::min(panels, wanted));
  int groups = (panels + group - 1) / group;
  float* wide = own_panel.floats((size_t)(kDepth + height) * kWidth);
#pragma omp for schedule(dynamic)
  for (int item = 0; item < blocks * groups; ++item) {
    int first = item / groups * height, begin = item % groups * group;
    for (int p = begin; p < std::min(panels, begin + group); ++p)
      call.block(first, std::min(call.rows, first + height), p, wide, wide + kDepth * kWidth);
  }
}

template <class T>
void run_rows(const LinearArgs& args, int first, int rows) {
  const int depth = round_up(args.k, Weights<T>::kStep);
  const T* x = (const T*)args.x + first * args.x_stride;
  Call<T> call{args, nullptr, args.x_stride, rows, (T*)args.out + first * args.out_stride, depth};
  float* wide = nullptr;
  if constexpr (std::is_same_v<T, float>) {
    call.x = x;
  } else {
    // Not a multiple of 4 KiB, or the rows of a tile would compete for the same lines of L1.
    call.x_stride = round_up(depth, kLanes) + 16;
    call.x = wide = shared_rows.floats((size_t)rows * call.x_stride);
  }
  const int panels = (args.n + kWidth - 1) / kWidth;
  const bool alone = (long)panels * depth * kWidth * rows < 64 * 1024;
  const bool few = rows * (long)args.k <= 8 * 1024;
  if (wide && few)
    for (int row = 0; row < rows; ++row)
      widen(wide + row * call.x_stride, x + row * args.x_stride, args.k);
#pragma omp parallel if (!alone)
  {
    if (wide && !few) {
#pragma omp for schedule(static)
      for (int row = 0; row < rows; ++row)
        widen(wide + row * call.x_stride, x + row * args.x_stride, args.k);
    }
    if (rows <= kStreamRows)
      run_stream(call, panels);
    else
      run_blocks(call, panels);
  }
}

template <class T>
void run(const LinearArgs& args) {
  int step = (int)std::clamp(kWideBytes / (4L * args.k), 64L, 1L << 20);
  for (int first = 0; first < args.tokens; first += step)
    run_rows<T>(args, first, std::min(step, args.tokens - first));
}

}  // namespace

Products bf16_products = Products::vectors;

void packed_linear(DType dtype, const LinearArgs& args) {
  if (dtype == DType::bfloat16 && bf16_products == Products::amx)
    amx_linear(args);
  else if (dtype == DType::bfloat16)
    run<bf16>(args);
  else if (dtype == DType::float16)
    run<f16>(args);
  else
    run<float>(args);
}

}  // namespace girih

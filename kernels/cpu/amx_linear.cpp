// y = x W^T + b of bfloat16 by AMX tiles, for any number of rows.
//
//   x       copied into tiles once per call: [row tile][step of k][rows][64 bytes], zeros beyond K
//   item    (block of rows that stays in L2) x (range of panels); within it every panel meets all
//           rows of the block, and the next panel is fetched meanwhile; one tile of rows meets two
//           panels at a time, because memory answers two streams faster than one
#include "amx.h"

#ifdef GIRIH_AMX
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "kernels.h"
#include "scratch.h"

namespace girih {
namespace amx {
namespace {

constexpr int kWidth = 32;                      // columns of a panel
constexpr long kBlockBytes = 1024 * 1024;       // rows of x that stay in L2
constexpr long kRoundBytes = 16 * 1024 * 1024;  // rows of x that are copied at a time
constexpr long kNearBytes = 2 * 1024;           // how far ahead in its panel a stream is fetched

thread_local Scratch shared_rows;  // of the calling thread

struct AmxCall {
  const LinearArgs& args;
  const char* x;  // rows in tiles
  int first, rows, height;  // first row and rows of this round; height of its tiles
  int depth, steps;  // k rounded up to pairs; steps of 32

  long tile_bytes() const { return (long)steps * height * 64; }
  long panel_bytes() const { return (long)depth * kWidth * 2; }
  const char* panel(int p) const { return (const char*)args.packed + p * panel_bytes(); }

  void copy_tile(char* to, int tile) const {
    const int count = std::min(height, rows - tile * height);
    const int whole = args.k / kAmxDepth, rest = args.k % kAmxDepth;
    to += tile * tile_bytes();
    if (count < height || rest) std::memset(to, 0, tile_bytes());
    for (int r = 0; r < count; ++r) {
      const bf16* from = (const bf16*)args.x + (first + tile * height + r) * args.x_stride;
      char* row = to + r * 64;
      for (int s = 0; s < whole; ++s) std::memcpy(row + (long)s * height * 64, from + s * kAmxDepth, 64);
      if (rest) std::memcpy(row + (long)whole * height * 64, from + whole * kAmxDepth, 2 * rest);
    }
  }

  // Rows [row, row + 32) x panel p, `last` its k beyond the last whole step.
  template <bool Lower>
  void product(int row, int p, const char* last, AmxAhead ahead) const {
    const char* upper = x + row / height * tile_bytes();
    const char* lower = upper + tile_bytes();
    const char* columns = panel(p);
    const long row_step = height * 64;
    const int whole = args.k / kAmxDepth;
    amx_clear<Lower>();
    for (int s = 0; s < steps; ++s) {
      const char* pairs = s < whole ? columns + s * kAmxStepBytes : last;
      ahead.fetch();
      amx_step<Lower>(upper + s * row_step, lower + s * row_step, pairs, pairs + 64, 128);
    }
    alignas(64) AmxSums sums;
    amx_store<Lower>(sums[0][0], sums[0][1], 2 * kAmxRows * kAmxRows, 64);
    finish(sums[0], row, std::min(height, rows - row), p);
    if constexpr (Lower) finish(sums[1], row + height, std::min(height, rows - row - height), p);
  }

  // Rows of one tile x panels p and p + 1, a column tile after the other, what comes next in between.
  void product_of_two(int p, const char* last) const {
    const long row_step = height * 64;
    const int whole = args.k / kAmxDepth;
    amx_clear<true>();
    for (int s = 0; s < steps; ++s) {
      const char *left = panel(p) + s * kAmxStepBytes, *right = left + panel_bytes();
      const char *ahead = left + kNearBytes, *ahead_right = right + kNearBytes;
      if (s == whole) left = last, right = last + kAmxStepBytes;
      _tile_loadd(4, x + s * row_step, 64);
      fetch_half(ahead);
      _tile_loadd(6, left, 128);
      _tile_dpbf16ps(0, 4, 6);
      fetch_half(ahead_right);
      _tile_loadd(7, left + 64, 128);
      _tile_dpbf16ps(1, 4, 7);
      fetch_half(ahead + kAmxStepBytes / 2);
      _tile_loadd(5, right, 128);
      _tile_dpbf16ps(2, 4, 5);
      fetch_half(ahead_right + kAmxStepBytes / 2);
      _tile_loadd(6, right + 64, 128);
      _tile_dpbf16ps(3, 4, 6);
    }
    alignas(64) AmxSums sums;
    amx_store<true>(sums[0][0], sums[0][1], 2 * kAmxRows * kAmxRows, 64);
    for (int i = 0; i < 2; ++i) finish(sums[i], 0, rows, p + i);
  }

  GIRIH_INLINE static void fetch_half(const char* from) {
#pragma GCC unroll 16
    for (long byte = 0; byte < kAmxStepBytes / 2; byte += 64) _mm_prefetch(from + byte, _MM_HINT_T0);
  }

  // The sums of a tile's rows, with the bias, to the output.
  void finish(const float (&sums)[2][kAmxRows * kAmxRows], int row, int count, int p) const {
    const int column = p * kWidth, columns = std::min(kWidth, args.n - column);
    alignas(64) bf16 bias[kWidth] = {};
    if (args.bias) std::memcpy(bias, (const bf16*)args.bias + column, 2 * columns);
    const vf left = load(bias), right = load(bias + kLanes);
    bf16* to = (bf16*)args.out + (first + row) * args.out_stride + column;
    for (int r = 0; r < count; ++r, to += args.out_stride) {
      __m512bh both = _mm512_cvtne2ps_pbh((__m512)(load(sums[1] + r * kLanes) + right),
                                          (__m512)(load(sums[0] + r * kLanes) + left));
      if (columns == kWidth)
        std::memcpy(to, &both, 64);
      else
        std::memcpy(to, &both, 2 * columns);
    }
  }

  // The last part of a panel's k as a whole step, where there is one.
  void copy_last(char* last, int p) const {
    const long whole = args.k / kAmxDepth * kAmxStepBytes;
    if (whole < panel_bytes()) std::memcpy(last, panel(p) + whole, panel_bytes() - whole);
  }

  // Rows [begin, end) of the round x panels [from, to).
  void block(int begin, int end, int from, int to) const {
    const int passes = (end - begin + 2 * height - 1) / (2 * height);
    const long share = kAmxStepBytes / passes;
    alignas(64) char last[2 * kAmxStepBytes] = {};
    int p = from;
    for (; rows <= kAmxRows && p + 2 <= to; p += 2) {
      for (int i = 0; i < 2; ++i) copy_last(last + i * kAmxStepBytes, p + i);
      product_of_two(p, last);
    }
    for (; p < to; ++p) {
      copy_last(last, p);
      for (int pass = 0; pass < passes; ++pass) {
        const char* next = panel(p) + (passes == 1 ? kNearBytes : panel_bytes()) + pass * share;
        AmxAhead ahead{next, (int)((share + 63) / 64), kAmxStepBytes};
        const int row = begin + pass * 2 * height;
        if (rows - row > height)
          product<true>(row, p, last, ahead);
        else
          product<false>(row, p, last, ahead);
      }
    }
  }
};

void run_round(const LinearArgs& args, int first, int rows) {
  const int depth = round_up(args.k, 2), steps = (args.k + kAmxDepth - 1) / kAmxDepth;
  AmxCall call{args, nullptr, first, rows, std::min(rows, kAmxRows), depth, steps};
  const int tiles = (rows + call.height - 1) / call.height;
  char* copy = (char*)shared_rows.floats(tiles * call.tile_bytes() / 4);
  call.x = copy;
  const int panels = (args.n + kWidth - 1) / kWidth;
  const bool few = (long)rows * args.k <= 16 * 1024;
  const bool alone = (long)panels * depth * rows < 2 * 1024;
  if (few)
    for (int tile = 0; tile < tiles; ++tile) call.copy_tile(copy, tile);
#pragma omp parallel if (!alone)
  {
    if (!few) {
#pragma omp for schedule(static)
      for (int tile = 0; tile < tiles; ++tile) call.copy_tile(copy, tile);
    }
    const int fit = std::max(1L, kBlockBytes / (2 * call.tile_bytes())) * 2 * kAmxRows;
    const int blocks = (rows + fit - 1) / fit, threads = omp_get_num_threads();
    const int size = round_up((rows + blocks - 1) / blocks, 2 * kAmxRows);
    const int wanted = threads == 1 ? 1 : std::max(1, 4 * threads / blocks);
    const int group = std::max(1, panels / wanted), groups = (panels + group - 1) / group;
    AmxTiles shapes(call.height, rows <= kAmxRows ? 5 : 6);
#pragma omp for schedule(dynamic)
    for (int item = 0; item < blocks * groups; ++item) {
      int begin = item / groups * size, from = item % groups * group;
      call.block(begin, std::min(rows, begin + size), from, std::min(panels, from + group));
    }
  }
}

}  // namespace
}  // namespace amx

bool amx_permitted() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

void amx_linear(const LinearArgs& args) {
  const int most = (int)std::clamp(amx::kRoundBytes / (2L * args.k) / 32 * 32, 64L, 1L << 20);
  for (int first = 0; first < args.tokens; first += most)
    amx::run_round(args, first, std::min(most, args.tokens - first));
}

}  // namespace girih

#else
#include "kernels.h"

namespace girih {
bool amx_permitted() { return false; }
void amx_linear(const LinearArgs&) {}
}  // namespace girih
#endif

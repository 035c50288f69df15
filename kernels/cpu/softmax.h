// exp, tanh and one row of the online softmax.
#pragma once

#include <limits>

#include "lanes.h"

namespace girih {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// exp for x <= 0 or small positive x; relative error about 2 ulp; exactly 0 below -87.
GIRIH_INLINE vf exp_lanes(vf x) {
  vf clamped = x < -87.0f ? splat(-87.0f) : x;
  clamped = clamped > 88.0f ? splat(88.0f) : clamped;
  // Adding 1.5 * 2^23 leaves the rounded quotient in the low mantissa bits.
  const float magic = 12582912.0f;
  vf shifted = clamped * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi exponent = ((vi)shifted - (vi)splat(magic) + 127) << 23;
  vf result = p * (vf)exponent;
  return x < -87.0f ? vf{} : result;
}

GIRIH_INLINE float exp_one(float x) { return exp_lanes(splat(x))[0]; }

GIRIH_INLINE vf tanh_lanes(vf x) {
  vf magnitude = x < 0.0f ? -x : x;
  vf e = exp_lanes(-2.0f * magnitude);
  vf t = (1.0f - e) / (1.0f + e);
  // The quotient cancels near zero; two terms of the series do not.
  vf series = magnitude - magnitude * magnitude * magnitude * (1.0f / 3.0f);
  t = magnitude < 0.02f ? series : t;
  return x < 0.0f ? -t : t;
}

// Reduces a vector to its first lane by halves: fold(v, the lanes `Step` further).
template <int Step, class Fold>
GIRIH_INLINE vf fold_lanes(vf v, const Fold& fold) {
  if constexpr (Step == 0) {
    return v;
  } else {
    vi index;
    for (int i = 0; i < kLanes; ++i) index[i] = (i + Step) % kLanes;
    return fold_lanes<Step / 2>(fold(v, __builtin_shuffle(v, index)), fold);
  }
}

GIRIH_INLINE float largest(vf v) {
  return fold_lanes<kLanes / 2>(v, [](vf a, vf b) { return a > b ? a : b; })[0];
}

GIRIH_INLINE float total(vf v) {
  return fold_lanes<kLanes / 2>(v, [](vf a, vf b) { return a + b; })[0];
}

// Softmax state of a row: largest score so far, sum of exp(score - largest).
struct RowState {
  float largest, sum;
};

// Turns scores [0, columns), times `scale`, into weights exp(score - largest) and updates the row's state; columns
// outside [begin, end) get weight 0. Returns the factor for what was summed before.
inline float softmax_row(float* scores, int columns, int begin, int end, float softcap,
                         RowState& state, float scale = 1.0f) {
  vi index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  vf top = splat(kNegInf);
  for (int c = 0; c < columns; c += kLanes) {
    vf s = load(scores + c) * scale;
    if (softcap > 0) s = softcap * tanh_lanes(s * (1.0f / softcap));
    if (c < begin || c + kLanes > end) {
      vi at = index + c;
      s = ((at >= begin) & (at < end)) ? s : splat(kNegInf);
    }
    store(scores + c, s);
    top = s > top ? s : top;
  }
  float best = largest(top);
  if (!(best > state.largest)) best = state.largest;
  if (best == kNegInf) {
    for (int c = 0; c < columns; c += kLanes) store(scores + c, vf{});
    return 1.0f;
  }
  vf sum = {};
  for (int c = 0; c < columns; c += kLanes) {
    vf p = exp_lanes(load(scores + c) - best);
    store(scores + c, p);
    sum += p;
  }
  float factor = state.largest == kNegInf ? 0.0f : exp_one(state.largest - best);
  state.sum = state.sum * factor + total(sum);
  state.largest = best;
  return factor;
}

}  // namespace girih

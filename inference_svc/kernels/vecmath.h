// exp, tanh, erf and what is made of them, for lanes of floats. Include after one of vec_*.h.
//
// Invariants and semantics: every lane computes the same function in the same order, so a number's result depends on
// the number alone, not on its lane or its neighbours. exp, tanh and erf are within 1.5 ulp of the exact value, for all
// floats and in every variant; NaN gives NaN, infinities give the limits. The coefficients are minimax fits by the
// Remez exchange; exp reduces its argument as Cody and Waite do.
#pragma once

namespace kev {
namespace {

inline Vec vexp(Vec x) {
  x = vmin(vsplat(89.0f), vmax(vsplat(-104.0f), x));  // beyond them: infinity and 0; NaN passes as the second of each
  const Vec magic = vsplat(12582912.0f);              // 1.5 * 2^23: adding it rounds to a whole number
  const Vec n = vfma(x, vsplat(1.44269504f), magic) - magic;
  Vec r = vfma(n, vsplat(-0.693145752f), x);  // ln 2 in two parts, the first with few enough bits for exact products
  r = vfma(n, vsplat(-1.42860677e-6f), r);
  Vec p = vfma(vsplat(0.00138145488f), r, vsplat(0.00836874527f));
  p = vfma(p, r, vsplat(0.0416683906f));
  p = vfma(p, r, vsplat(0.166665204f));
  p = vfma(p, r, vsplat(0.499999934f));
  return vscale(vfma(p, r * r, r) + vsplat(1.0f), n);
}

inline Vec vsigmoid(Vec x) { return vsplat(1.0f) / (vsplat(1.0f) + vexp(vsplat(0.0f) - x)); }

inline Vec vtanh(Vec x) {
  const Vec one = vsplat(1.0f), size = vabs(x);
  const Vec z = x * x;
  Vec p = vfma(vsplat(-0.00566078651f), z, vsplat(0.0206020053f));
  p = vfma(p, z, vsplat(-0.0537292292f));
  p = vfma(p, z, vsplat(0.13331329f));
  p = vfma(p, z, vsplat(-0.333332783f));
  const Vec small = vfma(p * z, x, x);
  const Vec large = vwith_sign(one - vsplat(2.0f) / (vexp(size + size) + one), x);
  return vselect(vless(size, vsplat(0.625f)), small, large);
}

inline Vec verf(Vec x) {
  const Vec one = vsplat(1.0f), size = vabs(x);
  const Vec z = x * x;
  Vec p = vfma(vsplat(7.85386348e-5f), z, vsplat(-0.000801019435f));
  p = vfma(p, z, vsplat(0.00518832778f));
  p = vfma(p, z, vsplat(-0.026853812f));
  p = vfma(p, z, vsplat(0.112835852f));
  p = vfma(p, z, vsplat(-0.376126258f));
  p = vfma(p, z, vsplat(0.128379166f));  // 2 / sqrt(pi) - 1
  const Vec small = vfma(p, x, x);
  const Vec t = vmin(vsplat(4.0f), size);  // erf(4) is 1 in float32; NaN passes
  Vec q = vfma(vsplat(2.16867487e-5f), t, vsplat(-0.000441335118f));  // -log(erfc(t)) for t in [1, 4]
  q = vfma(q, t, vsplat(0.0042045553f));
  q = vfma(q, t, vsplat(-0.025208238f));
  q = vfma(q, t, vsplat(0.108418546f));
  q = vfma(q, t, vsplat(0.633219924f));
  q = vfma(q, t, vsplat(1.12957841f));
  q = vfma(q, t, vsplat(-0.00018803646f));
  const Vec large = vwith_sign(one - vexp(vsplat(0.0f) - q), x);
  return vselect(vless(size, one), small, large);
}

inline Vec vsoften(Vec x, Vec cap) { return cap * vtanh(x / cap); }

}  // namespace
}  // namespace kev

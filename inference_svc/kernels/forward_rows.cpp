#include "forward_rows.h"

#include "forward_parts.h"

namespace kev {
namespace {

constexpr int64_t PANEL = 16;          // outputs that a linear computes at once
constexpr int64_t SLICE_OUTPUTS = 64;  // of the gate, and as many of the rest: they stay in the first-level cache

// How many outputs of the gate are computed before they meet the others; all of them where panels would be shared.
int64_t slice_outputs(int64_t width) { return width % PANEL == 0 ? std::min(SLICE_OUTPUTS, width) : width; }

int64_t slice_width(const Model& model) {
  int64_t most = 0;
  for (int64_t i = 0; i < model.num_layers; ++i) {
    const int64_t width = model.layers[i].mlps[0].down.k;
    most = std::max(most, slice_outputs(width) * (model.gated ? 2 : 1));
  }
  return most;
}

int64_t floats_of(int64_t bytes) { return rounded(bytes) / static_cast<int64_t>(sizeof(float)); }

}  // namespace

RowPass::Parts::Parts(const Model& model) {
  int64_t bytes = 0;
  for (Precision precision : {Precision::F32, Precision::BF16, Precision::I8})
    bytes = std::max(bytes, prepared_bytes(precision, MAX_PASS_ROWS, widest(model)));
  const int64_t size = static_cast<int64_t>(sizeof(float)) * MAX_PASS_ROWS;
  normed = 0;
  added = normed + floats_of(size * model.hidden);
  slice = added + floats_of(size * model.hidden);
  activated = slice + floats_of(size * slice_width(model));
  prepared = activated + floats_of(size * model.mlp_width);
  floats = prepared + floats_of(bytes);
}

void RowPass::multiply(Work work, const Weight& weight, const float* x, int64_t rows, int64_t ldx, const float* bias,
                       float* y, const Weight* next, int64_t first_output) {
  const auto precision = static_cast<Precision>(weight.precision);
  const PreparedRows made = prepare_rows(precision, x, rows, ldx, weight.k, at(parts_.prepared));
  lap(Work::PREPARE);
  const int64_t first = first_output / PANEL * PANEL;
  linear_rows(weight, made, rows, first, weight.n, bias, y + first, weight.n, next);
  lap(work);
}

void RowPass::before_attention(const Layer& layer, const Step& step, const PassRows& rows, bool queries,
                               const Weight* next, int64_t first, int64_t last) {
  lap_ = WorkTimes::now();
  const int64_t width = model_.hidden, count = last - first;
  normalize(layer.before_attention, rows.hidden + first * width, width, width, at(parts_.normed), width, 0, count);
  lap(Work::NORM);
  multiply(Work::QKV, layer.qkv, at(parts_.normed), count, width, layer.qkv_bias, rows.qkv + first * layer.qkv.n,
           next, queries ? 0 : query_width(model_));
  place_heads(model_, layer, step, queries, rows.qkv, first, last);
  lap(Work::ROTATE);
}

void RowPass::after_attention(const Layer& layer, const PassRows& rows, const Weight* next, int64_t first,
                              int64_t last) {
  lap_ = WorkTimes::now();
  const int64_t width = model_.hidden, count = last - first, mixed = query_width(model_);
  float *hidden = rows.hidden + first * width, *added = at(parts_.added), *normed = at(parts_.normed);
  multiply(Work::OUT, layer.out, rows.mixed + first * mixed, count, mixed, layer.out_bias, added,
           &layer.mlps[0].up);
  if (!model_.parallel_residual) join(layer.after_attention, added, hidden, width, 0, count);
  normalize(layer.before_mlp, hidden, width, width, normed, width, 0, count);
  if (model_.parallel_residual) join(layer.after_attention, added, hidden, width, 0, count);
  lap(Work::NORM);
  run_mlp(layer.mlps[0], count, next);
  join(layer.after_mlp, added, hidden, width, 0, count);
  lap(Work::NORM);
}

void RowPass::run_mlp(const Mlp& mlp, int64_t rows, const Weight* next) {
  const int64_t width = mlp.down.k, each = slice_outputs(width), ld = each * (model_.gated ? 2 : 1);
  float *slice = at(parts_.slice), *activated = at(parts_.activated);
  const PreparedRows made = prepare_rows(static_cast<Precision>(mlp.up.precision), at(parts_.normed), rows,
                                         model_.hidden, mlp.up.k, at(parts_.prepared));
  lap(Work::PREPARE);
  for (int64_t first = 0; first < width; first += each) {
    const int64_t count = std::min(each, width - first);
    if (count == width) {
      linear_rows(mlp.up, made, rows, 0, mlp.up.n, mlp.up_bias, slice, ld, &mlp.down);
    } else {
      linear_rows(mlp.up, made, rows, first, first + count, mlp.up_bias, slice, ld, &mlp.down);
      if (model_.gated)
        linear_rows(mlp.up, made, rows, width + first, width + first + count, mlp.up_bias, slice + each, ld,
                    &mlp.down);
    }
    lap(Work::UP);
    activate(static_cast<Activation>(model_.activation), slice, ld, model_.gated ? slice + each : nullptr, ld, count,
             activated + first, width, 0, rows);
    lap(Work::ACTIVATE);
  }
  multiply(Work::DOWN, mlp.down, activated, rows, width, mlp.down_bias, at(parts_.added), next);
}

}  // namespace kev

// One isolated forward of a decoder, from token ids to the next tokens, in one call.
//
// Invariants and semantics: `Model` describes the mathematics and points at memory that its owner keeps alive; an `Executor` owns the
// threads and the working memory and is used by one thread at a time. Activations are float32 between the linears,
// whatever the weights are. Every kernel handles a row by itself (kernels.h), so the forward is row-invariant as a whole: a row's result
// depends on its own question's ids and on nothing else, however the rows are packed.
//
// Not here: which rows there are (the step plan), how a model becomes a description (native_model.py).
#pragma once

#include "kernels.h"
#include "work_times.h"

namespace kev {

enum class NormKind : int32_t { NONE = 0, RMS = 1, LAYER = 2 };

struct Norm {
  const float* weight;
  const float* bias;  // LAYER only; may be null
  float eps;
  float offset;  // RMS: added to the weight
  int32_t kind;  // NormKind
  int32_t reserved;
};

struct Mlp {
  Weight up;              // [gated ? 2 * width : width, hidden]: gate rows first
  Weight down;            // [hidden, width]
  const float* up_bias;
  const float* down_bias;
};

struct Layer {
  Norm before_attention;
  Norm after_attention;   // applied to the attention's output before it is added
  Norm before_mlp;
  Norm after_mlp;
  Norm query;             // per head, before the rotation
  Norm key;
  Weight qkv;             // [(num_heads + 2 * num_kv_heads) * head_size, hidden]: query heads, key heads, value heads
  Weight out;             // [hidden, num_heads * head_size]
  const float* qkv_bias;
  const float* out_bias;
  const float* cos;       // [max_context, rotary_half]
  const float* sin;
  void* keys;             // arena [P, num_kv_heads, head_size]
  void* values;
  const Mlp* mlps;        // one, or num_experts of them
  Weight router;          // [num_experts, hidden]; only with experts
  int64_t rotary_half;
  int64_t window;
  int64_t num_experts;    // 0: a plain MLP
  int64_t num_chosen;     // experts per token
  float scale;
  float softcap;
  int32_t renormalize;    // the chosen experts' weights sum to one
  int32_t reserved;
};

struct Model {
  const Layer* layers;
  Weight embedding;       // [vocabulary, hidden]
  Weight head;            // [vocabulary, hidden]
  const float* head_bias;
  const float* embedding_columns;  // [hidden] what each column of the embedding's rows is multiplied with; may be null
  Norm final_norm;
  int64_t num_layers;
  int64_t hidden;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t mlp_width;      // of the widest MLP
  int64_t vocabulary;
  int64_t max_context;
  float embedding_scale;
  float final_softcap;    // 0: none
  int32_t activation;     // Activation
  int32_t gated;
  int32_t parallel_residual;  // attention and MLP both read the layer's input
  int32_t kv_type;        // Precision of keys and values
};

struct Step {
  const int64_t* ids;        // [num_rows]
  const int64_t* positions;  // [num_rows], in the row's own question
  const int64_t* places;     // [num_rows] rows of the arena that keys and values go to
  const Segment* segments;
  const int64_t* wanted;     // [num_wanted] rows whose next token is wanted; the first num_greedy of them greedily
  int64_t num_rows;
  int64_t num_segments;
  int64_t num_wanted;
  int64_t num_greedy;
  int64_t* best;             // [num_greedy] token with the largest logit
  float* best_value;         // [num_greedy] that logit; NaN when any logit of the row is NaN
  float* logits;             // [num_wanted - num_greedy, vocabulary]
};

class Executor;

// Null when memory is short.
Executor* executor_create(const Model* model, Pool* pool, int64_t max_rows, int64_t max_wanted);
void executor_destroy(Executor* executor);
int64_t executor_bytes(const Executor* executor);
// Of all its forwards so far.
const WorkTimes& executor_times(const Executor* executor);

// Runs a step. 0: done; 1: the step does not fit the executor or names a row, token or position that does not exist (nothing was run); 2: memory is short.
int executor_run(Executor* executor, const Step& step);

}  // namespace kev

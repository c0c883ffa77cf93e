// The row-invariant CPU kernels of Kev: what each computes, and what it promises.
//
// Invariants and semantics: every output number is summed in one fixed order from one row (or one query) only. So its
// bits do not depend on how many rows there are, where among them its row stands, what the others hold, how many
// threads share the work, or where keys and values lie in memory. Work is cut over outputs, never over a sum. Nothing here
// allocates after construction except what `Scratch` owns; nothing throws across the C ABI.
//
// Not here: which rows there are (the step plan), the model (forward.h), Python (library.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kev {

// Element type of weights, and of keys and values (there F32 or BF16 only).
enum class Precision : int32_t { F32 = 0, BF16 = 1, I8 = 2 };

// ---------------------------------------------------------------------------------------------------------- pool.cpp

// Threads that share one piece of work at a time; the caller works too. Chunks are handed out one by one from a counter,
// so a thread that the system put aside delays one chunk, not the whole. Workers spin briefly, then sleep. Chunks run in the
// default floating point environment, whatever the caller's is. A null pool is the calling thread alone.
class Pool;

using ChunkFn = void (*)(void* context, int64_t chunk);

Pool* pool_create(int num_threads);
void pool_destroy(Pool* pool);
int pool_threads(const Pool* pool);
// The calling thread's number among its pool's: 0 for one that the pool did not start.
int pool_worker();
// Runs fn(context, c) for every c in [0, num_chunks), in any order, and returns when all are done.
void pool_run(Pool* pool, int64_t num_chunks, ChunkFn fn, void* context);

// As pool_run, for a lambda `void(int64_t chunk)`.
template <class F>
inline void parallel(Pool* pool, int64_t num_chunks, F&& body) {
  using Body = std::remove_reference_t<F>;
  pool_run(
      pool, num_chunks, [](void* context, int64_t chunk) { (*static_cast<Body*>(context))(chunk); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// ------------------------------------------------------------------------------------------------------ linear_*.cpp

// A packed weight [n, k]; the same bytes serve every variant. Owned by whoever packed it.
struct Weight {
  int64_t n;
  int64_t k;
  const void* data;      // packed_bytes(precision, n, k), 64-byte aligned
  const float* scale;    // I8: [n] scale per output channel; else null
  const int32_t* sums;   // I8: [n] sum over k of the int8 weights (correction of unsigned activations); else null
  int32_t precision;     // Precision
  int32_t reserved;
};

int64_t packed_bytes(Precision precision, int64_t n, int64_t k);

// Packs rows [first, first + count) of a row-major source [n, k] (F32 or BF16 elements, `stride` elements from row to row; `source` points
// at row `first`) into `data`; may be called piece by piece with first % 16 == 0 (so that a load can stream). I8 spreads
// each row (spread.h), w' of w, and quantizes it symmetrically: integer = w' * (127 / max|w'|) to nearest even, scale =
// max|w'| / 127 / 8; a row below 2^-100 counts as zero and has scale 0; writes scale[first..], sums[first..]. The packed bytes are the same for every variant. I8: k <= 131072.
void pack_rows(Pool* pool, Precision precision, const void* source, Precision source_type, int64_t stride, int64_t first,
               int64_t count, int64_t n, int64_t k, void* data, float* scale, int32_t* sums);

// Writes row `index` of a packed weight as k floats (I8: spread back, times its scale).
void unpack_row(const Weight& weight, int64_t index, float* out);

// Rows as a linear of some precision reads them: BF16 rounded, I8 quantized with a scale of their own, F32 as they were.
struct PreparedRows {
  const unsigned char* x;
  int64_t stride;      // bytes
  const float* scale;  // I8
};

// Bytes of memory that prepare_rows() needs for `rows` rows of width k.
int64_t prepared_bytes(Precision precision, int64_t rows, int64_t k);

// Prepares rows of width k, `ldx` apart, into `memory` (64-byte aligned), on the calling thread.
PreparedRows prepare_rows(Precision precision, const float* x, int64_t rows, int64_t ldx, int64_t k, void* memory);

// Outputs [first, last) of a linear for prepared rows, on the calling thread: the bits of linear(). Both are multiples
// of 16 or n. y: [rows, last - first], `ldy` apart. The first outputs of `next` (null: none) are fetched on the way.
void linear_rows(const Weight& weight, const PreparedRows& x, int64_t rows, int64_t first, int64_t last,
                 const float* bias, float* y, int64_t ldy, const Weight* next);

// Bytes of scratch that linear() needs for `rows` rows of width k.
int64_t linear_scratch_bytes(Precision precision, int64_t rows, int64_t k);

// y[r, j] = sum_k x[r, k] * w[j, k] (+ bias[j]).  x: [rows, k] float, `ldx` apart; y: [rows, n] float, `ldy` apart.
// BF16 rounds x to bfloat16 (nearest even); I8 quantizes each row of x by itself, as pack_rows does; int32 sums are exact;
// y = float(sum) * (scale_x * scale_w[j]) (+ bias). A row with NaN or infinity gives NaN outputs, for that row alone.
// rows may be 0. `scratch` holds linear_scratch_bytes, 64-byte aligned. The first outputs of `next` (null: none), which the
// same pool will be given after these, are fetched on the way.
void linear(Pool* pool, const Weight& weight, const float* x, int64_t rows, int64_t ldx, const float* bias, float* y,
            int64_t ldy, void* scratch, const Weight* next = nullptr);

// The largest y[r, j] of each row and its lowest index, without storing y; `softcap` > 0 applies c * tanh(y / c) first. Same bits as
// linear() followed by a search. A NaN in the row wins (value = NaN).
void linear_argmax(Pool* pool, const Weight& weight, const float* x, int64_t rows, int64_t ldx, const float* bias,
                   float softcap, int64_t* index, float* value, void* scratch);

// --------------------------------------------------------------------------------------------------- attention_*.cpp

// One question's rows in a forward. Positions count inside the question; places are rows of the arena.
struct Segment {
  int64_t row;            // first row of q and out
  int64_t num_rows;
  int64_t position;       // of the first row
  int64_t prefix_start;   // place of position 0 when num_prefix > 0
  int64_t num_prefix;     // positions [0, num_prefix) lie at prefix_start + p, the others at private_start + p - num_prefix
  int64_t private_start;
};

struct Attention {
  const float* q;         // row r, head h at q + r * ldq + h * head_size
  int64_t ldq;
  const void* keys;       // arena [P, num_kv_heads, head_size] of `kv_type`
  const void* values;     // arena [P, num_kv_heads, head_size]
  float* out;             // row r, head h at out + r * ldo + h * head_size
  int64_t ldo;
  int64_t num_heads;
  int64_t num_kv_heads;   // divides num_heads; query head h reads kv head h / (num_heads / num_kv_heads)
  int64_t head_size;
  int64_t window;         // row at position p sees positions (p - window, p]; 0: all up to p
  float scale;
  float softcap;          // > 0: scores = c * tanh(scores / c), before the softmax; 0: none
  int32_t kv_type;        // Precision F32 or BF16
  int32_t reserved;
};

int64_t attention_scratch_bytes(int num_threads, int64_t max_context, int64_t head_size, int64_t num_heads);

// Softmax attention of every row of every segment over its own question's positions up to itself; the keys and values of those
// positions (this forward's included) are in the arena already. Exact softmax: maximum, then exponentials, then sums in order of position,
// cut in blocks that depend on the row's own position only. NaN outside the visible positions is never read.
void attention(Pool* pool, const Attention& call, const Segment* segments, int64_t num_segments, void* scratch);

// ----------------------------------------------------------------------------------------------------- rowwise_*.cpp
// All of them handle each row alone. They run over rows [first, last): the caller cuts.

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * (weight + offset); out may be x.
void rms_norm(const float* x, int64_t ldx, const float* weight, float offset, float eps, int64_t width, float* out,
              int64_t ldo, int64_t first, int64_t last);
// out[r] = (x[r] - mean) / sqrt(var + eps) * weight + bias (bias may be null); out may be x.
void layer_norm(const float* x, int64_t ldx, const float* weight, const float* bias, float eps, int64_t width,
                float* out, int64_t ldo, int64_t first, int64_t last);
// Rotates the first 2 * half numbers of each of num_heads heads of row r by the angles of position positions[r]; halves, not pairs:
// (a[i], a[i + half]). cos and sin: [max_context, half].
void rotate(float* x, int64_t ldx, int64_t num_heads, int64_t head_size, int64_t half, const float* cos,
            const float* sin, const int64_t* positions, int64_t first, int64_t last);

enum class Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };
// out[r, i] = act(gate[r, i]) * up[r, i]; up may be null (then 1). In place when out == gate.
void activate(Activation kind, const float* gate, int64_t ldg, const float* up, int64_t ldu, int64_t width, float* out,
              int64_t ldo, int64_t first, int64_t last);
// out[r] += x[r]
void add(const float* x, int64_t ldx, int64_t width, float* out, int64_t ldo, int64_t first, int64_t last);
// x[i] = c * tanh(x[i] / c), as in linear_argmax.
void soften(float* x, int64_t count, float softcap);
// Stores floats as `type` (F32 or BF16, nearest even).
void store(const float* x, int64_t count, Precision type, void* out);
// Loads `count` numbers of `type` (F32 or BF16) as floats.
void load(const void* x, int64_t count, Precision type, float* out);

// --------------------------------------------------------------------------------------------------------- isa.cpp

// Which variant runs: "avx512_bf16_vnni", "avx2" or "portable"; chosen once from the CPU, or by KEV_KERNELS for tests.
const char* isa_name();

}  // namespace kev

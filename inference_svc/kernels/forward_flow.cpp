#include "forward_flow.h"

#include <algorithm>

#include "forward_parts.h"
#include "spin.h"

namespace kev {
namespace {

constexpr int64_t TILE_ROWS = 6;       // that a linear takes at once, in the widest variant
constexpr int64_t PIECE_UNITS = 576;   // query rows of one key-value head that are worth laying out keys and values for
constexpr int64_t LEAST_PIECE_ROWS = 16;
constexpr int64_t PIECES_PER_THREAD = 2;

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

bool follows(const Segment& before, const Segment& next) {
  return before.row + before.num_rows == next.row && before.position + before.num_rows == next.position &&
         before.prefix_start == next.prefix_start && before.num_prefix == next.num_prefix &&
         before.private_start == next.private_start;
}

// Whether a row of the segment may see what lies at this place of the arena.
bool sees(const Segment& segment, int64_t place) {
  const int64_t end = segment.position + segment.num_rows, prefix = std::min(end, segment.num_prefix);
  return (place >= segment.prefix_start && place < segment.prefix_start + prefix) ||
         (place >= segment.private_start && place < segment.private_start + end - prefix);
}

}  // namespace

Flow::Flow(const Model& model, const Step& step, const PassRows& rows, int64_t threads)
    : model_(model), step_(step), rows_(rows) {
  cut_rows(threads);
  cut_segments(threads);
  connect();
  blocks_done_ = std::vector<Progress>(blocks_.size());
  pieces_done_ = std::vector<Progress>(pieces_.size());
}

// Blocks of whole tiles, of nearly one size.
void Flow::cut_rows(int64_t threads) {
  const int64_t tiles = ceil_div(step_.num_rows, TILE_ROWS);
  const int64_t count = std::min(tiles, std::max(threads, ceil_div(tiles * TILE_ROWS, MAX_PASS_ROWS)));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t end = tiles * (i + 1) / count * TILE_ROWS;
    blocks_.push_back({tiles * i / count * TILE_ROWS, std::min(step_.num_rows, end), {}});
  }
}

// Pieces of nearly one number of rows. Neighbouring segments of one question are cut as one.
void Flow::cut_segments(int64_t threads) {
  const int64_t group = model_.num_heads / model_.num_kv_heads;
  const int64_t fair = ceil_div(step_.num_rows, PIECES_PER_THREAD * threads);
  const int64_t most = std::max(LEAST_PIECE_ROWS, std::min(fair, PIECE_UNITS / group));
  const int64_t each = ceil_div(step_.num_rows, ceil_div(step_.num_rows, most));
  int64_t room = 0;  // rows that still fit in the last piece
  for (int64_t i = 0; i < step_.num_segments;) {
    Segment whole = step_.segments[i++];
    for (; i < step_.num_segments && follows(whole, step_.segments[i]); ++i)
      whole.num_rows += step_.segments[i].num_rows;
    while (whole.num_rows > 0) {
      if (room == 0) {
        const auto first = static_cast<int64_t>(segments_.size());
        pieces_.push_back({first, first, {}});
        room = each;
      }
      Segment part = whole;
      part.num_rows = std::min(whole.num_rows, room);
      segments_.push_back(part);
      ++pieces_.back().last_segment;
      room -= part.num_rows;
      whole.row += part.num_rows;
      whole.position += part.num_rows;
      whole.num_rows -= part.num_rows;
    }
  }
}

// Finds out who reads what of whom.
void Flow::connect() {
  for (size_t p = 0; p < pieces_.size(); ++p) {
    Piece& piece = pieces_[p];
    for (int64_t s = piece.first_segment; s < piece.last_segment; ++s) {
      const Segment& segment = segments_[s];
      for (size_t b = 0; b < blocks_.size(); ++b) {
        Block& block = blocks_[b];
        const bool holds = segment.row < block.last && block.first < segment.row + segment.num_rows;
        if (holds) block.pieces.include(static_cast<int64_t>(p));
        if (holds || std::any_of(step_.places + block.first, step_.places + block.last,
                                 [&](int64_t place) { return sees(segment, place); }))
          piece.blocks.include(static_cast<int64_t>(b));
      }
    }
  }
}

void Flow::work(const RowPass::Parts& parts, const Memory& memory, WorkTimes* spent) {
  RowPass pass(model_, parts, memory.pass, spent);
  const auto blocks = static_cast<int64_t>(blocks_.size()), pieces = static_cast<int64_t>(pieces_.size());
  const int64_t count = model_.num_layers * (blocks + pieces) - pieces;
  for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < count;) {
    const int64_t layer = item / (blocks + pieces), index = item % (blocks + pieces);
    if (index < blocks) {
      await(blocks_done_, {index, index + 1}, layer, spent);
      await(pieces_done_, blocks_[index].pieces, layer, spent);
      run_block(pass, layer, index);
      blocks_done_[index].layers.store(layer + 1, std::memory_order_release);
    } else {
      await(blocks_done_, pieces_[index - blocks].blocks, layer + 1, spent);
      const int64_t start = WorkTimes::now();
      run_piece(layer, index - blocks, memory.attention);
      spent->add(Work::ATTENTION, start);
      pieces_done_[index - blocks].layers.store(layer + 1, std::memory_order_release);
    }
  }
}

// Waits until all of the range have come so far.
void Flow::await(const std::vector<Progress>& all, const Range& range, int64_t layers, WorkTimes* spent) {
  const int64_t start = WorkTimes::now();
  for (int64_t i = range.first; i < range.last; ++i)
    wait_for([&] { return all[i].layers.load(std::memory_order_acquire) >= layers; });
  spent->add(Work::WAIT, start);
}

void Flow::run_block(RowPass& pass, int64_t layer, int64_t index) const {
  const Block& block = blocks_[index];
  const Layer* layers = model_.layers + layer;
  if (layer > 0) pass.after_attention(layers[-1], rows_, &layers[0].qkv, block.first, block.last);
  const Weight* next = layer > 0 ? &layers[-1].out : &layers[0].qkv;
  pass.before_attention(layers[0], step_, rows_, layer < model_.num_layers - 1, next, block.first, block.last);
}

void Flow::run_piece(int64_t layer, int64_t index, void* scratch) const {
  const Piece& piece = pieces_[index];
  attention(nullptr, attention_of(model_, model_.layers[layer], rows_.qkv, rows_.mixed),
            segments_.data() + piece.first_segment, piece.last_segment - piece.first_segment, scratch);
}

}  // namespace kev

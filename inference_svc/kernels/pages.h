// Large pages for memory that forwards read from end to end: with small ones, looking up where they lie takes a tenth
// of the time.
//
// Invariants and semantics: hints. Where the system has no large pages, has none left, or keeps files on small ones,
// nothing changes. What memory holds never does.
#pragma once

#include <cstdint>

namespace kev {

// Before memory is first written: the whole large pages in it are to be such.
void prefer_large_pages(void* data, int64_t num_bytes);

// Afterwards: moves what is there to large pages, also those that it shares with its neighbours in memory.
void move_to_large_pages(const void* data, int64_t num_bytes);

}  // namespace kev

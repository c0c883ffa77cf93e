#include "pages.h"

#if defined(__linux__)
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#endif

namespace kev {

#if defined(__linux__)

namespace {
constexpr uintptr_t LARGE_PAGE = uintptr_t{1} << 21;
}

void prefer_large_pages(void* data, int64_t num_bytes) {
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
  const uintptr_t last = (start + static_cast<uintptr_t>(num_bytes)) / LARGE_PAGE * LARGE_PAGE;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

void move_to_large_pages(const void* data, int64_t num_bytes) {
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = start / LARGE_PAGE * LARGE_PAGE;
  const uintptr_t last = (start + static_cast<uintptr_t>(num_bytes) + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_COLLAPSE);
}

#else

void prefer_large_pages(void*, int64_t) {}
void move_to_large_pages(const void*, int64_t) {}

#endif

}  // namespace kev

"""Row-invariant CPU kernels: native code behind a plain C ABI, and what loads and packs for it."""

"""Where Kev keeps what it can make again: converted and packed models, environments of benchmarks.

Not here: what is kept there (``kev.model_cache``, ``inference_svc.native_image``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_root(cache_dir: str | None, env: Mapping[str, str]) -> Path:
    """Where the cache lies: ``cache_dir``, else KEV_CACHE_DIR, else kev under XDG_CACHE_HOME, else ~/.cache/kev."""
    chosen = cache_dir or env.get("KEV_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    # The XDG standard has relative paths ignored.
    shared = Path(env.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "kev"

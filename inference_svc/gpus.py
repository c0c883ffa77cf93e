"""What the CUDA runtime says of this machine.

Not here: what is made of it (``devices``, ``kev.plan``).
"""

from __future__ import annotations

import torch


def visible_gpus() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count()


def gpu_name(device: str) -> str:
    """Kind of a GPU, the same for equal ones: name and compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} {major}.{minor}"


def gpu_bytes(device: str) -> int:
    """Memory of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)

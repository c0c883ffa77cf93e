"""The engine cores of one process: how many there are, and on which devices.

Invariants and semantics: pure. Every core has one device; several cores may share one.

Not here: what a core is (``node``), which GPUs there are (``gpus``), who gets which question (``common.memory``).
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Config
from common.config_sections import DeployConfig, DeployMode
from common.errors import ConfigError

CPU = "cpu"


def engine_devices(config: Config, num_gpus: int) -> tuple[str, ...]:
    """The device of each engine core.

    Args:
        config: ``deploy`` and ``core.device`` say it.
        num_gpus: GPUs that are visible.

    Raises:
        ConfigError: a device is not there, or the number of cores cannot be known.
    """
    deploy = config.deploy
    if deploy.mode is not DeployMode.MULTI_GPU:
        return (config.core.device,)
    if config.core.tensor_parallel > 1:
        raise ConfigError(
            f"kev.core.tensor_parallel: {config.core.tensor_parallel} spreads one engine core over several devices, "
            "deploy.mode multi_gpu gives each device a core of its own; choose one, or have several nodes of "
            "deploy.mode distributed, each with a spread model"
        )
    devices = deploy.devices or tuple(f"cuda:{index}" for index in range(num_gpus)) or (CPU,)
    missing = [device for device in devices if device != CPU and int(device.removeprefix("cuda:")) >= num_gpus]
    if missing:
        raise ConfigError(f"kev.deploy.devices: there is no {missing[0]} here, {num_gpus} GPUs are visible")
    return tuple(devices[core % len(devices)] for core in range(_num_cores(deploy, devices)))


def _num_cores(deploy: DeployConfig, devices: Sequence[str]) -> int:
    if deploy.workers:
        return deploy.workers
    if tuple(devices) == (CPU,):
        message = "must be set where there is no GPU: mode multi_gpu then runs so many engine cores on the CPU"
        raise ConfigError(f"kev.deploy.workers: {message}, its threads divided between them")
    return len(devices)


def threads_per_core(configured: int, devices: Sequence[str], num_cpus: int) -> int:
    """CPU threads of one core's forward; 0 leaves it to the library.

    Args:
        configured: ``core.num_threads``.
        devices: one per core.
        num_cpus: processors that this process may use.
    """
    sharing = sum(device == CPU for device in devices)
    return configured if configured or sharing < 2 else max(1, num_cpus // sharing)

"""The memory bill of each device when several engine cores run in one process.

Invariants and semantics: the cores on a device share one copy of the weights; KV and working memory are each core's
own. Loads no torch, unless the GPUs of this machine must be counted.

Not here: the bill of one core (``inference_svc.memory_bill``).
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from common.config import Config
from common.config_sections import DeployMode
from common.errors import ConfigError
from inference_svc.devices import CPU, engine_devices
from inference_svc.memory_bill import LevelBill, MemoryBill


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBill:
    """One device with its cores."""

    device: str
    num_cores: int
    memory_bytes: int
    """For how many channels."""
    bill: MemoryBill
    """Of one core alone."""

    @property
    def fixed_bytes(self) -> int:
        """What is needed before the first channel."""
        return self.bill.weight_bytes + self.num_cores * self.bill.working_bytes

    def bytes_for(self, level: LevelBill, num_channels: int) -> int:
        """Everything on the device, with so many channels a core."""
        return self.fixed_bytes + self.num_cores * level.bytes_for(num_channels)

    def channels_within(self, level: LevelBill) -> int:
        """Channels of each core that fit."""
        return level.channels_within((self.memory_bytes - self.fixed_bytes) // self.num_cores)


def device_bills(config: Config, bill: MemoryBill, memory_bytes: int, *, is_given: bool) -> tuple[DeviceBill, ...]:
    """The bill of each device of the configuration; none unless ``deploy.mode`` is ``multi_gpu``.

    Args:
        config: the deployment.
        bill: of one core.
        memory_bytes: of the CPU, or of each device.
        is_given: the memory was asked about and is not that of this machine.

    Raises:
        ConfigError: a device is not here and its memory not given, or the number of cores cannot be known.
    """
    if config.deploy.mode is not DeployMode.MULTI_GPU:
        return ()
    cores = engine_devices(config, _num_gpus(config))
    return tuple(
        DeviceBill(
            device=device,
            num_cores=cores.count(device),
            memory_bytes=memory_bytes if is_given or device == CPU else _gpu_bytes(device),
            bill=bill,
        )
        for device in dict.fromkeys(cores)
    )


def as_data(devices: tuple[DeviceBill, ...], num_channels: int) -> list[dict[str, object]]:
    """The bills as JSON data."""
    return [
        {
            "device": one.device,
            "cores": one.num_cores,
            "bytes_memory": one.memory_bytes,
            "bytes_fixed": one.fixed_bytes,
            "levels": [
                {
                    "level": level.level.value,
                    "kv_cache": level.kv_cache.value,
                    "bytes": one.bytes_for(level, num_channels),
                    "channels_per_core_that_fit": one.channels_within(level),
                }
                for level in one.bill.levels
            ],
        }
        for one in devices
    ]


def print_devices(devices: tuple[DeviceBill, ...], num_channels: int, console: Console) -> None:
    """The bills as a table."""
    if not devices:
        return
    table = Table("device", "cores", "memory", "level", "kv_cache", "in all", "fit per core")
    for one in devices:
        for level in one.bill.levels:
            fit = f"{one.channels_within(level):,}"
            sizes = sized(one.memory_bytes), sized(one.bytes_for(level, num_channels))
            table.add_row(
                one.device, str(one.num_cores), sizes[0], level.level.value, level.kv_cache.value, sizes[1], fit
            )
    console.print(table)
    console.print(
        f"in all: weights once, and {num_channels} channels of each core of the device", highlight=False, soft_wrap=True
    )


def sized(num_bytes: int) -> str:
    """Bytes for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _num_gpus(config: Config) -> int:
    if config.deploy.devices:  # taken at their word: a bill is often wanted for another machine
        return 1 + max((int(name.removeprefix("cuda:")) for name in config.deploy.devices if name != CPU), default=-1)
    from inference_svc.gpus import visible_gpus

    return visible_gpus()


def _gpu_bytes(device: str) -> int:
    from inference_svc.gpus import gpu_bytes, visible_gpus

    if int(device.removeprefix("cuda:")) >= visible_gpus():
        raise ConfigError(f"{device} is not on this machine; say with --memory how much memory a device has")
    return gpu_bytes(device)

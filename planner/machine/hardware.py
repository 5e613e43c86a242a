"""Describes a machine to the planner: sizes in bytes, rates per second."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.checks import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Memory sizes and rates of one machine. "GPU" is the device that computes; on a machine without one, it is the
    CPU.

    Rates are those reached while the other resources work, too (updates under transfer traffic). `launch_s`: seconds
    that the Python thread needs to launch the kernels of one block for one micro-batch, if the block's own time was not
    measured. `operation_s`: seconds that it needs to issue an operation between blocks: a copy, an allocation, a
    release. `cpu_memory_bytes_per_s` is shared by transfers and CPU updates (28 bytes per parameter). Tensors below
    `min_transfer_bytes` stay on the device if there is room. `shared_compute`: the part of its speed that computing
    loses while a copy or a CPU update runs; 0 except where the CPU is the device and all share its cores.
    `disk_read_bytes_per_s`, `disk_write_bytes_per_s`: of the drive with the model's files and the optimizer states;
    until measured, those of an ordinary NVMe drive. `disk_sustained_bytes_per_s`: the rate at which the drive writes
    for hours; 0: no slower than at first. `disk_bytes`: the bytes that states may take on the drive; 0: none may be
    there. `disk_rated_bytes`: the bytes that may be written in the drive's life; 0: not known.
    `cpu_rounded_update_parameters_per_s`, `gpu_rounded_update_parameters_per_s`: update rates of optimizers with 8-bit
    moments; 0: not measured.
    """

    name: str
    gpu_bytes: int
    cpu_bytes: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    gpu_update_parameters_per_s: float
    cpu_update_parameters_per_s: float
    cpu_memory_bytes_per_s: float
    launch_s: float = 0.0
    operation_s: float = 0.0
    min_transfer_bytes: int = 0
    flops_per_s: float = 0.0
    shared_compute: float = 0.0
    disk_read_bytes_per_s: float = 2e9
    disk_write_bytes_per_s: float = 1.5e9
    disk_sustained_bytes_per_s: float = 0.0
    disk_bytes: int = 0
    disk_rated_bytes: int = 0
    gpu_rounded_update_parameters_per_s: float = 0.0
    cpu_rounded_update_parameters_per_s: float = 0.0

    @property
    def is_gpu(self) -> bool:
        """Whether a GPU computes, recognized by `launch_s` > 0: a CPU has no launch time. If a plan is made for another
        machine without `launch_s`, the result is False even for a GPU; no caller asks then."""
        return self.launch_s > 0

    @property
    def disk_s_per_byte(self) -> float:
        """Seconds to read a byte from the drive and then write it back. The two times add up, because a drive does one
        thing at a time."""
        return 1 / self.disk_read_bytes_per_s + 1 / self.disk_write_bytes_per_s

    def __post_init__(self) -> None:
        check_numbers(self)
        for rate in (
            "h2d_bytes_per_s",
            "d2h_bytes_per_s",
            "gpu_update_parameters_per_s",
            "cpu_update_parameters_per_s",
            "cpu_memory_bytes_per_s",
            "disk_read_bytes_per_s",
            "disk_write_bytes_per_s",
        ):
            if getattr(self, rate) == 0:
                raise ValueError(f"Hardware.{rate} is 0; a rate is more than zero")

    def with_cpu_updates(self, factor: float) -> Hardware:
        """The same machine with CPU updates that are `factor` times as fast."""
        return replace(
            self,
            cpu_update_parameters_per_s=factor * self.cpu_update_parameters_per_s,
            cpu_rounded_update_parameters_per_s=factor * self.cpu_rounded_update_parameters_per_s,
        )

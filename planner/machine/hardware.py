"""A machine as the planner sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.checks import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Sizes and rates of one machine.

    Rates are those reached while the other resources work too (updates under transfer traffic). `launch_s` is the time
    of the issuing thread per block and slice, where the block's own was not measured; `operation_s` is its time to
    issue an operation between turns: a fetch, an allocation, a release. `cpu_memory_bytes_per_s` is shared by
    transfers and CPU updates (28 bytes per parameter). Tensors below `min_transfer_bytes` stay on the device where
    there is room. `shared_compute`: which part of its speed computing loses while a copy or a CPU update runs beside
    it; 0 but where the CPU is the device and they share its cores. `disk_read_bytes_per_s`, `disk_write_bytes_per_s`:
    of the drive with the model's files and the optimizer states, as long as they were not measured those of a plain
    NVMe one. `disk_sustained_bytes_per_s`: what it writes for hours; 0: as fast as ever. `disk_bytes`: what states may
    take of it, 0: none may be there. `disk_rated_bytes`: how much may be written to it by its maker's warranty; 0: not
    known. `cpu_rounded_update_parameters_per_s`, `gpu_rounded_update_parameters_per_s`: where moments are in 8 bits; 0:
    not measured.
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
        """Whether a GPU computes: a CPU has no launch time, as it issues by computing. It is not known for a machine
        that a chain is planned for where `launch_s` is not given; nothing asks there."""
        return self.launch_s > 0

    @property
    def disk_s_per_byte(self) -> float:
        """Seconds per byte that is read and then written again: a drive does one thing at a time."""
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
        """The same machine with a CPU that updates `factor` times as fast."""
        return replace(
            self,
            cpu_update_parameters_per_s=factor * self.cpu_update_parameters_per_s,
            cpu_rounded_update_parameters_per_s=factor * self.cpu_rounded_update_parameters_per_s,
        )

"""Tells the kernel's out-of-memory killer which process to choose first, and finds out whether it has killed any. Linux
counts the killed processes of a control group (memory.events; memory.oom_control in version 1) and of the machine
(/proc/vmstat)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from planner.errors import Exit, UserError

KILLED_FOR_MEMORY = "killed-for-memory"
_FIRST_VICTIM = "500"  # of -1000 to 1000: before desktops and daemons, which have 0 to 200
_ROOT, _GROUPS, _VMSTAT = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")


def kills() -> int:
    """How many processes the kernel has killed because memory ran out: those of this process's control group or, if the
    group has no such counter, those of the whole machine."""
    for file in _counters():
        with suppress(OSError, ValueError):
            words = dict(line.split()[:2] for line in file.read_text("ascii").splitlines())
            if "oom_kill" in words:
                return int(words["oom_kill"])
    return 0


def be_first(pid: int) -> None:
    """Ask the kernel to kill the process `pid` of this user before others when memory runs out."""
    with suppress(OSError):  # it has ended already
        Path(f"/proc/{pid}/oom_score_adj").write_text(_FIRST_VICTIM, "ascii")


def killed_for_memory(who: str, step: int | None) -> UserError:
    """The UserError that the kernel has killed the process `who` because memory ran out. `step`: step number of the
    last checkpoint; None if there is none."""
    last_checkpoint = "there was no checkpoint yet" if step is None else f"the last checkpoint is that of step {step}"
    return UserError(
        f"The kernel killed the {who}: the machine had no memory left.",
        code=KILLED_FOR_MEMORY,
        numbers=(last_checkpoint,),
        hint="give a smaller cpu_budget, or close what else uses memory",
        exit_code=Exit.FAILED,
    )


def _counters() -> list[Path]:
    """Files that may have the kernel's counter of killed processes, those of the narrowest control group first."""
    files = []
    with suppress(OSError):
        for line in _GROUPS.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                files.append(_ROOT / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(_ROOT / "memory" / path.lstrip("/") / "memory.oom_control")
                files.append(_ROOT / "memory" / "memory.oom_control")  # a container sees its own group as the root
    return [*files, _VMSTAT]

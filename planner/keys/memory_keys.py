"""The keys of a job for the memory and the drives that it may use."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from planner.keys.base import Keys
from planner.keys.fields import Size, Text, Written


class MemoryKeys(Keys):
    """These keys limit the GPU memory, the host memory and the drives that the job uses."""

    gradient_checkpointing: Annotated[bool | None, Field(description="true, false or null")] = None
    """This key is accepted and not used: the planner decides block by block what is recomputed."""
    gpu_budget: Size = None
    """The most GPU memory that the job uses at any moment. null: what is free when the job's turn comes, less a reserve
    for the desktop; while the job waits, its plan is an estimate for the whole card less that reserve. When its turn
    comes, its blocks are measured and it is planned again. A budget above what the machine has is refused at submission
    (`budget-too-large`)."""
    cpu_budget: Size = None
    """The most host memory for weights, optimizer states and activations. null: the machine's memory, less the system's
    share."""
    disk_paths: Annotated[
        Annotated[tuple[Text, ...], Field(min_length=1)] | None, Field(description="a path, a list of paths, or null")
    ] = None
    """Folders on drives for optimizer states, weights and activations for which `cpu_budget` has no room
    ([more](../how-to/use-a-drive.md)). null: no drive is used. offmate creates a missing folder, but not its parent,
    whose drive may not be mounted. No path may appear twice."""
    disk_budget: Size = None
    """The most bytes that these may take on the drives, and never more than is free. null: what is free."""
    disk_rated_writes: Written = None
    """How many bytes may be written to all drives of `disk_paths` together in their life, by their data sheets (TBW),
    such as `1200TB`. A run that takes more than 10% of that life is refused (`disk-worn`); `accept` allows any wear.
    With null offmate assumes 600 times the drives' size, until the first of them is worn out."""

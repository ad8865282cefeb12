"""One of two processes that measure a collective of which rank 1 knows nothing; run by ``test_profile_processes``."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from autopar.profiler.collectives import Group, measure_collective
from autopar.profiler.needs import GroupNeed
from cost_models import ProfileError


def main() -> int:
    dist.init_process_group("gloo")
    need = GroupNeed("size=2 stride=1 groups=1 per_node=2", ((0, 1),), ("all_reduce",))
    group = Group(need, torch.device("cpu"), timeout_seconds=2.0)
    if dist.get_rank() == 1:
        time.sleep(4.0)  # it hangs for longer than the others wait
        return 0
    start = time.monotonic()
    try:
        measure_collective(group, "all_reduce", 4096)
    except ProfileError as error:
        sys.stdout.write(f"{time.monotonic() - start:.1f} s: {error}\n")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())

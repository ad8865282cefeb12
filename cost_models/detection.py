"""What this machine has: processor, cores, memory and its bandwidth, network cards.

Enters: the files that Linux keeps under /proc and /sys (another root in tests). Leaves: figures, and the ``Link`` between
this machine and others. Nothing here is a guess: where Linux does not say, the answer is None.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from cost_models.catalogue import LINKS
from cost_models.parts import Link

ROOT = Path("/")

# Rates of one InfiniBand port in bit/s -> the catalogue's link.
INFINIBAND = {100e9: "InfiniBand-EDR", 200e9: "InfiniBand-HDR", 400e9: "InfiniBand-NDR", 800e9: "InfiniBand-XDR"}
ETHERNET = {1e9: "Ethernet-1G", 10e9: "Ethernet-10G", 25e9: "Ethernet-25G", 100e9: "Ethernet-100G"}
STREAM_BYTES = 2**26  # larger than the caches that one core has to itself


def processor(root: Path = ROOT) -> str:
    """The processor's model, as Linux names it; ``unknown`` where it does not."""
    text = _read(root / "proc/cpuinfo") or ""
    found = re.search(r"^(?:model name|Hardware|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else "unknown"


@lru_cache(maxsize=1)
def given_cores() -> frozenset[int]:
    """Cores that this process was given: a process that later binds itself to some of them stands on the same machine."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: those it was given, or the container's share where that is less (cgroup v2)."""
    bound = len(given_cores())
    quota, _, period = (_read(root / "sys/fs/cgroup/cpu.max") or "max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, min(bound, int(quota) // int(period)))
    return bound


def memory_bytes(root: Path = ROOT) -> int | None:
    """Physical memory, or the container's limit where that is lower (cgroup v2); None where Linux does not say."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE)
    limit = (_read(root / "sys/fs/cgroup/memory.max") or "max").strip()
    sizes = [int(found[1]) * 1024] if found else []
    sizes += [int(limit)] if limit.isdigit() else []
    return min(sizes) if sizes else None


def memory_bandwidth_bytes_per_second(rounds: int = 5) -> float:
    """What one thread reaches when it copies between arrays larger than its caches; bytes read and written both count."""
    source, target = np.ones(STREAM_BYTES // 8), np.zeros(STREAM_BYTES // 8)
    seconds = []
    for _ in range(rounds + 1):  # the first touches the memory
        start = time.thread_time()
        np.copyto(target, source)
        seconds.append(time.thread_time() - start)
    return 2 * STREAM_BYTES / float(np.median(seconds[1:]))


def network_link(root: Path = ROOT) -> Link | None:
    """What joins this machine to others: its active InfiniBand ports of the highest rate, or its fastest Ethernet card.

    None where there is neither, or their rate is not known (a virtual machine's card often says nothing).
    """
    return _infiniband(root) or _ethernet(root)


def _infiniband(root: Path) -> Link | None:
    """Ports are found under /sys/class/infiniband; those that carry Ethernet (RoCE) count as what the catalogue has for it."""
    rates: list[tuple[float, bool]] = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate") or "")
        if rate and "ACTIVE" in (_read(port / "state") or ""):
            rates.append((float(rate[1]) * 1e9, "Ethernet" in (_read(port / "link_layer") or "")))
    if not rates:
        return None
    best, over_ethernet = max(rates)
    ports = sum(rate == (best, over_ethernet) for rate in rates)
    known = (
        LINKS["RoCE-100G"] if over_ethernet else LINKS[INFINIBAND[min(INFINIBAND, key=lambda bits: abs(bits - best))]]
    )
    return _at_rate(known, best, ports, f"{ports} active ports of {best / 1e9:g} Gbit/s in /sys/class/infiniband")


def _ethernet(root: Path) -> Link | None:
    """Real cards (those that have a device) that are up."""
    rates = []
    for card in sorted((root / "sys/class/net").glob("*")):
        speed = (_read(card / "speed") or "").strip()
        if (card / "device").exists() and speed.isdigit() and (_read(card / "operstate") or "").strip() == "up":
            rates.append(int(speed) * 1e6)
    if not rates:
        return None
    best = max(rates)
    known = LINKS[ETHERNET[min(ETHERNET, key=lambda bits: abs(bits - best))]]
    return _at_rate(
        known, best, rates.count(best), f"{rates.count(best)} cards of {best / 1e9:g} Gbit/s in /sys/class/net"
    )


def _at_rate(known: Link, bits_per_second: float, ports: int, said: str) -> Link:
    """A link of the catalogue's kind with the rate that was found."""
    return replace(
        known, bandwidth_bytes_per_second=bits_per_second / 8, ports_per_node=ports, source=f"{said}; {known.source}"
    )


def network_namespace(root: Path = ROOT) -> str:
    """What tells two hosts apart that share a kernel: the inode of the network namespace; empty where there is none."""
    try:
        return str((root / "proc/self/ns/net").stat().st_ino)
    except OSError:
        return ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no such file, or a card that does not answer
        return None

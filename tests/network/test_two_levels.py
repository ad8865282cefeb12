"""A cluster of two levels on one machine: two network namespaces with two ranks each and a link of limited rate between.

Opt-in (``pytest -m network``), as it needs root, ``ip`` and ``tc``. Within a namespace the loopback is limited, too, so that
both levels have a rate that is known.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from autopar.plans import Plan
from cost_models import Cluster, Profile
from tests.network.two_level_worker import model_and_batch

ROOT = Path(__file__).resolve().parents[2]
ACROSS_BITS, WITHIN_BITS = 0.5e9, 4e9  # per second; both well below what this machine's loopback does
ADDRESSES = ("10.77.31.1", "10.77.31.2")
HOSTS = ("autopar-a", "autopar-b")
CARDS = ("autopar-va", "autopar-vb")


def has_namespaces() -> bool:
    """Whether a namespace can be made here."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    made = subprocess.run(["ip", "netns", "add", "autopar-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "autopar-try"], capture_output=True, check=False)
    return made.returncode == 0


pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(not has_namespaces(), reason="needs root, ip and tc, and the right to make network namespaces"),
]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces joined by a pair of cards."""
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
            run("ip", "-n", host, "link", "set", "lo", "up")
        ends = (CARDS[0], "netns", HOSTS[0], "type", "veth", "peer", "name", CARDS[1], "netns", HOSTS[1])
        run("ip", "link", "add", *ends)
        for host, card, address in zip(HOSTS, CARDS, ADDRESSES, strict=True):
            run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", card)
            run("ip", "-n", host, "link", "set", card, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def limit(card: str, host: str, bits: float) -> None:
    """Let no more than so many bits a second out of a card."""
    bucket = ("tbf", "rate", f"{bits:.0f}bit", "burst", "256kb", "latency", "50ms")
    run("ip", "netns", "exec", host, "tc", "qdisc", "replace", "dev", card, "root", *bucket)


def profiled(folder: Path, name: str) -> tuple[Profile, Cluster]:
    """What four processes on the two hosts measure."""
    started = []
    for number, (host, card) in enumerate(zip(HOSTS, CARDS, strict=True)):
        command = [
            *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "2", "--node-rank", str(number), "--master-addr", ADDRESSES[0], "--master-port", "29555"),
            *("-m", "tests.network.two_level_worker", str(folder), name),
        ]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": card, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    try:
        codes = [process.wait(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0]
    return Profile.load(folder / f"{name}.json"), Cluster.load(folder / f"{name}_cluster.json")


def bits_per_second(profile: Profile, key: str) -> float:
    """What large messages reach."""
    return 8 / profile.collectives[f"send_recv {key}"].seconds_per_byte


def crossing_bytes(plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """Bytes sent between hosts, and all bytes sent."""
    crossing = total = 0.0
    for entry in plan.report()["collectives"]["entries"]:
        num_bytes = entry["count"] * entry["num_bytes"] * len(entry["stages"])
        total += num_bytes
        crossing += num_bytes if cluster.inter_link.name in entry["links"] else 0.0
    return crossing, total


def test_two_levels(hosts: None, tmp_path: Path) -> None:
    for host, card in zip(HOSTS, CARDS, strict=True):
        limit(card, host, ACROSS_BITS)
        limit("lo", host, WITHIN_BITS)
    slow, cluster = profiled(tmp_path, "limited")
    assert [node.num_devices for node in cluster.nodes] == [2, 2]
    assert bits_per_second(slow, "size=2 stride=1 groups=1 per_node=1+1") == pytest.approx(ACROSS_BITS, rel=0.15)
    assert bits_per_second(slow, "size=2 stride=1 groups=1 per_node=2") == pytest.approx(WITHIN_BITS, rel=0.15)
    # two messages that cross at the same time share the link
    assert bits_per_second(slow, "size=2 stride=2 groups=2 per_node=1+1") == pytest.approx(ACROSS_BITS / 2, rel=0.15)

    for host, card in zip(HOSTS, CARDS, strict=True):
        run("ip", "netns", "exec", host, "tc", "qdisc", "del", "dev", card, "root")
        run("ip", "netns", "exec", host, "tc", "qdisc", "del", "dev", "lo", "root")
    fast, _ = profiled(tmp_path, "free")
    model, batch = model_and_batch()
    limited, free = (autopar.plan(model, cluster, batch, profile=profile) for profile in (slow, fast))
    assert limited.fingerprint != free.fingerprint
    # of plans without a pipeline, so that collectives are all that is sent
    one_stage = autopar.Parallelism(pipeline=1)
    limited, free = (autopar.plan(model, cluster, batch, profile=each, parallelism=one_stage) for each in (slow, fast))
    crossing, total = crossing_bytes(limited, cluster)
    assert crossing < 0.25 * total
    assert crossing < 0.5 * crossing_bytes(free, cluster)[0]

"""The machine that a profile is of, and the cluster that torchrun's processes stand on.

Enters: a cluster, or what every process finds on its host. Leaves: a ``Machine``, a ``Cluster``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.errors import InputError
from cost_models import Cluster, ClusterError, Machine, Profile, find_link
from cost_models.detection import network_link, network_namespace, num_cores, processor

Item = TypeVar("Item")

UNKNOWN_NETWORK = "Ethernet-10G"  # where no host knows its cards' rate; a profile has what is reached
Gather = Callable[[Item], list[Item]]


def machine_of(cluster: Cluster, threads: int = 1) -> Machine:
    """This machine as part of a cluster; ``threads`` of one CPU process."""
    import torch  # plans are made without it where there is no profile

    device = cluster.nodes[0].device
    is_cpu = device.kind == "cpu"
    return Machine(
        device=processor() if is_cpu else device.name,
        kind=device.kind,
        devices_per_node=tuple(node.num_devices for node in cluster.nodes),
        threads=threads if is_cpu else 1,
        cores=num_cores(),
        torch_version=str(torch.__version__),
    )


def check_profile(profile: Profile, cluster: Cluster) -> None:
    """Raise ProfileError unless a profile can be of a cluster. CPU processes on one node are processes of this machine."""
    profile.check_cluster(cluster)
    if profile.machine.kind == "cpu" and len(cluster.nodes) == 1:
        profile.check_machine(machine_of(cluster, profile.machine.threads))


def host_name() -> str:
    """What tells this process's host from others: its name, and its network namespace, as containers share a name."""
    return f"{platform.node()} {network_namespace()}"


def gathered_cluster(gather: Gather[str], on_cpu: bool) -> Cluster:
    """The cluster that torchrun's processes stand on: a node for each host, a device for each of its processes.

    All processes call this together. ``gather`` returns the text of every process, in order of rank.

    Raises InputError when the processes of a host are not neighbours in rank, ClusterError when a host's devices cannot be
    found.
    """
    hosts = gather(host_name())
    here, failure = "", ""
    try:
        here = Cluster.local(hosts.count(host_name()), kind="cpu" if on_cpu else "cuda").to_json()
    except ClusterError as error:
        failure = str(error)
    failures = [text for text in gather(failure) if text]
    if failures:
        raise ClusterError(failures[0])
    link = network_link()
    between = "" if link is None else replace(Cluster.from_json(here), inter_link=link).to_json()
    return joined(hosts, gather(here), gather(between))


def joined(hosts: Sequence[str], described: Sequence[str], between: Sequence[str]) -> Cluster:
    """One cluster of what each process says of its host (``described``), and of the links to other hosts (``between``, empty
    where it knows of none): the slowest one counts for all."""
    order = list(dict.fromkeys(hosts))
    if list(hosts) != [host for host in order for _ in range(hosts.count(host))]:
        raise InputError(
            f"the processes of one host are not neighbours in rank ({' '.join(str(order.index(host)) for host in hosts)} are "
            "the hosts of ranks 0, 1, ...): start them with torchrun, which numbers them host by host"
        )
    firsts = [hosts.index(host) for host in order]
    nodes = tuple(Cluster.from_json(described[first]).nodes[0] for first in firsts)
    if len(nodes) == 1:
        return Cluster.from_json(described[0])
    links = [Cluster.from_json(between[first]).inter_link for first in firsts if between[first]]
    links = links or [find_link(UNKNOWN_NETWORK)]
    slowest = min(links, key=lambda link: link.reached_bytes_per_second)
    return Cluster(nodes, slowest, f"{len(nodes)} hosts, {sum(node.num_devices for node in nodes)} processes")


__all__ = ["check_profile", "gathered_cluster", "host_name", "joined", "machine_of"]

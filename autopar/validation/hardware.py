"""The cluster of a row: devices of the catalogue, and links as the row's words describe them.

Enters: a :class:`Run`. Leaves: a Cluster. Where a row says nothing of its links they are those that its devices usually have.
"""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.errors import InputError
from autopar.validation.runs import Run
from cost_models import Cluster, Device, Link, Node, find_device, find_link

# The first word that a device's name has decides.
USUAL_LINKS = {
    "P100": ("NVLink1", "InfiniBand-EDR"), "V100": ("NVLink2", "InfiniBand-EDR"), "A100": ("NVLink3", "InfiniBand-HDR"),
    "H100": ("NVLink4", "InfiniBand-NDR"), "H200": ("NVLink4", "InfiniBand-NDR"), "B200": ("NVLink5", "InfiniBand-NDR"),
    "B300": ("NVLink5", "InfiniBand-XDR"), "GB200": ("NVLink5", "InfiniBand-NDR"), "GB300": ("NVLink5", "InfiniBand-XDR"),
    "MI250": ("xGMI-MI250X", "InfiniBand-HDR"), "MI300": ("xGMI-MI300X", "InfiniBand-NDR"),
}  # fmt: skip
# What a row calls a device, where the catalogue calls it something else.
NAMES = {"A100-SXM4": "A100-SXM4-80GB", "A100": "A100-SXM4-80GB", "V100-SXM3-32GB": "V100-SXM2-32GB"}
KINDS = ("RoCE", "EFA", "Ethernet", "Omni-Path")  # words by which a network is known; any other is InfiniBand
LIKE = {
    "RoCE": "RoCE-100G",
    "EFA": "EFA-P4d",
    "Ethernet": "Ethernet-25G",
    "Omni-Path": "InfiniBand-EDR",
    "": "InfiniBand-NDR",
}
NVL72 = 64  # devices that one NVLink domain of 72 gives to jobs whose sizes are powers of two


def device_of(run: Run) -> Device:
    """The row's device.

    Raises ClusterError: the catalogue does not have it.
    """
    text = run.text("gpu_type")
    name = re.sub(r"\(.*?\)", "", text).strip()
    if "HBM2e 2.4TB/s" in name:
        name = "H100-SXM5-96GB-HBM2e"
    return find_device(NAMES.get(name, name))


def cluster_of(run: Run) -> Cluster:
    """The row's cluster: as many nodes as its devices fill.

    Raises:
        ClusterError: an unknown device or link.
        InputError: devices that do not fill nodes.
    """
    device = device_of(run)
    family = next((word for word in USUAL_LINKS if device.name.startswith(word)), "A100")
    count = run.num_devices
    each = min(_devices_per_node(run), count)
    if count % each:
        raise InputError(f"{count} devices do not fill nodes of {each}; give n_gpus as a multiple of gpus_per_node")
    node = Node(device, each, _intra(run, family))
    return Cluster((node,) * (count // each), _inter(run, family, each), run.text("gpu_type"))


def _devices_per_node(run: Run) -> int:
    if "NVL72" in run.text("intra_link"):
        return NVL72
    return run.count("gpus_per_node") or 8


def _intra(run: Run, family: str) -> Link:
    found = re.match(r"NVLink[1-5]|PCIe[3-5]|xGMI\S*", run.text("intra_link"))
    return find_link(found.group() if found else USUAL_LINKS[family][0])


def _inter(run: Run, family: str, per_node: int) -> Link:
    """From words such as ``4x Omni-Path 100 Gb/s per node``, ``1600 Gb/s RoCE per node`` or ``400 Gb/s RDMA per GPU``."""
    text = run.text("inter_link")
    found = re.search(r"([\d.]+) ?Gb/s", text) or re.search(r"(?:HDR|NDR|EDR|XDR) ?(\d+)", text)
    if not found:
        return find_link(USUAL_LINKS[family][1])
    kind = next((word for word in KINDS if word.lower() in text.lower()), "")
    like = find_link("InfiniBand-HDR" if "HDR" in text else LIKE[kind])
    rate = float(found.group(1)) * 1e9 / 8
    cards = re.match(r"(\d+)x", text)
    if cards:  # so many cards a node, each of this rate
        ports = int(cards.group(1))
    elif "per GPU" in text:
        ports = per_node
    elif kind == "Ethernet":
        ports = 1
    else:  # a node's rate: taken as a card for each device
        ports, rate = per_node, rate / per_node
    return replace(
        like, name=f"{kind or 'InfiniBand'} {rate * 8 / 1e9:g} Gb/s x {ports}", bandwidth_bytes_per_second=rate,
        ports_per_node=None if ports == per_node else ports, source=f"rate as the run says; efficiency as {like.name}",
    )  # fmt: skip

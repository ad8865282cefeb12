"""Predicted against published times of collectives.

``python -m tests.benchmarks.bench_collectives nccl_curves.csv [--each]``. The file has a row for each size of each curve
(columns ``source device n_gpus n_nodes collective size_bytes time_us intra_link inter_link``). Printed is the median error
over sizes of 1 MB and more, by source, and with ``--each`` by curve; curves of devices or links that are not known are
named. Reproduced are the curves' own devices and links, each group of ranks alone on its nodes.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cost_models import AxisCost, Cluster, ClusterError, Link, Node, axis_cost, find_device, find_link

LEAST_BYTES = 10**6
KEYS = ("source", "device", "n_gpus", "n_nodes", "collective", "algo", "intra_link", "inter_link")
FIELDS = (*KEYS, "size_bytes", "time_us")
USUAL = {
    "A100": "NVLink3", "V100": "NVLink2", "H100": "NVLink4", "H200": "NVLink4", "GB200": "NVLink5", "MI250": "xGMI-MI250X",
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """Points (bytes, seconds) of a collective on one group of ranks."""

    key: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def name(self) -> str:
        return ", ".join(self.key[name] for name in ("source", "device", "n_gpus", "n_nodes", "collective"))


def read_curves(path: Path) -> list[Curve]:
    """The curves of a file, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in FIELDS if name not in (reader.fieldnames or ())]
        if missing:
            raise SystemExit(f"{path} lacks the columns {', '.join(missing)}")
        found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        for row in reader:
            key = tuple(row[name] for name in KEYS)
            found.setdefault(key, []).append((float(row["size_bytes"]), float(row["time_us"]) * 1e-6))
    return [Curve(dict(zip(KEYS, key, strict=True)), tuple(points)) for key, points in found.items()]


def cluster_of(curve: Curve) -> Cluster:
    """The curve's nodes, whole ones where fewer ranks than devices take part.

    Raises ClusterError for a device or link that is not known.
    """
    text, nodes = curve.key["device"], int(curve.key["n_nodes"])
    ranks = -(-int(curve.key["n_gpus"]) // nodes)
    name = "MI250X-GCD" if "MI200" in text else re.split(r"[ /(,]", text)[0]
    if not name and curve.key["inter_link"]:
        name = "A100"  # not stated: the network decides
    device = find_device({"A100": "A100-SXM4-80GB", "V100": "V100-SXM2-16GB"}.get(name, name))
    if "NVL72" in curve.key["intra_link"]:
        return Cluster((Node(device, ranks * nodes, find_link("NVLink5")),), find_link("InfiniBand-NDR"))
    whole = 16 if "MI250X" in device.name else 8 if "SXM" in device.name else ranks
    return Cluster(
        (Node(device, max(ranks, whole), _intra(device.name, curve)),) * nodes, _inter(curve.key["inter_link"])
    )


def _intra(device: str, curve: Curve) -> Link:
    text = curve.key["intra_link"]
    if text.startswith(("PCIe", "NVLink3", "NVLink4", "NVLink5")):
        return find_link(text.split(" ")[0])
    if "bridge" in text:
        return find_link("NVLink4-bridge")
    return find_link(next(link for word, link in USUAL.items() if device.startswith(word)))


def _inter(text: str) -> Link:
    if "TCPXO" in text:
        return find_link("GPUDirect-TCPXO-200G")
    return find_link("InfiniBand-HDRx4" if "4x HDR" in text else "InfiniBand-NDR")


def errors(curve: Curve) -> list[float]:
    """Signed relative errors at sizes of 1 MB and more."""
    cluster = cluster_of(curve)
    each = int(curve.key["n_gpus"]) // int(curve.key["n_nodes"])
    ranks = [node * cluster.nodes[0].num_devices + rank for node in range(len(cluster.nodes)) for rank in range(each)]
    if len(cluster.nodes) == 1:
        ranks = list(range(int(curve.key["n_gpus"])))
    kind = {"sendrecv": "send_recv"}.get(curve.key["collective"], curve.key["collective"])
    cost = axis_cost(cluster, [ranks])
    if curve.key["algo"] == "RING":  # the only algorithm that was run
        lines = tuple(tuple(line for line in some if line.algorithm == "ring") for some in cost.lines[kind])
        cost = AxisCost(cost.size, {kind: lines})
    found = ((cost.seconds(kind, size), seconds) for size, seconds in curve.points if size >= LEAST_BYTES)  # type: ignore[arg-type]
    return [float(predicted) / seconds - 1 for predicted, seconds in found]


def table(curves: Sequence[Curve], each: bool) -> str:
    """Errors by source, as text; with ``each`` by curve too."""
    found: dict[str, list[float]] = {}
    lines, unknown = [], []
    for curve in curves:
        try:
            here = errors(curve)
        except ClusterError as error:
            unknown.append(f"not known: {curve.name}: {str(error).split(';')[0]}")
            continue
        found.setdefault(curve.key["source"], []).extend(here)
        if each:
            absolute = median(abs(error) for error in here)
            lines.append(f"  {absolute:6.1%}  {median(here):+7.1%}  {curve.name}")
    for source, all_errors in found.items():
        absolute = median(abs(error) for error in all_errors)
        lines.append(
            f"{absolute:6.1%} median, {max(map(abs, all_errors)):6.1%} at most  {source} ({len(all_errors)} points)"
        )
    return "\n".join([*lines, *unknown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, metavar="CURVES.csv")
    parser.add_argument("--each", action="store_true", help="every curve too")
    arguments = parser.parse_args()
    print(table(read_curves(arguments.curves), arguments.each))


if __name__ == "__main__":
    main()

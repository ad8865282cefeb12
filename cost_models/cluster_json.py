"""Cluster JSON: text to checked parts, and back.

Enters: JSON text, by a person or by ``Cluster.to_json``. Leaves: the parts that ``Cluster`` is made of. The form::

    {"schema_version": 1,
     "name": "two kinds",                                            optional
     "nodes": [{"device": "V100-SXM2-16GB", "num_devices": 8, "link": "NVLink2", "count": 2},   count optional
               {"device": {"name": "mine", "kind": "cuda", "memory_bytes": 85e9,
                           "memory_bandwidth_bytes_per_second": 2e12, "peak_flops": {"float32": 19.5e12}},
                "link": {"name": "fast", "bandwidth_bytes_per_second": 3e11, "latency_seconds": 3e-6},
                "num_devices": 8}],
     "inter_link": "InfiniBand-HDR"}

A device or link is a name of the catalogue or an object with the fields of ``Device`` or ``Link``. A node may have a
``host``, an object with the fields of ``Host``; without one it has the usual one of its device.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import groupby
from typing import TypeVar

from cost_models.catalogue import find_device, find_link
from cost_models.errors import ClusterError
from cost_models.hosts import Host
from cost_models.parts import Device, Link, check_text, whole_number

SCHEMA_VERSION = 1
MAX_COUNT = 100_000  # equal nodes: more than any machine has, and little enough to hold

Part = TypeVar("Part", Device, Link, Host)


@dataclass(frozen=True)
class NodeEntry:
    """``count`` equal nodes."""

    device: Device
    num_devices: int
    link: Link
    count: int
    host: Host | None = None


@dataclass(frozen=True)
class ClusterEntry:
    """What the JSON says."""

    name: str
    nodes: tuple[NodeEntry, ...]
    inter_link: Link


def parse_cluster(text: str) -> ClusterEntry:
    """Read and check JSON text.

    Raises:
        ClusterError: says where in the text, what was found and what to write.
    """
    if not isinstance(text, str):
        raise ClusterError(f"cluster JSON is {type(text).__name__}; give text (Cluster.load reads a file)")
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ClusterError("cluster JSON is nested too deeply; write it as the example clusters are") from error
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated")
        cut = "; the text seems to be cut off" if ends_early else ""
        raise ClusterError(
            f"cluster is not JSON: {error.msg} at line {error.lineno} column {error.colno}{cut}; correct it there"
        ) from error
    entry = _object("cluster", data, required=("schema_version", "nodes", "inter_link"), optional=("name",))
    version = entry["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ClusterError(
            f"cluster: schema_version is {version!r}; this version reads {SCHEMA_VERSION}: convert the file"
        )
    nodes = entry["nodes"]
    if not isinstance(nodes, list) or not nodes:
        raise ClusterError(f"cluster: nodes is {nodes!r}; give a list with at least one node")
    name = entry.get("name", "cluster")
    check_text("cluster", "name", name)
    return ClusterEntry(
        str(name),
        tuple(_node(f"nodes[{index}]", node) for index, node in enumerate(nodes)),
        _link("inter_link", entry["inter_link"]),
    )


def cluster_to_json(name: str, nodes: Sequence[tuple[Device, int, Link, Host | None]], inter_link: Link) -> str:
    """Canonical JSON text: fields in the order of the classes, equal consecutive nodes counted, newline at the end."""
    entries = []
    for (device, num_devices, link, host), same in groupby(nodes):
        given = {} if host is None else {"host": asdict(host)}
        entries.append(
            {"device": asdict(device), "num_devices": num_devices, "link": asdict(link), "count": len(list(same)), **given}
        )
    data = {"schema_version": SCHEMA_VERSION, "name": name, "nodes": entries, "inter_link": asdict(inter_link)}
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _node(where: str, value: object) -> NodeEntry:
    entry = _object(where, value, required=("device", "num_devices", "link"), optional=("count", "host"))
    count = whole_number(where, "count", entry.get("count", 1))
    if count > MAX_COUNT:
        raise ClusterError(f"{where}: count is {count}; give at most {MAX_COUNT}")
    return NodeEntry(
        device=_device(f"{where}.device", entry["device"]),
        num_devices=whole_number(where, "num_devices", entry["num_devices"]),
        link=_link(f"{where}.link", entry["link"]),
        count=count,
        host=_host(f"{where}.host", entry["host"]) if entry.get("host") is not None else None,
    )


def _device(where: str, value: object) -> Device:
    return _named(where, find_device, value) if isinstance(value, str) else _part(where, Device, value)


def _link(where: str, value: object) -> Link:
    return _named(where, find_link, value) if isinstance(value, str) else _part(where, Link, value)


def _host(where: str, value: object) -> Host:
    if isinstance(value, dict) and "link" in value:
        value = {**value, "link": _link(f"{where}.link", value["link"])}
    return _part(where, Host, value)


def _named(where: str, find: Callable[[str], Part], name: str) -> Part:
    try:
        return find(name)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


def _part(where: str, cls: type[Part], value: object) -> Part:
    required = tuple(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)
    optional = tuple(f.name for f in fields(cls) if f.name not in required)
    kind = cls.__name__.lower()
    hint = "" if cls is Host else f" (or the name of a {kind} of the catalogue)"
    entry = _object(where, value, required, optional, hint=hint)
    try:
        return cls(**entry)  # type: ignore[arg-type]  # the class checks every field itself
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


def _object(
    where: str, value: object, required: Sequence[str], optional: Sequence[str], hint: str = ""
) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ClusterError(f"{where} is {value!r}; give an object with {', '.join(required)}{hint}")
    known = (*required, *optional)
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ClusterError(f"{where}: unknown key {key!r}; {meant}known are {', '.join(known)}")
    missing = [key for key in required if key not in value]
    if missing:
        raise ClusterError(f"{where}: {', '.join(missing)} is missing; add it")
    return dict(value)

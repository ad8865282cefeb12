"""What the words of a command line refer to: a model in the user's code, a cluster, a mesh.

Enters: text. Leaves: a :class:`ModelSource`, a Cluster, a shape. MODEL is ``package.module:function`` or
``file.py:function``; the function takes no arguments and returns ``(model, example_inputs)`` or
``(model, example_inputs, loss_fn)``. CLUSTER is a JSON file, ``local:4`` (processes on this machine), or
``8x8:H100-SXM`` (nodes x devices of a kind), with other links than the usual ones as ``8x8:H100-SXM,NVLink4,EFA-P5``.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError
from cost_models import Cluster, find_device

if TYPE_CHECKING:
    from torch import nn

# What such devices are usually joined by, within a node and between nodes: a convenience of the command line only.
_USUAL_LINKS = (
    (r"V100-SXM|P100", "NVLink2", "InfiniBand-EDR"),
    (r"A100-SXM", "NVLink3", "InfiniBand-HDR"),
    (r"H100-SXM|H200", "NVLink4", "InfiniBand-NDR"),
    (r"B200|GB200", "NVLink5", "InfiniBand-NDR"),
    (r"MI250", "xGMI-MI250X", "InfiniBand-HDR"),
    (r"MI3", "xGMI-MI300X", "InfiniBand-NDR"),
    (r"CPU", "Loopback", "Ethernet-10G"),
    (r".", "PCIe4", "Ethernet-100G"),
)

_FORM = "write MODEL as package.module:function or file.py:function"


@dataclass(frozen=True)
class ModelSource:
    """A model, one batch of example inputs, and the loss function where the model has no loss of its own."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[..., Any] | None = None


def load_model(reference: str) -> ModelSource:
    """Import the function that ``reference`` names and call it.

    Raises InputError when there is no such file, module or function, or when it returns something else. What the user's
    own code raises is passed on.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{reference!r} names no model: {_FORM}")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    function = getattr(module, name, None)
    if not callable(function):
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{place} has no function {name!r}; it has {', '.join(offered[:12]) or 'none'}")
    found = function()
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not hasattr(found[0], "named_parameters"):
        raise InputError(
            f"{reference} returned {_described(found)}; return (model, example_inputs) or (model, example_inputs, loss_fn)"
        )
    return ModelSource(*found)


def _described(found: Any) -> str:
    if isinstance(found, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in found) or 'nothing'}"
    return f"a {type(found).__name__}"


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}; {_FORM}")
    spec = importlib.util.spec_from_file_location(f"autopar_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # the file may import its neighbours, as when it is run
    spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as ``python -m`` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(f"there is no module {error.name!r} for {name!r}; {_FORM}") from None
        raise


def load_cluster(reference: str) -> Cluster:
    """The cluster that ``reference`` names.

    Raises InputError for text of no known form, ClusterError for an unknown device or link or a file that does not fit.

    >>> load_cluster("8x8:H100-SXM").num_devices
    64
    """
    local = re.fullmatch(r"local(?::(\d+))?", reference)
    if local:
        return Cluster.local(int(local[1] or 4))
    regular = re.fullmatch(r"(\d+)x(\d+):([^,]+)(?:,([^,]+))?(?:,([^,]+))?", reference)
    if regular:
        device = find_device(regular[3])
        links = next((intra, inter) for pattern, intra, inter in _USUAL_LINKS if re.match(pattern, device.name))
        return Cluster.homogeneous(
            num_nodes=int(regular[1]),
            devices_per_node=int(regular[2]),
            device=device,
            intra_link=regular[4] or links[0],
            inter_link=regular[5] or links[1],
        )
    if reference.endswith(".json") or Path(reference).exists():
        return Cluster.load(reference)
    raise InputError(
        f"{reference!r} names no cluster: give a JSON file, local:4 (processes on this machine) or 8x8:H100-SXM (nodes x "
        "devices of a kind, optionally followed by ,INTRA_LINK,INTER_LINK)"
    )


def read_shape(reference: str) -> tuple[int, ...]:
    """A mesh's shape: ``4x2`` -> (4, 2). Raises InputError."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", reference):
        raise InputError(f"{reference!r} is no mesh shape: write it as 4x2")
    return tuple(int(size) for size in reference.split("x"))

"""The host's memory: where offloaded parameters, their gradients and the states of their optimizer rest.

Beside a GPU it is pinned where something travels, so that copies run at the speed of the link and in the order of the device's
stream; :func:`wait` is called before the host reads or writes what they touch. A CPU process copies within its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host of ``device``, uninitialised."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory; :func:`wait` before it is read."""
    return empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; :func:`wait` before ``tensor`` is written to."""
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


def wait(device: torch.device) -> None:
    """Until all copies between ``device`` and its host are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """A piece in the host's memory as a DTensor on the mesh of its devices, as FSDP's CPUOffloadPolicy has parameters:
    optimizers and checkpoints, which send nothing, take it as any other. ``DTensor.from_local`` would move it to the device.
    """
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)

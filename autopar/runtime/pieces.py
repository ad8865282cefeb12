"""Tensors as torch.distributed.checkpoint (DCP) takes them: of the whole's shape, with the rectangles that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autopar.runtime.errors import ProgramError
from autopar.runtime.parameters import BufferSlot, Chunk, ParameterSlot, local_of

Slot = ParameterSlot | BufferSlot


class Piece(Tensor):
    """A tensor of the whole's shape, of which this rank holds some rectangles; good for DCP's save and load only.

    The three methods with double underscores are what DCP asks of a tensor class (``_Checkpointable``).
    """

    chunks: list[Chunk]

    @staticmethod
    def __new__(cls, shape: Sequence[int], local: Tensor, chunks: list[Chunk]) -> Piece:
        piece: Piece = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=local.device)
        piece.chunks = chunks
        return piece

    def __create_write_items__(self, name: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_rectangle(chunk),
                    properties=TensorProperties.create_from_tensor(chunk.tensor),
                    size=self.size(),
                ),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_rectangle(chunk) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for chunk in self.chunks:
            if index.offset is not None and tuple(index.offset) == chunk.offsets:
                return chunk.tensor
        raise ProgramError(f"{index.fqn} has no rectangle at {index.offset} on this rank")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise ProgramError(f"{func} of a piece of a state dict: it is for torch.distributed.checkpoint only")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Piece(shape={tuple(self.shape)}, dtype={self.dtype}, rectangles={[c.offsets for c in self.chunks]})"


def _rectangle(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))


def piece_of(slot: Slot, tensor: Tensor | None = None) -> Piece:
    """``tensor``, laid out like the slot's piece at rest (by default that piece itself), for DCP."""
    local = slot.local if tensor is None else local_of(tensor)
    return Piece(slot.shape, local, slot.chunks(local))

"""The mesh of a program before and after it is bound."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime import Mesh, ProgramError, Split
from autopar.simulation import run_ranks


def test_axes_by_name() -> None:
    mesh = Mesh(data=2, tensor=3)
    assert mesh.tensor is mesh["tensor"] is mesh.axes[1]
    assert (mesh.tensor.index, mesh.tensor.size, mesh.shape, mesh.num_ranks) == (1, 3, (2, 3), 6)
    assert str(mesh) == "data=2 x tensor=3"
    with pytest.raises(AttributeError, match="no axis 'expert'"):
        _ = mesh.expert
    with pytest.raises(ProgramError, match="no axis 'expert'"):
        _ = mesh["expert"]


@pytest.mark.parametrize("sizes", [{"data": 0}, {"bind": 2}, {"axes": 2}, {"device": 2}])
def test_bad_axes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ProgramError):
        Mesh(**sizes)


def test_an_unbound_mesh_says_so() -> None:
    mesh = Mesh(data=2)
    for read in (lambda: mesh.data.place, lambda: mesh.data.group_name, lambda: mesh.device_mesh, mesh.bind):
        with pytest.raises(ProgramError, match=r"bind|torchrun"):
            read()
    with pytest.raises(ProgramError, match="bind"):
        _ = Split(4, (mesh.data, None)).local


def test_one_rank_needs_nothing() -> None:
    for mesh in (Mesh(), Mesh(data=1)):
        mesh.bind("cpu")
        assert mesh.is_bound
        assert not mesh.has_groups
        assert mesh.rank == 0


def test_ranks_are_row_major() -> None:
    def ranks(rank: int) -> tuple[int, ...]:
        mesh = Mesh(a=2, b=1, c=3)
        mesh.bind()
        mesh.bind()
        assert isinstance(mesh.device_mesh, DeviceMesh)
        assert mesh.device == torch.device("cpu")
        assert torch.distributed.get_process_group_ranks(mesh.c.group) == [rank // 3 * 3 + i for i in range(3)]
        return tuple(axis.place for axis in mesh.axes)

    assert run_ranks(6, ranks) == [(a, 0, c) for a in range(2) for c in range(3)]


def test_a_split_is_cut_once_per_axis() -> None:
    mesh = Mesh(data=1, tensor=1)
    with pytest.raises(ProgramError, match="once"):
        Split(4, (mesh.data, None), (mesh.data, None))
    with pytest.raises(ProgramError, match="does not cut"):
        Split(4, (mesh.data, None)).pieces(mesh.tensor)
    for text, message in [("4", "not a cut"), ("2x3/1", "4 elements")]:
        with pytest.raises(ProgramError, match=message):
            Split(4, (mesh.data, text))

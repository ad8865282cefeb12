"""The program's names of the model's inputs."""

from __future__ import annotations

from autopar.codegen.naming import GLOBALS, identifier, unique
from autopar.graph import OpGraph


def input_names(graph: OpGraph) -> list[str]:
    """One name for each input, in order: its path as an identifier, which ``forward`` takes as an argument."""
    names: list[str] = []
    for entry in graph.inputs:
        names.append(unique(identifier(entry.path), {*names, *GLOBALS}))
    return names

"""The classes of all stages as lines: a class of blocks that several stages use alike is written once."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.codegen import text
from autopar.codegen.classes import BlockText, StageWriter
from autopar.codegen.naming import GLOBALS
from autopar.codegen.paths import listed
from autopar.graph import OpGraph

_RUNTIME_CLASSES = ("Input", "Mesh", "Output", "Split", "Stage", "Boundary", "Count")


def class_lines(writers: Sequence[StageWriter], graph: OpGraph) -> tuple[list[str], set[str]]:
    """Blocks first, then the stages; and the names of all classes."""
    members: dict[tuple[str, tuple[str, ...]], list[BlockText]] = {}
    for writer in writers:
        for block in writer.blocks:
            members.setdefault((block.wish, block.lines), []).append(block)
    stages = {writer.class_name for writer in writers}
    names = _names([wish for wish, _ in members], stages)
    name_of = dict(zip(members, names, strict=True))
    paths = [(group.name, block.path) for group in graph.block_groups for block in group.blocks]
    place_of = {path: (group, at) for at, (group, path) in enumerate(paths)}
    found: list[str] = []
    for (_, lines), blocks in members.items():
        which = listed([path for block in blocks for path in block.paths], place_of)
        name = name_of[blocks[0].wish, lines]
        found += ["", "", f"class {name}(nn.Module):", *text.docstring(which, 4), *lines]
    for writer in writers:
        found += ["", "", *writer.lines([name_of[block.wish, block.lines] for block in writer.blocks])]
    return found, {*names, *stages, *_RUNTIME_CLASSES}


def _names(wishes: Sequence[str], stages: set[str]) -> list[str]:
    """The names wished for; numbered if there are several of one name."""
    taken: set[str] = {*GLOBALS, *stages, *_RUNTIME_CLASSES}
    names = []
    for name in wishes:
        base = f"{name}1" if wishes.count(name) > 1 else name
        number = 1
        while base in taken:
            number += 1
            base = f"{name}{number}"
        taken.add(base)
        names.append(base)
    return names

"""Where entries come from: the repository's own sample, or a larger collection in a file outside of it.

A collection is a Python file with ``build(name)``, which returns a model in training mode with its inputs, and
``entries()``, the names of all it can build; a list of some of the names may lie beside it as ``names.txt``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tests.zoo import sample

LIKE_HEADS = ("sequence-classification", "token-classification", "question-answering")  # a linear layer on a common model
Built = tuple[nn.Module, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Collection:
    """Names, and what builds each."""

    names: Sequence[str]
    build: Callable[[str], Built]


def with_fewer_heads(names: Sequence[str]) -> list[str]:
    """Without three of four, in alphabetical order, of the heads of each of the kinds in :data:`LIKE_HEADS`."""
    found = [name for name in names if name.split("/")[0] not in LIKE_HEADS]
    for kind in LIKE_HEADS:
        found += sorted(name for name in names if name.startswith(f"{kind}/"))[::4]
    return found


def own_sample() -> Collection:
    """The sample that lies in this repository."""
    return Collection(tuple(sample.ENTRIES), sample.build)


def collection_of(path: Path, sizes: Mapping[str, int] | None = None) -> Collection:
    """The collection in the file ``path``: the names in ``names.txt`` beside it, or all where there is none.

    ``sizes`` are handed on to its ``build``, for models of other sizes than its own.
    """
    spec = importlib.util.spec_from_file_location("zoo_collection", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{path} is no Python file with entries() and build(name)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listed = path.parent / "names.txt"
    names = listed.read_text().split() if listed.exists() else module.entries()
    return Collection(tuple(names), functools.partial(module.build, **(sizes or {})))

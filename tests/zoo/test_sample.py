"""The repository's own sample of the zoo: every entry equals one device, each under one kind of plan, and tensor parallelism
splits nearly all of the work. ``python -m tests.zoo`` runs all kinds of plans, and larger collections.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from torch import nn

from tests.zoo.__main__ import finished
from tests.zoo.entries import Built, Collection, collection_of, own_sample
from tests.zoo.plans import PLANS, TENSOR
from tests.zoo.running import rows_of, run_entry
from tests.zoo.table import MOST, document

SAMPLE = own_sample()
FORCED = (TENSOR, "zero-3", "2 stages")  # the searched plans take the longest
CASES = list(zip(SAMPLE.names, itertools.cycle(FORCED)))


@pytest.mark.parametrize(("entry", "plan"), CASES)
def test_entry_equals_one_device(entry: str, plan: str) -> None:
    (row,) = rows_of(SAMPLE, entry, [plan])
    assert row["passed"], f"{row['stage']}: {row['error']}"
    if plan == TENSOR:
        assert row["tensor_share"] >= MOST, f"computed whole: {row['tensor_whole']}"


def two_layers(entry: str) -> Built:
    """A model that ends its process, one that hangs, one that raises."""
    if entry == "crash":
        import os

        os.abort()
    if entry == "hang":
        import time

        time.sleep(60)
    raise ValueError("no such entry")


def test_what_ends_its_process_is_a_row() -> None:
    collection = Collection(("crash", "hang", "raise"), two_layers)
    rows = [row for name in collection.names for row in run_entry(collection, name, ["zero-3", "2 stages"], 1.0)]
    assert [row["stage"] for row in rows] == ["crash", "crash", "limit", "limit", "build", "build"]
    assert not any(row["passed"] for row in rows)
    assert any("test_sample.py" in line for line in rows[2]["stacks"])  # where it hangs
    assert "SIGABRT" in rows[0]["error"]
    assert "no such entry" in rows[-1]["error"]
    written = document(rows, collection.names, collection.names)
    assert "0 of 3 names were run under all plans; 0 are equal" in written
    assert "ValueError: no such entry" in written


def test_a_collection_is_read_and_finished_rows_are_known(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(
        "def entries():\n    return ['a', 'b']\n\ndef build(name):\n    return name, {}\n"
    )
    assert list(collection_of(tmp_path / "models.py").names) == ["a", "b"]
    (tmp_path / "names.txt").write_text("b\n")
    found = collection_of(tmp_path / "models.py")
    assert list(found.names) == ["b"]
    assert found.build("b") == ("b", {})
    out = tmp_path / "rows.jsonl"
    out.write_text(
        '{"entry": "b", "plan": "zero-3", "passed": false}\n{"entry": "b", "plan": "zero-3", "passed": true}\n'
    )
    assert finished(out)["b", "zero-3"]["passed"]
    with pytest.raises(SystemExit, match="is no Python file"):
        collection_of(tmp_path / "absent.py")


def test_sample_has_an_entry_for_each_kind() -> None:
    assert len(SAMPLE.names) >= 24
    assert {plan for _, plan in CASES} == set(FORCED) < set(PLANS)
    assert all(isinstance(SAMPLE.build(name)[0], nn.Module) for name in SAMPLE.names[:1])

"""Profiles as values: JSON, merging, interpolation, identity; and what a cost model makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models import (
    Cluster,
    Context,
    CostModel,
    Curve,
    Machine,
    OperatorEntry,
    Overlap,
    Point,
    Profile,
    ProfileError,
    Run,
    groups_key,
    provenance_of,
)
from cost_models.measurements import in_context

LOCAL = Cluster.local(2, memory_bytes=2**34, num_cores=2)
MACHINE = Machine("some processor", "cpu", (2,), 1, 2, "2.13.0")
PAIR = "size=2 stride=1 groups=1 per_node=2"
GELU = "aten.gelu.default(float32[8,64]g) -> float32[8,64]"


def entry(forward: float = 1e-4, backward: float = 2e-4, **changes: Any) -> OperatorEntry:
    made = OperatorEntry(forward, backward, 0.05, 4, "elementwise", "float32", 1e6, 2e6, 4096.0)
    return replace(made, **changes)


def curve(*pairs: tuple[float, float], count: int = 3) -> Curve:
    return Curve(tuple(Point(size, seconds, 0.1, count) for size, seconds in pairs))


PROFILE = Profile(
    MACHINE,
    operators={GELU: entry()},
    collectives={f"all_reduce {PAIR}": curve((1000, 1e-3), (3000, 2e-3))},
    memory={"copy": curve((100, 1e-6), (1000, 1e-5)), "adamw float32": curve((4, 2e-4))},
    overlaps={PAIR: Overlap(1.5, 1.7)},
    contexts={"model, batch 4": Context(10, 1.3e-3, 2e-3, 1e-3, 1.9e-3)},
    unmeasurable=("mylib.solve.default(float32[8,8]g) -> float32[8]",),
    finished={"model 1f2e": 120.0},
    runs=(Run("a" * 64, 0.1, 0.12, 10),),
)


# -- JSON ------------------------------------------------------------------------------------------------------------


def test_json_keeps_everything(tmp_path: Any) -> None:
    PROFILE.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again == PROFILE
    assert again.fingerprint == PROFILE.fingerprint
    assert again.to_json() == PROFILE.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]  # nothing is left beside it


def test_a_saved_profile_is_never_half_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    before = path.read_text()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(ProfileError, match=r"cannot write the profile .*no space"):
        replace(PROFILE, runs=()).save(path)
    assert path.read_text() == before


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_profile(share: float, tmp_path: Any) -> None:
    text = PROFILE.to_json()
    path = tmp_path / "cut.json"
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(
        ProfileError, match=r"cut\.json: the profile is not JSON: .*measure again with 'autopar profile'"
    ):
        Profile.load(path)


def damaged(**changes: Any) -> str:
    return json.dumps({**json.loads(PROFILE.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "this is not a profile"),
        (damaged(kind="autopar plan"), "this is not a profile"),
        (damaged(schema_version=2), "schema_version is 2 and this version reads 1"),
        (damaged(extra=1), r"has \['extra'\]"),
        (damaged(operators=[]), "operators is list, not an object"),
        (damaged(operators={GELU: {"forward_seconds": 1}}), "backward_seconds.* is missing or not known"),
        (damaged(memory={"copy": [[1, 2, 3]]}), "copy is no list of points"),
        (damaged(memory={"copy": [[1, -2, 0, 3]]}), "copy is -2, not a number of 0 or more"),
        (damaged(memory={"copy": [[2, 1, 0, 3], [1, 1, 0, 3]]}), "points of rising bytes"),
        (damaged(machine={}), "machine: .* is missing"),
        (damaged(runs={}), "runs is dict, not a list"),
        (damaged(unmeasurable=[1]), "unmeasurable is 1, not text"),
    ],
)
def test_damaged_profile(text: str, message: str, tmp_path: Any) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        Profile.load(path)


def test_no_file() -> None:
    with pytest.raises(ProfileError, match=r"cannot read the profile 'nowhere\.json': No such file"):
        Profile.load("nowhere.json")


# -- merging and identity ----------------------------------------------------------------------------------------------


def test_profiles_merge() -> None:
    other = Profile(
        MACHINE,
        operators={GELU: entry(3e-4, 4e-4, count=12, spread=0.2), "other": entry()},
        collectives={f"all_reduce {PAIR}": curve((2000, 5e-3), (3000, 4e-3))},
        runs=PROFILE.runs,
    )
    both = PROFILE.merged(other)
    assert both.operators[GELU].forward_seconds == pytest.approx((4 * 1e-4 + 12 * 3e-4) / 16)
    assert both.operators[GELU].count == 16 and both.operators[GELU].spread == 0.2
    assert set(both.operators) == {GELU, "other"}
    points = both.collectives[f"all_reduce {PAIR}"].points
    assert [point.num_bytes for point in points] == [1000, 2000, 3000]
    assert points[2].seconds == pytest.approx(3e-3) and points[2].count == 6
    assert both.runs == PROFILE.runs and both.memory == PROFILE.memory
    assert PROFILE.merged(Profile(MACHINE)) == PROFILE


def test_profile_of_another_machine() -> None:
    other = replace(MACHINE, device="another processor", threads=2)
    with pytest.raises(
        ProfileError, match="device: another processor there, some processor here; threads: 2 there, 1 here"
    ):
        Profile(other).check_machine(MACHINE)
    with pytest.raises(ProfileError, match="measured on another machine"):
        PROFILE.merged(Profile(other))


def test_more_gpus_are_no_other_machine() -> None:
    one = Machine("H100-SXM5-80GB", "cuda", (1,), 1, 64, "2.13.0")
    eight = replace(one, devices_per_node=(8,))
    assert not eight.differences(one)
    assert Profile(one).merged(Profile(eight)).machine == eight
    assert MACHINE.differences(replace(MACHINE, devices_per_node=(4,)))  # processes share their memory's bandwidth


def test_profile_of_other_devices() -> None:
    with pytest.raises(ProfileError, match=r"of some processor \(cpu\) and the cluster has H100"):
        CostModel(Cluster.homogeneous(num_nodes=1, devices_per_node=2), PROFILE)
    with pytest.raises(ProfileError, match=r"measured with 2 processes on a node and the cluster has 4: .*local:4"):
        CostModel(Cluster.local(4, memory_bytes=2**34, num_cores=2), PROFILE)


# -- between what was measured -----------------------------------------------------------------------------------------


def test_curve_is_linear_between_points_and_beyond() -> None:
    found = curve((1000, 1e-3), (3000, 2e-3)).seconds([0, 1000, 2000, 3000, 5000])
    assert found == pytest.approx([1e-3, 1e-3, 1.5e-3, 2e-3, 3e-3])


def test_curve_is_monotone_whatever_was_measured() -> None:
    noisy = curve((1, 3e-3), (10, 1e-3), (100, 4e-3), (1000, 3.9e-3))
    found = noisy.seconds(np.logspace(-1, 6, 50))
    assert (np.diff(found) >= 0).all()
    assert found[-1] > 4e-3  # what is larger than all that was measured still takes longer


def test_one_point_has_its_own_rate() -> None:
    assert curve((1000, 1e-3)).seconds(4000) == pytest.approx(4e-3)


def test_context_finds_ratio_and_overhead() -> None:
    alone = [1e-3, 2e-3, 4e-3]
    found = in_context([100] * 3, alone, [1.1 * seconds + 100 * 5e-6 for seconds in alone])
    assert (found.ratio, found.overhead_seconds) == (pytest.approx(1.1), pytest.approx(5e-6))
    assert in_context([100], [1e-3], [1.2e-3]).ratio == pytest.approx(1.2)
    assert in_context([], [], []).ratio == 1.0
    falling = in_context([100] * 2, [1e-3, 2e-3], [1e-3, 2.2e-3])  # a negative overhead is none
    assert falling.overhead_seconds == 0.0 and 1.0 <= falling.ratio <= 1.1


# -- the cost model ----------------------------------------------------------------------------------------------------

PLAIN = Profile(MACHINE, PROFILE.operators, PROFILE.collectives, PROFILE.memory)


def test_measured_collectives_replace_the_estimate() -> None:
    costs, estimated = CostModel(LOCAL, PLAIN), CostModel(LOCAL)
    axis = costs.axis(2, 1)
    assert float(axis.seconds("all_reduce", 2000.0)) == pytest.approx(1.5e-3)
    assert axis.seconds("all_reduce", [0.0])[0] == 0.0
    assert provenance_of(axis, "all_reduce") == "measured"
    ratio = np.median([p.seconds / float(estimated.axis(2, 1).seconds("all_reduce", p.num_bytes)) for p in
                       PLAIN.collectives[f"all_reduce {PAIR}"].points])  # fmt: skip
    gathered = float(axis.seconds("all_gather", 1e6)) / float(estimated.axis(2, 1).seconds("all_gather", 1e6))
    assert gathered == pytest.approx(ratio)
    assert provenance_of(axis, "all_gather") == "corrected"
    assert provenance_of(estimated.axis(2, 1), "all_reduce") == "estimated"


@pytest.mark.parametrize("sizes", [[1000], [1000, 3000]])
def test_small_collectives_say_nothing_of_bandwidth(sizes: list[int]) -> None:
    """Latencies alone were measured: what larger ones add is estimated."""
    collectives = {f"all_reduce {PAIR}": curve(*((size, 5e-3) for size in sizes))}
    axis = CostModel(LOCAL, replace(PLAIN, collectives=collectives)).axis(2, 1)
    estimated = CostModel(LOCAL).axis(2, 1)
    assert float(axis.seconds("all_reduce", sizes[-1])) == pytest.approx(5e-3)
    for size in (1e6, 1e8):
        more = estimated.seconds("all_reduce", size) - estimated.seconds("all_reduce", sizes[-1])
        assert float(axis.seconds("all_reduce", size)) == pytest.approx(5e-3 + float(more))


def test_twice_the_bytes_never_take_more_than_twice_the_time() -> None:
    """Beyond small collectives that were faster than the description of the cluster says."""
    collectives = {f"all_reduce {PAIR}": curve((1 << 10, 1e-7), (1 << 12, 2e-7))}
    axis = CostModel(LOCAL, replace(PLAIN, collectives=collectives)).axis(2, 1)
    sizes = 2.0 ** np.arange(10, 30)
    seconds = axis.seconds("all_reduce", sizes)
    assert (seconds[1:] <= 2 * seconds[:-1] * (1 + 1e-9)).all() and (np.diff(seconds) > 0).all()


def test_large_collectives_have_their_own_rate() -> None:
    collectives = {f"all_reduce {PAIR}": curve((1 << 20, 1e-3), (1 << 21, 3e-3))}
    axis = CostModel(LOCAL, replace(PLAIN, collectives=collectives)).axis(2, 1)
    assert float(axis.seconds("all_reduce", 1 << 22)) == pytest.approx(7e-3)


def test_groups_that_were_not_measured_are_estimated() -> None:
    four = Cluster.local(4, memory_bytes=2**34, num_cores=2)
    profile = replace(PLAIN, machine=replace(MACHINE, devices_per_node=(4,)))
    axis = CostModel(four, profile).axis(4, 1)
    assert provenance_of(axis, "all_reduce") == "estimated"
    assert float(axis.seconds("all_reduce", 1e6)) == float(CostModel(four).axis(4, 1).seconds("all_reduce", 1e6))


def test_keys_of_groups_say_what_costs_depend_on() -> None:
    two = Cluster.homogeneous(num_nodes=2, devices_per_node=2)
    assert groups_key(two, [[0, 1], [2, 3]]) == "size=2 stride=1 groups=2 per_node=2"
    assert (
        groups_key(two, [[0, 2], [1, 3]])
        == groups_key(two, [[2, 0], [3, 1]])
        == "size=2 stride=2 groups=2 per_node=1+1"
    )
    assert groups_key(two, [[0, 1, 2, 3]]) == "size=4 stride=1 groups=1 per_node=2+2"


def test_measured_operators_replace_the_estimate() -> None:
    operators = CostModel(LOCAL, PLAIN).operators
    assert operators is not None
    other = GELU.replace("8,64", "16,64")
    ahead, back = operators.seconds([GELU, other], "elementwise", [1e-5, 2e-5], [3e-5, 6e-5])
    assert (ahead[0], back[0]) == (1e-4, 2e-4)
    estimate = CostModel(LOCAL).compute_seconds(1e6, 4096.0, "float32", "elementwise")
    assert ahead[1] == pytest.approx(2e-5 * 1e-4 / float(estimate))  # the ratio of its like


def test_what_is_estimated_at_nothing_takes_the_median_of_its_like() -> None:
    views = {f"aten.view.default(float32[{n}]g) -> float32[{n}]": entry(n * 1e-6, 2e-6, kind="view") for n in (4, 5, 9)}
    operators = CostModel(LOCAL, Profile(MACHINE, views)).operators
    assert operators is not None
    ahead, back = operators.seconds(["aten.t.default(float32[2,3]g) -> float32[3,2]"], "view", [0.0], [0.0])
    assert (ahead[0], back[0]) == (pytest.approx(5e-6), pytest.approx(2e-6))


def test_context_and_runs_correct_what_is_predicted() -> None:
    contexts = {f"batch {n}": Context(100, 1.1 * n + 5e-4, 2.0 * n, 1.0 * n, 1.0 * n) for n in (1, 2, 4)}
    costs = CostModel(LOCAL, replace(PLAIN, contexts=contexts, runs=(Run("a", 0.1, 0.15, 10), Run("b", 0.1, 0.15, 9))))
    assert costs.operators is not None
    ahead, back = costs.operators.seconds([GELU], "elementwise", [1e-5], [3e-5])
    assert ahead[0] == pytest.approx(1.5 * (1.1 * 1e-4 + 5e-6), rel=1e-3)
    assert back[0] == pytest.approx(1.5 * 2.0 * 2e-4)
    assert float(costs.axis(2, 1).seconds("all_reduce", 1000)) == pytest.approx(1.5e-3)
    assert float(costs.optimizer_seconds("adamw", 4.0, 100.0, "float32")) == pytest.approx(1.5 * 2e-4)
    assert float(costs.compute_seconds(0.0, 100.0, kind="memory")) == pytest.approx(1.5e-6)


def test_another_optimizer_is_priced_by_what_it_moves() -> None:
    costs = CostModel(LOCAL, PLAIN)
    assert costs.optimizer_provenance("adamw", "float32") == "measured"
    assert float(costs.optimizer_seconds("lion", 4.0, 550.0, "float32")) == pytest.approx(5.5e-6)
    assert float(CostModel(LOCAL).optimizer_seconds("adamw", 4.0, 550.0, "float32")) > 0

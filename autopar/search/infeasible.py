"""What to tell when no plan fits: the smallest memory, and the smallest number of devices, that would do, and the plan.

Enters: a search that found nothing. Leaves: the error. Both answers are plans that were found in full on such devices, not
bounds; the bounds of the search say where to begin.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.micro_batches import coupling
from autopar.options import PlanOptions
from autopar.search.clock import Clock
from autopar.search.evaluate import Evaluated
from autopar.search.joint import JointSearch
from autopar.search.space import V_SHAPED, frames
from cost_models import Cluster, CostModel, problem_with
from cost_models.memory import CONTEXT_BYTES

MORE_MEMORY = (1.02, 1.1, 1.25, 1.5, 2.0, 4.0)  # times what the bound says is needed
MORE_NODES = (2, 4, 8, 16, 32, 64)


def infeasible(search: JointSearch) -> InfeasibleError:
    """The error for a model that does not fit."""
    cluster, options = search.cost_model.cluster, search.options
    needed = search.least_bytes()
    if math.isinf(needed):
        return InfeasibleError(
            f"no plan satisfies {_forced(options)}, whatever the memory{_contradiction(search)}; force less of it"
        )
    available = search.cost_model.min_device_memory_bytes(options.memory_margin)
    lean = _with_memory(search, needed)
    may_grow = options.parallelism.is_free and options.mesh_shape is None  # else what is forced need not suit more devices
    more = _with_devices(search) if may_grow else None
    smallest = math.ceil((lean.peak_bytes if lean else needed) / 2**30 * 100) / 100
    advice = "; more of these devices alone would not do" if may_grow else ""
    if more is not None:
        count, plan = more
        advice = f"; {count} of these devices would do ({_describe(plan)})"
    advice += _host_advice(search)
    if _is_host_full(search, lean, available):
        host = search.cost_model.host_share().memory_bytes
        return InfeasibleError(
            f"no plan fits: offload={options.offload!r} keeps more on the hosts than the {host / 2**30:.2f} GiB that each "
            f"device has of its host's memory{advice}; shard the states (zero=1 or more over more devices), describe the hosts "
            "as they are (host= of a node), or leave offload out"
        )
    return InfeasibleError(
        f"no plan fits: the leanest one{f' ({_describe(lean)})' if lean else ''} needs {smallest:.2f} GiB on each of "
        f"{cluster.num_devices} devices, which have {available / 2**30:.2f} GiB for it (memory less the software's own and "
        f"the margin); {smallest:.2f} GiB on each device would do{advice}"
    )


def _host_advice(search: JointSearch) -> str:
    """That it fits with the optimizer's states on the host, where that is so."""
    share = search.cost_model.host_share()
    if search.options.offload != "none" or share.is_own_memory or search.graph.loss is None:
        return ""
    found = _again(search, search.cost_model.cluster, "auto").run().best
    if found is None:
        return ""
    on_host = max(stage.candidate.host_bytes for stage in found.stages)
    return (
        f"; these devices would do with offload='auto', which keeps optimizer states on the host ({on_host / 2**30:.2f} of "
        f"{share.memory_bytes / 2**30:.2f} GiB for each device; {_describe(found)})"
    )


def _is_host_full(search: JointSearch, lean: Evaluated | None, available: float) -> bool:
    """Whether it is the host that has too little memory: with more on each device still nothing fits, or it would have."""
    if search.options.offload == "none":
        return False
    return lean is None or lean.peak_bytes <= available


def _forced(options: PlanOptions) -> str:
    given = {**vars(options.parallelism), "mesh_shape": options.mesh_shape}
    named = [f"{name}={value}" for name, value in given.items() if value is not None]
    return ", ".join(named) or "all limits"


def _contradiction(search: JointSearch) -> str:
    """Why no schedule can run; empty where one can, and it is the operators that cannot do what is forced."""
    units, options = search.chain.num_units, search.options
    if any(True for grid in search.grids for _ in frames(grid, search.counts, units, options)):
        return ""
    coupled = coupling(search.graph)
    if coupled:
        return f": {search.graph.model} must see its batch as a whole, as {coupled[0]}"
    schedule = options.parallelism.schedule
    ranks = sorted({grid.num_ranks for grid in search.grids})
    if schedule is None or ranks == [1]:
        return ": one pipeline rank has the schedule single"
    fewest = ranks[0] if ranks[0] > 1 or schedule == "single" else ranks[1]
    stages = 2 * fewest if schedule in V_SHAPED else fewest
    problem = problem_with(schedule, fewest, stages, max(search.counts))
    return f": {problem or f'{schedule} has {stages} stages, and the model can be cut into {units}'}"


def _with_memory(search: JointSearch, needed: float) -> Evaluated | None:
    """A plan on the same cluster if its devices had little more than ``needed`` bytes."""
    for factor in MORE_MEMORY:
        usable = needed * factor / (1 - search.options.memory_margin)
        cluster = search.cost_model.cluster
        nodes = tuple(
            replace(node, device=replace(node.device, memory_bytes=int(usable) + CONTEXT_BYTES[node.device.kind]))
            for node in cluster.nodes
        )
        found = _again(search, replace(cluster, nodes=nodes)).run()
        if found.best is not None:
            return found.best
    return None


def _with_devices(search: JointSearch) -> tuple[int, Evaluated] | None:
    """The smallest number of devices, by doubling the cluster's last node or its number, on which some plan fits."""
    cluster = search.cost_model.cluster
    node = cluster.nodes[-1]
    for factor in MORE_NODES:
        grown = (
            replace(cluster, nodes=(replace(node, num_devices=node.num_devices * factor),))
            if len(cluster.nodes) == 1 and node.num_devices * factor <= 8
            else replace(cluster, nodes=cluster.nodes * factor)
        )
        found = _again(search, grown).run()
        if found.best is not None:
            return grown.num_devices, found.best
    return None


def _again(search: JointSearch, cluster: Cluster, offload: str | None = None) -> JointSearch:
    """The same search on another cluster, or with another ``offload``, content with the first plan that fits."""
    options = replace(search.options, max_evaluations=1, gap=0.2, offload=offload or search.options.offload)
    return JointSearch(
        search.graph, CostModel(cluster), options, search.solve, search.meshes, search.may_split, search.say, Clock({})
    )


def _describe(plan: Evaluated) -> str:
    """A plan in a few words."""
    frame = plan.frame
    shape = " x ".join(map(str, frame.grid.mesh_shape))
    words = [f"mesh {shape}"] if frame.num_stages == 1 else [f"{frame.num_stages} stages of {shape}", frame.schedule]
    words.append(f"{frame.num_micro_batches} micro-batches" if frame.num_micro_batches > 1 else "one micro-batch")
    modes = {mode for stage in plan.stages for mode in stage.candidate.costed.setting.recompute.values()} - {"none"}
    if modes:
        words.append(f"recomputing {' and '.join(sorted(modes))}")
    return ", ".join(words)

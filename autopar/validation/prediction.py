"""Seconds and bytes of a job, put together from the parts of its short model.

Enters: a :class:`Job`. Leaves: a :class:`Prediction`. A stage is so many blocks with what lies at the model's ends; its passes
go through ``cost_models.schedule`` as in the planner's search; its memory is what parameters, micro-batches in flight and
what is held for a moment take together, as in ``autopar.fitting``. Prices are kept by everything that they depend on, so
that rows which differ in their number of micro-batches, or in the division into stages, share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.batching import at_batch
from autopar.costing import Prepared, prepare
from autopar.graph import ITEM_BYTES, OpGraph
from autopar.validation.dims import ModelDims, ResNetDims
from autopar.validation.jobs import Job, NotModelled, in_type
from autopar.validation.models import traced
from autopar.validation.parts import SENT, Laid, Part, Traffic, laid, together
from cost_models import CostModel, Hops, StageTimes, in_flight, problem_with, step_seconds_only

TRIED_SAMPLES = (1, 2, 4, 8)  # of a data rank in a micro-batch, where the row does not say
TRIED_CHUNKS = (1, 2, 3, 4)
POWER = 5.0  # of the mean in which the longer of device and host counts most
MASTER_BYTES = 4  # of an element in which autopar keeps and sends gradients
INTERLEAVED = "interleaved_1f1b"
MANY = 4  # micro-batches, beyond which their number changes no choice of the solver's
LONG = 2  # rounds of a pipeline that are simulated; what comes after repeats them


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, bytes of the fullest device, and the micro-batch and stages a rank that they are of."""

    seconds: float
    memory_bytes: float
    samples: float
    chunks: int


class Predictor:
    """Predicts jobs, keeping traces and prices."""

    def __init__(self) -> None:
        self._graphs: dict[object, OpGraph] = {}
        self._prepared: dict[object, Prepared] = {}
        self._models: dict[object, CostModel] = {}
        self._laid: dict[object, Laid] = {}

    def predict(self, job: Job) -> Prediction:
        """The fastest way to run what the row leaves open; of ways that fit, if any does.

        Raises NotModelled: no way of running it is known, InfeasibleError: degrees that do not suit the model.
        """
        job = in_type(job)
        share = job.global_batch / job.degrees.data
        tried = [job.samples] if job.samples else [n for n in TRIED_SAMPLES if share % n == 0]
        most = job.dims.n_layers // job.dims.unit // job.pipeline
        if not most:
            raise NotModelled(
                f"pp={job.pipeline} has more stages than the model's {job.dims.n_layers} layers; correct one"
            )
        chunks = [job.chunks] if job.chunks else [n for n in TRIED_CHUNKS if n <= most and most % n == 0]
        found = [
            self._predict(job, samples, count)
            for samples in tried
            for count in chunks
            if count == 1 or not problem_with(INTERLEAVED, job.pipeline, count * job.pipeline, round(share / samples))
        ]
        if not found:
            raise NotModelled(
                f"{share:g} samples a data rank: no micro-batch of {tried} in {chunks} chunks suits the schedule"
            )
        return min(found, key=lambda one: (one.memory_bytes > job.device_bytes, one.seconds))

    def _predict(self, job: Job, samples: float, chunks: int) -> Prediction:
        count = job.global_batch / job.degrees.data / samples
        whole = max(1, math.ceil(count - 1e-9))
        parts = as_stack(self.laid(job, math.ceil(samples), min(whole, MANY)), job, math.ceil(samples))
        stages = stages_of(parts, job, chunks)
        schedule = schedule_of(job.pipeline, chunks, whole)
        counts = layers_of(job.dims.n_layers // job.dims.unit, len(stages))
        times = [stage_times(stage, blocks, job) for stage, blocks in zip(stages, counts, strict=True)]
        seconds = step_seconds(schedule, times, self._hops(job, parts, len(stages)), job.pipeline, whole)
        spare = (whole - count) * max(one.whole_seconds for one in times)  # a last micro-batch that is smaller
        num_bytes = memory(parts, stages, schedule, job, whole)
        return Prediction(seconds - spare, num_bytes, samples, chunks)

    def laid(self, job: Job, samples: int, num_micro_batches: int = 1) -> Laid:
        """The job's parts at so many samples of a data rank."""
        key = (_short(job.dims), job.compute, samples, job.degrees, job.cluster, job.optimizer, num_micro_batches)
        if key not in self._laid:
            prepared = self._prepare(job.dims, job.compute, samples * job.degrees.data)
            self._laid[key] = laid(prepared, job.degrees, self._cost_model(job), job.optimizer, num_micro_batches)
        return self._laid[key]

    def _prepare(self, dims: ModelDims | ResNetDims, compute: str, batch: int) -> Prepared:
        key = (_short(dims), compute)
        if key not in self._graphs:
            self._graphs[key] = traced(dims, compute)
        if (key, batch) not in self._prepared:
            self._prepared[key, batch] = prepare(at_batch(self._graphs[key], batch))
        return self._prepared[key, batch]

    def _cost_model(self, job: Job) -> CostModel:
        if job.cluster not in self._models:
            self._models[job.cluster] = CostModel(job.cluster)
        return self._models[job.cluster]

    def _hops(self, job: Job, parts: Laid, num_stages: int) -> Hops:
        """A pipeline rank's devices send to those at the same place of the next."""
        size = job.degrees.data * job.degrees.tensor
        num_bytes = parts.boundary_bytes
        if job.stack.splits_messages and not job.degrees.sequence_parallel:
            num_bytes /= job.degrees.tensor
        each = [
            self._cost_model(job).hop_seconds(
                stage % job.pipeline * size, (stage + 1) % job.pipeline * size, size, num_bytes
            )
            for stage in range(num_stages - 1)
        ]
        return Hops(tuple(each), tuple(each))


def _short(dims: ModelDims | ResNetDims) -> ModelDims | ResNetDims:
    """Models that differ in depth share traces and prices."""
    return replace(dims, n_layers=1)


def schedule_of(pipeline: int, chunks: int, num_micro_batches: int) -> str:
    """Megatron's: 1F1B, interleaved where a rank has several stages. With fewer micro-batches than stages all forward passes
    come first, which is GPipe."""
    if pipeline == 1:
        return "single"
    if chunks > 1:
        return INTERLEAVED
    return "1f1b" if num_micro_batches >= pipeline else "gpipe"


def layers_of(n_layers: int, num_stages: int) -> list[int]:
    """Blocks by stage. Where they do not divide, embedding and head count as a block each (BigScience's
    ``--pp-partition-method type:transformer|embedding``), and what is left over goes to the first stages."""
    each, rest = divmod(n_layers, num_stages)
    if not rest:
        return [each] * num_stages
    each, rest = divmod(n_layers + 2, num_stages)
    counts = [each + (index < rest) for index in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def as_stack(parts: Laid, job: Job, samples: int) -> Laid:
    """The parts as the job's stack runs them: the loss in more kernels, other things computed again."""
    passes = job.stack.loss_passes
    loss = replace(
        parts.loss,
        forward_light_seconds=passes * parts.loss.forward_light_seconds,
        backward_light_seconds=passes * parts.loss.backward_light_seconds,
    )
    block, dims = parts.block, job.dims
    if job.stack.per_operator and job.degrees.recompute == "selective" and isinstance(dims, ModelDims):
        kept = samples * dims.seq_len * dims.per_operator_bytes / job.degrees.tensor
        again = block.kept_bytes + block.again_bytes - kept
        seconds = block.backward_heavy_seconds + block.product_seconds / 2
        block = replace(block, backward_heavy_seconds=seconds, kept_bytes=kept, again_bytes=again)
    if job.stack.gathers_again and job.degrees.sequence_parallel and job.degrees.recompute != "full":
        assert isinstance(dims, ModelDims), "only transformers have tensor ranks"
        each = dims.narrow_bytes if job.matmul_dtype else dims.flash_bytes
        block = replace(block, kept_bytes=samples * dims.seq_len * each / job.degrees.tensor)
    return replace(parts, loss=loss, block=block)


def stages_of(parts: Laid, job: Job, chunks: int) -> list[Part]:
    """The stages in order. A parameter that both ends have is kept at both."""
    counts = layers_of(job.dims.n_layers // job.dims.unit, job.pipeline * chunks)
    stages: list[list[tuple[Part, float]]] = [[(parts.block, count)] for count in counts]
    stages[0].append((parts.embedding, 1))
    stages[-1] += [(parts.head, 1), (parts.loss, 1)]
    if job.pipeline > 1:
        stages[-1].append((parts.tied, 1))
    return [together(stage) for stage in stages]


def stage_times(stage: Part, blocks: int, job: Job) -> StageTimes:
    """Seconds of the passes of a stage with so many blocks, and of what it does once a step."""
    stack = job.stack
    passes = 3 if job.degrees.recompute == "full" else 2
    host = stack.host_seconds * stage.num_operators
    forward = stage.forward_heavy_seconds + stack.light_passes * stage.forward_light_seconds
    backward = stage.backward_heavy_seconds + stack.light_passes * stage.backward_light_seconds
    waiting = 2 * blocks * (job.degrees.tensor - 1) * stack.rank_seconds
    forward += stack.sent_passes * stage.forward_sent_seconds + waiting
    backward += stack.sent_passes * stage.backward_sent_seconds + waiting * (passes - 1)
    forward = longer(forward, stack.pass_seconds + host)
    backward = longer(backward + stage.each_seconds, stack.pass_seconds + host * (passes - 1))
    gather, again, reduce = (_sent_seconds(getattr(stage, name), job) for name in SENT)
    once = stage.once_seconds
    zero = job.degrees.zero
    if stack.gathers_once and job.degrees.recompute != "full":
        again = 0.0
    if zero == 3:
        forward, backward = beside(forward, gather, stack.overlap), beside(backward, again + reduce, stack.overlap)
    elif zero == 2:
        backward, once = beside(backward, reduce, stack.overlap), once + gather
    else:
        once += gather + reduce - stack.overlap * min(reduce, backward)
    return StageTimes(forward, backward, 0.0, once)


def _sent_seconds(traffic: Sequence[Traffic], job: Job) -> float:
    """Seconds of what parameters send, each alone or all of a block together."""
    gradients = job.stack.gradients.get(job.compute)
    total = 0.0
    for one in traffic:
        scale = gradients.sent_bytes / MASTER_BYTES if gradients and one.kind != "all_gather" else 1.0
        total += scale * (one.flat_seconds if job.stack.flat_parameters else one.seconds)
    return total


def longer(device_seconds: float, host_seconds: float) -> float:
    """Seconds of a pass that the device does in one time and the host starts in another."""
    return float((device_seconds**POWER + host_seconds**POWER) ** (1 / POWER))


def beside(compute_seconds: float, sent_seconds: float, overlap: float) -> float:
    """Seconds of computing and sending of which a share may run at the same time."""
    return compute_seconds + sent_seconds - overlap * min(compute_seconds, sent_seconds)


def step_seconds(
    schedule: str, times: Sequence[StageTimes], hops: Hops, num_ranks: int, num_micro_batches: int
) -> float:
    """A simulated step. Of many micro-batches as many are simulated as show what one round more adds."""
    if schedule == "single":
        return num_micro_batches * times[0].whole_seconds + times[0].once_seconds
    few = LONG * num_ranks
    if num_micro_batches <= few:
        return step_seconds_only(schedule, times, hops, num_ranks, num_micro_batches)
    rest = few + num_micro_batches % num_ranks
    long, short = (step_seconds_only(schedule, times, hops, num_ranks, count) for count in (rest, rest - num_ranks))
    return long + (long - short) / num_ranks * (num_micro_batches - rest)


def memory(parts: Laid, stages: Sequence[Part], schedule: str, job: Job, num_micro_batches: int) -> float:
    """Bytes of the fullest device."""
    pipeline = job.pipeline
    flying = in_flight(schedule, pipeline, len(stages), min(num_micro_batches, LONG * pipeline))
    ranks = [0.0] * pipeline
    for index, (stage, count) in enumerate(zip(stages, flying, strict=True)):
        kept = resting_bytes(stage, job) + gradient_bytes(stage, job) + stage.state_bytes + stage.kept_bytes * count
        again = held_bytes(parts.block, job) + max(0.0, parts.block.again_bytes)  # while a block's backward pass runs
        ranks[index % pipeline] += kept + max(again, held_bytes(stage, job))
    return max(ranks) * (1 + job.stack.memory_share) + job.stack.memory_bytes


def resting_bytes(stage: Part, job: Job) -> float:
    """Bytes of a stage's parameters, masters and working copies."""
    zero = job.degrees.zero
    if job.stack.half_copies and zero == 3 and job.compute != "float32":
        return stage.parameter_bytes * (1 + ITEM_BYTES[job.compute] / MASTER_BYTES)
    if job.stack.half_copies and zero in (1, 2) and job.compute == "float32":
        return stage.used_bytes
    return stage.parameter_bytes + stage.copy_bytes


def gradient_bytes(stage: Part, job: Job) -> float:
    """Bytes of a stage's gradients as the stack keeps them."""
    gradients = job.stack.gradients.get(job.compute)
    num_bytes = stage.used_bytes if job.stack.whole_gradients else stage.gradient_bytes
    return num_bytes * (gradients.kept_bytes / MASTER_BYTES if gradients else 1.0)


def held_bytes(part: Part, job: Job) -> float:
    """Bytes that the largest operator, and the parameters gathered around it, hold for a moment."""
    return part.moment_bytes if job.stack.whole_gradients else max(part.moment_bytes, part.gathered_bytes)

"""From a row to what is to be priced, or to the reason why it cannot be.

Enters: a :class:`Run`. Leaves: a :class:`Job`: the model's dims, the cluster, the degrees of a pipeline rank, the pipeline.
Blank degrees are derived where only one number fits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.validation.dims import ModelDims, ResNetDims
from autopar.validation.elsewhere import completed
from autopar.validation.hardware import cluster_of
from autopar.validation.parts import Degrees, LastAxis
from autopar.validation.runs import Run, is_gated
from autopar.validation.stacks import Stack, stack_of
from cost_models import Cluster

LOW_PRECISION = ("fp8", "mxfp8", "fp4", "nvfp4")


class NotModelled(AutoparError):
    """A row that cannot be priced; the message is the reason."""


@dataclass(frozen=True)
class Job:
    """What a row runs. ``samples``: of one data rank in a micro-batch, None where the best is to be taken; ``chunks``: stages
    of a pipeline rank, None likewise; ``matmul_dtype``: of the weights' products where it is not ``compute``."""

    dims: ModelDims | ResNetDims
    compute: str
    matmul_dtype: str | None
    cluster: Cluster
    stack: Stack
    degrees: Degrees
    pipeline: int
    chunks: int | None
    samples: float | None
    global_batch: int
    optimizer: str = "adamw"

    @property
    def device_bytes(self) -> float:
        """What the program may take of a device's memory."""
        return self.cluster.nodes[0].device.memory_bytes * self.stack.device_share


def job_of(run: Run) -> Job:
    """The row as a job.

    Raises NotModelled with the reason; ClusterError for an unknown device.
    """
    run = completed(run)
    if run.fault:
        raise NotModelled(run.fault)
    if not run.was_run:
        raise NotModelled(f"nobody ran it: status {run.status!r}")
    if "LoRA" in run.text("model"):
        raise NotModelled("LoRA: most weights are frozen, and the row does not say which are added")
    stack = stack_of(run.source, run.text("notes"))
    dims = _dims(run, stack)
    last_axis = _last_axis(run, stack, dims)
    data, tensor, pipeline = degrees = _degrees(run, on_data=last_axis != "forced")
    batch = run.count("global_batch")
    if batch is None:
        raise NotModelled("global_batch is blank or no whole number")
    compute, matmul = _types(run)
    zero, recompute = _zero(run, stack, degrees, batch), _recompute(run, stack)
    _check_laid_out(dims, degrees, last_axis)
    if data * tensor == 1:
        last_axis = "forced"
    word = run.text("sequence_parallel").lower()
    sequence = tensor > 1 and (word == "yes" or (not word and stack.sequence_parallel))
    return Job(
        dims, compute, matmul, cluster_of(run), stack, Degrees(data, tensor, zero, recompute, sequence, last_axis),
        pipeline, _chunks(run, pipeline), _samples(run, data, batch), batch, _optimizer(stack, dims),
    )  # fmt: skip


def _optimizer(stack: Stack, dims: ModelDims | ResNetDims) -> str:
    if isinstance(dims, ResNetDims):
        return stack.image_optimizer
    return stack.expert_optimizer if dims.experts else "adamw"


def _last_axis(run: Run, stack: Stack, dims: ModelDims | ResNetDims) -> LastAxis:
    """How the last axis of the mesh splits the model."""
    method = re.search(r"method (?:parax\.)?(heuristic|auto_sharding)", run.text("notes"))
    if not stack.solves or method is None:
        return "forced"
    plain = isinstance(dims, ModelDims) and not dims.experts
    if method.group(1) == "heuristic":
        return "longest"
    return "forced" if plain and run.text("dp") + run.text("tp") else "free"


def _check_laid_out(dims: ModelDims | ResNetDims, degrees: tuple[int, int, int], last_axis: LastAxis) -> None:
    """Raises NotModelled: on these degrees it is not known how the model was split."""
    _, tensor, pipeline = degrees
    if last_axis != "forced" or tensor * pipeline == 1:
        return
    if isinstance(dims, ResNetDims):
        raise NotModelled("a Wide-ResNet is priced on data ranks alone, or as its run's solver lays it out")
    if dims.experts:
        raise NotModelled(
            "a mixture of experts is priced on data ranks alone, or as its run's solver lays it out: expert, tensor and "
            "pipeline ranks are not"
        )


def _recompute(run: Run, stack: Stack) -> str:
    """What is computed again, a compiler's fusion included."""
    return "selective" if stack.fuses and run.recompute == "none" else run.recompute


def _zero(run: Run, stack: Stack, degrees: tuple[int, int, int], batch: int) -> int:
    """The level of ZeRO.

    In a pipeline FSDP2 keeps parameters and gradients whole until the step's end, as ZeRO-1 does (torchtitan,
    ``reshard_after_forward_policy``). A stack that scatters makes ZeRO-2 of what its rows leave blank, and ZeRO-1 where
    gradients are summed over micro-batches before.
    """
    data, _, pipeline = degrees
    if stack.per_operator and pipeline > 1:
        return 1
    if stack.scatters and not run.text("zero_stage"):
        samples = _samples(run, data, batch)
        return 2 if samples is not None and samples * data >= batch else 1
    return run.zero


def _dims(run: Run, stack: Stack) -> ModelDims | ResNetDims:
    if "resnet" in run.text("model").lower():
        return _resnet(run)
    names = ("n_layers", "hidden", "heads", "vocab", "seq_len")
    numbers = {name: run.count(name) for name in names}
    blank = [name for name, value in numbers.items() if value is None]
    if blank:
        raise NotModelled(f"{', '.join(blank)} blank or no whole number")
    layers, hidden, heads, vocab, length = (int(value or 0) for value in numbers.values())
    experts = run.count("n_experts") or 0
    if experts and "alpa" not in run.source.lower():
        raise NotModelled("a mixture of experts of another kind than GShard's: its routing is not priced")
    if experts and layers % 2:
        raise NotModelled(f"{layers} layers: a mixture of experts has them in every second layer; correct n_layers")
    ffn = run.count("ffn_hidden") or (8 if experts else 4) * hidden
    return ModelDims(
        layers, hidden, heads, run.count("kv_heads") or heads, ffn, vocab, length, is_gated(run), stack.fused_attention,
        stack.fused_loss, experts,
    )  # fmt: skip


def _resnet(run: Run) -> ResNetDims:
    """From words such as ``channels 320 width 2 image 224``."""
    found = re.search(r"channels (\d+) width (\d+) image (\d+)", run.text("hidden"))
    if not found:
        raise NotModelled("a Wide-ResNet whose channels, width and image size the row does not say")
    return ResNetDims(*(int(word) for word in found.groups()))


def _types(run: Run) -> tuple[str, str | None]:
    """The type of activations, and that of products with weights where it is narrower."""
    text = run.text("precision").lower()
    low = "float4" if "fp4" in text else "float8" if "fp8" in text else None
    if low:
        return "bfloat16", low
    for word, name in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("tf32", "float32")):
        if word in text:
            return name, None
    raise NotModelled(f"precision {run.text('precision')!r} is not known; give fp32, fp16, bf16 or fp8")


def _degrees(run: Run, on_data: bool) -> tuple[int, int, int]:
    """Data, tensor and pipeline degrees whose product is the number of devices. ``on_data``: devices of which the row does not
    say what they split are one axis, whatever it is called."""
    count = run.num_devices
    if not count:
        raise NotModelled("n_gpus is blank")
    for name in ("cp", "ep"):
        if (run.count(name) or 1) > 1:
            raise NotModelled(
                f"{name}={run.count(name)}: {'context' if name == 'cp' else 'expert'} parallelism is not priced"
            )
    if "uneven" in run.text("pp"):
        raise NotModelled(f"pp is {run.text('pp')!r}: stages of different meshes are not priced")
    given = {name: run.count(name) for name in ("dp", "tp", "pp")}
    known = 1
    for value in given.values():
        known *= value or 1
    blank = [name for name, value in given.items() if value is None]
    if count % known or (not blank and known != count):
        shown = ", ".join(f"{name}={value or 'blank'}" for name, value in given.items())
        raise NotModelled(f"{shown}: the product does not make n_gpus={count}; correct a degree")
    if on_data and "dp" in blank:
        blank = ["dp"]
    if len(blank) > 1 and count != known:
        raise NotModelled(f"{', '.join(blank)} blank: {count // known} devices may be divided in several ways")
    rest = dict.fromkeys(given, 1) | ({blank[0]: count // known} if len(blank) == 1 else {})
    data, tensor, pipeline = (given[name] or rest[name] for name in ("dp", "tp", "pp"))
    return data, tensor, pipeline


def _chunks(run: Run, pipeline: int) -> int | None:
    """Stages of a pipeline rank: as given; unknown where the schedule is interleaved and the row does not say how."""
    if pipeline == 1:
        return 1
    if run.count("vpp"):
        return run.count("vpp")
    return None if "interleaved" in run.text("schedule").lower() else 1


def _samples(run: Run, data: int, batch: int) -> float | None:
    """Samples of a data rank in a micro-batch. Some rows give those of all data ranks together, which their notes say or
    which no data rank could have."""
    samples = run.number("micro_batch")
    if samples is None:
        return None
    whole = "before dp split" in run.text("notes") or samples * data > batch
    return max(1.0, samples / data) if whole else samples


def in_type(job: Job) -> Job:
    """The job on devices whose products run at the rate of the narrower type, attention staying as it was.

    Raises NotModelled: the device has no such rate.
    """
    if job.matmul_dtype is None:
        return job
    node = job.cluster.nodes[0]
    peaks = node.device.peak_flops
    if job.matmul_dtype not in peaks:
        raise NotModelled(f"{job.matmul_dtype}: the catalogue has no such peak of {node.device.name}")
    ratio = peaks[job.compute] / peaks[job.matmul_dtype]
    device = replace(
        node.device, peak_flops={**peaks, job.compute: peaks[job.matmul_dtype]},
        attention_efficiency=node.device.attention_efficiency * ratio,
    )  # fmt: skip
    return replace(job, cluster=replace(job.cluster, nodes=(replace(node, device=device),) * len(job.cluster.nodes)))

"""Everything that a user may ask of a plan: one frozen value, validated once, passed down, never read from globals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autopar.errors import InputError
from cost_models import SCHEDULES

RECOMPUTATIONS = ("none", "selective", "full")
CONTEXT_FORMS = ("ring", "ulysses")
EXPERT_FORMS = ("exchanged", "replicated")
OPTIMIZERS = ("adamw", "adam", "sgd_momentum", "sgd")
OFFLOADS = ("none", "optimizer", "auto")
OUTPUTS = ("all", "loss")
LOGITS = ("whole", "chunks")


@dataclass(frozen=True)
class Parallelism:
    """Degrees that are forced; what is left out is searched.

    ``data`` devices share the batch, ``tensor`` devices the operators, ``context`` devices the sequence, with attention
    around a ``ring`` or along heads as in ``ulysses`` where ``context_form`` says so, and ``spatial`` devices the space that
    convolutions slide along. ``expert`` devices share the experts of mixtures: tokens are ``exchanged``, each device having
    some of the batch, or ``replicated``, where ``expert_form`` says so. ``zero`` (0 to 3) says how the parameters
    rest on the data axis: 0 replicated, 1 optimizer states sharded, 2 gradients too, 3 parameters too; with ``zero_size`` over
    so many devices each, and replicated over the others (hybrid sharding). ``pipeline`` ranks
    share the layers, ``schedule`` says in which order they work (a name of ``cost_models.SCHEDULES``),
    ``micro_batch_size`` how many samples, over all devices of a rank, go through at a time, and ``recompute`` what every
    block computes again in backward: ``none``, ``selective`` or ``full``. ``logits`` that only the loss reads
    (``PlanOptions(outputs="loss")``) are ``whole``, or exist in ``chunks`` of rows, computed again in backward. The product of
    the forced degrees must divide the number of devices; a rest is searched.

    >>> Parallelism(data=2, tensor=4, zero=3)
    """

    data: int | None = None
    tensor: int | None = None
    zero: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    micro_batch_size: int | None = None
    context_form: str | None = None
    spatial: int | None = None
    expert_form: str | None = None
    zero_size: int | None = None
    logits: str | None = None

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context", "expert", "micro_batch_size", "spatial"):
            degree = getattr(self, name)
            if degree is not None and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
                raise InputError(f"Parallelism({name}={degree!r}): a degree is a whole number of at least 1")
        if self.zero is not None and (type(self.zero) is not int or self.zero not in (0, 1, 2, 3)):
            raise InputError(f"Parallelism(zero={self.zero!r}): the ZeRO level is 0, 1, 2 or 3")
        if self.data is not None and self.micro_batch_size is not None and self.micro_batch_size < self.data:
            raise InputError(
                f"Parallelism(data={self.data}, micro_batch_size={self.micro_batch_size}): a micro-batch has at least a "
                f"sample for each of the devices that share it; give micro_batch_size={self.data} or more"
            )
        if self.zero_size is not None:
            self._check_zero_size(self.zero_size)
        if self.context_form is not None and self.context is None:
            raise InputError(
                f"Parallelism(context_form={self.context_form!r}) says how the sequence is split: give context= as well"
            )
        if self.expert_form is not None and self.expert is None:
            raise InputError(
                f"Parallelism(expert_form={self.expert_form!r}) says how tokens come to the experts: give expert= as well"
            )
        forms = (("recompute", RECOMPUTATIONS), ("schedule", SCHEDULES), ("context_form", CONTEXT_FORMS),
                 ("expert_form", EXPERT_FORMS), ("logits", LOGITS))  # fmt: skip
        for name, known in forms:
            chosen = getattr(self, name)
            if chosen is not None and chosen not in known:
                raise InputError(f"Parallelism({name}={chosen!r}) is not known; choose one of {', '.join(known)}")

    def _check_zero_size(self, size: object) -> None:
        if type(size) is not int or size < 2:
            raise InputError(f"Parallelism(zero_size={size!r}): a whole number of at least 2 devices share a parameter")
        if not self.zero:
            raise InputError(f"Parallelism(zero_size={size}) says over how many devices zero shards: give zero=1, 2 or 3")
        if self.data is not None and self.data % size:
            raise InputError(
                f"Parallelism(data={self.data}, zero_size={size}): the devices that share a parameter are a part of those that "
                "share the batch; give a zero_size that divides data"
            )

    @property
    def is_free(self) -> bool:
        """Whether nothing is forced."""
        return self == Parallelism()


@dataclass(frozen=True)
class Precision:
    """In which types a model is trained; without ``compute``, in its own.

    ``compute``: the type of the parameters' working copies, of activations and of their gradients (mixed precision as in
    Micikevicius et al., ICLR 2018; Megatron-LM and FSDP's MixedPrecision have it alike). What the optimizer updates are
    *masters*, in the parameter's own type and float32 at least; a parameter's gradient is brought to its master's type
    before it is summed over devices or micro-batches. Frozen parameters and persistent buffers are kept in ``compute``.
    ``autocast``: parameters stay as they are, and forward and loss run under ``torch.autocast`` to this type, whose casts
    become operators of the graph: those that torch makes on the kind of device that the model is on (meta counts as CPU).

    >>> Precision("bfloat16").master("float32")
    'float32'
    """

    compute: str | None = None
    autocast: str | None = None

    def master(self, dtype: str) -> str | None:
        """The type of the master of a parameter of type ``dtype``; None where the parameter itself is updated."""
        if self.compute is None or dtype not in FLOATING:
            return None
        return "float64" if dtype == "float64" else "float32"

    def to_json(self) -> dict[str, Any]:
        """Plain dict, the arguments that make it again."""
        return dataclasses.asdict(self)

    def computed(self, dtype: str) -> str:
        """The type in which a tensor of type ``dtype`` is computed with."""
        return self.compute if self.compute is not None and dtype in FLOATING else dtype


FLOATING = ("float64", "float32", "float16", "bfloat16")
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {"model": Precision(), "bfloat16": Precision("bfloat16"), "autocast": Precision(autocast="bfloat16")}
)


@dataclass(frozen=True)
class PlanOptions:
    """How to plan.

    ``precision``: ``model`` (the model's own types), ``bfloat16`` (computed in bfloat16; float32 masters, gradient sums
    and optimizer states) or ``autocast`` (as under ``torch.autocast`` to bfloat16); see :class:`Precision`.
    ``optimizer``: whose state bytes count, one of ``adamw adam sgd_momentum sgd``. ``offload``: what rests in the memory of
    the host and is updated there: ``none``, ``optimizer`` (the states of all parameters, and the parameters or masters that
    the optimizer updates) or ``auto`` (of as many parameters as pays, or as must be for a plan to fit). ``memory_margin``:
    part of each device's memory that is kept free. ``max_mesh_axes``: meshes of up to this many axes are searched.
    ``outputs``: which of the model's outputs the program gives, ``all`` or only the ``loss``; then logits need not be whole.
    ``max_variants``: how many differently sharded versions of a repeated block a program may have.
    ``gap``: the search ends when no plan can be faster by more than this fraction; ``max_evaluations``: or when so many
    arrangements (stages, micro-batches, schedule, mesh) have been planned in full, or ``max_pricings`` priced beside the
    largest micro-batch of each mesh; as many more may be priced to raise the lower bound of what is left.
    ``time_limit_seconds``: the user's own cut-off of the search; without it the same input gives the same plan.
    """

    parallelism: Parallelism = field(default_factory=Parallelism)
    optimizer: str = "adamw"
    memory_margin: float = 0.05
    max_mesh_axes: int = 2
    max_variants: int = 4
    gap: float = 0.01
    max_evaluations: int = 6
    max_pricings: int = 120
    mesh_shape: tuple[int, ...] | None = None
    time_limit_seconds: float | None = None
    precision: str = "model"
    offload: str = "none"
    outputs: str = "all"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(f"precision {self.precision!r} is not known; choose one of {', '.join(PRECISIONS)}")
        if not isinstance(self.parallelism, Parallelism):
            raise InputError(f"parallelism={self.parallelism!r} must be a Parallelism, such as Parallelism(data=2)")
        if self.mesh_shape is not None and not _is_shape(self.mesh_shape):
            raise InputError(
                f"mesh_shape={self.mesh_shape!r} must be a tuple of whole numbers of at least 1, such as (2, 4)"
            )
        for name in ("memory_margin", "time_limit_seconds"):
            value = getattr(self, name)
            left_out = value is None and name == "time_limit_seconds"
            if isinstance(value, bool) or not (left_out or isinstance(value, (int, float))):
                raise InputError(f"{name}={value!r} must be a number")
        if self.outputs not in OUTPUTS:
            raise InputError(f"outputs {self.outputs!r} is not known; choose one of {', '.join(OUTPUTS)}")
        if self.parallelism.logits is not None and self.outputs != "loss":
            raise InputError(
                f"Parallelism(logits={self.parallelism.logits!r}): with outputs={self.outputs!r} the model's outputs are "
                "wanted too, whole logits among them; give outputs='loss', or leave logits out"
            )
        if self.offload not in OFFLOADS:
            raise InputError(f"offload {self.offload!r} is not known; choose one of {', '.join(OFFLOADS)}")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer {self.optimizer!r} is not known; choose one of {', '.join(OPTIMIZERS)}")
        if isinstance(self.gap, bool) or not isinstance(self.gap, (int, float)) or not 0 <= self.gap < 1:
            raise InputError(f"gap={self.gap!r} must be a fraction from 0 up to, not including, 1")
        if not 0 <= self.memory_margin < 1:
            raise InputError(f"memory_margin={self.memory_margin} must be a fraction from 0 up to, not including, 1")
        for name in ("max_mesh_axes", "max_variants", "max_evaluations", "max_pricings"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)!r} must be a whole number of at least 1")
        if self.time_limit_seconds is not None and not self.time_limit_seconds > 0:
            raise InputError(f"time_limit_seconds={self.time_limit_seconds} must be above 0, or None for no limit")

    def to_json(self) -> dict[str, Any]:
        """Plain dict for plan.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> PlanOptions:
        """The inverse of :meth:`to_json`."""
        fields = dict(document)
        fields["parallelism"] = Parallelism(**fields["parallelism"])
        if fields.get("mesh_shape") is not None:
            fields["mesh_shape"] = tuple(fields["mesh_shape"])
        return PlanOptions(**fields)


def _is_shape(given: object) -> bool:
    return isinstance(given, (tuple, list)) and all(type(size) is int and size >= 1 for size in given)

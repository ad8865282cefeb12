"""Stages and schedules of torch.distributed.pipelining: the one module that touches its private interfaces (torch 2.13).

torch's schedules say in which order a rank runs forwards, backwards and messages. What a stage does is all our own: every
micro-batch has its own shapes, so that uneven ones need no padding; several tensors of any type travel; received tensors are
allocated when they are awaited and freed when they have been used; a gradient that autograd does not give is sent as zeros;
gradients are not scaled; no outputs are kept; and backward is split as :mod:`autopar.runtime.split_backward` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from autopar.runtime import collectives, recompute
from autopar.runtime.batches import MicroBatch, scaled_dims
from autopar.runtime.errors import ProgramError
from autopar.runtime.holdings import OwnStage
from autopar.runtime.layouts import local_shape, parse_words
from autopar.runtime.mesh import Mesh
from autopar.runtime.parameters import ParameterSlot
from autopar.runtime.program import Boundary
from autopar.runtime.split_backward import WeightPart, backward_of_inputs

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
_OF_ONE_STAGE = ("gpipe", "1f1b")


@dataclass
class _Forward:
    """What backward needs of one forward: leaves that came in, the edges of results that gradients come back for (None for
    one that depends on nothing trainable), and whether anything inside will be computed again. Results themselves are not
    kept."""

    inputs: list[Tensor]
    outputs: list[GradientEdge | None]
    recomputes: bool


@dataclass
class _Rest:
    """What W does of a backward whose I has run: a part, or all of it."""

    weights: WeightPart | None = None
    whole: tuple[list[GradientEdge], list[Tensor]] | None = None


class RunnableStage(_PipelineStageBase):
    """One stage of this rank, as torch's schedules want it.

    ``receives``: what the stage before sends. ``planned``: the micro-batch of which boundaries have their shapes.
    ``after_backward``: called with whether the backward that has run was the last of the step; ``before_backward`` likewise.
    """

    def __init__(
        self,
        own: OwnStage,
        receives: Sequence[Boundary],
        num_stages: int,
        mesh: Mesh,
        planned: int,
        before_backward: Callable[[bool], None],
        after_backward: Callable[[bool], None],
    ) -> None:
        self._mesh = mesh
        super().__init__(own.module, own.index, num_stages, mesh.device, self.group)
        self.own = own
        self.run: Callable[..., Any] = own.module
        self.is_compiled = False
        self.receives = tuple(receives)
        self.sends = own.description.sends
        self.args_recv_info = {0: ()}
        self._planned = planned
        self._shapes: dict[tuple[Boundary, int], tuple[int, ...]] = {}
        self._before_backward, self._after_backward = before_backward, after_backward
        slots = [slot for slot in own.module.modules() if isinstance(slot, ParameterSlot) and slot.trainable]
        self._weights = list({id(slot.leaf): slot.leaf for slot in slots}.values())
        self._gathers = any(slot.zero == 3 for slot in slots)
        self.begin([])

    @property
    def group(self) -> dist.ProcessGroup:
        """Of the pipeline ranks at this position. Looked up, not kept: a kept group outlives the process group's end."""
        return self._mesh.group_of(self._mesh.stages)

    @group.setter
    def group(self, group: Any) -> None:
        pass

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Forget the last step and take the inputs of the next one."""
        self._micro_batches = list(micro_batches)
        self._total = sum(micro_batch.size for micro_batch in micro_batches)
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._forwards: dict[int, _Forward] = {}
        self._sent: dict[int, tuple[Tensor, ...]] = {}
        self._output_gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._input_gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._rests: dict[int, _Rest] = {}
        self._num_backward = 0
        self._loss_dtype = torch.float32
        self.has_trainable_loss = True
        self.outputs: list[dict[str, Tensor]] = []

    # Forward

    def run_module(self, at: int, received: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What the stage sends and its outputs, for micro-batch ``at``."""
        micro_batch = self._micro_batches[at]
        self._mesh.begin(micro_batch.first, micro_batch.size, self._total)
        takes = {name: micro_batch.shares[name] for name in self.own.description.takes}
        found = self.run(*received, **takes)
        if isinstance(found, Mapping):
            return (), dict(found)
        if not self.own.description.outputs:
            return tuple(found), {}
        sends, outputs = found
        return tuple(sends), dict(outputs)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Forward of one micro-batch: what goes to a stage of this rank, or of the last stage the loss, detached."""
        received = self._received.pop(fwd_chunk_id, ())
        inputs = [
            tensor.requires_grad_()
            for tensor, boundary in zip(received, self.receives, strict=True)
            if boundary.requires_grad
        ]
        before = recompute.num_recomputed()
        sends, outputs = self.run_module(fwd_chunk_id, received)
        recomputes = recompute.num_recomputed() > before
        if self.is_last:
            self._forwards[fwd_chunk_id] = _Forward(inputs, [_edge(outputs["loss"])], recomputes)
            self.has_trainable_loss = self.has_trainable_loss and outputs["loss"].requires_grad
            self._loss_dtype = outputs["loss"].dtype
            return outputs["loss"].detach()
        edges = [_edge(sent) for sent, boundary in zip(sends, self.sends, strict=True) if boundary.requires_grad]
        self._forwards[fwd_chunk_id] = _Forward(inputs, edges, recomputes)
        sends = tuple(sent.detach() for sent in sends)
        if self.stage_index_to_group_rank[self.stage_index + 1] == self.group_rank:
            return sends
        self._sent[fwd_chunk_id] = sends
        return ()  # torch's loops would keep it

    def evaluate(self, at: int) -> tuple[Tensor, ...]:
        """Forward of one micro-batch without gradients: what is sent. Outputs are kept."""
        sends, outputs = self.run_module(at, self._received.pop(at, ()))
        self.outputs.append(outputs)
        self._sent[at] = sends
        return sends

    # Backward

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch, all of it (B) or its first part (I)."""
        forward = self._forwards.pop(bwd_chunk_id)
        outputs, gradients = self._differentiated(bwd_chunk_id, forward)
        if full_backward:
            self._counted(lambda: _backward(outputs, gradients))
            found: list[Tensor | None] = [_taken_gradient(given) for given in forward.inputs]
        else:
            found = self._first_part(bwd_chunk_id, forward, outputs, gradients)
        waiting = iter(found)
        self._input_gradients[bwd_chunk_id] = tuple(
            next(waiting) if boundary.requires_grad else None for boundary in self.receives
        )

    def _differentiated(self, at: int, forward: _Forward) -> tuple[list[GradientEdge], list[Tensor]]:
        """The edges of the results to differentiate, and their gradients."""
        if self.is_last:
            edges = [edge for edge in forward.outputs if edge is not None]
            return edges, [torch.ones((), dtype=self._loss_dtype, device=self.device) for _ in edges]
        arrived = self._output_gradients.pop(at)
        gradients = [gradient for gradient, boundary in zip(arrived, self.sends, strict=True) if boundary.requires_grad]
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(forward.outputs, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]

    def _first_part(
        self, at: int, forward: _Forward, outputs: list[GradientEdge], gradients: list[Tensor]
    ) -> list[Tensor | None]:
        """I of a backward, leaving the rest for W."""
        if not forward.inputs:
            self._rests[at] = _Rest(whole=(outputs, gradients))
            return []
        split = None
        if outputs and not (forward.recomputes or self._gathers or self.is_compiled):
            split = backward_of_inputs(outputs, gradients, forward.inputs, self._weights)
        if split is None:  # all of it now: in two parts it would gather, compute or send something twice
            self._before_backward(False)
            _backward(outputs, gradients)
            self._rests[at] = _Rest()
            return [_taken_gradient(given) for given in forward.inputs]
        self._rests[at] = _Rest(weights=split[1])
        return split[0]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second part (W) of the backward of one micro-batch."""
        rest = self._rests.pop(bwd_chunk_id)
        self._counted(lambda: _run_rest(rest))

    def _counted(self, backward: Callable[[], None]) -> None:
        self._num_backward += 1
        is_last = self._num_backward == len(self._micro_batches)
        self._before_backward(is_last)
        backward()
        self._after_backward(is_last)

    # Messages

    def _shape(self, boundary: Boundary, at: int) -> tuple[int, ...]:
        """Of this rank's share of a boundary of micro-batch ``at``."""
        key = (boundary, self._micro_batches[at].size)
        if key not in self._shapes:
            shape = scaled_dims(boundary.shape, boundary.batch_dims, key[1], self._planned)
            self._shapes[key] = local_shape(shape, parse_words(boundary.layout, self._mesh, len(shape)), self._mesh)
        return self._shapes[key]

    def _empty(self, boundary: Boundary, at: int) -> Tensor:
        return torch.empty(self._shape(boundary, at), dtype=boundary.dtype, device=self._mesh.device)

    def _receive(self, tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[stage]
        messages = [collectives.message(tensor) for tensor in tensors if tensor.numel()]
        return [dist.P2POp(dist.irecv, message, group=self.group, group_peer=peer) for message in messages]

    def _send(self, tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[stage]
        found = []
        for tensor in tensors:
            if tensor.numel():
                self._mesh.stages.record("send_recv", tensor.numel() * tensor.element_size())
                message = collectives.message(tensor.detach().resolve_conj().contiguous())
                found.append(dist.P2POp(dist.isend, message, group=self.group, group_peer=peer))
        return found

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        buffers = tuple(self._empty(boundary, fwd_chunk_id) for boundary in self.receives)
        self._received[fwd_chunk_id] = buffers
        return self._receive(buffers, self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        sent = self._sent.pop(fwd_chunk_id)
        for tensor, boundary in zip(sent, self.sends, strict=True):
            self._check_sent(tensor, boundary, fwd_chunk_id)
        return self._send(sent, self.stage_index + 1)

    def _check_sent(self, tensor: Tensor, boundary: Boundary, at: int) -> None:
        """A message of another shape than awaited would never end, or end in another tensor."""
        expected = self._shape(boundary, at)
        if tuple(tensor.shape) != expected or tensor.dtype != boundary.dtype:
            raise ProgramError(
                f"stage {self.stage_index} sends {boundary.name!r} as {tensor.dtype} of shape {tuple(tensor.shape)}, the next "
                f"stage awaits {boundary.dtype} of shape {expected}"
            )

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        found = [self._empty(boundary, bwd_chunk_id) if boundary.requires_grad else None for boundary in self.sends]
        self._output_gradients[bwd_chunk_id] = tuple(found)
        return self._receive([tensor for tensor in found if tensor is not None], self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        gradients = self._input_gradients.pop(bwd_chunk_id)
        if self.is_first:
            return []
        sent = []
        for boundary, gradient in zip(self.receives, gradients, strict=True):
            if boundary.requires_grad:
                sent.append(self._empty(boundary, bwd_chunk_id).zero_() if gradient is None else gradient)
        return self._send(sent, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """What the stage before, which is on this rank, sends."""
        self._received[mb_index] = tuple(tensor.detach() for tensor in prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return self._input_gradients.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        self._output_gradients[mb_index] = next_stage_bwd_outputs

    # What torch's schedules ask for beside

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def clear_runtime_states(self) -> None:
        """Nothing: :meth:`begin` does it."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing: the loss of a micro-batch is a term of the batch's."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the engine reduces."""


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _backward(outputs: list[GradientEdge], gradients: list[Tensor]) -> None:
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _run_rest(rest: _Rest) -> None:
    if rest.weights is not None:
        rest.weights.run()
    elif rest.whole is not None:
        _backward(*rest.whole)


def _taken_gradient(leaf: Tensor) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return gradient


def make_schedule(name: str, stages: Sequence[RunnableStage], num_micro_batches: int) -> Any:
    """torch's schedule over the stages of this rank; ProgramError for a combination that torch refuses."""
    if name not in SCHEDULES:
        raise ProgramError(f"unknown schedule {name!r}: there are {', '.join(SCHEDULES)}, and single for one stage")
    num_stages, num_ranks = stages[0].num_stages, stages[0].group_size
    problem = _problem(name, stages)
    if problem is None:
        given = stages[0] if name in _OF_ONE_STAGE else list(stages)
        try:
            return SCHEDULES[name](given, num_micro_batches, loss_fn=_loss_itself, scale_grads=False)
        except (ValueError, AssertionError, RuntimeError, IndexError, KeyError) as error:
            problem = str(error)
    raise ProgramError(
        f"{name} cannot run {num_micro_batches} micro-batches through {num_stages} stages on {num_ranks} pipeline ranks: "
        f"{problem}"
    )


def _problem(name: str, stages: Sequence[RunnableStage]) -> str | None:
    num_stages, num_ranks = stages[0].num_stages, stages[0].group_size
    if name in _OF_ONE_STAGE and num_stages != num_ranks:
        return "it has one stage a rank"
    if num_stages % num_ranks:
        return "every rank has as many stages"
    return None


def _loss_itself(output: Tensor, target: None) -> Tensor:
    return output


def run_schedule(schedule: Any, stages: Sequence[RunnableStage], num_micro_batches: int) -> list[Tensor]:
    """A training step; the losses of all micro-batches where the last stage is on this rank."""
    for stage in stages:
        stage.has_backward = True
    losses: list[Tensor] = []
    schedule._step_microbatches(
        [()] * num_micro_batches,
        [{}] * num_micro_batches,
        [None] * num_micro_batches,
        losses,
        return_outputs=False,
    )
    return losses


def run_forward(stages: Sequence[RunnableStage], num_micro_batches: int) -> None:
    """Forward of all micro-batches, one stage after the other, outputs kept.

    A stage asks for all that it receives before it sends anything: so do both sides of every pair of ranks, in the same
    order, which NCCL wants where messages go both ways.
    """
    by_index = {stage.stage_index: stage for stage in stages}
    sent: list[dist.Work] = []
    for stage in stages:
        awaited: list[list[dist.Work]] = [[] for _ in range(num_micro_batches)]
        if stage.stage_index - 1 not in by_index:
            awaited = [schedules._batch_p2p(stage.get_fwd_recv_ops(at)) for at in range(num_micro_batches)]
        for at in range(num_micro_batches):
            for work in awaited[at]:
                work.wait()
            sends = stage.evaluate(at)
            if stage.stage_index + 1 in by_index:
                by_index[stage.stage_index + 1].set_local_fwd_input(sends, at)
            else:
                sent += schedules._batch_p2p(stage.get_fwd_send_ops(at))
    for work in sent:
        work.wait()

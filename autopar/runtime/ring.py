"""Attention whose queries and keys are both split along the sequence: keys and values pass round the ranks of an axis.

Every rank computes its queries with the keys that it holds while the next ones are on their way; the blocks are put together
by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", ICLR 2024). Backward
goes round once more, and the gradients of keys and values travel with them until they are home.

Under a causal mask the last rank would have all keys to look at and the first only its own. So each rank first trades the
second half of its rows with the rank as far from the other end. Of two such pairs of halves one lies inside the other, in
the order of the sequence; so with any two ranks either all queries see the lower half of the keys or the upper half of the
queries sees all keys: the same work for every rank in every round. The output's halves are traded back. (Zig-zag orders, as
in Llama 3's context parallelism, do the same to the whole model's inputs; traded here, positions stay in order elsewhere.)

Pieces travel padded to the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.blocks import attend, attend_backward, finite, wide
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.split import Split, pad

_ROWS = 2  # the dim of queries and keys in [batch, heads, rows, width]


# Messages and the rounds' numbers are no part of a compiled graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    keys: Split,
    is_causal: bool = False,
    scale: float | None = None,
    repeats: int = 1,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of this rank's queries with the keys of all ranks of the axis that cuts ``keys``.

    ``query [..., heads, q, d]``, ``key [..., kv heads, k, d]``, ``value [..., kv heads, k, e]`` are this rank's rows, ``heads``
    a multiple of ``kv heads``; the result is ``[..., heads, q, e]``. ``keys``: how one axis cuts the dim of all keys, into one
    run a rank. ``mask``: bool or added to the scores, of this rank's queries and all keys, broadcast to ``[..., heads, q, k]``.
    ``is_causal``: queries are cut like keys, and each sees the keys up to its place. ``repeats``: so many heads of keys and
    values side by side are the same, widened from one: the first of them is sent, and has the gradient of all.

    Raises ProgramError for shapes that do not fit the split.
    """
    way = _Way(keys.axes[0], keys.pieces(keys.axes[0]).sizes, is_causal, scale or query.shape[-1] ** -0.5)
    if repeats > 1:
        key, value = (x.unflatten(-3, (-1, repeats)).select(-3, 0) for x in (key, value))
    _check(query, key, value, mask, keys, way)
    leading = query.shape[:-3]
    if mask is not None:
        mask = _with_batch(mask, leading)
    found = _Ring.apply(*(_one_batch(x) for x in (query, key, value)), mask, way)  # type: ignore[no-untyped-call]
    return found if query.dim() == 4 else found.reshape(*leading, *found.shape[1:])  # type: ignore[no-any-return]


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keys: Split, way: _Way) -> None:
    rows = way.sizes[way.axis.place]
    if len(keys.axes) != 1 or len(keys.intervals()) > 1:
        raise ProgramError(f"a ring is along one axis, with one run of keys a rank; {keys} is not")
    if key.shape[:-1] != value.shape[:-1] or key.shape[-2] != rows or query.shape[-3] % key.shape[-3]:
        raise ProgramError(
            f"queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)} do not go together round "
            f"a ring in which this rank holds {rows} of {keys.size} keys"
        )
    if way.is_causal and (query.shape[-2] != rows or mask is not None):
        raise ProgramError(
            f"causal attention has no other mask, and as many queries as keys: {query.shape[-2]} and {rows}"
        )


def _one_batch(x: Tensor) -> Tensor:
    """``[batch, heads, rows, width]``."""
    return x if x.dim() == 4 else x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4)


def _with_batch(mask: Tensor, leading: Sequence[int]) -> Tensor:
    """The mask in four dims."""
    if mask.dim() > 4 or (mask.dim() == 4 and len(leading) > 1):
        mask = mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


Work = tuple[slice, slice, bool]  # rows of the queries, rows of the keys, whether under a causal mask


@dataclass(frozen=True)
class _Way:
    """One ring: its axis, how many rows each rank holds, and what of them is computed where."""

    axis: Axis
    sizes: tuple[int, ...]
    is_causal: bool
    scale: float

    @property
    def mirror(self) -> int:
        """The rank with which rows are traded."""
        return self.axis.size - 1 - self.axis.place

    def halves(self, place: int) -> tuple[int, int]:
        """Rows of the lower and of the upper half that a rank computes with after the trade."""
        kept, given = self.sizes[place] - self.sizes[place] // 2, self.sizes[self.axis.size - 1 - place] // 2
        return (kept, given) if 2 * place < self.axis.size else (given, kept)

    def rows(self, place: int) -> int:
        """How many rows a rank computes with."""
        return sum(self.halves(place)) if self.is_causal else self.sizes[place]

    def start(self, place: int) -> int:
        """The first row that a rank holds, of all."""
        return sum(self.sizes[:place])

    @property
    def largest(self) -> int:
        """Rows of a message."""
        return max(self.sizes)

    def owner(self, step: int) -> int:
        """Whose keys are here in round ``step``."""
        return (self.axis.place - step) % self.axis.size

    def work(self, owner: int) -> Iterator[Work]:
        """What is computed with the keys of ``owner``."""
        everything = slice(None)
        if not self.is_causal or owner == self.axis.place:
            yield everything, everything, self.is_causal
            return
        depth, other = (min(2 * place, 2 * (self.axis.size - place) - 1) for place in (self.axis.place, owner))
        if other < depth:  # the keys' halves lie around the queries'
            rows, columns = everything, slice(0, self.halves(owner)[0])
            empty = columns.stop == 0
        else:
            rows, columns = slice(self.halves(self.axis.place)[0], None), everything
            empty = self.halves(self.axis.place)[1] == 0
        if not empty:
            yield rows, columns, False


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, way: _Way) -> Tensor:
        q, k, v = _traded([query, key, value], way)
        shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        # Rows before heads, as torch's kernels have it: the program's transpose back is then a view.
        total = torch.zeros(shape, dtype=wide(q.dtype), device=q.device).transpose(1, 2)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide(q.dtype), device=q.device)
        for owner, (some_keys, some_values) in _passing([k, v], way):
            for rows, columns, causal in way.work(owner):
                bias = _bias(mask, way, owner, lse.dtype)
                ks, vs = some_keys[:, :, columns], some_values[:, :, columns]
                _add(total[:, :, rows], lse[:, :, rows], *attend(q[:, :, rows], ks, vs, bias, causal, way.scale))
        out = _returned([total.to(q.dtype)], way)[0]
        ctx.save_for_backward(query, key, value, mask, out, finite(lse))
        ctx.way = way
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        way: _Way = ctx.way
        wants_mask = mask is not None and ctx.needs_input_grad[3]
        traded = _traded([query, key, value, out, gradient], way)
        for_query, travelling, for_mask = _gradients(traded, mask, lse, way, wants_mask)
        for_key, for_value = travelling.home()
        back = _returned([for_query.to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype)], way)
        return back[0], back[1], back[2], None if for_mask is None else for_mask.to(mask.dtype), None


def _gradients(
    traded: list[Tensor], mask: Tensor | None, lse: Tensor, way: _Way, wants_mask: bool
) -> tuple[Tensor, _Travelling, Tensor | None]:
    """Once more round the ring: the gradients of the queries, of keys and values on their way home, and of the mask.

    ``traded`` (query, key, value, result and its gradient) is emptied: nobody holds them any longer when this returns.
    """
    q, k, v, out, along = traded
    traded.clear()
    for_query = torch.zeros_like(q, dtype=lse.dtype)
    for_mask = torch.zeros_like(mask, dtype=lse.dtype) if mask is not None and wants_mask else None
    travelling = _Travelling([k, v], lse.dtype, way)

    def terms(owner: int, some_keys: Tensor, some_values: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Those of one rank's keys and values."""
        for rows, columns, causal in way.work(owner):
            gq, gk, gv, gb = attend_backward(
                along[:, :, rows], q[:, :, rows], some_keys[:, :, columns], some_values[:, :, columns],
                _bias(mask, way, owner, lse.dtype), out[:, :, rows], lse[:, :, rows], causal, way.scale, wants_mask,
            )  # fmt: skip
            for_query[:, :, rows] += gq
            if for_mask is not None and gb is not None:
                part = _columns(for_mask, way, owner)
                part.add_(gb.sum_to_size(part.shape))
            yield columns, [gk, gv]

    for owner, pieces in _passing([k, v], way):
        travelling.add(list(terms(owner, *pieces)), way.rows(owner))
    return for_query, travelling, for_mask


def _add(total: Tensor, lse: Tensor, out: Tensor, more: Tensor) -> None:
    """Another block of keys: ``total`` and ``lse`` become those of all keys so far."""
    both = torch.logaddexp(lse, more)
    known = finite(both)
    total.mul_((lse - known).exp().unsqueeze(-1)).add_(out * (more - known).exp().unsqueeze(-1))
    lse.copy_(both)


def _columns(mask: Tensor, way: _Way, owner: int) -> Tensor:
    """A mask's part for the keys of ``owner``; one that is broadcast along the keys as it is."""
    return mask if mask.shape[-1] == 1 else mask.narrow(-1, way.start(owner), way.sizes[owner])


def _bias(mask: Tensor | None, way: _Way, owner: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores with the keys of ``owner``."""
    if mask is None:
        return None
    part = _columns(mask, way, owner)
    if part.dtype != torch.bool:
        return part
    return torch.zeros(part.shape, dtype=dtype, device=part.device).masked_fill_(~part, -torch.inf)


class _Messages:
    """Messages under way; kept alive with their buffers until all are done."""

    def __init__(self, sent: Sequence[Tensor], received: Sequence[Tensor], axis: Axis, to: int, source: int) -> None:
        self.sent, self.received = [x.contiguous() for x in sent], list(received)
        operations = []
        for x, buffer in zip(self.sent, self.received, strict=True):
            if x.numel():
                axis.record("send_recv", x.numel() * x.element_size())
                operations.append(dist.P2POp(dist.isend, x, group=axis.group, group_peer=to))
            if buffer.numel():
                operations.append(dist.P2POp(dist.irecv, buffer, group=axis.group, group_peer=source))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        self.sent = []
        return self.received


def _to_next(tensors: Sequence[Tensor], way: _Way) -> _Messages:
    size, place = way.axis.size, way.axis.place
    buffers = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    return _Messages(tensors, buffers, way.axis, (place + 1) % size, (place - 1) % size)


def _passing(tensors: Sequence[Tensor], way: _Way) -> Iterator[tuple[int, list[Tensor]]]:
    """The pieces of all ranks one after the other, this rank's own first, each with its owner. The next one is on its way
    while one is used."""
    here = [pad(x, _ROWS, way.largest) for x in tensors]
    for step in range(way.axis.size):
        coming = _to_next(here, way) if step + 1 < way.axis.size else None
        owner = way.owner(step)
        yield owner, [x.narrow(_ROWS, 0, way.rows(owner)) for x in here]
        here = coming.wait() if coming is not None else []


class _Travelling:
    """Gradients of keys and values, which follow these round the ring and have one more step to go home."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype, way: _Way) -> None:
        self.way = way
        shapes = [(*x.shape[:_ROWS], way.largest, *x.shape[_ROWS + 1 :]) for x in tensors]
        self.here = [torch.zeros(shape, dtype=dtype, device=tensors[0].device) for shape in shapes]
        self.coming: _Messages | None = None

    def add(self, found: Sequence[tuple[slice, Sequence[Tensor]]], num_rows: int) -> None:
        """A round's terms, once those of the ranks before have come; then they go on."""
        if self.coming is not None:
            self.here = self.coming.wait()
        for columns, terms in found:
            for held, term in zip(self.here, terms, strict=True):
                held.narrow(_ROWS, 0, num_rows)[:, :, columns] += term
        self.coming = _to_next(self.here, self.way)

    def home(self) -> list[Tensor]:
        """This rank's own."""
        assert self.coming is not None, "a ring has at least one round"
        return [x.narrow(_ROWS, 0, self.way.rows(self.way.axis.place)) for x in self.coming.wait()]


def _traded(tensors: Sequence[Tensor], way: _Way) -> list[Tensor]:
    """This rank's rows as it computes with them: under a causal mask those after the trade, the lower half first."""
    if not way.is_causal or way.mirror == way.axis.place:
        return list(tensors)
    kept = way.sizes[way.axis.place] - way.sizes[way.axis.place] // 2
    given = [x.narrow(_ROWS, kept, x.shape[_ROWS] - kept) for x in tensors]
    taken = _swapped(given, way.sizes[way.mirror] // 2, way)
    own = [x.narrow(_ROWS, 0, kept) for x in tensors]
    lower, upper = (own, taken) if way.axis.place < way.mirror else (taken, own)
    return [torch.cat(halves, _ROWS) for halves in zip(lower, upper, strict=True)]


def _returned(tensors: Sequence[Tensor], way: _Way) -> list[Tensor]:
    """The inverse of :func:`_traded`."""
    if not way.is_causal or way.mirror == way.axis.place:
        return list(tensors)
    lower, upper = way.halves(way.axis.place)
    low = [x.narrow(_ROWS, 0, lower) for x in tensors]
    high = [x.narrow(_ROWS, lower, upper) for x in tensors]
    own, taken = (low, high) if way.axis.place < way.mirror else (high, low)
    back = _swapped(taken, way.sizes[way.axis.place] // 2, way)
    return [_stacked(first, second) for first, second in zip(own, back, strict=True)]


def _stacked(low: Tensor, high: Tensor) -> Tensor:
    """Two halves as one, rows before heads in memory as the kernels' own results."""
    return torch.cat([low.transpose(1, 2), high.transpose(1, 2)], 1).transpose(1, 2)


def _swapped(tensors: Sequence[Tensor], num_rows: int, way: _Way) -> list[Tensor]:
    """The mirror's rows for these."""
    buffers = [x.new_empty(*x.shape[:_ROWS], num_rows, *x.shape[_ROWS + 1 :]) for x in tensors]
    return _Messages(tensors, buffers, way.axis, way.mirror, way.mirror).wait()

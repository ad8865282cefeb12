"""The exported fx graph, node by node, as operators and values.

Enters: a :class:`~autopar.tracing.capture.Capture`. Leaves: a :class:`Lowered`. Assertions and identities are dropped,
regions without gradient or under autocast are written into their surroundings, with the casts of the latter (``autocast``),
in-place operators become functional ones (``places``), training batch norm gets its new statistics as outputs, and each
operator gets an id that depends only on the module it is in and on what came before it there.
What depends on the values of tensors is carried along unseen, and refused where a result needs it.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator, OpOverload

from autopar.errors import TraceError
from autopar.graph import (
    Buffer,
    Constant,
    DeviceArgument,
    Operator,
    Output,
    Parameter,
    Ref,
    TorchName,
    Value,
    ValueKind,
    refs,
)
from autopar.options import Precision
from autopar.tracing.autocast import Autocast, Casting
from autopar.tracing.capture import Capture
from autopar.tracing.causal import fold_causal_masks
from autopar.tracing.dropped_attention import dropped_attention
from autopar.tracing.experts import fold_experts
from autopar.tracing.logits import only_loss
from autopar.tracing.lowered import Lowered, Unknown, drop_dead
from autopar.tracing.needs import Gradients
from autopar.tracing.places import Place, View, memory_of, read, write
from autopar.tracing.regions import region
from autopar.tracing.selected import carried, put_back, unknown_result
from autopar.tracing.source import line_of_trace, read_module_stack
from autopar.tracing.targets import (
    ASSERTIONS,
    CONVERSIONS,
    DROPOUTS,
    RESHAPE_IN_PLACE,
    SAME_TENSOR,
    SHAPED_BY_STRIDES,
    argument_of,
    dtype_name,
    functional_form,
    is_idle_dropout,
    not_an_operator,
    resolve_target,
    same_layout,
    types_that_do_not_meet,
    without_lender,
    writes_into_first,
)

_Env = dict[torch.fx.Node, Any]

MAX_CONSTANT_NUMBERS = 4096


def lower(capture: Capture, input_paths: list[str], precision: Precision, outputs: str = "all") -> Lowered:
    """Turn a captured program into operators and values; dead operators are left out. ``outputs``: which of the model's are
    wanted beside the loss, ``all`` or none (``loss``)."""
    lowering = _Lowering(capture, input_paths, precision, outputs)
    lowering.run()
    return lowering.lowered


class _Lowering:
    """One pass over the fx graph. State: the places of the program so far, and the values that they have held."""

    def __init__(self, capture: Capture, input_paths: list[str], precision: Precision, outputs: str) -> None:
        self.capture = capture
        self.outputs = outputs
        self.precision = precision
        self.lowered = Lowered()
        self.input_paths = iter(input_paths)
        self.fakes: dict[str, Any] = {}
        self.grad_enabled = True
        self.autocast: Autocast | None = None
        self.node: torch.fx.Node | None = None
        self._counters: Counter[tuple[str, str]] = Counter()
        self._constants: dict[Any, str] = {}
        self._detached: dict[str, str] = {}
        self._aliases: dict[int, int] = {}
        self._gradients = Gradients(self)
        self._casting = Casting(self)
        self._state_places: dict[str, Place] = {}

    def run(self) -> None:
        lowered, capture = self.lowered, self.capture
        self._add_states()
        results = self.run_graph(capture.graph_module, None)
        for unknown in (result for result in results if isinstance(result, Unknown)):
            self.fail(unknown.fact, unknown.line)
        values = [read(place, self.emit) for place in results]
        if capture.loss_index is not None:
            lowered.loss = values[capture.loss_index]
            del values[capture.loss_index]
        lowered.outputs = [Output(value, path) for value, path in zip(values, capture.output_paths, strict=True)]
        self._note_updates()
        fold_experts(self.lowered)
        fold_causal_masks(self.lowered)
        if self.outputs == "loss":
            only_loss(self.lowered)
        drop_dead(self.lowered)

    # -- parameters, buffers, inputs, constants ------------------------------------------------------------------

    def _add_states(self) -> None:
        for state in self.capture.states:
            name, fake = state.names[0], state.stand_in
            trainable = bool(fake.requires_grad)
            self._add_value(name, fake, "parameter" if state.is_parameter else "buffer", trainable)
            if state.is_parameter:
                master = self.precision.master(state.dtype) if trainable else None
                self.lowered.parameters.append(Parameter(name, state.names, trainable, master))
            else:
                self.lowered.buffers.append(Buffer(name, state.names, state.persistent))
            place = Place(name, memory_of(fake))
            self._state_places.update(dict.fromkeys(state.names, place))

    def _placeholder(self, node: torch.fx.Node) -> Place:
        kind, target = self.capture.placeholders[node.name]
        if kind in ("PARAMETER", "BUFFER"):
            place = self._state_places[self.capture.rename(target)]
            place.memory = memory_of(node.meta["val"])
            return place
        if kind == "CONSTANT_TENSOR":
            return self._constant(self.capture.constants[target], memory_of(node.meta["val"]))
        if kind != "USER_INPUT":
            self.fail(f"uses {target or node.name}, a {kind.lower().replace('_', ' ')}, which autopar cannot trace")
        path = next(self.input_paths)
        value = path if path not in self.lowered.values else f"input.{path}"
        self._add_value(value, node.meta["val"], "input", False)
        self.lowered.inputs.append((value, path))
        return Place(value, memory_of(node.meta["val"]))

    def _constant(self, tensor: torch.Tensor, memory: int) -> Place:
        """A tensor written in the model's code; equal small ones are one constant, so that repeated blocks are alike."""
        if tensor.is_meta or not (type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)):
            self.fail(f"uses a tensor of shape {list(tensor.shape)} without data; register a buffer, and use no .data")
        numbers = tuple(tensor.flatten().tolist()) if tensor.numel() <= MAX_CONSTANT_NUMBERS else ()
        key = (tensor.dtype, tuple(tensor.shape), repr(numbers) if numbers else id(tensor))
        if key not in self._constants:
            value = self._constants[key] = f"constant_{len(self.lowered.constants)}"
            self._add_value(value, tensor, "constant", False)
            self.fakes[value] = self.capture.fake_mode.from_tensor(tensor, static_shapes=True)
            self.lowered.constants.append(Constant(value, numbers))
            self.lowered.tensors[value] = tensor.detach().clone()
        return Place(self._constants[key], memory)

    def _note_updates(self) -> None:
        for index, buffer in enumerate(self.lowered.buffers):
            value = read(self._state_places[buffer.value], self.emit)
            if value != buffer.value:
                self.lowered.buffers[index] = replace(buffer, updated=value)
        for parameter in self.lowered.parameters:
            if self._state_places[parameter.value].value != parameter.value:
                self.fail(f"writes into the parameter {parameter.name} in its forward; make it a buffer")

    # -- the walk ------------------------------------------------------------------------------------------------

    def run_graph(self, module: torch.fx.GraphModule, arguments: list[Any] | None) -> list[Any]:
        env: _Env = {}
        given = iter(arguments or [])
        for node in module.graph.nodes:
            self.node = node if node.op == "call_function" else next(iter(node.users), None)
            if node.op == "placeholder":
                env[node] = self._placeholder(node) if arguments is None else next(given)
            elif node.op == "get_attr":
                env[node] = self._attribute(module, node)
            elif node.op == "output":
                return [env[item] for item in pytree.tree_leaves(node.args[0]) if isinstance(item, torch.fx.Node)]
            else:
                env[node] = self._call(node, env)
        raise AssertionError("an fx graph has an output")

    def _attribute(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
        owner: Any = module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.Tensor):
            return self._constant(owner, memory_of(owner))
        return owner

    def _call(self, node: torch.fx.Node, env: _Env) -> Any:
        target: Any = node.target
        if isinstance(target, HigherOrderOperator):
            return region(self, node, target, env)
        unknown = next((env[item] for item in node.all_input_nodes if isinstance(env[item], Unknown)), None)
        if unknown is not None:
            return self._of_unknown(node, target, env, unknown)
        if target is operator.getitem:
            source, index = node.args
            return env[source][index]  # type: ignore[index]
        if not isinstance(target, OpOverload):
            self.fail(not_an_operator(target))
        name = target._schema.name.split("::")[1]
        if name in ASSERTIONS:
            return None
        if name in SHAPED_BY_STRIDES:
            self.fail(f"uses {name}, which depends on how a tensor lies in memory; use unfold, slices or a transpose")
        if (unknown := unknown_result(self, node, target, env, self._line())) is not None:
            return unknown
        if name in RESHAPE_IN_PLACE:
            return self._reshape_in_place(node, target, env)
        if target._schema.is_mutable:
            return self._write_in_place(node, target, env)
        if (same := self._identity(node, name, env)) is not None:
            return same
        if name == "broadcast_tensors":
            return self._broadcast(node, env)
        if name == "batch_norm" and argument_of(node, target, "training") and argument_of(node, target, "running_mean"):
            return self._batch_norm(node, target, env)
        if name == "instance_norm" and argument_of(node, target, "running_mean") is not None:
            self.fail("keeps running statistics in instance norm; use track_running_stats=False")
        if name == "scaled_dot_product_attention" and argument_of(node, target, "dropout_p"):
            _, args, kwargs = self._spelled(node, target, env)
            return Place(dropped_attention(self, args, kwargs), memory_of(node.meta["val"]))
        return self._plain(node, target, env)

    def _of_unknown(self, node: torch.fx.Node, target: Any, env: _Env, unknown: Unknown) -> Any:
        """What an operator makes of a tensor whose shape is not known."""
        if isinstance(target, OpOverload) and target._schema.is_mutable:
            place: Place = env[node.args[0]]  # type: ignore[index]
            self._write(place, put_back(self, node, env, unknown) or self.fail(unknown.fact, unknown.line))
            return place
        found = carried(self, node, env, unknown)
        return found if isinstance(found, Unknown) else Place(found, memory_of(node.meta["val"]))

    def _identity(self, node: torch.fx.Node, name: str, env: _Env) -> Any:
        """The place of an operator that only hands on its first argument, or None if it does more."""
        source = env.get(node.args[0]) if node.args and isinstance(node.args[0], torch.fx.Node) else None
        if not isinstance(source, Place):
            return None
        before, after = self.fakes[source.value], node.meta["val"]
        if name in SAME_TENSOR or (name in DROPOUTS and is_idle_dropout(node)):
            self._aliases[memory_of(after)] = source.root.memory  # torch hands the tensor on, its stand-in is another
            return source
        if name == "lift_fresh_copy":
            return Place(read(source, self.emit), memory_of(after))
        if name == "detach" and not self._wants_gradient(source):
            return source
        if name in CONVERSIONS and before.dtype == after.dtype and same_layout(before, after):
            shared = self._aliases.get(memory_of(after), memory_of(after)) == source.root.memory
            return source if shared else Place(read(source, self.emit), memory_of(after))
        if name in CONVERSIONS and before.dtype != after.dtype:
            value = self.value_of(source)
            output = self.emit("aten.to.dtype", (Ref(value), TorchName(str(after.dtype))), {})[0]
            return Place(output, memory_of(after))
        if name == "clone" and same_layout(before, after):
            return Place(read(source, self.emit), memory_of(after))
        return None

    def _wants_gradient(self, place: Place) -> bool:
        return self.grad_enabled and self.lowered.values[read(place, self.emit)].requires_grad

    # -- operators -----------------------------------------------------------------------------------------------

    def _plain(self, node: torch.fx.Node, target: OpOverload, env: _Env) -> Any:
        return self._recorded(node, env, *self._spelled(node, target, env))

    def _recorded(
        self, node: torch.fx.Node, env: _Env, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The places of what the node computes."""
        result = node.meta.get("val")
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        ids = self.record(name, args, kwargs, outputs, isinstance(result, (tuple, list)))
        views = (View(name, args[1:], kwargs, index) for index in range(len(outputs)))
        places = [
            self._place(node, env, view, value, fake) for view, value, fake in zip(views, ids, outputs, strict=True)
        ]
        return tuple(places) if isinstance(result, (tuple, list)) else places[0]

    def _spelled(
        self, node: torch.fx.Node, target: OpOverload, env: _Env
    ) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """An operator's name and arguments, without a tensor of which only the shape is read."""
        args, kwargs = self.arguments(node, env)
        if self.autocast is not None:
            args, kwargs = self._casting.applied(target, args, kwargs, self.autocast)
        dtypes = {self.fakes[ref.value].dtype for ref in refs(args)}
        return without_lender(str(target), args, kwargs, node.meta.get("val"), len(dtypes) > 1)

    def _place(self, node: torch.fx.Node, env: _Env, view: View, value: str, fake: Any) -> Place | None:
        if not isinstance(fake, torch.Tensor):
            return None
        memory = self._aliases.get(memory_of(fake), memory_of(fake))
        for position, item in enumerate(node.all_input_nodes):
            source = env.get(item)
            if isinstance(source, Place) and source.root.memory == memory:
                first = position == 0 and node.args and node.args[0] is item
                base = self.lowered.values[source.value]
                self.lowered.values[value] = replace(self.lowered.values[value], storage=base.storage)
                return Place(value, memory, source, view if first else View("autopar.opaque", (), {}))
        return Place(value, memory)

    def _broadcast(self, node: torch.fx.Node, env: _Env) -> tuple[Place, ...]:
        """Each tensor widened on its own, so that it has the gradient of its own result only."""
        places = []
        for item, fake in zip(pytree.tree_leaves(node.args[0]), node.meta["val"], strict=True):
            shape = tuple(fake.shape)
            value = self.emit("aten.expand.default", (Ref(self.value_of(env[item])), shape), {})[0]
            places.append(Place(value, memory_of(fake), env[item], View("aten.expand.default", (shape,), {})))
        return tuple(places)

    def _batch_norm(self, node: torch.fx.Node, target: OpOverload, env: _Env) -> Place:
        """Training batch norm, whose two further outputs are the new running mean and variance."""
        args, kwargs = self.arguments(node, env)
        statistics = [env[argument_of(node, target, name)] for name in ("running_mean", "running_var")]
        fakes = [node.meta["val"], *(self.fakes[place.value] for place in statistics)]
        ids = self.record(str(target), args, kwargs, fakes, True)
        for place, value in zip(statistics, ids[1:], strict=True):
            self._write(place, value)
        return Place(ids[0], memory_of(node.meta["val"]))

    def _write_in_place(self, node: torch.fx.Node, target: OpOverload, env: _Env) -> Any:
        """Replace an in-place operator by its functional form, and let what shares the memory see the result."""
        name = target._schema.name.split("::")[1]
        if not writes_into_first(target):
            self.fail(f"uses {target}, an in-place or out= form that autopar cannot express; use the plain form")
        place = env[node.args[0]]  # type: ignore[index]
        if name == "detach_":
            if self._wants_gradient(place):
                self._write(place, self.emit("aten.detach.default", (Ref(read(place, self.emit)),), {})[0])
            return place
        if name[:-1] in DROPOUTS and is_idle_dropout(node):
            return place
        if not self.grad_enabled and self.lowered.values[read(place, self.emit)].requires_grad:
            self.fail(f"writes in place ({target}) without gradient into a tensor that has one; compute a new tensor")
        args, kwargs = self.arguments(node, env)
        before = self.fakes[args[0].value]
        value = args[1].value if name == "copy_" else self._functional(target, args, kwargs)
        if self.fakes[value].dtype != before.dtype:
            value = self.emit("aten.to.dtype", (Ref(value), TorchName(str(before.dtype))), {})[0]
        if self.fakes[value].shape != before.shape:
            value = self.emit("aten.expand.default", (Ref(value), tuple(before.shape)), {})[0]
        self._write(place, value)
        return place

    def _reshape_in_place(self, node: torch.fx.Node, target: OpOverload, env: _Env) -> Any:
        """``x.unsqueeze_(0)``: from here on the tensor is the view that the plain form would make of it."""
        functional = functional_form(target) or self.fail(f"uses {target}, which has no plain form")
        place = self._recorded(node, env, functional, *self.arguments(node, env))
        env[node.args[0]] = place  # type: ignore[index]
        return place

    def _functional(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if target._schema.name == "aten::fill_":
            return args[1].value if isinstance(args[1], Ref) else self.emit("aten.full_like.default", args, {})[0]
        no_form = f"uses {target}, which has no form that leaves its input alone; compute a new tensor instead"
        return self.emit(functional_form(target) or self.fail(no_form), args, kwargs)[0]

    def _write(self, place: Place, value: str) -> None:
        try:
            write(place, value, self.emit, lambda key: self.lowered.values[key].shape)
        except TraceError as error:
            self.fail(str(error))

    def emit(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Record an operator that the program does not have as such; its outputs are found by running it on fakes."""
        with self.capture.fake_mode, torch.no_grad():
            result = resolve_target(target)(*self.to_torch(args), **self.to_torch(kwargs))
        several = isinstance(result, (tuple, list))
        outputs = list(result) if several else [result]
        ids = self.record(target, args, kwargs, outputs, several)
        for value, fake in zip(ids, outputs, strict=True):
            for ref in refs(args):
                if memory_of(self.fakes[ref.value]) == memory_of(fake):
                    storage = self.lowered.values[ref.value].storage
                    self.lowered.values[value] = replace(self.lowered.values[value], storage=storage)
        return ids

    def record(self, target: str, args: Any, kwargs: dict[str, Any], outputs: list[Any], several: bool) -> list[str]:
        mixed = types_that_do_not_meet(target, [self.fakes[ref.value] for ref in refs((args, tuple(kwargs.values())))])
        if mixed:
            self.fail(
                f"gives {target} tensors of types {' and '.join(mixed)}, which it refuses; cast one to the other's type"
            )
        path, module_class, nest = self._module()
        name = target.split(".")[1].strip("_")
        count = self._counters[path, name]
        self._counters[path, name] += 1
        key = f"{path}:{name}" + (f"_{count}" if count else "")
        tensors = [isinstance(output, torch.Tensor) for output in outputs]
        ids = [(f"{key}#{i}" if several else key) if is_tensor else "" for i, is_tensor in enumerate(tensors)]
        gradients = self._gradients.needed(target, args, kwargs, outputs)
        for value, fake, gradient in zip(ids, outputs, gradients, strict=True):
            if value:
                self._add_value(value, fake, "computed", gradient)
        record = Operator(key, target, args, tuple(kwargs.items()), tuple(ids), path, module_class, self._line())
        self.lowered.operators.append(record)
        self.lowered.nests[key] = nest
        return ids

    def _add_value(self, value: str, fake: torch.Tensor, kind: ValueKind, requires_grad: bool) -> None:
        if not all(type(size) is int for size in fake.shape):
            self.fail(f"makes a tensor whose shape {list(fake.shape)} depends on the values of another")
        dtype = dtype_name(fake.dtype)
        self.lowered.values[value] = Value(value, tuple(fake.shape), dtype, requires_grad, kind, value)
        self.fakes[value] = fake

    # -- arguments -----------------------------------------------------------------------------------------------

    def arguments(self, node: torch.fx.Node, env: _Env) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(self._argument(item, env) for item in node.args)
        kwargs = {
            name: self._argument(item, env)
            for name, item in node.kwargs.items()
            if not (name == "pin_memory" and not item) and not (name == "layout" and item is torch.strided)
        }
        return args, kwargs

    def _argument(self, item: Any, env: _Env) -> Any:
        if isinstance(item, torch.fx.Node):
            found = env[item]
            if isinstance(found, Unknown):
                self.fail(found.fact, found.line)
            if not isinstance(found, Place):
                self.fail(f"passes {item} on as a number, which depends on the values of a tensor")
            return Ref(self.value_of(found))
        if isinstance(item, (tuple, list)):
            return tuple(self._argument(part, env) for part in item)
        if isinstance(item, (torch.dtype, torch.layout, torch.memory_format)):
            return TorchName(str(item))
        if isinstance(item, torch.device):
            return DeviceArgument()
        if item is None or isinstance(item, (bool, int, float, str, complex)):
            return item
        self.fail(f"calls an operator with {item!r}, which autopar cannot write down")

    def value_of(self, place: Place) -> str:
        """The value to read; without gradient enabled, a detached one."""
        value = read(place, self.emit)
        if self.grad_enabled or not self.lowered.values[value].requires_grad:
            return value
        if value not in self._detached:
            self._detached[value] = self.emit("aten.detach.default", (Ref(value),), {})[0]
        return self._detached[value]

    def to_torch(self, tree: Any, gradient: bool = False) -> Any:
        if isinstance(tree, Ref):
            fake = self.fakes[tree.value].detach()
            return fake.requires_grad_() if gradient and self.lowered.values[tree.value].requires_grad else fake
        if isinstance(tree, TorchName):
            return getattr(torch, tree.name.removeprefix("torch."))
        if isinstance(tree, DeviceArgument):
            return torch.device(self.device_type())
        if isinstance(tree, dict):
            return {key: self.to_torch(item, gradient) for key, item in tree.items()}
        if isinstance(tree, tuple):
            return tuple(self.to_torch(item, gradient) for item in tree)
        return tree

    # -- where we are --------------------------------------------------------------------------------------------

    def _module(self) -> tuple[str, str, tuple[str, ...]]:
        stack = self.node.meta.get("nn_module_stack") if self.node is not None else None
        entries = tuple((str(path), name) for path, name in (stack or {}).values())
        path, module_class, nest = read_module_stack(entries)
        return self.capture.rename(path), module_class, tuple(self.capture.rename(block) for block in nest)

    def device_type(self) -> str:
        return next((str(state.stand_in.device.type) for state in self.capture.states), "cpu")

    def _line(self) -> str:
        return line_of_trace((self.node.stack_trace if self.node is not None else None) or "")

    def fail(self, what: str, line: str = "") -> NoReturn:
        where = line or self._line() or "some point"
        raise TraceError(f"the model cannot be traced: at {where} it {what}")

"""What the lowering must know of torch's operators by name: which do nothing here, which write, and their plain forms.

Enters: operators and nodes of torch's training IR. Leaves: names, overloads, arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

ASSERTIONS = frozenset(
    "_assert_tensor_metadata _assert_scalar _assert_async _functional_assert_async _functional_assert_scalar "
    "sym_constrain_range sym_constrain_range_for_size _functional_sym_constrain_range".split()
)
SHAPED_BY_VALUES = frozenset("_local_scalar_dense item nonzero masked_select unique_consecutive _unique2".split())
SHAPED_BY_STRIDES = frozenset("as_strided as_strided_copy as_strided_scatter".split())
SAME_TENSOR = frozenset(("alias", "lift_fresh"))
CONVERSIONS = frozenset(("to", "_to_copy", "type_as"))
SHAPED_LIKE = {  # the plain form, and which argument is read: the other one only lends its shape
    "aten.expand_as.default": ("aten.expand.default", 0),
    "aten.view_as.default": ("aten.view.default", 0),
    "aten.reshape_as.default": ("aten.reshape.default", 0),
    "aten.fill.Tensor": ("aten.expand.default", 1),
}
DROPOUTS = frozenset(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))
RESHAPE_IN_PLACE = frozenset("squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_".split())
CHANGE_SHAPE_IN_PLACE = frozenset("resize_ resize_as_ set_ as_strided_ rename_".split())

_FUNCTIONAL_NAMES = {
    "zero_": "zeros_like", "normal_": "normal_functional", "__iand__": "bitwise_and",
    "__ior__": "bitwise_or", "__ixor__": "bitwise_xor", "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}  # fmt: skip


_PRODUCTS = frozenset(
    "linear addmm mm bmm baddbmm matmul mv dot conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d "
    "conv_transpose3d".split()
)
_NORMS = frozenset("layer_norm group_norm".split())


def types_that_do_not_meet(target: str, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Floating-point types of an operator's tensors that only tensors without data let it mix; empty where it may."""
    name = target.split(".")[1]
    types = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    if not (name in _PRODUCTS or name in _NORMS) or len(set(types)) < 2:
        return ()
    narrow = types[0] in (torch.bfloat16, torch.float16)
    if name in _NORMS and narrow and set(types[1:]) == {torch.float32}:
        return ()
    return tuple(dict.fromkeys(map(dtype_name, types)))


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def functional_form(target: OpOverload) -> str | None:
    """The operator that computes what an in-place one writes: ``aten.add_.Tensor`` -> ``aten.add.Tensor``."""
    namespace, name = target._schema.name.split("::")
    overload = target._overloadname or "default"
    overload = {"bernoulli_.float": "p", "transpose_.default": "int"}.get(f"{name}.{overload}", overload)
    name = _FUNCTIONAL_NAMES.get(name, name.removesuffix("_"))
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = packet is not None and overload in packet.overloads()
    return f"{namespace}.{name}.{overload}" if found else None


def without_lender(
    target: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, mixed: bool
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """An operator without the tensor that only lends its shape: no gradient reaches that one, and its layout does not matter.

    ``mixed``: its tensors have several dtypes; what fills a tensor takes that one's, so that both stay.
    """
    if target == "aten.fill.Scalar":
        return "aten.full_like.default", args, {}
    if target not in SHAPED_LIKE or (mixed and target == "aten.fill.Tensor"):
        return target, args, kwargs
    plain, position = SHAPED_LIKE[target]
    return plain, (args[position], tuple(result.shape)), {}


def writes_into_first(target: OpOverload) -> bool:
    """Whether an in-place operator writes into its first argument, nothing else, and leaves its shape."""
    schema = target._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return written == [schema.arguments[0].name] and schema.name.split("::")[1] not in CHANGE_SHAPE_IN_PLACE


def resolve_target(target: str) -> Any:
    """``aten.linear.default`` -> the operator overload."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def region_name(target: HigherOrderOperator) -> str:
    """What a higher-order operator does with its body: ``wrap_with_set_grad_enabled`` and the like."""
    return str(target.name())


def not_an_operator(target: Any) -> str:
    """What a call of a Python function in a trace says of the model."""
    if "functorch" in getattr(target, "__module__", ""):
        return "uses torch.vmap, which autopar cannot write down; write it with broadcasting"
    return f"computes with {target} on a size that depends on the values of a tensor"


def same_layout(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether two tensors lie in memory alike."""
    return before.shape == after.shape and before.stride() == after.stride()


def argument_of(node: torch.fx.Node, target: OpOverload, name: str) -> Any:
    """The argument of this name as the node gives it, or its default, or None where the operator has none."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def is_idle_dropout(node: torch.fx.Node) -> bool:
    """Whether a dropout(input, p, train) does nothing."""
    rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
    return not train or bool(rate == 0)

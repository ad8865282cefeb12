"""Names of variables and attributes: from the model's module paths, and from what an operator does.

A value that leaves its module carries the module's name (``c_attn``); what attention reads is ``q``, ``k``, ``v``, ``mask``;
what happens to a value on the way keeps its name; the rest is named for the operator.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

from autopar.graph import Operator, OpGraph

VIEWS = frozenset(
    "view reshape _unsafe_view transpose permute unsqueeze squeeze expand expand_as contiguous t flatten unflatten slice "
    "select detach alias to _to_copy type_as clone movedim swapaxes narrow view_as reshape_as mT numpy_T".split()
)
IN_PLACE_OF = frozenset(
    "add sub mul div neg pow relu gelu silu sigmoid tanh dropout softmax _softmax masked_fill clamp exp where rsub".split()
)
_KINDS = {
    "sum": "total", "max": "largest", "min": "smallest", "pow": "power", "abs": "magnitude", "all": "every", "any": "some",
    "scaled_dot_product_attention": "attention", "cross_entropy_loss": "loss", "full": "filled", "full_like": "filled",
    "eq": "mask", "ne": "mask", "lt": "mask", "le": "mask", "gt": "mask", "ge": "mask", "logical_and": "mask",
    "logical_or": "mask", "logical_not": "mask", "bitwise_and": "mask", "bitwise_or": "mask", "bitwise_not": "mask",
    "arange": "positions",
    "linear": "projected", "addmm": "projected", "matmul": "product", "bmm": "product", "mm": "product", "add": "total",
    "mul": "scaled", "sub": "difference", "div": "quotient", "cat": "joined", "stack": "stacked", "slice": "part",
    "select": "part", "split": "parts", "chunk": "parts", "embedding": "embedded", "layer_norm": "normed", "pad": "padded",
    "zeros": "zeros", "ones": "ones", "new_zeros": "zeros", "zeros_like": "zeros", "ones_like": "ones", "view": "h",
    "transpose": "turned", "permute": "turned", "reshape": "h", "expand": "spread", "unsqueeze": "h", "to": "cast",
    "masked_fill": "filled", "einsum": "product", "where": "chosen", "index": "picked", "gather": "picked", "t": "turned",
    "contiguous": "h", "neg": "negated", "clone": "copy", "detach": "detached",
}  # fmt: skip
_OUTPUTS = {
    "max": ("largest", "indices"), "min": ("smallest", "indices"), "topk": ("largest", "indices"),
    "sort": ("ordered", "indices"), "batch_norm": ("normed", "new_mean", "new_var"),
}  # fmt: skip
_ATTENTION = {0: "q", 1: "k", 2: "v", 3: "mask"}
_MODULE_ATTRIBUTES = frozenset(
    "add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval extra_repr float "
    "forward get_buffer get_parameter get_submodule half ipu load_state_dict modules mtia named_buffers named_children "
    "named_modules named_parameters parameters register_buffer register_module register_parameter requires_grad_ "
    "set_submodule share_memory state_dict to to_empty train training type xpu zero_grad".split()
)
GLOBALS = frozenset(
    "torch F nn mesh self path block INPUTS OUTPUTS BATCH BATCH_MULTIPLE STAGES FINGERPRINT SCHEDULE MICRO_BATCHES "
    "GLOBAL_BATCH MICRO_BATCH_UNIT COUNTS DRAWS_ALIKE".split()
)


def identifier(text: str) -> str:
    """A text as a Python name: other characters become underscores; never a keyword or a builtin."""
    name = re.sub(r"\W+", "_", text).strip("_") or "x"
    name = f"_{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) or hasattr(builtins, name) else name


def unique(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name_2``, ``name_3`` ... if that is taken."""
    used = taken if isinstance(taken, (set, frozenset, dict)) else set(taken)
    if name not in used:
        return name
    number = 2
    while f"{name}_{number}" in used:
        number += 1
    return f"{name}_{number}"


def attribute(path: str, taken: Iterable[str]) -> str:
    """An attribute's name from a module path: ``attn.c_attn.weight`` -> ``attn_c_attn_weight``."""
    name = identifier(path)
    return unique(f"{name}_" if name in _MODULE_ATTRIBUTES else name, taken)


def kind_name(operator: Operator, index: int = 0) -> str:
    """A name for what an operator makes, or for one of the tensors that it makes."""
    kind = operator.target.split(".")[1]
    if len(operator.outputs) > 1:
        names = _OUTPUTS.get(kind, ())
        if index < len(names):
            return names[index]
    name = identifier(_KINDS.get(kind, kind.strip("_")))
    return f"{name}_{index}" if len(operator.outputs) > 1 else name


def is_elementwise(operator: Operator) -> bool:
    """Whether an operator is arithmetic, which reads well inside a longer expression."""
    kind = operator.target.split(".")[1]
    return kind in IN_PLACE_OF or kind in ("mean", "rsqrt", "sqrt", "reciprocal", "log", "abs", "neg", "cos", "sin")


class ValueNames:
    """Base names of values, before they are made unique within a function."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self._paths = {output.value: output.path for output in graph.outputs}
        self._updates = {buffer.updated for buffer in graph.buffers}
        self._made_in: dict[str, list[str]] = {}
        for operator in graph.operators:
            kept = [value for value in operator.outputs if value and value not in self._updates]
            self._made_in.setdefault(operator.module, []).extend(kept)

    def base(self, value: str, modules: dict[str, str], scope: str) -> str | None:
        """The name that a value has by its place; None when it is only a step on the way.

        ``modules`` are the short names of the modules in the function, ``scope`` the path of the function's own module.
        """
        if value == self.graph.loss:
            return "loss"
        if value in self._paths and self._paths[value] not in ("output", ""):
            return identifier(re.split(r"[.\[]", self._paths[value])[-1].strip("\"'] ") or "output")
        role = self._role(value)
        if role:
            return role
        operator = self.graph.producer_of.get(value)
        if operator is None or value in self._updates or operator.module == scope or operator.module not in modules:
            return None
        several = sum(self._leaves(other) for other in self._made_in.get(operator.module, ())) > 1
        return modules[operator.module] if self._leaves(value) and not several else None

    def _leaves(self, value: str) -> bool:
        """Whether a value is read outside the module that makes it, or nowhere."""
        module = self.graph.producer_of[value].module
        readers = self.graph.readers_of.get(value, ())
        outside = (self.graph.operator_of[reader].module for reader, _ in readers)
        return not readers or any(other != module and not other.startswith(f"{module}.") for other in outside)

    def _role(self, value: str) -> str | None:
        for _ in range(8):
            readers = self.graph.readers_of.get(value, ())
            for reader, index in readers:
                if "scaled_dot_product" in self.graph.operator_of[reader].target:
                    return _ATTENTION.get(index)
            views = [reader for reader, index in readers if index == 0 and is_view(self.graph.operator_of[reader])]
            if len(readers) != 1 or not views:
                return None
            value = self.graph.operator_of[views[0]].outputs[0]
        return None


def is_view(operator: Operator) -> bool:
    """Whether an operator only looks at its first input in another way (or copies it)."""
    return operator.target.split(".")[1] in VIEWS and len(operator.outputs) == 1


def module_names(operators: Iterable[Operator], scope: str) -> dict[str, str]:
    """Short names of the modules that a function's operators are in: the last part of the path, two if that is not enough."""
    prefix = f"{scope}." if scope else ""
    inside = {op.module for op in operators if op.module.startswith(prefix) and op.module != scope}
    paths = {path: path[len(prefix) :].split(".") for path in sorted(inside)}
    found = {}
    for path, parts in paths.items():
        names = [at for at, part in enumerate(parts) if not part.isdigit()]
        last = parts[names[-1] if names else 0 :]
        two = parts[names[-2] if len(names) > 1 else 0 :]
        alike = [other for other in paths.values() if other[-len(last) :] == last]
        alike_two = [other for other in paths.values() if other[-len(two) :] == two]
        found[path] = identifier("_".join(two if len(alike) > 1 and len(alike_two) == 1 else last))
    return found

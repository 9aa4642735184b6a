"""Writes the Python function that a tuned call goes through.

A generated function has the parameters of the method it stands for, takes the call apart as the signature says it is
built, and hands the leaves to the executable: no binding, no flattening, no loop at call time. What a call costs is a
type check per container and one check of all tensors in C++ (torch's `TensorGuards`, memoised by the sizes of the
signature's symbols), with a check in Python for what that one doesn't know.
"""

from __future__ import annotations

import inspect
import itertools
import keyword
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as torch_pytree

from ..backends.base import Executable
from ..capture.calls import CallForm, is_default
from ..capture.structure import _contexts, constructor, resolve_type, value_from_text, value_text
from ..errors import Refused
from ..schema import Leaf, Node, OpaqueLeaf, Signature, TensorLeaf, ValueLeaf

Parameter = inspect.Parameter

FILENAME = "<aitune_lab dispatch>"
"""Where generated code says that it stands."""


class _Unset:
    def __repr__(self) -> str:
        return "<not given>"


UNSET = _Unset()
"""Default of every optional parameter of a generated function, so that a miss can pass on what the caller passed."""


def keywords_given(pairs: Sequence[tuple[str, Any]], extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments without those the caller didn't give."""
    given = {name: value for name, value in pairs if value is not UNSET}
    return {**given, **extra} if extra else given


def stars(parameter: Parameter) -> str:
    """The stars before a parameter in a definition."""
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return "*"
    return "**" if parameter.kind is Parameter.VAR_KEYWORD else ""


class FunctionWriter:
    """Source and namespace of one generated function.

    Names of ours start with a prefix that no parameter of the method has, so they can't collide.
    """

    def __init__(self, form: CallForm) -> None:
        self.form = form
        self.names = [p.name for p in form.parameters]
        self.prefix = next(
            p for p in (f"_a{i}_" for i in itertools.count()) if not any(n.startswith(p) for n in self.names)
        )
        self.namespace: dict[str, Any] = {}
        self.lines: list[str] = []
        self.tensors: list[str] = []
        self._count = itertools.count()
        # A parameter may be called `type` or `len`.
        self.type, self.len = self.name(type), self.name(len)
        for name in self.names:
            if keyword.iskeyword(name) or not name.isidentifier():
                raise Refused(f"parameter {name!r} cannot be named in Python source")

    def name(self, value: Any = UNSET) -> str:
        """A fresh name; with a value it is bound in the namespace."""
        made = f"{self.prefix}{next(self._count)}"
        if value is not UNSET:
            self.namespace[made] = value
        return made

    def parameters(self) -> str:
        """The parameter list: as the method's own, with `UNSET` for every default."""
        unset = self.name(UNSET)
        self.namespace[unset] = UNSET
        parts: list[str] = []
        seen_star = False
        parameters = self.form.parameters
        for i, p in enumerate(parameters):
            if p.kind is Parameter.KEYWORD_ONLY and not seen_star:
                parts.append("*")
                seen_star = True
            default = f"={unset}" if p.default is not Parameter.empty else ""
            star = stars(p)
            seen_star = seen_star or p.kind is Parameter.VAR_POSITIONAL
            parts.append(f"{star}{p.name}{default}")
            last = i + 1 == len(parameters) or parameters[i + 1].kind is not Parameter.POSITIONAL_ONLY
            if p.kind is Parameter.POSITIONAL_ONLY and last:
                parts.append("/")
        return ", ".join(parts)

    def forwarded(self) -> str:
        """The argument list that passes on what the caller passed: defaults by keyword, those not given left out."""
        positional, optional, extra, starred = [], [], "", ""
        has_star = any(p.kind is Parameter.VAR_POSITIONAL for p in self.form.parameters)
        for p in self.form.parameters:
            if p.kind is Parameter.VAR_POSITIONAL:
                starred = f"*{p.name}"
            elif p.kind is Parameter.VAR_KEYWORD:
                extra = f", {p.name}"
            elif p.default is Parameter.empty and p.kind is not Parameter.KEYWORD_ONLY:
                positional.append(p.name)
            else:
                optional.append(p)
        by_position = [p for p in optional if p.kind is Parameter.POSITIONAL_ONLY]
        if has_star:
            by_position = [p for p in optional if p.kind is not Parameter.KEYWORD_ONLY]
        by_keyword = [p for p in optional if p not in by_position]
        parts = [*positional]
        if by_position:
            given = self.name(_positionals_given)
            pairs = "".join(f"({p.name}, {self.name(p.default)}), " for p in by_position)
            parts.append(f"*{given}(({pairs}), {starred[1:] or '()'})")
        elif starred:
            parts.append(starred)
        if by_keyword or extra:
            pairs = "".join(f"({p.name!r}, {p.name}), " for p in by_keyword)
            parts.append(f"**{self.name(keywords_given)}(({pairs}){extra})")
        return ", ".join(parts)

    def take_apart(self, signature: Signature, miss: str | None) -> None:
        """Lines that bind every leaf; with `miss` they check structure and values and run it where the call differs."""
        leaves = iter(signature.leaves)
        inputs = dict(zip(signature.inputs.keys, signature.inputs.children, strict=True))
        for p in self.form.parameters:
            key = stars(p) + p.name
            if key in inputs:
                self._emit(p.name, inputs[key], leaves, miss)
            elif miss is not None and p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                self.lines.append(f"if {p.name}: {miss}")
            elif miss is not None and p.default is not Parameter.empty:
                unset, default, same = self.name(), self.name(p.default), self.name(is_default)
                self.namespace[unset] = UNSET
                self.lines.append(f"if {p.name} is not {unset} and not {same}({p.name}, {default}): {miss}")

    def _emit(self, expression: str, node: Node, leaves: Any, miss: str | None) -> None:
        if node.kind == "leaf":
            self._emit_leaf(expression, next(leaves), miss)
            return
        held = self.name()
        self.lines.append(f"{held} = {expression}")
        cls = {"tuple": tuple, "list": list}.get(node.kind) or resolve_type(node.type)
        if cls is None:
            raise Refused(f"class {node.type} of the call's structure is not imported here")
        if miss is not None:
            size = self._size(held, node)
            self.lines.append(f"if {self.type}({held}) is not {self.name(cls)}{size}: {miss}")
        if node.kind == "pytree":
            flatten = self.name(torch_pytree.SUPPORTED_NODES[cls].flatten_fn)
            context = self.name()
            self.lines.append(f"{held}, {context} = {flatten}({held})")
            if miss is not None:
                expected = self.name(_contexts[cls][int(node.keys[0] or 0)])
                self.lines.append(f"if {self.len}({held}) != {len(node.children)} or {context} != {expected}: {miss}")
        if node.kind == "mapping":
            self.lines.append(f"{held} = {held}.data")
            if miss is not None:
                self.lines.append(f"if {self.name(tuple)}({held}) != {tuple(node.keys)!r}: {miss}")
        for i, child in enumerate(node.children):
            if node.kind in ("dict", "mapping"):
                step = f"{held}[{node.keys[i]!r}]"
            elif node.kind == "dataclass":
                step = f"{held}.{node.keys[i]}"
            else:
                step = f"{held}[{i}]"
            self._emit(step, child, leaves, miss)

    def _size(self, held: str, node: Node) -> str:
        if node.kind in ("tuple", "list"):
            return f" or {self.len}({held}) != {len(node.children)}"
        # The order of a dict's keys may matter to the original.
        return f" or {self.name(tuple)}({held}) != {tuple(node.keys)!r}" if node.kind == "dict" else ""

    def check_identity(self, signature: Signature, miss: str) -> None:
        """Lines that run `miss` where inputs are one object, or not, other than they were when recorded."""
        twins = {number: group[0] for group in signature.shared for number in group[1:]}
        tests = [f"{self.tensors[a]} is not {self.tensors[b]}" for a, b in twins.items()]
        others = [t for i, t in enumerate(self.tensors) if i not in twins]
        if len(others) == 2:
            tests.append(f"{others[0]} is {others[1]}")
        elif len(others) > 2:
            ids = ", ".join(f"{self.name(id)}({t})" for t in others)
            tests.append(f"{self.len}({{{ids}}}) != {len(others)}")
        if signature.facts.mutated and len(others) > 1:
            tests.append(f"{self.name(overlap)}(({', '.join(others)}))")
        if tests:
            self.lines.append(f"if {' or '.join(tests)}: {miss}")

    def check_contiguity(self, signature: Signature, miss: str) -> None:
        """Lines for inputs that come back as outputs: `x.contiguous()` is `x` itself only if `x` is contiguous."""
        paths = [leaf.path for leaf in signature.tensor_leaves]
        for path in dict.fromkeys(alias.input for alias in signature.facts.aliases if alias.kind == "same"):
            self.lines.append(f"if not {self.tensors[paths.index(path)]}.is_contiguous(): {miss}")

    def _emit_leaf(self, expression: str, leaf: Leaf, miss: str | None) -> None:
        if isinstance(leaf, TensorLeaf):
            held = self.name()
            self.lines.append(f"{held} = {expression}")
            if leaf.holder == "numpy":
                convert, expected = self.name(_as_tensor), self.name(np.dtype(leaf.dtype))
                self.lines.append(f"{held} = {convert}({held}, {expected})")
                if miss is not None:
                    self.lines.append(f"if {held} is None: {miss}")
            self.tensors.append(held)
            return
        if miss is None:
            return
        if isinstance(leaf, OpaqueLeaf):
            cls = resolve_type(leaf.opaque_type)
            self.lines.append(f"if {self.type}({expression}) is not {self.name(cls)}: {miss}")
            return
        self._emit_value(expression, leaf, miss)

    def _emit_value(self, expression: str, leaf: ValueLeaf, miss: str) -> None:
        if leaf.text in ("None", "True", "False") and leaf.type in ("builtins:NoneType", "builtins:bool"):
            self.lines.append(f"if {expression} is not {leaf.text}: {miss}")
            return
        cls = self.name(resolve_type(leaf.type))
        held = self.name()
        value = value_from_text(leaf.type, leaf.text) if leaf.type.startswith("builtins:") else None
        simple = isinstance(value, (int, str, bytes)) or (
            isinstance(value, float) and value != 0 and not math.isnan(value)
        )
        test = (
            f"{held} != {value!r}"
            if simple and value not in (math.inf, -math.inf)
            else f"{self.name(value_text)}({held}) != {leaf.text!r}"
        )
        self.lines.append(f"{held} = {expression}")
        self.lines.append(f"if {self.type}({held}) is not {cls} or {test}: {miss}")

    def build_outputs(self, signature: Signature, results: str) -> str:
        """Lines for in-place changes, and the expression of the module's own output structure."""
        facts = signature.facts
        inputs = dict(zip([leaf.path for leaf in signature.tensor_leaves], self.tensors, strict=True))
        same = {alias.output: alias.input for alias in facts.aliases if alias.kind == "same"}
        twins = {alias.output: alias.input for alias in facts.twins if alias.kind == "same"}
        made: dict[str, str] = {}
        count = sum(isinstance(leaf, TensorLeaf) for leaf in signature.output_leaves)
        for i, path in enumerate(facts.mutated):
            self.lines.append(f"{inputs[path]}.copy_({results}[{count + i}])")
        leaves = iter(signature.output_leaves)
        position = itertools.count()

        def expression(node: Node) -> str:
            if node.kind == "leaf":
                leaf = next(leaves)
                if isinstance(leaf, TensorLeaf):
                    index = next(position)
                    if leaf.path in same:
                        held = inputs[same[leaf.path]]
                    elif leaf.path in twins:
                        held = made[twins[leaf.path]]
                    else:
                        held = f"{results}[{index}]" + (".numpy()" if leaf.holder == "numpy" else "")
                    made[leaf.path] = held
                    return held
                if isinstance(leaf, OpaqueLeaf):
                    raise Refused(f"{leaf.path} is an object of class {leaf.opaque_type} that cannot be made anew")
                if leaf.type.startswith("builtins:") and leaf.text not in ("nan", "inf", "-inf"):
                    return leaf.text
                try:
                    return self.name(value_from_text(leaf.type, leaf.text))
                except ValueError as error:
                    raise Refused(f"{leaf.path}: {error}") from None
            children = [expression(child) for child in node.children]
            if node.kind == "tuple":
                return f"({', '.join(children)}{',' if len(children) == 1 else ''})"
            if node.kind == "list":
                return f"[{', '.join(children)}]"
            if node.kind == "dict" and node.type == "builtins:dict":
                return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(node.keys, children, strict=True)) + "}"
            cls = resolve_type(node.type)
            if cls is None:
                raise Refused(f"class {node.type} of the output is not imported here")
            return f"{self.name(constructor(node.kind, cls, node.keys))}([{', '.join(children)}])"

        return expression(signature.outputs)

    def compile(self, body: Sequence[str]) -> Callable[..., Any]:
        source = f"def call({self.parameters()}):\n" + "\n".join("  " + line for line in body) + "\n"
        exec(compile(source, FILENAME, "exec"), self.namespace)
        made: Callable[..., Any] = self.namespace["call"]
        return made


def _positionals_given(pairs: Sequence[tuple[Any, Any]], extra: tuple[Any, ...]) -> list[Any]:
    """Positional arguments with a default: those not given are left out from the end, or filled if others follow."""
    last = len(pairs) if extra else max((i + 1 for i, (value, _) in enumerate(pairs) if value is not UNSET), default=0)
    return [*(default if value is UNSET else value for value, default in pairs[:last]), *extra]


def _as_tensor(value: Any, dtype: np.dtype[Any]) -> torch.Tensor | None:
    """An array as a tensor on the same memory; None for what is no such array, or none that torch can hold."""
    if type(value) is not np.ndarray or value.dtype != dtype or any(stride < 0 for stride in value.strides):
        return None
    return torch.from_numpy(value if value.flags.writeable else value.copy())


def overlap(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether two of the tensors share memory: a write into one would be seen in the other."""
    return len({t.untyped_storage().data_ptr() for t in tensors}) < len(tensors)


def structured(executable: Executable, signature: Signature, form: CallForm) -> Callable[..., Any]:
    """The executable as a function with the method's own arguments and outputs, without any check.

    For calls that are known to fit the signature: comparing, benchmarking. Raises Refused if the output's structure
    can't be built.
    """
    if not executable.flat:
        return executable.call
    writer = FunctionWriter(form)
    writer.take_apart(signature, None)
    run, results = writer.name(executable.call), writer.name()
    writer.lines.append(f"{results} = {run}({', '.join(writer.tensors)})")
    output = writer.build_outputs(signature, results)
    return writer.compile([*writer.lines, f"return {output}"])

"""Take much of the time out of Triton's interpreter, without a change of what a kernel computes."""

from collections.abc import Callable, Set
from functools import cache
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

ALIKE = {"int32", "int64", "fp32", "fp64"}
"""Names of types that stay what they are if they meet themselves or a small integer."""


@cache  # once in a process
def speed_up_interpreter() -> None:
    """Leave out work whose result the interpreter throws away.

    A launch replaces the functions of `triton.language` and puts them back at its end. The interpreter replaces them
    again at every call of a device function in between: here it does so once a launch. It also computes for every
    integer operation whether it overflows, and drops the answer unless Triton debugs. It describes the shape of every
    number that it computes anew, where few shapes occur (`remember_shapes`). And it asks for every pair of numbers
    which type they have in common (`skip_promotion`).
    """
    replace, launch, replaced = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[Set[str]]()

    @cache
    def find_languages(function: Callable[..., Any]) -> Set[str]:
        return frozenset(own.__name__ for own in function.__globals__.values() if own is tl or own is tl.core)

    def replace_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
        languages = find_languages(function)
        if languages in replaced:
            return interpreter._LangPatchScope()
        replaced.add(languages)
        return replace(function)

    def launch_anew(*args: object, **options: object) -> None:
        replaced.clear()
        launch(*args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew
    interpreter._patch_attr = replace_function
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    remember_shapes()
    skip_promotion()


def replace_function(owner: object, name: str, function: Callable[..., Any], builder: Any, scope: Any) -> None:
    """Let `owner.name` compute with the builder; the check that it may be called outside of a kernel is left out."""
    semantic, inner = TritonSemantic(builder), getattr(function, "__wrapped__", function)

    def compute(*args: object, **named: object) -> object:
        named["_semantic"] = semantic
        return inner(*args, **named)

    scope.set_attr(owner, name, compute)


def remember_shapes() -> None:
    """Make the description of a shape once and share it among all blocks of the shape.

    Two blocks that share one need no broadcast. The table of NumPy's types is read once for each type, too.
    """
    describe, find, broadcast = tl.block_type.__init__, interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value
    shapes, types = dict[tuple[int, ...], dict[str, Any]](), dict[str, Any]()
    shared = dict[int, dict[str, Any]]()
    no_shape = (tl.core.tuple([]), tl.constexpr(1))

    def describe_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        known = shared.get(id(shape))
        if known is None:
            sizes = tuple(own.value if isinstance(own, tl.constexpr) else own for own in shape)
            if sizes not in shapes or any(type(size) is not int for size in sizes):  # (16.0,) equals (16,): refused
                describe(self, element_ty, shape)
                of_tensors = (tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(self.numel))
                shapes[sizes] = {"shape": self.shape, "numel": self.numel, "of_tensors": of_tensors, "sizes": sizes}
                shared[id(self.shape)] = shapes[sizes]
            known = shapes[sizes]
        self.__dict__ |= known
        self.element_ty = element_ty
        self.name = f"<{self.sizes}, {element_ty}>"

    def make_tensor(self: tl.tensor, handle: object, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else no_shape

    def find_once(dtype: Any) -> Any:
        own = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if own.name not in types:
            types[own.name] = find(dtype)
        return types[own.name]

    def broadcast_others(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        return (lhs, rhs) if blocks and lhs.type.shape is rhs.type.shape else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = describe_once, make_tensor, find_once
    TritonSemantic.broadcast_impl_value = broadcast_others


def skip_promotion() -> None:
    """Look for no common type of two numbers that have one, nor of a number and a small integer, which takes its type.

    Rules, as a division of pointers or integers has them, are left to Triton.
    """
    promote, equal = TritonSemantic.binary_op_type_checking_impl, tl.dtype.__eq__

    def promote_others(self: TritonSemantic, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> tuple[Any, Any]:
        if type(lhs) is tl.tensor and lhs.dtype.name in ALIKE and len(rules) < 3 and not named:
            if type(rhs) is int and -(2**31) <= rhs < 2**31:
                rhs = self.scalar_constant(rhs, lhs.dtype)
            if type(rhs) is tl.tensor and rhs.dtype is lhs.dtype:
                return self.broadcast_impl_value(lhs, rhs)
        return promote(self, lhs, rhs, *rules, **named)

    TritonSemantic.binary_op_type_checking_impl = promote_others
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)

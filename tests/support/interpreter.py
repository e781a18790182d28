"""Take a third of the time out of Triton's interpreter, without a change of what a kernel computes."""

from collections.abc import Callable, Set
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Leave out work whose result the interpreter throws away.

    A launch replaces the functions of `triton.language` and puts them back at its end. The interpreter replaces them
    again at every call of a device function in between: here it does so once a launch. It also computes for every
    integer operation whether it overflows, and drops the answer unless Triton debugs.
    """
    replace, launch, replaced = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[Set[str]]()

    def replace_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
        languages = frozenset(own.__name__ for own in function.__globals__.values() if own is tl or own is tl.core)
        if languages in replaced:
            return interpreter._LangPatchScope()
        replaced.add(languages)
        return replace(function)

    def launch_anew(*args: object, **options: object) -> None:
        replaced.clear()
        launch(*args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

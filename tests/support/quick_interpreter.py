"""Triton's interpreter, less what it does over and over: run this file once in a process that interprets kernels.

- Before each call of a device function it looks through the whole language for builtins, which the launch, or the first
  function of the same module, has replaced by then.
- It reduces by an operation that it does not know element by element, in Python; `tl.sort` reduces by exclusive or.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def main() -> None:
    modules_that_are_ready: set[int] = set()
    look_through, reduce = interpreter._patch_lang, interpreter.ReduceOps.apply_impl

    def call(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        names = function.fn.__globals__
        if id(names) not in modules_that_are_ready:
            look_through(function.fn)
            modules_that_are_ready.add(id(names))
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def reduce_fast(operation: interpreter.ReduceOps, values: Any) -> Any:
        if operation.combine_fn != tl.standard._xor_combine:
            return reduce(operation, values)
        x = np.bitwise_xor.reduce(values[0].handle.data, axis=operation.axis, keepdims=operation.keep_dims)
        return operation.to_tensor(x, values[0].dtype)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.ReduceOps.apply_impl = reduce_fast


main()

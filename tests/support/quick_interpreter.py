"""Triton's interpreter, less its faults and what it does over and over: run this once in a process that interprets.

- Before each call of a device function it looks through the whole language for builtins, which the launch, or the first
  function of the same module, has replaced by then.
- Its casts to fp8 lose carries of the mantissa and round ties away from zero: here PyTorch casts.
- It reduces by an operation that it does not know element by element, in Python; `tl.sort` reduces by exclusive or.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

DTYPES = {
    tl.float32: (torch.float32, np.float32),
    tl.float16: (torch.float16, np.float16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
"""Triton's dtypes that are cast here: PyTorch's, and the one of the interpreter's arrays."""
FP8 = (tl.float8e4nv, tl.float8e5)


def main() -> None:
    modules_that_are_ready: set[int] = set()
    look_through, reduce = interpreter._patch_lang, interpreter.ReduceOps.apply_impl
    convert = interpreter._convert_float

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

    def convert_exactly(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source not in FP8 and target not in FP8) or not {source, target} <= DTYPES.keys():
            return convert(values, source, target, rounding)
        (of, _), (to, stored) = DTYPES[source], DTYPES[target]
        x = torch.from_numpy(np.ascontiguousarray(values)).view(of).float()
        if target in FP8:
            largest = torch.finfo(to).max
            x = x.clamp(-largest, largest)  # as the GPU's casts, which saturate
        x = x.to(to)
        return (x.view(torch.uint8) if target in FP8 else x).numpy().view(stored).reshape(values.shape)

    interpreter.InterpretedFunction.__call__ = call
    interpreter._convert_float = convert_exactly
    interpreter.ReduceOps.apply_impl = reduce_fast


main()

"""Triton's interpreter, less its faults and what it does over and over: run this once in a process that interprets.

- Before each call of a device function it looks through the whole language for builtins, which the launch, or the first
  function of the same module, has replaced by then.
- Its casts to fp8 lose carries of the mantissa and round ties away from zero: here PyTorch casts.
- It reduces by an operation that it does not know element by element, in Python; `tl.sort` reduces by exclusive or.
- For each value it makes its type anew, names and all, and for each addition of integers an assertion that it drops.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

DTYPES = {
    tl.float32: (torch.float32, np.float32),
    tl.float16: (torch.float16, np.float16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
"""Triton's dtypes that are cast here: PyTorch's, and the one of the interpreter's arrays."""
PLAIN = frozenset(dtype.name for dtype in (tl.int32, tl.int64, tl.float32, tl.float64))
"""Dtypes of which no operation converts both operands."""
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

    if not interpreter.interpreter_builder.options.debug:  # then assertions check nothing
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *args: None
    remember_types()
    pass_by_equal_types()
    interpreter.InterpretedFunction.__call__ = call
    interpreter._convert_float = convert_exactly
    interpreter.ReduceOps.apply_impl = reduce_fast


def remember_types() -> None:
    """Make the types of arrays, the shapes of tensors and NumPy's dtypes once each."""
    make_block, numpy_dtype, is_equal = tl.block_type.__init__, interpreter._get_np_dtype, tl.dtype.__eq__
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    numpy_dtypes: dict[str, np.dtype] = {}
    of_scalar = tl.constexpr(1), tl.tuple([])

    def init_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        known = blocks.get((element_ty.name, sizes))
        if known is None:
            make_block(self, element_ty, shape)
            self.of_tensor = tl.constexpr(self.numel), tl.tuple([tl.constexpr(size) for size in sizes])
            blocks[element_ty.name, sizes] = {name: of for name, of in vars(self).items() if name != "element_ty"}
        else:
            vars(self).update(known)
            self.element_ty = element_ty

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else of_scalar

    def numpy_dtype_of(dtype: tl.dtype) -> np.dtype:
        known = numpy_dtypes.get(dtype.name)
        if known is None:
            known = numpy_dtypes[dtype.name] = numpy_dtype(dtype)
        return known

    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = init_block, init_tensor, numpy_dtype_of
    tl.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


def pass_by_equal_types() -> None:
    """Operands of the same type and shape need no conversion."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value

    def check_quickly(self: TritonSemantic, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            name = lhs.dtype.name
            if name == rhs.dtype.name and name in PLAIN:
                return broadcast_quickly(self, lhs, rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    def broadcast_quickly(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = check_quickly
    TritonSemantic.broadcast_impl_value = broadcast_quickly


main()

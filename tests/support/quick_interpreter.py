"""Triton's interpreter, less its faults and what it does over and over: run this once in a process that interprets.

- Before each call of a device function it looks through the whole language for builtins, which the launch, or the first
  function of the same module, has replaced by then.
- Its casts to fp8 lose carries of the mantissa and round ties away from zero: here PyTorch casts.
- It reduces by an operation that it does not know element by element, in Python; `tl.sort` reduces by exclusive or.
- For each value it makes its type anew, names and all, and for each addition of integers an assertion that it drops.
- It replaces the language's functions at each launch and puts them back; each call then looks twice at its keywords,
  and a constant is made, cast and spread over a block wherever it is read.
"""

from types import FunctionType
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
FLOATS, INTEGERS = frozenset(("fp32", "fp64")), {"int32": 31, "int64": 63}
"""Of plain dtypes; integers with their bits."""
MOST_CONSTANTS = 10_000


def main() -> None:
    reduce, convert = interpreter.ReduceOps.apply_impl, interpreter._convert_float

    def call(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
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
    make_handles_quickly()
    replace_language_once()
    remember_constants()
    pass_by_equal_types()
    interpreter.InterpretedFunction.__call__ = call
    interpreter._convert_float = convert_exactly
    interpreter.ReduceOps.apply_impl = reduce_fast


def replace_language_once() -> None:
    """Replace the functions of the language for good, each by one that calls it."""
    semantic, checks_semantic = interpreter.interpreter_semantic, tl.core.builtin(lambda: None).__code__

    def patch(of: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        while getattr(member, "__code__", None) is checks_semantic:
            member = member.__wrapped__

        def replaced(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        setattr(of, name, replaced)

    interpreter._patch_attr = patch
    nothing_to_restore = interpreter._patch_lang(FunctionType(main.__code__, {"tl": tl, "core": tl.core}))
    if nothing_to_restore is not None:
        nothing_to_restore._changes.clear()
    interpreter._patch_lang = lambda function: nothing_to_restore
    for name in ("add", "sub", "mul"):
        compute = getattr(semantic, name)
        setattr(tl.tensor, f"__{name}__", lambda self, other, compute=compute: compute(self, plain(other), True))
        setattr(tl.tensor, f"__r{name}__", lambda self, other, compute=compute: compute(plain(other), self, True))


def plain(value: Any) -> Any:
    return value.value if type(value) is tl.constexpr else tl.core._unwrap_if_constexpr(value)


def make_handles_quickly() -> None:
    """Handles of arrays, whose size is compared with that of their dtype as before, in one look."""
    fits, most_bytes = interpreter._validate_np_data_size, dict[str, int]()

    def init_handle(self: interpreter.TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        most = most_bytes.get(dtype.name)
        if most is None:
            widths = [size for size in (1, 2, 4, 8) if fits(np.empty(0, f"V{size}"), dtype)]
            most = most_bytes[dtype.name] = max(widths, default=0)
        if data.itemsize > most:
            raise ValueError(f"numpy data of {data.itemsize} bytes exceeds {dtype}")

    interpreter.TensorHandle.__init__ = init_handle


def remember_types() -> None:
    """Make the types of arrays, the shapes of tensors and NumPy's dtypes once each."""
    make_block, numpy_dtype, is_equal = tl.block_type.__init__, interpreter._get_np_dtype, tl.dtype.__eq__
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[tl.constexpr, tl.tuple, dict[str, tl.block_type]]] = {}
    """By sizes: their product, the shape of tensors, and types of blocks."""
    numpy_dtypes: dict[str, np.dtype] = {}
    of_scalar = tl.constexpr(1), tl.tuple([]), None

    def init_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        known = blocks.get((element_ty.name, sizes))
        if known is None:
            make_block(self, element_ty, shape)
            if sizes not in shapes:
                shapes[sizes] = tl.constexpr(self.numel), tl.tuple([tl.constexpr(size) for size in sizes]), {}
            self.of_tensor, self.sizes = shapes[sizes], sizes
            blocks[element_ty.name, sizes] = {name: of for name, of in vars(self).items() if name != "element_ty"}
        else:
            vars(self).update(known)
            self.element_ty = element_ty

    def with_element_ty(self: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
        if scalar_ty.name not in PLAIN and scalar_ty.name != "int1":
            return tl.block_type(scalar_ty, self.shape)
        of_shape = self.of_tensor[2]
        known = of_shape.get(scalar_ty.name)
        if known is None:
            known = of_shape[scalar_ty.name] = tl.block_type(scalar_ty, self.shape)
        return known

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape, _ = type.of_tensor if type.is_block() else of_scalar

    def numpy_dtype_of(dtype: tl.dtype) -> np.dtype:
        known = numpy_dtypes.get(dtype.name)
        if known is None:
            known = numpy_dtypes[dtype.name] = numpy_dtype(dtype)
        return known

    tl.block_type.with_element_ty = with_element_ty
    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = init_block, init_tensor, numpy_dtype_of
    tl.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


def remember_constants() -> None:
    """Make each number once for a dtype; nobody writes to it."""
    make_scalar, make_tensor = TritonSemantic.scalar_constant, TritonSemantic.to_tensor
    known: dict[tuple[Any, ...], tl.tensor] = {}

    def scalar_constant(self: TritonSemantic, value: Any, dtype: tl.dtype) -> tl.tensor:
        if type(value) not in (int, float, bool) or dtype is None:
            return make_scalar(self, value, dtype)
        constant = known.get((value, type(value), dtype.name))
        if constant is None:
            constant = make_scalar(self, value, dtype)
            constant.handle.data.flags.writeable = False
            if len(known) < MOST_CONSTANTS:
                known[value, type(value), dtype.name] = constant
        return constant

    def to_tensor(self: TritonSemantic, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else make_tensor(self, x, check_type)

    TritonSemantic.scalar_constant, TritonSemantic.to_tensor = scalar_constant, to_tensor


def pass_by_equal_types() -> None:
    """Operands of the same type and shape need no conversion; a number takes the dtype of the other operand, whose bits
    hold it; pointers take integers as they are."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    handle_of = interpreter.TensorHandle
    common: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...] | None] = {}

    def takes(dtype: tl.dtype, number: Any) -> bool:
        kind = type(number)
        if dtype.name in FLOATS:
            return kind is int or kind is float
        bits = INTEGERS.get(dtype.name)
        return kind is int and bits is not None and -(2**bits) <= number < 2**bits

    def check_quickly(self: TritonSemantic, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is tl.tensor:
            dtype = lhs.dtype
            if type(rhs) is tl.tensor:
                name, other = dtype.name, rhs.dtype.name
                if (name == other and name in PLAIN) or (args and args[0] and dtype.is_ptr() and other in INTEGERS):
                    return broadcast_quickly(self, lhs, rhs)
            elif takes(dtype, rhs):
                return broadcast_quickly(self, lhs, self.scalar_constant(rhs, dtype))
        elif type(rhs) is tl.tensor and takes(rhs.dtype, lhs):
            return broadcast_quickly(self, self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    def broadcast_quickly(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = lhs.type, rhs.type
        if not right.is_block():
            return lhs, fill(rhs, left.sizes)
        if not left.is_block():
            return fill(lhs, right.sizes), rhs
        sizes = left.sizes, right.sizes
        if sizes not in common:
            fit = [a == b or 1 in (a, b) for a, b in zip(*sizes, strict=False)]
            common[sizes] = np.broadcast_shapes(*sizes) if len(left.sizes) == len(right.sizes) and all(fit) else None
        shape = common[sizes]
        return broadcast(self, lhs, rhs) if shape is None else (spread(lhs, shape), spread(rhs, shape))

    def fill(x: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
        """A block of a scalar. Those of a constant, which nobody writes to, are made once."""
        handle = x.handle
        blocks = None if handle.data.flags.writeable else vars(handle).setdefault("blocks", {})
        if blocks is not None and (known := blocks.get(sizes)) is not None:
            return known
        data = np.full(sizes, handle.data, dtype=handle.data.dtype)
        block = tl.tensor(handle_of(data, handle.dtype), tl.block_type(x.dtype, list(sizes)))
        if blocks is not None:
            data.flags.writeable = False
            blocks[sizes] = block
        return block

    def spread(x: tl.tensor, shape: tuple[int, ...]) -> tl.tensor:
        if x.type.sizes == shape:
            return x
        handle = handle_of(np.broadcast_to(x.handle.data, shape), x.handle.dtype)
        return tl.tensor(handle, tl.block_type(x.dtype, list(shape)))

    TritonSemantic.binary_op_type_checking_impl = check_quickly
    TritonSemantic.broadcast_impl_value = broadcast_quickly


main()

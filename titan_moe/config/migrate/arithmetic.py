"""Read a short expression of whole numbers and lists, such as Megatron's `([0]*3+[1]*58)`, without running it."""

import ast
from typing import Any

MAX_CHARACTERS = 500
MAX_ENTRIES = 10_000


class NotArithmetic(Exception):
    """An expression of something else."""


def evaluate(text: str) -> Any:
    """The number or list that sums, products and lists of numbers make.

    Raises: NotArithmetic.
    """
    if len(text) > MAX_CHARACTERS:
        raise NotArithmetic(f"more than {MAX_CHARACTERS} letters")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError, TypeError) as error:
        raise NotArithmetic(str(error)) from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 2**63:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(entry) for entry in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)):
        return _combined(node.op, _value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise NotArithmetic("only numbers, lists, + - * / and brackets")


def _combined(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Add):
        result = left + right
    elif isinstance(op, ast.Mult):
        repeated = [len(value) * abs(times) for value, times in ((left, right), (right, left)) if type(value) is list]
        if any(length > MAX_ENTRIES for length in repeated):
            raise NotArithmetic(f"a list of more than {MAX_ENTRIES} entries")
        result = left * right
    elif isinstance(op, ast.Sub):
        result = left - right
    else:
        result = left // right if isinstance(op, ast.FloorDiv) else left % right
    if type(result) is int and abs(result) >= 2**63:
        raise NotArithmetic("a number of more than 64 bits")
    return result

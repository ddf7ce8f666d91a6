"""Turn `assert f(1) == 2` into a call and a condition on its value.

The call runs in a sandbox that does not know the condition; the condition is decided outside. Of
Python's expressions only those are taken that compare plain values.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(builtins, name)
    for name in (
        *("abs", "all", "any", "bool", "complex", "dict", "divmod", "float", "frozenset", "int"),
        *("len", "list", "max", "min", "round", "set", "sorted", "str", "sum", "tuple"),
    )
}
_MATH = {"isclose", "fabs", "isnan", "isinf", "sqrt", "pi", "e", "inf", "floor", "ceil"}
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}


class NotPlain(Exception):
    """Say that an expression is more than a comparison of plain values."""


@dataclass(frozen=True)
class Assertion:
    """Hold one assertion: the arguments of its one call, and what must hold of the value."""

    args: tuple[Any, ...]
    condition: ast.expr
    call: ast.Call
    source: str

    def holds(self, value: object) -> bool:
        """Tell whether the assertion holds when the call gives that value."""
        try:
            return bool(_evaluate(self.condition, self.call, value))
        except (NotPlain, TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            return False  # such as a comparison that the value does not allow


def read_assertions(source: str, name: str) -> tuple[Assertion, ...] | None:
    """Return the assertions on the function, or on `candidate`; None when some are not plain.

    Raises SyntaxError.
    """
    try:
        found = tuple(
            _assertion(statement, {name, "candidate"}) for statement in _asserts(ast.parse(source))
        )
    except NotPlain:
        return None
    return found or None


def called_name(source: str) -> str:
    """Return the name of the function that assertions are about; "" when it cannot be told."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for inner in ast.walk(node.test):
                is_call = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)
                if is_call and not hasattr(builtins, inner.func.id):  # type: ignore[attr-defined]
                    return str(inner.func.id)  # type: ignore[attr-defined]
    return ""


def imported_names(source: str) -> set[str]:
    """Return the modules that a source imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


def _asserts(module: ast.Module) -> Iterator[ast.Assert]:
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            yield from _body(statement.body)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            if not (isinstance(function, ast.Name) and function.id == "check"):
                raise NotPlain
        else:
            yield from _body([statement])


def _body(statements: list[ast.stmt]) -> Iterator[ast.Assert]:
    for statement in statements:
        if isinstance(statement, ast.Assert):
            yield statement
        elif isinstance(statement, ast.Assign):
            if not all(
                isinstance(target, ast.Name) and target.id.isupper() for target in statement.targets
            ):
                raise NotPlain
        elif isinstance(statement, ast.Import):
            if [alias.name for alias in statement.names] != ["math"] or statement.names[0].asname:
                raise NotPlain
        elif not (
            isinstance(statement, ast.Pass)
            or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        ):
            raise NotPlain


def _assertion(statement: ast.Assert, names: set[str]) -> Assertion:
    calls = [
        node
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    if len(calls) != 1 or calls[0].keywords:
        raise NotPlain
    call = calls[0]
    _check_plain(statement.test, call)
    try:
        args = tuple(_evaluate(argument, None, None) for argument in call.args)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise NotPlain from error
    return Assertion(args, statement.test, call, ast.unparse(statement))


_PLAIN = (
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.BoolOp,
    ast.Compare,
    ast.Subscript,
    ast.Slice,
)


def _check_plain(node: ast.expr, call: ast.Call | None) -> None:
    """Raise NotPlain when `_evaluate` could not read some part of an expression."""
    if node is call:
        parts: list[ast.AST] = list(node.args)
        call = None
    elif isinstance(node, ast.Call):
        _callee(node)
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Attribute):
        if not _is_math(node):
            raise NotPlain
        parts = []
    elif isinstance(node, ast.Name):
        if node.id not in _FUNCTIONS:
            raise NotPlain
        parts = []
    elif isinstance(node, _PLAIN) or (
        isinstance(node, ast.UnaryOp | ast.BinOp) and type(node.op) in {*_UNARY, *_BINARY}
    ):
        parts = list(ast.iter_child_nodes(node))
    else:
        raise NotPlain
    for part in parts:
        if isinstance(part, ast.expr):
            _check_plain(part, call)


def _evaluate(node: ast.expr, call: ast.Call | None, value: object) -> Any:
    """Return the value of an expression, in which the value stands for the call."""

    def inner(part: ast.expr) -> Any:
        return _evaluate(part, call, value)

    if node is call:
        return value
    match node:
        case ast.Constant():
            return node.value
        case ast.List():
            return [inner(each) for each in node.elts]
        case ast.Tuple():
            return tuple(inner(each) for each in node.elts)
        case ast.Set():
            return {inner(each) for each in node.elts}
        case ast.Dict():
            if None in node.keys:
                raise NotPlain
            pairs = zip(node.keys, node.values, strict=True)
            return {inner(key): inner(each) for key, each in pairs if key is not None}
        case ast.UnaryOp():
            return _UNARY[type(node.op)](inner(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](inner(node.left), inner(node.right))
        case ast.BoolOp():
            results = (inner(each) for each in node.values)
            return all(results) if isinstance(node.op, ast.And) else any(results)
        case ast.Compare():
            return _compare(node, inner)
        case ast.Subscript():
            return inner(node.value)[inner(node.slice)]
        case ast.Slice():
            return slice(*(each and inner(each) for each in (node.lower, node.upper, node.step)))
        case ast.Call():
            return _call(node, inner)
        case ast.Attribute() if _is_math(node):
            return getattr(math, node.attr)
        case ast.Name() if node.id in _FUNCTIONS:
            return _FUNCTIONS[node.id]
    raise NotPlain


def _compare(node: ast.Compare, inner: Callable[[ast.expr], Any]) -> bool:
    left = inner(node.left)
    for sign, part in zip(node.ops, node.comparators, strict=True):
        right = inner(part)
        if not _COMPARE[type(sign)](left, right):
            return False
        left = right
    return True


def _call(node: ast.Call, inner: Callable[[ast.expr], Any]) -> Any:
    keywords = {str(each.arg): inner(each.value) for each in node.keywords}
    return _callee(node)(*(inner(each) for each in node.args), **keywords)


def _callee(node: ast.Call) -> Callable[..., Any]:
    """Return the function of a call that is no call of the candidate's."""
    starred = any(isinstance(each, ast.Starred) for each in node.args)
    if starred or any(each.arg is None for each in node.keywords):
        raise NotPlain
    if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id]
    if isinstance(node.func, ast.Attribute) and _is_math(node.func):
        function: Callable[..., Any] = getattr(math, node.func.attr)
        return function
    raise NotPlain


def _is_math(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in _MATH

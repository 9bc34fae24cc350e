"""Rewrites the source of `@triton.jit` functions, so that plain Python runs it like Triton's compiler.

The compiler turns each assigned number and each run-time loop variable into a tensor. It applies `and`, `or`,
`not` and `if` to a block element by element, or raises. Python makes no tensors, and any block is true. The
rewritten source calls functions that make the tensors, and raises where it would test a block's truth. File
and line numbers do not change, so that tracebacks and debuggers show text that the user can open.
"""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

from flexmod.syntax import parse

TO_TENSOR = "__flexmod_to_tensor__"
TRUTH = "__flexmod_truth__"


def compile_for_interpreter(text: str, file: str) -> CodeType:
    """Compiles the whole module to Python code, with rewritten jit functions.

    Args:
        text: the module's source.
        file: the path that tracebacks name.
    """
    tree = _Functions().visit(parse(text, file))
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)


def _is_jit(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    name = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
    return name == "jit"


class _Functions(ast.NodeTransformer):
    """Finds the functions to rewrite."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if any(map(_is_jit, node.decorator_list)):
            node.body = [_Statements().visit(statement) for statement in node.body]
        return node


class _Statements(ast.NodeTransformer):
    """Rewrites the statements of one function."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = _call(TO_TENSOR, node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        if node.value is not None and "constexpr" not in ast.unparse(node.annotation):
            node.value = _call(TO_TENSOR, node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and _is_runtime_range(node.iter):
            name = node.target.id
            convert = ast.Assign([ast.Name(name, ast.Store())], _call(TO_TENSOR, ast.Name(name, ast.Load())))
            node.body.insert(0, ast.copy_location(convert, node.target))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        self.generic_visit(node)
        node.values = [_call(TRUTH, value) for value in node.values]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.UnaryOp:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            node.operand = _call(TRUTH, node.operand)
        return node

    def _visit_test(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = _call(TRUTH, node.test)
        return node

    visit_If = visit_IfExp = visit_While = _visit_test


def _is_runtime_range(iterable: ast.expr) -> bool:
    if not isinstance(iterable, ast.Call):
        return False
    function = iterable.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "range"


def _call(function: str, value: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(function, ast.Load()), [value], []), value)

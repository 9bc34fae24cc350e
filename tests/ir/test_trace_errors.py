"""What a mod may not do: each refusal with its whole message, which names the user's line.

The offending line of each mod below ends with the mark that `MARK` holds.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import inspect
import itertools
import math
import random as python_random
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flexmod import compile, errors, flex_attention
from flexmod.ir import ops
from flexmod.ir.derivative import differentiate
from flexmod.ir.source import mod_kind, user_line
from flexmod.ir.trace import trace
from flexmod.mods import chain

MARK = "# <-"
doc = torch.arange(8)
table = torch.zeros(4, 8)
learned = torch.zeros(4, 8, requires_grad=True)
complex_table = torch.zeros(8, dtype=torch.complex64)
sparse = torch.eye(8).to_sparse()
nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
embeddings = torch.nn.Embedding(8, 4)
steps, dim = [1, 3], 0


@dataclass(frozen=True)
class Row:
    """A mod and what becomes of it: `what`, the marked line, `instead`.

    `line`: False if no line is named, or the function with the marked line.
    """

    mod: Callable[..., Any]
    error: type[errors.FlexmodError]
    what: str
    instead: str
    kind: str = "mask"
    line: bool | Callable[..., Any] = True


def marked_line(mod: Callable[..., Any]) -> str:
    """file:line: source of the line of a mod that bears the mark."""
    lines, first = inspect.getsourcelines(mod)
    (at,) = [i for i, line in enumerate(lines) if MARK in line]
    return f"{inspect.getsourcefile(mod)}:{first + at}: {lines[at].strip()}"


ROWS: dict[str, Row] = {}


def row(error: type[errors.FlexmodError], what: str, instead: str, **rest: Any) -> Callable[..., Any]:
    def add(mod: Callable[..., Any]) -> Callable[..., Any]:
        ROWS[mod.__name__] = Row(mod, error, what, instead, **rest)
        return mod

    return add


# names and arguments that torch does not have


@row(
    errors.UnknownAttributeError,
    "a traced value has no attribute 'thanh'. Did you mean 'tanh'?",
    "use operators and the functions in docs/operations.md.",
    kind="score",
)
def misspelled_method(score, b, h, q_idx, kv_idx):
    return score.thanh()  # <-


@row(
    errors.UnknownAttributeError,
    "a traced value has no attribute 'tahn'. Did you mean 'tanh'?",
    "use operators and the functions in docs/operations.md.",
    kind="score",
)
def swapped_letters(score, b, h, q_idx, kv_idx):
    return score.tahn()  # <-


@row(
    errors.OperationArgumentError,
    "to was called with 'float33', which is no device.",
    "give a dtype, e.g. .to(torch.float32).",
    kind="score",
)
def cast_to_a_text(score, b, h, q_idx, kv_idx):
    return score.to("float33")  # <-


@row(
    errors.OperationArgumentError,
    "torch.clamp was called with arguments that it does not take here.",
    "give it what torch takes, without what is not elementwise (clamp takes a min or a max).",
    kind="score",
)
def clamp_without_limits(score, b, h, q_idx, kv_idx):
    return torch.clamp(score)  # <-


@row(
    errors.OperationArgumentError,
    "torch.gelu was called with arguments that it does not take here.",
    "give it what torch takes, without what is not elementwise (approximate is 'tan', neither 'none' nor "
    "'tanh').",
    kind="score",
)
def unknown_approximation(score, b, h, q_idx, kv_idx):
    return F.gelu(score, approximate="tan")  # <-


def test_asking_for_an_attribute_is_no_mistake() -> None:
    trace(lambda score, b, h, q_idx, kv_idx: score * hasattr(score, "thanh"), "score")


# truth

TRUTH = (
    "Python asked for the truth of a traced value (if, while, and, or, not, in): it has no value yet.",
    "use torch.where(condition, a, b), and & | ~ in place of and, or, not.",
)


@row(errors.ControlFlowError, *TRUTH)
def if_on_an_index(b, h, q, k):
    result = k > 3
    if q >= k:  # <-
        result = q > 3
    return result


@row(errors.ControlFlowError, TRUTH[0], "write torch.where(q >= k, True, k == 0).")
def a_choice(b, h, q, k):
    return True if q >= k else k == 0  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q >= k) & (k > 2).")
def and_of_conditions(b, h, q, k):
    return q >= k and k > 2  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q >= k) | (k > 2).")
def or_of_conditions(b, h, q, k):
    return q >= k or k > 2  # <-


@row(errors.ControlFlowError, TRUTH[0], "write ~(q >= k).")
def not_a_condition(b, h, q, k):
    return not q >= k  # <-


@row(errors.ControlFlowError, *TRUTH)
def while_on_an_index(b, h, q, k):
    while q > k:  # <-
        q = q - 1
    return q == k


@row(errors.ControlFlowError, TRUTH[0], "write (0 <= q) & (q < k).")
def a_chained_comparison(b, h, q, k):
    return 0 <= q < k  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q == 1) | (q == 2).")
def in_a_tuple(b, h, q, k):
    return q in (1, 2)  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.maximum(q, k).")
def largest_of_python(b, h, q, k):
    return max(q, k) > 3  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.where(table[h] != 0, q >= k, q < k).")
def truth_of_a_row(b, h, q, k):
    return q >= k if table[h] else q < k  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.where(h == 0, q >= k, q < k).")
def not_a_number(b, h, q, k):
    return q >= k if not h else q < k  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q - k) % 3 == 0.")
def not_a_remainder(b, h, q, k):
    return not (q - k) % 3  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q % 3 != 0) & (q >= k).")
def number_and_condition(b, h, q, k):
    return q % 3 and q >= k  # <-


@row(errors.ControlFlowError, TRUTH[0], "write ~(earlier).")
def not_a_truth(b, h, q, k):
    earlier = q >= k
    return not earlier  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.clamp(s, min=0).", kind="score")
def not_below_zero(s, b, h, q, k):
    return max(s, 0)  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.clamp(s, max=3.0).", kind="score")
def not_above_three(s, b, h, q, k):
    return min(3.0, s)  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q >= k) & (h < 3).")
def brackets_left_out(b, h, q, k):
    return q >= k & h < 3  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q >= k) | (h == 0) & (k < 5).")
def more_brackets_left_out(b, h, q, k):
    return q >= k | (h == 0) & k < 5  # <-


@row(errors.ControlFlowError, TRUTH[0], "write ~((q == 1) | (q == 2)).")
def not_in_a_list(b, h, q, k):
    return q not in [1, 2]  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.maximum(torch.maximum(q, k), h).")
def largest_of_three(b, h, q, k):
    return max(q, k, h) > 3  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.clamp(torch.clamp(s, min=-1.0), max=1.0).", kind="score")
def between_limits(s, b, h, q, k):
    return min(max(s, -1.0), 1.0)  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.maximum(q, k).")
def largest_of_a_list(b, h, q, k):
    return max([q, k]) > 3  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q >= k) & ((k == 1) | (k == 2)).")
def a_condition_in_another(b, h, q, k):
    return q >= k and k in (1, 2)  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q >= k) & (k > 2).")
def all_of_a_tuple(b, h, q, k):
    return all((q >= k, k > 2))  # <-


@row(
    errors.ControlFlowError, TRUTH[0],
    "write functools.reduce(operator.or_, (q == end for end in (1, 2))).",
)  # fmt: skip
def any_of_a_generator(b, h, q, k):
    return any(q == end for end in (1, 2))  # <-


@row(
    errors.ControlFlowError, TRUTH[0], "write no assertion: it looks at values before there are any."
)  # fmt: skip
def asserted(b, h, q, k):
    assert q >= 0  # <-
    return q >= k


@row(errors.ControlFlowError, TRUTH[0], "write functools.reduce(operator.or_, [q == item for item in few]).")
def in_a_variable(b, h, q, k):
    few = (1, 2)
    return q in few  # <-


# values

SYMBOLIC = "keep it symbolic: use it in arithmetic, comparisons, torch.where, or as an index of a tensor."


def value_of(operation: str) -> tuple[str, str]:
    return (
        f"{operation} needs the value of a traced scalar, which has none while the mod is compiled.",
        SYMBOLIC,
    )


@row(errors.ConcreteValueError, *value_of(".item()"))
def item(b, h, q, k):
    return q.item() >= k  # <-


@row(errors.ConcreteValueError, *value_of(".tolist()"))
def tolist(b, h, q, k):
    return q.tolist() >= k  # <-


@row(errors.ConcreteValueError, value_of("int()")[0], "write q.to(torch.int32).")
def to_int(b, h, q, k):
    return int(q) >= k  # <-


@row(errors.ConcreteValueError, value_of("float()")[0], "write q.to(torch.float32).")
def to_float(b, h, q, k):
    return float(q) >= k  # <-


@row(errors.ConcreteValueError, value_of("float()")[0], "write torch.floor(q / 2).")
def floor_of_math(b, h, q, k):
    return math.floor(q / 2) >= k  # <-


@row(errors.ConcreteValueError, *value_of("len()"))
def length(b, h, q, k):
    return len(q) >= k  # <-


@row(errors.ConcreteValueError, *value_of("iter()"))
def unpacked(b, h, q, k):
    first, second = q  # <-
    return first >= second


@row(errors.ConcreteValueError, *value_of("contains()"))
def in_an_index(b, h, q, k):
    return 3 in q  # <-


@row(
    errors.ForeignCaptureError, "[1, 2, 3] is a list: only a tensor can be indexed with a traced value.",
    "make a tensor of it before the call, table = torch.tensor([1, 2, 3]), and capture that: table[...].",
)  # fmt: skip
def index_of_a_list(b, h, q, k):
    return [1, 2, 3][q] >= k  # <-


@row(
    errors.ConcreteValueError, value_of("index()")[0],
    "loop a fixed number of times, e.g. for i in range(8), and choose by torch.where(i < count, new, old).",
)  # fmt: skip
def loop_over_an_index(b, h, q, k):
    for _ in range(q):  # <-
        k = k + 1
    return k > 3


# reductions

BEFORE = (
    "compute it before the call and capture the result, e.g. total = x.sum(-1), then total[q_idx]; "
    "only a captured row of up to 16 elements is reduced inside."
)
LONG = torch.ones(4, 17)


def reduces(operation: str) -> tuple[str, str]:
    return f"{operation} reduces over elements, but a mod sees one (query, key) pair.", BEFORE


@row(errors.ReductionError, *reduces("torch.sum"))
def sum_of_a_scalar(b, h, q, k):
    return q.sum() >= k  # <-


@row(errors.ReductionError, *reduces("torch.any"))
def any_of_a_long_row(b, h, q, k):
    return LONG[h].any()  # <-


@row(
    errors.OperationArgumentError, "torch.max was called with a dimension, along which it gives indices too.",
    "write x.amax(-1), which gives the values alone.",
)  # fmt: skip
def max_over_a_dimension(b, h, q, k):
    return table[h].max(-1) > q  # <-


@row(
    errors.OperationArgumentError, "torch.sum was called with dimension 1.",
    "use one that the shape (8,) has, or leave it out.",
)  # fmt: skip
def a_dimension_that_a_row_does_not_have(b, h, q, k):
    return table[h].sum(1) > q  # <-


@row(errors.ReductionError, *reduces("torch.min"))
def min_over_a_dimension(b, h, q, k):
    return q.min(0) > k  # <-


@row(errors.ReductionError, *reduces("@"))
def product_of_long_rows(b, h, q, k):
    return LONG[h] @ LONG[h] > q  # <-


@row(errors.ReductionError, *reduces("@"))
def product_of_scalars(b, h, q, k):
    return q @ k > 1  # <-


@row(errors.ReductionError, *reduces("torch.dot"))
def dot_of_other_lengths(b, h, q, k):
    return torch.dot(table[h], (table[h] * 1)[:2]) > q  # <-


@row(errors.ReductionError, *reduces("torch.argmax"))
def argmax_of_a_row(b, h, q, k):
    return table[h].argmax() > q  # <-


@row(errors.ReductionError, *reduces("torch.softmax"), kind="score")
def softmax(s, b, h, q, k):
    return torch.softmax(s, -1)  # <-


# random numbers

DRAW = (
    "draw them before the call and capture the tensor, e.g. noise[q_idx, kv_idx], or make them of the "
    "positions and a captured seed, as docs/operations.md shows."
)


def random(operation: str) -> tuple[str, str]:
    return f"{operation} draws random numbers inside a mod: they would change with the tiling.", DRAW


@row(errors.RandomNumberError, *random("torch.rand"), kind="score")
def rand(s, b, h, q, k):
    return s + torch.rand(())  # <-


@row(errors.RandomNumberError, *random("torch.randn_like"), kind="score")
def randn_like(s, b, h, q, k):
    return s + torch.randn_like(s)  # <-


@row(errors.RandomNumberError, *random("torch.dropout"), kind="score")
def dropout(s, b, h, q, k):
    return F.dropout(s, 0.1)  # <-


@row(errors.RandomNumberError, *random("torch.dropout2d"), kind="score")
def dropout_of_channels(s, b, h, q, k):
    return F.dropout2d(s, 0.1)  # <-


@row(errors.RandomNumberError, *random("torch.dropout"), kind="score")
def dropout_of_a_module(s, b, h, q, k):
    return torch.nn.Dropout(0.1)(s)  # <-


@row(errors.RandomNumberError, *random("torch.rrelu"), kind="score")
def rrelu(s, b, h, q, k):
    return F.rrelu(s, training=True)  # <-


@row(errors.RandomNumberError, *random("torch.log_normal"), kind="score")
def drawn_in_place(s, b, h, q, k):
    return s + torch.empty(()).log_normal_()  # <-


@row(errors.RandomNumberError, *random("torch.standard_gamma"), kind="score")
def gamma(s, b, h, q, k):
    return s + torch.distributions.Gamma(1.0, 1.0).sample()  # <-


@row(errors.RandomNumberError, *random("torch.bernoulli"))
def bernoulli(b, h, q, k):
    return torch.bernoulli(table)[h, q] > 0  # <-


# writes

PURE = "use the form that returns a new value, or do the write before the call."


def writes(operation: str) -> tuple[str, str]:
    return f"{operation} writes in place inside a mod; a mod is a pure function.", PURE


@row(errors.MutationError, *writes("__setitem__"))
def write_to_a_capture(b, h, q, k):
    doc[0] = 3  # <-
    return doc[q] > k


@row(errors.MutationError, *writes("__setitem__"))
def write_at_an_index(b, h, q, k):
    doc[q] = k  # <-
    return q > k


@row(errors.MutationError, *writes("__setitem__"))
def write_to_a_row(b, h, q, k):
    table[h][q] = 1  # <-
    return q > k


class Counter:
    def __init__(self) -> None:
        self.count = torch.zeros(8)

    def mask(self, b, h, q, k):
        self.count += 1  # <-
        return self.count[q] > k


ROWS["add to an attribute"] = Row(Counter().mask, errors.MutationError, *writes("add_"))


@row(errors.MutationError, *writes("__ior__"))
def or_into_a_capture(b, h, q, k):
    global doc
    doc |= 1  # <-
    return doc[q] > k


OLD = "on a value that is read later"


@row(errors.MutationError, *writes(f"+= {OLD}"), kind="score")
def add_to_a_score_read_later(s, b, h, q, k):
    biased = s
    biased += doc[h]  # <-
    return torch.where(q > k, biased, s)


@row(errors.MutationError, *writes(f"*= {OLD}"), kind="score")
def scale_the_same_score_by_another_name(s, b, h, q, k):
    scaled = s.float()
    scaled *= 2  # <-
    return scaled + s


@row(errors.MutationError, *writes(f"-= {OLD}"), kind="score")
def subtract_from_a_row_read_later(s, b, h, q, k):
    row = near = learned[h]
    near -= 1.0  # <-
    return s + row[q]


@row(errors.MutationError, *writes(f"//= {OLD}"))
def divide_a_position_read_later(b, h, q, k):
    block = q
    block //= 4  # <-
    return doc[q] == block


@row(errors.MutationError, *writes("add_"))
def add_in_place(b, h, q, k):
    return doc.add_(1)[q] > k  # <-


@row(errors.MutationError, *writes("mul_"), kind="score")
def scale_in_place(s, b, h, q, k):
    return s.mul_(2)  # <-


@row(errors.MutationError, *writes("add(out=...)"))
def out_argument(b, h, q, k):
    torch.add(doc, 1, out=doc)  # <-
    return doc[q] > k


@row(errors.MutationError, *writes("relu(inplace=...)"), kind="score")
def relu_in_place(s, b, h, q, k):
    return F.relu(s, inplace=True)  # <-


# unknown operations

TABLE = "write it with elementwise operations; docs/operations.md lists those there are."


@row(
    errors.UnknownOperationError,
    "torch.erfinv is not an operation that flexmod can trace.",
    TABLE,
    kind="score",
)
def unknown_function(s, b, h, q, k):
    return torch.erfinv(s)  # <-


@row(
    errors.UnknownOperationError, "torch.repeat is not an operation that flexmod can trace.",
    "leave it out for a scalar, which has no dimensions; shape a captured tensor before the call.",
)  # fmt: skip
def unknown_method(b, h, q, k):
    return q.repeat(2) > k  # <-


@row(
    errors.NotScalarError,
    "torch.unsqueeze makes a tensor, of shape (1,), where a scalar is needed: a mod works on one (query, "
    "key) pair.",
    "index it down to one element, e.g. x.squeeze(-1) or x.any(-1).",
)  # fmt: skip
def a_dimension_left(b, h, q, k):
    return q.unsqueeze(0) > k  # <-


@row(
    errors.NotScalarError,
    "an index with None makes a tensor, of shape (1, 1), where a scalar is needed: a mod works on one "
    "(query, key) pair.",
    "index it down to one element, e.g. x.squeeze(-1) or x.any(-1).",
)  # fmt: skip
def dimensions_left(b, h, q, k):
    return q > k[None, None]  # <-


@row(
    errors.NotScalarError,
    "torch.expand makes a tensor, of shape (17,), where a scalar is needed: a mod works on one (query, key) "
    "pair.",
    "index it down to one element, e.g. x.squeeze(-1) or x.any(-1).",
)  # fmt: skip
def a_long_vector(b, h, q, k):
    return (q.expand(17) > k).any()  # <-


@row(
    errors.OperationArgumentError,
    "torch.view was called with [2, -1] for the shape ().",
    "give sizes or dimensions that this shape allows, or leave it out.",
)  # fmt: skip
def a_shape_of_more(b, h, q, k):
    return (q.view(2, -1) > k).any()  # <-


@row(
    errors.UnknownOperationError,
    "the attribute .T is not an operation that flexmod can trace.",
    "use the value in torch functions.",
)
def unknown_attribute(b, h, q, k):
    return k < q.T  # <-


@row(
    errors.UnknownOperationError, "torch.gather is not an operation that flexmod can trace.",
    "index it: doc[q].",
)  # fmt: skip
def gathered(b, h, q, k):
    return torch.gather(doc, 0, q) == k  # <-


@row(
    errors.UnknownOperationError, "torch.isin is not an operation that flexmod can trace.",
    "make a table before the call, keep = torch.isin(torch.arange(LENGTH), doc), and index that: "
    "keep[q + 1].",
)  # fmt: skip
def in_a_set(b, h, q, k):
    return torch.isin(q + 1, doc)  # <-


@row(
    errors.UnknownOperationError, "torch.searchsorted is not an operation that flexmod can trace.",
    "make a table before the call, at = torch.searchsorted(torch.tensor([2, 5]), torch.arange(LENGTH)), and "
    "index that: at[k].",
)  # fmt: skip
def between_bounds(b, h, q, k):
    return torch.searchsorted(torch.tensor([2, 5]), k) == 1  # <-


EMBEDDING = "torch.embedding is not an operation that flexmod can trace."


@row(errors.UnknownOperationError, EMBEDDING, "index it: table[q - k + 4].", kind="score")
def embedded(s, b, h, q, k):
    return s + F.embedding(q - k + 4, table)[h]  # <-


@row(errors.UnknownOperationError, EMBEDDING, "index it: weight[q_idx].", kind="score")
def embedded_by_a_module(s, b, h, q, k):
    return s + embeddings(q)[h]  # <-


@row(
    errors.UnknownOperationError, "torch.select is not an operation that flexmod can trace.",
    "index it: table[q_idx].", kind="score",
)  # fmt: skip
def selected_along_another_dimension(s, b, h, q, k):
    return s + table[h].select(dim, q)  # <-


@row(
    errors.UnknownOperationError, "torch.contains is not an operation that flexmod can trace.",
    "make a table before the call, keep = torch.isin(torch.arange(LENGTH), table), and index that: keep[k].",
)  # fmt: skip
def in_a_tensor(b, h, q, k):
    return k in table  # <-


numbers = {1, 2}


@row(
    errors.ConcreteValueError,
    "a lookup in a dict or set needs the value of a traced scalar, which has none while the mod is compiled.",
    "write functools.reduce(operator.or_, [h == item for item in numbers]).",
)
def in_a_named_set(b, h, q, k):
    return h in numbers  # <-


@row(
    errors.ControlFlowError, TRUTH[0],
    "write ~(functools.reduce(operator.or_, [q - k == item for item in steps])).",
)  # fmt: skip
def not_in_a_named_list(b, h, q, k):
    return q - k not in steps  # <-


# functions that torch does not dispatch

CALLED = "what is called here is not an operation that flexmod can trace."


def called(problem: str) -> tuple[str, str]:
    return CALLED, f"use operators and the functions in docs/operations.md ({problem})."


@row(errors.ConcreteValueError, value_of("divmod()")[0], "write ((q + 1) // 4, (q + 1) % 4).")
def quotient_and_rest(b, h, q, k):
    return divmod(q + 1, 4)[0] == k  # <-


@row(errors.ConcreteValueError, value_of("trunc()")[0], "write torch.trunc(q / 4).")
def whole_part_of_math(b, h, q, k):
    return math.trunc(q / 4) == k  # <-


@row(
    errors.UnknownOperationError,
    *called("unsupported operand type(s) for ** or pow(): 'Proxy', 'int', 'int'"),
)
def power_with_modulus(b, h, q, k):
    return pow(q, 2, 5) == k  # <-


@row(errors.UnknownOperationError, *called("%d format: a real number is required, not Proxy"))
def percent_format(b, h, q, k):
    return len("%d" % q) > k  # <-  # noqa: UP031


@row(
    errors.UnknownOperationError,
    *called("Thing passed to transform API must be Tensor, got <class 'flexmod.ir.proxy.Proxy'>"),
    kind="score",
)
def transform_of_a_score(s, b, h, q, k):
    return torch.func.grad(torch.tanh)(s)  # <-


@row(
    errors.UnknownOperationError,
    *called("Expected pred to be bool or tensor, but got Proxy(ge: bool)."),
    kind="score",
)
def cond_of_torch(s, b, h, q, k):
    return torch.cond(q >= k, torch.tanh, torch.sin, (s,))  # <-


class Marking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.mark_non_differentiable(seen)
        return torch.where(seen, x, 0.0)


@row(
    errors.UnknownOperationError,
    *called("mark_non_differentiable only accepts variable arguments, but got "),
    kind="score",
)
def function_that_marks_its_inputs(s, b, h, q, k):
    return Marking.apply(s, q >= k)  # <-


# parts without gradient

WITHOUT_GRADIENT = (
    "a part without gradient (torch.no_grad, autograd.Function) is not an operation that flexmod can trace.",
    "leave it out, since gradients flow through all of a mod; for a constant, capture tensor.detach().",
)


@row(errors.UnknownOperationError, *WITHOUT_GRADIENT, kind="score")
def under_no_grad(s, b, h, q, k):
    with torch.no_grad():
        doubled = s * 2  # <-
    return s + doubled


@row(errors.UnknownOperationError, *WITHOUT_GRADIENT, kind="score")
def in_inference_mode(s, b, h, q, k):
    with torch.inference_mode():
        bias = learned[h, q]  # <-
    return s + bias


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)  # <-

    @staticmethod
    def backward(ctx, grad):
        return grad


class OwnTanh(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.tanh(x)  # <-

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)


@row(
    errors.UnknownOperationError, WITHOUT_GRADIENT[0],
    "call torch.tanh, or flexmod.tanh_approximate for the chip's own; gradients flow through both.",
    kind="score", line=OwnTanh.forward,
)  # fmt: skip
def a_tanh_of_ones_own(s, b, h, q, k):
    return 30 * OwnTanh.apply(s / 30)


@row(errors.UnknownOperationError, *WITHOUT_GRADIENT, kind="score", line=Rounding.forward)
def derivative_of_ones_own(s, b, h, q, k):
    return Rounding.apply(s)


@row(
    errors.UnknownOperationError, "torch.detach is not an operation that flexmod can trace.",
    WITHOUT_GRADIENT[1], kind="score",
)  # fmt: skip
def detached(s, b, h, q, k):
    return s + (torch.round(s) - s).detach()  # <-


# captures that are no tensors


def foreign(what: str, tensor: str) -> tuple[str, str]:
    return (
        f"{what}: only a tensor can be indexed with a traced value.",
        f"make a tensor of it before the call, table = {tensor}, and capture that: table[...].",
    )


array, listed, named = np.arange(8), [3, 2, 1], {"first": 1}


@row(errors.ForeignCaptureError, *foreign("array is a numpy array", "torch.from_numpy(array)"))
def of_numpy(b, h, q, k):
    return array[q] >= k  # <-


@row(
    errors.ForeignCaptureError,
    "(True, False) is a tuple: only a tensor can be indexed with a traced value.",
    "write torch.where(k > q, False, True).",
)
def one_of_two_constants(b, h, q, k):
    return (True, False)[k > q]  # <-


@row(
    errors.ConcreteValueError, value_of("index()")[0], "write torch.where(q > k, -s, s).", kind="score"
)  # fmt: skip
def one_of_two_scores(s, b, h, q, k):
    return (s, -s)[q > k]  # <-


@row(errors.ForeignCaptureError, *foreign("listed is a list", "torch.tensor(listed)"))
def of_a_list(b, h, q, k):
    return listed[0] + listed[h] >= k  # <-


DICT = "torch.tensor([named[key] for key in sorted(named)])"


@row(errors.ForeignCaptureError, *foreign("named is a dict", DICT))
def of_a_dict(b, h, q, k):
    return named["first"] + named[h] >= k  # <-


@row(errors.ForeignCaptureError, *foreign("Of.table is a tuple", "torch.tensor(Of.table)"))
def of_an_attribute(b, h, q, k):
    return Of.table[h] >= k  # <-


class Of:
    table = (1, 2, 3)
    cap = 20.0


ranks, rows, choices = {1: 0.5, 2: 0.25}, [torch.zeros(8)] * 3, [abs, round]


@row(
    errors.ForeignCaptureError,
    *foreign("ranks is a dict", "torch.tensor([ranks.get(key, 0) for key in range(max(ranks) + 1)])"),
)
def of_a_dict_that_counts_from_one(b, h, q, k):
    return ranks[h] >= k  # <-


@row(errors.ForeignCaptureError, *foreign("rows is a list", "torch.stack(rows)"))
def of_a_list_of_tensors(b, h, q, k):
    return rows[h][k] >= q  # <-


@row(
    errors.ForeignCaptureError, foreign("choices is a list", "")[0],
    "call each of them, and choose between the results with torch.where, as masks.by_head does.",
)  # fmt: skip
def of_a_list_of_functions(b, h, q, k):
    return choices[h](q) >= k  # <-


width = 5


@row(errors.ControlFlowError, TRUTH[0], "write torch.clamp(q, max=width).")
def smallest_beside_a_captured_number(b, h, q, k):
    return min(width, q) >= k  # <-


options = {"reach": 3}


@row(errors.ControlFlowError, TRUTH[0], "write torch.clamp(q, min=options['reach']).")
def largest_beside_an_entry_of_a_dict(b, h, q, k):
    return max(options["reach"], q) <= k  # <-


settings = {"slopes": [0.5, 0.25]}


@row(
    errors.ForeignCaptureError,
    *foreign("settings['slopes'] is a list", "torch.tensor(settings['slopes'])"), kind="score",
)  # fmt: skip
def of_a_list_in_a_dict(s, b, h, q, k):
    return s * settings["slopes"][h]  # <-


@row(errors.ControlFlowError, TRUTH[0], "write torch.clamp(q - k, min=2 * -width).")
def largest_beside_a_product_of_numbers(b, h, q, k):
    return max(q - k, 2 * -width) >= k  # <-


@row(
    errors.ControlFlowError, TRUTH[0], "write torch.clamp(torch.clamp(s, min=-Of.cap), max=Of.cap).",
    kind="score",
)  # fmt: skip
def between_an_attribute_and_its_negative(s, b, h, q, k):
    return min(max(s, -Of.cap), Of.cap)  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q & 2 != 0) & (k & 2 != 0).")
def all_of_numbers(b, h, q, k):
    return all([q & 2, k & 2])  # <-


@row(errors.ControlFlowError, TRUTH[0], "write q >= k.")
def bool_of_a_condition(b, h, q, k):
    return bool(q >= k)  # <-


@row(errors.ControlFlowError, TRUTH[0], "write (q % 2 != 0) & (k % 2 != 0).")
def truths_of_numbers(b, h, q, k):
    return bool(q % 2) and bool(k % 2)  # <-


@row(errors.ConcreteValueError, value_of("index()")[0], "write (q - 2 <= k) & (k < q + 1).")
def in_a_range_of_positions(b, h, q, k):
    return k in range(q - 2, q + 1)  # <-


@row(errors.ControlFlowError, TRUTH[0], "write ~((1 <= k) & (k < 9) & ((k - 1) % 2 == 0)).")
def not_in_a_range_with_a_step(b, h, q, k):
    return k not in range(1, 9, 2)  # <-


LOOKUP = value_of("a lookup in a dict or set")


@row(errors.ConcreteValueError, LOOKUP[0], "write (q == 1) | (q == 2).")
def in_a_set_of_numbers(b, h, q, k):
    return q in {1, 2}  # <-


@row(errors.ForeignCaptureError, *foreign("named is a dict", DICT), kind="score")
def got_from_a_dict(s, b, h, q, k):
    return s + named.get(h, 0)  # <-


@row(errors.ConcreteValueError, value_of("round()")[0], "write torch.round(s).", kind="score")
def rounded(s, b, h, q, k):
    return round(s)  # <-


@row(errors.ConcreteValueError, *value_of("float()"), kind="score")
def a_remainder_that_torch_has_not(s, b, h, q, k):
    return math.remainder(s, 3)  # <-


@row(
    errors.OperationArgumentError, "hypot was called with int32 operands.",
    "cast them first, e.g. with .to(torch.float32).",
)  # fmt: skip
def integers_where_floats_are_due(b, h, q, k):
    return torch.hypot(q, k) > 3  # <-


@row(errors.ConcreteValueError, value_of("int()")[0], "write (q / 2).to(torch.int32).")
def an_integer(b, h, q, k):
    return int(q / 2) >= k  # <-


NUMPY = "numpy.tanh needs the value of a traced scalar, which has none while the mod is compiled."


@row(errors.ConcreteValueError, NUMPY, "write torch.tanh(s).", kind="score")
def a_function_of_numpy(s, b, h, q, k):
    return np.tanh(s)  # <-


@row(
    errors.ConcreteValueError, NUMPY.replace("tanh", "maximum"), "write torch.clamp(s, min=-1).", kind="score"
)  # fmt: skip
def a_limit_of_numpy(s, b, h, q, k):
    return np.maximum(s, -1)  # <-


@row(
    errors.ConcreteValueError,
    "a numpy array of it needs the value of a traced scalar, which has none while the mod is compiled.",
    SYMBOLIC,
)
def a_function_of_numpy_that_no_kernel_has(b, h, q, k):
    return np.arange(q)[0] >= k  # <-


@row(errors.ConcreteValueError, value_of("float()")[0], "write torch.abs(s).", kind="score")
def absolute_value_of_math(s, b, h, q, k):
    return s + math.fabs(s)  # <-


@row(
    errors.OperationArgumentError, "add was called with a list.",
    "make a tensor of it before the call, table = torch.tensor(values), and index that: table[q_idx].",
    kind="score",
)  # fmt: skip
def add_a_list(s, b, h, q, k):
    return s + listed  # <-


@row(
    errors.OperationArgumentError, "torch.tensor was called with a list of traced values.",
    "stack several, e.g. torch.stack([q_idx, kv_idx]), and use a single one as it is.", kind="score",
)  # fmt: skip
def tensor_of_a_score(s, b, h, q, k):
    return torch.tensor([s])  # <-


kept: dict[str, Any] = {}


@row(
    errors.OperationArgumentError, "add was called with a traced value of another run of a mod.",
    "compute it again from the arguments: a mod keeps no traced value between runs.", kind="score",
)  # fmt: skip
def value_of_another_run(s, b, h, q, k):
    if "bias" not in kept:
        trace(keeps_a_value, "score")
    return s + table[0, q] + kept["bias"]  # <-


def keeps_a_value(s, b, h, q, k):
    kept["bias"] = learned[0, k]
    return s


def not_taken(function: str, given: str) -> tuple[str, str]:
    return (
        f"torch.{function} was called with {given}.",
        f"give it what torch.{function} takes; a number in the place of a tensor is torch.tensor(number).",
    )


@row(errors.OperationArgumentError, *not_taken("where", "(traced value, traced value, str)"), kind="score")
def a_text_for_a_number(s, b, h, q, k):
    return torch.where(q >= k, s, "-inf")  # <-


@row(
    errors.OperationArgumentError,
    "torch.maximum was called with an argument of class int in the place of a tensor.",
    "write torch.clamp(q - k, min=dim).",
)
def a_number_for_a_tensor(b, h, q, k):
    return torch.maximum(q - k, dim) > 3  # <-


@row(
    errors.OperationArgumentError,
    *not_taken("logical_and", "an argument of class bool in the place of a tensor"),
)
def a_bool_for_a_tensor(b, h, q, k):
    return torch.logical_and(q > k, True)  # <-


@row(
    errors.UnknownOperationError, "torch.cuda is not an operation that flexmod can trace.",
    "leave it out: a mod computes on the device of the call.", kind="score",
)  # fmt: skip
def moved_to_a_device(s, b, h, q, k):
    return s.cuda()  # <-


@row(
    errors.OperationArgumentError, "bitwise_and was called with a function.",
    "call it with the positions, e.g. other_mask(b, h, q_idx, kv_idx).",
)  # fmt: skip
def and_a_function(b, h, q, k):
    return a_mask & (q > k)  # <-


@row(
    errors.ConcreteValueError, NUMPY.replace("tanh", "where"), "write torch.where(q > k, s, 0).", kind="score"
)
def a_choice_of_numpy(s, b, h, q, k):
    return np.where(q > k, s, 0)  # <-


@row(errors.ConcreteValueError, *value_of("the format '.2f'"), kind="score")
def formatted(s, b, h, q, k):
    return s if f"{s:.2f}" else 0  # <-


# numbers drawn outside of torch

DRAWN = (
    "draw them before the call and capture the tensor, e.g. noise[q_idx, kv_idx], or make them of the "
    "positions and a captured seed, as docs/operations.md shows."
)


def drawn(module: str) -> tuple[str, str]:
    return f"{module} draws random numbers inside a mod: they would change with the tiling.", DRAWN


@row(errors.RandomNumberError, *drawn("random"))
def random_of_python(b, h, q, k):
    limit = python_random.random()  # <-
    return q - k < limit


@row(errors.RandomNumberError, *drawn("numpy.random"))
def random_of_numpy(b, h, q, k):
    return q - k < np.random.rand()  # noqa: NPY002 # <-


own_generator, own_random = np.random.default_rng(0), python_random.Random(0)


@row(errors.RandomNumberError, *drawn("own_generator"), kind="score")
def random_of_a_generator(s, b, h, q, k):
    return s + own_generator.random()  # <-


@row(errors.RandomNumberError, *drawn("own_random"))
def random_of_an_object(b, h, q, k):
    return q - k < own_random.random()  # <-


own_state = np.random.RandomState(0)


def noise_of_a_helper() -> float:
    return own_generator.random() + own_state.rand()


@row(errors.RandomNumberError, *drawn("own_generator"), kind="score", line=False)
def random_of_a_helper(s, b, h, q, k):
    return s + noise_of_a_helper()


@row(errors.RandomNumberError, *drawn("own_state"))
def random_of_a_state(b, h, q, k):
    return q - k < own_state.rand()  # <-


ROWS["random_of_a_chain"] = Row(
    chain(chain(random_of_a_generator)), errors.RandomNumberError, *drawn("own_generator"), "score",
    line=False,
)

# arguments

OPERANDS = "give it traced scalars, numbers or elements of captured tensors."


@row(errors.OperationArgumentError, "add was called with a str.", OPERANDS)
def add_a_string(b, h, q, k):
    return q + "1" > k  # <-


@row(
    errors.OperationArgumentError, "mul was called with an ndarray.",
    "make a tensor of it before the call, table = torch.from_numpy(values), and index that: table[q_idx].",
)  # fmt: skip
def times_an_array(b, h, q, k):
    return array * q > k  # <-


@row(errors.OperationArgumentError, "ge was called with a NoneType.", OPERANDS)
def compare_with_none(b, h, q, k):
    return q >= None  # <-


@row(errors.OperationArgumentError, "mul was called with a complex.", OPERANDS, kind="score")
def complex_number(s, b, h, q, k):
    return s * 1j  # <-


CONVERTED = "cast the other operand first, e.g. with .to(torch.int64)."


@row(errors.OperationArgumentError, "where was called with 1000, which int8 does not hold.", CONVERTED)
def a_number_that_would_wrap(b, h, q_idx, kv_idx):
    return torch.where(kv_idx > 3, q_idx.to(torch.int8), 1000) > kv_idx  # <-


@row(errors.OperationArgumentError, "minimum was called with 256, which uint8 does not hold.", CONVERTED)
def a_limit_that_would_wrap(b, h, q_idx, kv_idx):
    return q_idx.to(torch.uint8).clamp(0, 256) > kv_idx  # <-


@row(errors.OperationArgumentError, "maximum was called with -1, which uint8 does not hold.", CONVERTED)
def a_negative_limit_that_would_wrap(b, h, q_idx, kv_idx):
    return q_idx.to(torch.uint8).clamp_min(-1) > kv_idx  # <-


@row(errors.OperationArgumentError, "full_like was called with 99999, which int16 does not hold.", CONVERTED)
def a_fill_that_would_wrap(b, h, q_idx, kv_idx):
    return q_idx.short().masked_fill(kv_idx > 3, 99999) > kv_idx  # <-


@row(errors.OperationArgumentError, "full_like was called with 32768, which int16 does not hold.", CONVERTED)
def a_constant_that_would_wrap(b, h, q_idx, kv_idx):
    return torch.full_like(q_idx.short(), 2**15) > kv_idx  # <-


@row(errors.OperationArgumentError, "full_like was called with 1000, which int8 does not hold.", CONVERTED)
def a_numpy_constant_that_would_wrap(b, h, q_idx, kv_idx):
    return torch.full_like(q_idx.to(torch.int8), np.int64(1000)) > kv_idx  # <-


NO_INTEGER = "full_like was called with inf, which int32 does not hold."


@row(errors.OperationArgumentError, NO_INTEGER, "cast the other operand first, e.g. with .to(torch.float64).")
def an_infinite_fill_of_integers(b, h, q_idx, kv_idx):
    return q_idx.masked_fill(kv_idx > 3, math.inf) > kv_idx  # <-


@row(errors.OperationArgumentError, "sub was called with 128, which int8 does not hold.", CONVERTED)
def a_factor_that_would_wrap(b, h, q_idx, kv_idx):
    return torch.sub(q_idx.to(torch.int8), 1, alpha=128) > kv_idx  # <-


BEYOND = "cast the other operand first, e.g. with .to(torch.float64), or use math.inf."


@row(
    errors.OperationArgumentError,
    "where was called with -1e+39, which float32 does not hold.",
    BEYOND,
    kind="score",
)
def a_score_beyond_float32(s, b, h, q, k):
    return torch.where(q >= k, s, -1e39)  # <-


@row(
    errors.OperationArgumentError,
    "where was called with 1e+39, which float32 does not hold.",
    BEYOND,
    kind="score",
)
def a_limit_beyond_float32(s, b, h, q, k):
    return s.clamp(max=1e39)  # <-


@row(
    errors.OperationArgumentError,
    "full_like was called with 100000, which float16 does not hold.",
    BEYOND,
    kind="score",
)
def a_constant_beyond_float16(s, b, h, q, k):
    return s + torch.full_like(s.half(), 100000)  # <-


@row(
    errors.OperationArgumentError,
    "add was called with 1e+39, which float32 does not hold.",
    BEYOND,
    kind="score",
)
def a_factor_beyond_float32(s, b, h, q, k):
    return torch.add(s, s, alpha=1e39)  # <-


@row(
    errors.OperationArgumentError,
    "torch.sub was called with integers and a floating-point alpha.",
    "multiply the operand yourself, e.g. torch.sub(x, 0.5 * y).",
)
def a_fraction_of_an_integer(b, h, q_idx, kv_idx):
    return torch.sub(q_idx, kv_idx, alpha=0.5) > 3  # <-


@row(
    errors.OperationArgumentError,
    "torch.add was called with numbers and a Boolean alpha.",
    "give it a number, e.g. alpha=1.",
    kind="score",
)
def a_truth_value_as_factor(s, b, h, q, k):
    return torch.add(s, q, alpha=True)  # <-


@row(
    errors.OperationArgumentError,
    "torch.add was called with the argument 'alpha'.",
    "give it 2 scalar operands and nothing else.",
    kind="score",
)
def a_factor_of_nothing(s, b, h, q, k):
    return s.add(alpha=3)  # <-


@row(
    errors.OperationArgumentError,
    "lt was called with 18446744073709551616, which needs more than 64 bits.",
    "use a smaller integer, or a float.",
)
def huge_number(b, h, q, k):
    return q < 2**64  # <-


@row(
    errors.OperationArgumentError,
    "sub was called with bool operands.",
    "cast them first, e.g. with .to(torch.int32).",
)
def difference_of_truths(b, h, q, k):
    return (q > 1) - (k > 1) > 0  # <-


@row(
    errors.OperationArgumentError,
    "bitwise_and was called with float32 operands.",
    "cast them first, e.g. with .to(torch.int32).",
    kind="score",
)
def bits_of_a_float(s, b, h, q, k):
    return s & 1  # <-


@row(
    errors.OperationArgumentError,
    "where was called with int32 operands.",
    "cast them first, e.g. with .to(torch.bool).",
    kind="score",
)
def where_of_an_integer(s, b, h, q, k):
    return torch.where(q, s, 0)  # <-


@row(
    errors.OperationArgumentError,
    "pow was called with integers and the negative exponent -1.",
    "use a floating-point exponent, -1.0.",
    kind="score",
)
def integer_to_a_negative_power(s, b, h, q, k):
    return s + q**-1  # <-


@row(
    errors.OperationArgumentError,
    "torch.where was called with 1 operand.",
    "give it 3 scalar operands and nothing else.",
)
def where_of_one(b, h, q, k):
    return torch.where(q > k)  # <-


@row(
    errors.OperationArgumentError,
    "torch.div was called with rounding_mode='up'.",
    'give rounding_mode="floor" or "trunc", or leave it out.',
)
def unknown_rounding(b, h, q, k):
    return torch.div(q, 2, rounding_mode="up") > k  # <-


@row(
    errors.OperationArgumentError,
    "torch.round was called with the argument 'decimals'.",
    "give it 1 scalar operand and nothing else.",
    kind="score",
)
def round_to_decimals(s, b, h, q, k):
    return torch.round(s, decimals=2)  # <-


# tensors where a scalar is needed


@row(
    errors.NotScalarError,
    "add was given doc, of shape (8,), where a scalar is needed: a mod works on one (query, key) pair.",
    "index it down to one element, e.g. doc[kv_idx].",
)
def a_whole_tensor(b, h, q, k):
    return q + doc > k  # <-


@row(
    errors.NotScalarError,
    "eq was given table, of shape (8,), where a scalar is needed: a mod works on one (query, key) pair.",
    "index it down to one element, e.g. table[..., kv_idx].",
)
def comparison_of_a_row(b, h, q, k):
    return table[h] == 1  # <-


@row(
    errors.NotScalarError,
    "add was given table, of shape (4, 8), where a scalar is needed: a mod works on one (query, key) pair.",
    "index it down to one element, e.g. table[q_idx, kv_idx].",
    kind="score",
)
def sum_of_tensors(s, b, h, q, k):
    return torch.add(s, table)  # <-


@row(
    errors.NotScalarError,
    "the result of mask_mod result_is_a_row was given table, of shape (8,), where a scalar is needed: "
    "a mod works on one (query, key) pair.",
    "index it down to one element, e.g. table[..., kv_idx].",
)
def result_is_a_row(b, h, q, k):
    return table[h]  # <-


@row(
    errors.OperationArgumentError,
    f"the result of score_mod result_is_too_large was called with {2**70}, which needs more than 64 bits.",
    "use a smaller integer, or a float.",
    kind="score",
)
def result_is_too_large(s, b, h, q, k):
    return 2**70  # <-


class ResultIsATensor(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.doc = doc

    def forward(self, s, b, h, q, k):
        return self.doc  # <-


class ResultOfAnObject:
    def __call__(self, b, h, q, k):
        pass  # <-


def result_of_a_partial(which, s, b, h, q, k):
    return which  # <-


DOC = (
    "given doc, of shape (8,), where a scalar is needed: a mod works on one (query, key) pair.",
    "index it down to one element, e.g. doc[kv_idx].",
    "score",
)
ROWS["result_of_a_module"] = Row(
    ResultIsATensor(), errors.NotScalarError,
    f"the result of score_mod ResultIsATensor was {DOC[0]}", *DOC[1:],
    line=ResultIsATensor.forward,
)  # fmt: skip
ROWS["result_of_a_partial"] = Row(
    functools.partial(result_of_a_partial, doc), errors.NotScalarError,
    "the result of score_mod result_of_a_partial was " + DOC[0].replace("doc", "argument0"),
    DOC[1].replace("doc", "argument0"), "score", line=result_of_a_partial,
)  # fmt: skip
ROWS["result_of_an_object"] = Row(
    ResultOfAnObject(), errors.NoResultError, "mask_mod ResultOfAnObject returned None.", "return one bool.",
    line=ResultOfAnObject.__call__,
)  # fmt: skip


@row(
    errors.NotScalarError,
    "sub was given table, of shape (8,), where a scalar is needed: a mod works on one (query, key) pair.",
    "index it down to one element, e.g. table[..., kv_idx].",
)
def result_of_a_vector(b, h, q, k):
    return (table[h] - 1).abs() > 3  # <-


@row(
    errors.NotScalarError,
    "torch.stack makes a tensor, of shape (2,), where a scalar is needed: "
    "a mod works on one (query, key) pair.",
    "index it down to one element, e.g. torch.stack(...).sum(-1).",
    kind="score",
)
def stacked(s, b, h, q, k):
    return torch.stack([s, s])  # <-


@row(
    errors.OperationArgumentError,
    "mul was called with shapes (8,), (2,), which do not broadcast.",
    "index them down to rows of one length.",
)
def rows_of_two_lengths(b, h, q, k):
    return (table[h] * torch.stack([q, k])).any()  # <-


@row(
    errors.CaptureIndexError,
    "a short vector, of shape (2,), is indexed with more than numbers and slices.",
    "index the captured tensor itself.",
)
def vector_at_a_position(b, h, q, k):
    return torch.stack([q, k])[h] > 0  # <-


@row(
    errors.CaptureIndexError,
    "a short vector, of shape (2,), is indexed with a number outside of it, or with an empty slice.",
    "select what it has.",
)
def vector_past_its_end(b, h, q, k):
    return torch.stack([q, k])[2] > 0  # <-


@row(
    errors.CaptureIndexError,
    "a short vector, of shape (2,), is indexed with a number outside of it, or with an empty slice.",
    "select what it has.",
)
def nothing_of_a_vector(b, h, q, k):
    return (torch.stack([q, k])[2:] > 0).any()  # <-


@row(
    errors.NotScalarError,
    "new_zeros makes a tensor, of shape (3,), where a scalar is needed: "
    "a mod works on one (query, key) pair.",
    "index it down to one element, e.g. x.new_zeros(()).",
)
def a_new_tensor(b, h, q, k):
    return q.new_zeros((3,)) > k  # <-


# indices


def indexed(name: str, shape: str, problem: str) -> str:
    return f"{name}, of shape {shape}, is indexed {problem}."


@row(
    errors.CaptureIndexError,
    indexed("doc", "(8,)", "with a slice"),
    "index one element at a time, or slice the tensor before the call.",
)
def a_slice(b, h, q, k):
    return doc[q:k] > 0  # <-


@row(
    errors.CaptureIndexError,
    indexed("table", "(8,)", "with a slice"),
    "index one element at a time, or slice the tensor before the call.",
)
def slice_of_a_row(b, h, q, k):
    return table[h][2:][q] > 0  # <-


@row(
    errors.NotScalarError,
    "an index with None makes a tensor, of shape (1,), where a scalar is needed: a mod works on one (query, "
    "key) pair.",
    "index it down to one element, e.g. x.squeeze(-1) or x.any(-1).",
)
def a_new_dimension(b, h, q, k):
    return doc[None, q] > 0  # <-


@row(errors.CaptureIndexError, indexed("doc", "(8,)", "with 2 indices"), "give at most 1.")
def too_many_indices(b, h, q, k):
    return doc[q, k] > 0  # <-


@row(errors.CaptureIndexError, indexed("table", "(8,)", "with 9"), "use an index from -8 to 7.")
def out_of_range(b, h, q, k):
    return table[h][9] > 0  # <-


@row(
    errors.CaptureIndexError,
    indexed("a traced scalar", "()", "like a tensor"),
    "use it as it is: it has no dimensions.",
)
def an_index_of_a_scalar(b, h, q, k):
    return q[0] > k  # <-


@row(
    errors.IndexDtypeError,
    "doc is indexed with a float32 value; an index is an integer.",
    "cast it, e.g. doc[index.to(torch.int32)].",
)
def a_float_index(b, h, q, k):
    return doc[q / 2] > k  # <-


@row(
    errors.IndexDtypeError,
    "doc is indexed with a bool value; an index is an integer.",
    "cast it, e.g. doc[index.to(torch.int32)].",
)
def a_bool_index(b, h, q, k):
    return doc[q > k] > k  # <-


@row(errors.OperationArgumentError, "an index of doc was called with a list.", OPERANDS)
def a_list_of_indices(b, h, q, k):
    return doc[[q, k]] > k  # <-


# dtypes


@row(
    errors.ModDtypeError,
    "complex_table has dtype complex64, torch.strided, which a mod cannot use; "
    "it takes strided bool, integer and floating-point tensors.",
    "convert it before the call.",
    kind="score",
)
def a_complex_capture(s, b, h, q, k):
    return s + complex_table[q]  # <-


@row(
    errors.ModDtypeError,
    "nested has dtype float32, nested, which a mod cannot use; it takes strided bool, integer and "
    "floating-point tensors.",
    "convert it before the call.",
)
def a_whole_nested_tensor(b, h, q, k):
    return q + nested > k  # <-


@row(
    errors.ModDtypeError,
    "sparse has dtype float32, torch.sparse_coo, which a mod cannot use; "
    "it takes strided bool, integer and floating-point tensors.",
    "convert it before the call.",
    kind="score",
)
def a_sparse_capture(s, b, h, q, k):
    return s + sparse[q, k]  # <-


@row(
    errors.ModDtypeError,
    "the target of a cast has dtype torch.complex64, which a mod cannot use; "
    "it takes bool, integer and floating-point dtypes.",
    "convert it before the call.",
    kind="score",
)
def a_complex_cast(s, b, h, q, k):
    return s.to(torch.complex64)  # <-


# results


@row(
    errors.MaskResultError,
    "mask_mod returned int32; a mask says True or False.",
    "return a comparison, e.g. q_idx >= kv_idx. Numbers to add to scores are a score_mod, lambda score, b, "
    "h, q_idx, kv_idx: score + ...",
)
def an_integer_mask(b, h, q, k):
    return q - k  # <-


@row(
    errors.ScoreResultError,
    "score_mod returned bool; a score is a floating-point number.",
    "return the changed score, e.g. torch.where(condition, score, -float('inf')).",
    kind="score",
)
def a_bool_score(s, b, h, q, k):
    return q >= k  # <-


@row(
    errors.MaskResultError,
    "mask_mod returned float; a mask says True or False.",
    "return a comparison, e.g. q_idx >= kv_idx. Numbers to add to scores are a score_mod, lambda score, b, "
    "h, q_idx, kv_idx: score + ...",
)
def a_number_for_a_mask(b, h, q, k):
    return 1.0  # <-


@row(
    errors.ScoreResultError,
    "score_mod returned bool; a score is a floating-point number.",
    "return the changed score, e.g. torch.where(condition, score, -float('inf')).",
    kind="score",
)
def a_constant_bool_score(s, b, h, q, k):
    return True  # <-


@row(errors.NoResultError, "mask_mod no_result returned None.", "return one bool.")
def no_result(b, h, q, k):
    pass  # <-


@row(errors.NoResultError, "mask_mod a_generator returned a generator.", "return one bool.")
def a_generator(b, h, q, k):
    return (x > k for x in (q, h))  # <-


@row(
    errors.NoResultError,
    "score_mod two_results returned a tuple.",
    "return the changed score.",
    kind="score",
)
def two_results(s, b, h, q, k):
    return s, s  # <-


# the function itself


@row(
    errors.ModArityError,
    "mask_mod too_few takes 3 positional arguments without defaults; a score_mod takes 5 "
    "(score, b, h, q_idx, kv_idx) and a mask_mod 4 (b, h, q_idx, kv_idx).",
    "write def mask_mod(b, h, q_idx, kv_idx): return q_idx >= kv_idx.",
    line=False,
)
def too_few(b, q, k):
    return q >= k


@row(
    errors.ModArityError,
    "score_mod a_mask takes 4 positional arguments without defaults; a score_mod takes 5 "
    "(score, b, h, q_idx, kv_idx) and a mask_mod 4 (b, h, q_idx, kv_idx).",
    "write def score_mod(score, b, h, q_idx, kv_idx): return score, or give the mask as "
    "block_mask=create_block_mask(a_mask, B, H, Q_LEN, KV_LEN), to flexmod.compile as mask_mod=a_mask.",
    kind="score",
    line=False,
)
def a_mask(b, h, q, k):
    return q >= k


ROWS["not a function"] = Row(
    3,  # type: ignore[arg-type]
    errors.NotCallable,
    "mask_mod is an int, which cannot be called.",
    "pass a function of scalars, e.g. def mask_mod(b, h, q_idx, kv_idx): return q_idx >= kv_idx.",
    line=False,
)


@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_message(case: Row) -> None:
    at = [f"  at {marked_line(case.mod if case.line is True else case.line)}"] if case.line else []
    with pytest.raises(case.error) as caught:
        trace(case.mod, case.kind)
    if caught.value.where is not None and not case.line:  # the line that asked for the trace
        at = [f"  at {caught.value.where}"]
    assert str(caught.value) == "\n".join([case.what, *at, f"  Instead: {case.instead}"])


def test_a_mod_that_is_vmapped_itself() -> None:
    vmapped = torch.vmap(lambda s, b, h, q, k: s, in_dims=(0, None, None, None, None))
    with pytest.raises(errors.FlexmodError) as caught:
        trace(functools.partial(lambda mod, s, b, h, q, k: mod(s, b, h, q, k), vmapped), "score")
    assert str(caught.value).startswith(CALLED)


def test_an_error_of_the_users_own_is_left_alone() -> None:
    def mod(s, b, h, q, k):
        raise ValueError("no such head")

    with pytest.raises(ValueError, match="no such head") as caught:
        trace(mod, "score")
    assert type(caught.value) is ValueError


# hasattr() swallows the error of an attribute; the other one has no line
MAY_BE_SWALLOWED = (errors.UnknownAttributeError, errors.ModArityError)


def test_a_mod_cannot_swallow_a_refusal() -> None:
    """It would get a graph with one branch of an `if`, or without the refused part."""
    swallowed: list[Exception] = []

    def swallowing(mod: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return mod(*arguments)
        except errors.FlexmodError as error:
            swallowed.append(error)
        return arguments[-1] == 0 if len(arguments) == 4 else arguments[0]

    for case in ROWS.values():
        swallowed.clear()
        if callable(case.mod) and case.error not in MAY_BE_SWALLOWED:
            with pytest.raises(case.error) as caught:
                trace(lambda *x, mod=case.mod: swallowing(mod, *x), case.kind)
            assert not swallowed or caught.value is swallowed[0]


def test_an_error_of_the_users_own_may_be_caught() -> None:
    def mod(s, b, h, q, k):
        with contextlib.suppress(KeyError):
            raise KeyError("no such head")
        return s + row[q].sum()

    row = torch.zeros(8, 4)
    trace(mod, "score")


def test_what_has_no_gradient_may_turn_gradients_off() -> None:
    def mod(s, b, h, q, k):
        with torch.no_grad():
            distance, positive = (q - k).float().abs(), learned[h, q] > 0
            rate = table[h, q] * 2
        return torch.where(positive, s * rate, s - distance)

    def mask(b, h, q, k):
        with torch.no_grad():
            return table[h, q] + 1 > k

    trace(mod, "score"), trace(mask, "mask")


@pytest.mark.parametrize("of", [lambda mod: functools.partial(flex_attention, score_mod=mod), compile])
def test_a_capture_without_gradient_may_get_one_later(of: Callable[..., Any]) -> None:
    slopes, x = torch.ones(2), torch.randn(1, 2, 16, 16, requires_grad=True)

    def mod(s, b, h, q, k):
        with torch.no_grad():
            rate = slopes[h] * 2
        return s * rate

    call = of(mod)
    call(x, x, x).sum().backward()
    slopes.requires_grad_()
    with pytest.raises(errors.UnknownOperationError, match="a part without gradient"):
        call(x, x, x)


@pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode])
def test_gradients_are_missed_in_every_state_of_the_caller(state: Callable[[], Any]) -> None:
    """The trace of an evaluation may serve a training step later."""
    with state():
        trace(lambda s, b, h, q, k: s * 2 + table[h, q], "score")
        with pytest.raises(errors.UnknownOperationError, match="a part without gradient"):
            trace(ROWS["under_no_grad"].mod, "score")


def test_a_mod_without_a_line_of_its_own() -> None:
    """The line of the call is named."""
    with pytest.raises(errors.UnknownOperationError, match=r"test_trace_errors\.py:\d+: trace\("):
        trace(torch.vmap(lambda s, b, h, q, k: s * 2), "score")


def test_code_without_numbers_of_lines() -> None:
    """Generated code may lack them."""

    def truth(b, h, q, k):
        return bool(q > k)

    def formats(b, h, q, k):
        return "%d" % q  # noqa: UP031

    for mod in (truth, formats):
        code = mod.__code__.replace(co_linetable=b"")
        line = rf"test_trace_errors\.py:{code.co_firstlineno}: def {mod.__name__}"
        with pytest.raises(errors.FlexmodError, match=line):
            trace(types.FunctionType(code, globals()), "mask")


def test_lines_of_a_module_in_a_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("packed_mods.py", "def near(b, h, q, k):\n    return q >= k and q - k < 9\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))
    near = importlib.import_module("packed_mods").near
    with pytest.raises(errors.ControlFlowError) as caught:
        trace(near, "mask")
    assert str(caught.value).endswith(
        "packed_mods.py:2: return q >= k and q - k < 9\n  Instead: write (q >= k) & (q - k < 9)."
    )


def test_unknown_keywords_of_composed_functions() -> None:
    with pytest.raises(
        errors.OperationArgumentError, match="contiguous was called with arguments that it does not take"
    ):
        trace(lambda s, b, h, q, k: s.contiguous(memory_format=torch.contiguous_format), "score")


def test_arity_without_a_kind() -> None:
    with pytest.raises(errors.ModArityError) as caught:
        mod_kind(functools.partial(too_few, 1))
    assert str(caught.value) == (
        "too_few takes 2 positional arguments without defaults; a score_mod takes 5 "
        "(score, b, h, q_idx, kv_idx) and a mask_mod 4 (b, h, q_idx, kv_idx).\n"
        "  Instead: write def mask_mod(b, h, q_idx, kv_idx): return q_idx >= kv_idx, or "
        "def score_mod(score, b, h, q_idx, kv_idx): return score."
    )


def test_an_operation_without_a_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_derivative(s, b, h, q, k):
        return torch.sin(s)  # <-

    monkeypatch.setitem(
        ops.OPS, "sin", ops.Op("sin", ("sin",), "result", ops.promote_float, "tl.sin({0})", torch.sin)
    )
    with pytest.raises(errors.NoDerivativeError) as caught:
        differentiate(trace(no_derivative, "score").graph)
    assert str(caught.value) == (
        "sin has no derivative in flexmod, and a gradient through it is asked for.\n"
        f"  at {marked_line(no_derivative)}\n"
        "  Instead: write it with differentiable operations, or detach what it reads."
    )


def test_the_line_is_the_users_own_helpers() -> None:
    def helper(q, k):
        return bool(q > k)  # <-

    with pytest.raises(errors.ControlFlowError) as caught:
        trace(lambda b, h, q, k: helper(q, k), "mask")
    assert f"  at {marked_line(helper)}\n" in str(caught.value)


def test_captured_tensors_are_left_alone() -> None:
    """A write is refused before it is done."""
    before = doc.clone(), table.clone()
    for name in (
        "write_to_a_capture",
        "write_at_an_index",
        "add_in_place",
        "out_argument",
        "write_to_a_row",
        "or_into_a_capture",
    ):
        with pytest.raises(errors.MutationError):
            trace(ROWS[name].mod, "mask")
    assert all(map(torch.equal, before, (doc, table)))


def test_names_of_random_operators_are_not_random_numbers() -> None:
    """`__rand__` is the & of a number with a tensor."""
    trace(lambda b, h, q, k: (True & torch.tensor(True)) & (q > k), "mask")


def test_every_refusal_of_a_mod_is_here() -> None:
    source = inspect.getsource(errors.mods)
    classes = {line.split()[1].split("(")[0] for line in source.splitlines() if line.startswith("class ")}
    elsewhere = {
        "CaptureBoundsError",
        "MaskCaptureGradientError",
        "LibraryArgumentError",
        "CallSizeError",
        "NoDerivativeError",
        "NotPicklableError",
        "NoSignatureError",
        "NotMadeError",
    }
    assert classes - elsewhere == {r.error.__name__ for r in itertools.chain(ROWS.values())}


def test_a_lambda_in_a_line_that_goes_on() -> None:
    """Its own expression is rewritten, not the call around it."""
    with pytest.raises(errors.ControlFlowError) as raised:
        trace(lambda b, h, q, k: q >= k and q < 5, "mask"
              )  # fmt: skip
    assert str(raised.value).endswith("Instead: write (q >= k) & (q < 5).")


@functools.lru_cache
def doubled(x: Any) -> Any:
    return x * 2


def test_a_cached_helper_may_take_traced_values() -> None:
    assert str(trace(lambda b, h, q, k: doubled(q) >= k, "mask").graph.result.op) == "ge"


def test_numbers_of_numpy_are_numbers_on_either_side() -> None:
    def left(s, b, h, q, k):
        return np.float32(2.0) * s + np.int64(3) * q - np.float64(1) / (k + 1) + np.int64(7) % (q + 1)

    def right(s, b, h, q, k):
        return 2.0 * s + 3 * q - 1.0 / (k + 1) + 7 % (q + 1)

    assert trace(left, "score").graph == trace(right, "score").graph


def test_a_printed_value_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def printing(b, h, q_idx, kv_idx):
        print(q_idx, table[h], doc[q_idx] > 0)
        return q_idx >= kv_idx

    trace(printing, "mask")
    shown = "Proxy(q_idx: int32) Proxy(a part of table: float32 [8]) Proxy(gt: bool)"
    assert capsys.readouterr().out.strip() == shown


def test_a_generator_that_a_mod_leaves_alone_may_be_captured() -> None:
    trace(lambda b, h, q, k, generator=own_generator: q >= k, "mask")


@pytest.mark.parametrize("name", ["torch._inductor.runtime.compile_tasks.c2", "torch.fx"])
def test_the_line_is_not_one_that_torch_wrote(name: str) -> None:
    """Inductor's modules lie in its cache folder, and call themselves torch's; torch.fx has no file."""
    scope: dict[str, Any] = {"__name__": name}
    file = "<eval_with_key>.1" if name == "torch.fx" else "/tmp/torchinductor_me/c2.py"
    exec(builtins.compile("def call(find):\n    return find()\n", file, "exec"), scope)
    where = scope["call"](user_line)  # here
    assert where is not None and where.file == __file__ and where.text.endswith("# here")

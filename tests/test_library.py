"""flexmod inside torch.compile and torch.export: one graph, the same results, nothing compiled twice."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from tiers import long_but
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import checkpoint

from flexmod import AuxRequest, BlockMask, create_block_mask, errors, flex_attention, masks, mods
from flexmod.block_mask import build, generated
from flexmod.block_mask.tiles import MaskLayout
from flexmod.calls import library
from flexmod.ir.formulas import COMPOSED, OTHER_NAMES
from flexmod.ir.graph import Graph, GraphBuilder
from flexmod.ir.ops import BY_TORCH_NAME
from flexmod.ir.record import REMEMBERED, graph_of, numbered, record
from flexmod.ir.trace import trace
from flexmod.runtime import private_torch

HEADS = 4
LENGTH = 40
INTERPRET = {"BACKEND": "INTERPRET"}
WINDOW = masks.sliding_window(9)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A function in one graph, forward and backward; `count` is how often it was compiled."""

    def __init__(self, function: Callable[..., Any], backend: str = "aot_eager") -> None:
        self._counter = CompileCounterWithBackend(backend)
        self._plain = function
        self._compiled = torch.compile(function, fullgraph=True, backend=self._counter)

    @property
    def count(self) -> int:
        return self._counter.frame_count

    def check(self, *arguments: Any) -> None:
        """The results and gradients equal the ones that the function itself returns."""
        leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
        results = [function(*arguments) for function in (self._compiled, self._plain)]
        for result, plain in zip(*(x if isinstance(x, tuple) else (x,) for x in results), strict=True):
            close(result, plain)
        losses = [sum(x.sin().sum() for x in (r if isinstance(r, tuple) else (r,))) for r in results]
        gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
        for gradient, plain in zip(*gradients, strict=True):
            close(gradient, plain)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def inputs(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(2, heads, length, 16) for heads in (HEADS, 2, 2)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(*arguments: Any, **options: Any) -> Any:
    return flex_attention(*arguments, enable_gqa=True, **options)


def window_mask(length: int = LENGTH, keys: int | None = None) -> Any:
    return create_block_mask(WINDOW, None, None, length, keys or length, "cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (None, torch.float64),
        pytest.param(None, torch.bfloat16, marks=pytest.mark.every),
        pytest.param(INTERPRET, torch.float32, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_call_with_everything(options: Any, dtype: torch.dtype) -> None:
    """A mask made outside, a learned score mod, the lse and the largest score, among other operations."""
    mask = window_mask()

    def block(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, ...]:
        table = slopes.exp()

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score - table[h] * (q_idx - kv_idx)

        out, aux = attend(
            q * 2, k, v, score_mod, mask, kernel_options=options, return_aux=AuxRequest(True, True)
        )
        return out * 3, aux.lse, aux.max_scores.detach()

    compiled = Compiled(block)
    for _ in range(1 if options else 2):  # the interpreter is slow
        compiled.check(*inputs(dtype=dtype), torch.randn(HEADS, requires_grad=True))
    assert compiled.count == 1


@pytest.mark.parametrize("made", ["inside", pytest.param("outside", marks=pytest.mark.long)])
def test_lengths_become_symbols(made: str) -> None:
    """From the second length on, with the mask of each as an argument, or made inside."""

    def inside(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (ids[b, q_idx] == ids[b][kv_idx]) & ~(q_idx < kv_idx)

        mask = create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], q.device, BLOCK_SIZE=16)
        return attend(q, k, v, block_mask=mask)

    def outside(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
        return attend(q, k, v, mods.softcap(2.0), mask)

    function, argument = (inside, documents) if made == "inside" else (outside, window_mask)
    compiled = Compiled(function)
    for length in (40, 57, 73):
        compiled.check(*inputs(length), argument(length))
    assert compiled.count == 2


def documents(length: int) -> Tensor:
    return torch.randint(0, 3, (2, length)).sort(-1).values


def test_new_tensors_and_numbers_compile_nothing() -> None:
    """Masks with other documents, closures over other tensors; integers from the second value on."""

    def function(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Any) -> Any:
        return attend(q, k, v, score_mod, mask)

    def closure(table: Tensor, reach: int) -> Any:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return torch.where(q_idx - kv_idx < reach, score + table[h], -torch.inf)

        return score_mod

    compiled = Compiled(function)
    for number, reach in enumerate((5, 5, 6, 9)):
        ids = documents(LENGTH)
        mask = create_block_mask(masks.document(ids), 2, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=LENGTH)
        compiled.check(*inputs(), closure(torch.randn(HEADS), reach), mask)
        assert compiled.count == (1 if number < 2 else 2)


def test_a_mask_that_was_printed_or_written_to() -> None:
    """Its lists are there beside its runs; where they were written to, they count."""
    mask = window_mask()
    assert "sparsity" in repr(mask)
    compiled = Compiled(lambda q, k, v, mask: attend(q, k, v, block_mask=mask))
    compiled.check(*inputs(), mask)
    before = attend(*inputs(), block_mask=mask)
    mask.kv_num_blocks.zero_()
    mask.full_kv_num_blocks.zero_()
    compiled.check(*inputs(), mask)
    assert attend(*inputs(), block_mask=mask).eq(0).all() and before.ne(0).any()


def same_documents(ids: Tensor) -> Any:
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def test_a_write_to_what_a_mask_captures_reaches_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between calls and in the graph, for a mask that is an argument, a closure, or made inside."""
    searches = []
    find_tiles = build.find_tiles
    monkeypatch.setattr(build, "find_tiles", lambda *x: searches.append(x) or find_tiles(*x))
    ids, start = documents(LENGTH)[0], torch.tensor([3])
    mask = create_block_mask(same_documents(ids), None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    later = create_block_mask(
        masks.causal(), None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16, q_offset=start
    )

    def inside(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, new: Tensor) -> Any:
        ids = ids.clone()
        made = create_block_mask(same_documents(ids), None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
        ids.copy_(new)
        return attend(q, k, v, None, made)

    def writes(q: Tensor, k: Tensor, v: Tensor, mask: Any, ids: Tensor, new: Tensor) -> Any:
        ids.copy_(new)
        return attend(q, k, v, None, mask)

    Compiled(inside).check(*inputs(), ids, documents(LENGTH)[0])
    Compiled(writes).check(*inputs(), mask, ids, documents(LENGTH)[0])
    as_argument = Compiled(lambda q, k, v, mask: attend(q, k, v, None, mask))
    as_closure = Compiled(lambda q, k, v: attend(q, k, v, None, mask))
    for number in range(2):
        ids.copy_(torch.arange(LENGTH) // (3 + 5 * number))
        start.fill_(9 * number)
        for call in (lambda: as_argument.check(*inputs(), mask), lambda: as_closure.check(*inputs())):
            call()  # the plain function, which runs second, refreshes the mask
            ids.add_(1)
            call()
            searches.clear()
            call()
            assert not searches
        as_argument.check(*inputs(), later)


def test_tiles_found_again_are_of_the_mask_s_lengths() -> None:
    """A copy of other lengths has the same memory."""
    start, case = torch.tensor([3]), inputs(32)
    mask = create_block_mask(lambda b, h, q, k: k >= start[0], None, None, 32, 32, "cpu", BLOCK_SIZE=16)
    shorter = copy.copy(mask)
    shorter.seq_lengths = 25, 25
    compiled = torch.compile(lambda q, k, v, mask: attend(q, k, v, None, mask), backend="aot_eager")
    start.fill_(30)
    none = compiled(*[x[:, :, :25] for x in case], shorter)
    assert none.eq(0).all()
    close(compiled(*case, mask), attend(*case, lambda s, b, h, q, k: torch.where(k >= 30, s, -torch.inf)))


def test_a_mask_from_a_graph_sees_writes_before_its_first_use() -> None:
    ids = torch.arange(LENGTH) // 9
    made = torch.compile(
        lambda ids: create_block_mask(same_documents(ids), None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16),
        fullgraph=True, backend="aot_eager",
    )(ids)  # fmt: skip
    ids.zero_()
    close(attend(*(case := inputs()), None, made), attend(*case))


def test_masks_of_torch_and_of_lists() -> None:
    theirs = torch_flex.create_block_mask(WINDOW, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    ours = window_mask()
    lists = type(ours).from_kv_blocks(ours.kv_num_blocks, ours.kv_indices, BLOCK_SIZE=16, mask_mod=WINDOW)
    for mask in (theirs, lists):
        lengths = mask.seq_lengths
        q, k, v = (inputs(n)[i] for i, n in enumerate((lengths[0], lengths[1], lengths[1])))
        Compiled(lambda q, k, v, mask=mask: attend(q, k, v, block_mask=mask)).check(q, k, v)


def test_layouts_are_kept() -> None:
    """[B, M, H, D] in memory, as models have it."""

    def function(x: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(x.transpose(1, 2), k, v).transpose(1, 2)

    x = torch.randn(2, LENGTH, HEADS, 16, requires_grad=True)
    result = torch.compile(function, fullgraph=True, backend="aot_eager")(x, *inputs()[1:])
    assert result.is_contiguous()


def test_checkpoints() -> None:
    mask = window_mask()

    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        def block(q: Tensor, k: Tensor, v: Tensor) -> Any:
            def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return score + slopes[h] * kv_idx

            return attend(q.cos(), k, v, score_mod, mask)

        return checkpoint(block, q, k, v, use_reentrant=False)

    compiled = Compiled(function)
    compiled.check(*inputs(), torch.rand(HEADS, requires_grad=True))
    assert compiled.count == 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(HEADS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + self.slopes[h] * (q_idx - kv_idx)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

        mask = create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], q.device, BLOCK_SIZE=16)
        return attend(q, k, v, score_mod, mask).sin()


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", long_but([True], [False, True]))
def test_export_with_a_length_that_is_a_symbol(strict: bool) -> None:
    model, length = Model(), torch.export.Dim("length", min=20, max=4000)
    shapes = ({2: length}, {2: length}, {2: length}, {1: length})
    example = (*(x.detach() for x in inputs()), documents(LENGTH))
    exported = torch.export.export(model, example, strict=strict, dynamic_shapes=shapes).module()
    for n in (LENGTH, 57):
        case = (*(x.detach() for x in inputs(n)), documents(n))
        assert torch.equal(exported(*case), model(*case))


class Windowed(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, None, window_mask(q.shape[2], k.shape[2]))


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("masked", [True, False])
def test_a_symbol_beside_a_number_of_the_same_size(masked: bool, axis: int) -> None:
    """Keys and values of a cache have sizes that are numbers, queries have symbols."""
    query, (key, value) = inputs()[0], (x.detach() for x in inputs()[1:])
    torch._dynamo.maybe_mark_dynamic(query, axis)
    mask = create_block_mask(lambda b, h, q, k: (q + b) % 2 == k % 2, 2, HEADS, LENGTH, LENGTH, "cpu")
    given = {"block_mask": mask} if masked else {"q_offset": torch.tensor([3, 20])}
    Compiled(lambda q: attend(q, key, value, mods.alibi(HEADS), **given)).check(query)


def test_values_of_fewer_heads_whose_number_is_a_symbol() -> None:
    query, key = (x.detach() for x in inputs()[:2])
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    value = torch.cat([key, key], 1)
    close(compiled(query, key, value), attend(query, key, value))


def test_flags_from_sizes_that_are_symbols() -> None:
    """A comparison of two symbols is a symbol too, and the graph's constants must be Python's own."""
    given = [x.detach() for x in inputs()]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shared = q.shape[1] != k.shape[1]
        sizes = None, None, q.shape[2], k.shape[2]
        mask = create_block_mask(WINDOW, *sizes, "cpu", BLOCK_SIZE=16, separate_full_blocks=shared)
        wanted, options = AuxRequest(max_scores=shared), {"deterministic": shared}
        out, aux = flex_attention(q, k, v, None, mask, None, shared, False, options, return_aux=wanted)
        return out, aux.max_scores

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for found, plain in zip(compiled(*given), call(*given), strict=True):
        close(found, plain)


def test_a_table_of_the_default_device_in_a_graph() -> None:
    Compiled(lambda q, k, v: attend(q, k, v, mods.sandwich(HEADS, LENGTH))).check(*inputs())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_repeats_the_message_of_a_mistake(dynamic: bool) -> None:
    query, key = (x.detach() for x in inputs()[:2])
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=dynamic)
    for wrong, message in ((key[..., :8], "query has head_dim 16 but key has 8"), (key[0], "key has 3 dim")):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            compiled(query, wrong, key)


def test_export_with_two_lengths_in_any_ratio() -> None:
    """The room for a mask's runs is no guard that one of the lengths has more tiles."""
    queries, keys = (torch.export.Dim(name, min=20, max=4000) for name in ("queries", "keys"))
    cases = [
        tuple(x.detach() for x in (inputs(n)[0], *inputs(m)[1:]))
        for n, m in ((40, 71), (71, 40), (35, 77), (57, 57))
    ]
    shapes = ({2: queries}, {2: keys}, {2: keys})
    exported = torch.export.export(Windowed(), cases[0], strict=True, dynamic_shapes=shapes).module()
    for case in cases:
        assert torch.equal(exported(*case), Windowed()(*case))


@pytest.mark.parametrize(
    "options", [pytest.param(None, marks=pytest.mark.every), INTERPRET], ids=["cpu", "interpret"]
)
def test_masks_made_inside_for_batches_and_heads(options: Any) -> None:
    """Each mask_mod reads one of the two: a kernel finds the other's tiles too."""

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Any:
        results = []
        for mask_mod in (
            lambda b, h, q_idx, kv_idx: q_idx + 17 * b >= kv_idx,
            lambda b, h, q_idx, kv_idx: q_idx + 17 * h >= kv_idx,
        ):
            mask = create_block_mask(mask_mod, 2, 2, 20, 20, "cpu", BLOCK_SIZE=16)
            results.append(attend(q, k, v, None, mask, kernel_options=options))
        return tuple(results)

    q, k, v = (x.detach() for x in inputs(20))
    Compiled(attended).check(*(x.requires_grad_() for x in (q[:, :2], k[:, :1], v[:, :1])))


class Scored(nn.Module):
    def __init__(self, mod: Any) -> None:
        super().__init__()
        self.mod = mod

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, self.mod)


EXPORTED: dict[str, Callable[..., Any]] = {
    "numbers of numpy": lambda s, b, h, q, k: s * np.float32(0.5) + np.int64(3) * (q - k),
    "dimensions": lambda s, b, h, q, k: s * (2 if q.ndim == 0 and s.shape == () else 3),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_mod_is_recorded(name: str) -> None:
    """The program has the mod's operations as text, so that it runs in any process."""
    case, model = [x.detach() for x in inputs(16)], Scored(EXPORTED[name])
    exported = torch.export.export(model, tuple(case))
    close(exported.module()(*case), model(*case))
    (node,) = [n for n in exported.graph.nodes if n.target is torch.ops.flexmod.attention.default]
    assert json.loads(node.args[-2])[0].startswith('["score"')


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_computes_nothing_from_uninitialized_memory(strict: bool) -> None:
    """If TorchDynamo does not trace it, it keeps the operations that found the dtypes of a mod's values, and
    runs them too.
    """
    model, case = Scored(lambda s, b, h, q, k: s + q // (k + 1)), [x.detach() for x in inputs(16)]
    exported = torch.export.export(model, tuple(case), strict=strict)
    divisions = [node for node in exported.graph.nodes if "div" in node.name]
    assert bool(divisions) != strict
    assert not [x for node in divisions for x in node.all_input_nodes if "empty" in x.name]


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["AUTO", "INTERPRET"])
def test_gradients_of_a_program_that_was_exported_without(dtype: torch.dtype, backend: str) -> None:
    """Its forward keeps nothing for a backward."""
    case = inputs(16, dtype)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, mods.alibi(HEADS), kernel_options={"BACKEND": backend})

    module = nn.Module()
    module.forward = run  # type: ignore[method-assign]
    exported = torch.export.export(module, tuple(x.detach() for x in case)).module()
    gradients = [torch.autograd.grad(f(*case).sin().sum(), case) for f in (exported, run)]
    for found, wanted in zip(*gradients, strict=True):
        close(found, wanted)


def test_export_refuses_a_mod_that_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program would refer to a graph of this process alone."""

    def refuse(*arguments: Any) -> Any:
        raise errors.InGraphModError()

    monkeypatch.setattr(library.record, "record", refuse)
    with pytest.raises(errors.InGraphModError):
        torch.export.export(Scored(mods.softcap(2.0)), tuple(x.detach() for x in inputs(16)))


class Keep(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the calls of flexmod's operations: each operation, and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flexmod" in str(func):
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def test_operations_as_torch_wants_them() -> None:
    """Schemas, fake kernels, autograd registration; see torch.library.opcheck."""
    arguments = (*inputs(), documents(LENGTH))
    exported = torch.export.export(Model(), arguments).module()
    with Keep() as keep:
        exported(*arguments).sum().backward()
    calls = keep.calls
    names = [str(func) for func, _ in calls]
    assert sorted(set(names)) == [
        "flexmod.attention.default", "flexmod.attention_backward.default", "flexmod.block_mask.default"
    ]  # fmt: skip
    for func, args in calls:
        args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
        torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))


class InGraph(nn.Module):
    def __init__(self, score_mod: Any, mask_mod: Any) -> None:
        super().__init__()
        self.score_mod, self.mask_mod = score_mod, mask_mod

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = create_block_mask(self.mask_mod, None, None, q.shape[2], k.shape[2], q.device)
        return attend(q, k, v, self.score_mod, mask)


def test_none_in_place_of_numbers_and_beside_tensors() -> None:
    """torch's executor of AOTInductor passes None for an empty list; older programs have empty ones."""
    case = inputs(16)
    exported = torch.export.export(InGraph(None, masks.causal()), (*case,)).module()
    with Keep() as keep:
        exported(*case).sum().backward()
    assert len(keep.calls) == 3
    for func, args in keep.calls:
        assert [] in args and [None] in args
        old = [[] if isinstance(x, list) and x == [None] else x for x in args]
        new = [None if isinstance(x, list) and not x else x for x in args]
        found = []
        for given in (args, old, new):
            learned = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
            with torch.set_grad_enabled("backward" not in str(func)):  # which has no derivative
                results = func(*given)
            grads = torch.autograd.grad(results[0].sum(), learned) if results[0].requires_grad else ()
            found.append((*results, *grads))
        for three in zip(*found, strict=True):
            assert torch.equal(three[0], three[1]) and torch.equal(three[0], three[2])


AHEAD: dict[str, tuple[Any, Any, Any]] = {
    "causal": (None, masks.causal(), None),
    "numbers": (lambda s, b, h, q, k: s * 1.5 + 0.25, lambda b, h, q, k: q - k < 7, None),
    "captures": (mods.alibi(torch.rand(HEADS)), masks.document(torch.arange(300) // 50), None),
    "a length that is a symbol": (
        mods.softcap(9.0), masks.sliding_window(40), torch.export.Dim("length", min=129, max=300)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", long_but({"captures"}, AHEAD))
@torch.no_grad()
def test_aot_inductor(name: str, tmp_path: Path) -> None:
    score_mod, mask_mod, length = AHEAD[name]
    model, case = InGraph(score_mod, mask_mod), [x.detach() for x in inputs(150)]
    shapes = None if length is None else [{2: length}] * 3
    exported = torch.export.export(model, (*case,), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for n in (150, 290) if length is not None else (150,):
        given = [x.detach() for x in inputs(n)]
        close(run(*given), model(*given))


def some_mods(t: Tensor, z: Tensor, n: int) -> Sequence[Any]:
    """What mods may write: every kind of operand on either side, functions, methods, indices."""
    table = torch.arange(48.0).view(4, 12)
    return (
        lambda s, b, h, q, k: s - z + (z - s) * 2 - (2 - s) / z,
        lambda s, b, h, q, k: torch.where(z > s, s, -s) + torch.where(s > 1, 0.5, s.abs()),
        lambda s, b, h, q, k: z.where(q >= k, s) + s.where(q > k, z) - abs(-s),
        lambda s, b, h, q, k: s + table[h, q % 12] + table[h][(q + k) % 12] + table[..., 3][h] + t[-1],
        lambda s, b, h, q, k: torch.tanh(s / n) * n + torch.nn.functional.softplus(s) + s.float().exp(),
        lambda s, b, h, q, k: s * torch.clamp(q - k, min=-3, max=n).to(s.dtype) + torch.sub(s, z, alpha=2),
        lambda s, b, h, q, k: s + (q.new_ones((), dtype=torch.bool) & ~(q < k) | (b == 0)).int() // 2 + q**2,
        lambda s, b, h, q, k: s + abs(q - k) - torch.maximum(q, k) % 3 + (k << 1) + -k + (q ^ k) + 2**h,
    )


SOME = pytest.mark.parametrize("numbers", [(0, 3, 5, 6), pytest.param((1, 2, 4, 7), marks=pytest.mark.long)])


@SOME
def test_a_record_is_traced_as_the_mod_itself(numbers: Sequence[int]) -> None:
    """Recorded as it is, and by TorchDynamo."""
    some = some_mods(torch.rand(4), torch.tensor(1.5), 3)
    for mod in some:
        recorded = record(mod, "score", CPU)
        traced, places = recorded.traced(CPU)
        assert traced.graph.reads == trace(mod, "score").graph.reads
        assert all(recorded.captured[place] is x for place, x in zip(places, traced.tensors, strict=True))
    compiled_equals_plain([some[number] for number in numbers])


def test_numbers_on_either_side_make_one_graph() -> None:
    """So calls in a graph and outside run the same kernels, and results have the same bits."""
    for mod in (
        lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0) + (3.5 + s) - 0.1 * abs(q - k),
        lambda s, b, h, q, k: s * torch.sigmoid(1.702 * s) + 2 ** (-0.5 * (1 + h)) * (k - q),
        lambda s, b, h, q, k: s + ((3 & q) | (1 ^ k)) + (True | (q > k)) - 1 / (2 + s) - (1 - s),
    ):
        assert record(mod, "score", CPU).traced(CPU)[0].graph == trace(mod, "score").graph


def compiled_equals_plain(some: Sequence[Any], atol: float = 1e-6, fullgraph: bool = True) -> None:
    """Score mods in one graph: their mean, as most of the time is for the call around a mod."""

    def mean(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        total = score
        for mod in some:
            total = total + mod(score, b, h, q_idx, kv_idx) / len(some)
        return total

    case = [x.detach() for x in inputs(16)]
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, mean), fullgraph=fullgraph, backend="eager")
    torch.testing.assert_close(compiled(*case), attend(*case, mean), rtol=0, atol=atol)


OF_TORCH = [f for home in (torch, torch.nn.functional, torch.special) for f in vars(home).values()]


def of_one_operand() -> Iterator[Callable[..., Any]]:
    """Score mods that call a function of torch, by the function's name in its module."""
    for function in OF_TORCH:
        if getattr(function, "__name__", None) in {*COMPOSED, *BY_TORCH_NAME, *OTHER_NAMES}:
            mod = lambda score, b, h, q_idx, kv_idx, f=function: f(score).float()  # noqa: E731
            with suppress(Exception):
                function(torch.ones(()))
                trace(mod, "score")
                yield mod


def test_functions_are_recorded_by_names_that_are_found() -> None:
    """torch.nn.functional.logsigmoid has another `__name__`."""
    mods = list(of_one_operand())
    assert len(mods) > 60
    for mod in mods:
        recorded = record(mod, "score", CPU)
        traced, _ = recorded.traced(CPU)
        assert traced.graph.reads == trace(mod, "score").graph.reads


def test_modules_of_torch_in_a_mod() -> None:
    """They call functions with `inplace`, by keyword or by position."""
    names = ("ReLU", "ReLU6", "SELU", "CELU", "ELU", "SiLU", "LogSigmoid", "Tanh")
    modules = [getattr(nn, name)() for name in names]
    compiled_equals_plain([lambda s, b, h, q, k, module=module: module(s) for module in modules])


def bits(x: Any) -> int:
    return int(torch.finfo(x.dtype).bits)


ROWS, PAIRS, ONE = torch.rand(LENGTH, 3), torch.rand(LENGTH, 2, 4), torch.tensor(0.7)
VECTORS: dict[str, Callable[..., Any]] = {
    "a captured scalar in a vector": lambda s, b, h, q, k: torch.stack([s, s * 2, ONE]).sum(),
    "a captured row in a vector": lambda s, b, h, q, k: s + torch.cat([ROWS[q], ROWS[1]])[4] * s,
    "the last dimension": lambda s, b, h, q, k: torch.stack([s, ROWS[q, 0], ONE], dim=-1).amax(-1),
    "the first dimension": lambda s, b, h, q, k: s * ROWS[q].sum(0) + torch.stack(tensors=[s, ONE], dim=0)[1],
    "len": lambda s, b, h, q, k: s * len(ROWS[q]) * (1 + s.dim()),
    "ndim": lambda s, b, h, q, k: s * (1 + s.ndim + 2 * ROWS[q].ndim) + len(q.shape) + len(PAIRS[q].shape),
    "numel": lambda s, b, h, q, k: s * (s.numel() + torch.numel(ROWS[q])) + torch.is_floating_point(ROWS[q]),
    "whole shapes": lambda s, b, h, q, k: s * (1 + (s.shape == ())) * (3 + (ROWS[q].shape == (3,))),
    "size": lambda s, b, h, q, k: s * sum(ROWS[q][n] for n in range(ROWS[q].size(0))) * ROWS[q].dim(),
    "shape": lambda s, b, h, q, k: s * ROWS[q].shape[0] + (ROWS[k] * ROWS[q]).sum() / ROWS[k].shape[-1],
    "shapes": lambda s, b, h, q, k: s * PAIRS[q].shape[1] + PAIRS[q].sum(0).shape[0] * PAIRS[q][1].mean() * s,
    "len of slices": lambda s, b, h, q, k: s * len(ROWS[q, :]) * (ROWS[q] * s)[1:].shape[0],
    "len of stack": lambda s, b, h, q, k: s * len(torch.stack([q, k])) * torch.stack([s, s, s])[1:].shape[0],
    "len of cat": lambda s, b, h, q, k: s * len(torch.cat([ROWS[q], ROWS[k]])),
    "lists": lambda s, b, h, q, k: s * torch.stack([torch.stack([s, s]).sum(), s]).shape[0],
    "a captured value beside a row": lambda s, b, h, q, k: s * ROWS[q].masked_fill(ROWS[q] > 0.5, ONE).sum(),
    "dtypes": lambda s, b, h, q, k: s * bits((ROWS[q] * ONE.double()).sum()) * bits((ROWS[0].half() * s)[0]),
}


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long)])
def test_short_vectors_in_a_graph(first: int) -> None:
    compiled_equals_plain([*VECTORS.values()][first::2])


@pytest.mark.long
def test_a_short_vector_in_a_function_that_torch_dynamo_hides() -> None:
    hidden = [lambda s, b, h, q, k: nn.functional.tanh(torch.stack([s, s]).sum())]
    compiled_equals_plain(hidden, fullgraph=False)


BYTES, MANY = torch.randint(256, (LENGTH,), dtype=torch.uint8), torch.tensor(3)
DTYPES: dict[str, Callable[..., Any]] = {
    "two integers": lambda s, b, h, q, k: s + (q.to((q + MANY).dtype) * 1000000 * 1000000) * 1e-12,
    "two floats": lambda s, b, h, q, k: s * bits(s * ONE.double()) * bits(torch.maximum(s, ONE.double())),
    "an integer and a float": lambda s, b, h, q, k: s * bits(q * ONE.bfloat16()),
    "bytes": lambda s, b, h, q, k: s * (BYTES[q] + MANY.to(torch.int8)).new_tensor(300),
    "a fill": lambda s, b, h, q, k: s + torch.full_like(q + MANY, 2**40) * 1e-12 * q,
    "a value": lambda s, b, h, q, k: s * s.masked_fill(q > k, ONE),
    "an element": lambda s, b, h, q, k: s * ROWS[MANY, -1] + ROWS[MANY % 2][q % 3],
    "a test": lambda s, b, h, q, k: s * (2 if (q * ONE).is_floating_point() else 3),
}


def test_dtypes_beside_captured_scalars_in_a_graph() -> None:
    """A mod that asks for the dtype of a result sees the one that it has outside of a graph."""
    compiled_equals_plain([*DTYPES.values()], atol=0)


def test_a_list_is_no_tuple_of_indices_in_a_graph() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + ROWS[[q_idx, kv_idx % 3]]

    with pytest.raises(errors.OperationArgumentError):
        torch.compile(lambda q, k, v: attend(q, k, v, mod), backend="eager")(*inputs(16))


def test_a_part_without_gradient_is_refused_in_a_graph() -> None:
    """As outside of one: where a gradient would flow to the score or a learned tensor."""
    learned, fixed = torch.rand(HEADS, requires_grad=True), torch.rand(HEADS)

    def attend_with(part: Callable[..., Any]) -> Any:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            with torch.no_grad():
                factor = part(score, h, q_idx)
            return score * factor

        return lambda *x: attend(*x, mod)

    for part in (lambda s, h, q: s + 1, lambda s, h, q: learned[h] * q):
        with pytest.raises(errors.UnknownOperationError, match="a part without gradient"):
            torch.compile(attend_with(part), backend="aot_eager")(*inputs(16))
    allowed = lambda s, h, q: (q + 1) * (fixed[h] * q) + (learned * 2)[h]  # noqa: E731
    Compiled(attend_with(allowed)).check(*inputs(16))


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_function_with_a_backward_of_its_own_is_refused_in_a_graph() -> None:
    """As outside of one; TorchDynamo differentiates one of captured tensors alone."""
    learned, fixed = torch.rand(HEADS, requires_grad=True), torch.rand(HEADS)

    def attend_with(part: Callable[..., Any]) -> Any:
        return lambda *x: attend(*x, lambda s, b, h, q, k: s + part(s, h, q))

    for part, fullgraph in (
        (lambda s, h, q: Rounding.apply(s), False),
        (lambda s, h, q: Rounding.apply(torch.tanh(s) * 2), True),
        (lambda s, h, q: Rounding.apply(learned[h]), True),
    ):  # fmt: skip
        with pytest.raises(errors.UnknownOperationError, match="a part without gradient"):
            torch.compile(attend_with(part), backend="aot_eager", fullgraph=fullgraph)(*inputs(16))

    def allowed(s: Any, h: Any, q: Any) -> Any:
        return Rounding.apply(q / 3) + Rounding.apply(fixed[h] * 3) + Rounding.apply(learned * 3)[h]

    Compiled(attend_with(allowed)).check(*inputs(16))


def changed_by_a_hook(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    score.register_hook(lambda grad: grad * 3)
    return score


UNKNOWN: dict[str, Callable[..., Any]] = {
    "a hook": changed_by_a_hook,
    "no dimension": lambda s, b, h, q, k: s.split(1)[0],
    "another shape": lambda s, b, h, q, k: s.reshape(3),
    "a lookup": lambda s, b, h, q, k: s + nn.functional.embedding(h, ROWS)[0],
}


EVERY = pytest.mark.every


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a lookup" else EVERY) for name in UNKNOWN]
)
def test_unknown_functions_are_named_with_their_line_in_a_graph(name: str) -> None:
    with pytest.raises(errors.UnknownOperationError, match=r"(?s)is not an operation.*test_library\.py"):
        torch.compile(lambda *x: attend(*x, UNKNOWN[name]), backend="eager")(*inputs(16))


def test_a_mod_that_writes_texts_of_its_values_breaks_the_graph() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        assert repr(score) and str(q_idx)
        return score * 2

    case = inputs(16)
    close(torch.compile(attend, backend="eager")(*case, mod), attend(*case, mod))


@pytest.mark.long
def test_numbers_of_numpy_break_the_graph() -> None:
    """TorchDynamo makes tensors of float64 of them."""
    half, case = np.float64(0.5), inputs(16)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * bits(q_idx * half)

    close(torch.compile(attend, backend="eager")(*case, mod), attend(*case, mod))


def test_a_mask_that_no_graph_can_make_is_made_outside() -> None:
    """TorchDynamo hides an unpacked row and numbers of numpy. It compiles none of the functions behind it."""
    spans, numbers = torch.tensor([[2, 7], [5, 9]]), np.arange(3)

    def unpacked(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        start, end = spans[b]
        return (q_idx >= kv_idx) | ((kv_idx >= start) & (kv_idx < end))

    frames, case = torch._dynamo.utils.counters["frames"], inputs(16)
    for mask_mod in (unpacked, lambda b, h, q_idx, kv_idx: q_idx + numbers[2] >= kv_idx):

        def function(*x: Tensor, mask_mod: Any = mask_mod) -> Tensor:
            return attend(*x, None, create_block_mask(mask_mod, 2, None, 16, 16, CPU))  # type: ignore[no-any-return]

        torch._dynamo.reset()
        frames.clear()
        close(torch.compile(function, backend="eager")(*case), function(*case))
        assert frames["total"] <= 20
    with pytest.raises(torch._dynamo.exc.Unsupported, match="rather than unpack it"):
        torch.compile(lambda: create_block_mask(unpacked, 2, None, 16, 16, CPU), fullgraph=True)()


@pytest.mark.parametrize("empty", ["queries", "keys"])
def test_a_table_of_no_positions(empty: str) -> None:
    """The table, a learned bias, is as long as the call; lengths that the graph computes stay symbols."""

    def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return attend(q, k, v, lambda s, b, h, i, j: s + table[i if empty == "queries" else j])  # type: ignore[no-any-return]

    q, k, v = inputs()
    if empty == "queries":
        q = torch.zeros(2, HEADS, 0, 16, requires_grad=True)
    else:
        k, v = (torch.zeros(2, 2, 0, 16, requires_grad=True) for _ in range(2))
    Compiled(biased).check(q, k, v, torch.zeros(0, requires_grad=True))


def test_a_table_of_an_unknown_length() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        found = table[table > 0]
        return attend(q, k, v, lambda s, b, h, i, j: s + found[j])  # type: ignore[no-any-return]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        Compiled(biased).check(*inputs(), torch.rand(LENGTH) + 1)


def test_comparisons_of_lengths_in_a_mod() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, lambda s, b, h, i, j: s * torch.where(i > j, q.shape[2] > 20, q.shape[2] / 7))

    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    for length in (16, 24, 32):
        case = inputs(length)
        close(compiled(*case), function(*case))


@pytest.mark.covering(1)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("error", [errors.MutationError, errors.RandomNumberError, errors.ReductionError])
def test_what_a_mod_may_not_do_keeps_its_class(error: Any, fullgraph: bool) -> None:
    """Where graphs may break, the call runs without one and says what is wrong; else TorchDynamo does."""
    noise = torch.zeros(LENGTH)

    def writes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        noise.add_(1)
        return score + noise[q_idx]

    def draws(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.rand(())

    def reduces(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.softmax(score, -1)

    refused = {errors.MutationError: writes, errors.RandomNumberError: draws, errors.ReductionError: reduces}
    mod = refused[error]
    compiled = torch.compile(lambda *x: attend(*x, mod), backend="eager", fullgraph=fullgraph)
    told, message = (torch._dynamo.exc.Unsupported, error.instead.split(",")[0]) if fullgraph else (error, "")
    with pytest.raises(told, match=message):
        compiled(*inputs())


def test_what_a_call_may_not_do_keeps_its_class() -> None:
    with pytest.raises(errors.HeadCountMismatch):
        torch.compile(flex_attention, backend="eager")(*inputs())
    with pytest.raises(errors.MaskLengthError):
        torch.compile(attend, backend="eager", fullgraph=True)(*inputs(), None, window_mask(48))
    lists = torch.ones(1).int(), torch.zeros(1, 1).int()
    without_dimensions = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=LENGTH)
    with pytest.raises(errors.BlockMaskPartsError, match="attention takes"):
        torch.compile(attend, backend="eager")(*inputs(), None, without_dimensions)


def test_a_mistake_in_a_graph_has_a_line_of_the_user() -> None:
    """None of the code that torch.fx writes."""
    mod = torch.compile(lambda *x: attend(*x, lambda s, b, h, i, j: s > 0), backend="eager", fullgraph=True)
    with pytest.raises(errors.ScoreResultError) as raised:
        mod(*inputs())
    assert raised.value.where is not None and raised.value.where.file == __file__


def test_random_numbers_are_seen_where_torch_asks_no_mode() -> None:
    """For functions that make tensors; ours is told to ask."""
    functions = pytest.importorskip("torch._dynamo.variables.torch")
    functions.get_overridable_functions().difference_update(_device_constructors())
    private_torch.ask_modes_of_constructors.cache_clear()
    compiled = torch.compile(lambda *x: attend(*x, lambda s, b, h, i, j: s + torch.rand(())), backend="eager")
    with pytest.raises(errors.RandomNumberError, match=r"torch\.rand draws"):
        compiled(*inputs())


@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.long)])
def test_what_a_mask_mod_may_not_do_keeps_its_class(case: int) -> None:
    """As for a score mod; TorchDynamo compiles none of the functions that name the mistake."""

    def unknown(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx.split(1)[0] >= kv_idx

    def draws(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (torch.rand(()) > 0.5)

    mod, error, instead = (
        (unknown, errors.UnknownOperationError, "write it with elementwise operations"),
        (draws, errors.RandomNumberError, "draw them before the call"),
    )[case]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=instead):
        torch.compile(create_block_mask, backend="eager", fullgraph=True)(mod, 1, 1, 64, 64, CPU)
    for function in (create_block_mask, lambda *x: create_block_mask(*x).to_dense()):
        with pytest.raises(error, match=r"at .*test_library\.py"), warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.compile(function, backend="eager")(mod, 1, 1, 64, 64, CPU)


def test_a_mask_mod_that_torch_dynamo_hides_breaks_the_graph() -> None:
    def hidden(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (nn.functional.sigmoid(q_idx - 30.0) > 0.5) & (kv_idx < q_idx)

    def run(*x: Tensor) -> Tensor:
        return attend(*x, None, create_block_mask(hidden, None, None, LENGTH, LENGTH, CPU))

    case = inputs()
    close(torch.compile(run, backend="eager")(*case), run(*case))


def test_a_mask_made_inside_is_the_mask() -> None:
    """Its runs, for a mask that reads b and h and for one that does not."""
    for mask_mod in (WINDOW, lambda b, h, q_idx, kv_idx: (q_idx + 3 * h >= kv_idx) | (b == 1)):
        layout = MaskLayout((2, 3, 70, 50), (16, 16), CPU, True)
        made = build.create_in_graph(mask_mod, layout)
        held = build.storage_of(made.tiles, trace(mask_mod, "mask").graph, layout)
        wanted = create_block_mask(mask_mod, 2, 3, 70, 50, "cpu", BLOCK_SIZE=16)
        assert torch.equal(held.table(4), wanted.table())


def test_a_graph_has_room_for_the_runs_of_a_gpu() -> None:
    """There a line of tiles has room for a run of both kinds in each pair of tiles, begun or whole."""
    for rows, columns in ((3, 3), (5, 4), (1, 7), (2, 2)):
        sizes = (2, 1, 16 * rows, 16 * columns)
        mask = trace(lambda b, h, q, k: q >= k + b, "mask")
        made = generated.build(mask, MaskLayout(sizes, (16, 16), CPU, True), interpreted=True)
        room = build.most_runs(sizes, rows, columns)
        assert all(runs is not None and len(runs.spans) <= room for runs in made.values())


def test_graphs_are_kept_by_number() -> None:
    """While something holds them, and thousands beyond that."""
    held = trace(lambda b, h, q, k: q >= k + 12345, "mask").graph
    first, number = numbered(held)
    assert numbered(trace(lambda b, h, q, k: q >= k + 12345, "mask").graph) == (first, number)
    gone = numbered(trace(lambda b, h, q, k: q >= k + 54321, "mask").graph)[1]
    assert graph_of(gone).kind == "mask"
    for other in range(REMEMBERED):
        numbered(Graph("mask", (GraphBuilder.fresh_const(other),)))
    assert graph_of(number) is first
    with pytest.raises(errors.ForgottenGraphError):
        graph_of(gone)


def test_a_comparison_of_sizes_is_a_flag() -> None:
    """In a graph of any sizes it is a symbol, and the graph gets a guard."""

    def attend(query: Tensor, key: Tensor) -> Tensor:
        return flex_attention(query, key, key, enable_gqa=query.shape[1] != key.shape[1])

    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    for heads, key_heads in ((4, 4), (4, 2), (6, 3)):
        query, key = torch.randn(1, heads, 40, 16), torch.randn(1, key_heads, 40, 16)
        torch.testing.assert_close(compiled(query, key), attend(query, key))


def test_a_graph_suggests_a_name() -> None:
    """TorchDynamo cannot run the search for close names."""
    attend = torch.compile(
        lambda x: flex_attention(x, x, x, kernel_options={"BLOCK_MM": 64}), fullgraph=True, backend="eager"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no option 'BLOCK_MM'. Did you mean 'BLOCK_M'?"):
        attend(torch.randn(1, 2, 8, 16))

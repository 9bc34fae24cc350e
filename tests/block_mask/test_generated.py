"""The builder's kernels in Triton's interpreter against the path for the CPU, and compiled for chips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import long_but

from block_mask.test_refine import MODS, hashed, traced
from block_mask.zoo import ZOO
from flexmod import masks
from flexmod.block_mask import generated, refine
from flexmod.block_mask.tiles import MaskLayout
from flexmod.codegen import cache, compiler
from flexmod.codegen.compiler import builder
from flexmod.codegen.device_functions import module_text
from flexmod.codegen.render import render_builder
from flexmod.runtime import launch, offline
from flexmod.runtime.target import named

CPU = torch.device("cpu")
TYPES = {torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32"}


@pytest.fixture(autouse=True)
def small_squares(monkeypatch):
    """So that there are several of them, and tiles that they leave open."""
    monkeypatch.setattr(generated, "SIDE", 4)
    monkeypatch.setattr(generated, "TILES", 8)
    # what it remembers was of other squares, or of launches that were watched
    generated._builder_part.cache_clear()
    yield
    generated._builder_part.cache_clear()


def check(mask_mod, sizes, block, separate=True):
    """Builds in the interpreter; both directions are what the other path makes of the mask."""
    sizes = tuple(n or 1 for n in sizes)
    mask = traced(mask_mod, sizes)
    found = generated.build(mask, MaskLayout(sizes, block, CPU, separate), interpreted=True)
    expected = refine.classify(mask, sizes, block, CPU)
    if not separate:
        expected.clamp_(max=1)
    assert torch.equal(found["kv"].table(expected.shape[-1]), expected)
    assert torch.equal(found["q"].table(expected.shape[-2]), expected.mT)
    for runs in found.values():
        ordered = mask.tensors and max(block) <= generated.ORDERED_BLOCK
        assert (runs.order is not None) == bool(ordered)
        if ordered:
            most_first = runs.counts().sum(0).argsort(dim=-1, descending=True, stable=True)
            assert torch.equal(runs.order.long(), most_first)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("block", [(64, 64), (100, 48)])
@pytest.mark.parametrize("name", ZOO)
def test_equal_to_the_other_path(name, block):
    mask_mod, *sizes = ZOO[name]
    check(mask_mod, sizes, block)


def test_unequal_parts():
    check(masks.causal(), (1, 1, 33, 1), (16, 16))
    check(masks.causal(), (1, 1, 1, 300), (1 << 30, 16))
    check(ZOO["document"][0], (1, 1, 90, 520), (7, 520))


def test_every_tile_as_partial():
    check(masks.causal(), (1, 1, 300, 300), (32, 32), separate=False)


def by_difference(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 5 == h) | (q_idx - kv_idx > 100)


SLOPES = torch.tensor([1.0, float("nan"), 0.25]).repeat_interleave(70)


def by_number(b, h, q_idx, kv_idx):
    return SLOPES[q_idx] * q_idx > SLOPES[kv_idx] * kv_idx * 0.5


FLAGS = torch.arange(200) // 40 % 2 == 0
SMALL = (torch.arange(200) // 30).to(torch.uint8)


def by_small_numbers(b, h, q_idx, kv_idx):
    return FLAGS[q_idx] & (SMALL[q_idx] - SMALL[kv_idx] < 3)


def wide(b, h, q_idx, kv_idx):
    return q_idx * 3_000_000_000 >= kv_idx * 2_999_999_999


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's own
@pytest.mark.parametrize("mask_mod", [by_difference, by_number, by_small_numbers, wide, hashed])
def test_terms_of_all_kinds(mask_mod):
    check(mask_mod, (1, 3, 200, 190), (16, 32))


@settings(max_examples=10, deadline=None)
@given(MODS)
def test_random_masks(text):
    scope = {"ids": torch.arange(100).flip(0) // 13}
    check(eval(f"lambda b, h, q_idx, kv_idx: {text}", scope), (1, 2, 70, 90), (16, 16))


def window(n):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= n)


def prefix(n):
    return lambda b, h, q_idx, kv_idx: (kv_idx < n) | (q_idx >= kv_idx)


def ahead_of(n):
    return lambda b, h, q_idx, kv_idx: q_idx + n >= kv_idx


def band(n):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx + n).abs() <= 2 * n + h


def clamped(n):
    return lambda b, h, q_idx, kv_idx: torch.minimum(q_idx, 0 * q_idx + n) >= kv_idx - n


def scaled(n):
    return lambda b, h, q_idx, kv_idx: q_idx * n >= kv_idx


def chunked(n):
    return lambda b, h, q_idx, kv_idx: (q_idx // (n + 1) == kv_idx // (n + 1)) & (q_idx >= kv_idx)


def steep(n):
    return lambda b, h, q_idx, kv_idx: q_idx * (n * 0.25) >= kv_idx


def of_documents(n):
    return lambda b, h, q_idx, kv_idx: (SMALL[q_idx] == SMALL[kv_idx]) & (q_idx - kv_idx < n)


def up_to_a_half(n):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= n + 0.5) & (q_idx >= kv_idx)


def dilated(n):
    return lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx) % (abs(n) + 1) == 0) & (q_idx >= kv_idx)


def of_products(n):
    return lambda b, h, q_idx, kv_idx: (q_idx * n - kv_idx * n).abs() <= 90


def of_both(n):
    return lambda b, h, q_idx, kv_idx: q_idx % (abs(n) + 3) >= kv_idx // (abs(n) + 1)


OF_A_NUMBER = [
    window, prefix, ahead_of, band, clamped, scaled, chunked, steep, of_documents, up_to_a_half, dilated,
    of_products, of_both,
]  # fmt: skip


QUICK, LONG = {steep, of_documents, of_both}, {window, clamped, chunked, up_to_a_half}


@pytest.mark.parametrize("make", long_but(QUICK, OF_A_NUMBER, LONG))
def test_a_number_that_changes(make, monkeypatch):
    """The analysis of other numbers is used again; the tiles are the same as with constants."""
    monkeypatch.setattr(compiler, "CONSTANTS", compiler.Constants())
    monkeypatch.setattr(generated, "TILES", 32)  # numbers do not reach the kernel of runs
    compiler._builder_of_numbers.cache_clear()
    start, opened = launch.start, []

    def watch(source, name, device, grid, arguments):
        if name == "elements_kernel":
            opened.append(arguments["KINDS"].clone())
        return start(source, name, device, grid, arguments)

    monkeypatch.setattr(launch, "start", watch)
    sizes, numbers = (1, 2, 100, 90), (40, 3, 2**20, 0, -40, 41)
    changing = []
    for number in numbers:
        check(make(number), sizes, (16, 16))
        changing.append(opened.pop())
    for number, before in zip(numbers, changing, strict=True):
        monkeypatch.setattr(compiler, "CONSTANTS", compiler.Constants())
        compiler._builder_of_numbers.cache_clear()
        check(make(number), sizes, (16, 16))
        assert torch.equal(opened.pop(), before)


SERVED = [
    window, prefix, ahead_of, band, clamped, chunked, steep, of_documents, up_to_a_half, dilated, of_both
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "last"),
    [
        *(pytest.param(make, 2**29, marks=[pytest.mark.long] * (n % 2)) for n, make in enumerate(SERVED)),
        (scaled, 63),
    ],
)
def test_a_number_that_changes_is_analyzed_no_more(make, last, monkeypatch):
    sizes = (1, 2, 100, 90)
    for number in (30, 31, 32, 33):
        check(make(number), sizes, (16, 16))
    monkeypatch.setattr(compiler.intervals, "analyze", None)
    found = {builder(traced(make(number), sizes).graph, sizes).kernels for number in (32, 50, last)}
    assert len(found) == 1


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(MODS, MODS, st.integers(-90, 90), st.integers(-90, 90))
def test_random_masks_of_a_number_that_changes(first, second, one, other):
    for number in (one, other, one):
        scope = {"ids": torch.arange(100).flip(0) // 13, "n": number}
        text = f"lambda b, h, q_idx, kv_idx: (({first}) & (q_idx - n <= kv_idx)) | (({second}) & (q_idx < n))"
        check(eval(text, scope), (1, 2, 70, 90), (16, 16))


def test_counted_where_there_is_no_room(monkeypatch):
    mask = ZOO["natten"][0], (1, 1, 720, 720), (48, 48)
    roomy = check(*mask)
    monkeypatch.setattr(generated, "UNCOUNTED", 0)
    tight = check(*mask)
    for axis in ("kv", "q"):
        number = int(roomy[axis].rows[..., 1].sum())
        assert len(tight[axis].spans) == number < len(roomy[axis].spans)


def test_a_few_heads_at_a_time(monkeypatch):
    mask_mod, *sizes = ZOO["document_causal"]
    monkeypatch.setattr(generated, "TILES_AT_ONCE", 1)
    check(mask_mod, sizes, (128, 128))
    monkeypatch.setattr(generated, "UNCOUNTED", 0)
    check(ZOO["by_head"][0], (1, 4, 512, 384), (128, 128))


def test_new_numbers_and_new_tensors_compile_nothing(monkeypatch):
    """The third window and other documents run modules that are there, for one token too."""
    for window in (30, 40):
        check(masks.sliding_window(window), (1, 1, 200, 200), (32, 32))
    check(masks.document(torch.arange(200) // 50), (1, 1, 200, 200), (32, 32))
    monkeypatch.setattr(cache, "_execute", None)
    for window in (50, 170):
        check(masks.sliding_window(window), (1, 1, 200, 200), (32, 32))
    for length in (300, 1):
        check(masks.document(torch.arange(length) // 70), (1, 1, length, length), (32, 32))
    check(masks.sliding_window(1), (1, 1, 1, 1), (32, 32))


def test_other_tensors_of_one_kind(monkeypatch):
    """The plan of the first mask of a kind serves the others, and no two masks share what they hold."""
    made = [masks.document(torch.arange(200) // size, causal=True) for size in (50, 30, 7, 90)]
    written = []
    plan = generated._BuilderPart._plan
    monkeypatch.setattr(generated._BuilderPart, "_plan", lambda *given: written.append(given) or plan(*given))
    found = [check(mask_mod, (1, 1, 200, 200), (32, 32)) for mask_mod in made]
    assert len(written) == 1
    assert len({runs["kv"].spans.data_ptr() for runs in found}) == len(made)


@pytest.mark.parametrize("name", ["causal", "document_causal", "window", "prefix"])
def test_corners_leave_nothing_open(name, monkeypatch):
    """Of the tiles of ordinary masks none is left to elements_kernel: that one took most of the time."""
    left = []
    start = launch.start

    def watched(source, name, device, grid, arguments):
        start(source, name, device, grid, arguments)
        if name == "squares_kernel":
            left.append(int(arguments["STATES"].sum()))

    monkeypatch.setattr(launch, "start", watched)
    mask_mod, *sizes = ZOO[name]
    check(mask_mod, sizes, (64, 64))
    assert left == [0]


def test_golden(golden):
    mask = traced(masks.document(torch.arange(200) // 50, causal=True), (1, 1, 200, 200))
    kernels = builder(mask.graph, (1, 1, 200, 200)).kernels
    golden(render_builder(kernels.terms, kernels.bounds, kernels.mask), "document_builder.txt")
    golden(module_text("runs"), "runs.txt")


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_an_order_is_made_where_kernels_go_by_it(target, monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "start", lambda source, name, *_: launched.append(name))
    monkeypatch.setattr(generated, "target_of", lambda device: named(target))
    sizes = (1, 1, 519, 519)
    layout = MaskLayout(sizes, (128, 128), CPU, True)
    generated.build(traced(ZOO["document_causal"][0], sizes), layout)
    assert ("order_kernel" in launched) == (target == "sm_90")


@pytest.mark.parametrize("target", long_but({"sm_90", "gfx942"}, ["sm_80", "sm_90", "sm_100", "gfx942"]))
def test_compiles_for(target, monkeypatch):
    """As launches would specialize them, where nothing is 1 or a multiple of 16."""
    launched = []

    def start(source, name, device, grid, arguments):
        values = {name: value for name, value in arguments.items() if name != "enable_fp_fusion"}
        launched.append((source.module, name, values))

    monkeypatch.setattr(launch, "start", start)
    sizes = (3, 2, 519, 519)
    layout = MaskLayout(sizes, (128, 128), CPU, True)
    generated.build(traced(ZOO["document_causal"][0], sizes), layout, interpreted=True)
    assert [name for _, name, _ in launched] == [
        "terms_kernel",
        "squares_kernel",
        "elements_kernel",
        "runs_kernel",
        "order_kernel",
    ]
    for module, name, values in launched:
        kernel = getattr(module, name)
        annotated = {p.name for p in kernel.params if p.is_constexpr}
        constants = {n: v for n, v in values.items() if n in annotated or v is None}
        signature = {
            n: TYPES[v.dtype] if isinstance(v, torch.Tensor) else "i32"
            for n, v in values.items()
            if n not in constants
        }
        report = offline.compile(kernel, signature, constants, target, num_warps=4)
        assert report.fits and report.spills <= 64, report

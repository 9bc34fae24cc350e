"""A mod of the library is refused by name in a call that has other heads, batch entries or more positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flexmod
from flexmod import create_block_mask, create_mask, errors, flex_attention, masks, mods
from flexmod.codegen import compiler
from flexmod.ir.source import mod_kind
from flexmod.ir.trace import trace

B, H, M = 2, 4, 24
BACKENDS = ({}, {"BACKEND": "INTERPRET"}, {"BACKEND": "REFERENCE"})
ZEROS = torch.zeros


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


# name: a score mod for these (batch entries, heads, positions), and the axes that it knows
SCORES: dict[str, tuple[Callable[[int, int, int], Any], str]] = {
    "alibi": (lambda b, h, n: mods.alibi(h), "h"),
    "alibi, slopes": (lambda b, h, n: mods.alibi(torch.rand(h)), "h"),
    "alibi, learned": (lambda b, h, n: mods.alibi(torch.rand(h, requires_grad=True)), "h"),
    "relative bias": (lambda b, h, n: mods.relative_bias(ZEROS(h, 9)), "h"),
    "t5 bias": (lambda b, h, n: mods.t5_bias(ZEROS(8, h)), "h"),
    "temperature": (lambda b, h, n: mods.temperature(torch.ones(h)), "h"),
    "sink": (lambda b, h, n: mods.sink(ZEROS(h)), "h"),
    "sandwich": (lambda b, h, n: mods.sandwich(h, length=n, dim=4), "hn"),
    "graphormer": (lambda b, h, n: mods.graphormer_spatial(ZEROS(3, h), integers(b, n, n)), "bhn"),
    "graphormer, edges": (lambda b, h, n: mods.graphormer_edge(ZEROS(1, 2, h), integers(b, n, n, 1)), "bhn"),
    "rope": (lambda b, h, n: mods.mla_rope(ZEROS(b, h, n, 1), ZEROS(b, n, 1), 1.0), "bhn"),
    "jagged": (lambda b, h, n: mods.jagged(torch.tensor([0, 3, n]), mods.alibi(h)), "hn"),
    "chain": (lambda b, h, n: mods.chain(mods.softcap(5.0), mods.alibi(h), mods.relative_position()), "h"),
    "a user's": (lambda b, h, n: passes_on(mods.alibi(h)), "h"),
}
MASKS: dict[str, tuple[Callable[[int, int, int], Any], str]] = {
    "windows": (lambda b, h, n: masks.sliding_window(integers(h) + 5), "h"),
    "windows, both sides": (lambda b, h, n: masks.sliding_window(integers(h) + 5, causal=False), "h"),
    "by head": (lambda b, h, n: masks.by_head(integers(h), masks.causal()), "h"),
    "prefixes": (lambda b, h, n: masks.prefix_lm(integers(b) + 3), "b"),
    "padding": (lambda b, h, n: masks.padding(integers(b) + 3), "b"),
    "documents": (lambda b, h, n: masks.document(integers(b, n)), "bn"),
    "documents, lengths": (lambda b, h, n: masks.document(lengths=integers(b, 3) + n // 3), "bn"),
    "segments": (lambda b, h, n: masks.segments(integers(b, n), integers(n)), "bn"),
    "shared prefix": (lambda b, h, n: masks.shared_prefix(3, integers(n)), "n"),
    "jagged": (lambda b, h, n: masks.jagged(torch.tensor([0, n]), masks.causal()), "n"),
    "tree": (lambda b, h, n: masks.tree(torch.arange(n) - 1), "n"),
    "reordered": (lambda b, h, n: masks.reordered(masks.causal(), torch.arange(n)), "n"),
    "natten": (lambda b, h, n: masks.natten((n // 4, 4), 3), "n"),
    "standalone": (lambda b, h, n: masks.standalone_window(n // 4, 4, 2), "n"),
    "sliding tiles": (lambda b, h, n: masks.sliding_tiles((n,), (4,), (3,)), "n"),
    "diffusion": (lambda b, h, n: masks.block_diffusion(n // 2, 2), "n"),
    "vision": (lambda b, h, n: masks.vision_cross(torch.tensor([[0, 9]]), integers(n)), "n"),
    "&, |, ~": (
        lambda b, h, n: masks.causal() & ~masks.padding(integers(b)) | masks.sliding_window(integers(h) + 1),
        "bh",
    ),
    "a user's": (lambda b, h, n: passes_on(masks.padding(integers(b) + 3)), "b"),
}  # fmt: skip


def passes_on(mod: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function around one of the library."""
    if isinstance(mod, masks.Mask):
        return lambda b, h, q, k: mod(b, h, q, k) | (q == k)
    return lambda s, b, h, q, k: mod(s * 2, b, h, q, k)


def others(known: str) -> list[tuple[int, int, int]]:
    """The sizes that a mod which knows these axes must not be given."""
    made = {"b": [(1, H, M), (3, H, M)], "h": [(B, 1, M), (B, 8, M)], "n": [(B, H, M + 4)]}
    return [sizes for axis in known for sizes in made[axis]]


def tensors(batch: int, heads: int, length: int, **options: Any) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, heads, length, 8, **options) for _ in range(3))


def rows(table: dict[str, tuple[Callable[..., Any], str]]) -> list[Any]:
    return [pytest.param(*row, id=name) for name, row in table.items()]


@pytest.mark.covering(1, long=1)  # calls are checked before a backend has them
@pytest.mark.parametrize("options", BACKENDS, ids=lambda options: options.get("BACKEND", "CPU"))
@pytest.mark.parametrize(("made", "known"), rows(SCORES))
def test_score_mods(made: Callable[..., Any], known: str, options: dict[str, Any]) -> None:
    """By eager calls and handles: their own sizes and fewer positions run, others raise."""
    handle = flexmod.compile(made(B, H, M), kernel_options=options)
    assert flex_attention(*tensors(B, H, M), made(B, H, M), kernel_options=options).shape == (B, H, M, 8)
    assert handle(*tensors(B, H, M)).shape == (B, H, M, 8)
    for sizes in others(known):
        mask = create_block_mask(masks.causal(), None, None, sizes[2], sizes[2], "cpu")
        for block_mask in (None, mask):
            with pytest.raises(errors.CallSizeError, match=r"^mods\."):
                flex_attention(*tensors(*sizes), made(B, H, M), block_mask, kernel_options=options)
        with pytest.raises(errors.CallSizeError, match=r"^mods\."):
            handle(*tensors(*sizes))


@pytest.mark.parametrize(("made", "known"), rows(MASKS))
def test_mask_mods(made: Callable[..., Any], known: str) -> None:
    handle = flexmod.compile(mask_mod=made(B, H, M))
    assert handle(*tensors(B, H, M)).shape == (B, H, M, 8)
    for batch, heads, length in others(known):
        for build in (create_mask, create_block_mask):
            with pytest.raises(errors.CallSizeError, match=r"^masks\."):
                build(made(B, H, M), batch, heads, length, length, device="cpu")
        with pytest.raises(errors.CallSizeError, match=r"^masks\."):
            handle(*tensors(batch, heads, length))


def torch_causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@pytest.mark.parametrize(("made", "known"), rows(MASKS))
def test_masks_of_torch_and_of_lists(made: Callable[..., Any], known: str) -> None:
    """A block mask that flexmod did not build is looked at in the call."""
    for batch, heads, length in others(known):
        if length > M or (batch, heads) != (B, H) and 1 in (batch, heads):
            continue  # its graph is not traced before it reads outside; one head is refused for that already
        block_mask = torch_flex.create_block_mask(torch_causal, batch, heads, length, length, device="cpu")
        block_mask.mask_mod = made(B, H, M)
        with pytest.raises(errors.CallSizeError, match=r"^masks\."):
            flex_attention(*tensors(batch, heads, length), block_mask=block_mask)


@pytest.mark.parametrize(("made", "known"), rows(SCORES | {f"mask {n}": row for n, row in MASKS.items()}))
def test_a_part_that_says_which(made: Callable[..., Any], known: str) -> None:
    """Computed positions are not checked: the second half of the heads, say."""
    mod = made(B, 2 * H, 2 * M)

    def part(*positions: Any) -> Any:
        b, h, q, k = positions[-4:]
        return mod(*positions[:-4], b + 1, h + H, q + 4, k + 4)

    if mod_kind(mod) == "mask":
        create_block_mask(lambda b, h, q, k: part(b, h, q, k), 1, H, M, M, device="cpu")
    else:
        flex_attention(*tensors(1, H, M), lambda s, b, h, q, k: part(s, b, h, q, k))


def test_slices_and_other_lengths_of_a_mask_fit() -> None:
    """Parts of a mask have fewer heads, batch entries and positions than its mask_mod."""
    choice, lengths = torch.arange(H) % 2, integers(B) + 9
    ids = torch.arange(M) // 9
    mask_mod = masks.by_head(choice, masks.causal(), masks.sliding_window(3)) & masks.padding(lengths)
    whole = create_block_mask(mask_mod & masks.document(ids), B, H, M, M, "cpu", BLOCK_SIZE=8)
    query, key, value = tensors(B, H, M)
    out = flex_attention(query, key, value, block_mask=whole)
    for b, h in ((slice(1), slice(None)), (slice(None), slice(2)), (slice(1, 2), [0, 3]), (0, slice(1))):
        part = whole[b, h]
        b = [b] if isinstance(b, int) else b
        found = flex_attention(query[b][:, h], key[b][:, h], value[b][:, h], block_mask=part)
        torch.testing.assert_close(found, out[b][:, h])
        both = flex_attention(query[b][:, h], key[b][:, h], value[b][:, h], block_mask=part & part)
        torch.testing.assert_close(both, found)
    shorter = whole.resize(16, 16)
    found = flex_attention(query[:, :, :16], key[:, :, :16], value[:, :, :16], block_mask=shorter)
    assert found.shape == (B, H, 16, 8)
    first = flex_attention(query[:, :, :8], key, value, block_mask=whole[:, :, :1])
    torch.testing.assert_close(first, out[:, :, :8])
    with pytest.raises(errors.CallSizeError, match="made for 24 keys"):
        whole.resize(M, M + 8)


def test_sizes_are_checked_where_torch_compiles() -> None:
    @torch.compile(backend="aot_eager", dynamic=False)
    def attend(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Any:
        mask = create_block_mask(masks.causal(), None, None, M, M, device="cpu")
        return flex_attention(query, key, value, mods.alibi(slopes), mask)

    @torch.compile(backend="aot_eager", dynamic=False)
    def padded(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Any:
        mask = create_block_mask(masks.padding(lengths), B, None, M, M, device="cpu")
        return flex_attention(query, key, value, None, mask)

    query, key, value = tensors(B, H, M)
    assert attend(query, key, value, torch.rand(H)).shape == query.shape
    assert padded(query, key, value, integers(B) + 3).shape == query.shape
    with pytest.raises(Exception, match=r"mods\.alibi is made for 8 heads"):
        attend(query, key, value, torch.rand(8))
    with pytest.raises(Exception, match=r"masks\.padding is made for 3 batch entries"):
        padded(query, key, value, integers(3) + 3)


def test_kernels_do_not_depend_on_them() -> None:
    """One formula for other sizes of a table is one kernel."""
    traced = [trace(mods.alibi(torch.rand(heads)), "score").graph for heads in (4, 8)]
    assert traced[0] != traced[1]
    lowered = [compiler.compile_mod(graph, (1, 1, 64, 64)).lowered for graph in traced]
    assert lowered[0] == lowered[1]


def test_a_user_s_table_may_have_more_heads() -> None:
    table = torch.rand(16)
    out = flex_attention(*tensors(B, H, M), lambda s, b, h, q, k: s + table[h])
    assert out.shape == (B, H, M, 8)

"""Short vectors inside mods: rows of captured tensors and reductions over them, as torch computes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from tiers import long_but
from torch import Tensor

from flexmod import create_block_mask, create_mask, errors, flex_attention
from flexmod.ir.trace import trace

LENGTH = 37
BACKENDS = (None, "REFERENCE", "INTERPRET")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "place": torch.randn(LENGTH, 3, generator=generator),
        "frames": torch.randn(LENGTH, 2, 3, generator=generator),
        "weight": torch.randn(3, generator=generator),
        "tags": torch.randint(0, 5, (2, LENGTH, 4), generator=generator),
        "wanted": torch.tensor([1, 3, 4]),
        "bytes": torch.randint(-100, 100, (LENGTH, 3), generator=generator, dtype=torch.int8),
        "halves": torch.randn(LENGTH, 3, generator=generator).half(),
    }


Made = Callable[[dict[str, Tensor]], Callable[..., Tensor]]
SCORES: dict[str, Made] = {
    "distance": lambda t: lambda s, b, h, q, k: s - (t["place"][q] - t["place"][k]).pow(2).sum(-1),
    "norm": lambda t: lambda s, b, h, q, k: s - (t["place"][q] - t["place"][k]).norm(),
    "torch.norm": lambda t: lambda s, b, h, q, k: s - torch.norm(t["place"][q] - t["place"][k], dim=-1),
    "vector norm": lambda t: lambda s, b, h, q, k: s + torch.linalg.vector_norm(t["place"][q], dim=-1),
    "norm of order 2": lambda t: lambda s, b, h, q, k: (
        s + t["frames"][q].norm(2) + torch.norm(t["frames"][k], 2, -1).sum()
    ),
    "vector norm of order 2": lambda t: lambda s, b, h, q, k: (
        s + torch.linalg.vector_norm(t["frames"][q], 2) + torch.linalg.norm(t["frames"][k], 2, 0).sum()
    ),
    "dot": lambda t: lambda s, b, h, q, k: s + torch.dot(t["place"][q], t["place"][k]),
    "@": lambda t: lambda s, b, h, q, k: s * (t["place"][q] @ t["weight"]),
    "@ of a frame": lambda t: lambda s, b, h, q, k: s + (t["frames"][q] @ t["place"][k]).amax(-1),
    "a whole tensor": lambda t: lambda s, b, h, q, k: s + (t["weight"] * t["place"][k]).mean(),
    "of the score": lambda t: lambda s, b, h, q, k: torch.tanh(s * t["weight"]).sum(),
    "max, min": lambda t: lambda s, b, h, q, k: s + t["place"][q].max() - t["place"][k].min(),
    "prod": lambda t: lambda s, b, h, q, k: s + t["place"][k].prod(),
    "over one dimension": lambda t: lambda s, b, h, q, k: s + t["frames"][k].sum(0).amin(),
    "over both": lambda t: lambda s, b, h, q, k: s + t["frames"][k].sum((0, -1)) + t["frames"][q].sum(),
    "an axis by name": lambda t: lambda s, b, h, q, k: s + t["frames"][k].sum(axis=0).amin(axis=-1),
    "an axis of what is made": lambda t: lambda s, b, h, q, k: (
        torch.stack([s, t["place"][q][0]], axis=0).amax()
        + torch.cat([t["place"][k], t["weight"]], axis=-1).sum(())
    ),
    "kept dimensions": lambda t: lambda s, b, h, q, k: (
        s + (t["frames"][k] - t["frames"][k].mean(-1, keepdim=True)).square().sum()
    ),
    "kept dimensions, by place": lambda t: lambda s, b, h, q, k: (
        s + (t["place"][k] / t["place"][k].norm(2, -1, True)).sum() - t["frames"][q].mean(0, True).amax()
    ),
    "a dtype to reduce in": lambda t: lambda s, b, h, q, k: (
        s + (t["halves"][k].sigmoid() * 60000).sum(dtype=torch.float32) * 1e-5
        + (t["place"][q] * 3).sum(-1, dtype=torch.int32) + (t["place"][k] * 3).prod(dtype=torch.int64) * 0.1
        + torch.linalg.vector_norm(t["halves"][q].tanh() * 60000, dtype=torch.float32) * 1e-5
    ),
    "the larger of two": lambda t: lambda s, b, h, q, k: (
        s + torch.max(t["place"][q], other=t["place"][k]).sum() + t["place"][q].min(other=t["weight"]).sum()
    ),
    "products by keyword": lambda t: lambda s, b, h, q, k: (
        s + torch.dot(t["place"][q], tensor=t["place"][k]) + t["frames"][q].mv(vec=t["place"][k]).amax()
    ),
    "where": lambda t: lambda s, b, h, q, k: s + torch.where(t["place"][q] > 0, t["place"][k], 0.0).sum(),
    "clamp": lambda t: lambda s, b, h, q, k: s + t["place"][q].clamp(-0.5, 0.5).sum(-1),
    "entries": lambda t: lambda s, b, h, q, k: s + (t["place"][q] * 2)[1] - (t["place"][k] * 2)[-2:].sum(),
    "stack": lambda t: lambda s, b, h, q, k: torch.stack([s, t["place"][q][0], s * 2]).amax(0),
    "cat": lambda t: lambda s, b, h, q, k: s + torch.cat([t["place"][q], t["weight"]]).mean(),
    "a scalar beside bytes": lambda t: lambda s, b, h, q, k: s + (t["bytes"][q] * k).sum() * 0.01,
    "a scalar by keyword": lambda t: lambda s, b, h, q, k: (
        s + torch.minimum(t["bytes"][q], other=k * 9).sum() * 0.01 + torch.rsub(t["bytes"][q], k * 9)[0] * 0.1
    ),
    "a float beside bytes": lambda t: lambda s, b, h, q, k: (s * 0.01 * t["bytes"][q]).sum(),
    "mean of halves": lambda t: lambda s, b, h, q, k: (
        s + (t["halves"][k].abs() * 20000).mean().float() * 1e-4
    ),
    "norm of halves": lambda t: lambda s, b, h, q, k: s + (t["halves"][k] * 1000).norm().float() * 1e-3,
    "dot of halves": lambda t: lambda s, b, h, q, k: (
        s + torch.dot(t["halves"][q] * 200, t["halves"][k].abs() - t["halves"][k] * 200).tanh()
    ),
    "dot of bytes": lambda t: lambda s, b, h, q, k: s + t["bytes"][q] @ t["bytes"][k] * 0.1,
    "stack of two dtypes": lambda t: lambda s, b, h, q, k: (
        s + (torch.stack([t["bytes"][k, 0], q]) * 100).sum() * 1e-3
    ),
    "of integers": lambda t: lambda s, b, h, q, k: s + t["tags"][b, q].sum() * 0.1,
    "other shapes": lambda t: lambda s, b, h, q, k: (
        s * t["frames"][q].reshape(6)[-1] + (t["frames"][k].view(3, -1) * t["frames"][q].flatten()[:2]).sum()
        + (s.expand(3) * t["place"][k]).amax() + torch.broadcast_to(t["place"][q], (2, 3)).mean()
        + (t["place"][q].unsqueeze(1) * t["place"][k].unsqueeze(0)).sum() + s.reshape(1, -1).squeeze()
    ),
}  # fmt: skip
MASKS: dict[str, Made] = {
    "any": lambda t: lambda b, h, q, k: (t["tags"][b, q] == t["tags"][b, k]).any(),
    "all": lambda t: lambda b, h, q, k: torch.all(t["tags"][b, q] <= t["tags"][b, k] + 1, dim=-1),
    "one of several": lambda t: lambda b, h, q, k: (t["tags"][b, k][0] == t["wanted"]).any() | (q == k),
    "one of several, by another dimension": lambda t: lambda b, h, q, k: (
        t["wanted"] == (k // 4).unsqueeze(-1)
    ).any(dim=-1) | (q == k),
    "any of any": lambda t: lambda b, h, q, k: (t["tags"][b, q][:, None] == t["tags"][b, k][None]).any(),
    "None before all": lambda t: lambda b, h, q, k: (q[None, None] >= k[..., None]).squeeze((0, 1)),
    "None in a captured tensor": lambda t: lambda b, h, q, k: (
        t["tags"][b, q, None] == t["tags"][None, b, k, :, None]
    ).squeeze(0).any(-1).any(0),
    "count": lambda t: lambda b, h, q, k: (t["tags"][b, q] == t["tags"][b, k]).sum() >= 1,
    "count_nonzero": lambda t: lambda b, h, q, k: torch.count_nonzero(t["tags"][b, k]) > 2,
    "distance": lambda t: lambda b, h, q, k: (t["place"][q] - t["place"][k]).square().sum(-1) < 4,
}


def qkv() -> list[Tensor]:
    return [torch.randn(2, 1, LENGTH, 16, requires_grad=True) for _ in range(3)]


# interpreted kernels have the same scalars as all others: a few names stand for them in the quick tests
CASES = [(name, ("REFERENCE", None, "INTERPRET")) for name in ("distance", "@ of a frame", "stack")]
CASES += [(name, ("REFERENCE", None)) for name in SCORES if name not in dict(CASES)]
LONG = [
    pytest.param(
        name, ("REFERENCE", "INTERPRET"), marks=pytest.mark.every if number % 3 else pytest.mark.long
    )
    for number, (name, _) in enumerate(CASES[3:])
]


@pytest.mark.parametrize(("name", "backends"), [*CASES, *LONG])
def test_scores_and_gradients(name: str, backends: tuple[str | None, ...]) -> None:
    """Beside torch's scores, and the gradients of the dense reference; learned rows get theirs."""
    inputs, captured = qkv(), tensors()
    learned = [captured[key].requires_grad_() for key in ("place", "frames", "weight")]
    made = SCORES[name](captured)
    plain = [x.detach() for x in inputs]
    # torch's flex_attention would compile the dense function that it calls
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        wanted = theirs.flex_attention(*plain, made)
    expected: Any = None
    for backend in backends:
        options = None if backend is None else {"BACKEND": backend}
        out = flex_attention(*inputs, made, kernel_options=options)
        torch.testing.assert_close(out.detach(), wanted, atol=2e-5, rtol=1e-4)
        grads = torch.autograd.grad(out.sin().sum(), [*inputs, *learned], allow_unused=True)
        expected = grads if expected is None else expected
        for found, known in zip(grads, expected, strict=True):
            assert (found is None) == (known is None)
            if found is not None:
                torch.testing.assert_close(found, known, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    made, inputs = MASKS[name](tensors()), [x.detach() for x in qkv()]
    dense = theirs.create_mask(made, 2, 1, LENGTH, LENGTH, "cpu")
    assert torch.equal(create_mask(made, 2, 1, LENGTH, LENGTH, "cpu"), dense)
    mask = create_block_mask(made, 2, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, dense).nan_to_num(0.0)
    for backend in BACKENDS:
        options = None if backend is None else {"BACKEND": backend}
        out = flex_attention(*inputs, block_mask=mask, kernel_options=options)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


IN_GRAPHS = ("distance", "@ of a frame", "kept dimensions", "stack", "of integers", "a scalar beside bytes")


@pytest.mark.parametrize("name", long_but({"distance", "stack", "of integers"}, IN_GRAPHS))
def test_in_a_compiled_graph(name: str) -> None:
    torch._dynamo.reset()
    inputs, captured = qkv(), tensors()
    captured["place"].requires_grad_()
    made = SCORES[name](captured)
    attend = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(attend(*inputs, made), flex_attention(*inputs, made))


def test_the_root_of_nothing_has_a_gradient_of_0() -> None:
    place = torch.zeros(LENGTH, 3, requires_grad=True)
    out = flex_attention(*qkv(), lambda s, b, h, q, k: s - (place[q] - place[k]).norm())
    (grad,) = torch.autograd.grad(out.sum(), place)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: x[0].norm(1), lambda x: x[0].norm(p=3.0), lambda x: torch.linalg.vector_norm(x, 1),
        lambda x: torch.linalg.norm(x, 2), lambda x: torch.linalg.norm(x, ord="nuc"),
    ],
)  # fmt: skip
def test_norms_of_other_orders_are_refused(norm: Callable[[Tensor], Tensor]) -> None:
    frames = tensors()["frames"]
    with pytest.raises(errors.ReductionError):
        trace(lambda s, b, h, q, k: s + norm(frames[q]), "score")


def test_a_scalar_beside_halves_is_not_rounded() -> None:
    """torch computes half types in float32, and rounds the result."""
    halves, large = torch.full((LENGTH, 2), 1e-3).half(), torch.tensor(1e5)
    inputs = qkv()
    out = flex_attention(*inputs, lambda s, b, h, q, k: s + (halves[k] * large)[0] * (k < 9))
    bias = (halves[:, 0] * large).float() * (torch.arange(LENGTH) < 9)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, bias.expand(LENGTH, LENGTH))
    torch.testing.assert_close(out, expected)

"""What torch computes while a mod is traced is noticed, and a captured number is never a constant."""

from __future__ import annotations

import math

import pytest
import torch

from flexmod.ir.trace import trace

docs = torch.tensor([0, 0, 1, 1, 2, 2])
table = torch.rand(2, 3)
NUMBER, ONE, COUNT = torch.tensor(0.5), torch.tensor(1.0), torch.tensor(1)


def hidden(tensor: torch.Tensor) -> float:
    with torch._C.DisableTorchFunction():
        return tensor.item()


class Reader:
    """A number of a class of its own, which reads a tensor."""

    def __float__(self) -> float:
        return float(docs[0])


READS = {
    "item": lambda s, b, h, q, k: s * NUMBER.item(),
    "float": lambda s, b, h, q, k: s * float(NUMBER),
    "int": lambda s, b, h, q, k: s * int(NUMBER),
    "if": lambda s, b, h, q, k: s if NUMBER > 3 else s * 2,
    "tolist": lambda s, b, h, q, k: s * NUMBER.tolist(),
    "numpy": lambda s, b, h, q, k: s * NUMBER.numpy()[()],
    "an index": lambda s, b, h, q, k: s * (1.0, 2.0, 3.0)[docs[0]],
    "math": lambda s, b, h, q, k: s * math.sqrt(NUMBER),
    "max": lambda s, b, h, q, k: s * max(NUMBER, 3),
    "computed": lambda s, b, h, q, k: s * (NUMBER * 2),
    "an element": lambda s, b, h, q, k: s * docs[0],
    "an element, computed": lambda s, b, h, q, k: s * (docs[0] * 2),
    "data": lambda s, b, h, q, k: s * NUMBER.data,
    "text": lambda s, b, h, q, k: s * float(f"{NUMBER:.3f}"),
    "in": lambda s, b, h, q, k: s if NUMBER in (1, 2) else s * 2,
    "a range": lambda s, b, h, q, k: s + sum(q for _ in range(docs[0])),
    "behind the mode": lambda s, b, h, q, k: s * hidden(NUMBER),
    "an operator": lambda s, b, h, q, k: s * torch.ops.aten.mul.Tensor(NUMBER, NUMBER),
    "an own class": lambda s, b, h, q, k: s * Reader(),
    "an own class in a method": lambda s, b, h, q, k: s.mul(Reader()),
}

@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_value_is_noticed(name: str) -> None:
    assert trace(READS[name], "score").eager


UNREAD = {
    "before": lambda s, b, h, q, k: NUMBER * s,
    "after": lambda s, b, h, q, k: s * NUMBER,
    "mul": lambda s, b, h, q, k: torch.mul(s, NUMBER),
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, NUMBER),
    "minimum": lambda s, b, h, q, k: torch.minimum(NUMBER, s),
    "clamp": lambda s, b, h, q, k: s.clamp(max=NUMBER),
    "alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=NUMBER),
    "alpha of 1": lambda s, b, h, q, k: torch.rsub(s, q, alpha=ONE),
    "full_like": lambda s, b, h, q, k: s + torch.full_like(s, NUMBER),
    "an index": lambda s, b, h, q, k: s * table[h, COUNT],
    "sizes": lambda s, b, h, q, k: s * NUMBER / docs.shape[0] if NUMBER.dtype == torch.float32 else s,
    "the result": lambda s, b, h, q, k: NUMBER,
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_number_that_is_not_read_is_no_constant(name: str) -> None:
    traced = trace(UNREAD[name], "score")
    assert not traced.eager
    assert any(t is NUMBER or t is ONE or t is COUNT for t in traced.tensors)
    assert not any(n.is_const and n.value in (0.5, 1.0) for n in traced.graph.nodes)


def test_tensors_whose_sizes_a_mod_reads_are_known() -> None:
    traced = trace(lambda s, b, h, q, k: s / docs.shape[0], "score")
    assert traced.tensors == () and traced.described == (docs,) and not traced.eager

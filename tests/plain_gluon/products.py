"""Products of the matrix unit, which go on while their partition does."""

from __future__ import annotations

from typing import Any

import numpy as np

from plain_gluon.memory import Shared
from plain_gluon.order import Actor, Race, Read, source_line
from plain_gluon.tiles import Tile, plain, tile


class Product(Read):
    """A product of the matrix unit: `operands` are those in shared memory, read until it has been waited for;
    `before` is the product whose result it adds to.
    """

    def __init__(
        self, actor: Actor, operands: list[Shared], result: np.ndarray, before: Product | None
    ) -> None:
        super().__init__(actor)
        self.operands, self.result, self.before, self.pending = operands, result, before, True
        self.issued = actor.tick()
        self._look("reads what has not come yet")
        actor.products.append(self)

    def end(self) -> None:
        self.pending = False
        self._look("reads what is written meanwhile")
        self.actor.tick()
        if not self.fault:
            for operand in self.operands:
                operand.read(self.actor)
        self.finish()

    def use(self) -> None:
        product: Product | None = self
        while product is not None and not product.is_used:
            super(Product, product).use()
            product = product.before

    def _look(self, fault: str) -> None:
        if not all(operand.written_before(self.issued, by_a_unit=True) for operand in self.operands):
            self.spoil(fault)


def multiply(actor: Actor, a: Any, b: Shared, c: Any, use_acc: bool, is_async: bool) -> Product:
    """a @ b, and c if `use_acc`; `a` is in registers or in shared memory."""
    left, right = a.array if isinstance(a, Shared) else plain(a), b.array
    result, before = left @ right, None
    if use_acc:
        if isinstance(c, Product):
            before, result = c, result + c.result
        else:
            before, result = c.product, result + c.view(np.ndarray)
    product = Product(actor, [x for x in (a, b) if isinstance(x, Shared)], result, before)
    if not is_async:
        wait(actor, 0)
    return product


def wait(actor: Actor, pending: int, deps: Any = ()) -> Any:
    """Until no more than so many products are under way. The results that `deps` names."""
    while len(actor.products) > pending:
        actor.products.pop(0).end()
    results = []
    for product in deps:
        if not isinstance(product, Tile) and product.pending:
            raise Race(f"a product that is still under way: {product.line}, {source_line()}")
        results.append(product if isinstance(product, Tile) else tile(product.result, product))
    return results[0] if len(results) == 1 else tuple(results)

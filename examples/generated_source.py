"""What flexmod makes of a mod: the graph that it traced, and the complete module of kernels that runs.

The module is kept as a file in flexmod's cache folder. The mods are device functions in it, with the captured
tensors under their own names and the lines of this file in comments.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flexmod


def main() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    document_of = torch.arange(1024) // 300

    def capped_alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 20 * torch.tanh(score / 20) - slopes[h] * (q_idx - kv_idx)

    def causal_documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (document_of[q_idx] == document_of[kv_idx]) & (q_idx >= kv_idx)

    explanation = flexmod.explain(score_mod=capped_alibi, mask_mod=causal_documents)
    print(explanation)
    print(explanation.source)


if __name__ == "__main__":
    main()

"""Mods whose device functions tests/golden/mod_texts.txt holds, with their lines: add new ones at the end."""

import torch

docs = torch.arange(64) // 10
prefix = torch.tensor([8, 16], dtype=torch.int32)
slopes = torch.linspace(0.1, 1.0, 4)
slopes_bf16 = slopes.bfloat16()
bias = torch.linspace(-1.0, 1.0, 4 * 127).view(4, 127)
intervals = torch.tensor([[0, 8], [4, 20], [10, 64]], dtype=torch.int32)
image = (torch.arange(64) // 24).to(torch.uint8)
slope = torch.tensor(0.5, requires_grad=True)
offsets = torch.tensor([3, -2])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx <= 24) & (kv_idx - q_idx <= 8)


def document(b, h, q_idx, kv_idx):
    same = docs[q_idx] == docs[kv_idx]
    return same & (q_idx >= kv_idx)


def prefix_lm(b, h, q_idx, kv_idx):
    return (kv_idx < prefix[b]) | (q_idx >= kv_idx)


def attended(b, h, q_idx, kv_idx):
    row = intervals[image[kv_idx]]
    return (q_idx >= row[0]) & (q_idx < row[1])


def neighborhood(b, h, q_idx, kv_idx):
    row_q, column_q = q_idx // 8, q_idx % 8
    row_k, column_k = kv_idx // 8, kv_idx % 8
    return (abs(row_q - row_k) <= 2) & (abs(column_q - column_k) <= 2)


def diagonal_band(b, h, q_idx, kv_idx):
    return (q_idx * 0.01 + kv_idx * 0.1 > 0.6) & (q_idx * 0.5 >= kv_idx)


def alibi(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx) * slopes[h]


def alibi_bf16(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx) * slopes_bf16[h] * 0.1


def soft_cap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def relative_bias(score, b, h, q_idx, kv_idx):
    return score + bias[h, q_idx - kv_idx + 63]


def from_the_end(score, b, h, q_idx, kv_idx):
    return score * slopes[-1] + bias[-2, q_idx - 64] + slope


def shared(score, b, h, q_idx, kv_idx):
    near = torch.exp(-((q_idx - kv_idx) ** 2) * 0.01) * torch.sigmoid(score)
    return torch.where(near > 0.5, near, score) + torch.log1p(near)


def everything(b, h, q_idx, kv_idx):
    return True


def of_the_query(b, h, q_idx, kv_idx):
    start = q_idx // 7 * 7 + offsets[b]
    return (kv_idx >= start) & (docs[q_idx] + 1 == start // 7)


def half_arithmetic(score, b, h, q_idx, kv_idx):
    return score.bfloat16() * 1.01 + slopes_bf16[h]


def functions(score, b, h, q_idx, kv_idx):
    turned = torch.sqrt(q_idx) + q_idx / 49 + (q_idx - 3) % 5 + (q_idx - 3) // 5 + (1 << h)
    return score**7 + turned + score % 0.5 + torch.round(score)


TEXT_MODS = {
    "mask": (
        causal, window, document, prefix_lm, attended, neighborhood, everything, of_the_query, diagonal_band,
    ),
    "score": (
        alibi, alibi_bf16, soft_cap, relative_bias, from_the_end, shared, half_arithmetic, functions,
    ),
}  # fmt: skip

"""What torch's flex_attention of the installed release has, for tests that compare with it."""

from __future__ import annotations

import inspect

import pytest
from torch.nn.attention.flex_attention import create_block_mask

# `separate_full_blocks`, and the parts of a BlockMask that came with it
SEPARATES = "separate_full_blocks" in inspect.signature(create_block_mask).parameters
separates = pytest.mark.skipif(not SEPARATES, reason="torch's create_block_mask has no separate_full_blocks")

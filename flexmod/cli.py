"""The command line: `python -m flexmod`, or `flexmod`.

flexmod compare causal softcap --seq 4096
flexmod explain sliding_window
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from flexmod.compare import NAMED, choose, compare, usual_setting
from flexmod.errors import FlexmodError
from flexmod.explain import explain

DTYPES = ("float16", "bfloat16", "float32", "float64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit status: 0; 1 where flexmod and the reference differ; 2 for a mistake."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except FlexmodError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flexmod", description="A compiler for attention variants.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    comparing = commands.add_parser("compare", help="flexmod beside SDPA: results, times, the block mask")
    comparing.add_argument("names", nargs="*", default=["causal"], metavar="NAME", help=", ".join(NAMED))
    for size in ("batch", "heads", "seq", "dim"):
        comparing.add_argument(f"--{size}", type=_positive)
    comparing.add_argument("--dtype", choices=DTYPES)
    comparing.add_argument("--device", help="cuda if there is one, else cpu")
    comparing.add_argument("--flex", action="store_true", help="torch's compiled flex_attention too (CUDA)")
    comparing.set_defaults(run=_compare)

    explaining = commands.add_parser("explain", help="the graph of a mask or score mod, and the source")
    explaining.add_argument("name", metavar="NAME", help=", ".join(NAMED))
    explaining.set_defaults(run=_explain)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _compare(options: argparse.Namespace) -> int:
    agree = True
    for position, name in enumerate(options.names):
        if position:
            print()
        comparison = compare(
            name,
            batch=options.batch,
            heads=options.heads,
            seq=options.seq,
            dim=options.dim,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            device=options.device,
            flex=options.flex,
        )
        agree = agree and comparison.agrees
    return 0 if agree else 1


def _explain(options: argparse.Namespace) -> int:
    mods = choose(options.name, usual_setting())
    explanation = explain(score_mod=mods.score, mask_mod=mods.mask)
    print(explanation)
    print()
    print(explanation.source)
    return 0

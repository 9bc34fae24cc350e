"""Plants one fault at a time in a copy of the tree, and tells whether the tests of `make test` catch it.

    python tests/planted_faults.py            every fault
    python tests/planted_faults.py --long     with all cases of its tests
    python tests/planted_faults.py 3 17       these faults alone, by number

A fault is caught when a named test fails. Run it by hand after a change of what `make test` runs. It exits
with 1 where a fault was missed. `tests/test_planted_faults.py` holds each text to occur once in its file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SECONDS = 600  # for the tests of one fault


class Fault(NamedTuple):
    file: str
    text: str  # occurs once in the file
    replacement: str
    tests: str  # arguments of pytest


FAULTS = (
    # ir
    Fault("flexmod/ir/ops.py", "(g / b, -g * y / b)", "(g / b, g * y / b)", "tests/ir/test_ops.py"),
    Fault("flexmod/ir/bounds.py", "return a[0] - b[1], a[1] - b[0]", "return a[0] - b[0], a[1] - b[1]",
          "tests/ir/test_ops.py"),
    Fault("flexmod/ir/bounds.py", "return choose_bounds(one[0] >= 0, ends, ends[::-1])", "return ends",
          "tests/block_mask/test_spans.py tests/ir/test_intervals.py"),
    Fault("flexmod/ir/passes.py", "inner.args[::-1]", "inner.args", "tests/ir/test_passes.py"),
    Fault("flexmod/ir/passes.py", "builder.const(1.0 / value)", "builder.const(value)",
          "tests/ir/test_passes.py"),
    Fault("flexmod/ir/derivative.py", "dtype.is_floating_point or dtype.itemsize <= source.itemsize", "True",
          "tests/ir/test_reductions.py"),
    Fault("flexmod/ir/watched.py", "for table in TABLES:", "for table in TABLES[:2]:",
          "tests/test_watched.py -k does_not_trace_again"),
    Fault("flexmod/ir/watched.py", "version_of(tensor), tensor.data_ptr())", "0, tensor.data_ptr())",
          "tests/test_watched.py"),
    # block_mask
    Fault("flexmod/block_mask/refine.py", "mixed = kept.any(-1) & ~kept.all(-1)", "mixed = kept.any(-1)",
          "tests/block_mask/test_refine.py tests/block_mask/test_special_floats.py"),
    Fault("flexmod/block_mask/combine.py", "if lengths[axis] % block[axis]:", "if False:",
          "tests/block_mask/test_combine.py"),
    Fault("flexmod/block_mask/tiles.py", "width = columns + 1", "width = columns",
          "tests/block_mask/test_runs.py"),
    Fault("templates/block_mask.jinja", "(number > 0) & (number < 4)", "(number > 0)",
          "tests/block_mask/test_generated.py"),
    # codegen, by distance
    Fault("templates/distance.jinja", "tl.maximum(place - middle, 1 - M), N - 1)",
          "tl.maximum(place - middle, 1 - N), M - 1)", "tests/codegen/test_by_distance.py"),
    Fault("flexmod/codegen/by_distance.py", "least, fixed = TWICE, learned", "least, fixed = ONCE, ()",
          "tests/codegen/test_by_distance.py"),
    # backends
    Fault("flexmod/backends/decoding.py", 'return builder.const(0, int32) if length == 1 else of("remainder"',
          'return builder.const(0, int32) if length == 1 else of("floor_divide"', "tests/test_decoding.py"),
    Fault("flexmod/backends/decoding.py", "[runs.rows] if runs else mask.storage.by_row()", "[]",
          "tests/test_decoding.py"),
    Fault("flexmod/codegen/device_functions/attention.py", "before -= (stop - start) // TILE", "before -= 1",
          "tests/device_functions/test_attention.py tests/test_decoding.py"),
    Fault("flexmod/codegen/device_functions/attention.py", "(row_max - base) * (unit * LOG2E)",
          "(row_max - base) * LOG2E", "tests/test_decoding.py"),
    Fault("flexmod/backends/blocks.py", "delta -= self._grad_lse[part", "delta += self._grad_lse[part",
          "tests/test_lse.py tests/backends/test_cpu.py"),
    Fault("flexmod/backends/blocks.py", "delta -= grad_lse.masked", "delta += grad_lse.masked",
          "tests/backends/test_products.py"),
    Fault("flexmod/backends/products.py", "number *= _number(a)", "number = _number(a)",
          "tests/backends/test_products.py"),
    Fault("flexmod/backends/steps.py", "part.start - start : part.stop - start", ": part.stop - part.start",
          "tests/backends/test_products.py"),
    Fault("flexmod/backends/blocks.py", "into.masked_fill_(self._dead[part.rows][..., None], 0.0)", "pass",
          "tests/backends/test_cpu.py"),
    Fault("flexmod/backends/flash.py", "= 1.0, -of_lse", "= 1.0, of_lse",
          "tests/backends/test_cpu.py"),
    Fault("flexmod/backends/flash.py", "return x.flip(2)", "return x", "tests/backends/test_cpu.py"),
    Fault("flexmod/backends/steps.py", "(kinds != FULL).any(0)", "(kinds == PARTIAL).any(0)",
          "tests/backends/test_cpu.py"),
    # runtime
    Fault("flexmod/runtime/interpreter_corrections.py", "+ ((bits >> 16) & np.uint32(1))", "",
          "tests/runtime/test_interpreter.py"),
    Fault("flexmod/runtime/target.py", '"sm_89", "cuda", 99 * _KB', '"sm_89", "cuda", 163 * _KB',
          "tests/runtime/test_target.py tests/runtime/test_offline.py"),
    Fault("flexmod/runtime/direct.py", "for place, slot in self._numbers:", "for place, slot in ():",
          "tests/runtime/test_direct.py"),
    Fault("flexmod/runtime/direct.py", 'waits = f"\\n    {WAIT}" in getattr(function, "src", "")',
          "waits = True", "tests/codegen/test_early_start.py"),
    Fault("flexmod/codegen/render.py", 'HEAD.sub(rf"\\g<0>{wait}", text)',
          'HEAD.sub(rf"\\g<0>{wait}", text, count=1)', "tests/codegen/test_early_start.py"),
    Fault("flexmod/runtime/offline.py", "if self.tensor_columns > self.target.tensor_columns:", "if False:",
          "tests/test_ahead.py tests/runtime/test_offline.py"),
    # mods and masks
    Fault("flexmod/masks/sequences.py", "(kv_idx < tokens) | (q_idx - kv_idx < window)",
          "(kv_idx < tokens) | (q_idx - kv_idx <= window)", "tests/test_masks.py"),
    Fault("flexmod/mods/scores.py", "torch.where(kv_idx == position, logit, score)",
          "torch.where(q_idx == position, logit, score)", "tests/test_mods.py"),
    Fault("flexmod/calls/packed.py", "share = torch.sigmoid(lse - logits)",
          "share = torch.sigmoid(logits - lse)",
          "tests/test_lse.py"),
    # errors and the command line
    Fault("flexmod/errors/base.py", 'lines.append(f"  at {where}")', "pass", "tests/test_errors.py"),
    Fault("flexmod/tools/cli/options.py", "POSITIVE = click.IntRange(min=1)",
          "POSITIVE = click.IntRange(min=0)",
          "tests/test_cli.py"),
    # integrations
    Fault("flexmod/integrations/transformers.py", "missing = kv_offset + kv_length - kept.shape[-1]",
          "missing = kv_offset + kv_length - kept.shape[-1] - 1", "tests/integrations/test_transformers.py"),
    Fault("flexmod/integrations/transformers.py", "q_idx + q_offset, kv_idx + kv_offset)",
          "q_idx + q_offset, kv_idx)", "tests/integrations/test_transformers.py"),
    # the operation of graphs, autograd and what a backward saves
    Fault("flexmod/calls/library.py", "max_scores if asked.want_max else None",
          "None", "tests/test_library.py"),
    Fault("flexmod/calls/autograd.py", "captured = [t.clone() if t.is_inference() else t for t in captured]",
          "captured = [*captured]", "tests/test_saved.py"),
    Fault("flexmod/calls/autograd.py", "grad_out = out.new_zeros(()).expand_as(out)",
          "grad_out = out.new_ones(()).expand_as(out)", "tests/test_attention.py"),
    Fault("flexmod/calls/autograd.py", "if same_memory and version_of(own) != version:", "if False:",
          "tests/test_saved.py"),
    # codegen
    Fault("flexmod/codegen/spec.py", "is None and fits and not verdict.losses",
          "is None and fits", "tests/backends/test_hopper.py"),
    Fault("flexmod/codegen/cache.py", "if not path.is_file() or path.read_bytes() != data:",
          "if not path.is_file():", "tests/codegen/test_cache.py"),
    # templates
    Fault("templates/hopper_forward.jinja", "KV_B!, HQ!, HKV!, M!, N!,", "KV_B!, HQ!, HKV!, M!, N,",
          "tests/test_plan.py"),
    Fault("templates/forward.jinja", "decay = tl.exp2(row_max2 - new_row_max2)",
          "decay = tl.exp2(new_row_max2 - row_max2)", "tests/test_large_scores.py"),
    Fault("templates/backward.jinja", "delta = tl.load(DELTA + statistics, mask=in_m, other=0.0)",
          "delta = tl.load(DELTA + statistics, mask=in_m, other=0.0) * 0.5", "tests/test_gradients.py"),
    Fault("templates/hopper_weights.jinja", '{{ add_weights("decay") -}}',
          "{{ add_weights() -}}", "tests/codegen/test_hopper_in_python.py"),
    Fault("flexmod/runtime/gluon.py", "lt.and.s32 {0}, ${2}, 0, {0};", "lt.and.s32 {0}, 0, ${2}, {0};",
          "tests/runtime/test_gluon.py"),
    # device functions
    Fault("flexmod/codegen/device_functions/attention.py", "run += tl.where(ended, 2, 0)",
          "run += tl.where(ended, 0, 0)", "tests/backends/test_triton.py"),
    Fault("flexmod/codegen/device_functions/attention.py", "(grown - total) - restored",
          "restored - (grown - total)",
          "tests/device_functions/test_attention.py"),
    Fault("flexmod/codegen/device_functions/runs.py", "mask=inside & (tile > 0), other=EMPTY",
          "mask=inside & (tile > 1), other=EMPTY", "tests/block_mask/test_generated.py"),
    Fault("flexmod/codegen/device_functions/hopper.py", "rest = x - rounded", "rest = rounded - x",
          "tests/device_functions/test_hopper.py"),
)  # fmt: skip


def run(folder: Path, tests: str, long: bool) -> tuple[bool, str]:
    """Whether a test failed in the copy of the tree, and the first that did."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'tests'}", "OMP_NUM_THREADS": "1"}
    environment.pop("FLEXMOD_CACHE_DIR", None)
    done = subprocess.run(
        command if long else [*command, "-m", "not long and not every"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    failed = [
        line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    # a fault that writes outside of memory may also end the process, after its test has failed
    ended = done.returncode == 1 or done.returncode < 0
    return ended and bool(failed), failed[0] if failed else done.stdout[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("faults", nargs="*", type=int, metavar="NUMBER")
    parser.add_argument("--long", action="store_true")
    asked = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tree"
        shutil.copytree(
            ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "shared")
        )
        for number in asked.faults or range(len(FAULTS)):
            fault = FAULTS[number]
            path = folder / fault.file
            before = path.read_text()
            path.write_text(before.replace(fault.text, fault.replacement))
            began = time.monotonic()
            caught, what = run(folder, fault.tests, asked.long)
            path.write_text(before)
            missed += not caught
            seconds, said = time.monotonic() - began, "caught" if caught else "MISSED"
            print(f"{number:2} {said} {seconds:4.0f} s  {fault.file}", flush=True)
            print(f"   {fault.text}  ->  {fault.replacement}\n   {what}", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())

"""Two layers of Llama 8B in Hugging Face Transformers, with flexmod, sdpa and flex_attention, all in one run.

    python -m benchmarks.transformers_llama                 8192 tokens, bfloat16
    python -m benchmarks.transformers_llama --cpu-smoke     tiny, on the CPU: does the script work

Three cases: one causal sequence; eight sequences packed in it (by position_ids); Mistral's window of 1024.
Times are for the model without its head: the forward without gradients, and the forward with backward. The
implementations take turns; a time is the median of the rounds' medians. The table compares outputs with
sdpa's, which differ like two bfloat16 computations. Results go to OUT/transformers.json and .md (--out).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import workers
from benchmarks.measure_row import Runs, noted, peak_mib, take_turns

IMPLEMENTATIONS = ("sdpa", "flex_attention", "flexmod")
CASES = ("causal", "packed", "window")
SECONDS = 240  # of a case, at most; the first one imports everything, and compiles most
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 2, "vocab_size": 1024, "max_position_embeddings": 8192, "pad_token_id": 0,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Case:
    name: str
    rounds: int
    tiny: bool


def main() -> None:
    options = arguments()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    cases = [Case(name, 1 if options.cpu_smoke else options.rounds, options.cpu_smoke) for name in CASES]
    results = []
    limits = {"case_seconds": SECONDS, "total_seconds": 2 * SECONDS}
    for outcome in workers.run(measure, [cases], workers=1, **limits, patience=3):
        results.append(asdict(outcome))
        (out / "transformers.json").write_text(json.dumps(results, indent=1))
        print(f"[{outcome.seconds:5.1f} s] {outcome.case.name} {outcome.error[-400:]}", file=sys.stderr)
    report = table(results)
    (out / "transformers.md").write_text(report + "\n")
    print(report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns that each implementation takes")
    parser.add_argument("--cpu-smoke", action="store_true")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for results")
    return parser.parse_args()


def measure(case: Case) -> dict[str, Any]:
    """ms, first calls in s, peak MiB of a step, distance from sdpa, faults: each by implementation."""
    from flexmod.integrations.transformers import register

    register()
    faulthandler.dump_traceback_later(SECONDS - 5)  # where one that does not end was
    device = torch.device("cpu" if case.tiny else "cuda")
    inputs, length = model_inputs(case, device)
    result: dict[str, Any] = {
        kind: {} for kind in ("faults", "distance", "first_s", "ms", "rounds_ms", "mib")
    }
    runs: dict[str, Runs] = {}
    exact: Tensor | None = None
    for name in IMPLEMENTATIONS:
        if case.tiny and name == "flex_attention":
            continue  # its CPU kernels have no backward
        with noted(result["faults"], name):
            model = make(case, name, device)
            grad_out = torch.randn(1, length, model.config.hidden_size, device=device, dtype=model.dtype)
            started = time.perf_counter()
            forward, step = ways(model, inputs, grad_out)
            found = forward().float()
            step()
            result["first_s"][name] = time.perf_counter() - started
            exact = found if exact is None else exact
            result["distance"][name] = ((found - exact).norm() / exact.norm()).item()
            result["mib"][name] = peak_mib(step)
            runs[name] = {"forward": forward, "backward": step}
            print(f"{case.name}: {name} ran", file=sys.stderr, flush=True)
    take_turns(runs, case.rounds, result)
    faulthandler.cancel_dump_traceback_later()
    return result


def make(case: Case, implementation: str, device: torch.device) -> Any:
    """A model of random weights, the same for each implementation."""
    from transformers import LlamaConfig, LlamaModel, MistralConfig, MistralModel

    shape = LLAMA_8B | (TINY if case.tiny else {})
    torch.manual_seed(0)
    with device:  # a CPU takes many seconds to draw the weights
        if case.name == "window":
            config = MistralConfig(**shape, sliding_window=32 if case.tiny else 1024)
            model = MistralModel._from_config(config, attn_implementation=implementation)
        else:
            model = LlamaModel._from_config(LlamaConfig(**shape), attn_implementation=implementation)
    return model.to(torch.float32 if case.tiny else torch.bfloat16)


def model_inputs(case: Case, device: torch.device) -> tuple[dict[str, Any], int]:
    length = 256 if case.tiny else 8192
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, LLAMA_8B["vocab_size"], (1, length), generator=generator)
    inputs: dict[str, Any] = {"input_ids": ids.to(device), "use_cache": False}
    if case.name == "packed":
        inputs["position_ids"] = (torch.arange(length, device=device) % (length // 8))[None]
    return inputs, length


def ways(
    model: Any, inputs: dict[str, Any], grad_out: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    def forward() -> Tensor:
        with torch.no_grad():
            return model(**inputs).last_hidden_state

    def step() -> None:
        model.zero_grad()
        model(**inputs).last_hidden_state.backward(grad_out)

    return forward, step


def table(results: list[dict[str, Any]]) -> str:
    rows = []
    for outcome in results:
        case, value = outcome["case"]["name"], outcome["value"] or {"faults": {"all": outcome["error"]}}
        rows += [[case, name, f"failed: {why[:80]}"] for name, why in value["faults"].items()]
        for name, ms in value.get("ms", {}).items():
            of_sdpa = value["ms"]["sdpa"]
            shares = [ms[way] / of_sdpa[way] for way in ("forward", "backward")]
            rest = (value["mib"][name], value["distance"][name], value["first_s"][name])
            rows.append([case, name, ms["forward"], shares[0], ms["backward"], shares[1], *rest])
    header = [
        "case", "implementation", "forward ms", "of sdpa", "with backward ms", "of sdpa", "peak MiB",
        "distance from sdpa", "first calls s",
    ]  # fmt: skip
    formats = ("", "", ".2f", ".2f", ".2f", ".2f", ".0f", ".1e", ".1f")
    return tabulate(rows, header, tablefmt="github", floatfmt=formats)


if __name__ == "__main__":
    main()

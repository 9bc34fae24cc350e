"""The command line: the transcripts of docs/command_line.md, and what they do not show."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

import flexmod
from flexmod.errors import base as command_errors
from flexmod.runtime import config
from flexmod.runtime.compiler_bugs import SERIALIZED
from flexmod.runtime.offline import Report
from flexmod.runtime.target import Target, named
from flexmod.tools import ahead, cli
from flexmod.tools.cli import COMMANDS, main
from flexmod.tools.cli.masks import Benchmark, Row
from flexmod.tools.comparison import Timing
from flexmod.tools.mod_names import usual_setting

PAGE = Path(__file__).parents[1] / "docs" / "command_line.md"
BLOCK = re.compile(r"^```console ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIZES = ["--heads", "2", "--seq", "256", "--dim", "16", "--device", "cpu"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the file of the page."""
    config.cache_dir()
    found = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "my_mods.py").write_text(found[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(config.CACHE_DIR)  # it is known by now
    return tmp_path


def output(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a line of a transcript prints. Of a command that goes well that is not the progress bar."""
    words = shlex.split(line)
    if words[0] == "flexmod":
        status = main(words[1:])
        printed = capsys.readouterr()
        return printed.err if status == 2 else printed.out
    switches = dict(word.split("=") for word in words if "=" in word)
    command = [sys.executable, *words[len(switches) + 1 :]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **switches}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200).stdout


def without_numbers(text: str) -> str:
    """Numbers as #, however wide the columns that they stand in."""
    text = re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text)
    lines = re.sub(r"─{2,}", "──", re.sub(r" +", " ", text)).splitlines()
    return "\n".join(line.strip() for line in lines)


TRANSCRIPTS = [match for match in BLOCK.finditer(PAGE.read_text()) if match[1] != "gpu"]
COMPILED = ("$ flexmod build", "$ flexmod warm")  # for several chips


@pytest.mark.usefixtures("timed_once")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows a machine without a GPU")
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[pytest.mark.long] if shown[2].startswith(COMPILED) else [])
        for place, shown in enumerate(TRANSCRIPTS)
    ],
)
def test_transcripts(
    place: int, folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    kind, shown = TRANSCRIPTS[place].groups()
    commands = [line for line in shown.splitlines() if line.startswith("$ ")]
    printed = "".join(f"{line}\n{output(line[2:], capsys)}" for line in commands)
    printed = printed.replace(str(folder), "~").replace(str(config.cache_dir()), "~/.cache/flexmod")
    printed = "".join(line.rstrip() + "\n" for line in printed.splitlines())
    if request.config.getoption("--update-golden"):
        text = PAGE.read_text()
        start = [match for match in BLOCK.finditer(text) if match[1] != "gpu"][place].start(2)
        end = text.index("```", start)
        PAGE.write_text(text[:start] + printed + text[end:])
        return
    if kind == "numbers":
        printed, shown = without_numbers(printed), without_numbers(shown)
    if kind != "example":
        assert printed == shown, f"{PAGE} differs; if the new text is right: pytest --update-golden"


def test_every_command_has_a_section_and_a_file() -> None:
    page = PAGE.read_text()
    for name in COMMANDS:
        assert f"\n## {name}\n" in page and f"| `{name}` |" in page
    files = {path.stem for path in Path(cli.__file__).parent.glob("*.py")}
    assert files == {"__init__", "options", *(file for file, _ in COMMANDS.values())}


@pytest.mark.usefixtures("timed_once")
def test_the_command_compares_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "causal", "softcap", *SIZES]) == 0
    printed = capsys.readouterr()
    assert "causal, B=1 H=2 S=256 D=16 float32 on cpu" in printed.out
    assert "\n\nsoftcap, B=1 H=2 S=256 D=16 float32 on cpu" in printed.out
    assert re.search(
        r"^softcap +agrees +25% +[\d.]+x / [\d.]+x +[\d.]+x / [\d.]+x$", printed.out, re.MULTILINE
    )
    assert "A dense mask (causal, softcap) is no showcase on a CPU: " in printed.out
    assert (
        "\nIt works: outputs and gradients agree with the reference for 2 of 2 masks, on cpu.\n"
        in printed.out
    )
    best = r"^Best beside SDPA \+ mask: (causal|softcap), forward [\d.e-]+x as fast, backward "
    assert re.search(best, printed.out, re.MULTILINE)
    assert printed.err.endswith("\nnext: flexmod bench causal softcap --plot chart.png\n")


@pytest.mark.usefixtures("timed_once")
def test_a_comparison_that_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = sys.modules["flexmod.tools.comparison"]
    attend = module.flex_attention
    monkeypatch.setattr(module, "flex_attention", lambda q, k, v, *a, **o: attend(q, k, 1.01 * v, *a, **o))
    assert main(["compare", "causal", "noop", *SIZES]) == 1
    printed = capsys.readouterr()
    assert (
        "\nSomething is wrong: outputs and gradients agree with the reference for 0 of 2 masks" in printed.out
    )
    assert "next:" not in printed.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["compare", "--seq", "0"], "--seq"),
        (["compare", "--dtype", "int8"], "--dtype"),
        (["show"], "MASK"),
        (["build", "causal", "--target", "sm_9000"], "--target"),
        (["causal"], "Error: No such command 'causal'. For a mask: flexmod show causal"),
        (["shwo"], "Error: No such command 'shwo'. Did you mean 'show'?"),
        (["show", "causal", "--plot", "mask.foo"], "'mask.foo' is no image; name one that ends in .png, "),
        (["show", "causal", "--plot", "mask"], "'mask' is no image; name one that ends in .png, "),
        (["bench", "causal", "--plot", "none/x.png"], "'none/x.png': there is no folder 'none'."),
        (["source", "causal", "-o", "none/x.py"], "'none/x.py': there is no folder 'none'."),
        (["source", "causal", "--standalone", "--template", "hopper-forward"], "the portable kernels"),
        (["source", "causal", "--target", "sm_90"], "--target is for --standalone"),
        (["build", "causal", "--dim", "100000"], "100000 is not in the range 1<=x<=65536."),
        (["warm", "causal", "--dim", "100000"], "100000 is not in the range 1<=x<=65536."),
        (["tune", "causal", "--seconds", "nan"], "'--seconds': 'nan' is no number."),
    ],
)
def test_the_command_refuses(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "Usage: flexmod" in printed and word in printed


def test_files_that_cannot_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.py").write_text("def x(:\n")
    for arguments, words in (
        (["show", "causal", "--plot", "none/x.png"], "none/x.png"),
        (["source", "causal", "--output", "none/x.py"], "none/x.py"),
        (["show", "broken.py:x"], "broken.py, line 1"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_a_full_disk_leaves_no_part_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, **_: object) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["source", "causal", "-o", "x.py"]) == 2
    assert not (folder / "x.py").exists()
    (folder / "link.py").symlink_to(folder / "none" / "x.py")
    assert main(["source", "causal", "-o", "link.py"]) == 2
    assert (folder / "link.py").is_symlink()


def test_an_exception_of_a_file_is_a_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The status 1 would be an answer."""
    Path("broken.py").write_text("def near(b, h, q_idx, kv_idx):\n    raise LookupError('mine')\n")
    Path("unready.py").write_text("import a_module_that_there_is_not\n")
    Path("ending.py").write_text("def near(b, h, q_idx, kv_idx):\n    raise SystemExit(0)\n")
    Path("reading.py").write_text("table = open('a_file_that_there_is_not')\n")
    Path("wrong.py").write_text("def x(:\n")
    Path("importing.py").write_text("import wrong\n")
    for name, error in (
        ("reading.py:near", "FileNotFoundError"),
        ("importing.py:near", "SyntaxError"),
        ("broken.py:near", "LookupError"),
        ("unready.py:near", "ModuleNotFoundError"),
        ("ending.py:near", "SystemExit"),
    ):
        assert main(["show", name]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("Traceback") and f"\n{error}: " in printed


def test_show_draws(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name in ("mask.png", "mask.svg", "MASK2.SVG"):
        assert main(["show", "my_mods.py:near", "--seq", "300", "--plot", name]) == 0
        assert (folder / name).stat().st_size > 500
    assert (folder / "MASK2.SVG").read_bytes() == (folder / "mask.svg").read_bytes()
    assert main(["show", "natten", "--seq", "150"]) == 0
    assert "natten, 144 queries x 144 keys" in capsys.readouterr().out


def test_source_is_what_explain_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", "causal", "--dim", "64"]) == 0
    assert "def forward_kernel(" in capsys.readouterr().out
    assert main(["source", "causal", "--template", "hopper-backward"]) == 0
    assert "def backward_kernel(" in capsys.readouterr().out


def test_source_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", "causal", "--template", "hopper-forward", "--dtype", "fp32"]) == 2
    assert capsys.readouterr().err == (
        "there is no hopper-forward for this variant: forward template: portable everywhere: float32 "
        "operands.\n"
        "  Instead: ask for the portable template, which every chip runs.\n"
    )
    assert issubclass(command_errors.NoSourceError, ValueError)


def test_build_says_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(*arguments: Any) -> Report:
        return Report(named("sm_86"), 200_000, 255, 8, 8, asm={"ptx": "mma.sync " * 4})

    monkeypatch.setattr(ahead, "compiled", compiled)
    assert main(["build", "causal", "--target", "sm_86"]) == 1
    assert capsys.readouterr().out.count("no tile fits 101376 bytes of shared memory") == 3
    assert main(["build", "causal", "--target", "sm_86", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["kernel"] for row in rows] == ["forward", "dq", "dkdv"]
    assert rows[0]["shared"] == 200_000 and rows[0]["matrix"] == {"mma.sync": 4}
    assert all(rows[0])  # each value has a name


def test_build_says_what_is_slow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def compiled(*arguments: Any) -> Report:
        return Report(named("sm_90"), 200_000, 168, 8, 8, losses=(SERIALIZED,))

    monkeypatch.setattr(ahead, "compiled", compiled)
    assert main(["build", "causal", "--target", "sm_90", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["problem"] for row in rows] == ["fits; its matrix instructions are serialized"] * 2


@pytest.mark.usefixtures("timed_once")
def test_bench_plots(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    lengths = ["--seq", "64", "--seq", "128"]
    assert main(["bench", "causal", "noop", "--heads", "1", *lengths, "--plot", "chart.png"]) == 0
    assert (folder / "chart.png").stat().st_size > 5000
    printed = capsys.readouterr()
    assert printed.out.startswith("causal, noop, B=1 H=1 D=64 float32 on cpu\n")
    assert printed.err.endswith("\nnext: open chart.png\n")


def test_a_bench_counts_from_causal_sdpa_of_the_same_length() -> None:
    fast, slow = Timing("flexmod", 0.5, 1.0, 4.0, 1.0), Timing("SDPA causal", 2.0, 1.0, 1.0, 1.0)
    rows = (
        Row(64, "", 50.0, slow),
        Row(64, "noop", 0.0, fast),
        Row(128, "", 50.0, fast),
        Row(128, "noop", 0.0, slow),
    )
    *_, header, _, first, second, third, fourth, _, note = str(
        Benchmark("noop", usual_setting("cpu"), "cpu", rows)
    ).splitlines()
    assert header.split()[:4] == ["seq", "mask", "skipped", "attention"]
    assert [line.split()[-4:][::3] for line in (first, second)] == [["1.00x", "1.00x"], ["4.00x", "0.25x"]]
    assert [line.split()[-4:][::3] for line in (third, fourth)] == [["1.00x", "1.00x"], ["0.25x", "4.00x"]]
    assert note == "speed-up: over SDPA causal of the same length"


@pytest.mark.usefixtures("timed_once")
def test_bench_times_causal_sdpa_once_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--heads", "1", "--dim", "16", "--device", "cpu", "--seq", "64", "--seq", "100"]
    assert main(["bench", "causal", "natten", "noop", *sizes, "--json"]) == 0
    rows = [
        (row["seq"], row["mask"], row["attention"]) for row in json.loads(capsys.readouterr().out)["rows"]
    ]
    ours = [(seq, mask, "flexmod") for seq in (64, 100) for mask in ("causal", "natten", "noop")]
    assert rows == [(64, "", "SDPA causal"), *ours[:3], (100, "", "SDPA causal"), *ours[3:]]


FACTS = "50.05% of all pairs, in 56.25% of the tiles; every query has keys; one run of tiles a row; "


def test_a_terminal_has_colors_and_a_pipe_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["show", "causal", "--seq", "1024", "--size", "2"]
    assert main(command) == 0
    piped = capsys.readouterr().out
    assert "\x1b" not in piped and "colors" not in piped
    assert piped.splitlines()[2:5] == ["(0, 0)", "▒▒", "██▒▒"]
    assert piped.splitlines()[6].startswith("█ all pairs are kept, ▓ from 2/3 on,") and FACTS in piped
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert main(command) == 0
    colored = capsys.readouterr().out
    assert "\x1b[38;2;70;130;210m██ full tiles" in colored
    assert "\x1b[38;2;224;123;0m██ the mask decides pair by pair" in colored
    assert main([*command, "--no-color"]) == 0
    assert capsys.readouterr().out == piped
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(command) == 0
    assert capsys.readouterr().out == piped
    assert main(["doctor"]) == 0
    assert "\x1b[3" not in capsys.readouterr().out


@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["show", "causal & padding([9])"], "flexmod compare 'causal & padding([9])'"),
        (["explain", "causal", "--score", "alibi:16"], "flexmod source causal --score alibi:16"),
        (
            ["compare", "causal", "--score", "my_mods.py:warm", *SIZES],
            "flexmod bench causal --score my_mods.py:warm --plot chart.png",
        ),
        (["doctor"], "flexmod compare sliding_window document causal"),
        (
            ["source", "causal", "--dim", "16", "--standalone", "-o", "a.py"],
            "python a.py on a GPU, or TRITON_INTERPRET=1 python a.py",
        ),
        (["source", "causal"], ""),
        (
            ["source", "causal", "--dim", "16", "--standalone", "-o", "my file.py"],
            "python 'my file.py' on a GPU, or TRITON_INTERPRET=1 python 'my file.py'",
        ),
        (["show", "causal", "--plot", "a.svg"], "open a.svg"),
        (["show", "causal", "--plot", "my mask.svg"], "open 'my mask.svg'"),
    ],
)
def test_a_command_names_the_next_one(
    arguments: list[str], hint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err.partition("next: ")[2].strip() == hint and "next:" not in printed.out


def test_a_pipe_without_a_character_for_tiles() -> None:
    """As on Windows, where it has a code page."""
    script = """
import sys
from flexmod.tools.cli import main
sys.stdout.reconfigure(encoding="cp1252")
sys.exit(main(["show", "causal", "--seq", "256"]))
"""
    result = forked.python(script)
    assert result.returncode == 0, result.stderr
    assert "\n????\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["--version"], ""),
        (["show", "causal", "--seq", "256"], "1"),
        pytest.param(["doctor"], "", marks=pytest.mark.long),
    ],
)
def test_a_pipe_that_nobody_reads(arguments: list[str], unbuffered: str) -> None:
    """Status 1 would be the answer no."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "flexmod", *arguments]
    result = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert result.returncode == 141 and b"BrokenPipe" not in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["warm", "noop", "--into", ""], ["'--into'", "the name is empty"]),
        (["source", "noop", "--output", ""], ["'--output'", "the name is empty"]),
        (["show", "caus\udce4l"], ["it cannot be read, 'utf-8' codec can't encode"]),
        (["show", "noop:3"], ["'noop:3' names no mask or score mod: noop takes no parameters."]),
        (["show", "prefix_lm:[3,'a']"], ["[3, 'a'] is no number, tuple or list of numbers."]),
        (["show", "prefix_lm:[[3],[4,5]]"], ["[[3], [4, 5]] is no number, tuple or list of numbers."]),
        (["show", "causal", "--seq", "100000000"], ["have too many tiles. Add --block 8192."]),
        (["show", "causal", "--seq", "9" * 20], ["Q_LEN is 99999999999999999999; it must be"]),
    ],
)
def test_a_mistake_is_named_before_any_work(
    arguments: list[str], parts: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in parts) and "Traceback" not in printed
    assert [path.name for path in folder.iterdir()] == ["my_mods.py"]


@pytest.mark.parametrize("command", ["compare", "bench", "tune"])
def test_a_device_whose_tensors_have_no_values(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "causal", "--device", "meta"]) == 2
    assert "device is 'meta': its tensors have no values" in capsys.readouterr().err


def test_flex_wants_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "causal", "--device", "cpu", "--flex"]) == 2
    assert "flex=True, or --flex, times torch's" in capsys.readouterr().err


def test_doctor_on_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Target("sm_90", "cuda", 227 << 10)
    rows = [(torch.device("cuda", 0), chip), (torch.device("cuda", 1), named("sm_80"))]
    module = importlib.import_module("flexmod.tools.cli.doctor")
    monkeypatch.setattr(module, "_targets", lambda: rows)
    runs = list(module._runs())
    why = "head dimensions of 32 and 32: the tiles are 64 wide"
    assert [row[1:] for row in runs if row[0] == "cuda:0"][:2] == [
        ("forward, bfloat16, head dimension 32: portable Triton kernels", why),
        (
            "forward, bfloat16, head dimension 64, 128, 256: kernels made for Hopper",
            "the chip is sm_90",
        ),
    ]
    assert [row[1:] for row in runs if row[0] == "cuda:1"] == [
        (
            f"{way}, bfloat16, head dimension 32, 64, 128, 256: portable Triton kernels",
            "sm_80 is no Hopper chip (sm_90)",
        )
        for way in ("forward", "backward")
    ]


def test_doctor_sees_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "nothing is amiss" in capsys.readouterr().out
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["doctor"]) == 1
    assert "trouble: TRITON_INTERPRET=1" in capsys.readouterr().out


def test_what_compiles_says_that_the_interpreter_is_on(folder: Path) -> None:
    script = """
from flexmod.tools.cli import main
for command in ("source noop --standalone", "build noop", "warm noop --into kernels"):
    print(main([*command.split(), "--target", "sm_80", "--dim", "16"]))
"""
    done = forked.python(script, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.stdout == "2\n2\n2\n", done.stderr
    said = (
        "environment variable TRITON_INTERPRET is '1'.\n  Instead: set it to 0 to compile kernels; "
        "kernel_options={'BACKEND': 'INTERPRET'} interprets without it.\n"
    )
    assert done.stderr.count(said) == 3 and done.stderr.endswith(said)


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "flexmod", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "compare" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [(["--help"], [*COMMANDS, "--version", "Try these first:"]), (["--version"], [flexmod.__version__])],
)
def test_help_is_quick(arguments: list[str], parts: list[str]) -> None:
    """It imports no torch, and the processor works for less than 0.7 s."""
    script = f"""
import resource, sys
from flexmod.tools.cli import main
assert main({arguments!r}) == 0
assert not {{"torch", "rich", "jinja2", "triton"}} & set(sys.modules)
used = resource.getrusage(resource.RUSAGE_SELF)
assert used.ru_utime + used.ru_stime < 0.7, used
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert all(part in result.stdout for part in parts)
    assert max(map(len, result.stdout.splitlines())) <= 80

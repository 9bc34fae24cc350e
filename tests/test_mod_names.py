"""Masks and score mods by their names: what is read, and every mistake by its whole message."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from named_mods import NAMED

from flexmod import create_mask, masks, mods
from flexmod.errors import FlexmodError, ModArityError, NotMadeError, base
from flexmod.tools.cli.masks import Benchmark
from flexmod.tools.inspection import explain
from flexmod.tools.mod_names import KNOWN, Setting, choose, choose_mask, fitting

SETTING = Setting(1, 4, 64, 16, torch.float32, torch.device("cpu"))

MINE = """
import torch

SHIFT = 3


def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= SHIFT


def warm(score, b, h, q_idx, kv_idx):
    return score / 2
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def dense(mod: Any) -> torch.Tensor:
    return create_mask(mod, 1, 4, 64, 64, device="cpu")


SAME: list[tuple[str, Any]] = [
    ("causal", masks.causal()),
    (" causal() ", masks.causal()),
    ("sliding_window", masks.sliding_window(8)),
    ("sliding_window:5", masks.sliding_window(5)),
    ("sliding_window(5, causal=False)", masks.sliding_window(5, causal=False)),
    ("dilated_window:4,3", masks.dilated_window(4, 3)),
    (
        "causal & (sliding_window(5) | prefix_lm(7))",
        lambda b, h, q, k: (q >= k) & ((q - k <= 5) & (q >= k) | (k < 7) | (q >= k)),
    ),
    ("~prefix_lm(7) | causal", lambda b, h, q, k: ~((k < 7) | (q >= k)) | (q >= k)),
    ("noop", lambda b, h, q, k: q >= 0),
    ("causal & noop", masks.causal()),
    ("by_head([0, 1, 0, 1], noop, causal)", lambda b, h, q, k: (h % 2 == 0) | (q >= k)),
]


@pytest.mark.parametrize(("text", "same"), SAME)
def test_masks(text: str, same: Any) -> None:
    assert torch.equal(dense(choose_mask(text, SETTING)), dense(same))


def test_lists_are_integer_tensors() -> None:
    ids = "[" + ", ".join(str(i // 20) for i in range(64)) + "]"
    found = dense(choose_mask(f"document({ids}, causal=True)", SETTING))
    assert torch.equal(found, dense(masks.document(torch.arange(64) // 20, causal=True)))


@pytest.mark.parametrize("name", NAMED)
def test_every_name_alone_is_sized_by_the_setting(name: str) -> None:
    found = choose(name, SETTING)
    assert explain(found.score, found.mask).source


@pytest.mark.parametrize("seq", [1, 2, 3, 7, 9, 31])
@pytest.mark.parametrize("name", NAMED)
def test_every_name_alone_fits_a_short_sequence(name: str, seq: int) -> None:
    setting = fitting(name, replace(SETTING, seq=seq))
    mask = choose(name, setting).mask
    if mask is not None:
        assert create_mask(mask, 1, 4, setting.seq, setting.seq, device="cpu").any()


def test_every_function_of_the_library_has_a_name() -> None:
    public = {"causal", "document", "tree", "vision_cross", "alibi", "softcap", "causal_score"}
    assert public <= set(KNOWN)
    assert not {"MaskMod", "ScoreMod", "Any", "Tensor"} & set(KNOWN)


def test_score_mods_come_with_the_causal_mask() -> None:
    capped = choose("softcap:15", SETTING)
    assert torch.equal(dense(capped.mask), dense(masks.causal()))
    assert str(explain(capped.score).graphs) == str(explain(mods.softcap(15)).graphs)
    assert choose("causal_score", SETTING).mask is None
    assert choose("noop", SETTING) == (None, None)
    both = choose("sliding_window:5", SETTING, "alibi")
    assert torch.equal(dense(both.mask), dense(masks.sliding_window(5)))
    assert both.score is not None
    alone = choose("noop", SETTING, "alibi:4")
    assert (alone.mask, alone.score is None) == (None, False)


def test_functions_of_a_file(mine: Path) -> None:
    near = choose(f"{mine}:near", SETTING)
    assert near.score is None
    assert torch.equal(dense(near.mask), dense(lambda b, h, q, k: q - k <= 3))
    warm = choose(f"{mine}:warm", SETTING)
    assert warm.mask is None and warm.score is not None
    assert choose("causal", SETTING, f"{mine}:warm").score is not None


def test_a_file_finds_itself_and_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mods.py").write_text("window = 3\n")
    file = tmp_path / "json.py"  # a name that another module has
    file.write_text(
        """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from neighbour_of_mods import window

@dataclass
class Near:
    window: int
    count: ClassVar[int] = 1

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= self.window

near = Near(window)
"""
    )
    before = [*sys.path], sys.modules["json"]
    near = choose(f"{file}:near", SETTING)
    assert torch.equal(dense(near.mask), dense(lambda b, h, q, k: q - k <= 3))
    assert before == (sys.path, json)
    file.write_text(file.read_text().replace("Near(window)", "Near(window - 1)"))
    near = choose(f"{file}:near", SETTING)
    assert torch.equal(dense(near.mask), dense(lambda b, h, q, k: q - k <= 2))


def test_images_are_square() -> None:
    odd = Setting(1, 1, 150, 16, torch.float32, torch.device("cpu"))
    names = "natten", "natten((12, 12), 3)", "causal"
    assert tuple(fitting(name, odd).seq for name in names) == (
        144,
        150,
        150,
    )


def test_nothing_but_literals_is_evaluated(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for text in (
        f"sliding_window(open({str(trace)!r}, 'w'))",
        f"open({str(trace)!r}, 'w')",
        "sliding_window(__import__('os').getpid())",
        "causal.__class__",
        "(lambda: 1)()",
        "sliding_window(*[5])",
        "sliding_window(**{'window': 5})",
        "[causal for causal in ()]",
        "sliding_window(1 if 1 else 2)",
        "",
    ):
        with pytest.raises(FlexmodError):
            choose(text, SETTING)
    assert not trace.exists()


known = ", ".join(KNOWN)
FORMS = (
    "  Instead: write a name, a name with parameters (sliding_window:1024 or 'sliding_window(1024)'), masks "
    "joined by & and |, ~ of one, or file.py:function."
)
ROWS: list[tuple[type[FlexmodError], Any, str]] = [
    (
        base.UnknownModName,
        lambda folder: choose("causual & causal", SETTING),
        "there is no mask or score mod named 'causual'. Did you mean 'causal'?\n"
        f"  Instead: use one of: {known}; or file.py:function for one of your own.",
    ),
    (
        base.UnknownModName,
        lambda folder: choose("my_mods:near", SETTING),
        "there is no mask or score mod named 'my_mods'.\n"
        f"  Instead: use one of: {known}; or file.py:function for one of your own.",
    ),
    (
        base.ModExpressionError,
        lambda folder: choose("my_mods.py:near & causal", SETTING),
        "'my_mods.py:near & causal' names no mask or score mod: file.py:function stands alone; combine the "
        "functions of a file in the file.\n" + FORMS,
    ),
    (
        base.ModExpressionError,
        lambda folder: choose("my_mods.py", SETTING),
        "'my_mods.py' names no mask or score mod: it names no function of the file.\n" + FORMS,
    ),
    (
        base.ModExpressionError,
        lambda folder: choose("causal & 3", SETTING),
        "'causal & 3' names no mask or score mod: 3 is neither a name nor a name with parameters.\n" + FORMS,
    ),
    (
        base.ModExpressionError,
        lambda folder: choose("causal & softcap(3.0)", SETTING),
        "'causal & softcap(3.0)' names no mask or score mod: & and | combine masks alone.\n" + FORMS,
    ),
    (
        base.ModExpressionError,
        lambda folder: choose("sliding_window(2 ** 9)", SETTING),
        "'sliding_window(2 ** 9)' names no mask or score mod: 2 ** 9 is no number, tuple or list of "
        "numbers.\n" + FORMS,
    ),
    (
        base.ModParametersError,
        lambda folder: choose("tree", SETTING),
        "tree(parents, context) does not take the parameters (): missing a required argument: 'parents'.\n"
        "  Instead: give numbers, tuples, and lists for tensors, as in tree(...).",
    ),
    (
        base.ModParametersError,
        lambda folder: choose("sliding_window(4, width=[1, 2])", SETTING),
        "sliding_window(window, causal) does not take the parameters (4, width=[1, 2]): got an unexpected "
        "keyword argument 'width'.\n"
        "  Instead: give numbers, tuples, and lists for tensors, as in sliding_window(...).",
    ),
    (
        base.ModFileError,
        lambda folder: exits(folder / "script.py"),
        "'FOLDER/script.py:near': FOLDER/script.py ends the process, with the exit status 0. Let it do so "
        'below if __name__ == "__main__" alone.\n'
        "  Instead: write path/to/file.py:function, with a function of the file's own.",
    ),
    (
        base.ModFileError,
        lambda folder: choose(f"{folder}/none.py:near", SETTING),
        "'FOLDER/none.py:near': there is no file FOLDER/none.py.\n"
        "  Instead: write path/to/file.py:function, with a function of the file's own.",
    ),
    (
        base.ModFileError,
        lambda folder: choose(f"{folder}/mine.py:nera", SETTING),
        "'FOLDER/mine.py:nera': FOLDER/mine.py has no function nera. Did you mean 'near'?\n"
        "  Instead: write path/to/file.py:function, with a function of the file's own.",
    ),
    (
        base.ModPlaceError,
        lambda folder: choose_mask("softcap", SETTING),
        "'softcap' is a score_mod, and a mask_mod is wanted here.\n  Instead: name a mask, such as causal.",
    ),
    (
        base.ModPlaceError,
        lambda folder: choose("softcap", SETTING, "alibi"),
        "'softcap' is a score_mod, and a mask_mod is wanted here.\n"
        "  Instead: name a mask first, and one score mod by --score or score_mod.",
    ),
    (
        base.ModPlaceError,
        lambda folder: choose("noop", SETTING, "causal"),
        "'causal' is a mask_mod, and a score_mod is wanted here.\n"
        "  Instead: name it in the place of the mask.",
    ),
    (
        base.MissingPlots,
        lambda folder: plotted_without_matplotlib(),
        "--plot draws with matplotlib, which is not installed.\n"
        "  Instead: pip install matplotlib, or take the numbers from --json.",
    ),
]


def exits(file: Path) -> None:
    file.write_text("import sys\nsys.exit(0)\n")
    choose(f"{file}:near", SETTING)


def plotted_without_matplotlib() -> None:
    with mock.patch.dict("sys.modules", {"matplotlib.figure": None}):
        Benchmark("causal", SETTING, "cpu", ()).plot("none.png")


@pytest.mark.parametrize(("error", "mistake", "message"), ROWS)
def test_message(error: type[FlexmodError], mistake: Any, message: str, mine: Path) -> None:
    with pytest.raises(FlexmodError) as raised:
        mistake(mine.parent)
    assert str(raised.value).replace(str(mine.parent), "FOLDER") == message
    assert type(raised.value) is error


# tests/test_tune.py, tests/test_cli.py and tests/test_warm.py have these.
ELSEWHERE = {"TuneDeviceError", "NoSourceError", "WarmFolderError"}


def test_no_class_is_missing() -> None:
    every = {
        name
        for name, value in vars(base).items()
        if isinstance(value, type) and issubclass(value, FlexmodError)
    }
    assert {row[0].__name__ for row in ROWS} | ELSEWHERE == every - {"FlexmodError"}


def test_a_function_of_a_file_that_is_no_mod(mine: Path) -> None:
    mine.write_text("from flexmod.masks import sliding_window\n\n\ndef two(a, b):\n    return a\n")
    with pytest.raises(ModArityError):
        choose(f"{mine}:two", SETTING)
    with pytest.raises(NotMadeError) as raised:  # no line: the command line's own would be quoted
        choose(f"{mine}:sliding_window", SETTING)
    assert str(raised.value) == (
        "masks.sliding_window is a function that makes a mask_mod, and it was not called.\n"
        "  Instead: call it: masks.sliding_window(window)."
    )

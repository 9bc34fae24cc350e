"""A failing call as a script that stands alone: it imports torch and flexmod."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fuzz import case as case_file
from fuzz import check
from fuzz.case import Case


def script(case: Case, why: list[str]) -> str:
    """case.py and check.py, the mods, the case, and a call of `report`. `why` is quoted at its head."""
    quoted = "\n".join(f"# {line}" for text in why for line in text.splitlines())
    body = Path(case_file.__file__).read_text() + _without_imports(Path(check.__file__).read_text())
    facts = repr(replace(case, score="", mask="")).removesuffix(")")
    return (
        f"{quoted}\n{body}\n\n"
        f'SCORE = """\\\n{case.score}"""\n\nMASK = """\\\n{case.mask}"""\n\n'
        f'if __name__ == "__main__":\n    report([{facts}, score=SCORE, mask=MASK)])\n'
    )


def _without_imports(text: str) -> str:
    """What stands below the imports; `case.py` has those that it needs."""
    return text[text.index("\nDRAWS") :]

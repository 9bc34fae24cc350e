"""A failing call as a script that stands alone: it imports torch and flexmod."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from fuzz import case as case_file
from fuzz import check, dense, events, float8_model, hostile, session
from fuzz.case import Case


def script(case: Case, why: list[str]) -> str:
    """The files of a call, its mods, the case, and a call of `report`. `why` is quoted at its head."""
    quoted = "\n".join(f"# {line}" for text in why for line in text.splitlines())
    body = "".join(map(_body, (case_file, hostile, events, session, float8_model, dense, check)))
    facts = repr(replace(case, score="", mask="")).removesuffix(")")
    return (
        f"{quoted}\nfrom __future__ import annotations\n\nimport sys\n{body}\n\n"
        f'SCORE = """\\\n{case.score}"""\n\nMASK = """\\\n{case.mask}"""\n\n'
        f'if __name__ == "__main__":\n    report([{facts}, score=SCORE, mask=MASK)])\n'
    )


def _body(file: ModuleType) -> str:
    """A file of the fuzzer, whose neighbours stand above it: as modules, where it names them so."""
    text = Path(str(file.__file__)).read_text()
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        names = [alias.name for alias in getattr(node, "names", [])]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("fuzz", "__future__")):
            own = [f"{name} = sys.modules[__name__]\n" for name in names if node.module == "fuzz"]
            lines[node.lineno - 1 : node.end_lineno] = ["".join(own), *[""] * (node.end_lineno - node.lineno)]
    return "".join(lines) + "\n"

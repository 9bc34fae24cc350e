"""Runs the command line, `flexmod` or `python -m flexmod`. Each file here is a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from flexmod.errors import FlexmodError
from flexmod.tools.cli.bench import bench
from flexmod.tools.cli.build import build
from flexmod.tools.cli.compare import compare
from flexmod.tools.cli.doctor import doctor
from flexmod.tools.cli.explain import explain
from flexmod.tools.cli.show import show
from flexmod.tools.cli.source import source
from flexmod.tools.cli.tune import tune
from flexmod.tools.cli.warm import warm


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def flexmod() -> None:
    """A compiler for attention variants.

    MASK is a mask of the library (causal), with parameters (sliding_window:1024), several of them
    ("causal & sliding_window(1024)"), a score mod (softcap:30), noop for none, or a function of your
    own (file.py:function).
    """


for _command in (show, explain, source, compare, bench, build, warm, tune, doctor):
    flexmod.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit status: 0; 1 where the answer is no (results differ, kernels do not fit); 2 for a mistake.
    """
    try:
        status = flexmod.main(arguments, prog_name="flexmod", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except FlexmodError as error:
        print(error, file=sys.stderr)
        return 2
    return int(status or 0)

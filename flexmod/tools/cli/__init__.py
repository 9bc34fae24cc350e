"""Runs the command line, `flexmod` or `python -m flexmod`.

The file of a command is imported when the command runs: imports of torch and of other files take seconds.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from shlex import quote

import click

from flexmod.errors import FlexmodError
from flexmod.errors.base import did_you_mean
from flexmod.runtime.locks import lazy_imports

# Each command, its file, and its line in `flexmod --help`.
COMMANDS = {
    "show": ("masks", "Draw a mask; print its sparsity and facts."),
    "explain": ("kernels", "Print the graphs of mods, and which kernels serve them."),
    "source": ("kernels", "Print the kernels, or write a file that runs without flexmod."),
    "compare": ("masks", "Compare results and times with SDPA's."),
    "bench": ("masks", "Time masks over lengths, beside SDPA."),
    "build": ("kernels", "Compile kernels for chips; report registers and spills."),
    "warm": ("kernels", "Fill a folder with compiled kernels to ship."),
    "tune": ("kernels", "Search for the fastest tiles on this GPU."),
    "doctor": ("doctor", "Check the installation; say which kernels run here."),
}


NO_READER = 141
PRINTING = ("click", "rich")


class Commands(click.Group):
    """Lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        file, _ = COMMANDS[cmd_name]
        with lazy_imports():
            return getattr(import_module(f"flexmod.tools.cli.{file}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = did_you_mean(name, COMMANDS) or f" For a mask: flexmod show {quote(name)}"
            ctx.fail(f"No such command {name!r}.{close}")
        return super().resolve_command(ctx, args)


def print_version(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given and not context.resilient_parsing:
        click.echo(f"flexmod {import_module('flexmod').__version__}")
        context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version,
    help="Print the version and exit.",
)  # fmt: skip
def flexmod() -> None:
    """A compiler for attention variants.

    \b
    MASK is one of
      causal                                a mask of the library
      sliding_window:1024                   with parameters
      "causal & sliding_window(1024)"       several masks
      softcap:30                            a score mod, with the causal mask
      my_mods.py:near                       a function of your own
      noop                                  no mask

    \b
    Try these first:
      flexmod doctor
      flexmod show "causal & sliding_window(1024)"
      flexmod compare causal
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit status: 0; 1 where the answer is no (results differ, kernels do not fit); 2 for a mistake, also
    for an exception of the user's file. If nobody reads the output, it is 141, as of a process that SIGPIPE
    ended.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a pipe on Windows may have no character for a tile
    try:
        status = flexmod.main(arguments, prog_name="flexmod", standalone_mode=False)
        print(end="", flush=True)
    except (BrokenPipeError, SystemExit) as error:  # click and rich exit with 1, which would be an answer
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        raiser = frame.f_globals.get("__name__", "").partition(".")[0]
        if isinstance(error, SystemExit) and raiser not in PRINTING:
            traceback.print_exc()  # a mod called sys.exit
            return 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest at its end
        return NO_READER
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except Exception as error:
        if is_a_mistake(error):
            import_module("flexmod.tools.terminal").complain(str(error))
        else:  # of the user's file: Python's own status for it, 1, would be an answer
            traceback.print_exc()
        return 2
    return int(status or 0)


def is_a_mistake(error: Exception) -> bool:
    """Whether the message alone says what is wrong: no code of a user's file raised the error."""
    if isinstance(error, FlexmodError):
        return True
    if not isinstance(error, (OSError, SyntaxError)):  # a file that cannot be written, or read as Python
        return False
    names = sys.modules.get("flexmod.tools.mod_names")  # runs the files
    run = names.files_run if names else ()
    return not any(frame.f_code.co_filename in run for frame, _ in traceback.walk_tb(error.__traceback__))

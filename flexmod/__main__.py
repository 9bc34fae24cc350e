"""Runs the command line, `python -m flexmod`."""

from __future__ import annotations

import sys

from flexmod.tools.cli import main

sys.exit(main())

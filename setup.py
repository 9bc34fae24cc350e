"""Gives the package index a README with links and pictures of the repository. pyproject.toml has the rest."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
HOME = re.search(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
README = re.sub(r"\]\((?!https?:|#)", f"]({HOME}/blob/main/", README)
README = README.replace('<img src="', f'<img src="{HOME}/raw/main/')

setup(long_description=README, long_description_content_type="text/markdown")

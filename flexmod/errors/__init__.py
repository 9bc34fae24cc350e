"""Defines flexmod's errors, one class for each mistake.

A class has two sentences: `what` was wrong and what to write `instead`. Both are format strings; the code
that raises an error passes the facts by keyword. An error inside a user's mod also has `where`, the file and
line of the user's code. All three form the message, which tests compare word by word.

    raise HeadDimMismatch(query=64, key=128)

A class stands in the file for the thing that is wrong, which makes it public. A class without `what` takes it
as the fact `problem`, and one without `instead` as the fact `advice`.
"""

from flexmod.errors.base import *
from flexmod.errors.calls import *
from flexmod.errors.kernels import *
from flexmod.errors.mods import *

_types = {name: x for name, x in globals().items() if isinstance(x, type)}
_classes = {name: x for name, x in _types.items() if x.__module__.startswith(__name__)}
globals()["__all__"] = [*_classes]  # type checkers take the names of the star imports
for _class in _classes.values():  # a traceback shows the name that users import
    _class.__module__ = __name__

"""Stands for `zero3d.tools.plan.spec`, for one release, by the name that it had."""

import sys

from zero3d.tools.plan import spec
from zero3d.tools.plan.spec import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = spec

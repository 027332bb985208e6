"""Stands for `zero3d.ways.deepspeed.utils`, for one release, by the name that it had."""

import sys

from zero3d.ways.deepspeed import utils
from zero3d.ways.deepspeed.utils import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = utils

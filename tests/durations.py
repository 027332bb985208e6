"""What tests took when somebody measured them last (`make costs`): files are queued, parts and rooms are cut by it.

A limit by recorded seconds does not depend on what else the machine does. What a case takes is the mean of its file's
cases of its kind, long ones and others.
"""

import json
from functools import cache
from pathlib import Path

SECONDS = Path(__file__).with_name("durations.json")
UNMEASURED = {"case": 2.0, "long": 20.0}


@cache
def recorded():
    """Per file the mean seconds of a case and of a long one, as far as it has such."""
    return json.loads(SECONDS.read_text())


def seconds_of(name, long=False):
    """The seconds of a case, as pytest names it."""
    kind = "long" if long else "case"
    return recorded().get(name.partition("::")[0], {}).get(kind, UNMEASURED[kind])

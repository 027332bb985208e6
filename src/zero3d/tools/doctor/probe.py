"""A process that runs some probes, one after another: `python -m zero3d.tools.doctor.probe NAME ...`.

stdin    the Request as JSON
stdout   a line of JSON before each probe, {"begins": NAME}, and one behind it, {"name": NAME, "finding": {...}}, or
         "refused" with an error about what the user gave; what libraries print goes to stderr
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from zero3d.errors import Zero3dError
from zero3d.tools.doctor.finding import BROKEN, Finding, Request
from zero3d.tools.doctor.table import PROBES


def main(names: list[str]) -> None:
    """Run the probes of these names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = request_of(json.loads(sys.stdin.read()))
    probes = {probe.name: probe for probe in PROBES}
    for name in names:
        print(json.dumps({"begins": name}), file=answers, flush=True)
        answer: dict[str, Any] = {"name": name}
        try:
            answer["finding"] = probes[name].run(request).as_dict()
        except Zero3dError as error:
            answer["refused"] = str(error)
        except Exception as error:  # noqa: BLE001 (a probe's failure is a finding)
            text = f"the probe itself failed: {type(error).__name__}: {error}"
            remedy = f"its callstack says where: zero3d doctor --only {name} --json"
            answer["finding"] = Finding(BROKEN, text, remedy, {"callstack": traceback.format_exc()}).as_dict()
        print(json.dumps(answer), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # no destructor of a driver may hang here


def request_of(tree: dict[str, Any]) -> Request:
    """Build a Request of its own `as_dict`."""
    return Request(**{**tree, "hosts": tuple(tree["hosts"])})


if __name__ == "__main__":
    main(sys.argv[1:])

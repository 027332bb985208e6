"""A virtual environment of its own for a package that is installed as a user installs it, without a network.

It sees the packages that this environment has, but not what this one has in editable form: zero3d's sources.
"""

import os
import site
import subprocess
import sys
from pathlib import Path

SEEN = "others.pth"


def see_packages(environment):
    """Let an environment, which has just been made, import what is installed here."""
    [packages] = Path(environment).glob("lib/python*/site-packages")
    (packages / SEEN).write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))


def typed(script, folder, **variables):
    """Run lines of bash in a folder, with this interpreter's folder first on the path and no index of pip's; what was printed."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("PIP_")}
    environment = {**kept, "PATH": paths, "PIP_CONFIG_FILE": os.devnull, "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout

"""A process that reaches no network: what it asks of one is refused and told."""

import os
from pathlib import Path

SITECUSTOMIZE = """
import socket

def refuse(*asked, **_):
    print("NETWORK", asked, flush=True)
    with open(TOLD, "a") as file:
        file.write(f"{asked}\\n")
    raise OSError("no network in this test")

def local(address):
    return not isinstance(address, tuple) or str(address[0]) in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "", "None")

class Socket(socket.socket):
    def connect(self, address):
        return super().connect(address) if local(address) else refuse(address)

    def connect_ex(self, address):
        return super().connect_ex(address) if local(address) else refuse(address)

    def sendto(self, data, *rest):
        return super().sendto(data, *rest) if local(rest[-1]) else refuse(rest[-1])

def lookup(original):
    def look(host, *rest, **options):
        known = ("localhost", socket.gethostname(), None, "", b"localhost")
        return original(host, *rest, **options) if host in known or local((host,)) else refuse(host)
    return look

socket.socket = Socket
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
    setattr(socket, name, lookup(getattr(socket, name)))
"""


def environment(folder):
    """Variables for a process and its children whose every attempt goes to the file `asked` in `folder`."""
    (Path(folder) / "sitecustomize.py").write_text(f"TOLD = {str(Path(folder) / 'asked')!r}\n{SITECUSTOMIZE}")
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return own | {"PYTHONPATH": os.pathsep.join([str(folder), own.get("PYTHONPATH", "")])}

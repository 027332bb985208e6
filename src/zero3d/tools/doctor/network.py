"""Interfaces, other hosts and ports."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from zero3d.config.hints import nearest
from zero3d.errors import ConfigError, short
from zero3d.tools.doctor.finding import BROKEN, OK, SKIPPED, WARNING, Finding, Request, environment

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"
SSH = 22
ANSWER = 4.0  # seconds for a host to answer
NAMED = 3.0  # seconds in which a name should be known
MOST_HOSTS = 256


def interfaces(request: Request) -> Finding:
    """List interfaces that are up; find the one that is asked for, and where this host's name leads."""
    addresses = addresses_of()
    wanted = {"--interface": request.interface} if request.interface else {}
    wanted |= {name: environment(name) for name in VARIABLES if environment(name)}
    for source, value in wanted.items():
        complaint = refuse_interface(source, value, addresses)
        if complaint is not None:
            return complaint
    stats = psutil.net_if_stats()
    shown = [
        f"{name} {address}" + (f" {stats[name].speed / 1e3:g} Gb/s" if stats[name].speed > 0 else "")
        for name, address in addresses.items()
        if address and name in stats and stats[name].isup
    ]
    host = socket.gethostname()
    begun = time.monotonic()
    leads = address_of_name(host)
    seconds = time.monotonic() - begun
    figures = {"interfaces": addresses, "hostname": host, "leads_to": leads, "chosen": wanted}
    text = f"{', '.join(shown[:6]) or 'none is up'}; {host} is {leads or 'no known name'}"
    if seconds > NAMED:
        remedy = f"add {host} to /etc/hosts, or repair the name servers in /etc/resolv.conf"
        return Finding(WARNING, f"{text}, found after {seconds:.0f} s", remedy, figures)
    if request.hosts and not wanted and (not leads or leads.startswith("127.")):
        remedy = "GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME with the interface that other hosts reach"
        return Finding(WARNING, f"{text}: other hosts would be told to connect to themselves", remedy, figures)
    return Finding(OK, text, figures=figures)


def addresses_of() -> dict[str, str]:
    """Return the first IPv4 address of each interface, empty where it has none."""
    return {
        name: next((each.address for each in given if each.family == socket.AF_INET), "")
        for name, given in psutil.net_if_addrs().items()
    }


def refuse_interface(source: str, value: str, addresses: dict[str, str]) -> Finding | None:
    """Say that an interface is not there, is down or has no address. value: a name or, as NCCL takes it, beginnings."""
    if value.startswith("^"):
        return None
    names = [name.lstrip("=") for name in value.split(",") if name]
    found = [each for each in addresses if any(each == name or each.startswith(name) for name in names)]
    exact = source != "NCCL_SOCKET_IFNAME"
    found = [each for each in found if not exact or each in names]
    if not found:
        near = nearest(names[0] if names else "", addresses, cutoff=0.3)
        meant = f"did you mean {near}? " if near else ""
        text = f"{source}={short(value)}: there is no such interface; there are {', '.join(addresses)}"
        return Finding(BROKEN, text, f"{meant}ip -brief address shows them")
    stats = psutil.net_if_stats()
    if not any(addresses[each] and each in stats and stats[each].isup for each in found):
        text = f"{source}={short(value)}: {found[0]} is down or has no IPv4 address"
        return Finding(BROKEN, text, f"ip link set {found[0]} up, or another one: ip -brief address")
    return None


def address_of_name(host: str) -> str:
    """Return the address that a name leads to, empty where it is not known."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""


def source_of(interface: str) -> str:
    """Return the address of an interface; empty for none and for one that is not there."""
    return addresses_of().get(interface, "") if interface else ""


@dataclass(frozen=True)
class Answer:
    """What a host did: milliseconds, or why there is no answer."""

    host: str
    milliseconds: float
    fault: str = ""


def hosts(request: Request) -> Finding:
    """Connect to each host that is named; one that refuses the port is up, and answers."""
    if not request.hosts:
        return Finding(SKIPPED, "no hosts named: --hosts a,b, or start this under torchrun or srun on all of them")
    if len(request.hosts) > MOST_HOSTS:
        raise ConfigError(f"--hosts names {len(request.hosts)}: at most {MOST_HOSTS} are asked at once.")
    targets = [target_of(host) for host in request.hosts]
    source = source_of(request.interface)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda target: reach(target[0], target[1], source), targets))
    return judge_answers(answers)


def target_of(host: str) -> tuple[str, int]:
    """Split NAME:PORT; without a port ssh's. Raises ConfigError."""
    name, _, port = host.rpartition(":") if host.count(":") == 1 else (host, "", "")
    if port and not (port.isdecimal() and 0 < int(port[:9]) < 65536):
        raise ConfigError(f"--hosts {short(host)}: a port is a number from 1 to 65535: {short(name)}:29500.")
    if not name:
        raise ConfigError(f"--hosts {short(host)} names no host: --hosts a,b.")
    return name, int(port) if port else SSH


def reach(name: str, port: int, source: str = "", seconds: float = ANSWER) -> Answer:
    """Connect to a port of a host, and say how long that took or why it does not answer."""
    begun = time.monotonic()
    try:
        socket.create_connection((name, port), seconds, (source, 0) if source else None).close()
    except ConnectionRefusedError:
        pass  # the host itself says that nobody listens there
    except TimeoutError:
        return Answer(f"{name}:{port}", 0.0, f"does not answer in {seconds:.0f} s: it is down, or a firewall drops it")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Answer(f"{name}:{port}", 0.0, "is no known name" if isinstance(error, socket.gaierror) else reason)
    return Answer(f"{name}:{port}", 1e3 * (time.monotonic() - begun))


def judge_answers(answers: list[Answer]) -> Finding:
    """Give the verdict on all hosts."""
    figures = {answer.host: answer.fault or answer.milliseconds for answer in answers}
    silent = [answer for answer in answers if answer.fault]
    if silent:
        told = "; ".join(f"{answer.host} {answer.fault}" for answer in silent[:4])
        more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
        text = f"{len(silent)} of {len(answers)} hosts do not answer: {told}{more}"
        name = silent[0].host.rpartition(":")[0]
        return Finding(BROKEN, text, f"from here: ping {name}; nc -vz {name} PORT; its firewall, /etc/hosts", figures)
    slowest = max(answers, key=lambda answer: answer.milliseconds)
    text = f"{len(answers)} hosts answer, {slowest.host} last after {slowest.milliseconds:.1f} ms"
    return Finding(OK, text, figures=figures)


def ports(request: Request) -> Finding:
    """Bind, reach and use a port on loopback and on the interface; look who has the one that is asked for."""
    places = {"loopback": LOOPBACK}
    if request.interface and source_of(request.interface):
        places[request.interface] = source_of(request.interface)
    for name, address in places.items():
        fault = echo(address)
        if fault:
            up = "lo" if name == "loopback" else name
            return Finding(
                BROKEN, f"a port on {name} ({address}) {fault}", f"ip link set {up} up; a firewall on this host?"
            )
    given, source = request.port, "--port"  # of a launcher's rank the store itself has it
    if not given and environment("MASTER_PORT").isdecimal() and not environment("RANK"):
        given, source = int(environment("MASTER_PORT")[:9]), "MASTER_PORT"
    text = f"bound and reached on {', '.join(f'{name} ({address})' for name, address in places.items())}"
    if not given:
        return Finding(OK, text, figures={"places": places})
    fault = bind(given)
    if fault:
        text = f"{source} {given}: {fault}{holder_of(given)}"
        other = given + 1 if given < 65535 else 29500
        remedy = f"another port: MASTER_PORT={other}; or end who has it: ss -ltnp | grep :{given}"
        return Finding(BROKEN, text, remedy, {"port": given})
    return Finding(OK, f"{text}; {given} is free", figures={"places": places, "port": given})


def echo(address: str) -> str:
    """Send a byte through a port of this address; return why that fails."""
    try:
        with socket.create_server((address, 0)) as listening:
            listening.settimeout(ANSWER)
            with socket.create_connection(listening.getsockname()[:2], ANSWER) as near:
                far, _ = listening.accept()
                with far:
                    far.settimeout(ANSWER)
                    near.sendall(b"?")
                    return "" if far.recv(1) == b"?" else "loses what is sent"
    except TimeoutError:
        return "is bound, and nothing arrives"
    except OSError as error:
        return f"cannot be used: {error.strerror}"


def bind(port: int) -> str:
    """Return why a port cannot be bound on all addresses, empty where it can."""
    if port > 65535:
        return "ports end at 65535"
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return f"cannot be bound ({error.strerror})"
    return ""


def holder_of(port: int) -> str:
    """Return which process listens on a port, as far as this user may see."""
    try:
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr[1] == port and each.status == psutil.CONN_LISTEN and each.pid:
                return f", process {each.pid} ({short(' '.join(psutil.Process(each.pid).cmdline()))}) has it"
    except (psutil.Error, OSError):
        return ""
    return ""

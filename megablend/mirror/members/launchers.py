"""Where the list of nodes comes from, and which of its entries is this machine.

A node's name is the address that others reach it by, `host:port`. All nodes must have the same
list: they compare `homes.list_id`.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megablend.errors import ConfigError
from megablend.mirror.members.homes import MAX_NODES
from megablend.mirror.members.views import Views
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.url_checks import split_address

_COMMA = re.compile(r",(?![^\[\]]*\])")
"""Between entries of Slurm's list: not in brackets."""
_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]*)\](.*)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_TORCHRUN = ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")


class Pace(NamedTuple):
    """How long nodes wait for one another: seconds after which something is done, or believed."""

    ping: float = 2.0
    """Without an answer: the node is asked whether it is there."""
    silent: float = 10.0
    """Without an answer to that: it is away."""
    gone: float = 60.0
    """Away for so long: nobody waits for it any more."""
    complete: float = 120.0
    """After the start: what is missing of the list is not waited for any more."""


class Torchrun(NamedTuple):
    """A job's machines: this one's rank, their number, the name of the node of rank 0."""

    rank: int
    size: int
    first: str


class Members(NamedTuple):
    """Which nodes there are."""

    names: tuple[str, ...]
    """`host:port`, sorted; none where they are told while the node process runs."""
    own: str
    """This node's."""
    torchrun: Torchrun | None = None
    """The job whose nodes tell one another."""
    views: Views | None = None
    """Where nodes come and go."""

    @property
    def size(self) -> int:
        """Number of nodes, at first."""
        if self.views is not None:
            return self.views.size
        return self.torchrun.size if self.torchrun is not None else len(self.names)


def make_name(entry: str, port: int) -> str:
    """A node's name from an entry of a list, with the port of the settings if it has none.
    Raises: ConfigError."""
    found = split_address(entry.strip())
    if found is None:
        raise ConfigError(
            f"nodes: found {entry.strip()!r}, expected host or host:port\n"
            "Write a node as others reach it, for example node1:7171 or [fd00::1]:7171."
        )
    return f"{found[0].lower()}:{found[1] or port}"


def list_nodes(nodes: tuple[str, ...] | str, port: int, environ: Mapping[str, str]) -> list[str]:
    """The names, sorted, in a list, in the file of that path (a line each, after `#` is a comment),
    or in Slurm's list of a job's machines ("slurm"). A job of torchrun has no list (`find_torchrun`).

    Raises: ConfigError if there is none, a name is there twice, or an entry is no name.
    """
    if isinstance(nodes, tuple):
        entries = list(nodes)
        source = "the list"
    elif nodes == "slurm":
        source = "SLURM_STEP_NODELIST"
        hosts = environ.get(source) or environ.get(source := "SLURM_JOB_NODELIST")
        if not hosts:
            raise ConfigError(
                "nodes: slurm: found neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST\n"
                "Start the node process in a Slurm job (`srun megablend node run`), or list the nodes."
            )
        entries = list(itertools.islice(_expand(hosts), MAX_NODES + 1))
    else:
        source = nodes
        try:
            lines = Path(nodes).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"nodes: {nodes}: cannot be read as a list of nodes: {error}\n"
                "Give a file with one `host:port` per line, `slurm`, `torch`, or a list."
            ) from None
        entries = [text for line in lines if (text := line.partition("#")[0].strip())]
    names = [make_name(entry, port) for entry in entries]
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times != 1 or len(names) > MAX_NODES:
        found = f"{name} {times} times" if times > 1 else f"{len(names)} nodes"
        raise ConfigError(
            f"nodes: found {found} in {source}, expected 1 to {MAX_NODES} nodes, each listed once\n"
            "List each node once; two nodes on one machine need different ports."
        )
    return sorted(names)


def _expand(hosts: str) -> Iterator[str]:
    """The machines of Slurm's notation: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7,
    login."""
    for group in _COMMA.split(hosts):
        found = _BRACKETS.fullmatch(group)
        if found is None:
            yield group
            continue
        head, ranges, tail = found.groups()
        for part in ranges.split(","):
            limits = _RANGE.fullmatch(part)
            if limits is None or int(limits[1]) > int(limits[2] or limits[1]):
                raise ConfigError(
                    f"nodes: slurm: found {group!r} in the job's list of machines, which cannot be understood\n"
                    "List the nodes instead (`nodes: [host:port, ...]`)."
                )
            for number in range(int(limits[1]), int(limits[2] or limits[1]) + 1):
                yield from _expand(f"{head}{number:0{len(limits[1])}}{tail}")


def find_torchrun(port: int, environ: Mapping[str, str]) -> Torchrun:
    """The job that torchrun started this process in. Raises: ConfigError if it started none."""
    rank, size, first = (environ.get(name, "") for name in _TORCHRUN)
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size) and first):
        raise ConfigError(
            f"nodes: torch: found {', '.join(f'{n}={environ.get(n)}' for n in _TORCHRUN)}, but torchrun sets all of "
            "these variables\n"
            "Start the job with torchrun, or list the nodes."
        )
    host = f"[{first}]" if ":" in first and not first.startswith("[") else first
    return Torchrun(int(rank), int(size), make_name(host, port))


def find_self(
    names: Iterable[str], port: int, advertise: str | None, environ: Mapping[str, str]
) -> str:
    """The name of this node among all. Raises: ConfigError if none, or several, can be it."""
    names = list(names)
    if advertise is not None:
        own = make_name(advertise, port)
        if own in names:
            return own
        raise ConfigError(
            f"advertise: {own} is not one of the nodes ({_few(names)})\n"
            "Set `advertise` to this node's entry of `nodes`, or add it there."
        )
    machine = (environ.get("SLURMD_NODENAME") or socket.gethostname()).lower()
    aliases = {machine, machine.partition(".")[0]}
    mine = [name for name in names if name.endswith(f":{port}")]
    found = [name for name in mine if name.rpartition(":")[0] in aliases]
    found = found or [name for name in mine if _is_local(name)]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"nodes: {'several' if found else 'none'} of {_few(found or names)} can be this machine ({machine}, port "
        f"{port})\n"
        "Set `advertise` (host:port as others reach it) to this node's entry, or set `port` to the port of that "
        "entry."
    )


def describe_members(options: MirrorOptions, environ: Mapping[str, str]) -> list[Any]:
    """What all processes of a job on a machine find in settings and environment, as JSON has it.
    Raises: ConfigError."""
    if options.etcd is not None:
        return [options.etcd.prefix, *options.etcd.endpoints]
    if options.nodes == "torch":
        return list(find_torchrun(options.port, environ))
    return [] if options.nodes is None else list_nodes(options.nodes, options.port, environ)


def find_members(options: MirrorOptions, environ: Mapping[str, str]) -> Members | None:
    """The nodes of settings and environment; None: this one is alone; with etcd, this node without
    the others. Raises: ConfigError."""
    found = describe_members(options, environ)
    if options.etcd is not None:
        return Members((), make_name(options.advertise or socket.gethostname(), options.port))
    if options.nodes != "torch":
        if not found:
            return None
        own = find_self(found, options.port, options.advertise, environ)
        return Members(tuple(found), own)
    torchrun = Torchrun(*found)
    if not torchrun.rank:
        own = torchrun.first
    elif options.advertise is not None:
        own = make_name(options.advertise, options.port)
    else:
        own = f"{find_address_towards(torchrun.first)}:{options.port}"
    return Members((), own, torchrun)


def find_address_towards(other: str) -> str:
    """The host, as an IP address, under which packets to another node leave this machine.
    Raises: ConfigError."""
    try:
        _, own = _find_route(other)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"nodes: torch: {other} (MASTER_ADDR) cannot be reached: {error}\n"
            "Set `advertise` to the host:port at which others reach this node."
        ) from None
    return f"[{own}]" if ":" in own else own


def is_loopback(name: str) -> bool:
    """Whether a node's name is an address of this machine that no other reaches."""
    host = name.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _find_route(name: str) -> tuple[str, str]:
    """The address of a node, and that of this machine that packets to it leave with.
    Raises: OSError, UnicodeError."""
    host, _, port = name.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    # Sorted: those of a kind that this machine has no route to are last
    kind, _, _, _, address = found[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        # Chooses a route; sends nothing
        probe.connect(address)
        return str(address[0]), str(probe.getsockname()[0])


def _is_local(name: str) -> bool:
    """Whether a node is on this machine: packets to it come from its own address."""
    try:
        target, own = _find_route(name)
    except (OSError, UnicodeError):
        return False
    return target == own or is_loopback(f"{target}:0")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

"""Finds the nodes of a cluster, and which of them this machine is.

A node's name is the address at which other nodes reach it, `host:port`. All nodes must have the
same list of names. They compare digests of it (`homes.list_id`).
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megablend.errors import ConfigError
from megablend.mirror.members.homes import MAX_NODES
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.url_checks import split_address

if TYPE_CHECKING:
    from megablend.mirror.members.etcd_members import EtcdMembers

_COMMA = re.compile(r",(?![^\[\]]*\])")
"""Matches a comma between entries of Slurm's list, but not one in brackets."""
_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]*)\](.*)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_TORCHRUN = ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")


class Pace(NamedTuple):
    """The times for which nodes wait for one another, in seconds."""

    ping: float = 2.0
    """The time without a response after which a node is sent a ping."""
    silent: float = 10.0
    """The time without a response to a ping after which a node is treated as unreachable."""
    gone: float = 60.0
    """The time for which other nodes wait for an unreachable node."""
    complete: float = 120.0
    """The time for which nodes wait at the start for all nodes of the list to connect."""


class Torchrun(NamedTuple):
    """The machines of a job that torchrun started."""

    rank: int
    """The rank of this machine."""
    size: int
    """The number of machines."""
    first: str
    """The name of the node with rank 0."""


class Members(NamedTuple):
    """The nodes of a cluster, or the way in which they are found."""

    names: tuple[str, ...]
    """The sorted names of all nodes; empty if they are found later, while the process runs."""
    own: str
    """The name of this node."""
    torchrun: Torchrun | None = None
    """The torchrun job whose machines are the nodes; None without torchrun."""
    views: EtcdMembers | None = None
    """The membership of this node in a cluster with etcd; None without etcd."""

    @property
    def size(self) -> int:
        """The number of nodes that are expected at the start."""
        if self.views is not None:
            return self.views.size
        return self.torchrun.size if self.torchrun is not None else len(self.names)


def make_name(entry: str, port: int) -> str:
    """Make a node's name from an entry of a list. An entry without a port gets the default `port`.
    Raises: ConfigError if the entry is not valid."""
    address = split_address(entry.strip())
    if address is None:
        raise ConfigError(
            f"nodes: found {entry.strip()!r}, expected host or host:port\n"
            "give the address at which other nodes reach the node, for example node1:7171 or [fd00::1]:7171"
        )
    return f"{address.host.lower()}:{address.port or port}"


def list_nodes(nodes: tuple[str, ...] | str, port: int, environ: Mapping[str, str]) -> list[str]:
    """Return the sorted names of all nodes. For jobs that torchrun started, use `find_torchrun`.

    Args:
        nodes: a list of entries; the path of a file with an entry in each line, and comments after
            `#`; or "slurm" for the machines of a Slurm job.

    Raises: ConfigError if there is no list, it contains a name twice, or an entry is not valid.
    """
    if isinstance(nodes, tuple):
        source = "the list"
        entries = list(nodes)
    elif nodes == "slurm":
        source = _find_slurm_variable(environ)
        entries = list(itertools.islice(_expand(environ[source]), MAX_NODES + 1))
    else:
        source = nodes
        entries = _read_entries(nodes)
    names = [make_name(entry, port) for entry in entries]
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times != 1 or len(names) > MAX_NODES:
        description = f"{name} {times} times" if times > 1 else f"{len(names)} nodes"
        raise ConfigError(
            f"nodes: found {description} in {source}, expected 1 to {MAX_NODES} different nodes\n"
            "list each node once; two nodes on one machine need different ports"
        )
    return sorted(names)


def _find_slurm_variable(environ: Mapping[str, str]) -> str:
    """Return the name of the environment variable that contains Slurm's list of machines. Raises:
    ConfigError if there is none."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            return name
    raise ConfigError(
        "nodes: slurm: found neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST\n"
        "run this in a Slurm job (salloc, sbatch or srun), or list the nodes"
    )


def _read_entries(path: str) -> list[str]:
    """Return the entries of a file that lists nodes. Raises: ConfigError if it cannot be read."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"nodes: {path}: cannot be read as a list of nodes: {error}\n"
            "give a file with one `host:port` per line, `slurm`, `torch`, or a list"
        ) from None
    entries = [line.partition("#")[0].strip() for line in lines]
    return [entry for entry in entries if entry]


def _expand(hosts: str) -> Iterator[str]:
    """Yield the machines in a list in Slurm's notation: `gpu[01-03,7],login` means gpu01, gpu02,
    gpu03, gpu7 and login. Raises: ConfigError if the list is not valid."""
    for group in _COMMA.split(hosts):
        match = _BRACKETS.fullmatch(group)
        if match is None:
            yield group
            continue
        head, ranges, tail = match.groups()
        for part in ranges.split(","):
            limits = _RANGE.fullmatch(part)
            if limits is None or int(limits[1]) > int(limits[2] or limits[1]):
                raise ConfigError(
                    f"nodes: slurm: cannot parse {group!r} in the job's list of machines\n"
                    "list the nodes instead (`nodes: [host:port, ...]`)"
                )
            for number in range(int(limits[1]), int(limits[2] or limits[1]) + 1):
                yield from _expand(f"{head}{number:0{len(limits[1])}}{tail}")


def find_torchrun(port: int, environ: Mapping[str, str]) -> Torchrun:
    """Return the torchrun job that this process belongs to. Raises: ConfigError if there is none."""
    rank, size, first = (environ.get(name, "") for name in _TORCHRUN)
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size) and first):
        raise ConfigError(
            f"nodes: torch: found {', '.join(f'{n}={environ.get(n)}' for n in _TORCHRUN)}, but torchrun sets all of "
            "these variables\n"
            "start the job with torchrun, or list the nodes"
        )
    host = f"[{first}]" if ":" in first and not first.startswith("[") else first
    return Torchrun(int(rank), int(size), make_name(host, port))


def find_self(
    names: Sequence[str], port: int, advertise: str | None, environ: Mapping[str, str]
) -> str:
    """Return the name of this node, given the names of all nodes. Raises: ConfigError if no name,
    or more than one, belongs to this machine."""
    if advertise is not None:
        own = make_name(advertise, port)
        if own in names:
            return own
        raise ConfigError(
            f"advertise: {own} is not one of the nodes ({_few(names)})\n"
            "set `advertise` to this node's entry of `nodes`, or add it there"
        )
    machine = (environ.get("SLURMD_NODENAME") or socket.gethostname()).lower()
    aliases = {machine, machine.partition(".")[0]}
    mine = [name for name in names if name.endswith(f":{port}")]
    matching = [name for name in mine if name.rpartition(":")[0] in aliases]
    matching = matching or [name for name in mine if _is_local(name)]
    if len(matching) == 1:
        return matching[0]
    raise ConfigError(
        f"nodes: {'several' if matching else 'none'} of {_few(matching or names)} match this machine ({machine}, port "
        f"{port})\n"
        "set `advertise` to this node's entry of `nodes`, or set `port` to the port of that entry"
    )


def describe_members(options: MirrorOptions, environ: Mapping[str, str]) -> list[Any]:
    """Describe the nodes as JSON. The result depends only on settings and environment, so that it
    is the same in all processes of a job on one machine. It is empty if there are no other nodes.
    Raises: ConfigError."""
    if options.etcd is not None:
        return [options.etcd.prefix, *options.etcd.endpoints]
    if options.nodes == "torch":
        return list(find_torchrun(options.port, environ))
    return [] if options.nodes is None else list_nodes(options.nodes, options.port, environ)


def find_members(options: MirrorOptions, environ: Mapping[str, str]) -> Members | None:
    """Find the nodes, given settings and environment. With etcd, only the name of this node is
    found. Returns: None if there are no other nodes. Raises: ConfigError."""
    if options.nodes is None:
        return None
    if options.etcd is not None:
        return Members((), make_name(options.advertise or socket.gethostname(), options.port))
    if options.nodes != "torch":
        names = list_nodes(options.nodes, options.port, environ)
        return Members(tuple(names), find_self(names, options.port, options.advertise, environ))
    torchrun = find_torchrun(options.port, environ)
    if not torchrun.rank:
        own = torchrun.first
    elif options.advertise is not None:
        own = make_name(options.advertise, options.port)
    else:
        own = f"{find_address_towards(torchrun.first)}:{options.port}"
    return Members((), own, torchrun)


def find_address_towards(other: str) -> str:
    """Return the IP address of this machine from which packets to another node are sent. The
    address is formatted as the host of a node's name. Raises: ConfigError if the other node cannot
    be reached."""
    try:
        _, own = _find_route(other)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"nodes: torch: {other} (MASTER_ADDR) cannot be reached: {error}\n"
            "set `advertise` to the host:port at which others reach this node"
        ) from None
    return f"[{own}]" if ":" in own else own


def is_loopback(name: str) -> bool:
    """Return whether a node's host is a loopback address, which other machines cannot reach."""
    host = name.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _find_route(name: str) -> tuple[str, str]:
    """Return the IP address of a node, and the address of this machine from which packets to the
    node are sent. Raises: OSError, UnicodeError."""
    host, _, port = name.rpartition(":")
    addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    # The first address is the best one: addresses without a route are sorted last
    family, _, _, _, address = addresses[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # On a datagram socket this chooses a route, and sends nothing
        probe.connect(address)
        return str(address[0]), str(probe.getsockname()[0])


def _is_local(name: str) -> bool:
    """Return whether a node is on this machine, because packets to the node are sent from the
    node's own address."""
    try:
        target, own = _find_route(name)
    except (OSError, UnicodeError):
        return False
    return target == own or is_loopback(f"{target}:0")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

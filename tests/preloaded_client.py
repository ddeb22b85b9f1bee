"""Passes this process's arguments, environment, limits and open files to a server of `tests.preloaded`: SOCKET ARGUMENTS..."""

import array  # noqa: F401  (`send_fds` imports it, when the limit of open files may be reached already)
import os
import resource
import signal
import socket
import sys


def is_inherited(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:  # the one that listed them
        return False


files = [int(name) for name in os.listdir("/proc/self/fd") if is_inherited(int(name))]  # noqa: PTH208  (fewer imports)
limits = {
    name: resource.getrlimit(getattr(resource, name))
    for name in dir(resource)
    if name.startswith("RLIMIT_")
}
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
    server.connect(sys.argv[1])
    request = repr((sys.argv[2:], dict(os.environ), os.getcwd(), files, limits)).encode()  # noqa: PTH109
    socket.send_fds(server, [len(request).to_bytes(8, "little")], files)
    server.sendall(request)
    code = int(server.recv(16) or b"1")
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)

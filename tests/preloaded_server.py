"""The server of `tests.preloaded`: SOCKET MODULES... It goes on in the background, and ends when its standard input does."""

from __future__ import annotations

import ast
import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from typing import Any

ABOVE_ALL = 500
"""Descriptors from here on are nobody's."""


class Request:
    """What a client wants run: the arguments of Python, the environment, the folder, the open files and limits."""

    def __init__(self, client: socket.socket) -> None:
        head, self.received, _, _ = socket.recv_fds(client, 8, 64)
        size = int.from_bytes(head, "little")
        text = bytearray()
        while len(text) < size or not head:
            if not (more := client.recv(1 << 16)):
                raise EOFError("the client was killed")
            text += more
        self.arguments, self.environment, self.folder, self.files, self.limits = ast.literal_eval(
            text.decode()
        )

    def close(self) -> None:
        for file in self.received:
            os.close(file)

    def become(self) -> None:
        """Make this process as the client is."""
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE_ALL) for file in self.received]
        self.close()
        for file, place in zip(moved, self.files, strict=True):
            os.dup2(file, place)
            os.close(file)
        for name, limit in self.limits.items():
            resource.setrlimit(getattr(resource, name), limit)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        paths = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]

    def run(self) -> int:
        """Do as Python does with these arguments; the exit code."""
        try:
            self._run()
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    def _run(self) -> None:
        first, *others = self.arguments
        if first == "-m":
            sys.argv = others
            sys.path.insert(0, self.folder)
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *others[1:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(others[0], "<string>", "exec"), vars(main))
        else:
            sys.argv = self.arguments
            sys.path.insert(0, os.path.dirname(first))  # noqa: PTH120
            runpy.run_path(first, run_name="__main__")


def serve(path: str) -> Request:
    """Fork a process for each request; returns in each of these."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(path)
    server.listen(128)
    poll = select.poll()
    clients = dict[int, Any]()
    processes = dict[int, Any]()
    for file in (0, server.fileno()):
        poll.register(file, select.POLLIN)
    if os.fork():
        os._exit(0)  # what started the server knows now that it is ready
    while True:
        # One at a time: what is done for it may close others, whose numbers are used again
        file = poll.poll()[0][0]
        if file == 0:
            for process in processes:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            sys.exit()
        elif file == server.fileno():
            client = server.accept()[0]
            try:
                request = Request(client)
            except (EOFError, ConnectionError):
                client.close()
                continue
            pid = os.fork()
            if not pid:
                for each in (server, client, *(other for other, _ in processes.values())):
                    each.close()
                for process in processes:
                    os.close(process)
                return request
            request.close()
            process = os.pidfd_open(pid)
            clients[client.fileno()] = process
            processes[process] = (client, pid)
            poll.register(client, select.POLLIN)
            poll.register(process, select.POLLIN)
        elif file in processes:
            client, pid = processes.pop(file)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):  # the client was killed
                client.sendall(str(code).encode())
            poll.unregister(file)
            if clients.pop(client.fileno(), None) is not None:
                poll.unregister(client)
            client.close()
            os.close(file)
        elif file in clients:  # it was killed
            signal.pidfd_send_signal(clients.pop(file), signal.SIGKILL)
            poll.unregister(file)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder that it was started in
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    request = serve(sys.argv[1])
    request.become()
    code = request.run()
    if "mpi4py.MPI" in sys.modules:  # which has to be finalized, last of all
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # as Python ends, but for taking all modules apart, which takes long
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

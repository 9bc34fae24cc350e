"""Runs scripts in forks of one process that has imported torch, which takes longer than most scripts.

For scripts that import torch before all else, or do not mind that it is imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

# A child leaves the loop, runs the script as the main module, and ends as any program does.
SERVER = """
import json, os, sys, torch

for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, request["out"], request["err"])):
    os.dup2(os.open(name, os.O_RDWR), number)
os.environ.clear()
os.environ.update(request["env"])
os.chdir(request["cwd"])
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
sys.argv[1:] = request["arguments"]
script = compile(request["script"], "<string>", "exec")
del child, json, line, name, number, os, request, sys, torch
exec(script)
"""

_servers: list[subprocess.Popen[str]] = []


@contextmanager
def _server() -> Iterator[tuple[IO[str], IO[str]]]:
    """Its input and output. It is started at first, and after a script that did not end."""
    if not _servers:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SERVER]
        pipe = subprocess.PIPE
        server = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        _servers.append(server)
    server = _servers[0]
    assert server.stdin is not None and server.stdout is not None
    try:
        yield server.stdin, server.stdout
    except BaseException:
        os.killpg(server.pid, signal.SIGKILL)  # the script too
        server.wait()
        _servers.clear()
        raise


def end() -> None:
    """Ends the process, if there is one."""
    for server in _servers:
        server.communicate()
    _servers.clear()


def python(
    script: str, *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -c script arguments`, with captured text."""
    words, environment = [str(argument) for argument in arguments], dict(os.environ if env is None else env)
    if sys.platform != "linux":
        command = [sys.executable, "-c", script, *words]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    with TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        out.touch()
        err.touch()
        request = {
            "script": script, "arguments": words, "env": environment, "cwd": str(cwd or Path.cwd()),
            "out": str(out), "err": str(err),
        }  # fmt: skip
        with _server() as (requests, ends):
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            status = int(ends.readline())
        return subprocess.CompletedProcess([script, *words], status, out.read_text(), err.read_text())

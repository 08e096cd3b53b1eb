"""A process of its own for every implementation, so that they can take turns without sharing one: it answers requests,
one JSON object a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """An implementation in a process of its own. It waits for requests, and does nothing in between."""

    def __init__(
        self, module: str, name: str, folder: Path, device: str, threads: int, *peer: Path
    ) -> None:
        """module: the one that calls serve(); the other arguments are what it makes the implementation of."""
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{module}",
            *map(str, (name, folder, device, threads, *peer)),
        ]
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.read()

    def read(self) -> dict[str, Any]:
        """Return the next answer. Raises ValueError, with the last line that it printed, if the process has ended."""
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            last = (self.errors.read().strip() or f"it ended with status {status}").splitlines()[-1]
            self.close()
            raise ValueError(f"{self.name} failed: {last}")
        return json.loads(line)

    def __call__(self, **request: Any) -> dict[str, Any]:
        """Return the answer to a request. Raises ValueError if the process has ended."""
        with suppress(BrokenPipeError):  # read() says why
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        with suppress(BrokenPipeError):  # of one that has failed
            self.process.stdin.close()
        self.process.wait()
        self.errors.close()


def serve(make: Callable[..., Callable[..., dict[str, Any]]]) -> None:
    """Be a Worker's process: answer its requests until there are no more, by what make(name, folder, device, *peer)
    returns."""
    name, folder, device, threads, *peer = sys.argv[1:]
    torch.set_num_threads(int(threads))
    out = sys.stdout
    with torch.no_grad(), redirect_stdout(sys.stderr):  # whatever an implementation prints
        answer = make(name, Path(folder), device, *map(Path, peer))
        print(json.dumps({"ready": name}), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(**json.loads(line))), file=out, flush=True)

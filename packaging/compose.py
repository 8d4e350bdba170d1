"""Run the services of compose.yaml as processes on this machine: ``compose.py PATH/OF/sartor``.

Ports and folders are of this machine and temporary; everything else is done as the file says.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml
from sklearn.datasets import load_digits

PATIENCE = 300  # seconds


def main(program: str) -> None:
    """Start all services, wait for them, and see that the run is there."""
    services = yaml.safe_load((Path(__file__).parents[1] / "compose.yaml").read_text())["services"]
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        _make_sites(place, [service for service in services if service != "server"])
        processes = {
            service: subprocess.Popen([program, *_words(content["command"], service, place, port)])
            for service, content in services.items()
        }
        try:
            codes = {service: process.wait(PATIENCE) for service, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
        assert set(codes.values()) == {0}, codes
        assert (place / "runs" / "first" / "summary.json").stat().st_size
    print(f"ran: {', '.join(codes)}")


def _words(command: str, service: str, place: Path, port: str) -> list[str]:
    """A service's command, with this machine's addresses and folders."""
    text = command.replace("0.0.0.0:8000", f"127.0.0.1:{port}").replace("server:8000", f"127.0.0.1:{port}")
    text = text.replace("/data/", f"{place}/").replace("/state", f"{place}/state-{service}")
    return shlex.split(text.replace("/runs/", f"{place}/runs/"))


def _make_sites(place: Path, names: list[str]) -> None:
    digits = load_digits()
    for offset, name in enumerate(names):
        mine = slice(offset, None, len(names))
        np.savez(place / f"{name}.npz", x=digits.images[mine, None] / 16, y=digits.target[mine])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1])

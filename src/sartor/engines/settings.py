"""What an experiment may say of where clients are trained."""

from __future__ import annotations

from dataclasses import dataclass

from sartor.settings import setting


@dataclass(frozen=True)
class Engine:
    """Where and how clients are trained; it does not change the results."""

    name: str = setting(
        "auto", "one client after the other, or many in one batch", choices=("auto", "loop", "stacked")
    )
    device: str = setting("cpu", "the device that trains", choices=("cpu", "cuda"))
    chunk: int = setting(0, "clients held on the device at once; 0: as memory allows", low=0)
    lanes: int = setting(0, "clients of a chunk stepped at once; 0: as many as stay busy", low=0)
    workers: int = setting(0, "clients trained at once by the loop engine on a CPU; 0: one per core", low=0)
    way: str = setting(
        "auto",
        "how a step of many clients is computed: by kernels for all of them, or apart, side by side on a "
        "GPU; auto: by the size of a step, or as measured",
        choices=("auto", "together", "apart"),
    )
    otherwise: str = setting(
        "auto",
        "what becomes of a client function that turns out not to be stackable; auto: the loop engine runs "
        "it, unless `stacked` was asked for",
        choices=("auto", "loop", "error"),
    )
    timeout: int = setting(600, "seconds that the processes of a distributed run wait for each other", low=1)
    precision: str = setting(
        "usual",
        "digits of products and convolutions on CUDA: PyTorch's way, all of float32, or tf32",
        choices=("usual", "full", "tf32"),
    )
    states: str = setting(
        "auto", "where client states lie; auto: by their size", choices=("auto", "memory", "disk")
    )

"""What can happen to messages on their way, a file for each kind; importing this package registers all of it.

Imports the federation's contract; how messages pass transforms is ``federation/transforms.py``.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

from sartor.federation.transforms import TRANSFORMS

__all__ = ["TRANSFORMS"]

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

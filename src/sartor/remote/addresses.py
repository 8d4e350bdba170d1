"""Addresses of servers."""

from __future__ import annotations

import ipaddress

from sartor.errors import SettingError


def is_loopback(host: str) -> bool:
    """Whether only this machine is meant."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of an address."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise SettingError(f"{address!r}: expected an address such as 192.168.0.5:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)

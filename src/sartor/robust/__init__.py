"""Robust rules in place of means, and attacks to try them with; importing this package registers both."""

from __future__ import annotations

from sartor.robust import attacks, centres, selections

__all__ = ["attacks", "centres", "selections"]

"""Differential privacy: what a run may cost, what it has cost so far, and the noise that follows.

Numbers alone: the settings of ``[privacy]`` (``settings.py``), the theorems behind ε (``accounting.py``,
by dp-accounting) and the account of a run (``account.py``). What is done to messages is the federation's,
what is done to gradients the client's. Imports nothing above settings and errors.
"""

from __future__ import annotations

from sartor.privacy.account import Account, BudgetSpent
from sartor.privacy.accounting import Step, epsilon, noise_for
from sartor.privacy.settings import MODES, Privacy

__all__ = ["MODES", "Account", "BudgetSpent", "Privacy", "Step", "epsilon", "noise_for"]

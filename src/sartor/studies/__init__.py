"""Many runs: comparisons, searches, their statistics, the papers' tables and presets.

Imports runs and what lies below; nothing of commands or reports.
"""

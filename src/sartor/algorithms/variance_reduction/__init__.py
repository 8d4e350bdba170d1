"""Variance reduction and drift."""

"""Variance reduction and drift.

Imports the server's mathematics, split models and the references.
"""

"""Whole personal models, mixed, pulled together or chosen.

Imports the server's mathematics and the references.
"""

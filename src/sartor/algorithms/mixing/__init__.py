"""Whole personal models, mixed, pulled together or chosen."""

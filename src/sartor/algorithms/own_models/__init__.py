"""Clients with models of their own: slices of one model, small models that teach, features, scores.

Imports split models and the references.
"""

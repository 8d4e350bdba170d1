"""Diversified global models: A-FSVRG, MA-FSVRG, GA-FSVRG.

Imports the server's mathematics, and the asynchronous, mixing and variance reduction methods that it
extends.
"""

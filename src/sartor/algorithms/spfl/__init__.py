"""Similarity-weighted personal models, synchronous and asynchronous: SPFL, LGA, PLGA.

Imports the server's mathematics and the asynchronous methods.
"""

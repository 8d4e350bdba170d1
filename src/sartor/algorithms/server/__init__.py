"""The server's mathematics that several methods share.

Imports no method: tensors go in and come out.
"""

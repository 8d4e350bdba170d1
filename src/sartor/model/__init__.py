"""A model as a vector: tasks with their parts and buffers, layers that clients can share, networks by name.

Imports kernels, and what every room may: errors, settings, random, files.
"""

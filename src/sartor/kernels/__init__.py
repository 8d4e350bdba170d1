"""Many clients' convolutions, products, norms, attention and shuffles as kernels, and what a device has.

Imports nothing of Sartor.
"""

"""Many clients' convolutions, products and shuffles as single kernels, and what a device has.

Imports nothing of Sartor.
"""

"""Methods that do not wait for everyone.

Imports the server's mathematics and mixing, one of whose methods it lets run without waiting.
"""

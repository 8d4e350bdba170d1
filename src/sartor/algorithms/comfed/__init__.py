"""ComFed: client mechanism × server optimizer, two small tables composed.

Imports the server's mathematics alone.
"""

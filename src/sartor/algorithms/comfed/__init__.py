"""ComFed: client mechanism × server optimizer, two small tables composed."""

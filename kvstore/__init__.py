"""A parameter-server key-value store with pluggable gradient compression."""

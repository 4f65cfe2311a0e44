"""Dispatch over symmetric memory: ranks read and write each other's rows, within a node."""

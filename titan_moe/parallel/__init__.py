"""Parallelism: meshes and the transforms of a built model, which train/build.py applies in order."""

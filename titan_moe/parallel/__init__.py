"""Parallelism: meshes and the transforms of a built model, which training/build.py applies in order."""

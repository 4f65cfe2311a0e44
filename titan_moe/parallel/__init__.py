"""How a built model is spread over ranks: meshes, and one transform a file, each `apply(model, ...)`.

`train/build.py` applies them in one visible order.
"""

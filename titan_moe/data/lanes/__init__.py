"""Streams that ranks divide: a fixed number of lanes, each a part of the data that is packed by itself.

`cut.py` divides files, `lane.py` shuffles the samples of a part, `samples.py` deals lanes to the sequences of a step,
`source.py` opens those of a recipe, and `worker.py` reads them, or a mixture with them, in a process beside the rank.
"""

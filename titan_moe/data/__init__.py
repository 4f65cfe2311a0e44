"""Data: from files or a hub to the batches of a rank.

`sources.py` opens what `[data]` and `[validation]` name. A sample goes this way:

    config/data_files.py   a path -> files of one kind (by ending), or a hub name
    rows.py, text.py       a kind of file -> rows, or texts; hub.py: rows of `datasets`
    row_text.py            a row -> a document: the text of a column; chat/: a conversation, with what is learned of it
    documents.py           one after the other, of whatever kind
    tokenizer.py           a document -> tokens with an end
    corpora.py             all documents -> a `Corpus` in the cache; stream.py: -> samples, as they are read
    samples.py             a corpus -> samples in the order of an epoch; mixture.py: of several sources, by their shares
    lanes/                 a stream -> samples, of which a rank reads only its own
    packing.py, loader.py  samples -> microbatches of a rank

Where new parts meet it:

* A kind of file: a row of `KINDS` (config/data_files.py) and of `_READERS` (rows.py).
* Documents that are no text: a `convert` of rows, as chat/encoder.py's.
* Several sources in one run: `DataConfig.by_source` gives the `[data]` of each, and `MixedSamples` (mixture.py) is one
  more `Samples` over theirs.
"""

"""Turn documents into batches: sources, tokenizers, packing, and a loader whose state is one global sample cursor.

Every source defines one global order of samples, which does not depend on the parallel layout. Step s reads samples
[s*G, (s+1)*G), and each data-parallel rank keeps a contiguous slice. A run therefore resumes on any number of ranks.
"""

"""From documents to batches: sources, tokenizers, packing, and a loader whose whole state is one global sample cursor.

Every source ends in the same global order of samples, which no layout changes: step s reads samples [s*G, (s+1)*G) and
a data-parallel rank keeps its contiguous slice, so a run resumes onto any number of ranks.
"""

from titan_moe.data.loader import Loader, build_loader
from titan_moe.data.packing import IGNORE_LABEL, Batch

__all__ = ["IGNORE_LABEL", "Batch", "Loader", "build_loader"]

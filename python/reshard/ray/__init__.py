"""Ray: conversions and comparisons by the workers of a cluster. See docs/guides/cluster.md.

reshard.convert(src, dst, on=reshard.ray.Ray())
"""

from reshard.ray.cluster import Ray

__all__ = ["Ray"]

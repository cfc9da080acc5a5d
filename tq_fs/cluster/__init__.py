"""A store on the nodes of a Ray cluster: one call and one YAML.

>>> cluster = tq_fs.cluster.start("cluster.yaml")            # in the driver  # doctest: +SKIP
>>> store = tq_fs.cluster.attach("run-7").store(fields)      # anywhere else  # doctest: +SKIP
"""

from tq_fs.cluster._cluster import StoreCluster, attach, start

__all__ = ["StoreCluster", "attach", "start"]

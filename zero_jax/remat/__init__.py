"""What a layer keeps from forward to backward, and where: policies, and layers that run again.

Knows layers as functions of arrays, and nothing of stages or shards. May import `jaxpr`,
`sharding` and `collectives`.
"""

"""ZeRO: from a loss and an optimizer to the step that runs sharded.

The loss is traced, its leaves' lifetimes are read from the trace, its program is run with shards in
place of parameters, the gradients are summed and the update follows. May import `jaxpr`, `cluster`,
`sharding`, `collectives`, `remat`, `offload` and `owners`.
"""

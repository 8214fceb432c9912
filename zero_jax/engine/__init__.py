"""The ZeRO engine: from a loss and an optimizer to a sharded training step.

It traces the loss, reads the lifetimes of its leaves from the trace, runs the program with shards
in place of parameters, reduces the gradients and applies the update. May import `tracing`,
`distributed`, `sharding`, `collectives`, `remat`, `offload`, `low_bit` and `matrix_updates`.
"""

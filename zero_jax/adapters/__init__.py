"""Adapters of low rank beside the matrices of a frozen, maybe quantised model: LoRA and QLoRA.

What a model multiplies with is read from its trace; ZeRO then sees an ordinary loss of more and
smaller leaves. May import `jaxpr` and `sharding`.
"""

"""LoRA and QLoRA: low-rank adapters of a frozen, optionally quantised model.

The matrices to adapt are found in the trace of the loss; ZeRO receives an ordinary loss of more and
smaller leaves. May import `tracing` and `sharding`.
"""

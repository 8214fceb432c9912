"""Weights of others, in and out: folders of safetensors as Hugging Face's transformers reads them.

May import `models`, `adapters`, `checkpoint` and what that may.
"""

from zero_jax.interchange.hugging_face import check as check
from zero_jax.interchange.hugging_face import config as config
from zero_jax.interchange.hugging_face import export as export
from zero_jax.interchange.hugging_face import load as load

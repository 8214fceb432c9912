"""Import and export of Hugging Face transformers models, as folders of safetensors.

May import `models`, `adapters`, `checkpoint` and the packages that `checkpoint` may import.
"""

from zero_jax.interchange.hugging_face import check as check
from zero_jax.interchange.hugging_face import config as config
from zero_jax.interchange.hugging_face import export as export
from zero_jax.interchange.hugging_face import load as load

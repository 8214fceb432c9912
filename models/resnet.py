"""ResNet in Flax linen, with a CIFAR stem: a 3x3 convolution and no pooling before stage one.

Here for what a transformer does not have: batch statistics that are state and not parameters,
and kernels of four dims. Compute follows the dtype of the parameters; batch statistics are fp32.

Shapes: B batch, H height, W width, C channels, K classes.

He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn


def _to_kernel_dtype(*arrays: Any, **_: Any) -> list[Any]:
    # Pixels come in fp32 or uint8 whatever the parameters are, and would decide for the rest.
    kernel = arrays[1]
    return [None if array is None else jnp.asarray(array, kernel.dtype) for array in arrays]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3, 1x1 to four times the width, and a shortcut.

    Attributes:
      width: channels inside the block.
      stride: of the first 3x3 convolution, and of the shortcut.
      bottleneck: the second of the two forms.
      norm: makes a normalization layer.
    """

    width: int
    stride: int
    bottleneck: bool
    norm: Any

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        out = self.width * (4 if self.bottleneck else 1)
        plain = [(self.width, 3, self.stride), (out, 3, 1)]
        narrow = [(self.width, 1, 1), (self.width, 3, self.stride), (out, 1, 1)]
        y_BxHxWxC = x_BxHxWxC
        for index, (channels, size, stride) in enumerate(narrow if self.bottleneck else plain):
            y_BxHxWxC = nn.relu(y_BxHxWxC) if index else y_BxHxWxC
            y_BxHxWxC = nn.Conv(channels, (size, size), stride, use_bias=False)(y_BxHxWxC)
            y_BxHxWxC = self.norm()(y_BxHxWxC)
        if x_BxHxWxC.shape[-1] != out or self.stride != 1:
            project = nn.Conv(out, (1, 1), self.stride, use_bias=False, name="shortcut")
            x_BxHxWxC = self.norm(name="shortcut_norm")(project(x_BxHxWxC))
        return nn.relu(x_BxHxWxC + y_BxHxWxC)


class ResNet(nn.Module):
    """A ResNet over images (B, H, W, 3); each stage after the first halves H and W.

    Attributes:
      stages: residual blocks in each stage.
      width: channels of the first stage; each later one has twice as many.
      classes: classes of the output.
      axis_name: mesh axis over which batch statistics are averaged, None for none.
      bottleneck: blocks of three convolutions instead of two.
    """

    stages: tuple[int, ...] = (2, 2)
    width: int = 16
    classes: int = 10
    axis_name: str | None = None
    bottleneck: bool = False

    @nn.compact
    def __call__(self, images_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        """Returns fp32 logits (B, K); `train` uses and updates the statistics of this batch."""
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name=self.axis_name
        )
        stem = functools.partial(nn.Conv, promote_dtype=_to_kernel_dtype, use_bias=False)
        x_BxHxWxC = stem(self.width, (3, 3), name="stem")(images_BxHxWxC)
        x_BxHxWxC = nn.relu(norm(name="stem_norm")(x_BxHxWxC))
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage{stage}_block{block}"
                x_BxHxWxC = ResidualBlock(
                    self.width * 2**stage, stride, self.bottleneck, norm, name=name
                )(x_BxHxWxC)
        logits_BxK = nn.Dense(self.classes, name="head")(jnp.mean(x_BxHxWxC, axis=(1, 2)))
        return logits_BxK.astype(jnp.float32)


resnet8 = functools.partial(ResNet, stages=(1, 1, 1), width=16)
resnet18 = functools.partial(ResNet, stages=(2, 2, 2, 2), width=64)
resnet50 = functools.partial(ResNet, stages=(3, 4, 6, 3), width=64, bottleneck=True)


def loss(
    model: ResNet, params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Returns a training batch's cross entropy and the batch statistics after it.

    Args:
      model: the model.
      params: its "params" collection.
      batch_stats: its "batch_stats" collection.
      images: pixels (B, H, W, C), of any dtype.
      labels: classes (B,).

    Returns:
      ((sum over the batch, B), new batch_stats); the mean loss is the ratio of the first two.
    """
    logits_BxK, updates = model.apply(
        {"params": params, "batch_stats": batch_stats}, images, train=True, mutable=["batch_stats"]
    )
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxK, labels)
    return (jnp.sum(losses_B), jnp.float32(losses_B.size)), updates["batch_stats"]

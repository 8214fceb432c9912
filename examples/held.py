"""What each device holds: the bytes of its shards."""

import jax


def print_held(**trees) -> int:
    """Prints a line for each device; returns the bytes of the one that holds most.

    Args:
      **trees: trees of arrays, by the name that they are printed with.
    """
    most = 0
    for device in jax.local_devices():
        sizes = {name: held_by(device, tree) for name, tree in trees.items()}
        print(f"{device}:", ", ".join(f"{name} {size:,} bytes" for name, size in sizes.items()))
        most = max(most, sum(sizes.values()))
    return most


def held_by(device: jax.Device, tree) -> int:
    """The bytes of one device's shards of a tree."""
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)

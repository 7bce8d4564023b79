"""Shares of a model that a number of ranks can hold. Without PyTorch, so that it is known before a rank starts."""

from __future__ import annotations

from worker.config.model_config import ModelConfig, ModelError


def check_share(count: int, what: str, size: int) -> None:
    """Refuses a number of things, called `what`, that `size` ranks cannot share equally.

    Raises:
        ModelError: they cannot.
    """
    if count % size:
        raise ModelError(f"{what} {count} is not a multiple of tensor_parallel_size {size}")


def check_kv_share(num_kv_heads: int, size: int) -> None:
    """Refuses a number of key/value heads that ranks can neither share equally nor copy equally often.

    Raises:
        ModelError: neither of the two numbers is a multiple of the other.
    """
    if num_kv_heads >= size:
        check_share(num_kv_heads, "num_key_value_heads", size)
    elif size % num_kv_heads:
        raise ModelError(f"tensor_parallel_size {size} is not a multiple of num_key_value_heads {num_kv_heads}")


def check_heads(config: ModelConfig, size: int) -> None:
    """Refuses numbers of heads that `size` ranks cannot share. Other shares are checked when the model is loaded.

    Raises:
        ModelError: they cannot.
    """
    check_share(config.num_attention_heads, "num_attention_heads", size)
    # A latent cache is held by each rank, whole.
    if config.source.get("kv_lora_rank") is None:
        check_kv_share(config.num_key_value_heads, size)

"""Import path of verl.compat.containers: addresses."""

from verl.compat.containers import is_ipv4, is_valid_ipv6_address

__all__ = ["is_ipv4", "is_valid_ipv6_address"]

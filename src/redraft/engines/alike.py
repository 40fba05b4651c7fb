"""Settings of a server: what is recorded of it, and what two must share before their figures may be compared."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redraft.frame.errors import RedraftError

SETTINGS = (
    "version", "model_path", "dtype", "quantization", "kv_cache_dtype", "context_length", "max_running_requests",
    "tp_size", "dp_size", "pp_size", "attention_backend", "page_size", "disable_radix_cache", "disable_cuda_graph",
    "chunked_prefill_size", "mem_fraction_static", "device",
)  # fmt: skip
"""Effective settings that are recorded of every server."""
MAY_DIFFER = {
    "attention_backend": "SGLang takes another one where its first choice cannot verify drafts",
    "page_size": "follows the attention backend",
    "chunked_prefill_size": "SGLang derives it from the memory that the drafter leaves",
    "mem_fraction_static": "a drafter needs room of its own",
}
"""Of them, those that may differ under speculation, and why; people choose the others, and they must agree."""


def require_alike(plain: Mapping[str, Any], speculative: Mapping[str, Any]) -> None:
    """Refuse two joined servers on two hosts, or that differ in more than speculation; each by its description.

    Raises:
        RedraftError: naming what differs.
    """
    apart = [name for name in SETTINGS if name not in MAY_DIFFER and plain.get(name) != speculative.get(name)]
    hosts = [urlsplit(str(each.get("joined", ""))).hostname for each in (plain, speculative)]
    if apart or hosts[0] != hosts[1]:
        raise RedraftError(
            "The servers with and without speculation are not alike.",
            where="engine.url, engine.baseline_url in the profile",
            expected="one release, target and settings, but for speculation",
            found="; ".join(f"{name} {plain.get(name)} and {speculative.get(name)}" for name in apart)
            or f"hosts {hosts}",
            fix="start both with the same flags but for --speculative-*",
        )

"""Settings that two servers must share before their figures may be compared."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redraft.frame.errors import RedraftError

ALIKE = (
    "version", "model_path", "dtype", "quantization", "context_length", "max_running_requests", "tp_size", "dp_size",
    "pp_size", "disable_radix_cache", "device",
)  # fmt: skip
"""Settings that people choose; what SGLang derives from them may differ under speculation."""


def require_alike(plain: Mapping[str, Any], speculative: Mapping[str, Any]) -> None:
    """Refuse two joined servers on two hosts, or that differ in more than speculation; each by its description.

    Raises:
        RedraftError: naming what differs.
    """
    apart = [name for name in ALIKE if plain.get(name) != speculative.get(name)]
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

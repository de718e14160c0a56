"""Makes the fabric that the settings ask for."""

from __future__ import annotations

from groupio.errors import InvalidInput
from groupio.fabric.base import Fabric
from groupio.fabric.mooncake_engine import slots_of, window_bytes
from groupio.fabric.pacing import Pacer
from groupio.fabric.stream import is_loopback
from groupio.settings import Settings

_MOONCAKE = ("mooncake", "mooncake-keyless")


def fabric_bytes(settings: Settings, budget: int) -> int:
    """The part of a memory budget, in bytes, that the fabric of an agent takes for itself."""
    return window_bytes(slots_of(budget)) if settings.fabric in _MOONCAKE else 0


def open_fabric(
    settings: Settings, host: str, announce: str, token: bytes | None, budget: int
) -> Fabric:
    """The fabric of agents by ``settings.fabric``, to be served at ``host``, announced as
    ``announce``.

    ``token`` is the secret that peers share, None where only this machine may connect and each
    job has its own (``Fabric.trust``). ``budget``
    is all memory of the agent, in bytes; see :func:`fabric_bytes`.
    InvalidInput when the package of a transfer engine is not there, or when an engine without a
    key would be reached from elsewhere and the settings do not say that this is meant.
    """
    pace = Pacer(settings.fabric_bytes_per_s)
    if settings.fabric not in _MOONCAKE:
        from groupio.fabric.tcp import TcpFabric

        return TcpFabric(host=host, announce=announce, token=token, pace=pace)
    try:
        from groupio.fabric.mooncake import MooncakeFabric
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"GROUPIO_FABRIC={settings.fabric} needs the package {error.name}: pip install "
            "'groupio[mooncake]'"
        ) from error
    if settings.fabric == "mooncake" and not _is_loopback(host):
        raise InvalidInput(
            f"the Mooncake engine has ports without a key, and would be reached at {host}; set "
            "GROUPIO_FABRIC=mooncake-keyless if only the job's nodes reach that network, or "
            "GROUPIO_FABRIC=tcp"
        )
    slots = slots_of(budget)
    return MooncakeFabric(host=host, announce=announce, token=token, pace=pace, slots=slots)


def _is_loopback(host: str) -> bool:
    try:
        return is_loopback(host.strip("[]"))
    except ValueError:
        return host == "localhost"

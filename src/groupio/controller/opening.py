"""Opens the coordinator that belongs to a place where a controller is found."""

from __future__ import annotations

from collections.abc import Callable

from groupio.backend.base import Backend
from groupio.controller.by_store import StoreCoordinator
from groupio.controller.coordinator import Coordinator, OnLost
from groupio.controller.discover import Kind, Where
from groupio.errors import GroupIOError, InvalidInput


def open_coordinator(
    where: Where,
    store: Backend,
    scope: str,
    *,
    by_token: bool,
    on_lost: OnLost | None = None,
    after: Callable[[GroupIOError], Backend] | None = None,
) -> Coordinator:
    """The coordinator that counts a job's terms: in etcd if ``where`` says so, else in ``store``.

    A controller at a fixed address takes its term from the store too, so that terms grow over
    its restarts. ``scope`` is the store's id; ``by_token`` says which keys a controller of this
    process takes. InvalidInput when the client of etcd is not there.
    """
    if where.kind is not Kind.ETCD:
        return StoreCoordinator(store, on_lost=on_lost, after=after, by_token=by_token)
    try:
        from groupio.controller.by_etcd import EtcdCoordinator  # only here: httpcore is an extra
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"{where.address} ({where.why}) needs the package {error.name}: pip install "
            "'groupio[etcd]'"
        ) from error
    return EtcdCoordinator(where.endpoints, scope, on_lost=on_lost, by_token=by_token)

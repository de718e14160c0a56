"""A process that rules by etcd and says so: ENDPOINT SCOPE TTL. One line per change."""

from __future__ import annotations

import sys
import time

from groupio.controller.by_etcd import EtcdCoordinator
from groupio.testing.coordinator_suite import run_for


def main() -> None:
    endpoint, scope, ttl_s = sys.argv[1:]
    with EtcdCoordinator([endpoint], scope, ttl_s=int(ttl_s)) as coordinator:
        print("rules", run_for(coordinator, 1).term, flush=True)
        while coordinator.keep():
            time.sleep(0.01)
        print("over", flush=True)


if __name__ == "__main__":
    main()

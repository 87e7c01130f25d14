"""The protocol by which ranks find out who is at fault: how often it uses the store."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zerograph.runtime.job.liveness import Liveness

SIZE, CLIENTS = 16_384, 64


class CountingStore:
    """A store in memory that counts operations."""

    def __init__(self) -> None:
        self.store, self.operations = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def count(*args: Any) -> Any:
            self.operations += name != "has_extended_api"
            return method(*args)

        return count


def test_ranks_of_a_large_job_use_the_store_less_than_a_thousand_times_per_second() -> None:
    store = CountingStore()
    clients = [Liveness(rank, SIZE, store) for rank in range(0, SIZE, SIZE // CLIENTS)]
    for client in clients:
        with client.busy("step 1"):
            client._check(store)
    assert store.operations / CLIENTS * SIZE / clients[0]._interval < 1000
    # They still see an inquiry, once.
    number = clients[0]._inquire()
    for _ in range(2):
        before = store.operations
        clients[1]._check(store)
    assert store.check([f"answer/{number}/{clients[1].rank}"])
    assert store.operations - before == 2

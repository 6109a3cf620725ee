"""What the managed cache did while a call ran: a few counts for the answer's metadata.

It must not know messages.
"""

from __future__ import annotations

from typing import Any

from sidequest_langchain.engine.segments import KVSegments
from sidequest_langchain.policy.receipts import ActReceipt, ReceiptLog


class ManagedActs:
    """Acts of one engine's managed cache from the moment this is made; does not wait.

    The cache is one for all calls: acts that another call's rows asked for count here too, if
    they were done meanwhile. All of them, `model.kv.receipts()` tells.
    """

    def __init__(self, kv: KVSegments) -> None:
        self._kv = kv
        self._before = next(reversed(kv.receipts()), None)

    def counts(self) -> dict[str, Any] | None:
        """What was done, in numbers; `None` if nothing was.

        Rows hidden count as evicted. `most_kl` is the largest divergence that the guard measured
        for these acts, in nats a token; `None` if it measured none. Of a call during which
        more acts were done than `model.kv.receipts()` keeps, the latest count.
        """
        found: list[ActReceipt] = []
        for receipt in reversed(self._kv.receipts()):
            if receipt is self._before:
                break
            if isinstance(receipt, ActReceipt):
                found.append(receipt)
        log = ReceiptLog(n_kept=0)
        log.add(found)
        done = log.summary()
        if not done.n_acts:
            return None
        return {
            "evicted_rows": done.n_rows_evicted,
            "compressed_rows": done.n_rows_compressed,
            "archived_rows": done.n_rows_archived,
            "restored_rows": done.n_rows_restored,
            "freed_bytes": done.freed_bytes,
            "most_kl": done.most_kl,
            "forced_acts": done.n_forced,
        }

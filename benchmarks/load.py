"""Rounds of secure aggregation under load and liars: the server's last step, bytes, memory.

    python benchmarks/load.py                      50 to 1,000 clients, complete and sparse
    python benchmarks/load.py --before OLD         the same in another checkout, row by row in turn

One process plays the server and all clients, 10,000 one-bit symbols each. `silent` clients stop at each of
the four exchanges, a quarter of them at each; `liars` open wrong shares of everybody in the last exchange.
Each row runs in a process of its own; seconds are CPU seconds. "Opening" is the server's last `close`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

DIM = 10_000
DEGREE_58 = {"degree": "auto", "max_colluding_fraction": 0.1, "max_dropped_fraction": 0.1}
ROWS: list[tuple[str, int, dict[str, Any], int, int]] = [
    *(("complete", n, {}, n * 4 // 10, 0) for n in (50, 100, 200)),
    *(("complete", n, {}, 0, liars) for n in (25, 50, 100, 200) for liars in (0, 1)),
    ("complete", 200, {}, 0, 49),
    ("sparse, degree 472", 1000, {**DEGREE_58, "max_dropped_fraction": 0.4}, 344, 0),
    *(("sparse, degree 58", 1000, DEGREE_58, 0, liars) for liars in (0, 1)),
    *(("complete", 1000, {}, 0, liars) for liars in (0, 1)),
]
ONLY_NOW = {(1000, 0), (1000, 1), (200, 49)}
"""(clients, liars) of complete graphs that older code takes minutes or hours for, or gives up."""


def play(clients: int, options: dict[str, Any], silent: int, liars: int) -> dict[str, float]:
    """One round, and what it took."""
    import numpy as np

    from lightning_fedq.secagg import Client, SecAgg, Server
    from lightning_fedq.secagg.layout import sum_layout

    layout = sum_layout(DIM, 0, 1, clients)
    terms = SecAgg(**options).terms(b"load", 0, 0, range(clients), layout, num_clients=clients)
    server = Server(terms, bytes(32))
    machines = {client: Client(client, terms, bytes(32)) for client in terms.cohort}
    order = np.random.default_rng(0).permutation(clients)
    stops = {int(client): place % 4 for place, client in enumerate(order[:silent])}
    symbols = np.random.default_rng(1).integers(0, 2, (clients, DIM))
    up, begun = 0, time.process_time()
    incoming = {client: server.invitation(client) for client in terms.cohort}

    def masked(client: int, message: bytes) -> bytes:
        machines[client].accept_shares(message)
        if 0 <= client - clients // 2 < liars:  # in the middle: that took the code before the most tries
            for owner, pair in machines[client]._held.items():
                machines[client]._held[owner] = pair[:33] + bytes(1) + bytes([owner % 251]) * 32
        return machines[client].masked_input(symbols[client])

    answers = (
        lambda client, message: machines[client].advertise(message),
        lambda client, message: machines[client].share_keys(message),
        masked,
        lambda client, message: machines[client].unmask(message),
    )
    for stage, answer in enumerate(answers):
        for client, message in incoming.items():
            if stops.get(client, 4) > stage:
                reply = answer(client, message)
                up += len(reply)
                server.receive(reply)
        last = time.process_time()
        incoming = server.close()
    end = time.process_time()
    assert np.array_equal(server.total, symbols[list(server.survivors)].sum(0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"round": end - begun, "opening": end - last, "kB up": up / clients / 1e3, "MiB": peak}


def measured(number: int, folder: str) -> dict[str, float] | None:
    """A row in a new process, with the package of one folder; None where it gives up."""
    ran = subprocess.run(
        [sys.executable, __file__, "--row", str(number)],
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
    )
    return json.loads(ran.stdout) if ran.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before")
    parser.add_argument("--row", type=int)
    args = parser.parse_args()
    if args.row is not None:
        _, clients, options, silent, liars = ROWS[args.row]
        print(json.dumps(play(clients, options, silent, liars)))
        return
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    print("| graph | clients | silent | liars | round, s | opening, s | before, s | kB up a client | MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, (graph, clients, options, silent, liars) in enumerate(ROWS):
        old = None
        if args.before and not (not options and (clients, liars) in ONLY_NOW):
            old = measured(number, os.path.abspath(args.before))
        row = measured(number, here)
        assert row is not None
        cells = [f"{row['round']:.1f}", f"{row['opening']:.2f}", f"{old['opening']:.2f}" if old else "-"]
        cells += [f"{row['kB up']:.1f}", f"{row['MiB']:.0f}"]
        print("|", " | ".join([graph, str(clients), str(silent), str(liars), *cells]), "|", flush=True)


if __name__ == "__main__":
    main()

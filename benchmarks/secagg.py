"""Secure aggregation at scale: CPU seconds, bits and memory of one whole round, every client really run.

    python benchmarks/secagg.py                        1,000 clients x 10^6 one-bit symbols, sparse graph
    python benchmarks/secagg.py --clients 100 --dim 100000 --complete

One process plays the server and all clients. "Set-up" is what pairs of neighbours need before the first mask:
keys, the roster, Shamir shares computed, corrected and confirmed, on both sides.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

import numpy as np

from lightning_fedq.keys.randomness import SeededKeys, Stream
from lightning_fedq.secagg import Client, SecAgg, Server
from lightning_fedq.secagg.layout import sum_layout


def sharing(terms, model_hash=bytes(32)):
    """Run a round up to the masked stage."""
    server = Server(terms, model_hash)
    clients = {client: Client(client, terms, model_hash) for client in terms.cohort}
    for client in clients.values():
        server.receive(client.advertise(server.invitation(client.client)))
    for answer in (Client.share_keys, Client.accept_shares):
        for client, message in server.close().items():
            if reply := answer(clients[client], message):
                server.receive(reply)
    return server, clients


def pairs_per_second(num_pairs: int = 10_000) -> float:
    """CPU seconds of the set-up of `num_pairs` pairs: 400 clients with 50 neighbours each."""
    base = SecAgg().terms(b"pairs", 0, 0, range(400), sum_layout(1, 0, 1, 400), num_clients=400)
    degree = 2 * num_pairs // 400
    terms = replace(base, degree=degree, threshold=degree // 2 + 1, min_survivors=degree // 2 + 1)
    start = time.process_time()
    sharing(terms)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=1_000_000)
    parser.add_argument("--dropouts", type=float, default=0.05)
    parser.add_argument("--complete", action="store_true")
    args = parser.parse_args()
    seconds = pairs_per_second()
    print(f"set-up of 10,000 pairs (both sides, shares included): {seconds:.1f} s CPU")

    secagg = (
        SecAgg()
        if args.complete
        else SecAgg(degree="auto", max_colluding_fraction=0.1, max_dropped_fraction=0.1)
    )
    n, dim = args.clients, args.dim
    terms = secagg.terms(b"benchmark", 0, 0, range(n), sum_layout(dim, 0, 1, n), num_clients=n)
    print(
        f"{n} clients x {dim} one-bit symbols: degree {terms.degree}, threshold {terms.threshold}, "
        f"{terms.layout.blocks[0].width} bits a symbol"
    )
    times, total = {}, time.process_time()

    def lap(name: str) -> None:
        nonlocal start
        times[name], start = time.process_time() - start, time.process_time()

    start = time.process_time()
    server, clients = sharing(terms)
    lap("set-up")
    bits = Stream(SeededKeys(0).public()).words(dim) & 1
    gone = set(range(0, n, round(1 / args.dropouts))) if args.dropouts else set()
    expected, sent = np.zeros(dim, np.int64), 0
    for client in clients.values():
        if client.client in gone:
            continue
        symbols = np.roll(bits, client.client).astype(np.uint8)
        expected += symbols
        message = client.masked_input(symbols)
        sent = len(message)
        server.receive(message)
    lap("mask, pack, tag, check, unpack, add")
    for client, message in server.close().items():
        server.receive(clients[client].unmask(message))
    server.close()
    lap("unmask")
    assert np.array_equal(server.total, expected), "wrong sum"
    for name, value in times.items():
        print(f"  {name:38s} {value:7.1f} s CPU")
    print(
        f"  {'total':38s} {time.process_time() - total:7.1f} s CPU; {len(gone)} dropped out; the sum is exact"
    )
    masks = (n - len(gone)) * (min(terms.degree, n - 1) + 1)
    rate = masks * dim / times["mask, pack, tag, check, unpack, add"] / 1e9
    print(f"  {masks} masks, {rate:.2f} G mask symbols/s; {8 * sent / dim:.3f} bits a parameter and client")
    print(f"  peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()

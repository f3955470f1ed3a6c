"""One sum of gradients, three ways to add it over the ranks. Bytes are counted, and the bits are hashed."""

import hashlib

import torch

torch.manual_seed(0)
leaves = [torch.rand(1200) - 0.5 for _ in range(8)]  # the gradients of 8 micro-batches, 4800 bytes each
sent: list[int] = []  # bytes that each rank has sent; the last entry is the server's


def send(rank: int, values: torch.Tensor) -> torch.Tensor:
    sent[rank] += values.numel() * values.element_size()
    return values


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def server(own: list[torch.Tensor]) -> torch.Tensor:
    total = sum(send(rank, part) for rank, part in enumerate(own))  # push
    for _ in own:
        send(len(own), total)  # pull, by each worker
    return total


def ring(own: list[torch.Tensor]) -> torch.Tensor:
    ranks = len(own)
    pieces = [list(part.chunk(ranks)) for part in own]
    for step in range(ranks - 1):  # reduce-scatter: every piece travels round and grows
        for rank in range(ranks):
            piece, to = (rank - step) % ranks, (rank + 1) % ranks
            pieces[to][piece] = pieces[to][piece] + send(rank, pieces[rank][piece])
    done = [pieces[(piece - 1) % ranks][piece] for piece in range(ranks)]
    for step in range(ranks - 1):  # all-gather: every whole piece travels round once more
        for piece in range(ranks):
            send((piece - 1 + step) % ranks, done[piece])
    return torch.cat(done)


def ordered(own: list[torch.Tensor]) -> torch.Tensor:
    cut = [part.chunk(len(own)) for part in own]
    done = [tree([pieces[i] for pieces in cut]) for i in range(len(own))]
    for rank in range(len(own)):
        for other in set(range(len(own))) - {rank}:
            send(rank, cut[rank][other])  # to the rank that adds this piece
            send(rank, done[rank])  # the sum of its own piece, to every other rank
    return torch.cat(done)


for name, add, within in (("server", server, sum), ("ring", ring, sum), ("ordered", ordered, tree)):
    for ranks in (1, 2, 4):
        sent[:] = [0] * (ranks + 1)
        total = add([within(leaves[i : i + 8 // ranks]) for i in range(0, 8, 8 // ranks)])
        bits = hashlib.sha256(total.numpy().tobytes()).hexdigest()[:8]
        print(f"{name:8} {ranks} ranks: the busiest sends {max(sent):6} bytes, bits {bits}")

"""main.py server PORT, main.py client PORT. The grader uses its own copy of this file."""

import itertools
import struct
import sys

import pyverbs.enums as e
from pyverbs.wr import SendWR, SGE

from connect import Rdma
from solution import get

WORDS = 1000
# The slot: a version that is odd while the value changes, and the value.
SLOT_BYTES = 8 * (1 + WORDS)
GETS = 100
# What the server does before each part of a READ: nothing, begin a change, finish it, or both.
STEPS = "C......B..F.."


def words(number, count):
    return struct.pack("<Q", number) * count


def serve(rdma):
    """The server's program. What it does depends on the number of READs, and not on the time."""
    half, rounds, version = WORDS // 2, 0, 0
    for action in itertools.cycle(STEPS):
        if rdma.exchange.exchange(None) != "step":
            return
        if action in "BC":
            rounds, version = rounds + 1, version + 1
            rdma.mr.write(words(version, 1), 8)
            rdma.mr.write(words(rounds, half), 8 * half, 8)
        if action in "FC":
            version += 1
            rdma.mr.write(words(rounds, WORDS - half), 8 * (WORDS - half), 8 * (1 + half))
            rdma.mr.write(words(version, 1), 8)
        rdma.exchange.exchange(None)


def read_part(rdma, offset, at, count):
    rdma.exchange.exchange("step")
    rdma.exchange.exchange(None)
    wr = SendWR(sg=[SGE(rdma.mr.buf + at, count, rdma.mr.lkey)], num_sge=1, opcode=e.IBV_WR_RDMA_READ)
    wr.set_wr_rdma(rdma.peer["rkey"], rdma.peer["address"] + offset + at)
    rdma.qp.post_send(wr)
    rdma.expect("READ")


def read_slot(rdma, offset, count):
    """Reads bytes of the server's slot, from this offset on. The bytes of one READ are fetched in any order, and the
    server may change the slot at any time."""
    # Here, the second half comes first. Eight bytes are whole.
    first = count // 16 * 8 if count > 8 else 0
    read_part(rdma, offset, first, count - first)
    if first:
        read_part(rdma, offset, 0, first)
    return rdma.mr.read(count, 0)


role, port = sys.argv[1], int(sys.argv[2])
rdma = Rdma(role, port, bytes=SLOT_BYTES if role == "server" else 16384)
if role == "server":
    rdma.mr.write(words(0, 1 + WORDS), SLOT_BYTES)
rdma.connect()
if role == "server":
    serve(rdma)
else:
    reader = lambda offset, count: read_slot(rdma, offset, count)
    values = [struct.unpack(f"<{WORDS}Q", get(reader, WORDS)) for _ in range(GETS)]
    print("values:", "several" if len({value[0] for value in values}) > 2 else "one")
    print("torn:", sum(len(set(value)) > 1 for value in values))
    rdma.exchange.exchange("end")

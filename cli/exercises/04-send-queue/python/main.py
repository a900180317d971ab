"""main.py server PORT, main.py client PORT. The grader uses its own copy of this file."""

import sys

from connect import Rdma
from solution import write_blocks

BLOCKS, BLOCK_BYTES, QUEUE = 200, 64, 16

role, port = sys.argv[1], int(sys.argv[2])
rdma = Rdma(role, port, bytes=BLOCKS * BLOCK_BYTES, max_send_wr=QUEUE, all_signaled=0)
rdma.connect()
data = b"".join(bytes([(block + 1) % 256]) * BLOCK_BYTES for block in range(BLOCKS))
if role == "client":
    rdma.mr.write(data, len(data))
    write_blocks(rdma, BLOCKS, BLOCK_BYTES, QUEUE)
rdma.exchange.barrier()
if role == "server":
    got = rdma.mr.read(len(data), 0)
    places = range(0, len(data), BLOCK_BYTES)
    print("blocks:", sum(got[at : at + BLOCK_BYTES] == data[at : at + BLOCK_BYTES] for at in places))

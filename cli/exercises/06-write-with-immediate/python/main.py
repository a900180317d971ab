"""main.py server PORT, main.py client PORT. The grader uses its own copy of this file."""

import sys

from connect import Rdma
from solution import next_slot, prepare, write_slot

SLOTS, SLOT_BYTES = 8, 256
WRITES = [(5, "first"), (2, "second"), (7, "third")]

role, port = sys.argv[1], int(sys.argv[2])
rdma = Rdma(role, port, bytes=SLOTS * SLOT_BYTES, max_send_wr=8, max_recv_wr=8)
rdma.mr.write(bytes(SLOTS * SLOT_BYTES), SLOTS * SLOT_BYTES)
if role == "server":
    rdma.init()
    prepare(rdma)
rdma.connect(rnr_retry=1)
for slot, text in WRITES:
    if role == "client":
        rdma.mr.write(text.encode() + b"\0", len(text) + 1)
        write_slot(rdma, slot, SLOT_BYTES)
    else:
        slot = next_slot(rdma)
        if not 0 <= slot < SLOTS:
            sys.exit(f"next_slot returned {slot}, which is not a slot")
        print(f"slot {slot}:", rdma.mr.read(SLOT_BYTES, slot * SLOT_BYTES).split(b"\0")[0].decode())

"""main.py server PORT, main.py client PORT. The grader uses its own copy of this file."""

import struct
import sys

import pyverbs.enums as e
from pyverbs.wr import RecvWR, SendWR, SGE

from connect import Rdma
from solution import return_credit, take_credit

MESSAGES, BYTES, RECEIVES, WINDOW = 200, 64, 8, 32
# The region: the counter at 0, the messages behind it.
FIRST = 64

role, port = sys.argv[1], int(sys.argv[2])
rdma = Rdma(role, port, bytes=FIRST + WINDOW * BYTES, max_send_wr=256, max_recv_wr=RECEIVES, cqe=1024)
rdma.mr.write(bytes(FIRST), FIRST)


def place(slot):
    return SGE(rdma.mr.buf + FIRST + slot * BYTES, BYTES, rdma.mr.lkey)


def post_receive(slot):
    rdma.qp.post_recv(RecvWR(wr_id=slot, sg=[place(slot)], num_sge=1))


if role == "server":
    rdma.init()
    for slot in range(RECEIVES):
        post_receive(slot)
rdma.connect(rnr_retry=7)
if role == "server":
    received = in_order = 0
    while received < MESSAGES:
        completion = rdma.expect("server")
        if completion.opcode != e.IBV_WC_RECV:
            continue
        slot = completion.wr_id
        (number,) = struct.unpack("<q", rdma.mr.read(8, FIRST + slot * BYTES))
        in_order += number == received
        received += 1
        post_receive(slot)
        return_credit(rdma, received)
    print("received in order:", in_order)
else:
    outstanding = 0
    for number in range(MESSAGES):
        take_credit(rdma, number, RECEIVES)
        slot = number % WINDOW
        rdma.mr.write(struct.pack("<q", number), 8, FIRST + slot * BYTES)
        rdma.qp.post_send(SendWR(sg=[place(slot)], num_sge=1, opcode=e.IBV_WR_SEND))
        outstanding += 1
        if outstanding == WINDOW:
            rdma.expect("client")
            outstanding -= 1
    for _ in range(outstanding):
        rdma.expect("client")
rdma.exchange.barrier()

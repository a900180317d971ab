import socket

import pyverbs.enums as e
from pyverbs.wr import RecvWR, SendWR, SGE


def post_empty_receive(rdma):
    rdma.qp.post_recv(RecvWR(sg=[SGE(rdma.mr.buf, 0, rdma.mr.lkey)], num_sge=1))


def prepare(rdma):
    for _ in range(8):
        post_empty_receive(rdma)


def write_slot(rdma, slot, slot_bytes):
    sge = SGE(rdma.mr.buf, slot_bytes, rdma.mr.lkey)
    wr = SendWR(sg=[sge], num_sge=1, opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM, imm_data=socket.htonl(slot))
    wr.set_wr_rdma(rdma.peer["rkey"], rdma.peer["address"] + slot * slot_bytes)
    rdma.qp.post_send(wr)
    rdma.expect("the WRITE failed")


def next_slot(rdma):
    completion = rdma.expect("the receive failed")
    post_empty_receive(rdma)
    return socket.ntohl(completion.imm_data)

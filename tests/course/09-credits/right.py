import struct
import time

import pyverbs.enums as e
from pyverbs.wr import SGE, SendWR


def return_credit(rdma, reposted):
    rdma.mr.write(struct.pack("<Q", reposted), 8)
    wr = SendWR(sg=[SGE(rdma.mr.buf, 8, rdma.mr.lkey)], num_sge=1, opcode=e.IBV_WR_RDMA_WRITE)
    wr.set_wr_rdma(rdma.peer["rkey"], rdma.peer["address"])
    rdma.qp.post_send(wr)


def take_credit(rdma, sent, receives):
    while sent >= receives + struct.unpack("<Q", rdma.mr.read(8, 0))[0]:
        time.sleep(0.0001)

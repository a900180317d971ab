import pyverbs.enums as e
from pyverbs.wr import SGE, SendWR

BATCH = 8


def write_blocks(rdma, blocks, block_bytes, queue):
    outstanding = 0
    for block in range(blocks):
        if outstanding == queue:
            rdma.expect("WRITE")
            outstanding -= BATCH
        at = block * block_bytes
        flags = e.IBV_SEND_SIGNALED if block % BATCH == BATCH - 1 else 0
        sge = SGE(rdma.mr.buf + at, block_bytes, rdma.mr.lkey)
        wr = SendWR(sg=[sge], num_sge=1, opcode=e.IBV_WR_RDMA_WRITE, send_flags=flags)
        wr.set_wr_rdma(rdma.peer["rkey"], rdma.peer["address"] + at)
        rdma.qp.post_send(wr)
        outstanding += 1
    while outstanding > 0:
        rdma.expect("WRITE")
        outstanding -= BATCH

#include "blocks.h"

#define BATCH 8

void write_blocks(struct rdma *r, struct ibv_mr *mr)
{
    int outstanding = 0;
    for (int block = 0; block < BLOCKS; block++) {
        if (outstanding == QUEUE) {
            rdma_expect(r, "WRITE");
            outstanding -= BATCH;
        }
        struct ibv_sge sge = {.addr = (uintptr_t)mr->addr + block * BLOCK_BYTES, .length = BLOCK_BYTES, .lkey = mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
        wr.send_flags = block % BATCH == BATCH - 1 ? IBV_SEND_SIGNALED : 0;
        wr.wr.rdma.remote_addr = r->peer.address + block * BLOCK_BYTES;
        wr.wr.rdma.rkey = r->peer.rkey;
        int error = ibv_post_send(r->qp, &wr, &bad);
        if (error) {
            fprintf(stderr, "ibv_post_send: %s\n", strerror(error));
            exit(1);
        }
        outstanding++;
    }
    for (; outstanding > 0; outstanding -= BATCH)
        rdma_expect(r, "WRITE");
}

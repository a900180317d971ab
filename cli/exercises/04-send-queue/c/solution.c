#include "blocks.h"

void write_blocks(struct rdma *r, struct ibv_mr *mr)
{
    /* Here: ibv_post_send, with opcode IBV_WR_RDMA_WRITE, r->peer.address and r->peer.rkey. */
    (void)r, (void)mr;
    fprintf(stderr, "write_blocks is not written yet\n");
    exit(1);
}

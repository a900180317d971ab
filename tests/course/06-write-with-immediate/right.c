#include "slots.h"

static int post_empty_receive(struct ibv_qp *qp)
{
    struct ibv_recv_wr wr = {.num_sge = 0}, *bad;
    return ibv_post_recv(qp, &wr, &bad);
}

int prepare(struct ibv_qp *qp)
{
    for (int i = 0; i < 8; i++) {
        int error = post_empty_receive(qp);
        if (error)
            return error;
    }
    return 0;
}

void write_slot(struct rdma *r, struct ibv_mr *mr, int slot)
{
    struct ibv_sge sge = {.addr = (uintptr_t)mr->addr, .length = SLOT_BYTES, .lkey = mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM}, *bad;
    wr.imm_data = htonl(slot);
    wr.wr.rdma.remote_addr = r->peer.address + slot * SLOT_BYTES;
    wr.wr.rdma.rkey = r->peer.rkey;
    if (ibv_post_send(r->qp, &wr, &bad))
        die("ibv_post_send");
    rdma_expect(r, "the WRITE failed");
}

int next_slot(struct rdma *r)
{
    struct ibv_wc wc = rdma_expect(r, "the receive failed");
    post_empty_receive(r->qp);
    return ntohl(wc.imm_data);
}
